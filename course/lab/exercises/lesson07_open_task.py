"""Lesson 07's open task: data parallelism from hooks, for any parameters."""

from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from course.lab.checks import random_inputs, tiny_training
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn
from course.lab.instruments.bytes_sent import Traffic
from course.lab.instruments.tensor_memory import MemoryMeter
from course.lab.sandbox.limits import Limits
from course.parallel.data_parallel.gradients import GradientSync
from course.parallel.mesh import Axis

MICROS, UNEVEN, WIDTH = (1, 2, 2), 1, 20                # micro-batches of each step; the step in which some gradients are missing
MANY, LARGE, BUCKETS = 34, 19, 8                      # parameters; the one larger than a bucket; buckets that all would fill
FROZEN, TWICE, FIRST_ONLY, SELDOM, UNUSED = 4, 6, 12, 14, 27            # parameters; see `uses`
SPARE = 1024                                         # bytes for the gradients of activations


class DataParallel:
    """Makes each gradient the mean over an axis, and sends while the backward pass runs."""

    def __init__(self, parameters: Iterable[nn.Parameter], axis: Axis, bucket_bytes: int):
        """parameters: float64, the same on all ranks, in the order of the forward pass; some need no gradient.

        axis: `size`, `rank`, `group`. bucket_bytes: the most that an all-reduce takes, unless one parameter is larger.
        """
        self.axis = axis
        self.buckets: list[list[nn.Parameter]] = [[]]
        for p in reversed([p for p in parameters if p.requires_grad]):
            if self.buckets[-1] and sum(q.nbytes for q in [*self.buckets[-1], p]) > bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(p)

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """The backward pass of a micro-batch. After a step's last one, each gradient is the mean of the ranks' sums.

        On a rank where a parameter got no gradient in the whole step, that counts as zero. Between steps, all gradients are
        set to None.
        """
        if not last:
            loss.backward()
            return
        missing: set[Tensor] = {p for bucket in self.buckets for p in bucket}
        sent: list[tuple[Any, Tensor]] = []

        def arrived(p: Tensor) -> None:
            missing.discard(p)
            while len(sent) < len(self.buckets) and missing.isdisjoint(self.buckets[len(sent)]):
                start()

        def start() -> None:                         # the next bucket; its gradients become views of what is sent
            bucket = self.buckets[len(sent)]
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = part.view_as(p)
            sent.append((dist.all_reduce(flat, group=self.axis.group, async_op=True), flat))

        hooks = [p.register_post_accumulate_grad_hook(arrived) for p in missing]
        loss.backward()
        for hook in hooks:
            hook.remove()
        while len(sent) < len(self.buckets):         # some gradient did not come
            start()
        for work, flat in sent:
            work.wait()
            flat /= self.axis.size


class Pending:
    """An all-reduce under way: its sum is there when one has waited for it, and not before."""

    def __init__(self, watched: "Watched", tensors: list[Tensor], totals: list[Tensor]):
        self.watched, self.tensors, self.totals = watched, tensors, totals

    def wait(self, *timeout: Any) -> bool:
        self.watched.waited_early = self.watched.waited_early or self.watched.computing
        for tensor, total in zip(self.tensors, self.totals, strict=True):
            tensor.copy_(total)
        return True


