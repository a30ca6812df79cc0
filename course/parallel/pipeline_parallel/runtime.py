"""Pipeline parallelism: each rank holds some of the blocks, and micro-batches pass from rank to rank.

`split_stages` cuts the model. `Pipeline` runs a schedule of forward and backward passes
(`course/parallel/pipeline_parallel/schedules.py`) and sends the messages between them: activations forward, gradients back.
After the preparation of the first pass, nothing here synchronizes with the device.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course.models.interface import Model, Stream
from course.parallel.mesh import Mesh, new_axis
from course.parallel.pipeline_parallel.schedules import Pass, alive, before, passes_of
from course.parallel.placement import Placements
from course.utils.errors import CourseError

Tensors = tuple[Tensor, ...]
Wire = tuple[int, int, str]                         # sender and receiver, ranks along pp; "F" or "B"
Forward = Callable[[int, int, Any], Any]            # (chunk, micro-batch, previous stage's output) -> this stage's output


def split_stages(model: Model, placements: Placements, mesh: Mesh, chunks: int) -> tuple[Model, ...]:
    """Keep this rank's share of the blocks, with the embedding on the first stage and the head on the last.

    Returns a model for each of this rank's stages; they share its modules. Blocks are distributed as by `torch.tensor_split`,
    so the stages need not divide the depth. A module beside these three, without parameters, is on every stage. Raises
    `CourseError` if a stage would have no block, and for parameters that are not on one stage (`check_stages`).
    """
    pp = mesh.pp
    names, stages = list(model.blocks), pp.size * chunks
    assert model.embed is not None and model.head is not None
    tied = {*model.embed.parameters()} & {*model.head.parameters()}
    if len(names) < stages:
        raise CourseError(f"{pp.size} pipeline ranks with {chunks} chunks each need {stages} blocks, but the model has "
                          f"{len(names)}: use a smaller parallel.pp or parallel.chunks")
    shares = [[names[i] for i in share] for share in torch.arange(len(names)).tensor_split(stages)]
    check_stages(model, placements, shares)
    mine = [shares[chunk * pp.size + pp.rank] for chunk in range(chunks)]
    parts = tuple(part_of(model, share, first=pp.rank == chunk == 0, last=pp.rank == pp.size - 1 and chunk == chunks - 1)
                  for chunk, share in enumerate(mine))
    whole = part_of(model, [name for share in mine for name in share], pp.rank == 0, pp.rank == pp.size - 1)
    model._modules = whole._modules
    if tied:
        tie_ends(placements, tied, mesh)
    for parameter in placements.keys() - set(model.parameters()):
        del placements[parameter]                   # on other stages
    return parts


def check_stages(model: nn.Module, placements: Placements, shares: list[list[str]]) -> None:
    """Raise `CourseError` for a parameter that belongs to no stage, or to several: every rank would train its own copy.

    shares: the blocks of each stage. Only embedding and head may share parameters across stages (`tie_ends`).
    """
    parts = [(stage, f"blocks.{name}") for stage, share in enumerate(shares) for name in share]
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name.partition(".")[0] not in ("embed", "blocks", "head"):
            raise CourseError(f"{name} is in none of model.embed, model.blocks and model.head, which parallel.pp shares out: "
                              "move it into one of them, or use parallel.pp=1")
    holders: dict[str, tuple[int, str]] = {}        # parameter -> the first stage that has it, and its part of the model
    for stage, part in [(0, "embed"), *parts, (len(shares) - 1, "head")]:
        for parameter in model.get_submodule(part).parameters():
            name = placements[parameter].name
            first, holder = holders.setdefault(name, (stage, part))
            if stage != first and (holder, part) != ("embed", "head"):
                raise CourseError(f"{name} is shared by {holder} and {part}, which are on stages {first} and {stage} of the "
                                  "pipeline, and between stages embed and head alone may share: use parallel.pp=1, or a smaller "
                                  "parallel.pp or parallel.chunks that keeps the two on one stage")


def part_of(model: Model, names: list[str], first: bool, last: bool) -> Model:
    """A model with some of the blocks; its modules are the same objects."""
    part = copy.copy(model)
    part._modules = dict(model._modules)
    part.blocks = nn.ModuleDict({name: model.blocks[name] for name in names})
    part.embed = model.embed if first else None
    part.head = model.head if last else None
    return part


@dataclass(frozen=True)
class Message:
    """A stage's output for one sample: each tensor's shape and dtype, and whether it has a gradient."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    grads: tuple[bool, ...]
    single: bool                                    # a tensor, not a tuple

    @classmethod
    def of(cls, out: Stream, samples: int) -> "Message":
        """Describe an output. Raises `CourseError` unless it is one or several tensors with the sample as dim 0."""
        parts = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        for x in parts:
            if not isinstance(x, Tensor) or x.shape[:1] != (samples,):
                what = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
                raise CourseError(f"parallel.pp: a stage puts out {what} for {samples} samples: the model's forward must return, "
                                  "where it has no head, a tensor or a tuple of tensors with the sample as dim 0; what is of no "
                                  "sample (a table of positions) every stage must compute for itself")
        return cls(tuple(tuple(x.shape[1:]) for x in parts), tuple(x.dtype for x in parts),
                   tuple(x.requires_grad for x in parts), isinstance(out, Tensor))

    def empty(self, samples: int, device: torch.device, kind: str = "F") -> list[Tensor]:
        """Buffers for a message of activations ("F"), or for the gradients of those that have one ("B")."""
        return [torch.empty(samples, *shape, dtype=dtype, device=device)
                for shape, dtype, grad in zip(self.shapes, self.dtypes, self.grads, strict=True) if kind == "F" or grad]


