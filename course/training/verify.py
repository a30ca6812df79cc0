"""`course verify PRESET parallel.tp=2 ...`: does this layout train like one process? If not, what differs most?

Two runs start from the same weights and see the same batches: one process, then all ranks in the layout. After every step the
loss, the gradient norm, every parameter and every moving average are compared, each under its serial name.

In float64, the default, every layout computes the same up to rounding, so the *largest* difference of any number counts. In
other precisions rounding is visible. Each parameter's difference is then taken as a whole, as a root mean square: rounding may
take one number far off, but not all of them. One more serial run in float64 measures how far rounding alone takes a parameter.
FP8 judges several seeds together.

`--thorough` chooses settings that make mistakes visible (`HARD`), and compares in float64 first. The report names what a
comparison could not show.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course import config as configuration
from course.config import Config, Parallel
from course.config.axes import AXES
from course.config.validation import num_microbatches, refusal
from course.data import Batch, order
from course.models import build_model
from course.ops.ema import moving_average
from course.ops.number_formats import FIRST_SCALE, parameter_dtype
from course.parallel import Axis, Mesh, World, build_mesh, joined
from course.parallel.mesh import launched, world_size
from course.parallel.placement import Placement
from course.ranks.notebook_ranks import RankError, ranks
from course.training.assemble import Training, assemble
from course.training.step import split_microbatches
from course.training.trainer import global_loss
from course.training.validation import forward_only
from course.utils.errors import CourseError
from course.utils.random import key, uniform

DEFAULTS = ["data.source=mock", "precision=fp64", "optim.name=sgd", "optim.schedule=constant", "optim.warmup=0", "optim.lr=0.1",
            "train.steps=3", "train.global_batch=8"]
# --thorough: dropout and an average that matter, optimizers with states and decay. A large eps of Adam keeps the scale of the
# gradient, in which a mistake may be, from cancelling, and gradients that are zero up to rounding from growing
HARD = ["model.dropout=0.1", "model.drop_path=0.2", "model.label_drop=0.3", "optim.weight_decay=0.01", "optim.ema=0.5",
        "optim.momentum=0.9"]
ADAPTIVE = ["optim.lr=0.01", "optim.eps=1e-3"]
NOISE = 0.02                                        # standard deviation of weights that would start at zero
EXACT = 1e-10                                       # bound on rounding in float64, relative to a parameter's largest change
ROUNDING = 4.0                                      # a layout may differ by so many times the serial run's own rounding error
MOST = 0.5                                          # relative to a change: where rounding may be more, it would hide a mistake
SEEDS = {"fp8": 3}                                  # runs that are judged together; else 1, and 3 with --thorough
MARGIN = 16.0                                       # how far fp16's loss scale stays below one that does not overflow
LOSS, NORM, SKIPPED, EVALUATION = "the loss", "the gradient norm", "skipped steps", "the loss in evaluation"


@dataclass(frozen=True)
class Trial:
    """One comparison: the layout and its settings, and whether it tests more than training.

    thorough: padding and uneven ignored targets in the batches, a step that overflows, an evaluation, and a serial run without
    recomputation, in float64 also without micro-batches. clipped: gradients are clipped to half of the first step's norm.
    noise: the standard deviation of weights that would start at zero.
    """

    config: Config
    thorough: bool = False
    clipped: bool = False
    noise: float = 0.0


def simple(config: Config) -> Trial:
    """The trial without `--thorough`. Behind zero weights little moves: too little for other precisions than float64."""
    return Trial(config, noise=0.0 if config.precision == "fp64" else NOISE)


@dataclass(frozen=True)
class Gap:
    """How far a value is from the serial run's after a step, relative to its change since the start there.

    The loss and the gradient norm count as values that start at 0. note: what else is wrong besides the size.
    """

    step: int
    name: str
    size: float
    bound: float
    note: str = ""

    @property
    def judged(self) -> bool:
        """Whether the bound is low enough for a mistake to show above it."""
        return self.bound <= MOST

    @property
    def wrong(self) -> bool:
        """Whether the layout differs by more than rounding explains; a NaN is wrong, judged or not."""
        return bool(self.note) or math.isnan(self.size) or (self.judged and self.size > self.bound)


@dataclass(frozen=True)
class Comparison:
    """The result of one or several trials of a layout; only rank 0 has it. clipped: the steps in which clipping acted."""

    gaps: list[Gap]
    clipped: int = 0


Snapshot = dict[str, Tensor]                        # whole values to compare after a step, by serial name, in host memory
Held = dict[str, list[tuple[Tensor, Placement]]]    # a rank's parts of each


@dataclass(frozen=True)
class Reference:
    """The serial run. snapshots: at the start and after each step; errors: rounding's share of each value (not in float64);
    clip, loss_scale: the values that both runs use."""

    snapshots: list[Snapshot]
    errors: dict[str, float]
    clip: float
    loss_scale: float


def main(preset: str, overrides: list[str], thorough: bool = False) -> bool:
    """Compare, print, and return whether all is equal. Without torchrun or srun it starts the ranks itself, on the CPU.

    Raises `CourseError` if the layout is refused or is one process, `RankError` if a rank fails for another reason.
    """
    config = default_settings(preset, overrides)
    count = math.prod(max(1, getattr(config.parallel, name)) for name in AXES)
    if count == 1 and not (thorough or launched() or config.compile or config.graphs):
        raise CourseError("this is one process, and would be compared with itself: name a layout, such as parallel.tp=2")
    own = not launched() and count > 1              # starts its ranks itself
    overrides = [*overrides, *(["train.device=cpu"] if own else [])]
    trials = thorough_trials(preset, overrides) if thorough else [seeds(simple(default_settings(preset, overrides)))]
    if own:
        try:
            found = ranks(count, timeout=3600)(compare_all, trials)[0]
        except RankError as error:
            if isinstance(error.__cause__, CourseError):                # a refused layout, the same error on all
                raise error.__cause__ from None
            raise
    else:
        found = compare_all(trials)
    if not found:                                   # only rank 0 has them
        return True
    equal = [tell(group[0].config, comparison.gaps) for group, comparison in zip(trials, found, strict=True)]
    if all(equal):
        left = [not_tried(group[0], comparison) for group, comparison in zip(trials, found, strict=True)]
        print("not tried: " + "; ".join([*(text for what, text in left[0].items() if all(what in other for other in left)),
                                         "reading data, checkpoints"]) + ("" if thorough else ". --thorough tries more"))
    return all(equal)


def default_settings(preset: str, overrides: Sequence[str], more: Sequence[str] = ()) -> Config:
    """The configuration to compare, with parallel.dp filled in. more: settings between the defaults and the user's."""
    config = configuration.load(preset, [*DEFAULTS, *more, *overrides])
    p = config.parallel
    others = math.prod(getattr(p, name) for name in AXES if name != "dp")
    dp = p.dp or max(1, world_size() // others)
    return replace(config, parallel=replace(p, dp=dp))


def seeds(trial: Trial, count: int = 0) -> list[Trial]:
    """The same trial with several seeds, which are judged together."""
    c = trial.config
    return [replace(trial, config=replace(c, train=replace(c.train, seed=c.train.seed + i)))
            for i in range(count or SEEDS.get(c.precision, 1))]


def thorough_trials(preset: str, overrides: Sequence[str]) -> list[list[Trial]]:
    """Trials in float64 with SGD and, with another seed, the preset's other optimizer, or Adam if it has none; then in the
    requested precision, if that is another."""
    asked = default_settings(preset, overrides)
    own = configuration.load(preset, overrides).optim.name
    adaptive = [f"optim.name={own if own != 'sgd' else 'adam'}", *ADAPTIVE]
    exact = [*overrides, "precision=fp64", *(["attention=default", "stream=wide"] if asked.precision != "fp64" else [])]
    clipped = not any(entry.startswith("optim.clip=") for entry in overrides)
    trials = [[Trial(hard_settings(preset, exact, HARD), True, clipped, NOISE)],
              [Trial(hard_settings(preset, exact, [*HARD, *adaptive, f"train.seed={asked.train.seed + 1}"]), True, noise=NOISE)]]
    if asked.precision != "fp64":
        trials.append(seeds(Trial(hard_settings(preset, overrides, HARD), True, noise=NOISE), 3))
    return trials


def hard_settings(preset: str, overrides: Sequence[str], settings: Sequence[str]) -> Config:
    """The configuration with those of `settings` that the model has and the layout accepts; the user's settings stay.

    Micro-batches: enough for every pipeline stage, and the last one smaller. Gradient buckets: several, however small the model.
    """
    asked = default_settings(preset, overrides)
    known = {f"model.{entry.name}" for entry in fields(asked.model)}
    p, samples = asked.parallel, 2 * asked.parallel.pp + 1
    taken: list[str] = []
    numbers = sum(parameter.numel() for parameter in build_model(asked.model).parameters())
    few = [f"train.global_batch={samples * p.dp}", "train.micro_batch=2"]
    buckets = [f"parallel.bucket_mb={min(p.bucket_mb, numbers / 2**20):g}"]
    for setting in (few, buckets, *([entry] for entry in settings)):
        name = setting[0].partition("=")[0]
        if name.startswith("model.") and name not in known:
            continue
        try:
            if not refusal(default_settings(preset, overrides, [*taken, *setting])):
                taken += setting
        except CourseError:                         # this layout does not take it: `not_tried` says so
            continue
    return default_settings(preset, overrides, taken)


def compare(config: Config) -> list[Gap]:
    """Join, compare and leave, on every rank of the layout; rank 0 has the gaps."""
    return [gap for comparison in compare_all([seeds(simple(config))]) for gap in comparison.gaps]


def compare_all(trials: list[list[Trial]]) -> list[Comparison]:
    """A comparison for each group of trials, whose seeds are judged together; empty on all ranks but 0."""
    with joined(trials[0][0].config.train.device) as world:
        mesh = build_mesh(trials[0][0].config.parallel, world)
        measured = [[measure(trial, world, mesh) for trial in group] for group in trials]
        return [] if world.rank else [judge(entry) for entry in measured]


def compare_in(config: Config, world: World, known: Reference | None = None, mesh: Mesh | None = None) -> list[Gap]:
    """The gaps of the `simple` trial, on rank 0. known: the `references`, if rank 0 has them. mesh: an existing one of these
    sizes."""
    measured = measure(simple(config), world, mesh or build_mesh(config.parallel, world), known)
    return [] if world.rank else judge([measured]).gaps


@dataclass(frozen=True)
class Measured:
    """One trial's differences by (step, name), on rank 0; notes on some of them; and the reference."""

    sizes: dict[tuple[int, str], float]
    notes: dict[tuple[int, str], str]
    reference: Reference


def measure(trial: Trial, world: World, mesh: Mesh, known: Reference | None = None) -> Measured:
    """The differences at the start and after every step, on rank 0. known: the reference, if rank 0 has it."""
    reference = Reference([], {}, 0.0, 0.0) if world.rank else known or serial_reference(trial, world)
    clip, loss_scale = shared((reference.clip, reference.loss_scale), mesh.all)
    sizes: dict[tuple[int, str], float] = {}
    notes: dict[tuple[int, str], str] = {}
    for number, held in enumerate(run(trial, mesh, clip, loss_scale)):
        start, now = (reference.snapshots[0], reference.snapshots[number]) if reference.snapshots else ({}, {})
        exact = trial.config.precision == "fp64"
        for name, size, note in differences(held, {name: (now[name], start[name]) for name in now}, mesh, exact):
            sizes[number, name] = size              # at the start nothing has changed: sizes are absolute
            if note:
                notes[number, name] = note
    return Measured(sizes, notes, reference)


def judge(measured: list[Measured]) -> Comparison:
    """Gaps with their bounds; over several seeds, the root mean square of both the differences and the rounding errors."""
    gaps, references = [], [one.reference for one in measured]
    errors = {name: root_mean_square([reference.errors[name] for reference in references]) for name in references[0].errors}
    # a value with little rounding by chance may differ as much as the median of those that can be judged
    half = median([error for error in errors.values() if ROUNDING * error <= MOST] or [MOST])
    notes = {at: note for one in reversed(measured) for at, note in one.notes.items()}
    for at in measured[0].sizes:
        number, name = at
        if name == SKIPPED or not number:
            bound = EXACT
        elif errors:
            bound = ROUNDING * max(errors[name], half) if name in errors else EXACT
        else:
            snapshots = references[0].snapshots
            bound = resolution(snapshots[number][name], snapshots[0][name]) if name in snapshots[number] else EXACT
        gaps.append(Gap(number, name, root_mean_square([one.sizes.get(at, math.nan) for one in measured]), bound,
                        notes.get(at, "")))
    acted = [snapshot[NORM].item() > reference.clip > 0 for reference in references for snapshot in reference.snapshots[1:]
             if NORM in snapshot]
    return Comparison(gaps, sum(acted))


def root_mean_square(values: Sequence[float]) -> float:
    """The root mean square; a single value stays as it is."""
    return values[0] if len(values) == 1 else math.sqrt(sum(value**2 for value in values) / len(values))


def serial_reference(trial: Trial, world: World) -> Reference:
    """Run serially, and measure the rounding error of each value (not in float64).

    Two runs that round differently are about as far apart as each is from the exact one.
    """
    c = trial.config
    plain = replace(c.train, recompute="none", micro_batch=0 if c.precision == "fp64" else c.train.micro_batch)
    alone = replace(c, parallel=Parallel(dp=1), compile=False, graphs=False, train=plain if trial.thorough else c.train)
    mesh = build_mesh(alone.parallel, replace(world, rank=0, size=1))
    trial = replace(trial, config=alone)
    loss_scale = finite_scale(trial, mesh)
    clip = alone.optim.clip
    if trial.clipped:
        first = serial_run(replace(trial, config=replace(alone, train=replace(alone.train, steps=1))), mesh, 0.0, loss_scale)
        clip = first[1][NORM].item() / 2
    snapshots = serial_run(trial, mesh, clip, loss_scale)
    errors: dict[str, float] = {}
    if c.precision != "fp64":
        wide = replace(alone, precision="fp64", stream="wide", attention="default")
        exact = serial_run(replace(trial, config=wide), mesh, clip, 1.0)
        for a, b in zip(snapshots[1:], exact[1:], strict=True):
            for name in a:
                size = gap(b[name], a[name], change(b[name], exact[0][name], False), False)
                errors[name] = max(errors.get(name, 0.0), size)
    return Reference(snapshots, errors, clip, loss_scale)


def references(config: Config, world: World) -> Reference:
    """The reference of the `simple` trial, with which several layouts are compared."""
    return serial_reference(simple(config), world)


def finite_scale(trial: Trial, mesh: Mesh) -> float:
    """A loss scale far below those at which gradients of the serial run overflow. Only fp16 needs a search: if one run skipped
    a step for an overflow and the other did not, everything after it would differ."""
    scale = FIRST_SCALE.get(trial.config.precision, 1.0)
    if trial.config.precision != "fp16":
        return scale
    while scale > 1 and serial_run(replace(trial, thorough=False), mesh, 0.0, scale)[-1][SKIPPED].item():
        scale /= 4
    return max(1.0, scale / MARGIN)


def serial_run(trial: Trial, mesh: Mesh, clip: float = 0.0, loss_scale: float = 1.0) -> list[Snapshot]:
    """Train in one process; returns its values at the start and after each step."""
    return [{name: x.cpu().reshape(where.global_shape).clone() for name, ((x, where),) in held.items()}
            for held in run(trial, mesh, clip, loss_scale)]


def run(trial: Trial, mesh: Mesh, clip: float, loss_scale: float) -> Iterator[Held]:
    """Train, and yield this rank's values at the start, after each step and, if thorough, after a step that overflows."""
    c = replace(trial.config, optim=replace(trial.config.optim, clip=clip))
    training = assemble(c, mesh, trial.noise)
    training.progress.loss_scale.fill_(loss_scale)
    zero = torch.zeros((), device=mesh.world.device)
    yield scalars({LOSS: zero, NORM: zero, SKIPPED: zero, EVALUATION: zero}) | held_tensors(training)
    for number in range(1, c.train.steps + 1):
        loss, norm = training.step(batch_of(training, number, trial.thorough))
        training.gradients.wait_parameters()
        skipped = training.progress.skipped_steps.double()
        yield scalars({LOSS: global_loss(loss, mesh), NORM: norm, SKIPPED: skipped}) | held_tensors(training)
    if trial.thorough:
        training.progress.loss_scale.fill_(math.inf)                    # no gradient is finite: nothing may change
        training.step(batch_of(training, c.train.steps + 1, True))
        training.gradients.wait_parameters()
        training.progress.loss_scale.fill_(loss_scale)
        skipped = training.progress.skipped_steps.double()
        yield scalars({EVALUATION: evaluate(training), SKIPPED: skipped}) | held_tensors(training)


def scalars(values: dict[str, Tensor]) -> Held:
    """Scalars that every rank has whole."""
    return {name: [(value.detach(), Placement(name, (), ()))] for name, value in values.items()}


def held_tensors(training: Training) -> Held:
    """This rank's parameters, with float32 masters for those of 16 bits, and moving averages."""
    masters = training.gradients.full_master_weights()
    at = training.layout.placements
    mine = [(at[p].name, masters.get(p, p), at[p]) for p in training.model.parameters()]
    mine += [(f"{at[p].name}.ema", value, at[p]) for p, value in moving_average(training.optimizer).items()]
    found: Held = {}
    for name, value, where in mine:
        found.setdefault(name, []).append((value.detach(), where))
    return found


def batch_of(training: Training, number: int, thorough: bool) -> Batch:
    """This rank's part of global batch `number`: random numbers. thorough: the first sample is padding, and samples of text
    ignore different shares of their targets."""
    t, mesh = training.config.train, training.mesh
    mine = order.my_slice(t.global_batch, mesh.dp.size, mesh.dp.rank)
    dtype = parameter_dtype(training.config.precision)
    batch = training.model.example(mine.stop - mine.start, mesh.world.device, number * t.global_batch + mine.start)
    batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
    if thorough:
        sample = batch["sample"]
        if "tokens" in batch:
            target, share = batch["tokens"][:, 1:], (sample % 4 + 1)[:, None] / 5
            place = sample[:, None] * target.shape[1] + torch.arange(target.shape[1], device=sample.device)
            batch["target"] = target.where(uniform(key("verify", "ignored"), place) >= share, -1)
        batch["sample"] = sample.where(sample != number * t.global_batch, -1)
    return batch


def one_step(training: Training, number: int) -> Tensor:
    """Train on this rank's part of global batch `number`; returns the global loss."""
    loss, _ = training.step(batch_of(training, number, False))
    training.gradients.wait_parameters()
    return global_loss(loss, training.mesh)


def evaluate(training: Training) -> Tensor:
    """The mean loss of one more batch, (), in evaluation."""
    c, mesh = training.config, training.mesh
    forward = forward_only(training.model, training.layout, c.precision, loss_alone=True)
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.world.device)                    # loss, weight
    for micro in split_microbatches(batch_of(training, c.train.steps + 2, True), c.train.micro_batch):
        output, ready = forward(micro)
        if output is not None:                      # a pipeline's last stage has it
            sums += torch.stack([x.double() for x in training.model.loss(output, ready)])
    for axis in (mesh.dp, mesh.pp):
        if axis.size > 1:
            dist.all_reduce(sums, group=axis.group)
    return sums[0] / sums[1]


