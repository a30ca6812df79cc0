"""Does FP8 train like bf16? `python -m experiments.loss_alignment FILE [models=...]`; --small takes a minute on a CPU.

DiT-XL/2 at 256 and at 512 pixels and GPT 1.3B train for 500 steps from the same weights: in bf16, in FP8 with every recipe,
native and with Transformer Engine, with another attention kernel, and with context parallelism over two GPUs.

The loss of one step depends mostly on its samples and noise. So curves are compared by window means, with 20 windows per run.
No two curves are equal. The question is whether FP8 differs more from bf16 than bf16 runs differ from each other:

    rounding    the same weights, batches and noise with another attention kernel, which changes the last bits
    seeds       the same weights with another order of samples and other noise

FP8 passes if its distance from bf16 with the same seed is at most the spread of bf16's seeds. One run must fail the test: FP8
that keeps the scales of its first step. Times are measured next to other runs on the same host; for speed see `course bench dit`
and `gpt`.
"""

import json
import math
import statistics
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from course import config as configuration
from course.bench import gpu_pool, timing
from course.bench.command_line import command
from course.bench.gpu_pool import Row
from course.config import Config
from course.data import train_loader
from course.data.latents import digits
from course.data.text import python_corpus
from course.models import DiTConfig, build_model
from course.ops.number_formats import parameter_dtype
from course.parallel import Layout, build_mesh, initialize_serial, joined, serial_placements
from course.training.assemble import Training, assemble
from course.training.run_log import memory_gb
from course.training.trainer import global_loss
from course.utils.atomic_files import atomic
from course.utils.errors import CourseError, did_you_mean

STEPS, WINDOWS = 500, 20
VOCABULARY, TINY_VOCABULARY = 32_768, 512           # tokenizer vocabularies; the 1.3B model allows 50,304
REFERENCE, FROZEN, TOKENS_APART = "bf16, seed 0", "fp8 frozen scales", "bf16, cp=2"
SEEDS = (REFERENCE, "bf16, seed 1", "bf16, seed 2")
RUNS: dict[str, tuple[str, ...]] = {
    REFERENCE: (), "bf16, seed 1": ("train.seed=1",), "bf16, seed 2": ("train.seed=2",),
    "bf16, flash attention": ("attention=flash",),
    "fp8 delayed, 1024 max": ("precision=fp8", "fp8.history=1024"),
    "fp8 delayed, 1 most_recent": ("precision=fp8", "fp8.history=1", "fp8.amax=most_recent"),
    "fp8 current": ("precision=fp8", "fp8.recipe=current"),
    "fp8 Transformer Engine": ("precision=fp8", "fp8.by=te", "compile=false"),          # delayed, 1024, max
    FROZEN: ("precision=fp8",),
    TOKENS_APART: ("parallel.cp=2", "parallel.context=ring"),
}
COMMON = ("compile=true", "stream=narrow", "precision=bf16", "train.micro_batch=0", "optim.ema=0", "optim.clip=1",
          "data.source=files", "data.workers=4", f"train.steps={STEPS}")
MODELS: dict[str, tuple[str, ...]] = {              # presets, with batches for steps of about 0.1 s on an H200
    "dit-xl": ("data.path=data/digits-4x32x32", "train.global_batch=64"),
    "dit-xl-512": ("data.path=data/digits-4x64x64", "train.global_batch=16"),
    "gpt-1.3b": ("data.path=data/python-32k", "train.global_batch=4", "optim.warmup=100"),
}
# a DiT and a GPT that a CPU trains in seconds, with emulated FP8
TINY: dict[str, tuple[str, ...]] = {
    "dit-xl": ("model.latent=[4,8,8]", "model.dim=32", "model.depth=2", "model.heads=2", "data.path=data/digits-4x8x8",
               "optim.lr=5e-3"),
    "gpt-1.3b": (f"model.vocab={TINY_VOCABULARY}", "model.context=32", "model.dim=32", "model.depth=2", "model.heads=2",
                 "optim.lr=5e-3", "data.path=data/python-512", "train.global_batch=16", "optim.warmup=20")}
SMALL = ("compile=false", "train.device=cpu", "train.threads=1", "data.workers=0", "train.steps=160")


