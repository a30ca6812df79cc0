"""Lesson 12's open task: run any schedule of a pipeline."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from course.lab.checks import return_values, tiny_training
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.instruments.bytes_sent import Traffic
from course.lab.sandbox.limits import Limits
from course.parallel import join
from course.parallel.mesh import Axis
from course.parallel.pipeline_parallel.runtime import Pipeline
from course.parallel.pipeline_parallel.schedules import Pass, after, alive, alternate, before, passes_of

MICRO = 2                                            # samples in a micro-batch


def run_schedule(passes: list[Pass], chunks: int, forward: Callable[[int, int, Any], Tensor], axis: Axis,
                 shape: Sequence[int]) -> list[Tensor]:
    """Run this rank's passes in order, exchange their results with the other ranks, and return the losses.

    passes: this rank's list of Pass, from any schedule. chunks: how many chunks of layers each rank has.
    forward(chunk, micro, x): the output of a stage, or on the last stage the loss (). x: the previous
    stage's output, a leaf that requires a gradient; None on the first stage.
    axis: the pipeline's ranks. shape: of every message, activations and gradients, all float64.
    Returns the detached losses in the order of `passes`, on ranks without the last stage an empty list.
    """
    losses: list[Tensor] = []
    kept: dict[tuple[int, int], Any] = {}             # input and output of each forward pass
    sending: list[tuple[Any, Tensor]] = []

    def receive(work: Pass) -> tuple[Any, Tensor | None]:
        source = before(work, axis.rank, axis.size, chunks)
        if source is None:
            return None, None
        buffer = torch.empty(*shape, dtype=torch.float64)
        return dist.irecv(buffer, axis.ranks[source[0]], axis.group, tag=ord(work.kind)), buffer

    coming = receive(passes[0])
    for work, following in zip(passes, [*passes[1:], None], strict=True):
        arriving, given = coming
        if following is not None:
            coming = receive(following)               # it travels while this pass computes
        if arriving is not None:
            arriving.wait()
        if work.kind == "F":
            x = None if given is None else given.requires_grad_()
            out = forward(work.chunk, work.micro, x)
            kept[work.chunk, work.micro] = x, out
            result: Any = out.detach()
            losses += [result] if result.dim() == 0 else []
        else:
            x, out = kept.pop((work.chunk, work.micro))
            out.backward(given)
            result = None if x is None else x.grad
        target = after(work, axis.rank, axis.size, chunks)
        if target is not None:
            result = result.contiguous()
            sending.append((dist.isend(result, axis.ranks[target], axis.group, tag=ord(work.kind)), result))
    for sent, _ in sending:
        sent.wait()
    return losses


class Held:
    """A tensor that a forward pass saves for its backward pass."""

    def __init__(self, tensor: Tensor, owner: tuple[int, int]):
        self.tensor, self.owner = tensor, owner


class Mark(Function):
    """identity | identity; the backward pass tells when it begins."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, begin: Callable[[], None]) -> Tensor:
        ctx.begin = begin
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.begin()
        return grad.clone(), None


class Watched:
    """Counts what a rank does in one call of `run_schedule`."""

    def __init__(self, passes: list[Pass], chunks: int, axis: Axis, shape: Sequence[int]):
        self.passes, self.chunks, self.axis, self.shape = passes, chunks, axis, shape
        self.done: list[Pass] = []                    # passes that began, in order
        self.held: WeakSet[Held] = WeakSet()          # what all forward passes saved and no backward pass freed
        self.outputs: list[ref[Tensor]] = []
        self.most_graphs = self.most_outputs = 0
        self.receives: list[int] = []                 # how many passes had begun when each receive was posted

    def call(self, forward: Callable[[int, int, Any], Tensor]) -> list[Tensor]:
        """The learner's losses; counts everything on the way."""
        receive = dist.ProcessGroup.recv

        def receiving(*arguments: Any) -> Any:
            self.receives.append(len(self.done))
            return receive(*arguments)

        def watched(chunk: int, micro: int, x: Any) -> Tensor:
            self.done.append(Pass("F", chunk, micro))
            with torch.autograd.graph.saved_tensors_hooks(lambda saved: self.hold(saved, (chunk, micro)),
                                                          lambda held: held.tensor):
                out: Tensor = Mark.apply(forward(chunk, micro, x), lambda: self.done.append(Pass("B", chunk, micro)))
            self.outputs.append(ref(out))
            self.most_graphs = max(self.most_graphs, len({held.owner for held in self.held}))
            self.most_outputs = max(self.most_outputs, sum(output() is not None for output in self.outputs))
            return out

        with mock.patch.object(dist.ProcessGroup, "recv", receiving), Traffic() as self.traffic:
            losses = return_values.several(run_schedule(self.passes, self.chunks, watched, self.axis, self.shape),
                                           "run_schedule", "a list of losses")
        return [return_values.tensor(loss, "run_schedule", (), torch.float64, " as a loss") for loss in losses]

    def hold(self, tensor: Tensor, owner: tuple[int, int]) -> Held:
        """Note a saved tensor for as long as autograd keeps it."""
        held = Held(tensor, owner)
        self.held.add(held)
        return held

    @property
    def overlaps(self) -> bool:
        """Whether each receive was posted before the pass before its own began."""
        wanted = [number for number, work in enumerate(self.passes)
                  if before(work, self.axis.rank, self.axis.size, self.chunks)]
        return len(wanted) == len(self.receives) and all(
            begun <= max(number - 1, 0) for begun, number in zip(self.receives, wanted, strict=True))

    @property
    def budget(self) -> float:
        """The bytes of this rank's messages, each sent once."""
        count = sum(after(work, self.axis.rank, self.axis.size, self.chunks) is not None for work in self.passes)
        return 8.0 * count * torch.Size(self.shape).numel()

    def counts(self) -> dict[str, bool]:
        """What holds of this call, by the name of the claim. One output more may live: the variable of the pass before."""
        most = alive(self.passes)
        return {"order": self.done == self.passes, "sent": self.traffic.sent <= self.budget,
                "alive": self.most_graphs <= most and self.most_outputs <= most + 1, "overlap": self.overlaps}


