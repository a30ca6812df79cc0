"""Loads and stores of interpreted kernels."""

import os
import subprocess
import sys

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
    assert accesses.loads == [10, 0] and accesses.stores == [0, 10] and accesses.inside and torch.equal(y, x + 1)
    assert accesses.programs == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    assert [(visit.program[0], visit.tensor, visit.first, visit.stored) for visit in accesses.visits] == [
        (program, tensor, 4 * program, tensor == 1) for program in range(3) for tensor in range(2)]
    assert accesses.visits[-1].elements.tolist() == [8, 9]


def test_what_pytorch_computes_is_noted_and_views_are_not():
    x, y = torch.arange(10.0), torch.zeros(10)
    with watched(x, y) as accesses:
        add_one_kernel[(3,)](x[::1], y.view(2, 5), 10, 0, 4)
        torch.empty_like(x)
    assert accesses.pytorch == []
    with watched(x, y) as accesses:
        add_one_kernel[(3,)](x.contiguous(), y, 10, 0, 4)
        y.mul_(x + 1)
    assert accesses.pytorch == ["add", "mul_"]


COMPILED = """
import torch
torch.cuda.is_available = lambda: True              # then kernels are compiled, and this machine could not
from tests.lab.test_watched_memory import add_one_kernel, watched
from course.ops.triton_language import INTERPRETED
x, y = torch.arange(10.0), torch.zeros(10)
with watched(x, y) as accesses:
    add_one_kernel[(3,)](x, y, 10, 0, 4)
print(INTERPRETED, accesses.loads, torch.equal(y, x + 1))
"""


@pytest.mark.slow
def test_kernels_that_are_compiled_elsewhere_are_watched_too():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True)
    assert run.stdout == "False [10, 0] True\n", run.stderr


def test_accesses_elsewhere_are_noticed_and_do_nothing():
    x, y = torch.arange(10.0), torch.zeros(10)
    with watched(x, y) as accesses:
        add_one_kernel[(3,)](x, y, 10, 10**6, 4)
    assert not accesses.inside and accesses.loads == [0, 0] and y.isnan().all()         # undefined on a GPU
    y.fill_(1)
    with watched(x) as accesses:                     # y is not among them
        add_one_kernel[(3,)](x, y, 10, 0, 4)
    assert not accesses.inside and torch.equal(y, torch.ones(10))


def test_what_lies_between_the_rows_of_a_slice_is_not_inside():
    x, y = torch.arange(10.0), torch.zeros(10)
    for last, inside in ((9, False), (10, True)):
        with watched(x[:last], y) as accesses:
            add_one_kernel[(3,)](x, y, 10, 0, 4)
        assert accesses.inside is inside and accesses.loads[0] == 10


@triton.jit
def masked_half_kernel(x, y, BLOCK: tl.constexpr):
    """Copy 2 BLOCK elements, the first half of them without a mask, of the second half the first two."""
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at))
    tl.store(y + BLOCK + at, tl.load(x + BLOCK + at, mask=at < 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_loads_with_a_mask_are_counted_and_the_rest_is_no_number(dtype):
    x, y = torch.arange(8).to(dtype), torch.zeros(8, dtype=dtype)
    with watched(x, y) as accesses:
        masked_half_kernel[(1,)](x, y, 4)
    assert accesses.loads == [6, 0] and accesses.masked_loads(0) == 2
    assert torch.equal(y[:6], x[:6]) and y[6:].isnan().tolist() == [dtype.is_floating_point] * 2


def test_kernels_run_as_before_after_watching():
    x, y = torch.arange(10.0), torch.zeros(10)
    with watched(x):
        pass
    add_one_kernel[(3,)](x, y, 10, 0, 4)
    assert torch.equal(y, x + 1)


@triton.jit
def chosen_kernel(x, y, key, n, wanted, BLOCK: tl.constexpr):
    """y = x if the number of `key` is the one wanted: a mask of a block and of one number."""
    at = tl.arange(0, BLOCK)
    mask = (at < n) & (tl.load(key) != wanted)
    tl.store(y + at, tl.load(x + at, mask=mask, other=0.0), mask=mask)


def test_a_mask_with_a_condition_on_one_number_shows_the_right_elements():
    x, y, key = torch.arange(8.0), torch.zeros(8), torch.tensor([3])
    with watched(x, y, key) as accesses:
        chosen_kernel[(1,)](x, y, key, 5, 7, 8)
    assert [visit.elements.tolist() for visit in accesses.visits if visit.tensor < 2] == [[0, 1, 2, 3, 4]] * 2
    assert accesses.loads == [5, 0, 1] and y.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]


def test_a_visit_has_its_launch_and_its_values():
    x, y = torch.arange(4.0), torch.zeros(4)
    with watched(x, y) as accesses:
        for _ in range(2):
            add_one_kernel[(1,)](x, y, 3, 0, 4)
    assert [(visit.launch, visit.values.tolist()) for visit in accesses.visits] == [
        (launch, values) for launch in (1, 2) for values in ([0, 1, 2], [1, 2, 3])]


def test_tensors_made_inside_are_watched_only_if_asked_for():
    x = torch.arange(6.0)
    for made in (False, True):
        with watched(x, made=made) as accesses:
            y, z = torch.empty(6), torch.zeros(2)
            add_one_kernel[(2,)](x, y, 6, 0, 4)
            z.add_(1)
        assert accesses.inside is made and [tensor.data_ptr() for tensor in accesses.made] == [y.data_ptr(), z.data_ptr()]
        assert accesses.stores == ([0, 6, 0] if made else [0]) and accesses.largest == 2
        assert accesses.computed == {z.untyped_storage().data_ptr()}


@triton.jit
def count_kernel(total):
    tl.atomic_add(total, 1.0)


def test_an_atomic_addition_counts_as_a_store():
    total = torch.zeros(1)
    with watched(total) as accesses:
        count_kernel[(3,)](total)
    assert accesses.stores == [3] and accesses.loads == [0] and total.item() == 3
