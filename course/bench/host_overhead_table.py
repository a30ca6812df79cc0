"""`course bench host`: measure this machine's host time for training steps, in a few minutes.

Each row is a kind of model in a setting (`host_overhead.SETTINGS`), trained for whole steps at width 64, where the GPU always
waits for the host. Since a host's speed varies from second to second, a row alternates two depths, two numbers of micro-batches
and a plain PyTorch step, and expresses times in such plain steps. Each GPU measures a share of the rows. Rows with several ranks
follow, if there are two GPUs.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from course import config as configuration
from course.bench import gpu_pool, kernel_table, layout_harness, timing
from course.bench.command_line import command
from course.bench.gpu_pool import Row
from course.config import Parallel
from course.config.axes import AXES
from course.parallel import Mesh, World, build_mesh, joined
from course.planner.host_overhead import RECOMPUTE, SETTINGS, Cost, row_name
from course.training.assemble import assemble
from course.utils.errors import CourseError

BLOCKS, MICROS = (2, 8), (1, 3)                      # per rank; a pipeline has pp times as many, or it would wait
LAPS = 7
TINY = {"vit": ["vit-base", "model.grid=[32,32]", "model.channels=4"],
        "gpt": ["gpt-124m", "model.context=32", "model.vocab=256"],
        "dit": ["dit-xl", "model.latent=[4,8,8]", "model.patch=2"]}
SMALL = ("gpt", "gpt, full", "gpt, swiglu")          # the rows of --small
SMALL_LAPS = 2
TIMEOUT = 900                                        # seconds, for one process: on one GPU it measures all rows, 11 s each
Size = tuple[int, int, int]                          # blocks, micro-batches, gradient buckets
UNIT = (0, 0, 0)                                     # key of the plain step


def rows_of(gpus: int) -> dict[str, tuple[str, list[str]]]:
    """Row name -> (kind of model, overrides), for all rows measured on so many GPUs. Compiled rows take longest and come last."""
    plain = [(kind, "", (), compiled, how) for kind, compiled, how in product(TINY, (False, True), RECOMPUTE)]
    others = [(s.kind, name, s.overrides, compiled, how) for name, s in SETTINGS.items() if s.gpus == gpus
              for compiled, hows in ((False, s.eager), (True, s.compiled)) for how in hows]
    settings = sorted((plain if gpus == 1 else []) + others, key=lambda row: row[3])
    return {row_name(kind, name, compiled, how): (kind, [*overrides, f"compile={compiled}".lower(), f"train.recompute={how}"])
            for kind, name, overrides, compiled, how in settings}


def measure(kind: str, overrides: list[str], world: World, laps: int) -> tuple[Cost, float]:
    """(host cost of a model in a setting, in plain steps; seconds of a plain step), measured on all ranks of the world."""
    torch._dynamo.reset()                            # compile each row separately
    axes = {name: 2 if f"parallel.{name}=2" in overrides else 1 for name in AXES}
    runs: dict[Size, Callable[[], object]] = {UNIT: plain_step(world.device)}
    sizes = [(blocks, micros, 25.0) for blocks, micros in product(BLOCKS, MICROS)]
    for blocks, micros, bucket_mb in sizes + [(BLOCKS[-1], 1, 1e-3)] * (axes["dp"] > 1):
        preset, *size = TINY[kind]
        micros *= axes["pp"]
        config = configuration.load(preset, [
            "data.source=mock", "parallel.dp=1", "model.dim=64", "model.heads=4", "train.micro_batch=1",
            f"precision={half(world)}", *size, *overrides, f"model.depth={blocks * axes['pp']}",
            f"train.global_batch={micros * axes['dp']}", f"parallel.bucket_mb={bucket_mb}"])
        training: Any = assemble(config, mesh_of(world, **axes))
        buckets = len(getattr(training.gradients, "buckets", " "))
        runs[blocks, micros, buckets] = partial(training.step, training.model.example(micros, world.device))
    seconds = layout_harness.by_turns(runs, world, laps)
    plain = seconds.pop(UNIT)
    steps = {key: median(own / unit for own, unit in zip(found, plain, strict=True)) for key, found in seconds.items()}
    return fitted(steps), median(plain)


def fitted(steps: Mapping[Size, float]) -> Cost:
    """Fit a cost to steps of (blocks, micro-batches, buckets) by least squares of relative errors."""
    terms = np.array([[1, micros, micros * blocks, buckets - 1] for blocks, micros, buckets in steps])
    values = np.array(list(steps.values()))
    return Cost(*(float(x) for x in np.linalg.lstsq(terms / values[:, None], np.ones(len(values)), rcond=None)[0]))


def plain_step(device: torch.device) -> Callable[[], object]:
    """Forward and backward of four small MLPs in plain PyTorch: the unit of host cost."""
    layers = nn.Sequential(*(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)))
    layers, x = layers.to(device), torch.randn(16, 64, device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.float16 if device.type == "cuda" else torch.bfloat16):
            y = layers(x)
        y.float().sum().backward()
        layers.zero_grad()

    return step


@cache
def mesh_of(world: World, pp: int, dp: int, cp: int, tp: int) -> Mesh:
    """The mesh of these sizes, built once for all rows."""
    return build_mesh(Parallel(pp=pp, dp=dp, cp=cp, tp=tp), world)


def half(world: World) -> str:
    """The name of the device's 16-bit format in configurations."""
    return "bf16" if kernel_table.half(world.device) == torch.bfloat16 else "fp16"


