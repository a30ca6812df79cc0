"""A training run from its configuration: `main` assembles it, `fit` repeats the step to the end.

The step itself is in `course/training/step.py`. Everything here runs on the host, between steps.
"""

from collections import deque
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course import config as configuration
from course.checkpoint import checkpoint
from course.config import Config, schema
from course.config.context_choice import context_choice
from course.config.validation import num_microbatches, refusal
from course.data import data_files, train_loader
from course.data.file_watch import DataFileWatch
from course.data.text import end_tokens
from course.models import GPTConfig, build_model
from course.parallel import Layout, Mesh, agree, build_mesh, joined
from course.parallel.mesh import launched, wait_at_most
from course.parallel.pipeline_parallel.schedules import bubble
from course.planner import flops, free_memory
from course.resilience.folder_lock import only_writer
from course.resilience.preemption import StopSignal
from course.resilience.stall_watchdog import Watchdog, slow_step_seconds
from course.training import trackers
from course.training.assemble import Training, assemble
from course.training.profiler import ProfileWindow, part
from course.training.run_log import RunLog, Stopwatch, memory_gb
from course.training.step import Progress
from course.training.validation import Validation
from course.utils.atomic_files import check_kind
from course.utils.errors import CourseError
from course.utils.machine import OtherPrograms

AHEAD = 2                                            # most steps that the host is ahead of a GPU
PATIENCE = 1800.0                                    # least timeout of collectives in seconds, PyTorch's default
LONG = 10**9                                        # above this number of weights, a line says that drawing them takes long
LOAD_AFTER = 5.0                                    # seconds over which it measures what other programs keep busy
HOPELESS = 10                                        # consecutive steps without an update after which a run gives up
ORDER = ("source", "path", "lead", "train_samples")  # keys of `data` that, with the files, determine each sample's number


def main(config: Config) -> Path:
    """Start or resume the configured run; returns its folder."""
    return train(config)[0]


def train(config: Config) -> tuple[Path, bool]:
    """The same; also returns whether a signal stopped the run before its last step."""
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    with joined(config.train.device) as world:
        if sentence := refusal(config):              # first: no number of processes would cure it
            raise CourseError(sentence)
        trackers.check_installed(config)
        mesh, run = build_mesh(config.parallel, world), run_folder(config)
        with only_writer(run, mesh.all) as start, Watchdog(run, world, config.train.stall_s, start) as watchdog:
            free_memory.check(config, mesh)
            with free_memory.explained(config, mesh):
                if (count := num_parameters(config)) > LONG:
                    print_rank0(mesh, f"{config.preset}: drawing {count / 1e9:.2f} billion weights")
                training = assemble(config, mesh)
                if watchdog.watching():              # it reports more than PyTorch, so it has to be first
                    wait_at_most(max(PATIENCE, 2 * slow_step_seconds(config.train.stall_s)))
                stopped = fit(training, watchdog)
            agree.run_on_all(mesh.all, lambda: None)              # a rank that exits now would end ranks that still close files
    return run, stopped


