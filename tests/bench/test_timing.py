"""Measuring: medians of real work."""

import time

import torch

from course.bench import timing

CPU = torch.device("cpu")


def test_seconds_is_the_median_of_one_call():
    assert 0.009 < timing.seconds(lambda: time.sleep(0.01), CPU, laps=3, least=0.02) < 0.05


def test_larger_work_takes_longer():
    small, large = (timing.matmul(n, n, n, torch.float32, CPU) for n in (64, 512))
    assert large > 3 * small
    assert timing.copy(32, CPU) > 3 * timing.copy(0.5, CPU)


def test_ceilings_have_units_that_make_sense():
    found = timing.ceilings(CPU, largest=256)
    assert 1e8 < found["matmul fp32"] < 1e14 and 1e8 < found["copy"] < 1e13


def test_tf32_is_switched_back():
    before = torch.backends.cuda.matmul.allow_tf32
    with timing.tf32():
        assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 == before
