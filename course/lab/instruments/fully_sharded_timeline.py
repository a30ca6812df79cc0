"""Record a step of fully sharded data parallelism: what each unit computes, its collectives, and the memory of whole weights."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from course.data import Batch
from course.ops.storage import has_memory
from course.parallel.data_parallel.fsdp import FSDP, FlatParameters, Unit
from course.training.assemble import Training

Span = tuple[int, float, float]                      # unit, begin, end


@dataclass
class ShardedTimeline:
    """A rank's step. Times are in seconds since it began; units are numbered in the order of computation."""

    events: list[tuple[str, int]] = field(default_factory=list)         # (what, unit): gather, forward, backward, free, reduce
    forward: list[Span] = field(default_factory=list)
    backward: list[Span] = field(default_factory=list)
    gathers: list[Span] = field(default_factory=list)                   # by the time at which they ended
    reduces: list[Span] = field(default_factory=list)                   # each until the rank has waited for it
    memory: list[tuple[float, int]] = field(default_factory=list)       # (time, bytes of whole weights) at each change
    whole: list[int] = field(default_factory=list)                      # units whole at each change
    share_bytes: int = 0                                                # bytes of this rank's share of the weights

    @property
    def peak(self) -> int:
        """The most bytes of weights at once: those of whole units and the share."""
        return self.share_bytes + max(bytes_whole for _, bytes_whole in self.memory)


def record_step(training: Training, batch: Batch) -> ShardedTimeline:
    """Record a training step of this rank's part of a batch.

    Needs a CPU, where calls are synchronous, and parallel.zero=2 or 3 with one set of weights for each unit, as in float32:
    raises TypeError otherwise.
    """
    sharding = training.gradients
    if not isinstance(sharding, FSDP) or any(len(unit.needed) != 1 for unit in sharding.units):
        raise TypeError("fully_sharded_timeline.record_step watches parallel.zero=2 or 3 in float32")
    timeline = ShardedTimeline(share_bytes=sum(flat.master.nbytes for flat in sharding.flats))
    recorder = Recorder(timeline, sharding)
    recorder.install()
    try:
        training.step(batch)
    finally:
        recorder.remove()
    return timeline


class Recorder:
    """Wraps the methods of a sharding and of its units' weights for one step."""

    def __init__(self, timeline: ShardedTimeline, sharding: FSDP):
        self.timeline, self.sharding = timeline, sharding
        self.unit_of = {id(unit.needed[0]): number for number, unit in enumerate(sharding.units)}
        self.zero, self.entered, self.backward_of = time.perf_counter(), 0.0, -1
        self.wrapped: list[tuple[Any, str]] = []
        self.reduce_began: dict[int, float] = {}     # unit -> when its reduce-scatter in flight began

    def now(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self.zero

    def wrap(self, thing: Any, name: str, around: Callable[..., None]) -> None:
        """Replace an object's method by `around(original method, *arguments)`."""
        setattr(thing, name, partial(around, getattr(thing, name)))
        self.wrapped.append((thing, name))

    def install(self) -> None:
        """Begin to record."""
        for flat in self.sharding.flats:
            self.wrap(flat, "start_gather", partial(self.gather, flat))
            self.wrap(flat, "start_reduce", partial(self.reduce, flat))
            self.wrap(flat, "finish_reduce", partial(self.finish_reduce, flat))
            self.wrap(flat, "free", partial(self.free, flat))
        self.wrap(self.sharding, "enter_forward", partial(self.enter, "forward"))
        self.wrap(self.sharding, "leave_forward", self.leave_forward)
        self.wrap(self.sharding, "enter_backward", partial(self.enter, "backward"))
        self.wrap(self.sharding, "leave_backward", self.leave_backward)
        self.wrap(self.sharding, "end_backward", self.end_backward)

    def remove(self) -> None:
        """End recording."""
        for thing, name in self.wrapped:
            delattr(thing, name)

    def note_memory(self) -> None:
        """Record which weights are whole."""
        whole = [flat.whole.nbytes for flat in self.sharding.flats if has_memory(flat.whole)]
        self.timeline.memory.append((self.now(), sum(whole)))
        self.timeline.whole.append(len(whole))

    def gather(self, flat: FlatParameters, original: Callable[[], None]) -> None:
        """Record an all-gather, unless the weights are here or on their way."""
        idle, begin = not flat.gathered and flat.gathering is None, self.now()
        original()
        if idle:
            unit = self.unit_of[id(flat)]
            self.timeline.events.append(("gather", unit))
            self.note_memory()
            flat.gathering.get_future().add_done_callback(partial(self.gather_ended, unit, begin))

    def gather_ended(self, unit: int, begin: float, future: Any) -> None:
        """Record the end of an all-gather."""
        self.timeline.gathers.append((unit, begin, self.now()))

    def reduce(self, flat: FlatParameters, original: Callable[[], None]) -> None:
        """Record the begin of a reduce-scatter."""
        begin, unit = self.now(), self.unit_of[id(flat)]
        original()
        self.timeline.events.append(("reduce", unit))
        self.reduce_began[unit] = begin

    def finish_reduce(self, flat: FlatParameters, original: Callable[[], None]) -> None:
        """Record the end of a reduce-scatter: gloo does not say when one is done, so it is when the rank has waited for it."""
        original()
        unit = self.unit_of[id(flat)]
        if unit in self.reduce_began:
            self.timeline.reduces.append((unit, self.reduce_began.pop(unit), self.now()))

    def free(self, flat: FlatParameters, original: Callable[[], None]) -> None:
        """Record that weights are freed, if they are whole."""
        whole = has_memory(flat.whole)
        original()
        if whole:
            self.timeline.events.append(("free", self.unit_of[id(flat)]))
            self.note_memory()

    def enter(self, what: str, original: Callable[[Unit], None], unit: Unit) -> None:
        """Record the begin of a unit's pass, which is when its weights have come."""
        original(unit)
        number = self.unit_of[id(unit.needed[0])]
        self.timeline.events.append((what, number))
        self.entered, self.backward_of = self.now(), number if what == "backward" else -1

    def leave_forward(self, original: Callable[[Unit], None], unit: Unit) -> None:
        """Record the end of a unit's forward pass."""
        self.timeline.forward.append((self.unit_of[id(unit.needed[0])], self.entered, self.now()))
        original(unit)

    def leave_backward(self, original: Callable[[Unit], None], unit: Unit) -> None:
        """Record the end of a unit's backward pass."""
        self.timeline.backward.append((self.backward_of, self.entered, self.now()))
        self.backward_of = -1
        original(unit)

    def end_backward(self, original: Callable[[], None]) -> None:
        """Record the end of the backward pass of the first unit, whose input has no gradient."""
        if self.backward_of >= 0:
            self.timeline.backward.append((self.backward_of, self.entered, self.now()))
        original()
