"""How long do whole training steps take if two GPUs share each sample's tokens, and do they learn the same?

`python -m experiments.context_steps FILE` on two GPUs; --small tries it on CPUs. Each case trains in bf16, compiled, from the
same weights and data: on one GPU, and on two with each method of context parallelism, launched by the host and in a CUDA graph.
`losses` are those of the first steps.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from course import config as configuration
from course.bench import gpu_pool, timing
from course.bench.command_line import command
from course.bench.gpu_pool import Row
from course.parallel import World, build_mesh, joined
from course.parallel.context_parallel.attention import METHODS
from course.training.assemble import assemble
from course.utils.atomic_files import write_json
from course.utils.errors import CourseError

FIRST, LAPS = 6, 12                                  # steps whose losses are kept, which warm up, and timed steps


@dataclass(frozen=True)
class Case:
    """A model and its batch."""

    preset: str
    samples: int
    settings: tuple[str, ...] = ()


CASES = {"DiT-XL/2, 256 px, 32 samples": Case("dit-xl", 32, ("kernels=triton",)),
         "DiT-XL/2, 512 px, 16 samples": Case("dit-xl-512", 16, ("kernels=triton",)),
         "GPT 350M, 2 x 8,192 tokens": Case("gpt-350m", 2, ("model.context=8192",)),
         "weather ViT, 8 samples": Case("vit-short", 8)}


def config_of(case: Case, ranks: int, method: str, graphs: bool, small: bool) -> configuration.Config:
    """The configuration of a case on so many ranks."""
    shared = ["data.source=mock", "parallel.dp=1", f"parallel.cp={ranks}", f"parallel.context={method}", "train.micro_batch=0"]
    if small:
        return configuration.load(f"{case.preset.split('-')[0]}-demo", [*shared, "train.global_batch=2", "train.device=cpu"])
    return configuration.load(case.preset, [
        *shared, f"train.global_batch={case.samples}", "precision=bf16", "stream=narrow", "compile=true",
        f"graphs={str(graphs).lower()}", *case.settings])


def measure(config: configuration.Config, world: World) -> Row:
    """The losses of the first steps, and the median of later steps' milliseconds on the slowest rank."""
    training: Any = assemble(config, build_mesh(config.parallel, world))
    batch = training.model.example(config.train.global_batch, world.device)
    losses = [float(training.step(batch)[0]) for _ in range(FIRST)]
    laps = []
    for _ in range(LAPS):
        timing.wait(world.device)
        if world.size > 1:
            dist.barrier()
        start = time.perf_counter()
        training.step(batch)
        timing.wait(world.device)
        laps.append(time.perf_counter() - start)
    middle = torch.tensor(1e3 * statistics.median(laps), device=world.device)
    if world.size > 1:
        dist.all_reduce(middle, dist.ReduceOp.MAX)
    return {"ms": middle.item(), "losses": losses}


def rows(world: World, small: bool) -> Iterator[Row]:
    """Each case by each method."""
    methods = [*METHODS] if world.size > 1 else ["auto"]
    for (name, case), method, graphs in product(CASES.items(), methods, [False] if small else [False, True]):
        torch._dynamo.reset()
        yield {"case": name, "gpus": world.size, "context": method if world.size > 1 else "", "graphs": graphs,
               **measure(config_of(case, world.size, method, graphs, small), world)}


def work(file: Path, small: bool) -> None:
    """Measure on this launch's ranks; rank 0 adds the rows to the file."""
    with joined("cpu" if small else "cuda") as world:
        for row in rows(world, small):
            if world.rank == 0:
                written = json.loads(file.read_text(encoding="utf-8"))
                write_json(file, written | {"rows": [*written["rows"], row]})
                print(json.dumps(row), flush=True)


def main(file: Path, small: bool) -> None:
    """Measure on one GPU, then on two, and write the rows."""
    gpus = gpu_pool.gpus_of("python -m experiments.context_steps", small)
    write_json(file, {**timing.machine(torch.device("cpu" if small else "cuda")),
                      "command": "python -m experiments.context_steps FILE" + " --small" * small,
                      "meaning": "whole training steps in bf16, compiled, from the same weights and data; context: how attention "
                                 "works over two GPUs; graphs: in a CUDA graph; losses: of the first steps", "rows": []})
    program = ["-m", "experiments.context_steps", "work", str(file), *["--small"] * small]
    for launcher, devices in (([], gpus[:1]), (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], gpus[:2])):
        last = gpu_pool.start([*launcher, *program], ",".join(devices))
        if "error" in last:
            raise CourseError(f"measuring on {'two GPUs' if launcher else 'one GPU'} ended early: {last['error']}")


if __name__ == "__main__":
    with command("FILE [--small]") as words:
        (work if words[0] == "work" else main)(Path(words[-1]), "--small" in sys.argv)
