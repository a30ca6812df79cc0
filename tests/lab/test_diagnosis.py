"""What is said of an answer that no known mistake explains."""

import pytest
import torch

from course.lab.checks import diagnosis, return_values
from course.lab.instruments.bytes_sent import WORDS, excess_kinds, piece_bytes, within_budget
from course.ranks.notebook_ranks import ranks

RIGHT = torch.tensor([1.0, 2.0, 0.0, 4.0], dtype=torch.float64)


@pytest.mark.parametrize(("came", "words"), [
    ([2.0, 1.0, 0.0, 4.0], "in another order"),
    ([3.0, 6.0, 0.0, 12.0], "every number is 3 times"),
    ([-1.0, -2.0, 0.0, -4.0], "every number is -1 times"),
    ([1.5, 2.5, 0.5, 4.5], "every number is 0.5 too large"),
    ([1.0 + 1e-6, 2.0, 0.0, 4.0], "nearly right"),
    ([1.0, 2.0, 0.0, float("inf")], "an infinity"),
    ([1.0, 2.0, 0.0, 0.0], "a part is left out"),
    ([1.0, 2.0, 7.0, 4.0], "something counts that should not"),
    ([1.0, 2.0, 3e200, 4.0], "unwritten memory"),
    ([0.0, 0.0, 0.0, 0.0], "all that comes out is zero"),
    ([5.0, 2.0, 1.0, 9.0], ""),
    ([1.0, 2.0], ""),
])
def test_wrong_numbers_are_described(came, words):
    found = diagnosis.describe_pattern(RIGHT, torch.tensor(came, dtype=torch.float64))
    assert words in found and bool(words) == bool(found)


def test_ranks_that_are_wrong_are_told_from_those_that_are_right():
    wrong = RIGHT, 2 * RIGHT
    assert diagnosis.diagnose_numbers([None, wrong]) == (
        "right on rank 0 and wrong on rank 1: look at what depends on the rank; every number is 2 times what it should be")
    assert diagnosis.diagnose_numbers([wrong, wrong]) == "every number is 2 times what it should be"
    assert diagnosis.diagnose_numbers([wrong] * 4, fewer=2).startswith("right on 2 ranks and wrong on 4: look for")


@pytest.mark.parametrize(("losses", "words"), [([1.0, 2.1, 3.1], "a gradient is wrong"),
                                               ([1.1, 2.0, 3.0], "look at the forward pass")])
def test_losses_say_which_pass_is_wrong(losses, words):
    assert words in diagnosis.diagnose_training([(torch.tensor([1.0, 2.0, 3.0]), torch.tensor(losses))])


def test_a_loss_within_the_tolerance_is_right():
    losses = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    pair = losses, losses * torch.tensor([1 + 1e-7, 1.0, 1.1], dtype=torch.float64)
    assert "a later one is not" in diagnosis.diagnose_training([pair], tolerance=1e-5)


def test_weights_alone_blame_a_gradient():
    assert "some parameter gets a wrong gradient" in diagnosis.diagnose_training([None, (RIGHT, 2 * RIGHT)], weights=True)


CALL = "The ranks disagree at collective 3 of ranks 0 and 1: rank 0 {} in line 4 of the cell: `f(x)`; rank 1 {} in line {} of {}."


@pytest.mark.parametrize(("told", "hint"), [
    (CALL.format("all-reduce of (3, 2) float64", "all-reduce of (4, 2) float64", 9, "mesh.py: `g(y)`"), diagnosis.OTHER_LINES),
    (CALL.format("all-reduce of (3, 2) float64", "all-reduce of (4, 2) float64", 4, "the cell: `f(x)`"), diagnosis.OTHER_SHAPES),
    (CALL.format("all-reduce of (3, 2) float32", "all-reduce of (3, 2) bfloat16", 4, "the cell: `f(x)`"),
     diagnosis.OTHER_FORMATS),
    (CALL.format("send to 1 of (7,) float64", "recv from 0 of (1,) float64", 4, "the cell: `f(x)`").replace(
        "collective 3 of ranks 0 and 1", "message 3 from rank 0 to rank 1"), diagnosis.OTHER_MESSAGES),
    ("Rank 0 waits at collective 1 of ranks 0 and 1, all-reduce of (3, 2) float64 in line 4 of the cell: `f(x)`, for rank 1.",
     diagnosis.OTHER_LINES),
])
def test_ranks_that_do_not_meet_are_told_in_what_they_differ(told, hint):
    assert diagnosis.diagnose_collectives(told) == hint


@pytest.mark.parametrize(("got", "wanted", "words"), [
    ((3, 4), (4,), "a dim too many"), ((4,), (3, 4), "a dim is missing"), ((4, 3), (3, 4), "another order"),
    ((3, 8), (3, 4), "length of dim 1"), ((6, 8), (3, 4), "length of dims 0, 1"),
])
def test_a_wrong_shape_is_told_by_its_dims(got, wanted, words):
    assert words in return_values.reshaped(got, wanted)


def exchange() -> list[tuple[float, list[str]]]:
    """What two ways to add up cost, told and decoded: within what an all-reduce takes, and beyond."""
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    from course.lab.instruments.bytes_sent import Traffic

    x, n = torch.ones(6, 2), dist.get_world_size()
    found = []
    for how in ("all-reduce", "functional", "gather", "nothing"):
        with Traffic() as traffic:
            if how == "all-reduce":
                dist.all_reduce(x.clone())
            elif how == "functional":
                functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))
            elif how == "gather":
                dist.all_gather([torch.empty_like(x) for _ in range(n)], x)
        code = within_budget((traffic, 2 * piece_bytes(x, 0, n))).item()
        found.append((code, excess_kinds(code)))
    return found


def test_what_sends_too_much_is_named_by_its_kind():
    assert ranks(4)(exchange)[0] == [(1.0, []), (1.0, []), (-float(2 ** WORDS.index("all-gather")), ["all-gather"]), (1.0, [])]
