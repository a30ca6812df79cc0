"""Data parallelism: every rank computes the gradients of its own samples, then all ranks average them over dp x cp.

Four methods behind one interface, chosen by `parallel.data`:

    naive      one all-reduce of everything after the backward pass
    bucketed   gradients collected in buckets; a bucket's all-reduce starts as soon as its last gradient is ready, and runs
               beside the rest of the backward pass (Li et al. 2020, arXiv:2006.15704)
    ddp        the same, by PyTorch's DistributedDataParallel
    none       no communication, to measure what it costs: the ranks drift apart

Call `begin(num_microbatches)` before a step's backward passes (one per micro-batch; only the last one communicates),
`finish()` after them, and `after_optimizer_step()` after the optimizer.

ZeRO-1 (`course/parallel/data_parallel/zero1.py`) overrides three methods of `Bucketed`. `make_bucket(parameters, axis)` makes
a bucket of parameters of one dtype. `start(bucket)` begins the collective of a full bucket and does not wait. After
`complete(bucket)`, `bucket.result` is the mean, with ZeRO-1 this rank's share of it. All ranks pass the buckets to both in the
same order.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from course.models import Model
from course.parallel.mesh import Axis
from course.parallel.placement import Placements
from course.utils.errors import CourseError


def average_gradients(parameters: Iterable[nn.Parameter], axis: Axis) -> None:
    """Replace every gradient by its mean over the axis: one all-reduce of all of them, laid end to end."""
    if axis.size == 1:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = _flatten_dense_tensors(gradients)
    dist.all_reduce(flat, group=axis.group)
    flat /= axis.size
    for gradient, averaged in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(averaged)


def add_partial_gradients(parameters: Iterable[nn.Parameter], placements: Placements) -> None:
    """Complete gradients of which several ranks have a part (`partial_over`): one all-reduce of all of them, for each axis."""
    for axis, held in by_axis(parameters, placements, "partial_over"):
        gradients = [p.grad for p in held if p.grad is not None]
        if gradients:
            flat = _flatten_dense_tensors(gradients)
            dist.all_reduce(flat, group=axis.group)
            for gradient, whole in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
                gradient.copy_(whole)


def by_axis(parameters: Iterable[nn.Parameter], placements: Placements,
            over: Literal["partial_over", "average_over"]) -> list[tuple[Axis, list[nn.Parameter]]]:
    """The axes over which gradients are partial, or averaged, each with its parameters; in the same order on all ranks."""
    found: dict[str, tuple[Axis, list[nn.Parameter]]] = {}
    for parameter in parameters:
        axis: Axis | None = getattr(placements[parameter], over)
        if axis is not None:
            found.setdefault(axis.name, (axis, []))[1].append(parameter)
    return [found[name] for name in sorted(found)]


def fill_missing_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Set missing gradients to zero. Other ranks' samples may have produced one, and weight decay or momentum moves such a
    parameter anyway: so every layout updates it alike."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


class GradientSync(ABC):
    """Makes gradients the same on all ranks that update a parameter, and says which tensors the optimizer updates.

    bucket_mb: MiB of gradients per collective. low: the 16-bit dtype of the matmuls, if the parameters are wider; ZeRO-1 and
    `MasterWeights` then compute with copies in it.
    """

    def __init__(self, model: nn.Module, placements: Placements, bucket_mb: float = 25.0, low: torch.dtype | None = None):
        self.placements = placements
        self.trainable = [p for p in model.parameters() if p.requires_grad]             # these get gradients
        # frozen parameters have no gradient, so the optimizer leaves them alone
        self.optimizer_parameters = list(model.parameters())
        self.copies: dict[nn.Parameter, nn.Parameter] = {}              # master -> the copy that the optimizer keeps equal

    def trained(self, model: Model) -> Model:
        """The model that a step calls: the model itself or a wrapper."""
        return model

    def begin(self, num_microbatches: int) -> None:
        """Prepare for a step's backward passes. Drops gradients that an interrupted step has left."""
        self.clear()

    @abstractmethod
    def finish(self) -> None:
        """Complete the gradients of `trainable`."""

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in self.trainable:
            parameter.grad = None

    def after_optimizer_step(self) -> None:         # noqa: B027 (most methods have nothing to do here)
        """Called when the optimizer has updated `optimizer_parameters`."""

    def wait_parameters(self) -> None:              # noqa: B027
        """Wait until the model's parameters hold the last step's update."""

    def full_master_weights(self) -> dict[nn.Parameter, Tensor]:
        """16-bit parameter -> the float32 values of which it is a copy, whole. All ranks must call it."""
        return {}


