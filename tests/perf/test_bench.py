"""Measuring: medians of real work."""

import time

import torch

from course.perf import bench

CPU = torch.device("cpu")


def test_seconds_is_the_median_of_one_call():
    assert 0.009 < bench.seconds(lambda: time.sleep(0.01), CPU, laps=3, least=0.02) < 0.05


def test_larger_work_takes_longer():
    small, large = (bench.matmul(n, n, n, torch.float32, CPU) for n in (64, 512))
    assert large > 3 * small
    assert bench.copy(32, CPU) > 3 * bench.copy(0.5, CPU)


def test_ceilings_have_units_that_make_sense():
    found = bench.ceilings(CPU, largest=256)
    assert 1e8 < found["matmul fp32"] < 1e14 and 1e8 < found["copy"] < 1e13


def test_tf32_is_switched_back():
    before = torch.backends.cuda.matmul.allow_tf32
    with bench.tf32():
        assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 == before
