"""Fully sharded data parallelism: every rank keeps a share of the optimizer states, gradients and parameters.

    stage 2    gradients are sharded: each rank keeps only its share of their mean (ZeRO-2); the weights stay whole
    stage 3    the weights are sharded too: a unit's weights are whole only while the unit computes (ZeRO-3, FSDP)

A unit is the embedding, a block or the head. With stage 3, one pass over the units is:

    forward     all-gather(i + 1) runs beside the forward of unit i; then the weights of unit i are freed
    backward    all-gather(i - 1) runs beside the backward of unit i; then the weights of unit i are freed, and
                reduce-scatter(i) runs beside the backward of unit i - 1

An all-reduce moves as many bytes as a reduce-scatter and an all-gather. Stage 2 moves as much as data parallelism, stage 3 half
as much again (Rajbhandari et al. 2020, arXiv:1910.02054, section 7). Zhao et al. 2023, arXiv:2304.11277, describe PyTorch's
FSDP.

The parameters of a unit are views of one flat tensor. Freeing it means to resize its storage to zero bytes, so whatever autograd
has saved of the weights stays valid: the next all-gather fills the same storage. Ranks issue collectives in the order in which
they enter and leave units, which is the same on all of them.

`parallel.shard` ranks share one copy of the model. With fewer than dp x cp (HSDP) their copies are replicas, and each share's
gradient is also averaged over the ranks that hold the same share.

As in ZeRO-1 (`course/parallel/data_parallel/zero1.py`), each rank's optimizer updates float32 masters of its share. With 16-bit
matmuls the linears' weights are gathered in 16 bits. With native FP8 and delayed scales stage 3 gathers them in 8 bits: the scale
of a weight is known before the step, so each rank casts its share, and the largest magnitude of all shares is the weight's.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function, Variable

from course.models import Model
from course.models.layers import Linear
from course.ops.autograd import Context
from course.ops.linear_op import Product
from course.ops.storage import allocate, free_memory, has_memory
from course.parallel import mappings
from course.parallel.data_parallel.gradients import GradientSync, add_partial_gradients, divide_by_size, mean_op
from course.parallel.data_parallel.zero1 import castable_weights
from course.parallel.mesh import Axis
from course.parallel.placement import Placement, Placements, owned_by_first

if TYPE_CHECKING:
    from course.config import Parallel
    from course.parallel.layout import Layout

Draw = Callable[[Placement], Tensor]                # the initial values of a placement's elements, flat
PIECE = 2**20                                       # so many are drawn at once; each needs several numbers of 8 bytes


class FlatParameters:
    """Parameters that are gathered and reduced together: whole, one flat tensor; on each rank, one share of it.

    shard: the axis over which they are cut; replicate: the axis whose ranks hold the same share. dtype: that of the gathered
    weights. sums: the dtype in which gradients are reduced.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], shard: Axis, replicate: Axis, dtype: torch.dtype,
                 sums: torch.dtype, shared: bool = False, products: Sequence[Product] = ()):
        self.parameters, self.shard, self.replicate = parameters, shard, replicate
        self.sums = sums
        self.numel = sum(p.numel() for p in parameters)
        length = self.numel + -self.numel % shard.size
        first = parameters[0]
        self.whole = torch.empty(length, dtype=dtype, device=first.device)
        self.master = torch.zeros(length // shard.size, dtype=first.dtype, device=first.device)
        self.mine = slice(shard.rank * len(self.master), (shard.rank + 1) * len(self.master))
        # what the optimizer updates, where it is in the share, and the number of its parameter
        self.segments: list[tuple[nn.Parameter, slice, int]] = []
        self.gathering: Any = None                  # the all-gather in flight
        self.gathered = False
        self.reducing: tuple[Any, Tensor, Tensor] | None = None         # the reduce-scatter in flight, its input, its result
        self.averaging: Any = None                  # the all-reduce over the replicas in flight
        self.gradient: Tensor | None = None         # this rank's share of the mean, summed over micro-batches
        self.reduced = 0                            # backward passes of this step whose gradients are in it, or on their way
        self.shared = shared                        # whether several units use them
        self.products = products                    # those of the parameters, if they take weights of 8 bits
        if products:
            self.small = torch.empty(length, dtype=products[0].small, device=first.device)
            for product, view in zip(products, self.cut(self.small), strict=True):
                product.gathered = view.data        # with a version counter of its own: autograd saves it
            free_memory(self.small)

    def cut(self, flat: Tensor) -> list[Tensor]:
        """The part of each parameter in a tensor that is laid out like `whole`."""
        parts = flat[:self.numel].split([p.numel() for p in self.parameters])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def place_segments(self, placements: Placements) -> None:
        """Make the tensors that the optimizer updates, each parameter's part in this rank's share, and give them placements."""
        start = 0
        for index, parameter in enumerate(self.parameters):
            low, high = max(start, self.mine.start), min(start + parameter.numel(), self.mine.stop)
            if low < high:
                here = slice(low - self.mine.start, high - self.mine.start)
                segment = nn.Parameter(self.master[here])
                where = placements[parameter]
                placements[segment] = replace(where, flat=(low - start, high - start),
                                              owner=where.owner and self.replicate.rank == 0)
                self.segments.append((segment, here, index))
            start += parameter.numel()

    def start_gather(self) -> None:
        """Begin the all-gather of the weights, in their own dtype, unless they are here or on their way."""
        if self.gathered or self.gathering is not None:
            return
        if self.products and all(product.known for product in self.products):
            allocate(self.small)
            for segment, here, index in self.segments:
                self.small[self.mine][here] = self.products[index].shrink(segment.detach())
            whole = self.small.view(torch.uint8)
        else:
            allocate(self.whole)
            self.whole[self.mine].copy_(self.master)
            whole = self.whole
        if self.shard.size == 1:
            self.gathered = True
            return
        share = whole[self.mine]                    # NCCL gathers in place, gloo needs other memory
        self.gathering = mappings.all_gather_single(whole, share if share.is_cuda else share.clone(), group=self.shard.group,
                                                    async_op=True)

    def wait_gather(self) -> None:
        """Make later computation wait for the gathered weights."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering, self.gathered = None, True

    def forget(self) -> None:
        """Make the next use gather the weights again."""
        self.wait_gather()
        self.gathered = False

    def free(self) -> None:
        """Free the memory of the whole weights."""
        self.forget()
        free_memory(self.whole)
        if self.products:
            free_memory(self.small)

    def start_reduce(self) -> None:
        """Begin the reduce-scatter of the gradients of a backward pass. A parameter without gradient counts as zero."""
        self.finish_reduce()
        flat = torch.empty(len(self.whole), dtype=self.sums, device=self.whole.device)
        flat[self.numel:].zero_()
        for parameter, view in zip(self.parameters, self.cut(flat), strict=True):
            view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
            parameter.grad = None
        self.reduced += 1
        result = flat.new_empty(len(self.master))
        if self.shard.size == 1:
            self.add(flat)
            return
        work = mappings.reduce_scatter_single(result, flat, mean_op(flat), group=self.shard.group, async_op=True)
        self.reducing = work, flat, result

    def finish_reduce(self) -> None:
        """Wait for the reduce-scatter in flight, and add its result to this step's gradient."""
        if self.reducing is not None:
            work, _, result = self.reducing
            work.wait()
            self.reducing = None
            divide_by_size(result, self.shard)
            self.add(result)

    def add(self, result: Tensor) -> None:
        """Add a backward pass's share of the mean to this step's gradient, in the master's dtype."""
        if self.gradient is None:
            self.gradient = result.to(self.master.dtype)
        else:
            self.gradient += result

    def start_average(self) -> None:
        """Begin the average over the replicas of this rank's share of the step's gradient."""
        if self.replicate.size > 1 and self.averaging is None:
            assert self.gradient is not None
            self.averaging = dist.all_reduce(self.gradient, mean_op(self.gradient), group=self.replicate.group, async_op=True)

    def finish_average(self) -> None:
        """Wait for the average over the replicas."""
        if self.averaging is not None:
            assert self.gradient is not None
            self.averaging.wait()
            self.averaging = None
            divide_by_size(self.gradient, self.replicate)

    def clear(self) -> None:
        """Drop this step's gradients."""
        self.finish_reduce()
        self.finish_average()
        self.gradient, self.reduced = None, 0
        for parameter in self.parameters:
            parameter.grad = None
        for segment, *_ in self.segments:
            segment.grad = None


class Unit:
    """A part of the model whose weights are gathered together, and its neighbors in the order of computation."""

    def __init__(self, module: nn.Module, own: list[FlatParameters], shared: list[FlatParameters]):
        self.module, self.own, self.needed = module, own, own + shared
        self.before: Unit | None = None
        self.after: Unit | None = None

    def start_gather(self) -> None:
        """Begin to gather the unit's weights."""
        for flat in self.needed:
            flat.start_gather()

    def wait_gather(self) -> None:
        """Wait for the unit's weights, and begin their gathers where none has begun."""
        self.start_gather()
        for flat in self.needed:
            flat.wait_gather()


class FSDP(GradientSync):
    """ZeRO-2 and ZeRO-3. `optimizer_parameters` are this rank's segments of the masters.

    low: the 16-bit dtype of the matmuls, None for a model that computes in its parameters' dtype. draw: gives the initial values
    of a placement; without it the parameters have their values, and stage 3 frees them.
    """

    def __init__(self, model: Model, layout: "Layout", settings: "Parallel", low: torch.dtype | None = None,
                 draw: Draw | None = None):
        super().__init__(model, layout.placements, settings.bucket_mb, low)
        self.keep = settings.zero == 2              # whether the weights stay whole
        self.reshard_after = settings.reshard_after
        self.num_microbatches = 1
        self.touched: dict[Unit, bool] = {}         # units of the running backward pass -> whether theirs is complete
        self.unreduced: FlatParameters | None = None
        low_weights = set(castable_weights(model, layout.placements)) if low else set()
        self.chains = [units_of(stage) for stage in layout.stages]
        self.flats = self._flatten(layout, settings, low_weights, low, draw)
        self.optimizer_parameters = [segment for flat in self.flats for segment, *_ in flat.segments]
        frozen = [p for p in model.parameters() if not p.requires_grad]
        owned_by_first(layout.placements, frozen, layout.mesh.dp_cp)    # whole on every rank
        self.optimizer_parameters += frozen
        if not self.keep:
            for flat in self.flats:
                flat.free()

    def _flatten(self, layout: "Layout", settings: "Parallel", low_weights: set[nn.Parameter], low: torch.dtype | None,
                 draw: Draw | None) -> list[FlatParameters]:
        """Make the flat parameters of every unit, and the units; connect them to their modules."""
        users: dict[nn.Parameter, list[nn.Module]] = {}
        modules = [module for chain in self.chains for module in chain]
        for module in modules:
            for parameter in dict.fromkeys(p for p in module.parameters() if p.requires_grad):
                users.setdefault(parameter, []).append(module)
        products = {} if self.keep else small_products(modules)
        flats: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for parameter, used_by in users.items():    # one flat for what one unit, or the same units, use alike
            where = layout.placements[parameter]
            users_at = tuple(modules.index(module) for module in used_by)
            alike = users_at, parameter in low_weights, parameter in products, where.average_over, where.partial_over
            flats.setdefault(alike, []).append(parameter)
        made: list[FlatParameters] = []
        using: dict[int, list[FlatParameters]] = {}
        for (users_at, narrow, small, average, _), held in flats.items():
            shard, replicate = (layout.mesh.shard, layout.mesh.replicate) if average is layout.mesh.dp_cp else \
                (average or Axis("none"), Axis("none"))
            dtype = low if narrow and low else held[0].dtype
            sums = dtype if settings.reduce_in == "matmul" else held[0].dtype
            flat = FlatParameters(held, shard, replicate, dtype, sums, len(users_at) > 1,
                                  [products[parameter] for parameter in held] if small else ())
            flat.place_segments(layout.placements)
            fill(flat, layout.placements, draw)
            made.append(flat)
            for at in users_at:
                using.setdefault(at, []).append(flat)
        units = {}
        for at, module in enumerate(modules):
            needed = using.get(at, [])
            units[module] = Unit(module, [flat for flat in needed if not flat.shared], [flat for flat in needed if flat.shared])
        for chain in self.chains:
            for a, b in pairwise(chain):
                units[a].after, units[b].before = units[b], units[a]
        for module, unit in units.items():
            wrap_call(module, weakref.ref(self), unit)
        self.units = list(units.values())
        return made

    def begin(self, num_microbatches: int) -> None:
        """Drop gradients, also of an interrupted step, and begin to gather the first unit."""
        super().begin(num_microbatches)
        self.num_microbatches = num_microbatches
        self.touched.clear()
        self.unreduced = None
        self.units[0].start_gather()

    def clear(self) -> None:
        """Drop the gradients of this step."""
        super().clear()
        for flat in self.flats:
            flat.clear()

    def enter_forward(self, unit: Unit) -> None:
        """Wait for a unit's weights, and begin to gather the next unit's."""
        unit.wait_gather()
        if unit.after is not None:
            unit.after.start_gather()

    def leave_forward(self, unit: Unit) -> None:
        """Free a unit's weights. The last unit keeps its weights if its backward pass comes next."""
        if self.keep or self.reshard_after == "step":
            return
        last = unit.after is None
        if torch.is_grad_enabled():
            freed = unit.own if self.reshard_after == "forward" and not last else []
        else:
            freed = unit.needed if last else unit.own
        for flat in freed:
            flat.free()

    def enter_backward(self, unit: Unit) -> None:
        """Wait for a unit's weights, and begin to gather the previous unit's."""
        if not self.touched:
            Variable._execution_engine.queue_callback(self.end_backward)
        self.touched[unit] = False
        unit.wait_gather()
        if unit.before is not None:
            unit.before.start_gather()

    def leave_backward(self, unit: Unit) -> None:
        """Free a unit's weights, and begin to reduce its gradients: the unit's backward pass is complete."""
        self.touched[unit] = True
        self.reduce(unit.own)

    def reduce(self, flats: Sequence[FlatParameters]) -> None:
        """Free weights and begin the reduce-scatter of their gradients. The one before it ends first: one is in memory."""
        for flat in flats:
            if not self.keep and self.reshard_after != "step":
                flat.free()
            if self.unreduced is not None:
                self.unreduced.finish_reduce()
                self.start_average(self.unreduced)
            flat.start_reduce()
            self.unreduced = flat

    def start_average(self, flat: FlatParameters) -> None:
        """Begin the average over the replicas if a gradient has all backward passes of the step."""
        if flat.reduced == self.num_microbatches and not flat.shared:
            flat.start_average()

    def end_backward(self) -> None:
        """The end of a backward pass: reduce what is left, which several units share or whose unit has no input with gradient."""
        left = [flat for unit, done in self.touched.items() for flat in unit.needed if flat.shared or not done]
        self.touched.clear()
        self.reduce(list(dict.fromkeys(left)))

    def finish(self) -> None:
        """Complete the gradients of this rank's segments."""
        for flat in self.flats:
            if flat.gradient is None and flat.reducing is None:         # no backward pass reached it
                flat.start_reduce()
        for flat in self.flats:
            flat.finish_reduce()
            flat.start_average()
        for flat in self.flats:
            flat.finish_average()
        for flat in self.flats:
            assert flat.gradient is not None
            for segment, here, _ in flat.segments:
                segment.grad = flat.gradient[here]
        add_partial_gradients(self.optimizer_parameters, self.placements)           # a sum of means is the mean of sums

    def after_optimizer_step(self) -> None:
        """The gathered weights are old: free them or, in stage 2, begin to gather the new ones."""
        for flat in self.flats:
            flat.forget()
            if self.keep:
                flat.start_gather()
            else:
                flat.free()

    def wait_parameters(self) -> None:
        """Wait for the gathers in flight."""
        for flat in self.flats:
            flat.wait_gather()

    def full_master_weights(self) -> dict[nn.Parameter, Tensor]:
        """The updated values of all parameters that are in 16 bits or not whole on this rank. All ranks call it."""
        found: dict[nn.Parameter, Tensor] = {}
        for flat in self.flats:
            if flat.whole.dtype != flat.master.dtype or not has_memory(flat.whole):
                whole = flat.master
                if flat.shard.size > 1:
                    whole = flat.master.new_empty(len(flat.whole))
                    mappings.all_gather_single(whole, flat.master, group=flat.shard.group)
                found |= dict(zip(flat.parameters, flat.cut(whole), strict=True))
        return found


def fill(flat: FlatParameters, placements: Placements, draw: Draw | None) -> None:
    """Fill the masters with initial values, drawn or the parameters' own; the parameters become views of `flat.whole`."""
    given = [parameter.data for parameter in flat.parameters]
    for parameter, view in zip(flat.parameters, flat.cut(flat.whole), strict=True):
        parameter.data = view
    if draw is None:
        wide = torch.zeros(len(flat.whole), dtype=flat.master.dtype, device=flat.master.device)
        for value, view in zip(given, flat.cut(wide), strict=True):
            view.copy_(value)
        flat.master.copy_(wide[flat.mine])
        flat.whole.copy_(wide)
        flat.gathered = True
    else:
        free_memory(flat.whole)
        for segment, *_ in flat.segments:
            where = placements[segment]
            assert where.flat is not None
            for start in range(*where.flat, PIECE):
                values = draw(replace(where, flat=(start, min(start + PIECE, where.flat[1]))))
                segment.data[start - where.flat[0]:][:len(values)] = values


def small_products(modules: Iterable[nn.Module]) -> dict[nn.Parameter, Product]:
    """The products of linears whose weights may be gathered in 8 bits, by weight: those that nothing else uses."""
    parts = [part for module in modules for part in module.modules()]
    uses = Counter(parameter for part in parts for parameter in part.parameters(recurse=False))
    return {part.weight: part.product for part in parts if isinstance(part, Linear) and part.product.small is not None
            and isinstance(part.weight, nn.Parameter) and uses[part.weight] == 1}


def units_of(stage: Model) -> list[nn.Module]:
    """The units of a model or pipeline stage, in order of computation."""
    parts = [stage.embed, *stage.blocks.values(), stage.head]
    return [part for part in parts if part is not None and any(p.requires_grad for p in part.parameters())]


class EnterBackward(Function):
    """Forward: identity, on a unit's outputs. Backward: identity, after the unit's weights have been gathered."""

    @staticmethod
    def forward(ctx: Context, enter: Callable[[], None], *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.enter = enter
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in outputs)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.enter()
        return None, *grads


class LeaveBackward(Function):
    """Forward: identity, on a unit's inputs. Backward: identity; the unit's backward pass is complete."""

    @staticmethod
    def forward(ctx: Context, leave: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.leave = leave
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.leave()
        return None, *grads


def through(function: Callable[..., tuple[Tensor, ...]], values: Sequence[Any]) -> list[Any]:
    """Pass the tensors with a gradient among some values through a function, all at once. A value may be a tuple of tensors."""
    found = [x for value in values for x in as_tuple(value) if isinstance(x, Tensor) and x.requires_grad]
    passed = dict(zip(found, function(*found), strict=True)) if found else {}
    return [tuple(passed.get(x, x) for x in value) if isinstance(value, tuple)
            else passed.get(value, value) if isinstance(value, Tensor) else value for value in values]


def as_tuple(value: Any) -> tuple[Any, ...]:
    """A value as a tuple."""
    return value if isinstance(value, tuple) else (value,)


SHARDED: dict[type, type] = {}
AROUND: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[FSDP], weakref.ref[Unit]]] = weakref.WeakKeyDictionary()


