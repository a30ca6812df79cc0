"""`course verify PRESET parallel.tp=2 ...`: does this layout train as one process does? If not, what differs first?

Two runs from the same weights on the same batches: rank 0 alone, then all ranks in the layout. After every step all
losses and parameters are compared, each parameter under its serial name. In float64 with plain gradient descent, which
is the default here, every layout computes the same up to rounding, so what differs by more is a mistake. In another
precision (precision=bf16) rounding differs visibly; how much is measured, by running serially once more in float64. Of a
parameter that moved so little that rounding is a good part of it, nothing can be said then.
"""

import math
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course import config as configuration
from course.config import Config, Parallel
from course.data import order
from course.errors import CourseError
from course.launch import RankError, ranks
from course.parallel import Axis, Mesh, World, build_mesh, joined, placement
from course.parallel.mesh import launched
from course.precision import parameter_dtype
from course.train import Training, assemble, global_loss

DEFAULTS = ["data.source=mock", "precision=fp64", "optim.name=sgd", "optim.schedule=constant", "optim.warmup=0", "optim.lr=0.1",
            "train.steps=3", "train.global_batch=8"]
EXACT = 1e-10                                       # what rounding may leave in float64, of a parameter's largest change
ROUNDING = 4.0                                      # how many times the serial run's own rounding error a layout may differ
MOST = 0.25                                         # of a change: where rounding may leave more, a mistake would hide in it


@dataclass(frozen=True)
class Gap:
    """How far a parameter is from the serial run's after a step, relative to the largest change since the start there.

    The loss counts as a parameter that starts at 0.
    """

    step: int
    name: str
    size: float
    bound: float

    @property
    def judged(self) -> bool:
        """Whether the bound is low enough for a mistake to show above it."""
        return self.bound <= MOST

    @property
    def wrong(self) -> bool:
        """Whether the layout differs by more than rounding explains; a NaN is wrong, judged or not."""
        return math.isnan(self.size) or (self.judged and self.size > self.bound)


Snapshot = dict[str, Tensor]                        # the loss and all parameters after a step, by serial name


def main(preset: str, overrides: list[str]) -> bool:
    """Compare, print, and say whether all is equal. Without torchrun or srun it starts the ranks itself, on the CPU.

    Raises `CourseError` for a layout that is refused or none, `RankError` if a rank fails of something else.
    """
    config = configuration.load(preset, [*DEFAULTS, *overrides])
    p = config.parallel
    count = p.pp * max(1, p.dp) * p.cp * p.tp
    if count == 1 and not (launched() or config.compile or config.graphs):
        raise CourseError("this is one process, and would be compared with itself: name a layout, such as parallel.tp=2")
    if launched() or count == 1:
        gaps = compare(config)
    else:
        config = replace(config, parallel=replace(p, dp=max(1, p.dp)), train=replace(config.train, device="cpu"))
        try:
            gaps = ranks(count, timeout=3600)(compare, config)[0]
        except RankError as error:
            if isinstance(error.__cause__, CourseError):                # the same on all of them: a layout that is refused
                raise error.__cause__ from None
            raise
    return tell(config, gaps) if gaps else True     # only rank 0 has them


def compare(config: Config) -> list[Gap]:
    """Join, compare and part, on every rank of the layout."""
    with joined(config.train.device) as world:
        return compare_in(config, world)


def compare_in(config: Config, world: World, known: tuple[list[Snapshot], dict[str, float]] | None = None,
               mesh: Mesh | None = None) -> list[Gap]:
    """The gaps of all parameters after every step, on rank 0. known: the `references`, if rank 0 has them; mesh: one of these
    sizes, if there is one already."""
    mesh = mesh or build_mesh(config.parallel, world)
    serial, rounding = ([], {}) if world.rank else known or references(config, world)
    training = assemble(config, mesh)
    gaps: list[Gap] = []
    for number in range(1, config.train.steps + 1):
        loss = one_step(training, number)
        found = differences(training, loss, {name: (serial[number][name], serial[0][name]) for name in serial[0]}
                            if serial else {})
        if serial:
            gaps += [Gap(number, name, size, rounding[name] if rounding else resolution(serial[number][name], serial[0][name]))
                     for name, size in found.items()]
    return gaps


def references(config: Config, world: World) -> tuple[list[Snapshot], dict[str, float]]:
    """The serial run at the start and after every step, and how much rounding may leave in each parameter (not in float64).

    Two runs that round differently are about as far apart as each is from the exact one. A parameter that was lucky in these
    few steps may differ as much as half of those do that can be judged.
    """
    alone = replace(config, parallel=Parallel(dp=1), compile=False, graphs=False)
    mesh = build_mesh(alone.parallel, replace(world, rank=0, size=1))
    snapshots = serial_run(alone, mesh)
    if config.precision == "fp64":
        return snapshots, {}
    exact = serial_run(replace(alone, precision="fp64", stream="wide"), mesh)
    errors = {name: max(gap(b[name], a[name], change(b[name], start)) for a, b in zip(snapshots[1:], exact[1:], strict=True))
              for name, start in exact[0].items()}
    half = median([error for error in errors.values() if ROUNDING * error <= MOST] or [MOST])
    return snapshots, {name: ROUNDING * max(error, half) for name, error in errors.items()}