def share(gpus: int, number: int, of: int, small: bool, file: Path) -> None:
    """Measure every `of`-th row for so many GPUs, starting at `number`. Write each cost, or the error, to the file."""
    with joined("cpu" if small else "cuda") as world:
        rows: Row = {}
        plain: list[float] = []
        for name, (kind, overrides) in list(rows_of(gpus).items())[number::of]:
            if small and name not in SMALL:
                continue
            try:
                cost, unit = measure(kind, overrides, world, SMALL_LAPS if small else LAPS)
                rows[name] = astuple(cost)
                plain.append(unit)
            except Exception as error:               # on all ranks alike, such as an unsupported format
                rows[name] = f"{type(error).__name__}: {str(error)[:200]}"
            if world.rank == 0:                      # after each row, to keep results after a timeout
                file.write_text(json.dumps({"rows": rows, "plain": plain}), encoding="utf-8")


def main(small: bool) -> Row:
    """Measure the table of this machine. small: three rows on the CPU, as a test.

    Raises `CourseError` if no row could be measured.
    """
    begin = time.perf_counter()
    gpus = gpu_pool.gpus_of("course bench host", small)
    pairs = [",".join(gpus[i:i + 2]) for i in range(0, len(gpus) - 1, 2)]
    rows: Row = {}
    plain: list[float] = []

    def keep(part: Row) -> None:
        rows.update(part.get("rows", {}))
        plain.extend(part.get("plain", []))

    with TemporaryDirectory() as folder:
        for number, groups in ((1, gpus), (2, pairs)):
            def run(job: str, group: str, number: int = number, of: int = len(groups)) -> Row:
                file = Path(folder) / f"{number}-{job}.json"
                program = ["-m", "course.bench.host_overhead_table", str(number), job, str(of), str(file), *["--small"] * small]
                if number > 1:
                    program = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}", *program]
                stopped = gpu_pool.start(program, group, TIMEOUT).get("error")
                if stopped:
                    print(f"{number} GPU{'s' * (number > 1)}, part {job} of {of}: {stopped}", flush=True)
                return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}

            if groups:
                gpu_pool.side_by_side([str(i) for i in range(len(groups))], run, groups, keep)
    if not plain:
        raise CourseError("no row could be measured: the errors above say why")
    device = torch.device("cpu" if small else "cuda")
    return {**timing.machine(device), "command": "course bench host --out FILE",
            "unit": "of a step, of each micro-batch, of each block of a micro-batch, of each bucket of gradients but the first, "
                    "in plain steps; plain_step: seconds of one, the median over the rows; plain_steps: fastest and slowest",
            "plain_step": median(plain), "plain_steps": [min(plain), max(plain)], "host": rows,
            "took_s": round(time.perf_counter() - begin, 1)}


if __name__ == "__main__":
    with command("GPUS NUMBER OF FILE [--small]", 4) as words:
        count, first, every = (int(word) for word in words[:3])
        share(count, first, every, "--small" in sys.argv, Path(words[3]))
        print("{}")                                  # `gpu_pool.start` expects a line of JSON
