"""Lesson 07: an all-reduce of sends and receives, gradients averaged over the ranks, and buckets sent during backward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course.lab.checks import random_inputs, return_values, tiny_training
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.instruments.bytes_sent import Traffic
from course.lab.sandbox.limits import Limits
from course.parallel.data_parallel import gradients as data
from course.parallel.mesh import Axis, Mesh, join
from course.parallel.placement import serial_placements

RANKS = Limits(seconds=120)                          # most of it for machines that are busy
EVEN = 12                                            # numbers, of which every rank has equally many in its piece
BUCKETS = ("parallel.data=bucketed", "parallel.bucket_mb=0.01")


def ring_all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum of x over the axis, in new memory, made of sends to the right neighbor and receives from the left one."""
    total = x.clone()
    pieces = total.view(-1).tensor_split(axis.size)                     # views: writing into a piece writes into `total`
    right, left = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[axis.rank - 1]
    for step in range(2 * (axis.size - 1)):
        at = (axis.rank - step) % axis.size                             # the piece that leaves; its neighbor at - 1 comes
        coming = torch.empty_like(pieces[at - 1])
        for work in [dist.isend(pieces[at], right, axis.group), dist.irecv(coming, left, axis.group)]:
            work.wait()                              # type: ignore[union-attr]
        if step < axis.size - 1:
            pieces[at - 1].add_(coming)                                 # reduce-scatter
        else:
            pieces[at - 1].copy_(coming)                                # all-gather
    return total


def collective_times(ready: Sequence[float], seconds: Sequence[float]) -> list[tuple[float, float]]:
    """When the all-reduce of each bucket begins and ends: in order, one at a time, none before its bucket is ready."""
    times: list[tuple[float, float]] = []
    free = 0.0                                       # when the network has done what came before
    for at, lasts in zip(ready, seconds, strict=True):
        begin = max(at, free)
        free = begin + lasts
        times.append((begin, free))
    return times


def draw_parts(seed: int, hidden: bool) -> Tensors:
    """What each of up to four ranks brings: a tensor whose size no number of ranks divides, one smaller than their number, and a
    number, which fills a last tensor."""
    generator = random_inputs.generator(seed)
    shapes = [(4, 13, 5), (4, 2)] if hidden else [(4, 3, 5), (4, 3)]
    return {f"x{i}": torch.randn(shape, generator=generator, dtype=torch.float64) for i, shape in enumerate(shapes)} | {
        "own": 1 + torch.rand(4, generator=generator, dtype=torch.float64)}


class Message:
    """A message under way: what comes is there when one has waited for it, and not before; what leaves has to stay as it is."""

    def __init__(self, work: Any, tensor: Tensor, coming: Tensor | None = None):
        self.work, self.tensor, self.coming = work, tensor, coming
        self.leaving = None if coming is not None else tensor.clone()
        self.waited, self.intact = False, True

    def wait(self, *timeout: Any) -> bool:
        self.work.wait()
        if not self.waited and self.coming is not None:
            self.tensor.copy_(self.coming)
        if not self.waited and self.leaving is not None:
            self.intact = self.tensor.equal(self.leaving)
        self.waited = True
        return True


@contextmanager
def intercepted_messages() -> Iterator[list[Message]]:
    """In the block, every message that `isend` and `irecv` begin. One that nobody has waited for is, at the end, too, so that it
    does not meet what comes next; by then what came is thrown away."""
    messages: list[Message] = []
    real = dist.isend, dist.irecv

    def isend(tensor: Tensor, *to: Any, **more: Any) -> Message:
        messages.append(Message(real[0](tensor, *to, **more), tensor))
        return messages[-1]

    def irecv(tensor: Tensor, *source: Any, **more: Any) -> Message:
        coming = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        tensor.fill_(torch.nan)                      # whoever reads it too early is to see it
        messages.append(Message(real[1](coming, *source, **more), tensor, coming))
        return messages[-1]

    def put(*functions: Any) -> None:
        for module in (dist, dist.distributed_c10d):                    # batch_isend_irecv looks into the second
            for name, function in zip(("isend", "irecv"), functions, strict=True):
                setattr(module, name, function)

    put(isend, irecv)
    try:
        yield messages
        for message in messages:
            if not message.waited:
                message.work.wait()
    finally:
        put(*real)


def mesh_of_pairs() -> Mesh:
    """A mesh whose dp has two ranks: all that there are, or every second of them. Along cp each is alone."""
    return tiny_training.mesh(tiny_training.settings(f"parallel.tp={join('cpu').size // 2}"))