Part = tuple[Any, int, float, float]                # box and flat range; count; largest difference; sum of squared differences


def differences(mine: Held, serial: dict[str, tuple[Tensor, Tensor]], mesh: Mesh,
                exact: bool) -> Iterator[tuple[str, float, str]]:
    """Yield (name, difference from the serial value, what else is wrong) of each value over all ranks, on every rank.

    serial: on rank 0, each name's value now and at the start. exact: the largest difference counts, not the root mean square.
    """
    everyone, device = mesh.all, mesh.world.device
    parts: dict[str, list[Part]] = {}
    wanted = shared([(name, x.shape, x.dtype, change(x, start, exact)) for name, (x, start) in serial.items()], everyone)
    for name, shape, dtype, _ in wanted:
        whole = serial[name][0].to(device) if serial else torch.empty(shape, dtype=dtype, device=device)
        if everyone.size > 1:
            dist.broadcast(whole, 0)
        parts[name] = [difference(x, part_of(whole, where).reshape(x.shape), where) for x, where in mine.get(name, [])]
    strangers = [name for name in mine if name not in parts]
    answers: list[Any] = [(parts, strangers)] * everyone.size
    if everyone.size > 1:
        dist.all_gather_object(answers, (parts, strangers))
    for name, shape, _, scale in wanted:
        yield name, *difference_of_parts([part for theirs, _ in answers for part in theirs[name]], math.prod(shape), scale, exact)
    for name in dict.fromkeys(name for _, theirs in answers for name in theirs):
        yield name, math.nan, "one process has no such parameter"


