"""Machines whose GPUs are joined by paths of several kinds, for lesson 09's open task: who sends to whom, and what that takes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from course.lab.checks.return_values import InvalidReturn

PATHS = ("NV2", "NV1", "PIX", "SYS", "RACK", "CORE")     # the fastest first; the last two lead to another node, another rack


@dataclass(frozen=True)
class Axis:
    """An axis of a layout, and what each rank sends along it in a step."""

    name: str
    size: int
    ring: bool                                      # whether the last rank of a group sends to the first
    messages: int
    bytes: float                                    # of all these messages


@dataclass(frozen=True)
class Speed:
    """What a path reaches."""

    latency: float                                  # seconds of a message
    bandwidth: float                                # bytes/s


def neighbors(axes: Sequence[Axis]) -> list[list[tuple[int, int]]]:
    """Of each axis, the pairs of ranks that send to each other. axes: the slowest first, as in a mesh."""
    found = []
    for number, axis in enumerate(axes):
        stride = math.prod(other.size for other in axes[number + 1:])
        ranks = range(math.prod(other.size for other in axes))
        inside = [(rank, rank + stride) for rank in ranks if rank // stride % axis.size < axis.size - 1]
        closing = [(rank, rank - (axis.size - 1) * stride) for rank in ranks if rank // stride % axis.size == axis.size - 1]
        found.append(inside + (closing if axis.ring and axis.size > 2 else []))
    return found


def slowest_paths(axes: Sequence[Axis], paths: Sequence[Sequence[int]], placement: Sequence[int]) -> list[int]:
    """Of each axis, the slowest path that it uses, a number in `PATHS`. placement[r]: the GPU of rank r."""
    return [max(paths[placement[a]][placement[b]] for a, b in pairs) for pairs in neighbors(axes)]


def step_seconds(axes: Sequence[Axis], slowest: Sequence[int], speeds: Sequence[Speed]) -> float:
    """Seconds of a step's messages: one axis after another, each at its slowest path. speeds: one for each of `PATHS`."""
    return sum(axis.messages * speeds[path].latency + axis.bytes / speeds[path].bandwidth
               for axis, path in zip(axes, slowest, strict=True))


def as_placement(value: Any, gpus: int, who: str) -> list[int]:
    """A placement as a list of whole numbers. Raises `InvalidReturn` if it does not have each GPU once."""
    try:
        placement = [int(gpu) for gpu in value]
    except (TypeError, ValueError, RuntimeError):     # the last for a tensor of two dims
        placement = []
    if sorted(placement) != list(range(gpus)):
        raise InvalidReturn(f"{who} something else than a placement of {gpus} ranks",
                            f"a placement is a list of the GPUs from 0 to {gpus - 1}: the GPU of rank 0, of rank 1, and so on")
    return placement


Case = tuple[list[Axis], list[list[int]], list[Speed]]


def benchmarks(knowledge: tuple[list[Case], int]) -> Callable[..., Any]:
    """What a hidden process knows of machines. It is asked one of three things:

    (case, placement): the seconds of a step. (case,): how often that was asked. (): the speeds of all cases.

    knowledge: of each case the axes, the paths of all pairs, the speeds; and how many benchmarks may run.
    """
    cases, limit = knowledge
    calls = [0] * len(cases)

    def answer(case: int | None = None, placement: list[int] | None = None) -> Any:
        if case is None:
            return [[(speed.latency, speed.bandwidth) for speed in speeds] for _, _, speeds in cases]
        if placement is None:
            return calls[case]
        axes, paths, speeds = cases[case]
        if calls[case] == limit:
            raise InvalidReturn(f"`measure` was called more than {limit} times for one machine",
                                "compare placements by `slowest_paths`, which is free, before you measure them")
        calls[case] += 1
        return step_seconds(axes, slowest_paths(axes, paths, placement), speeds)

    return answer
