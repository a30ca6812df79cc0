"""Collect whole weights from ranks that hold parts of them, and return results: for an optimizer that needs whole matrices.

    gather     each weight goes to one of the ranks that hold a part of it: one all-to-all
    scatter    the result goes back to all of these, to each rank its own part: another all-to-all

The parts are what the placements say: the box of tensor parallelism, and in it the flat range of ZeRO. If several ranks hold the
same part, one of them sends it. So ranks that hold copies share the work, too. One rank works on each weight: of its holders, the
one whose other weights take the least work. All copies get the same bits back.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course.parallel.agree import run_on_all
from course.parallel.layout import Layout
from course.parallel.placement import Box, Placement, box_shape
from course.utils.errors import CourseError


@dataclass(frozen=True, order=True)
class Part:
    """A range, [first, stop), of the elements of a box, in order."""

    box: Box
    first: int
    stop: int


@dataclass(frozen=True)
class Message:
    """A part of a weight that one rank sends to another, or to itself."""

    name: str
    part: Part
    source: int
    destination: int


class WholeWeights:
    """Moves this rank's parts of weights to the ranks that work on them, and results back. All ranks make it together.

    parameters: parts of different weights, each with a placement. dtype: of what is sent. Raises `CourseError` if the parts on
    all ranks do not make up a weight.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Layout, dtype: torch.dtype):
        self.everyone = layout.mesh.all
        self.empty = torch.empty(0, dtype=dtype, device=layout.mesh.world.device)
        places = [layout.placements[parameter] for parameter in parameters]
        self.names = [place.name for place in places]
        held = run_on_all(self.everyone, lambda: {place.name: (place.global_shape, part_of(place)) for place in places})
        self.shapes = {name: shape for of_rank in held for name, (shape, _) in of_rank.items()}
        holders = {name: {rank: of_rank[name][1] for rank, of_rank in enumerate(held) if name in of_rank} for name in self.shapes}
        workers = choose_workers(self.shapes, holders)
        there = [message for name in sorted(workers) for message in messages_to(workers[name], name, holders[name])]
        back = [Message(name, part, workers[name], rank) for name in sorted(workers) for rank, part in holders[name].items()]
        for name, shape in self.shapes.items():
            check_complete(name, shape, [message.part for message in there if message.name == name])
        mine = self.everyone.rank
        self.there, self.back = ([m for m in found if mine in (m.source, m.destination)] for found in (there, back))
        self.worked_on = [name for name in sorted(workers) if workers[name] == mine]

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """From this rank's parts, one for each parameter, to the weights that it works on, whole, in their logical shapes."""
        mine = dict(zip(self.names, parts, strict=True))
        received = self.exchange(self.there, (mine[m.name] for m in self.outgoing(self.there)))
        return [assemble(self.shapes[name], [(m.part, values) for m, values in received if m.name == name])
                for name in self.worked_on]

    def scatter(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """From the results of the weights that `gather` returned to this rank's parts of all results, flat."""
        results = dict(zip(self.worked_on, wholes, strict=True))
        received = self.exchange(self.back, (cut(results[m.name], m.part) for m in self.outgoing(self.back)))
        values = {message.name: found for message, found in received}
        return [values[name] for name in self.names]

    def outgoing(self, messages: Iterable[Message]) -> list[Message]:
        """The messages that this rank sends, ordered by receiver."""
        return sorted((m for m in messages if m.source == self.everyone.rank), key=lambda m: m.destination)

    def exchange(self, messages: Iterable[Message], values: Iterable[Tensor]) -> list[tuple[Message, Tensor]]:
        """Send the values of this rank's outgoing messages; return the incoming messages with theirs, flat."""
        incoming = sorted((m for m in messages if m.destination == self.everyone.rank), key=lambda m: m.source)
        sent = torch.cat([self.empty, *(value.reshape(-1) for value in values)])
        sizes = [message.part.stop - message.part.first for message in incoming]
        received = sent
        if self.everyone.size > 1:
            ranks, going = range(self.everyone.size), self.outgoing(messages)
            received = sent.new_empty(sum(sizes))
            dist.all_to_all_single(
                received, sent, [sum(m.part.stop - m.part.first for m in incoming if m.source == rank) for rank in ranks],
                [sum(m.part.stop - m.part.first for m in going if m.destination == rank) for rank in ranks],
                group=self.everyone.group)
        return list(zip(incoming, received.split(sizes), strict=True))


def part_of(where: Placement) -> Part:
    """The part of the serial parameter that a tensor with this placement holds."""
    return Part(where.box, *(where.flat or (0, math.prod(box_shape(where.box)))))


def choose_workers(shapes: dict[str, tuple[int, ...]], holders: dict[str, dict[int, Part]]) -> dict[str, int]:
    """The rank that works on each weight: of those that hold a part, the one with the least work so far.

    Weights that few ranks hold come first, because they leave the least choice, and of these the largest.
    The work on a matrix is about rows x columns x the smaller of both: products of the matrix with its transpose.
    """
    load: dict[int, int] = {}
    workers: dict[str, int] = {}
    work = {name: math.prod(shape) * min(math.prod(shape[-2:-1] if len(shape) < 3 else shape[1:-1]), shape[-1])
            for name, shape in shapes.items()}
    for name in sorted(shapes, key=lambda name: (len(holders[name]), -work[name], name)):
        worker = min(holders[name], key=lambda rank: (load.get(rank, 0), rank))
        load[worker] = load.get(worker, 0) + work[name]
        workers[name] = worker
    return workers


def messages_to(worker: int, name: str, holders: dict[int, Part]) -> list[Message]:
    """One message for each different part of a weight: from the worker if it has the part, else from another holder."""
    messages = []
    for part in sorted(set(holders.values())):
        ranks = [rank for rank, held in holders.items() if held == part]
        source = worker if worker in ranks else ranks[worker % len(ranks)]
        messages.append(Message(name, part, source, worker))
    return messages


def check_complete(name: str, shape: tuple[int, ...], parts: Iterable[Part]) -> None:
    """Raise `CourseError` if parts of a weight overlap or leave something out."""
    done: dict[Box, int] = {}                       # the elements of each box that its parts so far make up
    for part in sorted(parts):
        if part.first != done.get(part.box, 0):
            raise incomplete(name)
        done[part.box] = part.stop
    if any(stop != math.prod(box_shape(box)) for box, stop in done.items()):
        raise incomplete(name)
    disjoint = all(any(a[1] <= b[0] or b[1] <= a[0] for a, b in zip(one, other, strict=True))
                   for one, other in combinations(done, 2))
    if not disjoint or sum(done.values()) != math.prod(shape):
        raise incomplete(name)


def incomplete(name: str) -> CourseError:
    """The error for a weight that no rank can make whole."""
    return CourseError(f"optim.name=muon needs {name} whole, and the ranks' parts do not make it up: use optim.name=adamw, or "
                       "parallel.zero=0")


def assemble(shape: tuple[int, ...], parts: list[tuple[Part, Tensor]]) -> Tensor:
    """A whole weight from its parts."""
    whole = parts[0][1].new_empty(shape)
    for box, of_box in groupby(sorted(parts, key=lambda found: found[0]), key=lambda found: found[0].box):
        whole[slices(box)] = torch.cat([values for _, values in of_box]).view(box_shape(box))
    return whole


def cut(whole: Tensor, part: Part) -> Tensor:
    """A part of a whole weight, flat."""
    return whole[slices(part.box)].reshape(-1)[part.first:part.stop]


def slices(box: Box) -> tuple[slice, ...]:
    """The index of a box."""
    return tuple(slice(start, stop) for start, stop in box)
