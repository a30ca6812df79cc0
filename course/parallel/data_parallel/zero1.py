"""ZeRO-1: every data-parallel rank keeps the optimizer's states of its share of the parameters alone, and updates that.

    backward    reduce-scatter of the gradients, bucket by bucket, beside the backward pass: each rank gets the mean of its share
    optimizer   on the share
    forward     all-gather of the updated parameters, bucket by bucket, beside the forward pass, which waits where it needs one

The bytes that move are those of an all-reduce, which is a reduce-scatter and an all-gather (Rajbhandari et al. 2020,
arXiv:1910.02054, section 5.1 and 7).

With 16-bit matmuls each rank keeps the float32 values, the *master weights*, of its share alone. What it computes with is a
16-bit copy of the linears' weights, the cast that autocast would make in every forward pass: so training is the same to the bit,
a parameter takes two bytes less on every rank, and half as many bytes are gathered. Norms, biases and embeddings, which autocast
leaves alone, stay in float32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from course.models import Model
from course.models.layers import Linear
from course.parallel import mappings
from course.parallel.data_parallel.gradients import Bucket, Bucketed, by_axis, divide_by_size, mean_op
from course.parallel.mesh import Axis
from course.parallel.placement import Placements, owned_by_first


class ShardedBucket(Bucket):
    """A bucket of gradients, and the parameters themselves laid end to end in the same order, of which one share is mine.

    masters: the parameters' values in float32 where they themselves are in 16 bits.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], axis: Axis, masters: Mapping[nn.Parameter, Tensor]):
        super().__init__(parameters, axis, multiple=axis.size)
        self.narrow = parameters[0] in masters
        if self.narrow:                             # gradients are added up in float32
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
        self.coming: Any = None                     # the all-gather that is under way
        self.segments: list[tuple[nn.Parameter, Tensor]] = []

    def place_segments(self, placements: Placements) -> None:
        """The parts of parameters in my share, as what the optimizer updates, each with its gradient; both are views."""
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
        """A gradient in 16 bits is added to what the bucket has of this step; others move into it, as ever."""
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
        """Begin to gather the shares, as the optimizer has left them."""
        share = self.weights[self.mine]             # NCCL gathers in place, gloo wants another place
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
    """The parameters that autocast casts wherever they are used: weights of linears that nothing else uses.

    Without those whose gradient is completed in float32: other ranks have a part of it, or the model adds it up (`float32_sums`).
    And without frozen ones, which are nobody's share: their values would be lost.
    """
    held = [(p, name == "weight" and isinstance(module, Linear)) for module in model.modules()
            for name, p in module.named_parameters(recurse=False)]
    others = {p for p, multiplied in held if not multiplied} | self_summing_parameters(model)
    linear = {p for p, multiplied in held if multiplied}
    return [p for p in model.parameters() if p in linear - others and p.requires_grad and placements[p].partial_over is None]


def self_summing_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of which a model says, in `float32_sums`, that it adds up their gradients itself."""
    named = model.float32_sums if isinstance(model, Model) else ()
    return {p for name, p in model.named_parameters(remove_duplicate=False) if name in named}


def forward_units(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that are computed one after another: each of its blocks, and what comes before and after them."""
    blocks = dict(model.named_children()).get("blocks", nn.ModuleDict())
    return [*blocks.children(), *(child for child in model.children() if child is not blocks)]


@mappings.uncompiled                                 # whether something is under way is not for a compiled graph to remember
def wait_for_gather(buckets: Sequence[ShardedBucket]) -> None:
    """Let what is computed from now on see the gathered parameters."""
    for bucket in buckets:
        if bucket.coming is not None:
            bucket.coming.wait()
            bucket.coming = None
