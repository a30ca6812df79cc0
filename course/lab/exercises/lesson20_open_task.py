"""Lesson 20's open task: the order of a step for units of many sizes, under a limit of memory."""

import random
from collections.abc import Callable, Sequence
from itertools import combinations

import torch

from course.lab.checks.exercise import Exercise, Tensors
from course.lab.exercises.lesson20_fully_sharded import step_events
from course.lab.instruments.simulated_sharding import KINDS, Events, Step, Unit, as_events, simulate
from course.lab.sandbox.limits import Limits

NEAR = 1.1                                           # times the seconds of the bound


def order_step(units: Sequence[Unit], limit: int, bandwidth: float) -> list[tuple[str, int]]:
    """The events of a step that gathers few bytes and takes little time, with at most `limit` bytes of weights and gradients.

    units: in the order of their forward passes. bandwidth: bytes/s of the link.
    """
    count, last = len(units), len(units) - 1
    passes = [("forward", unit) for unit in range(count)] + [("backward", unit) for unit in reversed(range(count))]

    def needed(kept: set[int]) -> list[int]:
        """The bytes during each pass: kept units, the unit itself, and its gradients in the backward pass."""
        return [sum(units[other].bytes for other in kept if other < unit) + units[unit].bytes * (2 if kind == "backward" else 1)
                for kind, unit in passes]

    def events(kept: set[int], ahead: int, spare: bool) -> list[tuple[str, int]]:
        """Each gather as many as `ahead` passes before its own, if memory allows; `spare`: also for gradients on their way."""
        memory = [size + spare * (kind == "backward" and unit < last) * units[min(unit + 1, last)].bytes
                  for size, (kind, unit) in zip(needed(kept), passes, strict=True)]
        before: list[list[int]] = [[] for _ in passes]
        first = 0
        for turn, (kind, unit) in enumerate(passes):
            if kind == "backward" and unit in kept:
                continue
            begin = turn
            while begin > max(first, turn - ahead) and memory[begin - 1] + units[unit].bytes <= limit:
                begin -= 1
            for other in range(begin, turn):
                memory[other] += units[unit].bytes
            before[begin].append(unit)
            first = begin
        found = list[tuple[str, int]]()
        for (kind, unit), gathers in zip(passes, before, strict=True):
            found += [*(("gather", other) for other in gathers), (kind, unit)]
            if kind == "backward" or unit not in kept:
                found.append(("free", unit))
            if kind == "backward":
                found.append(("reduce", unit))
        return found

    def cost(found: list[tuple[str, int]]) -> tuple[bool, float]:
        step = simulate(units, limit, bandwidth, found)
        return bool(step.wrong), step.seconds

    sets = [{last, *some} for size in range(count) for some in combinations(range(last), size)]
    sets = [kept for kept in sets if max(needed(kept)) <= limit]
    most = max(sets, key=lambda kept: sum(units[unit].bytes for unit in kept))
    return min((events(most, ahead, spare) for ahead in range(count) for spare in (False, True)), key=cost)


# how many units, how many bytes of all weights fit besides the largest unit twice, and how fast the link is
ROOMY, SLOW, TIGHT = ((0.3, 0.6), (1.1, 1.5)), ((0.15, 0.35), (1.1, 1.5)), ((0.05, 0.15), (2, 3))
Kind = tuple[int, tuple[tuple[float, float], tuple[float, float]]]
VISIBLE: tuple[Kind, ...] = ((5, ROOMY), (6, ROOMY), (6, TIGHT), (7, SLOW), (8, ROOMY))
HIDDEN: tuple[Kind, ...] = (*VISIBLE, (7, TIGHT), (9, ROOMY))
OURS, HARD = 1.07, 1.12                              # times the bound: our own order in each case, and the lesson's at least


def least_gathered(units: Sequence[Unit], limit: int) -> int:
    """The fewest bytes that a step can gather: each unit once, and those again that do not stay whole for the backward pass.

    During a unit's backward pass its weights, its gradients and all earlier units that stay whole have to fit."""
    def fits(kept: Sequence[int]) -> bool:
        return all(sum(units[other].bytes for other in kept if other < unit) + 2 * units[unit].bytes <= limit
                   for unit in range(len(units)))

    rest = range(len(units) - 1)                     # the last unit always stays whole
    stay = max(sum(units[unit].bytes for unit in kept) for size in range(len(units)) for kept in combinations(rest, size)
               if fits(kept))
    return 2 * sum(unit.bytes for unit in units) - units[-1].bytes - stay