def wrap_call(module: nn.Module, sharding: weakref.ref[FSDP], unit: Unit) -> None:
    """Gather and free a unit's weights around each call of its module. It stays the same object, of a subclass of its class.

    It is the call that is wrapped, and no hook that is registered: torch.compile compiles hooks together with the module.
    """
    if module not in AROUND:
        module.__class__ = sharded_class(type(module))
    AROUND[module] = sharding, weakref.ref(unit)


def sharded_class(kind: type) -> type:
    """The subclass of a module's class whose calls gather and free weights: one, or torch.compile would compile each unit."""
    if kind not in SHARDED:
        SHARDED[kind] = type(kind.__name__, (kind,), {
            "__call__": lambda module, *inputs: sharded_call(module, kind.__call__, inputs)})
    return SHARDED[kind]


def sharded_call(module: nn.Module, call: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    """Call a unit with its weights gathered, then and in the backward pass."""
    fsdp, unit = (reference() for reference in AROUND[module])
    if not isinstance(fsdp, FSDP) or not isinstance(unit, Unit):        # the training that it was part of is gone
        return call(module, *inputs)
    fsdp.enter_forward(unit)
    if torch.is_grad_enabled():
        inputs = tuple(through(partial(LeaveBackward.apply, partial(fsdp.leave_backward, unit)), inputs))
    out = call(module, *inputs)
    if torch.is_grad_enabled():
        out, = through(partial(EnterBackward.apply, partial(fsdp.enter_backward, unit)), [out])
    fsdp.leave_forward(unit)
    return out