def draw(seed: int, hidden: bool) -> Tensors:
    """What training draws, and how many forward passes each rank runs farther ahead than in 1F1B."""
    found = tiny_training.draw_inputs(seed, samples=12 if hidden else 8)
    return found | {"farther": torch.tensor(1 + int(found["seed"]) % 2)}


def farther_ahead(passes: list[Pass], more: int) -> list[Pass]:
    """A schedule in which this rank runs more forward passes ahead. On the first rank alone, it sends activations and gradients
    in another order than the next rank expects them."""
    forward, backward = ([work for work in passes if work.kind == kind] for kind in ("F", "B"))
    ahead = next(number for number, work in enumerate(passes) if work.kind == "B") - 1
    return alternate(forward, backward, min(ahead + more, len(forward)))


def run(inputs: Tensors) -> Tensors:
    """The real model's losses and weights after two steps with each schedule, and what was counted meanwhile."""
    size, counted, losses, weights = join("cpu").size, dict[str, bool](), [], []

    def train(pipeline: Pipeline, forward: Any, samples: Sequence[int]) -> list[Tensor]:
        passes = farther_ahead(passes_of(pipeline.schedule, pipeline.pp.size, pipeline.pp.rank, len(samples), pipeline.chunks),
                               int(inputs["farther"]) if pipeline.schedule == "1f1b" else int(pipeline.pp.rank == 0))
        if not pipeline.messages:
            pipeline._agree(forward, samples[0], 1)
        watched = Watched(passes, pipeline.chunks, pipeline.pp, (samples[0], *pipeline.messages[0].shapes[0]))
        found = watched.call(forward)
        counted.update({name: holds and counted.get(name, True) for name, holds in watched.counts().items()})
        return found

    for name, p, chunks in (("1f1b", size, 1), ("gpipe", 2, 1), ("interleaved", size, 2)):
        layout = [f"parallel.pp={p}", f"parallel.dp={size // p}", f"parallel.schedule={name}", f"parallel.chunks={chunks}",
                  f"model.depth={p * chunks}", f"train.micro_batch={MICRO}"]
        with mock.patch.object(Pipeline, "train", train):
            trained = tiny_training.train(tiny_training.batches_of(inputs), int(inputs["seed"]), *layout)
        losses.append(trained["losses"])
        weights.append(trained["weights"])
    return {"losses": torch.cat(losses), "weights": torch.cat(weights),
            **{name: torch.tensor(float(holds)) for name, holds in counted.items()}}


EXERCISES = [
    Exercise("run-schedule", "12", (f"{__name__}.run_schedule",), draw, run, {
        "losses": "the library trains with it, by three schedules: the losses are right",
        "weights": "the weights after two steps are right",
        "order": "it runs the passes of the list, in this order",
        "sent": "each result is sent once, to the rank that needs it, and nothing else is sent",
        "alive": "a forward pass's activations and output are freed by its backward pass",
        "overlap": "each message is received while the pass before it computes"},
        flags={"order": "some pass is missing, runs twice, or runs in another place",
               "sent": "it sends more",
               "alive": "it keeps more than the schedule needs",
               "overlap": "some receive is posted later"},
        levels={"sent": "byte budget", "alive": "memory budget", "overlap": "overlapped"},
        ladder=("One loop over the passes is enough. In each turn: receive what this pass needs, if it needs anything; compute; "
                "send the result, if anyone needs it. `schedules.before` and `schedules.after` say who.",
                "Keep the input and the output of each forward pass in a dict by (chunk, micro). The backward pass pops them and "
                "calls `out.backward(...)`, without an argument for the loss. The gradient to send is then `x.grad`.",
                "Receive with `dist.recv` and send with `dist.isend`. Keep each handle together with its tensor, and wait for "
                "all of them after the loop. With two ranks and two chunks, activations and gradients travel in the same "
                "direction: give them different values of `tag`. To overlap, post each receive one pass early, with "
                "`dist.irecv`."),
        sizes=(2, 4), limits=Limits(seconds=180)),
]
