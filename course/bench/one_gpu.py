"""`course bench vit`, `gpt`, `dit`: measure benchmark configurations on one GPU, from a plain loop to a fast one.

Each configuration of `one_gpu_configs.py` runs in a fresh process.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import torch

from course import config as configuration
from course.bench import baselines, gpu_pool, loaders, timing
from course.bench.command_line import command
from course.bench.gpu_clock import clock_and_power, energy_used
from course.bench.gpu_pool import Row
from course.bench.one_gpu_configs import BENCHMARKS, BenchmarkConfig
from course.data import train_loader
from course.models import GPTConfig
from course.parallel import World, build_mesh, joined
from course.planner import flops
from course.training.assemble import assemble
from course.training.run_log import memory_gb
from course.utils.errors import CourseError

FILES = "data/bench-360x720"
AGAIN = "bf16, compiled"                             # runs twice; the second time with the compiler's cache
TOYS = "--small: models and batches are toys on the CPU, nothing is compiled, and the numbers mean nothing"
LAPS, WARM, LAP = 5, 4, 0.4                          # laps, warmup steps, least seconds per lap


def main(kind: str, out: Path, names: Sequence[str], small: bool) -> list[Row]:
    """Run configurations in parallel on all GPUs, those that read files one after another, and write the rows.

    names: only these; empty: all. small: tiny, on the CPU, uncompiled, as a test. Raises `CourseError` for an unknown name.
    """
    configs = BENCHMARKS[kind].configs
    unknown = sorted(set(names) - configs.keys())
    if unknown:
        raise CourseError(f"course bench {kind} has no configuration {unknown[0]!r}: there are {'; '.join(configs)}")
    gpus = gpu_pool.gpus_of(f"course bench {kind}", small)
    chosen = [name for name in configs if name in names or not names]
    reading = [name for name in chosen if reads(configs[name])]
    if reading and not small:
        loaders.make_data(Path(FILES), 20, (360, 720))
    if small:
        print(TOYS, flush=True)
    head = {**timing.machine(torch.device("cpu" if small else "cuda")),
            "command": f"course bench {kind} --out FILE" + " --small" * small,
            "meaning": f"{TOYS}; without it " * small + BENCHMARKS[kind].meaning
            + "; first_s: from the start of the process to the "
                       "end of its first step, with nothing in the compiler's cache, again_s with it; first_gb: the first step's "
                       "peak, memory_gb: of later; used_gb: what the GPU holds in all, reserved_gb: what PyTorch holds of it; "
                       "clock_mhz, power_w: meanwhile, as the driver says; "
                       "joules_per_sample: by its counter, over the timed steps"}
    rows = gpu_pool.Rows(out, head, chosen, "configuration")

    def run(name: str, gpu: str) -> Row:
        return run_config(kind, name, gpu, small)

    def done(row: Row) -> None:
        rows.add(row)
        print("toy of " * small + text(row), flush=True)

    gpu_pool.side_by_side([name for name in chosen if name not in reading], run, gpus, done)
    gpu_pool.side_by_side(reading, run, gpus[:1], done)
    return rows.rows


def reads(chosen: BenchmarkConfig) -> bool:
    """Whether a configuration reads files. GPT and DiT presets always use random batches."""
    return configuration.load(chosen.preset, chosen.settings).data.source != "mock"


def run_config(kind: str, name: str, gpu: str, small: bool) -> Row:
    """Run one configuration in its own process and return its row, or the last line of its output as the error."""
    program = ["-m", "course.bench.one_gpu", kind, name, *["--small"] * small]
    with tempfile.TemporaryDirectory() as cache:
        row: Row = {"configuration": name, **gpu_pool.start(program, gpu, TORCHINDUCTOR_CACHE_DIR=cache)}
        if name == AGAIN and not small and "error" not in row:
            row["again_s"] = gpu_pool.start([*program, "--first"], gpu, TORCHINDUCTOR_CACHE_DIR=cache).get("first_s")
    return row


def text(row: Row) -> str:
    """A row as text for the terminal."""
    if "error" in row:
        return f"{row['configuration']:52s} {row['error']}"
    mfu = f"{row['mfu']:4.0%} MFU" if row["mfu"] else ""
    again = f" ({row['again_s']:.1f} s with the compiler's cache)" if row.get("again_s") else ""
    tokens = f"{row['tokens_per_s'] / 1e3:7.1f} thousand tokens/s" if "tokens_per_s" in row else ""
    driver = f"  {row['clock_mhz']:.0f} MHz {row['power_w']:.0f} W" if "power_w" in row and "clock_mhz" in row else ""
    driver += f" {row['joules_per_sample']:.3g} J/sample" if "joules_per_sample" in row else ""
    return (f"{row['configuration']:52s} {row['samples_per_s']:8.2f} samples/s {tokens} {row['memory_gb']:6.2f} GB  "
            f"first step after {row['first_s']:5.1f} s{again}  {row['kernels']:5d} kernels  {mfu}{driver}")


def measure(kind: str, name: str, small: bool, only_first: bool) -> Row:
    """Train a configuration in this process and return its row. only_first: just the first step."""
    chosen, tiny = BENCHMARKS[kind].configs[name], (*BENCHMARKS[kind].tiny, "train.device=cpu", "compile=false")
    files = (f"data.path={FILES}",) if reads(chosen) else ()
    config = configuration.load(chosen.preset, [*files, *chosen.settings, *(tiny if small else ())])
    with joined(config.train.device) as world:
        mesh = build_mesh(config.parallel, world)
        step, example = stepper(chosen, config, mesh, world)
        with closing(train_loader(config, mesh.dp, world.device, 0, example)) as batches:
            step(next(batches))
            timing.wait(world.device)
            first, first_gb = time.time() - psutil.Process().create_time(), memory_gb(world.device)
            if world.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()        # the compiler tunes kernels on copies in the first step
            if only_first:
                return {"first_s": first}
            ms, driver = timed(step, batches, world.device, small, config.train.global_batch)
            held = timing.device_memory(world.device)
            kernels = kernels_of(step, next(batches), world.device)
    peak = flops.peak_tflops(world.device, config.precision)
    rate = speed(config, ms)
    return {**rate, "ms": ms, "memory_gb": memory_gb(world.device), "first_gb": first_gb, **held,
            "first_s": first, "kernels": kernels, **driver,
            "mfu": flops.step(config.model, 1) * rate["samples_per_s"] / 1e12 / peak if peak else None, "preset": chosen.preset,
            "settings": [*chosen.settings]}


def stepper(chosen: BenchmarkConfig, config: configuration.Config, mesh: Any,
            world: World) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(function that trains one step on a batch, function that makes random batches)."""
    if chosen.by == "course":
        training: Any = assemble(config, mesh)
        return training.step, training.model.example
    return getattr(baselines, chosen.by)(config, world.device)