class Watched:
    """Within this context, what a rank's all-reduces do while gradients come."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.awaited: set[Tensor] = {p for p in parameters if p.requires_grad}
        self.begun = 0                               # bytes of the all-reduces that have begun in this pass
        self.begun_before_last = 0                   # and of those before its last gradient
        self.computing = self.waited_early = False   # whether gradients are still to come; whether one waited meanwhile
        for p in self.awaited:                       # before the learner's hooks
            p.register_post_accumulate_grad_hook(self.came)

    def begin(self) -> None:
        """A backward pass begins."""
        self.left, self.begun, self.begun_before_last, self.computing = set(self.awaited), 0, 0, True
        self.waited_early = False

    def came(self, p: Tensor) -> None:
        self.left.discard(p)
        if not self.left:
            self.computing, self.begun_before_last = False, self.begun

    def __enter__(self) -> None:
        real = dist.ProcessGroup.allreduce

        def allreduce(group: Any, tensors: Any, *options: Any, **more: Any) -> Pending:
            tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            self.begun += sum(tensor.nbytes for tensor in tensors)
            with _disable_current_modes():           # not the answer's memory
                totals = [tensor.clone() for tensor in tensors]
            real(group, totals, *options, **more).wait()
            return Pending(self, tensors, totals)

        self.patch = mock.patch.object(dist.ProcessGroup, "allreduce", allreduce)
        self.patch.start()

    def __exit__(self, *raised: Any) -> None:
        self.patch.stop()


def refuse(self: Any, *arguments: Any, **more: Any) -> None:
    """In place of the constructor of what the task asks for."""
    raise InvalidReturn(f"`DataParallel` uses {type(self).__name__}, which does it all",
                        "write it with hooks on parameters and with all-reduces")


def draw(seed: int, hidden: bool) -> Tensors:
    """Parameters, of which one does not fit into a bucket, the size of a bucket, and each rank's samples of each micro-batch."""
    generator = random_inputs.generator(seed)
    rows, columns = (torch.randint(2, most, (MANY,), generator=generator).tolist() for most in ((9, 7) if hidden else (7, 9)))
    rows[LARGE], columns[LARGE] = WIDTH, 8 if hidden else 7
    shapes = list(zip(rows, columns, strict=True))
    total = 8 * sum(a * b for i, (a, b) in enumerate(shapes) if i != FROZEN)
    return {f"p{i}": random_inputs.normal(generator, *shape) for i, shape in enumerate(shapes)} | {
        "x": random_inputs.normal(generator, len(MICROS), max(MICROS), 4, 2, WIDTH), "bucket": torch.tensor(total // BUCKETS)}


def uses(step: int, micro: int, rank: int) -> list[int]:
    """The parameters that a rank's micro-batch uses, in the order of the forward pass.

    In the uneven step one has a gradient in the first micro-batch alone, one on no rank, and one on all but the first; and odd
    ranks compute in another order.
    """
    order = sorted([*range(MANY), TWICE])
    if step != UNEVEN:
        return order
    left_out = {UNUSED, *([SELDOM] if rank == 0 else []), *([FIRST_ONLY] if micro > 0 else [])}
    return [i for i in (order[::-1] if rank % 2 else order) if i not in left_out]


def loss_of(parameters: list[nn.Parameter], x: Tensor, order: list[int]) -> Tensor:
    """A number whose gradients come in the reverse of `order`. x: (B, WIDTH)."""
    return sum((((x[:, :parameters[i].shape[0]] @ parameters[i])**2).sum() for i in order), x.new_zeros(())) / x.shape[0]


def run(inputs: Tensors) -> Tensors:
    """The gradients of each step, over all ranks and then over two of them, and what was counted meanwhile."""
    found: list[Tensor] = []
    counts = dict.fromkeys(("sent", "few", "lean", "begins", "patient"), True)
    world = dist.get_world_size()
    with mock.patch.object(GradientSync, "__init__", refuse), \
            mock.patch.object(nn.parallel.DistributedDataParallel, "__init__", refuse):
        for size in dict.fromkeys((world, 2)):
            axis = tiny_training.mesh(tiny_training.settings(f"parallel.dp={size}", f"parallel.tp={world // size}",
                                                             "model.heads=4")).dp
            parameters = [nn.Parameter(inputs[f"p{i}"].clone(), requires_grad=i != FROZEN) for i in range(MANY)]
            found += steps(inputs, parameters, axis, counts, len(MICROS) if size == world else UNEVEN + 1)
    return {"gradients": torch.cat(found), **{name: torch.tensor(float(holds)) for name, holds in counts.items()}}


def steps(inputs: Tensors, parameters: list[nn.Parameter], axis: Axis, counts: dict[str, bool], many: int) -> list[Tensor]:
    """The gradients of the first steps; `counts` becomes False where a step breaks a budget."""
    room, found = int(inputs["bucket"]), []
    total = sum(p.nbytes for p in parameters if p.requires_grad)
    watched = Watched(parameters)
    with MemoryMeter() as meter:
        parallel = DataParallel((p for p in parameters), axis, room)
    for step, micros in enumerate(MICROS[:many]):
        meter.peak, calls, sent = meter.now, 0, 0.0
        for micro in range(micros):
            loss = loss_of(parameters, inputs["x"][step, micro, axis.ranks[axis.rank]], uses(step, micro, axis.rank))
            watched.begin()
            with watched, Traffic() as traffic, meter:
                parallel.backward(loss, micro == micros - 1)
            calls, sent = calls + len(traffic.calls), sent + traffic.sent
        within = sent <= 2 * (axis.size - 1) / axis.size * total
        counts["sent"] &= within
        counts["few"] &= calls <= 2 * total / room + 1
        counts["lean"] &= meter.peak <= total + 2 * max(p.nbytes for p in parameters) + SPARE
        if step != UNEVEN:
            counts["begins"] &= within and total - watched.begun_before_last <= room
            counts["patient"] &= not watched.waited_early
        found += [(torch.zeros_like(p) if p.grad is None else p.grad).detach().flatten().clone() for p in parameters]
        for p in parameters:
            p.grad = None
    return found


EXERCISES = [
    Exercise("data-parallel", "07", (f"{__name__}.DataParallel",), draw, run, {
        "gradients": "after each step every rank has the mean gradients, along two axes",
        "sent": "each gradient is sent by one all-reduce a step, after the last micro-batch, and nothing else is sent",
        "few": "and they are sent in buckets: neighbors share an all-reduce while they fit",
        "lean": "it holds no second copy of all gradients",
        "begins": "when the last gradient comes, all-reduces of all buckets but the last have begun",
        "patient": "and none has been waited for"},
        flags={"sent": "it sends more", "few": "there are more all-reduces", "lean": "gradients take more memory",
               "begins": "some begin later", "patient": "one has"},
        levels={"sent": "byte budget", "few": "byte budget", "lean": "memory budget", "begins": "overlapped",
                "patient": "overlapped"},
        ladder=("Begin without overlap: call `loss.backward()`, and after the last micro-batch average all gradients, as in "
                "`average_gradients`. A gradient that is None counts as zeros, so that all ranks send equally much. That is "
                "correct, and the first level.",
                "Group the parameters from the last to the first, and give each a `register_post_accumulate_grad_hook`. In the "
                "last pass, start the next bucket (`async_op=True`) once all its gradients have come. After the pass, start "
                "what is left, then wait for all.",
                "Start buckets in one fixed order, since ranks match all-reduces by order alone. Let `p.grad` be a view of its "
                "bucket's tensor: then the sum arrives where it belongs, and the separate gradient is freed. A gradient from an "
                "earlier micro-batch counts, even if the last pass adds nothing to it."),
        sizes=(2, 4), limits=Limits(seconds=120)),
]