def run_ring_all_reduce(inputs: Tensors) -> Tensors:
    """All-reduce by the learner's ring, and what it sent."""
    axis = tiny_training.mesh(tiny_training.settings()).dp
    found: Tensors = {}
    thrifty = alone = kept = right = one = sent = came = intact = True
    neighbors = {(axis.rank + 1) % axis.size, axis.ranks[(axis.rank + 1) % axis.size]}     # counted in the axis, or in the world
    for name, parts in inputs.items():
        mine = parts[axis.rank].clone() if name != "own" else parts[axis.rank].repeat(EVEN)
        with Traffic() as traffic, intercepted_messages() as messages:
            total = ring_all_reduce(mine, axis)
        found[name] = return_values.tensor(total, "ring_all_reduce", tuple(mine.shape), mine.dtype)
        if name == "own":                            # sorted: in whatever order pieces go round
            came_by = [message.coming.flatten() for message in messages if message.coming is not None]
            found[name] = torch.cat([*came_by, mine[:0]]).sort().values
        most = 2 * (axis.size - 1) * -(-mine.numel() // axis.size) * mine.element_size()
        thrifty, alone = thrifty and traffic.sent <= most, alone and not {*traffic.kinds} - {"send", "recv"}
        right, one = right and traffic.to <= neighbors, one and len(traffic.to) < 2
        sent = sent and all(message.waited for message in messages if message.coming is None)
        came = came and all(message.waited for message in messages if message.coming is not None)
        intact = intact and all(message.intact for message in messages)
        kept = kept and bool((mine == parts[axis.rank]).all())
    pair, parts = mesh_of_pairs().dp, inputs["x0"]
    with intercepted_messages():
        found["pair"] = return_values.tensor(ring_all_reduce(parts[pair.ranks[pair.rank]].clone(), pair), "ring_all_reduce",
                                        tuple(parts.shape[1:]), parts.dtype)
    held = {"thrifty": thrifty, "alone": alone, "right": right, "one": one, "sent": sent, "came": came, "intact": intact,
            "kept": kept}
    return found | {name: torch.tensor(float(value)) for name, value in held.items()}


def draw_batches(seed: int, hidden: bool) -> Tensors:
    """Two global batches."""
    return tiny_training.draw_inputs(seed, samples=12 if hidden else 8)


def run_average_gradients(inputs: Tensors) -> Tensors:
    """The library's training step with the learner's averaging; and what it does with a few gradients, one of them missing."""
    trained = tiny_training.train(tiny_training.batches_of(inputs), int(inputs["seed"]))
    mesh = mesh_of_pairs()
    axis = mesh.dp
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in ((3,), (2, 2), (4,), (2,), (5,))]
    for parameter, value in zip(parameters[::2], inputs["input0"].flatten()[3 * axis.ranks[axis.rank]:], strict=False):
        parameter.grad = torch.full_like(parameter, float(value))
    with Traffic() as traffic:
        data.average_gradients((p for p in parameters), axis)           # as model.parameters() does, it comes once
    together = sum(kind not in ("send", "recv") for kind in traffic.kinds)
    lean = {*traffic.kinds} <= {"all-reduce"}
    absent = parameters[1].grad is None
    means = torch.stack([p.grad[0] for p in parameters[::2] if p.grad is not None])
    with Traffic() as traffic:
        data.average_gradients(parameters, mesh.cp)
    return trained | {"together": torch.tensor(float(together)), "lean": torch.tensor(float(lean)),
                      "absent": torch.tensor(float(absent)), "means": means,
                      "one": torch.tensor(float(not traffic.calls))}


