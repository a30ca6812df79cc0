"""ZeRO-1: every data-parallel rank keeps optimizer states only for its share of the parameters, and updates only that share.

    backward    reduce-scatter the gradients, bucket by bucket, beside the backward pass: each rank gets the mean of its share
    optimizer   update the share
    forward     all-gather the updated parameters, bucket by bucket, beside the forward pass, which waits where it needs one

This moves as many bytes as an all-reduce, which is a reduce-scatter and an all-gather (Rajbhandari et al. 2020,
arXiv:1910.02054, sections 5.1 and 7).

With 16-bit matmuls each rank keeps float32 *master weights* for its share only. It computes with 16-bit copies of the linears'
weights, the cast that autocast would make in every forward pass: so training is identical to the bit. Such a weight takes two
bytes less on every rank, and its all-gather moves half as many bytes. Norms, biases and embeddings, which autocast leaves alone,
stay in float32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from course.models import Model
from course.models.experts import Experts
from course.models.layers import Linear
from course.parallel import mappings
from course.parallel.data_parallel.gradients import Bucket, Bucketed, by_axis, divide_by_size, mean_op
from course.parallel.mesh import Axis
from course.parallel.placement import Placements, owned_by_first


class ShardedBucket(Bucket):
    """A bucket of gradients, and its parameters laid end to end in the same order. This rank owns one share of both.

    masters: the float32 values of parameters that are in 16 bits.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], axis: Axis, masters: Mapping[nn.Parameter, Tensor]):
        super().__init__(parameters, axis, multiple=axis.size)
        self.narrow = parameters[0] in masters
        if self.narrow:                             # gradients are summed in float32
            self.flat = self.flat.float()
            self.views = self.cut(self.flat)
        wide = torch.zeros_like(self.flat)
        for parameter, view in zip(parameters, self.cut(wide), strict=True):
            view.copy_(masters.get(parameter, parameter.data))
        self.weights = wide.to(parameters[0].dtype)
        for parameter, view in zip(parameters, self.cut(self.weights), strict=True):
            parameter.data = view
        share = len(self.flat) // axis.size
        self.mine = slice(axis.rank * share, (axis.rank + 1) * share)
        self.master = wide[self.mine].clone() if self.narrow else wide[self.mine]       # what the optimizer updates
        self.result = self.flat.new_zeros(share)
        self.num_microbatches = 0                   # backward passes of a step
        self.coming: Any = None                     # the all-gather in flight
        self.segments: list[tuple[nn.Parameter, Tensor]] = []

    def place_segments(self, placements: Placements) -> None:
        """Make the segments that the optimizer updates: each parameter's part in this rank's share and its gradient, as views."""
        start = 0
        for parameter in self.parameters:
            low, high = max(start, self.mine.start), min(start + parameter.numel(), self.mine.stop)
            if low < high:
                here = slice(low - self.mine.start, high - self.mine.start)
                segment = nn.Parameter(self.master[here])
                placements[segment] = replace(placements[parameter], flat=(low - start, high - start))
                self.segments.append((segment, self.result[here]))
            start += parameter.numel()

    def take(self, index: int) -> None:
        """Add a 16-bit gradient to this step's sum in the bucket; other gradients move in as in `Bucket`."""
        if not self.narrow:
            super().take(index)
            return
        parameter, view = self.parameters[index], self.views[index]
        first = self.waiting[index] == self.num_microbatches
        if parameter.grad is not None:
            view.copy_(parameter.grad) if first else view.add_(parameter.grad)
            parameter.grad = None
        elif first:
            view.zero_()

    def gather(self) -> None:
        """Begin the all-gather of the updated shares."""
        share = self.weights[self.mine]             # NCCL gathers in place, gloo needs other memory
        if self.narrow:
            share.copy_(self.master)
        if self.axis.size == 1:
            return
        self.coming = mappings.all_gather_single(self.weights, share if share.is_cuda else share.clone(),
                                                 group=self.axis.group, async_op=True)