def least_seconds(units: Sequence[Unit], limit: int, bandwidth: float) -> float:
    """No order is faster: unit 0 is gathered before, and reduced after all computing; and all is sent through one link."""
    computing = 3 * sum(unit.forward for unit in units) + 2 * units[0].bytes / bandwidth
    return max(computing, (least_gathered(units, limit) + sum(unit.bytes for unit in units)) / bandwidth)


def draw_case(dice: random.Random, kind: Kind, order: Callable[..., Events] = order_step) -> tuple[list[Unit], int, float]:
    """Units, a limit and a bandwidth, with which our order comes near the bound. The lesson's does not, or does not fit.

    Sizes are finer than 1 MB, so that one set of units that stay has the most bytes. All are as round as `asked` shows them."""
    count, (shares, speeds) = kind
    while True:
        sizes = [dice.randint(200, 1000) for _ in range(count)]
        sizes[dice.randrange(count)] = dice.randint(1000, 1400)
        units = [Unit(size * 10**5, dice.randint(50, 150) / 1e4) for size in sizes]
        every = sum(unit.bytes for unit in units)
        limit = 2 * max(unit.bytes for unit in units) + round(dice.uniform(*shares) * every / 1e5) * 10**5
        least = least_gathered(units, limit)
        bandwidth = (least + every) / (3 * sum(unit.forward for unit in units)) * dice.uniform(*speeds) // 1e7 * 1e7
        bound = least_seconds(units, limit, bandwidth)
        ours, usual = (simulate(units, limit, bandwidth, events)
                       for events in (order(units, limit, bandwidth), step_events(count)))
        hard = usual.wrong if kind[1] == TIGHT else usual.seconds > HARD * bound
        if hard and least > 1.05 * every and ours.seconds <= OURS * bound:
            return units, limit, bandwidth


def draw(seed: int, hidden: bool) -> Tensors:
    """Of each case the bytes and forward seconds of its units, 0 for none; the limit and the bandwidth."""
    dice, kinds = random.Random(seed), HIDDEN if hidden else VISIBLE
    sizes, seconds = torch.zeros(len(kinds), 9, dtype=torch.int64), torch.zeros(len(kinds), 9, dtype=torch.float64)
    limits, bandwidths = torch.zeros(len(kinds), dtype=torch.int64), torch.zeros(len(kinds), dtype=torch.float64)
    for case, kind in enumerate(kinds):
        units, limits[case], bandwidths[case] = draw_case(dice, kind)
        sizes[case, :len(units)] = torch.tensor([unit.bytes for unit in units])
        seconds[case, :len(units)] = torch.tensor([unit.forward for unit in units], dtype=torch.float64)
    return {"sizes": sizes, "seconds": seconds, "limits": limits, "bandwidths": bandwidths}


def unpacked(inputs: Tensors) -> list[tuple[list[Unit], int, float]]:
    """The arguments of each case."""
    return [([Unit(size, each) for size, each in zip(sizes, seconds, strict=True) if size], limit, bandwidth)
            for sizes, seconds, limit, bandwidth
            in zip(*(inputs[name].tolist() for name in ("sizes", "seconds", "limits", "bandwidths")), strict=True)]


LONGEST = 500                                        # events of a step, at most


def run(inputs: Tensors) -> Tensors:
    """The events of each case: kinds and units, -1 behind the last."""
    cases = unpacked(inputs)
    events = torch.full((len(cases), LONGEST, 2), -1)
    for case, (units, limit, bandwidth) in enumerate(cases):
        found = as_events(order_step(list(units), limit, bandwidth), len(units), "order_step")[:LONGEST]
        events[case, :len(found)] = torch.tensor([(KINDS.index(kind), unit) for kind, unit in found]).view(-1, 2)
    return {"events": events}


WRONG = ("there", "order", "limit", "left")


def steps_of(inputs: Tensors, transcript: Tensors) -> tuple[list[Step], list[int]]:
    """Each case's events on simulated clocks, and the kind of the event that cannot be, by its number in `KINDS`."""
    cases, events = unpacked(inputs), transcript["events"]
    if events.shape != (len(cases), LONGEST, 2) or events.dtype != torch.int64:
        raise ValueError("no transcript of events")
    steps, kinds = [], []
    for (units, limit, bandwidth), rows in zip(cases, events.tolist(), strict=True):
        listed = [(KINDS[kind], unit) for kind, unit in rows if 0 <= kind < len(KINDS) and 0 <= unit < len(units)]
        steps.append(simulate(units, limit, bandwidth, listed))
        kinds.append(KINDS.index([*listed, ("gather", 0)][steps[-1].at][0]))
    return steps, kinds


