"""Lesson 20: a unit that is gathered and freed, the reduce-scatter of its gradients, and the order of a step.

The functions and classes here are the answers to the exercises of the lesson.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from course.config import Parallel
from course.lab.checks import random_inputs, return_values
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn
from course.lab.instruments.bytes_sent import Traffic, piece_bytes, within_budget
from course.lab.instruments.tensor_memory import MemoryMeter
from course.lab.sandbox.limits import Limits
from course.ops.storage import allocate, free_memory, has_memory
from course.parallel import Axis, build_mesh, join
from course.parallel.mappings import all_gather_single, reduce_scatter_single

PATIENT = Limits(seconds=180)                        # most of it for starting 4 ranks on a machine with 2 cores
LEARNING_RATE = 0.1
STEPS = 3
SHAPES = ((3, 4), (5,), (2, 3), (4,))                # of a unit's parameters; 27 numbers: 2 and 4 ranks need padding
Events = list[tuple[str, int]]


def views(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The part of each parameter in a flat tensor, in the parameter's shape. Padding may follow at the end."""
    parts = flat[:sum(p.numel() for p in parameters)].split([p.numel() for p in parameters])
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]


class ShardedUnit:
    """The weights of a unit: a share on each rank, and all of them only between `gather` and `free`.

    `whole` is one flat tensor, padded to a multiple of axis.size. The unit's parameters
    are views of it. `share` is this rank's part, a parameter for the optimizer.
    """

    def __init__(self, parameters: list[nn.Parameter], axis: Axis):
        self.parameters, self.axis = parameters, axis
        count = sum(p.numel() for p in parameters)
        padding = parameters[0].new_zeros(-count % axis.size)
        self.whole = torch.cat([*(p.detach().flatten() for p in parameters), padding])
        for parameter, view in zip(parameters, views(self.whole, parameters), strict=True):
            parameter.data = view
        self.share = nn.Parameter(self.part(self.whole).clone())
        self.free()

    def part(self, flat: Tensor) -> Tensor:                     # (n,) -> (n / size,)
        """This rank's part of a tensor that is laid out like `whole`."""
        size = len(flat) // self.axis.size
        return flat[self.axis.rank * size:(self.axis.rank + 1) * size]

    def gather(self) -> None:
        """Make all weights readable: give `whole` its memory again, and fill it with all ranks' shares."""
        allocate(self.whole)
        all_gather_single(self.whole, self.share.detach(), group=self.axis.group)

    def free(self) -> None:
        """Free the memory of `whole`, which the parameters and what autograd saved refer to."""
        free_memory(self.whole)


def reduce_gradients(unit: "ShardedUnit") -> None:
    """Add this rank's part of the mean gradient over the axis to `unit.share.grad`; drop each parameter's `.grad`.

    A parameter without gradient counts as zero.
    """
    flat = torch.zeros_like(unit.whole)                         # (n,)
    for parameter, view in zip(unit.parameters, views(flat, unit.parameters), strict=True):
        if parameter.grad is not None:
            view.copy_(parameter.grad)
        parameter.grad = None
    mean = torch.empty_like(unit.share)                         # (n / size,)
    reduce_scatter_single(mean, flat, group=unit.axis.group)
    mean /= unit.axis.size
    unit.share.grad = mean if unit.share.grad is None else unit.share.grad + mean


def step_events(units: int) -> list[tuple[str, int]]:
    """What a rank does in one step, in order: pairs of "gather", "forward", "backward", "free" or "reduce" and a unit.

    A gather and a reduce only begin there. A forward or backward waits for its unit's gather.
    """
    last = units - 1
    events = [("gather", 0)]
    for unit in range(units):
        if unit < last:
            events.append(("gather", unit + 1))
        events.append(("forward", unit))
        if unit < last:
            events.append(("free", unit))
    for unit in reversed(range(units)):
        if unit > 0:
            events.append(("gather", unit - 1))
        events += [("backward", unit), ("free", unit), ("reduce", unit)]
    return events


