"""A rank's step with fully sharded units on simulated clocks, for lesson 20's open task: seconds, bytes, and what goes wrong."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

from course.lab.checks import return_values
from course.lab.checks.return_values import InvalidReturn

KINDS = ("gather", "forward", "backward", "free", "reduce")
Events = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Unit:
    """A part of the model."""

    bytes: int                                       # of its weights, and of its gradients
    forward: float                                   # seconds of computing; the backward pass takes twice as many


@dataclass
class Step:
    """What a list of events gives."""

    seconds: float = 0.0                             # until all is computed and sent
    gathered: int = 0                                # bytes of all gathers
    wrong: str = ""                                  # the first thing that cannot be: "there", "order", "limit" or "left"
    at: int = -1                                     # the number of the event at which it is
    computing: list[tuple[str, int, float, float]] = field(default_factory=list)        # what, unit, begin, end
    sending: list[tuple[str, int, float, float]] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)   # when it changes, and the bytes from then on


def simulate(units: Sequence[Unit], limit: int, bandwidth: float, events: Events) -> Step:
    """Walk through the events of a step. limit: bytes of whole weights and gradients. bandwidth: bytes/s of the link.

    A gather or reduce begins when the link is free, and the walk goes on. A forward or backward waits for its unit's gather, and
    the walk waits for its end. A gather and a backward need memory for weights and for gradients: if there is too little, the
    walk waits for reduces that are under way. A unit's gradients need their memory until its reduce ends.
    """
    step, clock, link, used = Step(), 0.0, 0.0, 0
    order = [("forward", unit) for unit in range(len(units))] + [("backward", unit) for unit in reversed(range(len(units)))]
    there, gradients, reducing = dict[int, float](), set[int](), list[tuple[float, int]]()
    for number, (kind, unit) in enumerate(events):
        size, computes = units[unit].bytes, kind in ("forward", "backward")
        missing = unit not in gradients if kind == "reduce" else (unit in there) == (kind == "gather")
        if missing or (computes and (kind, unit) != next(iter(order), None)):
            step.wrong, step.at = "there" if missing else "order", number
            return step
        if computes:
            clock = max(clock, there[unit])
        if kind in ("gather", "backward"):
            while reducing and (used + size > limit or reducing[0][0] <= clock):
                end, freed = reducing.pop(0)
                clock, used = max(clock, end), used - freed
                step.memory.append((end, used))
            used += size
            step.memory.append((clock, used))
            if used > limit:
                step.wrong, step.at = "limit", number
                return step
        if computes:
            order.pop(0)
            seconds = units[unit].forward * (2 if kind == "backward" else 1)
            step.computing.append((kind, unit, clock, clock + seconds))
            clock += seconds
            if kind == "backward":
                gradients.add(unit)
        elif kind == "free":
            del there[unit]
            used -= size
            step.memory.append((clock, used))
        else:
            begin, link = max(clock, link), max(clock, link) + size / bandwidth
            step.sending.append((kind, unit, begin, link))
            if kind == "gather":
                there[unit] = link
                step.gathered += size
            else:
                gradients.remove(unit)
                reducing.append((link, size))
    step.seconds = max(clock, link)
    for end, freed in reducing:
        used -= freed
        step.memory.append((end, used))
    if order or there or gradients:
        step.wrong, step.at = "left", len(events)
    return step


def as_events(value: Any, units: int, who: str) -> list[tuple[str, int]]:
    """The events that `who` returned. Raises `InvalidReturn` unless they are pairs of a kind and a unit."""
    found = []
    for event in return_values.several(value, who, "a list of events"):
        pair = tuple(event) if isinstance(event, tuple | list) else ()
        if len(pair) != 2 or pair[0] not in KINDS or not hasattr(pair[1], "__index__") or not 0 <= pair[1] < units:
            raise InvalidReturn(f"`{who}` returned {event!r:.60} as an event",
                                f'an event is a pair such as ("gather", 2): one of {", ".join(KINDS)}, and a unit from 0 to '
                                f"{units - 1}")
        found.append((pair[0], index(pair[1])))
    return found