def serial_run(config: Config, mesh: Mesh) -> list[Snapshot]:
    """Loss (0 at first) and parameters of one process, at the start and after each step, in host memory."""
    training = assemble(config, mesh)
    losses = [torch.zeros(())]
    snapshots = []
    for number in range(config.train.steps + 1):
        if number:
            losses.append(one_step(training, number).cpu())
        masters = training.gradients.values()       # of what is in 16 bits
        snapshots.append({"loss": losses[-1]} | {
            placement(p).name: masters.get(p, p).detach().cpu().reshape(placement(p).global_shape).clone()
            for p in training.model.parameters()})
    return snapshots


def one_step(training: Training, number: int) -> Tensor:
    """Train on this rank's part of global batch `number`, random numbers; the global loss."""
    t, mesh = training.config.train, training.mesh
    mine = order.my_slice(t.global_batch, mesh.dp.size, mesh.dp.rank)
    dtype = parameter_dtype(training.config.precision)
    batch = training.model.example(mine.stop - mine.start, mesh.world.device, number * t.global_batch + mine.start)  # type: ignore[operator]
    batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
    loss, _ = training.step(batch)
    training.gradients.settle()
    return global_loss(loss, mesh)


def differences(training: Training, loss: Tensor, serial: dict[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    """How far the loss and each parameter are from the serial ones, the most over all ranks.

    serial: rank 0 brings for each name the value now and at the start.
    """
    everyone, device = training.mesh.all, training.mesh.world.device
    here: dict[str, list[nn.Parameter]] = {}
    masters = training.gradients.values()           # of what is here in 16 bits
    for parameter in training.model.parameters():
        here.setdefault(placement(parameter).name, []).append(parameter)
    found = {}
    for name, shape, dtype, scale in shared([(name, x.shape, x.dtype, change(x, start)) for name, (x, start) in serial.items()],
                                            everyone):
        whole = serial[name][0].to(device) if serial else torch.empty(shape, dtype=dtype, device=device)
        if everyone.size > 1:
            dist.broadcast(whole, 0)
        mine = [(loss, whole)] if name == "loss" else [
            (masters.get(p, p).detach(), whole[tuple(slice(*side) for side in placement(p).box)].reshape(p.shape))
            for p in here.get(name, [])]
        found[name] = max((gap(a, b, scale) for a, b in mine), default=0.0)
    if everyone.size == 1:
        return found
    answers: list[dict[str, float]] = [{}] * everyone.size
    dist.all_gather_object(answers, found)
    return {name: max((answer[name] for answer in answers), key=lambda x: (math.isnan(x), x)) for name in found}


def shared(value: Any, everyone: Axis) -> Any:
    """Rank 0's value, on every rank."""
    box = [value]
    if everyone.size > 1:
        dist.broadcast_object_list(box, 0)
    return box[0]


def change(now: Tensor, start: Tensor) -> float:
    """The largest change of a parameter, of any shape, since the start; 1 if it never moved."""
    return (now.double() - start.double()).abs().max().item() or 1.0


def resolution(now: Tensor, start: Tensor) -> float:
    """How much rounding may leave in float64, relative to the largest change since the start.

    `EXACT`, unless training hardly moved the parameter: 0.09 that changed by 1e-8 is stored to 1e-9 of that change.
    """
    return max(EXACT, ROUNDING * torch.finfo(torch.float64).eps * now.abs().max().item() / change(now, start))


def gap(a: Tensor, b: Tensor, scale: float) -> float:
    """The largest difference between two tensors of one shape, relative to `scale`, in the tensors' unit."""
    return (a.double() - b.double()).abs().max().item() / scale


def tell(config: Config, gaps: list[Gap]) -> bool:
    """Print the verdict; whether all is equal. Where less than half can be judged there is none, and that is not equal."""
    p, steps = config.parallel, config.train.steps
    layout = " ".join(f"{name}={getattr(p, name)}" for name in ("pp", "dp", "cp", "tp")) + (" sp" if p.sp else "")
    print(f"{config.preset} in {config.precision}, {steps} steps of {config.optim.name}: {layout} against one process")
    for number in range(1, steps + 1):
        at = [entry for entry in gaps if entry.step == number]
        worst = max([entry for entry in at[1:] if entry.judged] or at[1:],
                    key=lambda entry: entry.size / entry.bound if entry.size == entry.size else math.inf)
        print(f"  step {number}: the loss differs by {at[0].size:.1e}; of {len(at) - 1} parameters {worst.name} differs most, "
              f"by {worst.size:.1e} of what training changed it by (rounding may leave {worst.bound:.1e})")
    wrong, vague = [entry for entry in gaps if entry.wrong], [entry for entry in gaps if not entry.judged]
    too_few = 2 * len(vague) > len(gaps)             # are judged
    if vague:
        print(f"not judged: {len(vague) // steps} of {len(gaps) // steps} values, of whose change rounding in {config.precision} "
              f"may be {MOST:.0%} or more, such as {vague[0].name}")
    if wrong:
        first = [entry for entry in wrong if entry.step == wrong[0].step]
        print(f"DIFFERENT from step {first[0].step} on, in {len(first)} of {len(gaps) // steps} values: first "
              + ", ".join(f"{entry.name} ({entry.size:.1e})" for entry in first[:5]) + ("" if len(first) < 6 else ", ..."))
    elif too_few:
        print("no verdict: training hardly moved most of what is compared. Take precision=fp64, or more train.steps")
    else:
        print("equal: this layout trains as one process does" + ", as far as that can be judged" * bool(vague))
    return not wrong and not too_few
