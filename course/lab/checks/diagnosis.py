"""Diagnose an answer that no known mistake explains: a pattern in its numbers, or how its ranks disagree."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from course.lab.instruments.bytes_sent import excess_kinds
from course.ranks.collective_mismatch import DISAGREE
from course.utils.errors import rank_names

RIGHT_ON_FEWER = ("right on {} ranks and wrong on {}: look for what holds for two ranks alone, such as `rank == 1`, `1 - rank` "
                  "or a 2 where the number of ranks belongs; or for an axis of all ranks, such as `dist.get_rank()`")
RIGHT_ON_SOME = "right on {} and wrong on {}: look at what depends on the rank"
SENDS_TOO_MUCH = ("it sends more by {} than is needed. Over n ranks an all-reduce sends 2 (n - 1) / n times its tensor, a "
                  "reduce-scatter (n - 1) / n times, an all-gather n - 1 times its piece: take the one that gives each rank just "
                  "what it needs, once")
NUMBERS_RIGHT = 'the numbers are right: look at what the line with the "no" says that your code does beside them'
SAME_COLLECTIVES = "every rank of a group has to call the same collectives, in the same order"
OTHER_LINES = (f"{SAME_COLLECTIVES}. Here they are at different lines: one rank makes a call that another leaves out. Look for "
               "an `if` on the rank, or a loop that is longer on one rank, around a collective")
OTHER_SHAPES = (f"{SAME_COLLECTIVES}, with tensors of the same shape. Here they are at the same line with different ones: pieces "
                "of unequal length have to be padded, the dim that is cut has to be the one that is asked for, not a fixed one, "
                "and tensors that are ready in another order on another rank have to be sent in one order")
SPLITS = "`tensor_split(n)` makes n pieces, `split(n)` pieces of length n"
OTHER_MESSAGES = ("what is sent and the tensor that receives it need the same shape and format. Here a rank cuts or counts its "
                  f"pieces in another way than its neighbor expects: {SPLITS}")
FREED_MEMORY = ("it reads or writes memory that is not there any more, such as a view of a tensor whose storage was freed: what "
                "is needed longer has to be a `clone`")
TOO_LONG_MESSAGE = ("gloo ends a rank to which more is sent than its tensor holds: what is sent and the tensor that receives it "
                    f"need the same shape. Print both shapes on each rank; {SPLITS}")
OTHER_FORMATS = (f"{SAME_COLLECTIVES}, with tensors of the same format. Here one rank brings another than the other: both have "
                 "to cast, or neither")
BROUGHT_TENSOR = re.compile(r"of (\([\d, ]*\)) (\w+) in line")
SOURCE_LINE = re.compile(r" in (line \d+ of .+?`)(?=[;.]|$)", re.MULTILINE)
ROUNDING = 1e-2                                      # relative error up to which rounding or an epsilon explains it


Pairs = Sequence[tuple[Tensor, Tensor] | None]       # for each rank (expected, got), or None where they agree


def describe_ranks(wrong: Pairs, fewer: int = 0) -> list[str]:
    """Say which ranks are wrong, if not all. fewer: the smaller number of ranks on which the answer passed, or 0."""
    bad = [rank for rank, pair in enumerate(wrong) if pair]
    good = [rank for rank, pair in enumerate(wrong) if not pair]
    return [RIGHT_ON_FEWER.format(fewer, len(wrong))] if fewer else [RIGHT_ON_SOME.format(rank_names(good),
                                                                                          rank_names(bad))] if good else []


def diagnose_numbers(wrong: Pairs, fewer: int = 0) -> str:
    """What the wrong numbers have in common; "" if no pattern is found."""
    patterns = [describe_pattern(*pair) for pair in wrong if pair]
    return "; ".join([*describe_ranks(wrong, fewer), *(patterns[:1] if len({*patterns}) == 1 and patterns[0] else [])])


def diagnose_training(wrong: Pairs, fewer: int = 0, weights: bool = False, tolerance: float = 1e-9) -> str:
    """Locate the fault of a training from the losses of its steps, or from the weights after them."""
    expected, got = next(pair for pair in wrong if pair)
    if weights or expected.shape != got.shape:
        finding = "the losses are right, and weights are not: some parameter gets a wrong gradient"
    elif (expected[0] - got[0]).abs() > tolerance * expected[0].abs():
        finding = "the loss of the first step is wrong already: look at the forward pass"
    else:
        finding = "the loss of the first step is right, a later one is not: the forward pass is right, a gradient is wrong"
    return "; ".join([*describe_ranks(wrong, fewer), finding])


def describe_pattern(expected: Tensor, got: Tensor) -> str:
    """How the numbers are wrong, in words, such as a constant factor; "" if no known pattern fits."""
    if expected.shape != got.shape or not got.is_floating_point():
        return ""
    correct, actual = expected.double().flatten(), got.double().flatten()
    if not actual.isfinite().all():
        return ("there is an infinity, or what is no number: look for the exponential of something large, the logarithm of zero, "
                "a division by zero, or memory from `empty` that nobody wrote")
    if actual.abs().amax() > 1e100 * correct.abs().amax().clamp(min=1e-300):
        return "some numbers are as large as only unwritten memory has them: `empty` leaves what was there, so write all of it"
    if not actual.any():
        return "all that comes out is zero"
    size = correct.abs().amax().clamp(min=1e-300)
    error = actual - correct
    wrong = error.abs() > 1e-9 * size
    if len(correct) > 2 and torch.allclose(correct.sort().values, actual.sort().values, 1e-9, 0):
        return "the right numbers, in another order"
    off = (error.norm() / correct.norm().clamp(min=1e-300)).item()
    if off < ROUNDING and (error[wrong].abs() <= correct[wrong].abs() / 4).all():
        return f"nearly right, to {off:.0e}: look for an epsilon, or for a format with fewer bits on the way"
    factor = actual[correct != 0] / correct[correct != 0]
    if len(factor) > 1 and not actual[correct == 0].any() and (factor - factor[0]).abs().amax() < 1e-6 * factor[0].abs():
        return f"every number is {factor[0].item():.6g} times what it should be"
    if len(error) > 2 and (error - error[0]).abs().amax() < 1e-9 * size:
        return f"every number is {abs(error[0].item()):.6g} too {'large' if error[0] > 0 else 'small'}"
    if not actual[wrong].any():
        return "some of it is zero where something belongs: a part is left out"
    if not correct[wrong].any():
        return "there are numbers where zeros belong: something counts that should not"
    return ""


def diagnose_flags(codes: Sequence[float]) -> str:
    """The hint for right numbers with failed flags; negative codes come from `within_budget`."""
    kinds = list(dict.fromkeys(kind for code in codes for kind in excess_kinds(code)))
    return SENDS_TOO_MUCH.format(" and ".join(kinds)) if kinds else NUMBERS_RIGHT


def diagnose_collectives(told: str) -> str:
    """The hint for ranks that called different collectives, from the report of `course/ranks/collective_mismatch.py`."""
    first = told.splitlines()[0]
    if not first.startswith(DISAGREE) or len(set(SOURCE_LINE.findall(first))) != 1:
        return OTHER_LINES
    if f"{DISAGREE} at message" in first:
        return OTHER_MESSAGES
    shapes, formats = (set(each) for each in zip(*BROUGHT_TENSOR.findall(first), strict=True))
    return OTHER_FORMATS if len(formats) > 1 and len(shapes) == 1 else OTHER_SHAPES