def part_of(whole: Tensor, where: Placement) -> Tensor:
    """The part of a serial value that a rank should have."""
    part = whole[tuple(slice(*side) for side in where.box)]
    return part if where.flat is None else part.reshape(-1)[slice(*where.flat)]


def difference(x: Tensor, serial: Tensor, where: Placement) -> Part:
    """How far a rank's part of a value is from the serial one's."""
    d = x.double() - serial.double()
    return (where.box, where.flat), d.numel(), d.abs().max().item() if d.numel() else 0.0, d.square().sum().item()


def difference_of_parts(parts: list[Part], numbers: int, scale: float, exact: bool) -> tuple[float, str]:
    """The difference of a whole value, from those of its parts, and a note if no rank has some of its numbers. If several ranks
    have the same part, the worst counts."""
    worst: dict[Any, Part] = {}
    for part in parts:
        if part[0] not in worst or not part[3] <= worst[part[0]][3]:
            worst[part[0]] = part
    there = sum(count for _, count, _, _ in worst.values())
    note = "" if there >= numbers else f"no rank has {'any' if not there else numbers - there} of its {numbers} numbers"
    if exact:
        return max((part[2] for part in worst.values()), key=lambda x: (math.isnan(x), x), default=math.nan) / scale, note
    return math.sqrt(sum(part[3] for part in worst.values())) / scale, note