class ZeRO1(Bucketed):
    """Bucketed data parallelism with the optimizer's states cut over the axis. `optimizer_parameters` are this rank's segments.

    low: the 16 bits of the matmuls, None for a model that computes in its parameters' format.
    """

    def __init__(self, model: nn.Module, placements: Placements, bucket_mb: float = 25.0, low: torch.dtype | None = None):
        self.masters = {p: p.data for p in castable_weights(model, placements)} if low else {}
        self.sharded: list[ShardedBucket] = []      # the buckets
        for parameter, master in self.masters.items():
            parameter.data = master.to(low)
        # one format a bucket: what stays in float32 is little, and has the last buckets for itself
        in_order = sorted(model.parameters(), key=lambda p: p in self.masters)
        super().__init__(nn.ParameterList(in_order), placements, bucket_mb, low)
        self.masters.clear()                        # each rank keeps its share of them
        for bucket in self.sharded:
            bucket.place_segments(placements)
        mine = [segment for bucket in self.sharded for segment, _ in bucket.segments]
        frozen = [p for p in model.parameters() if not p.requires_grad]
        for axis, held in by_axis(frozen, placements, "average_over"):  # whole on every rank
            owned_by_first(placements, held, axis)
        self.optimizer_parameters = mine + frozen
        home = {parameter: bucket for bucket in self.sharded for parameter in bucket.parameters}
        own = model, model.parameters(recurse=False)                    # which none of its parts has
        for module, parameters in [*((unit, unit.parameters()) for unit in forward_units(model)), own]:
            if needed := list(dict.fromkeys(home[p] for p in parameters if p in home)):
                module.register_forward_pre_hook(lambda module, inputs, needed=needed: wait_for_gather(needed))

    def make_bucket(self, parameters: Sequence[nn.Parameter], axis: Axis) -> ShardedBucket:
        self.sharded.append(ShardedBucket(parameters, axis, self.masters))
        return self.sharded[-1]

    def begin(self, num_microbatches: int) -> None:
        super().begin(num_microbatches)
        for bucket in self.sharded:
            bucket.num_microbatches = num_microbatches

    def start(self, bucket: Bucket) -> None:
        """Begin a bucket's reduce-scatter."""
        assert isinstance(bucket, ShardedBucket)
        if bucket.axis.size == 1:
            bucket.result.copy_(bucket.flat)
            return
        bucket.work = mappings.reduce_scatter_single(bucket.result, bucket.flat, mean_op(bucket.flat), group=bucket.axis.group,
                                                     async_op=True)

    def complete(self, bucket: Bucket) -> None:
        """Wait for my share of a bucket's mean."""
        assert isinstance(bucket, ShardedBucket)
        wait_for_gather([bucket])                   # of the update before, if this step left out what waits for it
        if bucket.axis.size > 1:
            bucket.work.wait()
            divide_by_size(bucket.result, bucket.axis)
        for segment, gradient in bucket.segments:
            segment.grad = gradient

    def after_optimizer_step(self) -> None:
        """Begin to gather the new parameters, the first layers' first."""
        for bucket in reversed(self.sharded):
            bucket.gather()

    def wait_parameters(self) -> None:
        wait_for_gather(self.sharded)

    def full_master_weights(self) -> dict[nn.Parameter, Tensor]:
        """The master weights, whole, of the parameters in 16 bits. All ranks call it."""
        found: dict[nn.Parameter, Tensor] = {}
        for bucket in self.sharded:
            if bucket.narrow:
                whole = bucket.master
                if bucket.axis.size > 1:
                    whole = torch.empty_like(bucket.flat)
                    mappings.all_gather_single(whole, bucket.master, group=bucket.axis.group)
                found |= dict(zip(bucket.parameters, bucket.cut(whole), strict=True))
        return found


def castable_weights(model: nn.Module, placements: Placements) -> list[nn.Parameter]:
    """The parameters that autocast casts in every use: weights of linears and experts that nothing else uses.

    Excluded are weights whose gradient is completed in float32: other ranks have a part of it, or the model sums it itself
    (`float32_sums`). Frozen ones are excluded too: they are in no rank's share, so their float32 values would be lost.
    """
    held = [(p, (name == "weight" and isinstance(module, Linear)) or isinstance(module, Experts)) for module in model.modules()
            for name, p in module.named_parameters(recurse=False)]
    others = {p for p, multiplied in held if not multiplied} | self_summing_parameters(model)
    linear = {p for p, multiplied in held if multiplied}
    return [p for p in model.parameters() if p in linear - others and p.requires_grad and placements[p].partial_over is None]


def self_summing_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters whose gradients the model sums itself, as its `float32_sums` says."""
    named = model.float32_sums if isinstance(model, Model) else ()
    return {p for name, p in model.named_parameters(remove_duplicate=False) if name in named}


def forward_units(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that run one after another: each of its blocks, and the modules before and after them."""
    blocks = dict(model.named_children()).get("blocks", nn.ModuleDict())
    return [*blocks.children(), *(child for child in model.children() if child is not blocks)]


@mappings.uncompiled                                 # a compiled graph must not remember whether a gather is in flight
def wait_for_gather(buckets: Sequence[ShardedBucket]) -> None:
    """Make all later computation wait for the gathered parameters."""
    for bucket in buckets:
        if bucket.coming is not None:
            bucket.coming.wait()
            bucket.coming = None
