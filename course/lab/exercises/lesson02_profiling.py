"""Lesson 02: named parts of a step, and what the intervals of a timeline add up to."""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from unittest import mock

import torch

from course.lab.checks import random_inputs, return_values, transcript
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn
from course.training import memory_snapshot, profiler

Interval = tuple[float, float]                       # (begin, end), in seconds
CHANGED = "it changes its intervals or their order"
LINES = 5                                            # of source, that ask for memory
WORDS = ("data", "forward", "backward", "optimizer", "loss", "attention", "embed", "head")


def busy(intervals: Sequence[Interval]) -> float:
    """Seconds in which at least one of the intervals is under way. They come in any order and may overlap."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def exposed(communication: Sequence[Interval], computation: Sequence[Interval]) -> float:
    """Seconds in which something is sent and nothing is computed. Call `busy`."""
    return busy([*communication, *computation]) - busy(computation)


def replay(launches: Sequence[float], works: Sequence[float]) -> tuple[float, float]:
    """(seconds until the GPU is done, seconds of these in which it is idle).

    The host launches kernel after kernel, in launches[i] seconds each. The GPU runs them in this order, in works[i] seconds
    each, and begins none before its launch has ended. Both begin at 0.
    """
    host = gpu = idle = 0.0
    for launch, work in zip(launches, works, strict=True):
        host += launch
        idle += max(0.0, host - gpu)
        gpu = max(host, gpu) + work
    return gpu, idle


def draw_names(seed: int, hidden: bool) -> Tensors:
    """Names, a word and a number each; which of them each part has; and in how many others each lies, the second in the first."""
    generator = random_inputs.generator(seed)
    many, parts = (4, 9) if hidden else (3, 4)
    depths, order = [0, 1], torch.randperm(many, generator=generator)
    while len(depths) < parts:
        depths.append(int(torch.randint(depths[-1] + 2, (), generator=generator)))
    return {"words": torch.randperm(len(WORDS), generator=generator)[:many],
            "numbers": torch.randint(1000, 10_000, (many,), generator=generator), "depths": torch.tensor(depths),
            "parts": torch.cat([order, torch.randint(many, (parts - many,), generator=generator)])}


def run_named_parts(inputs: Tensors) -> Tensors:
    """Parts within parts, one that raises, and one without a GPU, under the profiler and with NVTX listened to."""
    names = [f"{WORDS[i]} {number}" for i, number in zip(inputs["words"].tolist(), inputs["numbers"].tolist(), strict=True)]
    parts, depths = inputs["parts"].tolist(), inputs["depths"].tolist()
    one, other = names[parts[-1]], names[parts[-2]]
    heard: list[float] = []                          # of NVTX: a name's number and a half, or -1 where a range ends

    def push(name: str) -> int:
        heard.append(names.index(name) + 0.5 if name in names else -2.0)
        return 0

    def nested(at: int, stop: int) -> None:
        """The parts from `at` on, each with those that lie in it."""
        while at < stop:
            after = next((i for i in range(at + 1, stop) if depths[i] <= depths[at]), stop)
            with entered(names[parts[at]]):
                torch.zeros(8).add_(1)
                nested(at + 1, after)
                torch.zeros(8).add_(1)
            at = after

    raised = 0.0
    with (mock.patch.object(torch.cuda.nvtx, "range_push", push), torch.profiler.profile() as profiler,
          mock.patch.object(torch.cuda, "is_available", lambda: True),
          mock.patch.object(torch.cuda.nvtx, "range_pop", lambda: heard.append(-1.0))):
        with mock.patch.object(torch.cuda, "is_initialized", lambda: True):
            nested(0, len(parts))
            inside = len(heard)
            try:
                with entered(one):
                    raise KeyError(one)
            except KeyError:
                raised = 1.0
        there = len(heard)
        in_use = False                               # CUDA is first used inside the block
        with mock.patch.object(torch.cuda, "is_initialized", lambda: in_use), entered(other):
            in_use = True
        begun = len(heard)
        with suppress(RuntimeError), mock.patch.object(torch.cuda, "is_initialized", lambda: False), entered(other):
            pass
    mine = [event for event in profiler.events() if event.name in names]
    spans = sorted((event.time_range.start, -event.time_range.end, event.name) for event in mine)
    within = [(name, sum(a <= start and end >= b for a, b, _ in spans[:place])) for place, (start, end, name) in enumerate(spans)]
    parts_seen = float(sum(event.is_user_annotation for event in profiler.events()))
    return {"nvtx": torch.tensor(heard[:inside]), "after": torch.tensor(heard[inside:there]), "raised": torch.tensor(raised),
            "trace": torch.tensor([float(sum(name == seen for *_, seen in spans)) for name in names]),
            "parts": torch.tensor(parts_seen), "within": torch.tensor(transcript.digest(within), dtype=torch.float64),
            "quiet": torch.tensor(float(len(heard) - begun)), "begun": torch.tensor(float(begun - there))}


def entered(name: str) -> Any:
    """`part(name)`, if it is something for `with`."""
    found = profiler.part(name)
    if not hasattr(found, "__enter__"):
        raise InvalidReturn(f"`part` returned {return_values.describe_value(found)}; expected something for `with`",
                       "put `@contextmanager` before `def part`, and `yield` where the block runs")
    return found


def draw_intervals(seed: int, hidden: bool) -> Tensors:
    """Intervals in no order, some within others, some apart: (cases, intervals, 2), of two kinds."""
    generator = random_inputs.generator(seed)
    cases, count = (6, 12) if hidden else (4, 6)

    def some() -> torch.Tensor:
        begin = 10 * torch.rand(cases, count, generator=generator, dtype=torch.float64)
        length = 0.1 + 2.0 * torch.rand(cases, count, generator=generator, dtype=torch.float64) ** 3
        length[:, 0] = 4.0                           # long enough that others lie within it
        begin[:, 1] = begin[:, 0] + 1.0
        length[:, 1] = 0.5
        return torch.stack([begin, begin + length], -1)

    return {"intervals": some(), "others": some()}


def as_intervals(case: torch.Tensor) -> list[Interval]:
    """(n, 2) -> n pairs of begin and end."""
    return [(begin, end) for begin, end in case.tolist()]


def run_busy_time(inputs: Tensors) -> Tensors:
    """The busy time of each case, and of the same intervals turned round; of none; of one."""
    cases, given = ([as_intervals(case) for case in inputs["intervals"]] for _ in range(2))
    return {"union": numbers(busy(case) for case in given), "order": numbers(busy(case[::-1]) for case in cases),
            "few": numbers([busy([]), busy(cases[0][:1])]), "kept": torch.tensor(float(given == cases))}


def numbers(values: Any, who: str = "busy") -> torch.Tensor:
    """What `who` returned for each case, as float64, (n,). Raises `InvalidReturn` if one is no number."""
    return torch.tensor([return_values.number(value, who) for value in values], dtype=torch.float64)


def run_exposed_time(inputs: Tensors) -> Tensors:
    """The exposed time of each case; and where everything, or nothing, is computed meanwhile."""
    pairs, given = ([(as_intervals(a), as_intervals(b)) for a, b in zip(inputs["intervals"], inputs["others"], strict=True)]
                    for _ in range(2))
    found = numbers([exposed(a, b) for a, b in given], "exposed")
    kept = torch.tensor(float(given == pairs))
    everything = [(-1.0, 100.0)]
    return {"exposed": found, "hidden": numbers([exposed(pairs[0][0].copy(), everything)], "exposed"),
            "alone": numbers([exposed(pairs[0][0].copy(), [])], "exposed"), "kept": kept}


def draw_kernels(seed: int, hidden: bool) -> Tensors:
    """How long kernels take to launch and to run: launch-bound, bound by the GPU, and both by turns; (cases, kernels)."""
    generator = random_inputs.generator(seed)
    count = 12 if hidden else 7
    launches, works = (1e-6 * (1 + 9 * torch.rand(3, count, generator=generator, dtype=torch.float64)) for _ in range(2))
    launches[0] *= 5
    works[1] *= 5
    return {"launches": launches, "works": works}


def run_launch_bound(inputs: Tensors) -> Tensors:
    """Microseconds until the GPU is done, and in which it is idle, of each case."""
    found = [return_values.pair(replay(launches, works), "replay", "(total, idle)") for launches, works in
             zip(inputs["launches"].tolist(), inputs["works"].tolist(), strict=True)]
    total, idle = (torch.tensor([1e6 * return_values.number(one[i], "replay") for one in found], dtype=torch.float64)
                   for i in (0, 1))
    return {"total": total, "idle": idle}


def draw_memory_peak(seed: int, hidden: bool) -> Tensors:
    """Allocations and frees, (events, 4): 1 or 0 for a free, address, bytes, number of the line, -1 for a free.

    In all, memory is highest in the middle of the list. "reused": a freed address is given again. "before": blocks are freed
    whose allocation is not listed; without them a later moment would seem the highest.
    """
    generator = random_inputs.generator(seed)
    blocks = 24 if hidden else 12
    return {name: torch.tensor(draw_events(generator, blocks, name == "reused", name == "before"))
            for name in ("apart", "reused", "before")}


def draw_events(generator: torch.Generator, blocks: int, reuse: bool, before: bool) -> list[tuple[int, int, int, int]]:
    """Events of one snapshot: blocks come, some leave at once, half are freed, others come, and all are freed."""
    def upto(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    events: list[tuple[int, int, int, int]] = []
    alive: list[tuple[int, int]] = []                # (address, bytes)
    given: list[int] = []                            # addresses that are free again
    total = highest = 0

    def alloc(size: int) -> None:
        nonlocal total, highest
        address = given.pop() if reuse and given else 4096 * (1 + sum(kind for kind, *_ in events))
        events.append((1, address, size, upto(LINES)))
        alive.append((address, size))
        total += size
        highest = max(highest, total)

    def free(place: int) -> None:
        nonlocal total
        address, size = alive.pop(place)
        events.append((0, address, size, -1))
        given.append(address)
        total -= size

    for _ in range(blocks):
        if upto(2):                                  # a temporary
            alloc(1000 + upto(9000))
            free(-1)
        alloc(1000 + upto(9000))
    alloc(5000 + upto(5000))                         # the highest moment, often within an operation
    free(-1)
    while len(alive) > blocks // 2:
        free(upto(len(alive)))
    if before:
        size = highest // 3
        events.append((0, 2048, size, -1))
        total -= size
    while total + 6000 < 0.97 * highest:
        alloc(1000 + upto(5000))
    while alive:
        free(-1)
    return events


def as_events(rows: torch.Tensor) -> list[memory_snapshot.Event]:
    """(events, 4) -> the list of a snapshot."""
    return [("alloc" if kind else "free", address, size, f"model.py:{10 * line + 10} forward" if kind else "")
            for kind, address, size, line in rows.tolist()]


def run_memory_peak(inputs: Tensors) -> Tensors:
    """Bytes of each line at the highest moment, (LINES,), of each snapshot; and of one without events."""
    found = {}
    lists = {name: as_events(rows) for name, rows in inputs.items()}
    for name, events in lists.items():
        found[name] = lines_of(memory_snapshot.alive_at_peak(events))
    found["none"] = lines_of(memory_snapshot.alive_at_peak([]))
    return found | {"kept": torch.tensor(float(lists == {name: as_events(rows) for name, rows in inputs.items()}))}


def lines_of(value: Any) -> torch.Tensor:
    """The bytes of each line, float64 (LINES,). Raises `InvalidReturn` if a key is no line of the events."""
    sizes = return_values.named(value, "alive_at_peak", ())
    lines = [f"model.py:{10 * line + 10} forward" for line in range(LINES)]
    if other := next((key for key in sizes if key not in lines), None):
        raise InvalidReturn(f"`alive_at_peak` returned a dict with the key {other!r}, which no allocation has as its line",
                            "its keys are the lines of the blocks that are alive; a free has none")
    return return_values.numbers((sizes.get(line, 0) for line in lines), "alive_at_peak")


EXERCISES = [
    Exercise("named-parts", "02", ("course.training.profiler.part",), draw_names, run_named_parts, {
        "trace": "the profiler's trace has every part by its name",
        "parts": "and one part for each block",
        "within": "parts lie within parts, each under its own name",
        "nvtx": "on a GPU each part is an NVTX range, opened and closed",
        "raised": "an exception in the block reaches the caller",
        "after": "and its range is closed all the same",
        "begun": "a range that was not opened is not closed either: not where CUDA is first used inside the block",
        "quiet": "where CUDA is not in use, it does not call NVTX"},
        flags={"raised": "it swallowed the exception, so nobody learns of it",
               "within": "one is missing, or does not lie within the one around it: the name must last while the block runs"},
        read_as={-2.0: "opened by another name", -1.0: "closed", 0.5: "the first name opened", 1.5: "the second opened",
                 2.5: "the third opened", 3.5: "the fourth opened"}, points=2),
    Exercise("busy-time", "02", (f"{__name__}.busy",), draw_intervals, run_busy_time, {
        "union": "overlapping time counts once",
        "order": "the order of the intervals does not matter",
        "few": "no intervals take no time, and one takes its own",
        "kept": "it does not change the list"}, flags={"kept": CHANGED}),
    Exercise("exposed-time", "02", (f"{__name__}.exposed",), draw_intervals, run_exposed_time, {
        "exposed": "sending during computation does not count",
        "hidden": "nothing is exposed if computation never stops",
        "alone": "everything is exposed if nothing is computed",
        "kept": "it does not change the lists"}, flags={"kept": CHANGED}),
    Exercise("launch-bound", "02", (f"{__name__}.replay",), draw_kernels, run_launch_bound, {
        "total": "when the GPU is done, whether or not it waits for the host",
        "idle": "how long it is idle"}),
    Exercise("memory-peak", "02", ("course.training.memory_snapshot.alive_at_peak",), draw_memory_peak, run_memory_peak, {
        "apart": "the bytes that each line holds at the peak",
        "reused": "also if a freed address is given to another block",
        "before": "a block from before the recording lowers the total when it is freed",
        "none": "without events, no line holds anything",
        "kept": "it does not change the list"}, flags={"kept": "the list of events has changed"}, points=2),
]