def shared(value: Any, everyone: Axis) -> Any:
    """Rank 0's value, on every rank."""
    box = [value]
    if everyone.size > 1:
        dist.broadcast_object_list(box, 0)
    return box[0]


def change(now: Tensor, start: Tensor, exact: bool = True) -> float:
    """The largest change of a value, of any shape, since the start, or the norm of all changes; 1 if it never moved."""
    d = now.double() - start.double()
    return (d.abs().max() if exact else d.norm()).item() or 1.0


def resolution(now: Tensor, start: Tensor) -> float:
    """The rounding error that a value may have, relative to its largest change since the start.

    `EXACT`, unless training hardly moved it (0.09 in float64 that changed by 1e-8 is stored to 1e-9 of that change), or it is
    in float32, as the gradient norm is.
    """
    return max(EXACT, ROUNDING * torch.finfo(now.dtype).eps * now.abs().max().item() / change(now, start))


def gap(a: Tensor, b: Tensor, scale: float, exact: bool = True) -> float:
    """The largest difference between two tensors of one shape, or the norm of all, relative to `scale`, which has their unit."""
    d = a.double() - b.double()
    return (d.abs().max() if exact else d.norm()).item() / scale


def tell(config: Config, gaps: list[Gap]) -> bool:
    """Print the verdict and return whether all is equal. If less than half can be judged, there is no verdict: False."""
    p, steps = config.parallel, max(entry.step for entry in gaps)
    layout = " ".join(f"{name}={getattr(p, name)}" for name in AXES) + (f" ep={p.ep}" if p.ep > 1 else "") + (
        " sp" if p.sp else "") + (f" zero={p.zero}" if p.zero else "")
    plural = "s" * (config.train.steps != 1)
    print(f"{config.preset} in {config.precision}, {config.train.steps} step{plural} of {config.optim.name}: {layout} against "
          "one process")
    for number in range(1, steps + 1):
        at = [entry for entry in gaps if entry.step == number]
        loss = next((f"the loss differs by {entry.size:.1e}; " for entry in at if entry.name == LOSS), "after an overflow: ")
        worst = max([entry for entry in at if entry.judged and entry.name != LOSS] or at, key=by_size)
        most = (f"of {len(at)} values {worst.name} differs most, by {worst.size:.1e} relative to its update (rounding may leave "
                f"{worst.bound:.1e})" if any(entry.size or entry.note for entry in at) else f"all {len(at)} values are the same")
        print(f"  step {number}: {loss}{most}")
    wrong, vague = [entry for entry in gaps if entry.wrong], [entry for entry in gaps if not entry.judged]
    too_few = 2 * len(vague) > len(gaps)             # can be judged
    if vague:
        names, total = list(dict.fromkeys(entry.name for entry in vague)), len({entry.name for entry in gaps})
        print(f"not judged: {len(names)} of {total} values, of whose change rounding in {config.precision} may be {MOST:.0%} or "
              f"more, such as {names[0]}")
    if wrong:
        print_differences([entry for entry in wrong if entry.step == wrong[0].step],
                          sum(entry.step == wrong[0].step for entry in gaps))
    elif too_few:
        print("no verdict: rounding may be most of what is compared. Take precision=fp64, or --thorough, which compares in both")
    else:
        print("equal: this layout trains as one process does" + ", as far as that can be judged" * bool(vague))
    return not wrong and not too_few


