"""Figures of lesson 11: which scores ring attention computes in each round, and how much work each rank has."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course.lab.figures.style import label
from course.utils.colors import GRAY, RANKS


def owners(size: int, zigzag: bool) -> list[int]:
    """The rank of each of the 2 * size pieces of a sequence: two neighbors per rank, or zigzag, one from each end."""
    pieces = range(2 * size)
    return [min(piece, 2 * size - 1 - piece) if zigzag else piece // 2 for piece in pieces]


def ring_rounds(size: int, zigzag: bool, causal: bool = True) -> np.ndarray:
    """(pieces, pieces): the round in which a query piece meets a key piece; -1 where the causal mask hides it."""
    owner = np.array(owners(size, zigzag))
    rounds = (owner[:, None] - owner[None, :]) % size                   # keys of rank s reach rank r after r - s rounds
    return np.where(np.tri(2 * size, dtype=bool) | (not causal), rounds, -1)


def ring_work(size: int, zigzag: bool, causal: bool = True) -> np.ndarray:
    """(rounds, ranks): each rank's work in each round; 1 is all its queries with all keys of one rank."""
    owner, rounds = owners(size, zigzag), ring_rounds(size, zigzag, causal)
    work = np.zeros((size, size))
    for (query, key), turn in np.ndenumerate(rounds):
        if turn >= 0:
            work[turn, owner[query]] += 1 / 8 if causal and query == key else 1 / 4     # half of a square on the diagonal
    return work


def efficiency(work: np.ndarray) -> float:
    """Mean work divided by time, if all ranks wait for the slowest in each round."""
    return float(work.mean(1).sum() / work.max(1).sum())


def ring(size: int, zigzag: bool, turn: int) -> Figure:
    """The causal scores, colored by the rank that computes them, with round `turn` opaque; and the work in that round."""
    owner, rounds, work = owners(size, zigzag), ring_rounds(size, zigzag), ring_work(size, zigzag)
    n = 2 * size
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    scores, bars = figure.subplots(1, 2, width_ratios=(1.4, 1))
    for (query, key), when in np.ndenumerate(rounds):
        if when >= 0:
            scores.add_patch(Rectangle((key, query), 1, 1, facecolor=RANKS[owner[query] % len(RANKS)], edgecolor="white",
                                       alpha=1.0 if when == turn else 0.4 if when < turn else 0.1))
    scores.set_xlim(0, n)
    scores.set_ylim(n, 0)
    for ticks in (scores.set_xticks, scores.set_yticks):
        ticks(np.arange(n) + 0.5, labels=[f"r{rank}" for rank in owner])
    scores.set_xlabel("keys, in the order of time, and whose they are")
    scores.set_ylabel("queries")
    scores.set_aspect("equal")
    scores.set_title(f"round {turn} of {size - 1}, {'zigzag' if zigzag else 'one piece each'}", fontsize=10)
    axis: Any = bars
    axis.bar(range(size), work[turn], color=[RANKS[rank % len(RANKS)] for rank in range(size)])
    axis.axhline(work[turn].max(), color=GRAY, linestyle="--", label="until the slowest is done")
    axis.set_ylim(0, 1.15)
    axis.set_xticks(range(size), labels=[f"r{rank}" for rank in range(size)])
    label(axis, y="work (1: all queries with all keys of a rank)",
          title=f"all rounds: {100 * efficiency(work):.0f}% of the time at work")
    axis.legend(loc="upper right", fontsize=8)
    return figure