def fit(training: Training, watchdog: Watchdog | None = None) -> bool:
    """Repeat the step to the last one, or until a signal; log, validate and save on the way. Returns whether a signal ended it.

    watchdog: is told of everything that begins; None: no watchdog.
    """
    config, mesh, model, progress = training.config, training.mesh, training.model, training.progress
    t, run = config.train, run_folder(config)
    watchdog = watchdog or Watchdog(run, mesh.world, 0.0)
    agree.run_on_all(mesh.all, lambda: check_places(run) if mesh.world.rank == 0 else None)
    start, samples = resume(run, training)
    if start >= t.steps:
        fewer = f", and train.steps={t.steps} asks for fewer" if start > t.steps else ""
        print_rank0(mesh,
                    f"{run} is finished ({start} steps{fewer}): for a new run set log.name=..., to go on set train.steps higher")
        return False
    # recorded now: a checkpoint says which files its sample numbers refer to, even if somebody overwrites them later
    files = agree.run_on_all(mesh.all, lambda: data_files(config) if mesh.world.rank == 0 else {})[0]
    watched = agree.run_on_all(mesh.all, lambda: DataFileWatch(config) if mesh.world.rank == 0 else None)[0]
    batches = train_loader(config, mesh.dp, mesh.world.device, samples, model.example)
    validation = Validation.of(config, training.layout)
    watch, pace = Stopwatch(mesh.world.device), LaunchThrottle(mesh.world.device)
    others: OtherPrograms | None = OtherPrograms(siblings=launched())
    look = ProfileWindow(config.profile, start, run / "profile", mesh.world.rank, mesh.world.device)
    with (RunLog(run, t.steps, start, mesh.world.rank == 0, config.log.tensorboard, config.log.every,
                 lambda: write_run_files(config, run), lambda: trackers.open_trackers(config, run)) as report,
          StopSignal(mesh.all) as stop,
          closing(batches), look.open):              # after the data is found readable: a refused run leaves no files
        report.say(banner(config, mesh, run) + overlap_note(config, training.layout) + context_note(config)
                   + bubble_warning(config, mesh))
        for number in range(start + 1, t.steps + 1):
            look.before(number)
            slow = number == start + 1               # workers start, and the compiler runs
            watchdog.at(number, "waiting for data", slow)
            with part("data"):
                batch = next(batches)
            watchdog.at(number, "in its step", slow)
            loss, norm = training.step(batch)
            pace.step()
            samples += t.global_batch
            watch.tick()
            if told := look.after(number):
                report.say(told)
                watch.restart()
            stopping, last = stop.agreed(), number == t.steps
            validate = validation is not None and is_due(number, t.eval_every, last)
            if is_due(number, config.log.every, last or stopping or validate):
                record = step_record(number, samples, loss, norm, watch.lap(), progress, config, mesh)
                if validate and validation is not None:
                    watchdog.at(number, "validating", slow=True)
                    record |= validation.run(model, report, number)
                report.restore()
                report.log(record)
                if others and others.seconds() > LOAD_AFTER:
                    report.say(load_warning(others))
                    others = None
                give_up_if_hopeless(progress, run)
                watch.restart()
            if is_due(number, config.checkpoint.every, last or stopping):
                watchdog.at(number, "saving", slow=True)
                agree.run_on_all(mesh.all, watched.check if mesh.world.rank == 0 else lambda: None)
                saved = report.saved = save(training, samples, files, last or stopping, report)
                watch.restart()
            if stopping:
                report.say(f"stopped by {stop.name or 'a signal to another rank'} at step {number}, saved {saved}: "
                           "the same command goes on from there")
                return not last
    return False


def load_warning(others: OtherPrograms) -> str:
    """That other programs keep a quarter of the cores busy, which slows this run down; "" if they do not."""
    busy, cores = others.busy_cores(), len(others.cores)
    return "" if busy < max(0.5, cores / 4) else (
        f"other programs keep {busy:.1f} of {cores} cores busy: this run is slower than on a quiet machine")


class LaunchThrottle:
    """Keeps the host at most AHEAD steps ahead of the GPU.

    Launching returns at once, with CUDA graphs for many steps. Without this, a rank would be seen to wait only where a value is
    read, `log.every` steps late, and for all of them at once. With two steps queued the GPU does not wait for the host.
    """

    def __init__(self, device: torch.device):
        self.device, self.events = device, deque[torch.cuda.Event]()

    def step(self) -> None:
        """Call after launching a step: waits for the one launched AHEAD steps before it."""
        if self.device.type != "cuda":
            return
        self.events.append(torch.cuda.Event(blocking=True))             # sleeps, and leaves the core to a loader
        self.events[-1].record()
        if len(self.events) > AHEAD:
            self.events.popleft().synchronize()


def save(training: Training, samples: int, files: dict[str, int], must: bool, report: RunLog) -> Path | None:
    """Write a checkpoint and remove old ones; returns its folder, or None if it was not written. files: data file -> bytes.

    If it cannot be written (a full disk), training goes on: the next one may find free space, and stopping would lose the steps
    since the last one. must: raise `NotSaved` instead; for the last checkpoint, and before a stop.
    """
    config, mesh, folder = training.config, training.mesh, run_folder(training.config) / "checkpoints"
    state = {**training.progress.state(), "samples": samples, "files": files}
    try:
        saved = checkpoint.save(folder, training.optimizer, state, schema.as_plain(config), training.layout,
                                training.scaling.state())
    except checkpoint.NotSaved as error:
        if must:
            raise
        report.say(f"WARNING: {error}; training goes on, and tries again in {config.checkpoint.every} steps")
        return None
    if mesh.world.rank == 0:
        checkpoint.prune(folder, config.checkpoint.keep, saved)
    return saved


def is_due(number: int, every: int, anyway: bool) -> bool:
    """Whether something that happens every `every` steps (0: never), or anyway, is due now."""
    return anyway or (every > 0 and number % every == 0)


