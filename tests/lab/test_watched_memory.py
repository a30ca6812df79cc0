"""Loads and stores of interpreted kernels."""

import pytest
import torch

from course.lab.instruments.watched_memory import watched
from course.ops.triton_language import INTERPRETED, tl, triton

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")


@triton.jit
def add_one_kernel(x, y, n, ahead, BLOCK: tl.constexpr):
    """y = x + 1, reading `ahead` elements further on."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at + ahead, mask=at < n) + 1, mask=at < n)


def test_loads_are_counted_without_what_the_mask_leaves_out():
    x, y = torch.arange(10.0), torch.zeros(10)
    with watched(x, y) as accesses:
        add_one_kernel[(3,)](x, y, 10, 0, 4)
    assert accesses.loads == [10, 0] and accesses.inside and torch.equal(y, x + 1)
    assert accesses.visits == [((0, 0, 0), 0, 0), ((1, 0, 0), 0, 4), ((2, 0, 0), 0, 8)]


def test_accesses_elsewhere_are_noticed_and_do_nothing():
    x, y = torch.arange(10.0), torch.zeros(10)
    with watched(x, y) as accesses:
        add_one_kernel[(3,)](x, y, 10, 10**6, 4)
    assert not accesses.inside and accesses.loads == [0, 0] and torch.equal(y, torch.ones(10))
    with watched(x) as accesses:                     # y is not among them
        add_one_kernel[(3,)](x, y, 10, 0, 4)
    assert not accesses.inside and torch.equal(y, torch.ones(10))


def test_kernels_run_as_before_after_watching():
    x, y = torch.arange(10.0), torch.zeros(10)
    with watched(x):
        pass
    add_one_kernel[(3,)](x, y, 10, 0, 4)
    assert torch.equal(y, x + 1)