class Naive(GradientSync):
    """One all-reduce after the backward passes."""

    def finish(self) -> None:
        """Fill missing gradients with zeros, average all, and sum partial ones."""
        fill_missing_gradients(self.trainable)
        for axis, held in by_axis(self.trainable, self.placements, "average_over"):
            average_gradients(held, axis)
        add_partial_gradients(self.trainable, self.placements)          # last: an all-reduce gives all ranks the same bits


class NoSync(GradientSync):
    """No averaging: for one data-parallel rank, or to let the ranks' gradients differ."""

    def finish(self) -> None:
        """Fill missing gradients with zeros and sum partial ones."""
        fill_missing_gradients(self.trainable)
        add_partial_gradients(self.trainable, self.placements)


class DDP(GradientSync):
    """PyTorch's DistributedDataParallel, with views of its buckets as gradients. The forward pass goes through it."""

    def __init__(self, model: nn.Module, placements: Placements, bucket_mb: float = 25.0, low: torch.dtype | None = None):
        super().__init__(model, placements, bucket_mb, low)
        (axis, _), = by_axis(self.trainable, placements, "average_over")
        self.ddp = nn.parallel.DistributedDataParallel(model, process_group=axis.group, bucket_cap_mb=bucket_mb,
                                                       gradient_as_bucket_view=True, init_sync=False)
        self.microbatches_left = 1

    def trained(self, model: Model) -> Model:
        """The model, with its forward pass routed through DDP."""
        return cast(Model, ThroughDDP(model, self._forward))

    def begin(self, num_microbatches: int) -> None:
        """Drop gradients. DDP communicates in the backward of the last of `num_microbatches` forward passes with gradient; the
        step must run exactly that many."""
        super().begin(num_microbatches)
        self.microbatches_left = num_microbatches

    def _forward(self, *inputs: Any) -> Any:
        self.microbatches_left -= 1
        self.ddp.require_backward_grad_sync = self.microbatches_left == 0               # what its `no_sync` sets
        return self.ddp(*inputs)

    def finish(self) -> None:
        """Sum partial gradients; DDP has averaged in the last backward pass. Raises `CourseError` if a parameter got no gradient
        there."""
        try:
            self.ddp._check_reducer_finalized()
        except RuntimeError as error:
            missing = next((self.placements[p].name for p in self.trainable if p.grad is None), "one of them")
            raise CourseError("parallel.data=ddp needs a gradient of every parameter in the last backward pass of a step, and "
                              f"{missing} got none: use parallel.data=bucketed, or freeze what no sample uses") from error
        add_partial_gradients(self.trainable, self.placements)


