"""How many samples does training need, for which batch size and learning rate? Repeats the runs behind lesson 08.

    python -m experiments.convergence jobs=8 device=cuda         # the whole grid: minutes on a GPU, an hour on 16 cores
    python -m experiments.convergence tensorboard=runs/reference # no runs: write the recorded curves for TensorBoard

Every run is `course train vit-demo` with other settings, in its own process; several run at a time. Finished runs are kept, so
the same command resumes where it was stopped. The curves of all runs go to one JSON file, in columns:

    {"hardware", "torch", ..., "speed": {"4": samples/s of a run alone on the machine, ...},
     "runs": [{"batch", "lr", "warmup", "schedule", "steps", "step": [...], "loss": [...], "valid_loss": [...], ...}, ...]}

The learning rate is constant after a short warm-up, so a curve does not depend on the length of its run. A few runs show
other schedules: no warm-up, and a half cosine.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from course.bench import timing
from course.bench.command_line import command
from course.config import schema
from course.data.weather import simulation
from course.lab.instruments.recorded_curves import to_tensorboard
from course.training.run_log import read_metrics
from course.utils.atomic_files import atomic
from course.utils.errors import CourseError
from course.utils.machine import cores

COLUMNS = ("step", "loss", "valid_loss", "grad_norm")
POINTS = 32                                          # validations per run
WARMUP = 20                                          # steps
SPEED_STEPS = 60


@dataclass(frozen=True)
class Convergence:
    """The grid of runs, and how to run them."""

    batches: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    rates: tuple[float, ...] = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
    data: str = "data/weather-convergence"           # simulated if it does not exist
    years: int = 16                                  # of 359 samples each: so many that none is seen often
    length: float = 1.0                              # factor on the steps of every run; below 1 to try it out
    jobs: int = 4                                    # runs at a time
    device: str = "auto"
    runs: str = "runs"                               # folder of the runs
    out: str = "course/bench/results/convergence.json"
    settings: tuple[str, ...] = ()                   # more settings of `course train`, such as model.dim=64
    tensorboard: str = ""                            # no runs: write the curves from `out` to this folder


@dataclass(frozen=True)
class Run:
    """One run of the grid."""

    batch: int
    lr: float
    steps: int
    warmup: int = WARMUP
    schedule: str = "constant"

    @property
    def name(self) -> str:
        """The run's folder name, unique in the grid."""
        return f"b{self.batch:03}-lr{self.lr:.1e}-warmup{self.warmup}-{self.schedule}"

    def overrides(self, c: Convergence) -> list[str]:
        """The settings that turn vit-demo into this run."""
        every = max(1, self.steps // POINTS)
        return [f"train.global_batch={self.batch}", f"train.steps={self.steps}", f"optim.lr={self.lr!r}",
                f"optim.warmup={self.warmup}", f"optim.schedule={self.schedule}", f"train.eval_every={every}",
                f"log.every={every}", f"log.name={self.name}", "log.tensorboard=false", f"log.dir={c.runs}",
                f"checkpoint.every={self.steps}", f"data.path={c.data}", *common(c)]


def steps_of(batch: int, length: float = 1.0) -> int:
    """A run's steps: large batches need fewer steps, small ones fewer samples (McCandlish et al. 2018, equation 2.11)."""
    return max(POINTS, round(500 * (1 + 24 / batch) * length))


def plan(c: Convergence) -> list[Run]:
    """All runs: the grid with a constant learning rate, then some without warm-up, then some with a half cosine."""
    grid = [Run(batch, lr, steps_of(batch, c.length)) for batch in c.batches for lr in c.rates]
    cold = [Run(64, lr, steps_of(64, c.length), warmup=0) for lr in c.rates[-3:] if 64 in c.batches]
    cosine = [Run(batch, lr, steps_of(batch, c.length), schedule="cosine") for batch in (16, 64) if batch in c.batches
              for lr in c.rates[-5:]]
    return grid + cold + cosine


def common(c: Convergence) -> list[str]:
    """Settings of all runs; concurrent runs share the cores."""
    return [f"train.device={c.device}", f"train.threads={max(1, cores() // c.jobs)}", *c.settings]


def main(c: Convergence) -> None:
    """Do the missing runs, measure the speed of each batch size, write the curves."""
    if c.tensorboard:
        to_tensorboard(json.loads(Path(c.out).read_text(encoding="utf-8")), Path(c.tensorboard))
        return
    if c.jobs < 1:
        raise CourseError(f"jobs={c.jobs} makes no runs: it is how many run at a time, at least 1")
    if c.device.startswith("cuda") and not torch.cuda.is_available():
        raise CourseError(f"device={c.device}, and PyTorch finds no GPU here: run it on a machine with one, or leave device out; "
                          "on 16 cores of a CPU all runs take an hour")
    simulation.make(simulation.Weather(path=c.data, train=c.years))
    runs = plan(c)
    with ThreadPoolExecutor(c.jobs) as pool:
        ends = list(pool.map(lambda run: make(run, c), runs))
    device = torch.device("cuda" if c.device == "cuda" or (c.device == "auto" and torch.cuda.is_available()) else "cpu")
    found = {**timing.machine(device), "command": "python -m experiments.convergence", "preset": "vit-demo",
             "data": f"{c.years} simulated years of 90 days", "speed": speeds(c),
             "runs": [curve(run, c) | ({"ended": end} if end else {}) for run, end in zip(runs, ends, strict=True)]}
    with atomic(Path(c.out)) as temporary:
        temporary.write_text(json.dumps(found).replace('{"batch"', '\n{"batch"') + "\n", encoding="utf-8")
    print(f"wrote {c.out}: {len(runs)} runs, {sum(map(bool, ends))} of them ended early")


def make(run: Run, c: Convergence) -> str:
    """Do a run unless it is done; return why it ended early, such as a loss that is not finite, or ""."""
    folder = Path(c.runs) / "vit-demo" / run.name
    broken = folder / "ended.txt"
    if broken.is_file():
        return broken.read_text(encoding="utf-8")
    if not is_done(run, c):
        ended = train([*run.overrides(c)], c)
        if ended.returncode not in (0, 1):           # stopped by a signal or preempted: it can resume
            raise CourseError(f"{run.name} was stopped ({ended.returncode}): the same command goes on with it")
        if ended.returncode:
            folder.mkdir(parents=True, exist_ok=True)
            why = ended.stderr.strip().splitlines()[-1] if ended.stderr.strip() else "it was stopped"
            broken.write_text(why, encoding="utf-8")
            print(f"{run.name} ended early: {why}", flush=True)
            return why
    print(f"{run.name}: validation loss {read_metrics(folder / 'metrics.jsonl')[-1]['valid_loss']}", flush=True)
    return ""


def is_done(run: Run, c: Convergence) -> bool:
    """Whether a run has reached its last step."""
    records = read_metrics(Path(c.runs) / "vit-demo" / run.name / "metrics.jsonl")
    return bool(records) and records[-1]["step"] >= run.steps


def train(overrides: Sequence[str], c: Convergence) -> "subprocess.CompletedProcess[str]":
    """Run `course train vit-demo` in its own process."""
    threads = str(max(1, cores() // c.jobs))
    return subprocess.run([sys.executable, "-m", "course.cli", "train", "vit-demo", *overrides], capture_output=True,
                          encoding="utf-8",
                          env=os.environ | {"OMP_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(sys.path)})


def curve(run: Run, c: Convergence) -> dict[str, Any]:
    """The curves of a run as far as it got, in columns, with five significant digits."""
    records = [r for r in read_metrics(Path(c.runs) / "vit-demo" / run.name / "metrics.jsonl") if "valid_loss" in r]
    columns = {name: [short(record[name]) for record in records] for name in COLUMNS}
    rmse = {"u10": [short(r["valid_rmse"]["u10"]) for r in records]} if records and "u10" in records[0]["valid_rmse"] else {}
    return {"batch": run.batch, "lr": run.lr, "warmup": run.warmup, "schedule": run.schedule, "steps": run.steps,
            **columns, **rmse}


def short(value: float | str | None) -> float | None:
    """Round to five significant digits; a non-finite value, a string in metrics.jsonl, becomes None."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return value if isinstance(value, int) else None


def speeds(c: Convergence) -> dict[str, float]:
    """Samples/s at each batch size, of a run alone on the machine, on random data."""
    found = {}
    for batch in c.batches:
        name = f"speed-b{batch:03}"
        ended = train([f"train.global_batch={batch}", f"train.steps={SPEED_STEPS}", "data.source=mock", f"log.name={name}",
                       f"log.dir={c.runs}", "log.every=10", "log.tensorboard=false", "checkpoint.every=1000",
                       f"train.device={c.device}", *c.settings], Convergence(jobs=1))
        records = read_metrics(Path(c.runs) / "vit-demo" / name / "metrics.jsonl")
        if ended.returncode or not records:
            raise RuntimeError(f"{name} did not run: {ended.stderr[-2000:]}")
        found[str(batch)] = float(f"{median(record['samples_per_s'] for record in records[1:]):.4g}")
    return found


if __name__ == "__main__":
    with command("[KEY=VALUE]..., such as jobs=8 device=cuda out=FILE", least=0) as words:
        main(schema.build(Convergence, schema.parse(words), "experiments.convergence"))
