"""Experts and their copies on ranks, for lesson 21's open task: the tokens of each rank, and what a new placement sends."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

from course.lab.checks import return_values
from course.lab.checks.return_values import InvalidReturn

Placement = Sequence[Sequence[int]]                  # of each rank, the experts that it holds


def rank_tokens(tokens: Sequence[int], placement: Placement) -> list[float]:
    """The tokens that each rank computes. tokens: of each expert; its copies share them equally."""
    copies = Counter(chain.from_iterable(placement))
    return [sum(tokens[expert] / copies[expert] for expert in experts) for experts in placement]


def transfers(before: Placement, after: Placement) -> int:
    """How many experts arrive at a rank that did not hold them: each costs the bytes of an expert's weights."""
    return sum(len(set(new) - set(old)) for old, new in zip(before, after, strict=True))


def as_placement(value: Any, ranks: int, experts: int, who: str) -> list[list[int]]:
    """What `who` returned as lists of whole numbers. Raises `InvalidReturn` unless it names known experts for each rank."""
    rows = return_values.several(value, who, "a list with the experts of each rank")
    if len(rows) != ranks:
        raise InvalidReturn(f"`{who}` returned the experts of {len(rows)} ranks; there are {ranks}",
                            "return a list for each rank, even an empty one: the experts that rank 0 holds, rank 1, and so on")
    found = []
    for rank, row in enumerate(rows):
        try:
            found.append([int(expert) for expert in row])
        except (TypeError, ValueError, RuntimeError):     # the last for a tensor of two dims
            raise InvalidReturn(f"`{who}` returned {return_values.describe_value(row)} for rank {rank}; a list of experts is "
                                "wanted", "return the numbers of the experts that the rank holds") from None
        if unknown := [expert for expert in found[-1] if not 0 <= expert < experts]:
            raise InvalidReturn(f"`{who}` returned expert {unknown[0]} for rank {rank}; experts are numbered from 0 to "
                                f"{experts - 1}", "return experts, not ranks and not numbers of slots; a free slot is left out")
    return found
