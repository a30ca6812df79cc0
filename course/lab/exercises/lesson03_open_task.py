"""Lesson 03's open task: a loader that reads with several threads and keeps the order."""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from course.lab.checks import random_inputs
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn, describe_value
from course.lab.sandbox.limits import Limits

PATIENCE = 2.0                                       # seconds in which a reader does what it should do at once
SETTLED = 0.05                                       # seconds after which nothing more happens
SLOW = 0.25                                          # seconds of a read that lasts while a loader is closed


class Loader:
    """Reads samples with several threads, ahead of the training, and hands them out in order."""

    def __init__(self, read: Callable[[int], Any], order: Sequence[int], threads: int, depth: int, position: int = 0):
        """read(i): sample i, from any thread, in any time. order: the samples' numbers. threads: reads at once.

        depth: samples ahead of the one that was handed out last. position: how many of the order are done.
        """
        self.read, self.order, self.threads, self.depth, self.position = read, order, threads, depth, position

    def __iter__(self) -> Iterator[Any]:
        """The samples from `position` on, a generator. `position` counts those that were handed out."""
        waiting: deque[Future[Any]] = deque()         # reads whose samples were not handed out, in order
        following = self.position
        pool = ThreadPoolExecutor(self.threads)
        try:
            while True:
                while following < len(self.order) and len(waiting) <= self.depth:
                    waiting.append(pool.submit(self.read, self.order[following]))
                    following += 1
                if not waiting:
                    return
                waiting[0].result()                   # raises what reading raised; then its sample is not done
                self.position += 1
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


class Sample:
    """What a disk's read returns."""

    def __init__(self, number: int):
        self.number = number


class Disk:
    """A simulated disk: it counts, and a read can be made to last."""

    def __init__(self, broken: int = -1, stuck: int = -1, crowd: int = 0, free: int = -1):
        """broken: the sample that cannot be read. stuck: one whose read lasts until `gate` opens. crowd: so many reads open the
        gate, for which all wait. free: the only sample that does not wait for it."""
        self.broken, self.stuck, self.crowd, self.free = broken, stuck, crowd, free
        self.gate, self.lock = threading.Event(), threading.Lock()
        self.started = self.done = self.now = self.most = 0
        self.samples: list[weakref.ref[Sample]] = []

    def read(self, number: int) -> Sample:
        """Sample `number`."""
        with self.lock:
            self.started += 1
            self.now += 1
            self.most = max(self.most, self.now)
            if self.crowd and self.now >= self.crowd:
                self.gate.set()
        try:
            if self.crowd or number == self.stuck or self.free not in (-1, number):
                self.gate.wait(PATIENCE)
                self.gate.set()
            if number == self.broken:
                raise OSError(f"sample {number} cannot be read")
            sample = Sample(number)
            with self.lock:
                self.samples.append(weakref.ref(sample))
            return sample
        finally:
            with self.lock:
                self.now -= 1
                self.done += 1

    def alive(self) -> int:
        """How many samples somebody still holds."""
        with self.lock:
            return sum(sample() is not None for sample in self.samples)


def comes(true: Callable[[], bool]) -> bool:
    """Whether something is true, now or in a while."""
    until = time.monotonic() + PATIENCE
    while not true() and time.monotonic() < until:
        time.sleep(0.005)
    return true()


def draw(seed: int, hidden: bool) -> Tensors:
    """An order; threads, depth, the place of a sample that breaks or sticks, and where to stop."""
    generator = random_inputs.generator(seed)
    count, *how = [int(torch.randint(low, high, (), generator=generator)) for low, high in
                   ((50, 70) if hidden else (30, 40), (2, 5), (5, 9), (8, 15), (3, 12))]
    return {"order": torch.randperm(1000, generator=generator)[:count], "how": torch.tensor(how)}


def samples_of(loader: Loader) -> Any:
    """The generator of a loader."""
    found = iter(loader)
    if not hasattr(found, "close"):
        raise InvalidReturn(f"`Loader.__iter__` returned {describe_value(found)}; expected a generator", "`yield` the samples")
    return found


def number_of(sample: Any) -> float:
    """A sample's number; -1 if it is none."""
    return float(sample.number) if isinstance(sample, Sample) else -1.0