def run_folder(config: Config) -> Path:
    """Where a run writes: `runs/<preset>/<name>`."""
    return Path(config.log.dir) / config.preset / config.log.name


def write_run_files(config: Config, run: Path) -> None:
    """Write a run's configuration into its folder and, for a language model, the tokens that end a text."""
    configuration.save(config, run / "config.yaml")
    if isinstance(config.model, GPTConfig):
        end_tokens.write_note(run, end_tokens.of_run(run, config))


def check_places(run: Path) -> None:
    """Before the first step, raise `CourseError` if a path that a run uses as a file or a folder is something else."""
    for name in ("config.yaml", "metrics.jsonl"):
        check_kind(run / name)
    for name in ("checkpoints", "tensorboard", "profile"):
        check_kind(run / name, folder=True)


def resume(run: Path, training: Training) -> tuple[int, int]:
    """Resume from the newest good checkpoint of this run. Returns (steps done, samples consumed), (0, 0) if there is none.

    Raises `CourseError` if there is one despite checkpoint.resume=false, if its model or data differ, or if all are damaged.
    """
    config, mesh = training.config, training.mesh
    found = checkpoint.newest(run / "checkpoints", lambda text: print_rank0(mesh, text), mesh.all,
                              writes=config.checkpoint.resume)
    if found and not config.checkpoint.resume:
        raise CourseError(f"{run} exists and checkpoint.resume=false: choose another log.name, or move the folder away")
    if found:
        check_state(*found, training.progress)
        checkpoint.nothing_over(*found, training.layout)
        checkpoint.load(*found, training.model, training.layout, training.optimizer)
        training.scaling.restore(checkpoint.read_named(*found, training.scaling.state()))
    if not found:
        return 0, 0
    index = found[1]
    before, now = index["config"]["data"], schema.as_plain(config)["data"]
    if config.checkpoint.same_data and all(before[key] == now[key] for key in ORDER):
        agree.run_on_all(mesh.all, lambda: compare_files(config, index["state"].get("files", {})))
    training.progress.restore(index["state"], index["config"]["precision"] == config.precision)
    tell_changes(run, index, training)
    return index["state"]["step"], index["state"]["samples"]


def tell_changes(run: Path, index: dict[str, Any], training: Training) -> None:
    """Print that a run resumes and which settings changed; for a finished run, which settings it does not take."""
    config, mesh, done = training.config, training.mesh, index["state"]["step"]
    finished = done >= config.train.steps
    if not finished:
        print_rank0(mesh, f"resuming {run} at step {done}")
    for change in schema.differences(schema.current(index["config"]), schema.as_plain(config)):
        print_rank0(mesh, f"  not taken, since no step is left: {change}" if finished else f"  changed since then: {change}")
    if not finished and checkpoint.other_optimizer(index, training.optimizer):
        print_rank0(mesh, "  what it saved of its optimizer is of another kind and left out: this one starts afresh")


def check_state(path: Path, index: dict[str, Any], progress: Progress) -> None:
    """Raise `CourseError` if a checkpoint lacks some state that a run resumes from, as one of an older version may."""
    if missing := [name for name in (*progress.state(), "samples") if name not in index["state"]]:
        raise CourseError(f"the state in {path}/index.json lacks {', '.join(missing)}, so another version wrote it: continue "
                          "with that version, or start again under another log.name")


def compare_files(config: Config, before: dict[str, int]) -> None:
    """Raise `CourseError` if a run has trained on other data files than there are now: every sample would have another number.

    before: each file's bytes. Changed data of the same size is not noticed.
    """
    now = data_files(config)
    gone = [name for name in before if name not in now]
    other = [name for name in before if name in now and now[name] != before[name]]
    new = [name for name in now if before and name not in before]
    for names, says in ((gone, "was there when this run began and is missing now: restore it"),
                        (other, "has been written again since this run began, and has another size: restore it"),
                        (new, "was not there when this run began: move it away")):
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CourseError(f"{config.data.path}/{names[0]}{others} {says}, or set checkpoint.same_data=false to go on with "
                              "what is there, in another order of samples")


