"""Lesson 03: which samples a rank reads, and reading them before they are asked for."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import torch

from course.data import order
from course.lab.checks import random_inputs, return_values
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn

END = object()                                       # what comes after the last batch
PATIENCE = 3.0                                       # seconds that a reader may take for what it should have done at once


def ahead(batches: Iterable[Any], depth: int) -> Iterator[Any]:
    """Yield the same batches in the same order, while a thread reads up to `depth` of them ahead.

    An error in reading comes out when that batch's turn comes. When this generator is closed, the thread ends.
    """
    source = iter(batches)
    with ThreadPoolExecutor(1) as pool:              # one thread: batches are read in order
        waiting: deque[Future[Any]] = deque(pool.submit(next, source, END) for _ in range(depth))
        while True:
            batch = waiting.popleft().result()
            if batch is END:
                return
            waiting.append(pool.submit(next, source, END))
            yield batch


def draw_shards(seed: int, hidden: bool) -> Tensors:
    """Data sets, global batches, ranks and where to go on, within a batch: (cases, [seed, samples, batch, ranks, consumed])."""
    generator = random_inputs.generator(seed)
    cases = []
    for _ in range(5 if hidden else 3):
        ranks = int(torch.randint(2, 5, (), generator=generator))
        batch = ranks * int(torch.randint(1, 4, (), generator=generator))
        samples = int(torch.randint(2 * batch, 5 * batch, (), generator=generator)) + 1
        done = batch * int(torch.randint(1, 4, (), generator=generator)) + int(torch.randint(1, batch, (), generator=generator))
        cases.append([int(torch.randint(1000, (), generator=generator)), samples, batch, ranks, done])
    return {"cases": torch.tensor(cases)}


def run_sharded_sampler(inputs: Tensors) -> Tensors:
    """The sample ids of every rank over more than two epochs, from the start and after some."""
    found: dict[str, list[float]] = {"ids": [], "later": [], "together": []}
    for seed, samples, batch, ranks, done in inputs["cases"].tolist():
        steps = 2 * samples // batch + 2
        for name, consumed in (("ids", 0), ("later", done)):
            lists = [take(order.train_batches(seed, samples, batch, ranks, rank, consumed), steps) for rank in range(ranks)]
            found[name] += [float(i) for one in lists for ids in one for i in ids]
            if name == "ids":                        # whether the ranks of a step have just the global batch
                wanted = [sorted(order.samples_at(seed, samples, k * batch, (k + 1) * batch).tolist()) for k in range(steps)]
                found["together"] += [float(sorted(i for one in lists for i in one[k]) == wanted[k]) for k in range(steps)]
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


def take(batches: Any, steps: int) -> list[list[int]]:
    """The first lists of ids."""
    if not hasattr(batches, "__next__"):
        raise InvalidReturn(f"`train_batches` returned {return_values.describe_value(batches)}; expected a generator",
                       "`yield` a list of ids for each global batch, in a loop without end")
    return [return_values.several(ids, "train_batches", "a list of sample ids") for ids in islice(batches, steps)]


def draw_reads(seed: int, hidden: bool) -> Tensors:
    """Runs: how many batches there are, how many to read ahead, and which one cannot be read, (runs, 3); and the batches.

    These are numbers, the first of them 0, which an `if` takes for nothing.
    """
    generator = random_inputs.generator(seed)
    runs = [[int(torch.randint(low, high, (), generator=generator)) for low, high in ((20, 50), (3, 7), (3, 15))]
            for _ in range(2 if hidden else 1)]
    batches = torch.randint(1, 10**6, (50,), generator=generator)
    batches[0] = 0
    return {"runs": torch.tensor(runs), "batches": batches}


class Source:
    """Batches that note when they are read, and by whom; as a file is, one that two cannot read at once."""

    def __init__(self, batches: list[int], broken: int = -1, gate: threading.Event | None = None):
        self.batches, self.count, self.broken, self.read = batches, len(batches), broken, 0
        self.gate, self.late = gate, False           # the second read takes until the gate is open; whether that was too long
        self.threads: set[int] = set()
        self.alone = threading.Lock()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not self.alone.acquire(blocking=False):
            raise InvalidReturn("two threads asked `batches` for the next one at once",
                           "two threads cannot share an iterator, and the order would be left to chance: let one thread read")
        try:
            self.threads.add(threading.get_ident())
            time.sleep(0.002)                        # long enough for another thread to come
            if self.read == self.broken:
                self.count = 0                       # there is nothing after an error
                raise OSError(f"batch {self.broken} cannot be read")
            if self.read >= self.count:
                raise StopIteration
            if self.gate is not None and self.read == 1:
                self.late = not self.gate.wait(PATIENCE)
            self.read += 1
            return self.batches[self.read - 1]
        finally:
            self.alone.release()

    def comes_to(self, count: int) -> bool:
        """Whether so many have been read, now or in a while."""
        end = time.monotonic() + PATIENCE
        while self.read < count and time.monotonic() < end:
            time.sleep(0.01)
        return self.read >= count


def run_read_ahead(inputs: Tensors) -> Tensors:
    """Several runs, one after another."""
    runs = [read_once(inputs["batches"].tolist()[:count], *run) for count, *run in inputs["runs"].tolist()]
    found = {name: [run[name] for run in runs] for name in runs[0]}
    return {name: torch.cat(each) if each[0].ndim else torch.stack(each).amin() for name, each in found.items()}


def read_once(numbers: list[int], depth: int, broken: int) -> Tensors:
    """What comes, how far it has been read at each moment, an error in its turn, and the end of the thread."""
    before, source, count = threading.active_count(), Source(numbers), len(numbers)
    came: list[float] = []
    further: list[float] = []
    with closing(ahead_generator(source, depth)) as batches:
        for number, batch in enumerate(batches):
            came.append(float(batch) if isinstance(batch, int) else -1.0)
            if len(came) > count + 3:
                break
            if number < 2:                           # while this batch is worked on
                source.comes_to(number + 1 + depth)
                time.sleep(0.05)
                further.append(float(source.read - number - 1))
    torn, good, told = Source(numbers, broken), 0, 0.0
    try:
        for _ in ahead_generator(torn, depth):
            good += 1
            if good > count:
                break
    except OSError:
        told = 1.0
    gate = threading.Event()
    slow = Source(numbers, gate=gate)
    with closing(ahead_generator(slow, depth)) as prompt:
        next(prompt, None)
        gate.set()
    given = [np.full(2, number) for number in numbers[:4]]              # a list, and == of arrays is no bool
    arrays = [*islice(ahead_generator(given, depth), 6)]
    first = [float(x[0]) if isinstance(x, np.ndarray) else -1.0 for x in arrays]
    with closing(ahead_generator(Source(numbers), depth)) as early:
        next(early, None)
    time.sleep(0.1)
    return {"order": torch.tensor(came), "arrays": torch.tensor(first),
            "prompt": torch.tensor(float(not slow.late)), "ahead": torch.tensor(further),
            "thread": torch.tensor(float(threading.get_ident() not in source.threads)), "raised": torch.tensor(told),
            "in turn": torch.tensor([float(good)]), "ended": torch.tensor(float(threading.active_count() <= before))}


def ahead_generator(source: Iterable[Any], depth: int) -> Any:
    """`ahead(source, depth)`, if it is a generator."""
    found = ahead(source, depth)
    if not hasattr(found, "close"):
        raise InvalidReturn(f"`ahead` returned {return_values.describe_value(found)}; expected a generator",
                       "`yield` one batch after the other")
    return found


EXERCISES = [
    Exercise("sharded-sampler", "03", ("course.data.order.train_batches",), draw_shards, run_sharded_sampler, {
        "together": "together, the ranks have the global batch of each step, each sample once",
        "ids": "each rank has its contiguous part of it, through several epochs",
        "later": "after `consumed` samples it continues where it would have been"}, points=2),
    Exercise("read-ahead", "03", (f"{__name__}.ahead",), draw_reads, run_read_ahead, {
        "order": "all batches come, in their order, and nothing after them",
        "thread": "another thread reads",
        "ahead": "while the caller uses a batch, `depth` more are read, and no more than that",
        "prompt": "it hands out a batch while the next one is still being read",
        "arrays": "`batches` may be a list, and a batch an array",
        "raised": "an error in reading comes out of the generator",
        "in turn": "and in its turn: the batches before it are good",
        "ended": "closing it ends the thread"},
        flags={"thread": "the computing thread reads too, and waits meanwhile",
               "prompt": "it waits for a read whose turn has not come",
               "raised": "the error was swallowed: training would end as if all were well",
               "ended": "a thread is left over"}, points=2),
]
