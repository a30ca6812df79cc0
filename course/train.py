"""A training run from its configuration: `main` puts it together, `fit` repeats the step to the end.

The step itself is in `course/step.py`. Everything here runs on the host, between steps.
"""

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course import checkpoint, random
from course import config as configuration
from course.config import Config
from course.data import train_loader
from course.errors import CourseError
from course.models import build_model
from course.parallel import Mesh, build_mesh, join, leave, parallelize, placement
from course.perf import flops
from course.precision import parameter_dtype, set_matmul
from course.report import Report, Stopwatch, memory_gb
from course.step import Progress, Step, build_optimizer, eager, train_step
from course.stop import Stop
from course.validate import Validation

HOPELESS = 10                                        # steps without an update in a row, after which a run gives up


def main(config: Config) -> Path:
    """Train, or go on training, what the configuration says; returns the folder of the run."""
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    world = join(config.train.device)
    try:
        mesh = build_mesh(config.parallel, world)
        set_matmul(config.precision)
        model = parallelize(build_model(config.model, config.train.seed), mesh, config.parallel)
        random.initialize(model, config.train.seed, world.device, parameter_dtype(config.precision))
        if config.compile:
            model.compile()
        progress = Progress.start(config, world.device)
        optimizer = build_optimizer(model, progress, config)
        step = train_step(eager(model, progress, config, mesh), model, optimizer, progress, config, mesh)
        return fit(step, model, optimizer, progress, config, mesh)
    finally:
        leave()


def fit(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, config: Config,
        mesh: Mesh) -> Path:
    """Repeat the step to the last one, or until a signal; log, validate and save on the way."""
    t, run = config.train, run_folder(config)
    start, samples = resume(run, model, optimizer, progress, config, mesh)
    if start >= t.steps:
        speak(mesh, f"{run} is finished ({start} steps): for a new run set log.name=..., to go on set train.steps higher")
        return run
    batches = train_loader(config, mesh.dp, mesh.world.device, samples, model.example)   # type: ignore[arg-type]
    validation = Validation.of(config, mesh)
    watch = Stopwatch(mesh.world.device)
    with (Report(run, t.steps, start, mesh.world.rank == 0, config.log.tensorboard) as report, Stop(mesh.all) as stop,
          closing(batches)):
        report.say(opening(config, model, mesh, run))
        for number in range(start + 1, t.steps + 1):
            loss, norm = step(next(batches))
            samples += t.global_batch
            watch.tick()
            stopping, last = stop.agreed(), number == t.steps
            validate = validation is not None and due(number, t.eval_every, last)
            if due(number, config.log.every, last or stopping or validate):
                record = measure(number, samples, loss, norm, watch.lap(), progress, config, mesh)
                if validate and validation is not None:
                    record |= validation.run(model, report, number)
                report.log(record)
                give_up_if_hopeless(progress, run)
                watch.restart()
            if due(number, config.checkpoint.every, last or stopping):
                state = {**progress.state(), "samples": samples}
                saved = checkpoint.save(run / "checkpoints", model, optimizer, state, configuration.as_plain(config), mesh.all)
                if mesh.world.rank == 0:
                    checkpoint.prune(run / "checkpoints", config.checkpoint.keep)
                watch.restart()
            if stopping:
                report.say(f"stopped by {stop.name or 'a signal to another rank'} at step {number}, saved {saved}: "
                           "the same command goes on from there")
                break
    return run


def due(number: int, every: int, anyway: bool) -> bool:
    """Whether something done every so many steps (0: never) is done now."""
    return anyway or (every > 0 and number % every == 0)


def run_folder(config: Config) -> Path:
    """Where a run writes: `runs/<preset>/<name>`."""
    return Path(config.log.dir) / config.preset / config.log.name


def resume(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, config: Config,
           mesh: Mesh) -> tuple[int, int]:
    """Go on from the newest good checkpoint of this run, if there is one: (steps done, samples consumed)."""
    found = checkpoint.newest(run / "checkpoints", lambda text: speak(mesh, text))
    if found and not config.checkpoint.resume:
        raise CourseError(f"{run} exists and checkpoint.resume=false: choose another log.name, or remove the folder")
    if found:
        checkpoint.load(*found, model, optimizer)
    if mesh.world.rank == 0:
        configuration.save(config, run / "config.yaml")
    if not found:
        return 0, 0
    index = found[1]
    progress.restore(index["state"])
    speak(mesh, f"resuming {run} at step {index['state']['step']}")
    for change in configuration.differences(index["config"], configuration.as_plain(config)):
        speak(mesh, f"  changed since then: {change}")
    return index["state"]["step"], index["state"]["samples"]


def measure(number: int, samples: int, loss: Tensor, norm: Tensor, seconds: float, progress: Progress, config: Config,
            mesh: Mesh) -> dict[str, Any]:
    """One record of metrics.jsonl; the loss is the mean over the global batch of the last step."""
    loss = loss.clone()
    if mesh.dp.size > 1:
        dist.all_reduce(loss, group=mesh.dp.group)
    batch = config.train.global_batch
    tflops = flops.step(config.model, batch) / seconds / mesh.world.size / 1e12
    peak = flops.peak_tflops(mesh.world.device, config.precision)
    state = progress.state()
    return {"step": number, "samples": samples, "global_batch": batch, "loss": loss.item(), "lr": state["lr"],
            "grad_norm": norm.item(), "step_ms": seconds * 1e3, "samples_per_s": batch / seconds,
            "tflops_per_gpu": tflops, "mfu": tflops / peak if peak else None, "memory_gb": memory_gb(mesh.world.device),
            "loss_scale": state["loss_scale"], "skipped_steps": state["skipped_steps"], "nan_steps": state["nan_steps"]}


def give_up_if_hopeless(progress: Progress, run: Path) -> None:
    """Stop a run that has not learned anything for ten steps in a row; its last checkpoint stays."""
    if progress.longest_streak.item() >= HOPELESS:
        raise CourseError(f"{HOPELESS} steps in a row had a loss or gradient that is not finite and were skipped "
                          f"({run}/metrics.jsonl counts both): the run has stopped; lower optim.lr, set optim.clip=1 or "
                          "train in bf16 or fp32, under another log.name")


def opening(config: Config, model: nn.Module, mesh: Mesh, run: Path) -> str:
    """What is about to happen, in one line."""
    count = sum(math.prod(placement(p).global_shape) for p in model.parameters())
    device = torch.cuda.get_device_name(mesh.world.device) if mesh.world.device.type == "cuda" else "CPU"
    return (f"{config.preset}: {count / 1e6:.2f} million parameters, {config.train.steps} steps of "
            f"{config.train.global_batch} samples, {config.precision}, {mesh.world.size} x {device}; writing {run}")


def speak(mesh: Mesh, text: str) -> None:
    """Print a line on rank 0."""
    if mesh.world.rank == 0:
        print(text, flush=True)