def kernels_of(step: Any, batch: Any, device: torch.device) -> int:
    """Number of kernels in a step on a GPU; 0 on a CPU. Memory copies and fills count, since they are launched too."""
    if device.type != "cuda":
        return 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(batch)
        timing.wait(device)
    return sum(event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
               for event in profile.events() or [])


def speed(config: configuration.Config, ms: float) -> Row:
    """Samples per second, and a GPT's tokens per second, for steps of so many milliseconds."""
    rate, m = 1e3 * config.train.global_batch / ms, config.model
    return {"samples_per_s": rate} | ({"tokens_per_s": rate * m.context} if isinstance(m, GPTConfig) else {})


def timed(step: Any, batches: Iterator[Any], device: torch.device, small: bool, samples: int) -> tuple[float, Row]:
    """(milliseconds per step, as the median of `LAPS` laps after warmup; clock, power and energy meanwhile).

    samples: of a step.
    """
    steps = warm(step, batches, device, 0.01 if small else LAP)
    with clock_and_power(device) as driver, energy_used(device) as used:
        ms = 1e3 * statistics.median(lap(step, batches, device, steps) for _ in range(LAPS))
    if "joules" in used:
        driver["joules_per_sample"] = used["joules"] / (LAPS * steps * samples)
    return ms, driver


def warm(step: Any, batches: Iterator[Any], device: torch.device, least: float) -> int:
    """Train until all is compiled and captured. Returns the number of steps that take `least` seconds, at least two."""
    lap(step, batches, device, WARM)
    return max(2, round(least / lap(step, batches, device, WARM)))


def lap(step: Any, batches: Iterator[Any], device: torch.device, steps: int) -> float:
    """Mean seconds per step over so many steps."""
    begin = time.perf_counter()
    for _ in range(steps):
        step(next(batches))
    timing.wait(device)
    return (time.perf_counter() - begin) / steps


if __name__ == "__main__":
    with command(f"{'|'.join(BENCHMARKS)} NAME [--small] [--first]", least=2) as words:
        print(json.dumps(measure(words[0], words[1], "--small" in sys.argv, "--first" in sys.argv)))