def axes_of(world: Any) -> dict[str, Axis]:
    """The axis of all ranks, and one of two ranks, whose group has to be named."""
    return {name: build_mesh(Parallel(dp=size, tp=world.size // size), world).dp
            for name, size in (("all", world.size), ("pair", 2))}


def shares_kept(unit: ShardedUnit) -> float:
    """How many numbers a unit's tensors and their gradients keep, its weights' own memory aside, in shares."""
    tensors = [x for x in tree_leaves(list(vars(unit).values())) if isinstance(x, Tensor)]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() // x.element_size() for x in tensors}
    storages.pop(unit.parameters[0].untyped_storage()._cdata, None)
    return sum(storages.values()) / len(unit.share)


def draw_chain(seed: int, hidden: bool) -> Tensors:
    """The weights of a chain of three units, and a batch for each of four ranks."""
    generator = random_inputs.generator(seed)
    width = 5 if hidden else 3
    return {"weights": torch.randn(3, len(flat_weights(block_of(width))), generator=generator).double() / 3,
            "x": torch.randn(4, 2, width, generator=generator).double()}


def block_of(width: int) -> nn.Module:
    """What a unit computes."""
    return nn.Sequential(nn.Linear(width, 4), nn.GELU(), nn.Linear(4, width)).double()


def flat_weights(block: nn.Module) -> Tensor:
    """All weights of a block, flat."""
    return torch.cat([p.detach().flatten() for p in block.parameters()])


def chain_of(weights: Tensor, width: int) -> list[nn.Module]:
    """A block for each row of weights."""
    blocks = [block_of(width) for _ in weights]
    for block, row in zip(blocks, weights, strict=True):
        for parameter, value in zip(block.parameters(), views(row, list(block.parameters())), strict=True):
            parameter.data.copy_(value)
    return blocks


def readable(x: Tensor, where: str = "the backward pass") -> Tensor:
    """A tensor that has its memory. Raises `InvalidReturn` otherwise: to read it could end the process."""
    if not has_memory(x):
        raise InvalidReturn(f"after `gather`, {where} reads a weight that has no memory",
                            "the parameters, and what autograd saved of them, are views of one storage for good: gather into "
                            "that storage, `allocate(self.whole)`, not into a new tensor")
    return x


def compute_forward(block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """A unit's input, cut off from what came before, and its output, with a residual sum."""
    x = x.detach().requires_grad_()
    for parameter in block.parameters():
        readable(parameter, "the forward pass")
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, readable):
        return x, x + block(x)


def run_sharded_unit(inputs: Tensors) -> Tensors:
    """Train a chain of units, each whole only while it computes, over all ranks and in groups of two."""
    world = join("cpu")
    found: Tensors = {}
    sent, kept, before, freed, lean = [], 0.0, True, True, True
    for name, axis in axes_of(world).items():
        blocks = chain_of(inputs["weights"], inputs["x"].shape[-1])
        units = [ShardedUnit(list(block.parameters()), axis) for block in blocks]
        before = before and not any(has_memory(unit.parameters[0]) for unit in units)

        def gather(unit: ShardedUnit) -> None:
            nonlocal lean
            with Traffic() as traffic, MemoryMeter() as meter:
                unit.gather()
            lean = lean and meter.peak <= unit.share.nbytes
            sent.append((traffic, float(piece_bytes(unit.whole, 0, unit.axis.size))))

        outputs = []
        for _ in range(STEPS):
            held, y = [], inputs["x"][world.rank]
            for block, unit in zip(blocks, units, strict=True):
                gather(unit)
                held.append(compute_forward(block, y))
                y = held[-1][1]
                unit.free()
                freed = freed and not has_memory(unit.parameters[0])
                kept = max(kept, shares_kept(unit))
            outputs.append(y.detach())
            grad = y.detach()                        # of the loss y ** 2 / 2
            for block, unit, (x, out) in reversed(list(zip(blocks, units, held, strict=True))):
                gather(unit)
                out.backward(grad)
                assert x.grad is not None
                grad = x.grad
                unit.free()
                freed = freed and not has_memory(unit.parameters[0])
                update_share(block, unit)
                kept = max(kept, shares_kept(unit))
        found[name] = torch.stack(outputs)
        for unit in units:
            unit.gather()
        count = inputs["weights"].shape[1]           # the rest is padding
        found[f"{name}_weights"] = torch.cat([readable(unit.whole, "the next step")[:count] for unit in units])
    dist.barrier()
    return found | {"before": torch.tensor(float(before)), "freed": torch.tensor(float(freed)), "kept": torch.tensor(kept),
                    "lean": torch.tensor(float(lean)), "sent": within_budget(*sent)}


def update_share(block: nn.Module, unit: ShardedUnit) -> None:
    """Gradient descent on this rank's share, with the mean of all ranks' gradients."""
    flat = torch.zeros_like(unit.whole)
    for parameter, view in zip(block.parameters(), views(flat, unit.parameters), strict=True):
        assert parameter.grad is not None
        view.copy_(parameter.grad)
        parameter.grad = None
    dist.all_reduce(flat, group=unit.axis.group)
    unit.share.data -= LEARNING_RATE * unit.part(flat) / unit.axis.size


def draw_gradients(seed: int, hidden: bool) -> Tensors:
    """For each of four ranks the gradients of several micro-batches, flat."""
    generator = random_inputs.generator(seed)
    count = sum(torch.Size(shape).numel() for shape in SHAPES) + (4 if hidden else 0)
    return {"gradients": torch.randn(4, 4 if hidden else 3, count, generator=generator).double()}


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Within it, `torch.empty` and its kin return NaN: whoever forgets to write a part of it is wrong each time."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def run_reduce_gradients(inputs: Tensors) -> Tensors:
    """Reduce the gradients of several micro-batches; one parameter has none in the second, and on odd ranks never one."""
    world = join("cpu")
    found: Tensors = {}
    sent, dropped, kept, calls = [], True, 0.0, 0
    extra = inputs["gradients"].shape[-1] - sum(torch.Size(shape).numel() for shape in SHAPES)
    for name, axis in axes_of(world).items():
        parameters = [nn.Parameter(torch.zeros(shape).double()) for shape in (*SHAPES[:-1], (SHAPES[-1][0] + extra,))]
        unit = ShardedUnit(parameters, axis)
        shares = []
        for micro, flat in enumerate(inputs["gradients"][world.rank]):
            for parameter, value in zip(parameters, views(flat, parameters), strict=True):
                parameter.grad = value.clone()
            if micro == 1 or world.rank % 2:
                parameters[1].grad = None
            with Traffic() as traffic, unwritten_is_nan():
                reduce_gradients(unit)
            sent.append((traffic, float(piece_bytes(unit.whole, 0, axis.size))))
            calls += len(traffic.calls)
            dropped = dropped and all(p.grad is None for p in parameters)
            shares.append(return_values.tensor(unit.share.grad, "reduce_gradients", tuple(unit.share.shape), torch.float64,
                                               " as `unit.share.grad`").clone())
            kept = max(kept, shares_kept(unit))
        found[name] = torch.stack(shares)
    dist.barrier()
    return found | {"dropped": torch.tensor(float(dropped)), "kept": torch.tensor(kept), "sent": within_budget(*sent),
                    "calls": torch.tensor(float(calls))}


def draw_counts(seed: int, hidden: bool) -> Tensors:
    """Numbers of units, the weights of each, and a batch for each of four ranks."""
    counts = [1, 2, 4, 6] if hidden else [1, 2, 3, 5]
    generator = random_inputs.generator(seed)
    weights = torch.randn(max(counts), len(flat_weights(block_of(3))), generator=generator).double() / 3
    return {"counts": torch.tensor(counts), "weights": weights, "x": torch.randn(4, 2, 3, generator=generator).double()}


class EventRunner:
    """Carry out the events of training steps on real units, and record when units are gathered, freed and reduced."""

    def __init__(self, blocks: list[nn.Module], axis: Axis):
        self.blocks, self.axis = blocks, axis
        self.units = [ShardedUnit(list(block.parameters()), axis) for block in blocks]
        self.optimizer = torch.optim.SGD([unit.share for unit in self.units], LEARNING_RATE)

    def step(self, events: Sequence[tuple[str, int]], x: Tensor) -> float:
        """One step of gradient descent; returns this rank's loss. Raises `InvalidReturn` if the order is impossible."""
        n = len(self.units)
        self.computed = 0                            # forwards and backwards so far
        self.most = self.gathers = 0                 # most units whole at once; gathers begun
        self.begun: dict[int, int] = {}              # unit -> forwards and backwards before its last gather began
        self.ahead: list[int] = []                   # at each, how many have begun since its unit's gather
        self.after_backward: dict[int, int] = {}     # unit -> forwards and backwards when its own backward was done
        self.late, self.reduces = [-1] * n, [0] * n
        self.works: dict[int, Any] = {}
        self.held: list[tuple[Tensor, Tensor]] = []
        self.x, self.grad = x, x
        for number, (what, unit) in enumerate(events):
            self.before = ", ".join(f"{kind} {of}" for kind, of in events[max(number - 3, 0):number]) or "nothing"
            getattr(self, what)(unit)
            self.most = max(self.most, self.whole_units())
        if self.computed < 2 * n:
            raise InvalidReturn(f"of {n} units, {len(self.held)} go forward and {self.computed - len(self.held)} backward",
                                "every unit goes forward once, and then backward once")
        for work in self.works.values():
            work.wait()
        self.left = self.whole_units()
        for each in self.units:
            each.free()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(self.held[-1][1].detach().square().sum() / 2)

    def whole_units(self) -> int:
        """How many units have memory for all of their weights."""
        return sum(has_memory(unit.whole) for unit in self.units)

    def gather(self, unit: int) -> None:
        """Begin an all-gather."""
        self.begun[unit] = self.computed
        self.gathers += 1
        self.wait(unit)
        allocate(self.units[unit].whole)
        self.works[unit] = all_gather_single(self.units[unit].whole, self.units[unit].share.detach(), group=self.axis.group,
                                             async_op=True)

    def wait(self, unit: int) -> None:
        """Wait for the all-gather in flight, if there is one."""
        if unit in self.works:
            self.works.pop(unit).wait()

    def free(self, unit: int) -> None:
        """Free a unit's weights."""
        self.wait(unit)
        self.units[unit].free()

    def enter(self, what: str, unit: int) -> None:
        """Wait for the weights of a unit that computes now."""
        self.wait(unit)
        if not has_memory(self.units[unit].whole):
            raise InvalidReturn(f"with {len(self.units)} units, the {what} of unit {unit} begins while its weights are not "
                                f"whole; the events before it are {self.before}",
                                "begin a unit's gather before the compute before its own, and free it only after its own")
        self.ahead.append(self.computed - self.begun[unit])
        self.computed += 1

    def forward(self, unit: int) -> None:
        """Compute a unit, which has to be the next."""
        if unit != len(self.held):
            raise InvalidReturn("the forward passes are not in the order 0, 1, 2, ...", "each unit computes from the one before")
        self.enter("forward", unit)
        self.held.append(compute_forward(self.blocks[unit], self.x))
        self.x = self.held[-1][1]
        self.grad = self.x.detach()

    def backward(self, unit: int) -> None:
        """Compute a unit's backward pass, which has to be the next."""
        n = len(self.units)
        if len(self.held) < n or unit != 2 * n - 1 - self.computed:
            raise InvalidReturn("the backward passes are not in the order n - 1, ..., 1, 0, after all forward passes",
                                "the backward pass goes from the last unit to the first")
        self.enter("backward", unit)
        given, out = self.held[unit]
        out.backward(self.grad)
        assert given.grad is not None
        self.grad = given.grad
        self.after_backward[unit] = self.computed

    def reduce(self, unit: int) -> None:
        """Reduce a unit's gradients."""
        if unit not in self.after_backward:
            raise InvalidReturn("a unit's gradients are reduced before its backward pass", "reduce after the unit's backward")
        self.late[unit] = self.computed - self.after_backward[unit]
        self.reduces[unit] += 1
        reduce_gradients(self.units[unit])


def valid_events(value: Any, units: int) -> Events:
    """The events that `step_events` returned. Raises `InvalidReturn` for anything else."""
    events = []
    for pair in return_values.several(value, "step_events", "a list of pairs"):
        what, unit = return_values.pair(pair, "step_events", "(what, unit)")
        if what not in ("gather", "forward", "backward", "free", "reduce"):
            raise InvalidReturn(f"`step_events` returned an event {return_values.describe_value(what)}",
                                'an event is one of "gather", "forward", "backward", "free", "reduce"')
        if not isinstance(unit, int) or not 0 <= unit < units:
            raise InvalidReturn("`step_events` returned an event of a unit that does not exist",
                                "units are numbered from 0 to units - 1")
        events.append((what, unit))
    return events


def run_step_events(inputs: Tensors) -> Tensors:
    """Train chains of several lengths in the order of the events."""
    world = join("cpu")
    axis = axes_of(world)["all"]
    rows: dict[str, list[float]] = {key: [] for key in ("losses", "ahead", "most", "gathers", "late", "reduces", "left")}
    for count in inputs["counts"].tolist():
        events = valid_events(step_events(count), count)
        runner = EventRunner(chain_of(inputs["weights"][:count], 3), axis)
        rows["losses"] += [runner.step(events, inputs["x"][world.rank]) for _ in range(STEPS)]
        rows["ahead"] += runner.ahead
        rows["late"] += runner.late
        rows["reduces"] += runner.reduces
        rows["most"].append(runner.most)
        rows["gathers"].append(runner.gathers)
        rows["left"].append(runner.left)
    dist.barrier()
    return {key: torch.tensor(row, dtype=torch.float64) for key, row in rows.items()}


def step_events_cases(inputs: Tensors) -> dict[str, list[str]]:
    """The question behind each number."""
    counts = inputs["counts"].tolist()
    computes = [(n, what, unit) for n in counts for what, units in (("forward", range(n)), ("backward", reversed(range(n))))
                for unit in units]
    each = [(n, unit) for n in counts for unit in range(n)]
    return {"losses": [f"the loss of step {step} with {n} units" for n in counts for step in range(STEPS)],
            "ahead": [f"with {n} units, the number of computes between the gather of unit {unit} and its {what}"
                      for n, what, unit in computes],
            "late": [f"with {n} units, the number of computes between the backward of unit {unit} and its reduce (-1: none)"
                     for n, unit in each],
            "reduces": [f"with {n} units, the number of reduces of unit {unit}" for n, unit in each],
            "most": [f"with {n} units, the most that are whole at once" for n in counts],
            "gathers": [f"with {n} units, the number of gathers" for n in counts],
            "left": [f"with {n} units, the number that are whole at the end" for n in counts]}


EXERCISES = [
    Exercise("sharded-unit", "20", (f"{__name__}.ShardedUnit",), draw_chain, run_sharded_unit, {
        "all": "in each of three steps the units compute what they compute with whole weights",
        "all_weights": "after three steps the gathered weights are those of serial training on all ranks' batches",
        "pair": "the outputs are right along an axis of two ranks, too",
        "pair_weights": "and so are the weights",
        "before": "the whole weights have no memory before the first `gather`",
        "freed": "they have none after `free`",
        "kept": "besides them, a unit keeps only its share (numbers kept, in shares)",
        "lean": "besides `whole`, `gather` makes no tensors that are larger than a share",
        "sent": "`gather` sends what one all-gather of the shares sends"}, flags={
            "before": "they have", "freed": "the parameters still have theirs", "sent": "it sends more",
            "lean": "it does: for a moment the weights are in memory more than once"},
        sizes=(2, 4), points=3, limits=PATIENT),
    Exercise("reduce-gradients", "20", (f"{__name__}.reduce_gradients",), draw_gradients, run_reduce_gradients, {
        "all": "after each micro-batch `share.grad` is this rank's part of the mean gradients, summed over micro-batches",
        "pair": "along an axis of two ranks, too",
        "dropped": "no parameter keeps its whole gradient",
        "kept": "the unit keeps its share and the share's gradient (numbers kept, in shares)",
        "calls": "each micro-batch needs one collective (their number)",
        "sent": "it sends what a reduce-scatter sends"}, flags={
            "dropped": "one has a gradient afterwards", "sent": "it sends more"},
        sizes=(2, 4), points=2, limits=PATIENT),
    Exercise("step-events", "20", (f"{__name__}.step_events",), draw_counts, run_step_events, {
        "losses": "carried out in this order, three steps train as one process does",
        "ahead": "each gather begins just before the compute before its own",
        "most": "at most two units are whole at once",
        "gathers": "each unit is gathered for its forward and its backward; the last stays whole in between",
        "late": "each reduce begins right after its unit's backward",
        "reduces": "and each unit has one",
        "left": "at the end no unit is whole"}, cases=step_events_cases, sizes=(2, 4), points=3, limits=PATIENT),
]
