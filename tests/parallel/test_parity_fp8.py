"""FP8 in every layout: the scales of one process, so the same eight bits, so the same training.

Everything but the FP8 matmuls is in float64 here, where layouts differ by rounding alone. The bits then differ where rounding
takes a number over the edge between two FP8 numbers, one in some 10^12; so histories, losses and parameters are equal to 1e-10.
"""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from course.parallel.placement import Box
from course.ranks.notebook_ranks import ranks
from tests.parallel.test_parity import INTERLEAVED, ZEROS, layout, slow

Result = tuple[list[float], dict[str, list[tuple[Box, torch.Tensor]]], dict[str, torch.Tensor]]
SMALL = ["precision=fp8", "model.dim=32", "fp8.history=2", "parallel.overlap=none"]


def train(overrides: list[str], kind: str = "vit") -> Result:
    """Three steps in a layout: losses, every parameter's piece, the amax histories."""
    from course.fp8 import native
    from tests.parallel import test_parity

    convert, made = native.convert, []
    with (mock.patch("course.fp8.native.convert", lambda *given: made.append(convert(*given)) or made[0]),
          mock.patch("course.training.assemble.parameter_dtype", lambda precision: torch.float64),
          mock.patch("course.training.step.autocast", lambda *given: nullcontext())):
        losses, _, pieces = test_parity.train([*SMALL, *overrides], kind)
    return losses, pieces, {name: x.clone() for name, x in made[0].state().items()}


SERIAL: dict[tuple[str, ...], Result] = {}


def serial(*extra: str, kind: str = "vit") -> Result:
    if (kind, *extra) not in SERIAL:
        SERIAL[kind, *extra], = ranks(1)(train, list(extra), kind)
    return SERIAL[kind, *extra]


def gaps(result: Result, reference: Result) -> tuple[float, float, float]:
    """The largest relative differences of losses and amaxes, and the largest of the parameters."""
    (losses, pieces, amaxes), (expected, whole, histories) = result, reference
    loss = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
    amax = max((amaxes[name] / histories[name] - 1).abs().nan_to_num(0).max().item() for name in histories) if histories else 0.0
    parts = [(part - whole[name][0][1][tuple(slice(*side) for side in box)]).abs().max().item()
             for name, held in pieces.items() for box, part in held]
    return loss, amax, max(parts)


LAYOUTS = ["tp=2", "tp=2 sp=true", "dp=2", "cp=2", "pp=2 micro=2"]
MORE = [f"dp=2 {ZEROS}", "dp=2 data=ddp", "cp=2 context=all_to_all", f"pp=2 {INTERLEAVED}", "dp=2 tp=2 sp=true",
        "cp=2 tp=2 sp=true", "pp=2 tp=2 sp=true micro=2", "pp=2 cp=2 micro=2", f"pp=2 dp=2 tp=2 sp=true {ZEROS} {INTERLEAVED}"]


@pytest.mark.parametrize("spec", [*LAYOUTS, *slow(MORE)])
def test_delayed_scaling_is_that_of_one_process(spec):
    reference = serial("fp8.recipe=delayed")
    assert len(reference[2]) == 5 * 4 and all(x[:, 0].all() for x in reference[2].values())         # 5 blocks of 4 linears
    for rank, result in enumerate(ranks(layout(spec)[0])(train, layout(spec)[1])):
        loss, amax, parameters = gaps(result, reference)
        assert loss < 1e-10 and amax < 1e-6 and parameters < 1e-10, f"rank {rank}: {loss:.1e} {amax:.1e} {parameters:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["tp=2", "tp=2 sp=true", "pp=2 tp=2 micro=2", "cp=2 context=all_to_all"])
@pytest.mark.parametrize("kind", ["gpt", "dit"])
def test_delayed_scaling_of_other_models(kind, spec):
    reference = serial(kind=kind)
    for result in ranks(layout(spec)[0])(train, layout(spec)[1], kind):
        loss, amax, parameters = gaps(result, reference)
        assert loss < 1e-10 and amax < 1e-6 and parameters < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["tp=2", "tp=2 sp=true"])
def test_delayed_scaling_of_normed_heads(spec):
    wide = ["model.head_dim=16", "model.mlp_width=64"]                  # FP8 takes multiples of 16
    reference = serial(*wide, kind="qwen")
    for result in ranks(layout(spec)[0])(train, [*layout(spec)[1], *wide], "qwen"):
        loss, amax, parameters = gaps(result, reference)
        assert loss < 1e-10 and amax < 1e-6 and parameters < 1e-10


@pytest.mark.parametrize("spec", ["tp=2", *slow(["tp=2 sp=true"])])
def test_current_scaling_over_tp_is_that_of_one_process(spec):
    """A tensor that tp cuts has one scale: its amax is reduced over tp at once."""
    for result in ranks(2)(train, ["fp8.recipe=current", *layout(spec)[1]]):
        loss, _, parameters = gaps(result, serial("fp8.recipe=current"))
        assert loss < 1e-10 and parameters < 1e-10


@pytest.mark.slow
def test_current_scaling_over_dp_is_that_of_micro_batches():
    """Each rank's samples have scales of their own, as each micro-batch has."""
    for result in ranks(2)(train, ["fp8.recipe=current", "parallel.dp=2"]):
        loss, _, parameters = gaps(result, serial("fp8.recipe=current", "train.micro_batch=4"))
        assert loss < 1e-10 and parameters < 1e-10


@pytest.mark.parametrize(("spec", "recipe"), [("tp=2", "delayed"), ("tp=2", "current"), ("dp=2", "delayed"), ("cp=2", "delayed")])
def test_an_amax_that_is_not_reduced_is_noticed(spec, recipe):
    def wrong(overrides: list[str]) -> Any:
        with mock.patch("course.fp8.native.largest_over", lambda amax, axis: amax):
            return train(overrides)

    found = ranks(2)(wrong, [f"fp8.recipe={recipe}", *layout(spec)[1]])
    assert max(gaps(result, serial(f"fp8.recipe={recipe}"))[2] for result in found) > 1e-5
