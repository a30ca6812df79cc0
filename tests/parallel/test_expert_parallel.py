"""Experts spread over ranks train as in one process, the parity tests notice mistakes, and bad layouts are refused."""

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch

from course import config
from course.models.experts import auxiliary_loss
from course.parallel.expert_parallel.experts import ExpertRoute
from course.ranks.notebook_ranks import RankError, ranks
from course.utils.errors import CourseError
from tests.parallel.test_parity import assert_equal_to_serial, largest_error, layout, slow, train

# each with every axis, and triples; the second kind of experts has all that the first has not
BIASED = ("model.routing=sigmoid", "model.mlp=swiglu", "model.norm=rms", "model.balance_rate=0.01", "model.capacity_factor=1",
          "model.dropout=0.2", "train.recompute=full")
INTERLEAVED = "schedule=interleaved chunks=2 micro=2"
FAST = ["dp=2 ep=2", "cp=2 tp=2 sp=true ep=2", "dp=2 ep=2 dispatch=gather"]
LAYOUTS = ["dp=2", "cp=2 ep=2", "dp=4 ep=2 bucket_mb=0.01", "dp=4 ep=2 zero=1", "dp=4 ep=2 zero=3", "dp=2 cp=2 ep=4 zero=2",
           "dp=2 tp=2 ep=2", "dp=2 tp=2 sp=true ep=2", "dp=4 ep=4 zero=3 dispatch=gather",
           "dp=2 tp=2 sp=true ep=2 zero=1 dispatch=gather", "pp=2 dp=2 ep=2 micro=2 dispatch=gather",
           f"pp=2 dp=2 ep=2 {INTERLEAVED}", "dp=4 cp=2 ep=4 order=pp-cp-dp-tp"]
TRIPLES = ["dp=2 cp=2 tp=2 sp=true ep=4 zero=1", "pp=2 dp=2 tp=2 sp=true ep=2 zero=3 micro=2",
           "pp=2 dp=2 cp=2 ep=2 micro=2 order=cp-pp-tp-dp"]
OTHER = ["dp=2 ep=2", "dp=4 ep=2 dispatch=gather",
         "cp=2 ep=2 context=gather", "dp=4 ep=2 zero=3", "pp=2 dp=2 ep=2 micro=2", "dp=2 cp=2 tp=2 sp=true ep=2"]


@pytest.mark.parametrize("spec", [*FAST, *slow([*LAYOUTS, *TRIPLES])])
def test_parity_of_experts(spec):
    assert_equal_to_serial(*layout(spec), (), "moe")


@pytest.mark.parametrize("spec", slow(OTHER))
def test_parity_of_balanced_experts_with_capacity(spec):
    assert_equal_to_serial(*layout(spec), BIASED, "moe")


def average_over_all_of_dp(model: Any, layout: Any, *settings: Any) -> Any:
    """What averages gradients, as if all ranks held the same experts."""
    from course.parallel import build_gradient_sync

    for parameter, where in layout.placements.items():
        layout.placements[parameter] = dataclasses.replace(where, average_over=layout.mesh.dp_cp)
    return build_gradient_sync(model, layout, *settings)


def enter(change: Any) -> Any:
    """`ExpertRoute.enter` with changed gates, the two numbers of each token."""
    before = ExpertRoute.enter
    return lambda route, x: before(route, change(x) if x.is_floating_point() and x.shape[-1] == 2 else x)


def returned(x: torch.Tensor, sent: Any, received: Any, axis: Any) -> torch.Tensor:
    """Outputs that come back one row late."""
    from course.parallel.mappings import ExchangeRows

    return ExchangeRows.apply(x, received, sent, axis).roll(1, 0)


def twice(*values: Any) -> torch.Tensor:
    """The auxiliary loss of both ranks."""
    return 2 * auxiliary_loss(*values)


HERE = "course.parallel.expert_parallel.experts.ExpertRoute"
MUTATIONS = {
    "tokens returned in the wrong order": ("course.parallel.mappings.combine", returned),
    "gates not applied": (f"{HERE}.enter", enter(torch.ones_like)),
    "the router's gradient lost": (f"{HERE}.enter", enter(torch.Tensor.detach)),
    "experts averaged over all of dp": ("course.training.assemble.build_gradient_sync", average_over_all_of_dp),
    "experts not divided by ep": (f"{HERE}.weight", lambda route, weight: weight),
    "the auxiliary loss counted by every rank": ("course.models.experts.auxiliary_loss", twice)}


@pytest.mark.parametrize("name", MUTATIONS)
def test_parity_notices(name):
    target, replacement = MUTATIONS[name]
    assert largest_error({target: replacement}, "dp=2 ep=2", "moe") > 1e-6


def test_parity_notices_biases_by_the_load_of_one_rank():
    target = "course.parallel.expert_parallel.experts.LoadBalance.__init__"
    from course.parallel.expert_parallel.experts import LoadBalance

    before = LoadBalance.__init__

    def alone(balance: Any, *given: Any) -> None:
        before(balance, *given)
        balance.dp = dataclasses.replace(balance.dp, size=1)

    assert largest_error({target: alone}, "dp=2", "moe", ("model.balance_rate=0.01",)) > 1e-6