def run(inputs: Tensors) -> Tensors:
    """Everything that is asked of a loader."""
    order = inputs["order"].tolist()
    threads, depth, bad, stop = inputs["how"].tolist()
    before = threading.active_count()
    whole = Disk(crowd=threads)
    came, ahead, kept = [], True, True
    for asked, sample in enumerate(samples_of(Loader(whole.read, order, threads, depth)), 1):
        came.append(number_of(sample))
        if len(came) > len(order):
            break
        if asked in (1, stop, 2 * stop):
            time.sleep(SETTLED)
        ahead = ahead and whole.started <= asked + depth
        kept = kept and comes(lambda: whole.alive() <= depth + 1)       # those ahead, and this one
        del sample

    slow = Disk(stuck=order[bad])
    samples = samples_of(Loader(slow.read, order, threads, depth))
    early = [number_of(next(samples, None)) for _ in range(bad)]
    went_on = comes(lambda: slow.done >= bad + depth - 1) and not slow.gate.is_set()
    slow.gate.set()
    samples.close()

    torn, good, told = Disk(broken=order[bad]), 0, 0.0
    loader = Loader(torn.read, order, threads, depth)
    try:
        for _ in samples_of(loader):
            good += 1
            if good > len(order):
                break
    except OSError:
        told = 1.0
    torn.broken = -1                                  # it was mended
    again = [number_of(next(samples_of(Loader(torn.read, order, threads, depth, loader.position)), None))]

    left = Disk()
    loader = Loader(left.read, order, threads, depth)
    samples = samples_of(loader)
    for _ in range(stop):
        next(samples, None)
    time.sleep(SETTLED)
    samples.close()
    later = [number_of(sample) for sample, _ in zip(samples_of(Loader(left.read, order, threads, depth, loader.position)), order,
                                                    strict=False)]

    shut = Disk(free=order[0])
    samples = samples_of(Loader(shut.read, order, threads, depth))
    next(samples, None)
    time.sleep(SETTLED)
    started, opener = shut.started, threading.Timer(SLOW, shut.gate.set)
    opener.start()
    samples.close()                                   # while reads last and others wait for their turn
    opener.join()
    time.sleep(SETTLED)
    return {"order": torch.tensor(came), "crowd": torch.tensor(float(max(whole.most, slow.most, shut.most) <= threads)),
            "raised": torch.tensor(told), "in turn": torch.tensor([float(good)]), "again": torch.tensor(again),
            "later": torch.tensor(later),
            "ended": torch.tensor(float(comes(lambda: threading.active_count() <= before) and shut.started == started)),
            "together": torch.tensor(float(whole.most >= threads)),
            "meanwhile": torch.tensor(float(went_on and early == [float(i) for i in order[:bad]])),
            "ahead": torch.tensor(float(ahead)), "kept": torch.tensor(float(kept))}


EXERCISES = [
    Exercise("loader", "03", (f"{__name__}.Loader",), draw, run, {
        "order": "all samples come, in their order, and nothing after them",
        "crowd": "it never runs more than `threads` reads at once",
        "raised": "an error in reading comes out of the generator",
        "in turn": "and in its turn: the samples before it are good",
        "again": "after an error, a new loader with its position begins with the failed sample",
        "later": "after an early end, a new loader with its position continues with the next sample",
        "ended": "closing the generator starts no read and leaves no thread",
        "together": "`threads` reads run at once",
        "meanwhile": "during a slow read, earlier samples come out, and later ones are read up to `depth` ahead",
        "ahead": "no read begins that is more than `depth` samples ahead",
        "kept": "it keeps only the samples ahead and the one that it handed out last"},
        flags={"crowd": "more run at once", "raised": "the error was swallowed", "ended": "reads or threads are left over",
               "together": "fewer run at once", "meanwhile": "other samples wait for it", "ahead": "one begins too early",
               "kept": "it keeps more"},
        levels={"together": "overlapped", "meanwhile": "overlapped", "ahead": "memory budget", "kept": "memory budget"},
        ladder=("Without threads it is a loop with `yield`. That is correct, and the first level. When do you count `position`, "
                "so that a sample whose read fails is not skipped?",
                "A `ThreadPoolExecutor` runs as many reads at once as it has threads. Its futures, in a `deque`, keep the order: "
                "wait for the oldest. `pool.submit` at once for all samples keeps all of them, so submit only what is allowed.",
                "Fill the deque up to `depth + 1` futures before you hand out a sample: that one, and `depth` ahead. Put a "
                "`try ... finally` around the loop, which runs when the generator is closed: "
                "`pool.shutdown(cancel_futures=True)` ends the threads, and begins none of the reads that wait."),
        limits=Limits(seconds=60)),
]
