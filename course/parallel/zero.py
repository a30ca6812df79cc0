"""ZeRO-1: every data-parallel rank keeps the optimizer's states of its share of the parameters alone, and updates that.

    backward    reduce-scatter of the gradients, bucket by bucket, beside the backward pass: each rank gets the mean of its share
    optimizer   on the share
    forward     all-gather of the updated parameters, bucket by bucket, beside the forward pass, which waits where it needs one

The bytes that move are those of an all-reduce, which is a reduce-scatter and an all-gather (Rajbhandari et al. 2020,
arXiv:1910.02054, section 5.1 and 7).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from course.parallel import mappings
from course.parallel.data import Bucket, Bucketed, divide, mean
from course.parallel.mesh import Axis
from course.parallel.placement import place, placement


class Shared(Bucket):
    """A bucket of gradients, and the parameters themselves laid end to end in the same order, of which one share is mine."""

    def __init__(self, parameters: Sequence[nn.Parameter], axis: Axis):
        super().__init__(parameters, multiple=axis.size)
        self.weights = torch.zeros_like(self.flat)
        for parameter, view in zip(parameters, self.cut(self.weights), strict=True):
            parameter.data = view.copy_(parameter.data)
        share = len(self.flat) // axis.size
        self.mine = slice(axis.rank * share, (axis.rank + 1) * share)
        self.gradients = self.flat.new_zeros(share)
        self.coming: Any = None                     # the all-gather that is under way
        self.segments = list(self._segments())

    def _segments(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The parts of parameters in my share, as what the optimizer updates, each with its gradient; both are views."""
        start = 0
        for parameter in self.parameters:
            low, high = max(start, self.mine.start), min(start + parameter.numel(), self.mine.stop)
            if low < high:
                where = replace(placement(parameter), flat=(low - start, high - start))
                yield (place(nn.Parameter(self.weights[low:high]), where),
                       self.gradients[low - self.mine.start:high - self.mine.start])
            start += parameter.numel()


class Zero(Bucketed):
    """Bucketed data parallelism with the optimizer's states cut over the axis. `parameters` are this rank's segments."""

    buckets: list[Shared]                           # type: ignore[assignment]

    def __init__(self, model: nn.Module, axis: Axis, bucket_mb: float):
        super().__init__(model, axis, bucket_mb)
        self.parameters = [segment for bucket in self.buckets for segment, _ in bucket.segments]
        home = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        for module in units(model):
            needed = list(dict.fromkeys(home[p] for p in module.parameters()))
            module.register_forward_pre_hook(lambda module, inputs, needed=needed: wait_for(needed))

    def make_bucket(self, parameters: Sequence[nn.Parameter]) -> Shared:
        return Shared(parameters, self.axis)

    def start(self, bucket: Bucket) -> None:
        """Begin a bucket's reduce-scatter."""
        assert isinstance(bucket, Shared)
        bucket.work = mappings.reduce_scatter_single(bucket.gradients, bucket.flat, mean(bucket.flat), group=self.axis.group,
                                                     async_op=True)

    def complete(self, bucket: Bucket) -> None:
        """Wait for my share of a bucket's mean."""
        assert isinstance(bucket, Shared)
        bucket.work.wait()
        divide(bucket.gradients, self.axis)
        for segment, gradient in bucket.segments:
            segment.grad = gradient

    def updated(self) -> None:
        """Begin to gather the new parameters, the first layers' first."""
        for bucket in reversed(self.buckets):
            share = bucket.weights[bucket.mine]     # NCCL gathers in place, gloo wants another place
            bucket.coming = mappings.all_gather_single(bucket.weights, share if share.is_cuda else share.clone(),
                                                       group=self.axis.group, async_op=True)

    def settle(self) -> None:
        wait_for(self.buckets)


def units(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that are computed one after another: each of its blocks, and what comes before and after them."""
    blocks = dict(model.named_children()).get("blocks", nn.ModuleDict())
    return [*blocks.children(), *(child for child in model.children() if child is not blocks)]


@mappings.uncompiled                                 # whether something is under way is not for a compiled graph to remember
def wait_for(buckets: Sequence[Shared]) -> None:
    """Let what is computed from now on see the gathered parameters."""
    for bucket in buckets:
        if bucket.coming is not None:
            bucket.coming.wait()
            bucket.coming = None