def run(overrides: list[str]) -> None:
    """`course train` with a small model on the ranks that there are."""
    from course.training import trainer
    from tests.parallel.test_parity import MODELS

    preset, small = MODELS["moe"]
    trainer.main(config.load(preset, [*small, "train.eval_every=0", "log.every=1", "log.tensorboard=false",
                                      "model.balance_rate=0.01", "optim.name=adam", "optim.lr=1e-3",
                                      "optim.schedule=constant", *overrides]))


@pytest.mark.slow
def test_a_run_goes_on_with_its_experts_elsewhere(tmp_path):
    """Two steps with experts on two ranks, resharded, and two more in one process: the losses of the undisturbed run."""
    from course.convert import reshard
    from course.training.run_log import read_metrics

    def losses(folder: Any) -> list[float]:
        return [record["loss"] for record in read_metrics(folder / "metrics.jsonl")]

    here = [f"log.dir={tmp_path}", "train.steps=4"]
    ranks(1)(run, [*here, "log.name=whole"])
    ranks(2)(run, [*here, "log.name=apart", "parallel.ep=2", "parallel.zero=1", "train.steps=2"])
    folder = tmp_path / "gpt-moe-demo"
    reshard.main(folder / "apart", ["parallel.dp=4", "parallel.ep=4", "parallel.zero=3"], "cut", lambda text: None)
    for name, size, settings in (("apart", 1, []), ("cut", 4, ["parallel.ep=4", "parallel.zero=3"])):
        ranks(size)(run, [*here, f"log.name={name}", *settings])
        assert losses(folder / name) == pytest.approx(losses(folder / "whole"), rel=1e-9)
    with pytest.raises(RankError, match=r"router.weight is \[8, 16\] here, but the checkpoint has it as \[4, 16\]"):
        ranks(1)(run, [*here, "log.name=whole", "train.steps=5", "model.experts=8"])


@pytest.mark.parametrize(("settings", "sentence"), [
    (["parallel.ep=3"], r"parallel.ep=3 does not divide model.experts=8: choose a divisor of 8"),
    (["model.top_k=9"], r"model.top_k=9 is more than model.experts=8: choose at most 8"),
    (["parallel.dp=3", "parallel.ep=2"], r"parallel.ep=2 does not divide the 3 ranks of dp x cp.*choose one of 1, 3"),
    (["model.capacity_factor=-1"], r"model.capacity_factor=-1.* is negative: use 0 or more"),
    (["model.moe_every=5"], r"no block has experts: choose at most 4"),
    (["model.experts=0", "parallel.ep=2"], r"this model has none: set model.experts of a GPT, or parallel.ep=1"),
    (["graphs=true"], r"tokens choose their experts during it: set graphs=false, or parallel.dispatch=gather and precision=bf16"),
    (["graphs=true", "precision=bf16", "parallel.ep=2"], r"set graphs=false, or parallel.dispatch=gather"),
    (["parallel.cp=2", "parallel.ep=2", "parallel.dispatch=gather"], r"use parallel.dispatch=all_to_all"),
    (["parallel.data=ddp", "parallel.ep=2"], r"use parallel.data=bucketed"),
    (["kernels=triton"], r"use kernels=pytorch")])
def test_what_cannot_be_is_a_sentence(settings, sentence):
    with pytest.raises(CourseError, match=sentence):
        config.load("gpt-moe-demo", settings)


def test_ranks_that_do_not_divide_are_a_sentence():
    with pytest.raises(RankError, match=r"parallel.ep=2 does not divide the 1 ranks of dp x cp"):
        ranks(2)(train, ["parallel.ep=2", "parallel.tp=2"], "moe")


@pytest.mark.slow
@pytest.mark.parametrize("more", [["compile=true"], ["precision=bf16"], ["precision=bf16", "compile=true"], ["optim.name=muon"]])
def test_it_learns_in_other_ways(more):
    """Experts with torch.compile, in 16 bits, and with Muon, which leaves them to AdamW: the loss falls."""
    from course.parallel import build_mesh, join
    from course.training.assemble import assemble

    c = config.load("gpt-moe-demo", ["train.device=cpu", "optim.warmup=0", "model.depth=2", "model.balance_rate=0.01", *more])
    training = assemble(c, build_mesh(c.parallel, join("cpu")))
    batch = training.model.example(8, torch.device("cpu"))
    losses = [training.step(batch)[0].item() for _ in range(8)]
    assert losses[-1] < losses[0] - 0.3


def test_the_flops_are_those_of_the_active_experts():
    """One expert of the MLP's width for every token, and no other: the dense model, and its routers."""
    from course.planner import flops

    def count(*more: str) -> int:
        return flops.step(config.load("gpt-demo", more).model, 1)

    sparse = count("model.experts=8", "model.top_k=1", "model.moe_every=2")
    assert sparse == count() + 3 * 2 * (2 * 64 * 64 * 8)
    with mock.patch("course.planner.flops.more_by_experts", lambda c: 0):
        assert count("model.experts=8") == count()