def weigh(inputs: Tensors, transcript: Tensors) -> Tensors:
    """What goes wrong in each case, the bytes that are gathered, and whether the step takes little time.

    Where something is not there, the number says at which kind of event, so that one mistake is not taken for another."""
    cases, (steps, kinds) = unpacked(inputs), steps_of(inputs, transcript)
    near = [not step.wrong and step.seconds <= NEAR * least_seconds(*case) for case, step in zip(cases, steps, strict=True)]
    found = {name: torch.tensor([float(step.wrong != name) for step in steps]).double() for name in WRONG}
    found["there"] += torch.tensor([(step.wrong == "there") * (2.0 + kind) for step, kind in zip(steps, kinds, strict=True)])
    return found | {
        "gathered": torch.tensor([step.gathered / 1e6 for step in steps], dtype=torch.float64),
        "near": torch.tensor(near).double()}


def asked(inputs: Tensors) -> list[str]:
    """Each case in words."""
    return [f"case {number}: {len(units)} units of {', '.join(f'{unit.bytes / 1e6:.1f}' for unit in units)} MB and "
            f"{', '.join(f'{unit.forward * 1e3:.1f}' for unit in units)} ms within {limit / 1e6:.1f} MB at "
            f"{bandwidth / 1e9:.2f} GB/s" for number, (units, limit, bandwidth) in enumerate(unpacked(inputs))]


MISSING = {                                          # by the kind of the event
    "gather": "a unit is gathered that is whole already: one that stays whole after its forward pass needs no second gather",
    "forward": "a unit computes that is not whole: its gather comes before its forward pass, and its free after it",
    "backward": "a unit that was freed after its forward pass has to be gathered again before its backward pass",
    "free": "a unit is freed that is not whole: was it freed before?",
    "reduce": "a reduce follows its unit's backward pass, which makes the gradients, and there is one for each unit",
}
EXPLANATIONS = {
    "order": "the forward passes go from the first unit to the last, and the backward passes from the last to the first",
    "limit": "a backward pass needs its unit's bytes twice, for weights and gradients, beside all units that are whole and "
             "all gradients whose reduce has not ended. Before a gather moves to an earlier place, ask whether its unit fits "
             "during each pass in between",
    "left": "at the end no unit is whole, and each unit's gradients are reduced: is there a free and a reduce for each?",
    "gathered": "a unit that stays whole from its forward to its backward pass is gathered once. Which units can stay is a "
                "question of bytes: try all sets, and take the one with the most bytes that fits during each backward pass",
    "near": "a gather may begin while an earlier pass computes, if the memory is there. But not all as early as they fit: a "
            "reduce waits behind the gathers before it, and keeps its gradients in memory. Make the case that is named in "
            "your notebook, and look at `step.computing` and `step.sending`: where does neither the rank nor the link work?",
}


def explain(inputs: Tensors, expected: Tensors, got: Tensors) -> str:
    """What to say of the first claim that does not hold."""
    if missing := [int(code) - 2 for code in got["there"].tolist() if code != 1]:
        return MISSING[KINDS[missing[0]]]
    return EXPLANATIONS[next(name for name in EXPLANATIONS if not torch.allclose(expected[name], got[name]))]


EXERCISES = [
    Exercise("order-step", "20", (f"{__name__}.order_step",), draw, run, {
        "there": "each unit is whole when it computes, and each gradient there when it is reduced",
        "order": "forward passes go up, backward passes down",
        "limit": "weights and gradients never take more than the limit",
        "left": "in the end all units are freed and all gradients reduced",
        "gathered": "no order gathers fewer bytes (MB)",
        "near": f"the step takes at most {NEAR - 1:.0%} longer than a lower bound"},
        flags={"there": "something is not there", "order": "the order is another", "limit": "it is too much",
               "left": "something is left", "near": "it takes longer"},
        levels={"gathered": "fewest bytes", "near": "overlapped"}, cases=asked, weigh=weigh, explain=explain,
        unknown="take the case that is named, and walk through its events: `simulate` says in `wrong` and `at` which event "
                "cannot be, and in `computing` and `sending` when the rank and the link work. A gather may begin while an "
                "earlier pass computes",
        ladder=("Begin with the simplest order: gather each unit just before its pass and free it just after, but keep the "
                "last unit whole between its two passes. `simulate` says whether it holds.",
                "Some units can stay whole from forward to backward. During the backward pass of unit u memory holds u twice, "
                "and all earlier units that stay. Of ten units there are a thousand sets: try all, and keep the most bytes.",
                "Then move gathers to earlier passes: each as early as memory allows during all passes in between, in the order "
                "of their use, but not more than some number of passes ahead. Gradients whose reduce is under way need memory, "
                "too. Try every such number, with and without room for them, and take what `simulate` says is fastest."),
        limits=Limits(seconds=60)),
]