class ThroughDDP:
    """A model that calls its forward pass through DistributedDataParallel; everything else is the model's own."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]):
        self.model, self.forward = model, forward

    def __call__(self, *inputs: Any) -> Any:
        return self.forward(*inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class Bucket:
    """Gradients of some parameters, laid end to end in one tensor, whose views they become, to be averaged over an axis."""

    def __init__(self, parameters: Sequence[nn.Parameter], axis: Axis, multiple: int = 1):
        self.parameters, self.axis = parameters, axis
        self.numel = sum(p.numel() for p in parameters)
        self.flat = torch.zeros(self.numel + -self.numel % multiple, dtype=parameters[0].dtype, device=parameters[0].device)
        self.views = self.cut(self.flat)
        self.result = self.flat                     # where the mean is, in the end
        self.waiting = [0] * len(parameters)        # how many backward passes of this step each gradient still waits for
        self.work: Any = None

    def cut(self, flat: Tensor) -> list[Tensor]:
        """The part of each parameter in a tensor that is laid out like this bucket."""
        parts = flat[:self.numel].split([p.numel() for p in self.parameters])
        return [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]

    def take(self, index: int) -> None:
        """The gradient of a parameter moves into the bucket, if it is not there yet."""
        parameter, view = self.parameters[index], self.views[index]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
        parameter.grad = view


class Bucketed(GradientSync):
    """Buckets of about `bucket_mb` MiB, the last layers' first, since their gradients come first.

    All ranks start the buckets in the same order. Gradients that are partial over an axis have a bucket of their own, of those
    that `finish` starts. It is averaged as the others are, and then added up over that axis: a sum of averages is the average
    of the sums. So all ranks that have such a parameter update it by the same bits, whatever else their buckets hold. Parameters
    that are averaged over different axes have buckets of their own.
    """

    def __init__(self, model: nn.Module, placements: Placements, bucket_mb: float = 25.0, low: torch.dtype | None = None):
        super().__init__(model, placements, bucket_mb, low)
        others = [p for p in reversed(self.trainable) if placements[p].partial_over is None]
        self.early = [self.make_bucket(group, axis) for axis, held in by_axis(others, placements, "average_over")
                      for group in partition_into_buckets(held, bucket_mb * 2**20)]
        partial = by_axis(self.trainable, placements, "partial_over")
        self.partial = [(parts, self.make_bucket(group, axis)) for parts, held in partial
                        for axis, group in by_axis(held, placements, "average_over")]
        self.buckets = self.early + [bucket for _, bucket in self.partial]
        self.started = 0                            # how many buckets' collectives have begun in this step
        for number, bucket in enumerate(self.buckets):
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(gradient_hook(weakref.ref(self), number, index))

    def make_bucket(self, parameters: Sequence[nn.Parameter], axis: Axis) -> Bucket:
        return Bucket(parameters, axis)

    def begin(self, num_microbatches: int) -> None:
        super().begin(num_microbatches)
        self.started = 0
        for bucket in self.buckets:
            bucket.waiting = [num_microbatches] * len(bucket.parameters)

    def start(self, bucket: Bucket) -> None:
        if bucket.axis.size > 1:
            start_mean(bucket, bucket.axis)

    def complete(self, bucket: Bucket) -> None:
        if bucket.axis.size > 1:
            finish_mean(bucket, bucket.axis)

    def finish(self) -> None:
        left = self.buckets[self.started:]
        for bucket in left:
            for index in range(len(bucket.parameters)):                 # a parameter that had no gradient counts as zero
                bucket.take(index)
            self.start(bucket)
        for bucket in self.buckets:
            self.complete(bucket)
        for parts, bucket in self.partial:
            reduce_partial(bucket, parts)


def gradient_hook(there: weakref.ref[Bucketed], number: int, index: int) -> Callable[[Tensor], None]:
    """The hook for a parameter's new gradient. It holds neither buckets nor parameters: Python's garbage collector does not
    see through a parameter's hooks, so a notebook's models would never be freed."""
    def run(parameter: Tensor) -> None:
        ddp = there()
        if ddp is not None:
            gradient_ready(ddp, ddp.buckets[number], index)

    return run


def gradient_ready(ddp: Bucketed, bucket: Bucket, index: int) -> None:
    """A backward pass has added to the gradient of a bucket's parameter: start each bucket that is complete, in order."""
    bucket.take(index)
    bucket.waiting[index] -= 1
    while ddp.started < len(ddp.early) and not any(ddp.early[ddp.started].waiting):
        ddp.start(ddp.early[ddp.started])
        ddp.started += 1


def reduce_partial(bucket: Bucket, parts: Axis) -> None:
    """Sum a bucket's means, (numel,), in place over the axis whose ranks hold partial sums, and wait."""
    dist.all_reduce(bucket.result, group=parts.group)


def start_mean(bucket: Bucket, axis: Axis) -> None:
    """Begin the all-reduce of a bucket, and do not wait for it."""
    bucket.work = dist.all_reduce(bucket.flat, mean_op(bucket.flat), group=axis.group, async_op=True)


def finish_mean(bucket: Bucket, axis: Axis) -> None:
    """Wait for a bucket's mean."""
    bucket.work.wait()
    divide_by_size(bucket.flat, axis)


def mean_op(x: Tensor) -> dist.ReduceOp:
    """The reduction for a mean of tensors like x, of any shape: NCCL can average, gloo only sum."""
    return dist.ReduceOp.AVG if x.is_cuda else dist.ReduceOp.SUM        # type: ignore[return-value]  # the stub says RedOpType


def divide_by_size(x: Tensor, axis: Axis) -> None:
    """Complete a mean in place: divide gloo's sum by the axis size; NCCL has already averaged."""
    if not x.is_cuda:
        x /= axis.size


def partition_into_buckets(parameters: Sequence[nn.Parameter], size: float) -> list[list[nn.Parameter]]:
    """Neighbors together, up to `size` bytes, the same format in each; a larger one alone."""
    buckets: list[list[nn.Parameter]] = []
    full = 0.0
    for parameter in parameters:
        if not buckets or full + parameter.nbytes > size or parameter.dtype != buckets[-1][0].dtype:
            buckets.append([])
            full = 0.0
        buckets[-1].append(parameter)
        full += parameter.nbytes
    return buckets
