"""Which of several ways to a result takes a GPU least time, if all that it does is done so: tried out.

Work that keeps a GPU busy is bound by its power: the clock goes down until it draws no more than it may. A way that is faster at
the same clock may draw more, and then slows all else. What counts is the energy of a call; and that is what time measures where
one way alone is repeated until the clock has settled.
"""

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LAP, LOOKS, FEW = 2e-3, 2, 6                        # least seconds of a look at a way; looks; ways that are measured after them
SETTLED, ROUNDS = 0.05, 2                           # seconds in which the clock settles, and of a lap; laps
GAIN = 0.01                                         # what a change has to gain
Way = Callable[[], Tensor]


def compare(ways: Sequence[Way]) -> dict[int, float]:
    """Seconds of the first way and of the few that seem fastest of those that give its bits, by their numbers."""
    same = [0, *agreeing(ways)]
    often = max(1, round(LAP / lap(ways[0], 3)))
    for _ in range(LOOKS):                          # the last counts: in the first the clock is that of a GPU that has rested
        looks = {number: lap(ways[number], often) for number in same}
    few = sorted(same[1:], key=lambda number: looks[number])[:FEW]
    laps: dict[int, list[float]] = {number: [] for number in (0, *few)}
    for _ in range(ROUNDS):
        for number, found in laps.items():
            found.append(settled(ways[number], looks[number]))
    return {number: statistics.mean(found) for number, found in laps.items()}


def agreeing(ways: Sequence[Way]) -> list[int]:
    """The numbers of the ways that give the bits of the first, whose result none of them may overwrite."""
    wanted = ways[0]()
    return [number for number, way in enumerate(ways) if number and torch.equal(way(), wanted)]


def quickest(times: dict[int, float]) -> int:
    """The number of the way that takes least: the first, unless another gains a percent."""
    best = min(times, key=lambda number: times[number])
    return best if times[best] < (1 - GAIN) * times[0] else 0


def settled(way: Way, seconds: float) -> float:
    """Seconds of a call at the clock that the way's own power leaves it. seconds: about what a call takes."""
    calls = max(1, round(SETTLED / seconds))
    lap(way, calls)
    return lap(way, calls)


def lap(way: Way, calls: int) -> float:
    """Seconds that a GPU takes for a call, of so many."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        way()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls
