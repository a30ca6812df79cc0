"""Muon's predicted time: its products are those that it computes, and ranks share them."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from course.config import Config, load
from course.models import build_model
from course.models.linears import linears
from course.ops.muon import orthogonal_update
from course.parallel import serial_placements
from course.planner import collectives, hardware, muon_time, step_time
from course.planner.rank_workload import workload_of
from course.planner.step_time import predict
from course.training.optimizer import is_hidden_matrix

H200 = hardware.load("h200")
LLAMA = ["model.mlp=swiglu", "model.kv_heads=2", "model.mlp_width=96"]
MODELS = {"vit": ("vit-demo", []), "gpt": ("gpt-demo", []), "llama": ("gpt-demo", LLAMA), "dit": ("dit-demo", [])}

pytestmark = pytest.mark.usefixtures("rules")


def large(*settings: str) -> Config:
    return load("gpt-7b", ["optim.name=muon", "train.global_batch=8", "train.micro_batch=1", *settings])


@pytest.mark.parametrize("kind", MODELS)
def test_the_flops_of_a_block_are_those_that_muon_computes(kind):
    preset, settings = MODELS[kind]
    m = load(preset, settings).model
    shapes = [place.global_shape for place in serial_placements(build_model(m)).values()
              if is_hidden_matrix(place) and place.name.startswith("blocks.0.")]
    with FlopCounterMode(display=False) as counter:
        for shape in shapes:
            orthogonal_update(torch.ones(shape))
    stacks = [muon_time.stack(linear, m) for linear in linears(m)]
    assert 5 * sum(2 * math.prod(sizes) for one in stacks for sizes in muon_time.products(*one)) == counter.get_total_flops()
    sizes = [sorted((rows, columns)) for _, rows, columns in stacks]
    formula = sum(5 * number * (4 * m**2 * n + 2 * m**3) for (number, *_), (m, n) in zip(stacks, sizes, strict=True))
    assert formula == counter.get_total_flops()


def test_large_products_run_at_the_rate_of_large_matmuls():
    """What is left of a weight's time is passes over memory."""
    local, sizes = workload_of(large(), H200, 1), (1, 4096, 16384)
    flops = sum(5 * 2 * math.prod(each) for each in muon_time.products(*sizes))
    assert flops == 5 * (4 * 4096**2 * 16384 + 2 * 4096**3)
    numbers = 5 * (7 * 4096**2 + 5 * 4096 * 16384) + 9 * 4096 * 16384
    moved = 2 * numbers / (local.kernels.hardware.bandwidth * 0.8)
    found = muon_time.orthogonalize_time(local, *sizes)
    assert flops / (0.68 * 989e12) < found < 1.2 * (flops / (0.68 * 989e12) + moved)


def test_ranks_that_hold_copies_or_parts_share_the_products():
    block = sum(muon_time.orthogonalize_time(workload_of(large(), H200, 1), *muon_time.stack(linear, large().model))
                for linear in linears(large().model))
    for layout in ("dp=8", "dp=8 zero=3", "tp=8", "dp=4 tp=2"):
        local = workload_of(large(*(f"parallel.{key}" for key in layout.split())), H200, 8)
        rest = muon_time.own_time(local, 32) + muon_time.exchange_time(local, 32)
        assert muon_time.muon_time(local, 32) - rest == pytest.approx(32 * block / 8)


def test_more_ranks_than_weights_take_the_time_of_the_largest_weight():
    local = workload_of(large("model.depth=1", "parallel.dp=8"), H200, 8)
    rest = muon_time.own_time(local, 1) + muon_time.exchange_time(local, 1)
    largest = max(muon_time.orthogonalize_time(local, *muon_time.stack(linear, local.m)) for linear in linears(local.m))
    assert muon_time.muon_time(local, 1) - rest == pytest.approx(largest)


@pytest.mark.parametrize(("layout", "gathered", "scattered"), [
    ("dp=8", 0, 1), ("dp=8 zero=1", 1 / 8, 1 / 8), ("dp=8 zero=3 shard=2", 1 / 8, 1 / 2), ("tp=8", 1 / 8, 1 / 8),
    ("dp=4 tp=2", 1 / 8, 1 / 2)])
def test_ranks_exchange_what_others_hold(layout, gathered, scattered):
    """As shares of all matrices: copies need not be gathered, but their results are sent to all."""
    local = workload_of(large(*(f"parallel.{key}" for key in layout.split())), H200, 8)
    size, group = 2 * 32 * sum(linear.k * linear.n for linear in linears(local.m)), local.groups["all"]
    expected = collectives.all_to_all(gathered * size, group) + collectives.all_to_all(scattered * size, group)
    copied = muon_time.passes(local, [2 * size / 8, 2 * size * scattered])
    assert muon_time.exchange_time(local, 32) - copied == pytest.approx(expected)


def test_muon_updates_the_rest_as_adamw_does():
    """Without the matrices' own time, what is left is AdamW of all other parameters."""
    muon, adamw = (workload_of(large(f"optim.name={name}"), H200, 1) for name in ("muon", "adamw"))
    weights, hidden = 7e9, 32 * sum(muon_time.on_rank(muon))
    rest = step_time.optimizer_time(muon, weights, 32) - muon_time.muon_time(muon, 32)
    saved = muon.kernels.memory("adam", 28 * weights) - muon.kernels.memory("adam", 28 * (weights - hidden))
    assert rest == pytest.approx(step_time.optimizer_time(adamw, weights, 32) - saved)
    assert predict(large("parallel.dp=8"), H200).optimizer > predict(large("parallel.dp=8", "optim.name=adamw"), H200).optimizer