def windows(losses: Tensor, length: int) -> Tensor:
    """Means over windows of `length` losses, without an incomplete last window: (N,) -> (N // length,)."""
    return losses[:len(losses) // length * length].view(-1, length).mean(1)


def gap(curve: Tensor, reference: Tensor) -> float:                     # 2 x (windows,)
    """Mean relative distance of a curve's windows from the reference's; infinite if a value is not finite."""
    found = (curve / reference - 1).abs().mean().item()
    return found if math.isfinite(found) else math.inf


def spread(curves: Tensor) -> float:                                    # (seeds, windows)
    """The standard deviation over curves relative to the first curve, averaged over windows."""
    return (curves.std(0) / curves[0]).mean().item()


def judge(runs: dict[str, Row], length: int) -> Row:
    """The gap of every run to the reference, the spread of the seeds, and which FP8 runs stay within it."""
    curves = {name: windows(torch.tensor([math.inf if loss is None else loss for loss in row["losses"]]), length)
              for name, row in runs.items() if "losses" in row}
    if not all(name in curves for name in SEEDS):
        return {}
    seeds = spread(torch.stack([curves[name] for name in SEEDS]))
    gaps = {name: gap(curve, curves[REFERENCE]) for name, curve in curves.items() if name != REFERENCE}
    return {"spread": seeds, "gap": gaps, "within": {name: gaps[name] <= seeds for name in gaps if name.startswith("fp8")}}


def make_data(model: str, small: bool) -> None:
    """Make the data of a model's runs if it does not exist."""
    config = settings(model, REFERENCE, small)
    path = Path(config.data.path)
    if path.exists():
        return
    if isinstance(config.model, DiTConfig):
        digits.make_digits(path, config.model.latent)
    else:
        python_corpus.make(python_corpus.PythonCorpus(path=str(path), vocab=TINY_VOCABULARY if small else VOCABULARY))


def settings(model: str, run: str, small: bool) -> Config:
    """The configuration of a run."""
    given = [*COMMON, *MODELS[model], *(TINY[model] if small else ()), *RUNS[run], *(SMALL if small else ())]
    return configuration.load(model, given)


def same_weights(model: nn.Module, layout: Layout, config: Config, device: torch.device) -> None:
    """Give a model the initial weights of seed 0, whatever its own seed is.

    Raises `CourseError` for 16-bit weights, which the optimizer would overwrite from its float32 masters.
    """
    if any(p.dtype != parameter_dtype(config.precision) for p in model.parameters()):
        raise CourseError("runs are compared from the same weights, and of 16-bit ones the optimizer has others, its masters: "
                          "compare with kernels=pytorch and parallel.zero=0")
    fresh = initialize_serial(build_model(config.model), 0, device)
    values = {where.name: p for p, where in serial_placements(fresh).items()}
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(values[layout.placements[p].name])


def train(model: str, run: str, small: bool) -> Row:
    """Train a run in this process, one of its ranks: the loss of each step, milliseconds per step, memory."""
    config = settings(model, run, small)
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    with joined(config.train.device) as world:
        mesh = build_mesh(config.parallel, world)
        training = assemble(config, mesh)
        same_weights(training.model, training.layout, config, world.device)
        with closing(train_loader(config, mesh.dp, world.device, 0, training.model.example)) as batches:    # type: ignore[arg-type]
            losses, ms = follow(training, batches, run == FROZEN)
        found = global_loss(losses, mesh).tolist()
    return {"losses": [round(loss, 6) if math.isfinite(loss) else None for loss in found], "ms": ms,
            "memory_gb": memory_gb(world.device), "rank": world.rank}


def follow(training: Training, batches: Any, frozen: bool) -> tuple[Tensor, float]:
    """Train all steps: (this rank's share of each loss, median milliseconds per step in the second half)."""
    losses, laps, steps = [], [], training.config.train.steps
    timing.wait(training.mesh.world.device)
    begin = time.perf_counter()
    for number in range(steps):
        losses.append(training.step(next(batches))[0])
        if frozen and number == 0:
            training.scaling.update = lambda bad: None      # type: ignore[method-assign]
        if number % 20 == 19:
            timing.wait(training.mesh.world.device)
            now = time.perf_counter()
            laps.append((now - begin) / 20 * 1e3)
            begin = now
    return torch.stack(losses).double(), statistics.median(laps[len(laps) // 2:])


def start(job: str, gpus: str, small: bool) -> Row:
    """Start a run in its own process, or in two for context parallelism."""
    model, run = job.split(" | ")
    program = ["-m", "experiments.loss_alignment", "run", model, run, *["--small"] * small]
    if run == TOKENS_APART:
        program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program]
    row = gpu_pool.start(program, gpus)
    print(f"{job:45s} {row.get('error') or f'''{row['ms']:7.1f} ms {row['memory_gb']:6.1f} GB, ends at {row['losses'][-1]}'''}",
          flush=True)
    return {"job": job, **row}


def main(file: Path, jobs: list[str], small: bool) -> None:
    """Do all jobs concurrently on this machine's GPUs, and write the losses and the comparison."""
    gpus = gpu_pool.gpus_of("experiments.loss_alignment", small)
    found: dict[str, dict[str, Row]] = {job.split(" | ")[0]: {} for job in jobs}
    for model in found:
        make_data(model, small)

    def done(row: Row) -> None:
        model, run = row.pop("job").split(" | ")
        found[model][run] = row
        write(file, found, small)

    def run(job: str, gpu: str) -> Row:
        return start(job, gpu, small)

    two = [job for job in jobs if job.endswith(TOKENS_APART)]
    gpu_pool.side_by_side([job for job in jobs if job not in two], run, gpus, done)
    pairs = [",".join(pair) for pair in zip(gpus[::2], gpus[1::2], strict=False)] or [""] * small
    if pairs:
        gpu_pool.side_by_side(two, run, pairs, done)
    for model, rows in found.items():
        if not (verdict := judge(rows, settings(model, REFERENCE, small).train.steps // WINDOWS)):
            continue
        print(f"{model}: bf16's seeds differ by {verdict['spread']:.2%}")
        for name, value in verdict["gap"].items():
            print(f"  {name:30s} {value:8.2%} {verdict['within'].get(name, '')}")


def write(file: Path, found: dict[str, dict[str, Row]], small: bool) -> None:
    """Write all results so far as JSON."""
    models: Row = {}
    for model, rows in found.items():
        config = settings(model, REFERENCE, small)
        order = [run for run in RUNS if run in rows]
        models[model] = {"steps": config.train.steps, "batch": config.train.global_batch,
                         "runs": {run: rows[run] for run in order}, **judge(rows, config.train.steps // WINDOWS)}
    record = {**timing.machine(torch.device("cpu" if small else "cuda")),
              "command": "python -m experiments.loss_alignment FILE" + " --small" * small,
              "meaning": "losses of every step, from the same weights, on handwritten digits, enlarged, as latents, and on the "
                         "source text of Python's standard library; gap: to bf16, seed 0, in means of windows, a twentieth of "
                         "the run each, relative, in the mean over these; spread: standard deviation over the three seeds of "
                         "bf16 likewise; ms: beside other runs on one host", "models": models}
    with atomic(file) as temporary:
        temporary.write_text(json.dumps(record) + "\n", encoding="utf-8")


def jobs_of(arguments: list[str], small: bool) -> list[str]:
    """The jobs "model | run" for arguments `models=a,b` and `runs=a;b`; without them, all."""
    given = {key: names for key, _, names in (argument.partition("=") for argument in arguments)}
    for key in given:
        if key not in ("models", "runs"):
            raise CourseError(f"there is no {key!r}{did_you_mean(key, ('models', 'runs'))}: give models=A,B or runs=A;B")
    models = given["models"].split(",") if "models" in given else [*(TINY if small else MODELS)]
    gpu_alone = ("bf16, flash attention", "fp8 Transformer Engine") if small else ()
    runs = given["runs"].split(";") if "runs" in given else [run for run in RUNS if run not in gpu_alone]
    for key, named, known in (("models", models, [*(TINY if small else MODELS)]), ("runs", runs, [*RUNS])):
        if unknown := [name for name in named if name not in known]:
            raise CourseError(f"{key}={unknown[0]} is none of {'; '.join(known)}: choose among these")
    return [f"{model} | {run}" for model in models for run in runs]


if __name__ == "__main__":
    small = "--small" in sys.argv
    with command("FILE [models=A,B] [runs=A;B] [--small]") as words:
        if words[0] == "run":
            row = train(words[1], words[2], small)
            if row.pop("rank") == 0:
                print(json.dumps(row))
        else:
            main(Path(words[0]), jobs_of(words[1:], small), small)
