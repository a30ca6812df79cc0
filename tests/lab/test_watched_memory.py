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


@triton.jit
def one_number_kernel(x, y, n, other):
    """y = x[n] if there is such an element, else `other`; y[1] = 0 in its place."""
    tl.store(y, tl.load(x + n, mask=n >= 0, other=other))
    tl.store(y + 1, tl.load(x + n, mask=n >= 0, other=0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n,found", [(-5, [0, 0]), (2, [3, 3])])
def test_one_number_that_a_mask_leaves_out_can_be_zero(dtype, n, found):
    """The interpreter takes an `other` of one number that is 0 for none."""
    x, y = torch.arange(1, 5).to(dtype), torch.ones(2, dtype=dtype)
    with watched(x, y) as accesses:
        one_number_kernel[(1,)](x, y, n, 0.0)
    assert y.tolist() == found and accesses.inside


@triton.jit
def first_kernel(x, y, loads: tl.constexpr, wait: tl.constexpr, BLOCK: tl.constexpr):
    """Load or store one number, then store a tile that holds it; the threads wait in between, if they do, at `wait`."""
    tile = tl.load(y + tl.arange(0, BLOCK))
    if loads:
        tl.store(y, tl.load(x + 1))
    else:
        tl.store(x + 1, 5.0)
    if wait == "barrier":
        tl.debug_barrier()
    if wait == "sum":
        tile = tile * tl.sum(tile, 0)
    if wait == "maximum":
        tile = tile * tl.max(tile, 0)
    if wait == "scan":
        tile = tl.cumsum(tile, 0)
    tl.store(x + tl.arange(0, BLOCK), tile)


@pytest.mark.parametrize("wait", ["", "barrier", "sum", "maximum", "scan"])
@pytest.mark.parametrize("loads", [False, True])
def test_one_number_and_a_tile_race_unless_threads_wait(loads, wait):
    x, y = torch.ones(4), torch.ones(4)
    with watched(x, y) as accesses:
        for _ in range(2):                           # a launch begins after the one before it
            first_kernel[(2,)](x, y, loads, wait, 4)
    assert {found for found in accesses.raced if found[0] == 0} == (set() if wait else {(0, 1)})


@triton.jit
def in_place_kernel(x, total, BLOCK: tl.constexpr):
    """Double a row of two tiles in place, which needs no waiting, and add up its numbers."""
    for start in range(0, 2 * BLOCK, BLOCK):
        tile = tl.load(x + start + tl.arange(0, BLOCK))
        tl.atomic_add(total + tl.arange(0, BLOCK) * 0, tile)
        tl.store(x + start + tl.arange(0, BLOCK), 2 * tile)
    tl.atomic_add(total, 1.0)


def test_tiles_in_their_place_and_atomic_additions_do_not_race():
    x, total = torch.arange(8.0), torch.zeros(1)
    with watched(x, total) as accesses:
        in_place_kernel[(1,)](x, total, 4)
    assert not accesses.raced and torch.equal(x, 2 * torch.arange(8.0)) and total.item() == 29


@triton.jit
def copy_kernel(x, y, n, BLOCK: tl.constexpr):
    """Copy an element at a time."""
    for at in range(n):
        tl.store(y + at, tl.load(x + at))


def test_programs_and_launches_are_no_threads_of_each_other():
    x, y = torch.arange(4.0), torch.zeros(4)
    with watched(x, y) as accesses:
        copy_kernel[(1,)](x, y, 4, 4)
        add_one_kernel[(1,)](y, x, 4, 0, 4)
    assert not accesses.raced


def test_a_new_tensor_takes_a_shape_and_no_numbers_of_another():
    x = torch.arange(6.0)
    with watched(x) as accesses:
        x.new_zeros(2), x.new_full((3,), 1.0), torch.ones_like(x[:1])
    assert accesses.largest == 3 and not accesses.used and len(accesses.made) == 3
    with watched(x) as accesses:
        x[2:4].sum()
    assert accesses.used == {x.data_ptr()} and accesses.largest == 2


def test_kernels_may_use_a_tensor_made_of_given_numbers():
    y = torch.zeros(4)
    with watched(y, made=True) as accesses:
        add_one_kernel[(1,)](torch.tensor([1.0, 2.0, 3.0]), y, 3, 0, 4)
    assert accesses.inside and y.tolist() == [2, 3, 4, 0] and accesses.largest == 3 and not accesses.pytorch
    assert accesses.computed == {accesses.made[0].data_ptr()}


def test_an_empty_tensor_holds_no_number():
    with watched():
        made = torch.empty(3), torch.empty_like(torch.zeros(2, dtype=torch.bfloat16)), torch.zeros(1).new_empty(2, 2)
    assert all(x.isnan().all() for x in made)


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


@triton.jit
def swap_kernel(x, place):
    tl.atomic_cas(x + place, 0, 5)


def test_an_atomic_operation_counts_as_a_store():
    total, x = torch.zeros(1), torch.zeros(4, dtype=torch.int32)
    with watched(total, x) as accesses:
        count_kernel[(3,)](total)
        swap_kernel[(1,)](x, 2)
    assert accesses.stores == [3, 1] and accesses.loads == [0, 0] and total.item() == 3 and x.tolist() == [0, 0, 5, 0]
    with watched(x) as accesses:
        swap_kernel[(1,)](x, 10**6)
    assert not accesses.inside and accesses.stores == [0]