class Pipeline:
    """Runs this rank's stages and exchanges messages with its neighbors along pp.

    Every stage but the last returns a tensor or a tuple of tensors with the sample as dim 0. A table that belongs to no sample
    must be computed by each stage. The next stage need not use all tensors; an unused one has a gradient of zeros.

    Each wire has its own process group, because NCCL runs the calls of one group one after another: a send on one wire must not
    wait for a receive on another.

    A receive is posted after the pass before it. Posted earlier, the message could arrive during that pass, but NCCL's waiting
    kernel would take multiprocessors from it: steps took up to 11% longer (results/pp_h200.json, "receives").
    """

    def __init__(self, mesh: Mesh, schedule: str, chunks: int):
        self.pp, self.chunks, self.device = mesh.pp, chunks, mesh.world.device
        self.schedule = schedule
        self.wires = make_wires(mesh, chunks)
        self.messages: dict[int, Message] = {}      # by the stage that returns it
        self.under_way: list[tuple[dist.Work, Tensor]] = []
        self.rehearsal: Callable[[], AbstractContextManager] = nullcontext      # the context of passes that do not train

    def train(self, forward: Forward, samples: Sequence[int]) -> list[Tensor]:
        """Run forward and backward of every micro-batch; the last stage's `forward` returns the scalar to differentiate.

        samples: the number in each micro-batch. Returns these scalars, on other stages an empty list.
        """
        passes = passes_of(self.schedule, self.pp.size, self.pp.rank, len(samples), self.chunks)
        if not self.messages:
            self._agree(forward, samples[0], alive(passes) // self.chunks + 1)
        losses: list[Tensor] = []
        kept: dict[tuple[int, int], tuple[Stream | None, Stream]] = {}           # input and output of forward passes
        coming = self._receive(passes[0], samples)
        for work, after in zip(passes, [*passes[1:], None], strict=True):
            given = arrive(*coming)
            if work.kind == "F":
                x = self._as_input(work, given)
                out = forward(work.chunk, work.micro, x)
                kept[work.chunk, work.micro] = x, out
                self._send(work, [part.detach() for part in as_tuple(out)])
                losses += [out.detach()] if self._stage(work) == self.pp.size * self.chunks - 1 else []
            else:
                x, out = kept.pop((work.chunk, work.micro))
                torch.autograd.backward([part for part in as_tuple(out) if part.requires_grad], given or None)
                self._send(work, [gradient(part) for part in as_tuple(x) if part.requires_grad])
            if after is not None:                                   # only now: beside the pass it would cost more than it hides
                coming = self._receive(after, samples)
        self._finish()
        return losses

    @torch.no_grad()
    def infer(self, forward: Forward, samples: int) -> Stream | None:
        """Run one forward pass through all stages. Returns the output on the last rank, None on the others."""
        if not self.messages:
            with torch.enable_grad():
                self._agree(forward, samples, 1)
        out = None
        for chunk in range(self.chunks):
            work = Pass("F", chunk, 0)
            out = forward(chunk, 0, self._as_input(work, arrive(*self._receive(work, [samples]))))
            self._send(work, list(as_tuple(out)))
        self._finish()
        return out if self.pp.rank == self.pp.size - 1 else None

    def _agree(self, forward: Forward, samples: int, memory: int) -> None:
        """Once, before the first pass: run forward passes on zeros, from which every stage learns the others' output shapes.

        On a GPU they also make the allocator reserve memory for `memory` activations of each chunk. Allocating in the first step
        would wait for the messages in flight, and some of these wait for this rank.
        """
        kept = []
        for stage in range(self.pp.size * self.chunks):
            owner = self.pp.ranks[stage % self.pp.size]
            found: list[Message | None] = [None]
            if stage % self.pp.size == self.pp.rank:
                work = Pass("F", stage // self.pp.size, 0)
                for _ in range(memory if self.device.type == "cuda" else 1):
                    given = self.messages[stage - 1].empty(samples, self.device) if stage else []
                    with self.rehearsal():
                        kept.append(forward(work.chunk, 0, self._as_input(work, [x.zero_() for x in given])))
                if stage < self.pp.size * self.chunks - 1:          # nobody receives the last one's output
                    found = [Message.of(kept[-1], samples)]
            dist.broadcast_object_list(found, owner, group=self.pp.group, device=torch.device("cpu"))
            if found[0] is not None:
                self.messages[stage] = found[0]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _as_input(self, work: Pass, given: list[Tensor]) -> Stream | None:
        if not given:
            return None
        message = self.messages[self._stage(work) - 1]
        parts = tuple(x.requires_grad_(grad) for x, grad in zip(given, message.grads, strict=True))
        return parts[0] if message.single else parts

    def _stage(self, work: Pass) -> int:
        return work.chunk * self.pp.size + self.pp.rank

    def _receive(self, work: Pass, samples: Sequence[int]) -> tuple[list[dist.Work], list[Tensor]]:
        """Begin to receive what a pass needs from another stage. Returns what to wait for, and the buffers."""
        source = before(work, self.pp.rank, self.pp.size, self.chunks)
        if source is None:
            return [], []
        message = self.messages[self._stage(work) - (work.kind == "F")]
        parts = message.empty(samples[work.micro], self.device, work.kind)
        group = self.wires[source[0], self.pp.rank, work.kind]
        works = [dist.irecv(part, self.pp.ranks[source[0]], group) for part in parts]
        return [work for work in works if work is not None], parts

    def _send(self, work: Pass, parts: Iterable[Tensor]) -> None:
        """Send a pass's result to the stage that needs it, if there is one."""
        stage = self._stage(work) + (1 if work.kind == "F" else -1)
        if 0 <= stage < self.pp.size * self.chunks:
            to = stage % self.pp.size
            group = self.wires[self.pp.rank, to, work.kind]
            self.under_way = [(sent, part) for sent, part in self.under_way if not sent.is_completed()]
            for part in parts:
                part = part.contiguous()
                sent = dist.isend(part, self.pp.ranks[to], group)
                self.under_way += [(sent, part)] if sent is not None else []

    def _finish(self) -> None:
        for sent, _ in self.under_way:
            sent.wait()
        self.under_way = []


def as_tuple(x: Stream | None) -> Tensors:
    """A tensor, a tuple of them, or None, as a tuple."""
    return () if x is None else (x,) if isinstance(x, Tensor) else tuple(x)


def gradient(x: Tensor) -> Tensor:
    """The gradient of a stage's input; zeros if the stage did not use it."""
    return torch.zeros_like(x) if x.grad is None else x.grad


def arrive(works: list[dist.Work], parts: list[Tensor]) -> list[Tensor]:
    """Wait for the parts and return them."""
    for work in works:
        work.wait()
    return parts


def make_wires(mesh: Mesh, chunks: int) -> dict[Wire, dist.ProcessGroup]:
    """A two-rank group for every wire of this rank, by (from, to, kind). All ranks make all groups, in the same order."""
    size, mine = mesh.pp.size, {}
    pairs = [(rank, (rank + 1) % size) for rank in range(size if chunks > 1 else size - 1)]     # the last leads back to chunk 1
    for line in mesh.lines("pp"):
        for low, high in pairs:
            for wire in ((low, high, "F"), (high, low, "B")):
                group = dist.new_group([line[low], line[high]])
                if mesh.world.rank in (line[low], line[high]):
                    mine[wire] = group
    return mine


def tie_ends(placements: Placements, tied: set[nn.Parameter], mesh: Mesh) -> None:
    """Weights that the first and the last stage share: each stage has a part of the gradient, the first one owns them."""
    ends = mesh.pp if mesh.pp.size == 2 else new_axis("ends", torch.tensor(mesh.lines("pp"))[:, [0, -1]], mesh.world)
    for parameter in tied if ends.size > 1 else ():
        where = placements[parameter]
        if where.partial_over is not None:
            raise CourseError(f"the first and the last stage share {where.name}, and tp has parts of its gradient as well: "
                              "cut it in the model's tensor_plan, or use parallel.sp=false or parallel.pp=1")
        placements[parameter] = replace(where, partial_over=ends, owner=where.owner and mesh.pp.rank == 0)