def print_differences(wrong: list[Gap], count: int) -> None:
    """Print what differs in a step, the worst first."""
    skipped = next((entry for entry in wrong if entry.name == SKIPPED), None)
    if skipped:
        print(f"DIFFERENT in step {skipped.step}: only one of the two runs left out a step, as it does when a loss or gradient "
              "is not finite on any rank; what follows from that:")
    worst = sorted((entry for entry in wrong if entry is not skipped), key=by_size, reverse=True)
    when = f"from step {wrong[0].step} on" if wrong[0].step else "from the start"
    print(f"DIFFERENT {when}, in {len(wrong)} of {count} values: worst "
          + ", ".join(f"{entry.name} ({entry.note or format(entry.size, '.1e')})" for entry in worst[:5])
          + ("" if len(worst) < 6 else ", ..."))


def by_size(entry: Gap) -> tuple[bool, float]:
    """The sort key of gaps, for largest first: those with a note or a NaN, then the others by size."""
    return bool(entry.note) or math.isnan(entry.size), entry.size


def not_tried(trial: Trial, comparison: Comparison) -> dict[str, str]:
    """What a comparison with these settings cannot show: a key, and the words that the report prints for it."""
    c = trial.config
    zero = [name for name in ("dropout", "drop_path", "label_drop") if getattr(c.model, name, 1) == 0]
    samples = c.train.global_batch // max(1, c.parallel.dp)
    both = [f"train.{name}={value}" for name in ("recompute", "micro_batch")
            if (value := getattr(c.train, name)) not in ("none", 0)]
    unreached = ", which no norm exceeded" if c.optim.clip else ""
    found = {
        "dropout": bool(zero) and "dropout (" + ", ".join(f"model.{name}=0" for name in zero) + ")",
        "clip": not comparison.clipped and f"clipping (optim.clip={c.optim.clip:g}{unreached})",
        "ema": not c.optim.ema and "the weights' moving average (optim.ema=0)",
        "states": c.optim.name == "sgd" and not c.optim.momentum and "states of the optimizer (optim.name=sgd)",
        "micro": num_microbatches(samples, c.train.micro_batch) == 1 and "several micro-batches (train.micro_batch)",
        "remainder": samples % (c.train.micro_batch or samples) == 0 and "a last micro-batch that is smaller",
        "both": bool(both) and not trial.thorough and " and ".join(both) + ", which both runs have",
        "zeros": not trial.noise and "bugs that weights which start at zero hide",
        "uneven": not trial.thorough and "padding and ignored targets",
        "overflow": not trial.thorough and "a step that overflows",
        "evaluation": not trial.thorough and "evaluation",
    }
    return {what: text for what, text in found.items() if isinstance(text, str)}
