"""Optimizers beside SGD train in every layout as in one process, in float64."""

from typing import Any

import pytest
import torch

from course.ops.muon import Muon, orthogonal_update, orthogonalize
from course.parallel.whole_weights import slices
from tests.parallel.test_parity import assert_equal_to_serial, largest_error, layout, slow

# a large eps, because Adam divides gradients that are zero up to rounding by their own size
ADAMW = ("optim.name=adamw", "optim.weight_decay=0.1", "optim.lr=0.01", "optim.eps=1e-3", "optim.clip=0.05")


@pytest.mark.parametrize("spec", ["dp=2 zero=true bucket_mb=0.01", "dp=2 zero=3", *slow(["dp=2 tp=2 sp=true zero=2", "pp=2"])])
def test_adamw_trains_as_in_one_process(spec):
    assert_equal_to_serial(*layout(spec), ADAMW)


MUON = ("optim.name=muon", *ADAMW[1:])
KINDS = [("vit", "dp=2 zero=2"), ("llama", "dp=2 tp=2 sp=true zero=3"), ("dit", "pp=2"), ("gpt", "dp=2 cp=2 zero=true")]


@pytest.mark.parametrize("spec", ["dp=2", "dp=2 zero=true bucket_mb=0.01", "dp=2 zero=3", "tp=2 sp=true", *slow([
    "dp=2 zero=2", "dp=2 tp=2 zero=3", "dp=2 tp=2 sp=true zero=1", "pp=2", "cp=2", "dp=4 zero=3 shard=2",
    "pp=2 dp=2 tp=2 zero=2"])])
def test_muon_trains_as_in_one_process(spec):
    assert_equal_to_serial(*layout(spec), MUON)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "spec"), KINDS)
def test_muon_trains_other_models_as_in_one_process(kind, spec):
    assert_equal_to_serial(*layout(spec), (*MUON, "optim.clip=0"), kind)


NEXT_MOMENTUM = Muon.next_momentum


def without_scale(whole: torch.Tensor) -> torch.Tensor:
    """The update of a weight without its scale."""
    stacked = whole.flatten(1, -2) if whole.dim() > 2 else whole
    return orthogonalize(stacked).view(whole.shape)


def scaled_by_part(part: torch.Tensor) -> torch.Tensor:
    """The update of a weight, with the scale of half of its rows."""
    rows, columns = (part.flatten(1, -2) if part.dim() > 2 else part).shape[-2:]
    return orthogonal_update(part) * (max(rows // 2, columns) / max(rows, columns)) ** 0.5


def coupled_decay(muon: Any, parameter: torch.nn.Parameter, skip: torch.Tensor) -> torch.Tensor:
    """`Muon.next_momentum` with the weight decay in the gradient, and none beside it."""
    muon.param_groups[0]["weight_decay"] = 0.0
    parameter.grad = parameter.grad + 0.1 * muon.grad_scale * parameter
    return NEXT_MOMENTUM(muon, parameter, skip)


def others_momentum(muon: Any, parameter: torch.nn.Parameter, skip: torch.Tensor) -> torch.Tensor:
    """`Muon.next_momentum` on two ranks that swap momenta first."""
    momentum = muon.state[parameter]["momentum"]
    both = momentum.clone()
    torch.distributed.all_reduce(both)
    momentum.copy_(both - momentum)
    return NEXT_MOMENTUM(muon, parameter, skip)


def early(whole: torch.Tensor, part: Any) -> torch.Tensor:
    """`whole_weights.cut` that begins one number early."""
    return whole[slices(part.box)].reshape(-1).roll(1)[part.first:part.stop]


# what is broken, by what, and a layout that must notice
WEIGHTS, OPTIMIZER = "course.parallel.whole_weights", "course.ops.muon"
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "each part is orthogonalized alone": ({f"{WEIGHTS}.WholeWeights.gather": lambda _, parts: [*parts],
                                           f"{WEIGHTS}.WholeWeights.scatter": lambda _, wholes: [x.flatten() for x in wholes]},
                                          "tp=2"),
    "a part of the result that begins one number early": ({f"{WEIGHTS}.cut": early}, "dp=2 zero=3"),
    "the momentum of the other rank's part": ({f"{OPTIMIZER}.Muon.next_momentum": others_momentum}, "tp=2"),
    "the scale of a part": ({f"{OPTIMIZER}.orthogonal_update": scaled_by_part}, "tp=2"),
    "the scale forgotten": ({f"{OPTIMIZER}.orthogonal_update": without_scale}, "dp=2 zero=3"),
    "weight decay in the gradient": ({f"{OPTIMIZER}.Muon.next_momentum": coupled_decay}, "dp=2 zero=3")}


@pytest.mark.parametrize("name", MISTAKES)
def test_parity_of_muon_notices(name):
    """The test itself can fail: each of these mistakes changes some parameter."""
    mistakes, spec = MISTAKES[name]
    assert largest_error(mistakes, spec, "vit", MUON) > 1e-6