def step_record(number: int, samples: int, loss: Tensor, norm: Tensor, seconds: float, progress: Progress, config: Config,
            mesh: Mesh) -> dict[str, Any]:
    """One record of metrics.jsonl; its loss is the mean over the last step's global batch. All ranks must call it.

    loss: this rank's share, (); norm: the gradients' norm, (); seconds: per step.
    """
    loss = global_loss(loss, mesh)
    batch = config.train.global_batch
    tflops = flops.step(config.model, batch) / seconds / mesh.world.size / 1e12
    peak = flops.peak_tflops(mesh.world.device, config.precision)
    state = progress.state()
    return {"step": number, "samples": samples, "global_batch": batch, "loss": loss.item(), "lr": state["lr"],
            "grad_norm": norm.item(), "step_ms": seconds * 1e3, "samples_per_s": batch / seconds,
            "tflops_per_gpu": tflops, "mfu": tflops / peak if peak else None, "memory_gb": memory_gb(mesh.world.device),
            "loss_scale": state["loss_scale"], "skipped_steps": state["skipped_steps"], "nan_steps": state["nan_steps"]}


def global_loss(loss: Tensor, mesh: Mesh) -> Tensor:
    """The mean loss over the global batch, (), from the ranks' shares, (), which are 0 before a pipeline's last stage.
    All ranks must call it."""
    loss = loss.clone()
    for axis in (mesh.dp, mesh.pp):
        if axis.size > 1:
            dist.all_reduce(loss, group=axis.group)
    return loss


def give_up_if_hopeless(progress: Progress, run: Path) -> None:
    """Raise `CourseError` after ten skipped steps in a row; the last checkpoint stays."""
    if progress.longest_streak.item() >= HOPELESS:
        raise CourseError(f"{HOPELESS} steps in a row had a loss or gradient that is not finite and were skipped "
                          f"({run}/metrics.jsonl counts both): the run has stopped; lower optim.lr, set optim.clip=1 or "
                          "train in bf16 or fp32, under another log.name")


def banner(config: Config, mesh: Mesh, run: Path) -> str:
    """One line that describes the run."""
    count = num_parameters(config)
    device = torch.cuda.get_device_name(mesh.world.device) if mesh.world.device.type == "cuda" else "CPU"
    precision = config.precision + precision_note(config, device == "CPU")
    if config.kernels == "triton" and device == "CPU":
        precision += ", kernels=triton in PyTorch's operators"
    data = "random data" if config.data.source == "mock" else config.data.path
    return (f"{config.preset}: {count / 1e6:.2f} million parameters, {config.train.steps} steps of "
            f"{config.train.global_batch} samples of {data}, {precision}, {mesh.world.size} x {device}; writing {run}")


def num_parameters(config: Config) -> int:
    """How many parameters the serial model has."""
    return sum(p.numel() for p in build_model(config.model).parameters())


def precision_note(config: Config, cpu: bool) -> str:
    """A note on how a precision is computed, "" for most."""
    if config.precision == "fp8" and config.fp8.by == "te":
        return ", by Transformer Engine"
    slow = {"fp8": ", emulated: the values of a GPU, but slow",
            "fp16": ", by PyTorch's kernels for a CPU: the values of a GPU, but slow"}
    return slow.get(config.precision, "") if cpu else ""


def overlap_note(config: Config, layout: Layout) -> str:
    """A line that says what parallel.overlap=auto took and why, "" if nothing was chosen."""
    p = config.parallel
    if layout.overlap.why:
        return f"\nparallel.overlap=auto takes {layout.overlap.how}: {layout.overlap.why}"
    if p.tp > 1 and p.sp and p.overlap == "none" and config.precision == "fp8":
        return "\nparallel.overlap=none: native FP8 multiplies whole tensors, so nothing overlaps with them"
    return ""


def context_note(config: Config) -> str:
    """A line that says what parallel.context=auto took and why, "" if nothing was chosen."""
    if config.parallel.cp == 1 or config.parallel.context != "auto":
        return ""
    how, why = context_choice(config)
    return f"\nparallel.context=auto takes {how}: {why}"


def bubble_warning(config: Config, mesh: Mesh) -> str:
    """A warning line for a pipeline that is never full, else ""."""
    samples, stages = config.train.global_batch // mesh.dp.size, mesh.pp.size
    micros = num_microbatches(samples, config.train.micro_batch)
    if micros >= stages:
        return ""
    size = max(1, samples // (4 * stages))
    cure = f"set train.micro_batch={size}" if samples > micros else "give it a larger train.global_batch"
    return (f"\n{stages} pipeline stages share {micros} micro-batch{'es' * (micros > 1)} a step, so each is idle for "
            f"{bubble(stages, micros):.0%} of it: {cure}")


def print_rank0(mesh: Mesh, text: str) -> None:
    """Print a line on rank 0."""
    if mesh.world.rank == 0:
        print(text, flush=True)