def draw_sizes(seed: int, hidden: bool) -> Tensors:
    """Numbers of elements of parameters, one of four in float64, and the size of a bucket in bytes.

    The first three, in float32, fill a bucket to the last byte, and so do the sixth and seventh; the fourth and fifth, of both
    formats, have room in one. One in the middle is larger than a bucket.
    """
    generator = random_inputs.generator(seed)
    many = 60 if hidden else 36
    sizes, full = torch.randint(1, 300, (many,), generator=generator), 625 + random_inputs.number(seed) % 125
    sizes[many // 2] = 3000
    sizes[:7] = torch.tensor([200, 250, full - 450, 150, 100, 50, full - 50])
    double = torch.arange(many) % 12 > 8
    double[4] = True
    return {"sizes": sizes, "double": double, "bucket": torch.tensor(4 * full)}


def run_in_buckets(inputs: Tensors) -> Tensors:
    """Parameters put into buckets; and those from the middle on, whose first is larger than a bucket."""
    parameters = [nn.Parameter(torch.empty(n, dtype=torch.float64 if double else torch.float32))
                  for n, double in zip(inputs["sizes"].tolist(), inputs["double"].tolist(), strict=True)]
    place = {id(parameter): index for index, parameter in enumerate(parameters)}
    buckets, later = (return_values.several(data.partition_into_buckets(some, int(inputs["bucket"])), "in_buckets",
                                            "a list of buckets")
                      for some in (parameters, parameters[len(parameters) // 2:]))
    return {"order": torch.tensor([place[id(parameter)] for bucket in buckets for parameter in bucket]),
            "lengths": torch.tensor([len(bucket) for bucket in buckets]),
            "none": torch.tensor(float(not data.partition_into_buckets([], int(inputs["bucket"])))),
            "later": torch.tensor([len(bucket) for bucket in later])}


class Branches(nn.Module):
    """The sum of four linears of different sizes, which odd ranks compute in another order: their gradients come in another."""

    def __init__(self, generator: torch.Generator):
        super().__init__()
        for width in (2, 3, 4, 5):
            branch = nn.Linear(width, 1, bias=False, dtype=torch.float64)
            branch.weight.data.normal_(generator=generator)
            self.add_module(f"branch{width}", branch)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        order = list(self.children()) if rank % 2 else list(self.children())[::-1]
        return sum((branch(x[:, :branch.in_features]) ** 2 for branch in order), x.new_zeros(())).sum()


def branches(inputs: Tensors, there: list[int]) -> Tensor:
    """Gradients, averaged in buckets of one parameter each, of a model whose gradients come in another order on odd ranks.

    there: has one more number whenever one of the four gradients has come.
    """
    axis = mesh_of_pairs().dp
    model = Branches(random_inputs.generator(int(inputs["seed"])))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: there.append(1))        # before the learner's hears of it
    gradients = data.Bucketed(model, serial_placements(model, average_over=axis), 1e-9)
    gradients.begin(1)
    x = inputs["input0"].flatten(1)[:, :5] * (1 + axis.ranks[axis.rank])
    model(x, axis.rank).backward()
    gradients.finish()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


class PendingAllReduce:
    """An all-reduce under way: its sum is there when one has waited for it, and not before."""

    patient = True                                   # whether no backward pass has waited for one
    left = 0                                         # how many nobody has waited for

    def __init__(self, tensor: Tensor, total: Tensor):
        self.tensor, self.total, self.waited = tensor, total, False
        PendingAllReduce.left += 1

    def wait(self) -> bool:
        PendingAllReduce.patient = PendingAllReduce.patient and not in_backward()
        PendingAllReduce.left -= not self.waited
        self.waited = True
        self.tensor.copy_(self.total)
        return True


def in_backward() -> bool:
    """Whether a backward pass is on."""
    return torch._C._current_graph_task_id() >= 0


@contextmanager
def watch_all_reduce(there: Sequence[int] = ()) -> Iterator[list[tuple[float, float, float]]]:
    """In the block, (size, 1 if a backward pass is on, how much is `there`) of every all-reduce begun and not waited for."""
    seen: list[tuple[float, float, float]] = []
    real = dist.all_reduce

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if not async_op:
            return real(tensor, op, group)
        seen.append((float(tensor.numel()), float(in_backward()), float(len(there))))
        total = tensor.clone()
        real(total, op, group)
        return PendingAllReduce(tensor, total)

    dist.all_reduce = all_reduce
    try:
        yield seen
    finally:
        dist.all_reduce = real


def run_overlap(inputs: Tensors) -> Tensors:
    """The library's training with the learner's buckets, without and with micro-batches, and how its collectives were started."""
    found: Tensors = {}
    PendingAllReduce.patient = lean = True
    PendingAllReduce.left = 0
    for name, more in (("whole", ()), ("micro", ("train.micro_batch=1",))):
        with watch_all_reduce() as seen, Traffic() as traffic:
            trained = tiny_training.train(tiny_training.batches_of(inputs), int(inputs["seed"]), *BUCKETS, *more)
        started = torch.tensor(seen).reshape(-1, 3)
        found |= {f"{name}_{key}": trained[key] for key in ("losses", "weights")}
        found |= {f"{name}_sizes": started[:, 0], f"{name}_beside": started[:, 1]}
        lean = lean and {*traffic.kinds} - {"send", "recv"} <= {"all-reduce"}
    there: list[int] = []
    with watch_all_reduce(there) as seen:
        found["branches"] = branches(inputs, there)
    started = torch.tensor(seen).reshape(-1, 3)
    return found | {"branches_beside": started[:, 1], "branches_when": started[:, 2],
                    "lean": torch.tensor(float(lean)), "awaited": torch.tensor(float(PendingAllReduce.left == 0)),
                    "patient": torch.tensor(float(PendingAllReduce.patient))}


def draw_buckets(seed: int, hidden: bool) -> Tensors:
    """When buckets are ready, and how long the all-reduce of each takes: now the network is faster, and now backward.

    Two are ready before the one in front of them, the first four queue, and before the fifth the network has nothing to do.
    """
    generator = random_inputs.generator(seed)
    many = 17 if hidden else 9
    ready = torch.rand(many, generator=generator, dtype=torch.float64).cumsum(0)
    ready[[0, 1, 5, 6]] = ready[[1, 0, 6, 5]]
    ready[4:] += 10
    seconds = 1.2 * torch.rand(many, generator=generator, dtype=torch.float64)
    seconds[:4] = 1 + seconds[:4] / 10
    return {"ready": ready, "seconds": seconds}


def run_collective_times(inputs: Tensors) -> Tensors:
    """Begin and end of each all-reduce."""
    answer = return_values.several(collective_times(inputs["ready"].tolist(), inputs["seconds"].tolist()), "collective_times",
                              "a list of pairs")
    found = torch.tensor([return_values.pair(times, "collective_times", "(begin, end)") for times in answer], dtype=torch.float64)
    return {"begin": found[:, 0], "end": found[:, 1]}


EXERCISES = [
    Exercise("ring-all-reduce", "07", (f"{__name__}.ring_all_reduce",), draw_parts, run_ring_all_reduce, {
        "x0": "every rank has the sum of what the ranks brought",
        "x1": "also of a tensor with fewer elements than ranks, or hardly more",
        "pair": "and along an axis of two ranks, which are not neighbors if there are more",
        "own": "in each step, a piece whose sum counts one more rank comes from the left; at the end, the complete sums come",
        "alone": "it uses sends and receives only",
        "right": "every rank sends to its right neighbor",
        "one": "and to one rank alone",
        "came": "it waits for all that it receives",
        "sent": "and for all that it sends",
        "intact": "no piece changes before its send is complete",
        "thrifty": "no rank sends more than 2 (n - 1) pieces of an n-th of the tensor",
        "kept": "it does not change its input"}, flags={
            "alone": "a collective is called", "right": "one sends to another", "one": "one sends to several",
            "came": "a receive is begun that nobody waits for", "sent": "a send is begun that nobody waits for",
            "intact": "one does", "thrifty": "one sends more",
            "kept": "it changes x"},
        sizes=(2, 4), points=3, limits=RANKS),
    Exercise("average-gradients", "07", ("course.parallel.data_parallel.gradients.average_gradients",), draw_batches,
             run_average_gradients, {
        "losses": "the loss of each of two steps is that of the serial run",
        "weights": "after two steps every rank has the weights of the serial run",
        "means": "the mean is that over the ranks of the axis, also if there are others",
        "together": "all gradients are averaged at once: the collectives that it takes",
        "lean": "and that is an all-reduce",
        "absent": "a parameter without a gradient is left out",
        "one": "along an axis of one rank nothing is sent"}, flags={
            "lean": "other collectives or messages are used", "absent": "it has a gradient now",
            "one": "a collective is called all the same"},
        sizes=(2, 4), points=2, limits=RANKS),
    Exercise("in-buckets", "07", ("course.parallel.data_parallel.gradients.partition_into_buckets",), draw_sizes, run_in_buckets,
             {
        "order": "every parameter is in one bucket, in the order in which they came",
        "lengths": "each bucket is as full as it may be, and no fuller",
        "later": "also where already the first parameter is larger than a bucket",
        "none": "without parameters there is no bucket"}, flags={"none": "there is one"}),
    Exercise("overlap", "07",
             tuple(f"course.parallel.data_parallel.gradients.{name}" for name in ("gradient_ready", "start_mean", "finish_mean")),
             draw_batches, run_overlap, {
        "whole_losses": "the loss of each of two steps is that of the serial run",
        "whole_weights": "after two steps every rank has the weights of the serial run",
        "whole_sizes": "each bucket's all-reduce is started once a step, in order",
        "whole_beside": "and while the backward pass is still running",
        "micro_losses": "the loss is the same in micro-batches of one sample",
        "micro_weights": "and so are the weights",
        "micro_sizes": "with micro-batches, too, each bucket is sent once a step",
        "micro_beside": "during the last backward pass",
        "branches": "gradients that come in another order on another rank are averaged correctly",
        "branches_beside": "and all buckets that are complete are started at once",
        "branches_when": "a bucket does not wait for gradients that are none of its own, nor of those before it",
        "lean": "only all-reduces are called, which send the least",
        "awaited": "every all-reduce that is begun is waited for in the end",
        "patient": "no backward pass waits for an all-reduce"}, flags={
            "awaited": "one is not",
            "lean": "another collective is",
            "patient": "one does: what it waits for is not hidden"}, sizes=(2, 4), points=3, limits=RANKS),
    Exercise("collective-times", "07", (f"{__name__}.collective_times",), draw_buckets, run_collective_times, {
        "begin": "every all-reduce begins as soon as it may",
        "end": "and ends after its own seconds"}),
]
