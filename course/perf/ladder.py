"""`course bench vit`: what each step of the way from a plain loop to a fast one gains on one GPU, every rung in a fresh process.

A rung is a configuration that anybody can train with: a preset and some settings. Files are of noise, in the page cache after
the first pass over them; "on the device" means random batches that never leave it, the most that the model itself allows.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

import psutil
import torch

from course import config as configuration
from course.data import train_loader
from course.errors import CourseError
from course.files import atomic
from course.parallel import build_mesh, join, leave
from course.perf import bench, flops, loaders
from course.train import assemble

Row = dict[str, Any]
MOCK = ("data.source=mock",)
FAST = ("precision=bf16", "compile=true")
FILES = "data/bench-360x720"
AGAIN = "bf16, compiled"                             # is started twice: the second time the compiler finds its work done
LAPS, WARM, LAP = 5, 4, 0.4                          # laps whose median counts, steps before them, least seconds of a lap
# 12 layers of width 768 on 256 tokens, one sample: hundreds of kernels, each shorter than its launch
SMALL = ("model.grid=[128,128]", "model.dim=768", "model.heads=12", "train.global_batch=1", "precision=bf16", *MOCK)
WIDE = ("model.dim=1024", "train.global_batch=16", *MOCK)

# name -> settings on top of vit-short (width 384, depth 12, 360 x 720, batch 16); those that read files run one at a time
RUNGS: dict[str, tuple[str, ...]] = {
    "tf32, read by the training process": ("data.workers=0",),
    "tf32, 8 loader processes": ("data.workers=8",),
    "tf32, on the device": MOCK,
    "fp32, on the device": ("precision=fp32", *MOCK),
    "fp16, on the device": ("precision=fp16", *MOCK),
    "bf16, on the device": ("precision=bf16", *MOCK),
    "bf16, compiled": (*FAST, *MOCK),
    "bf16, compiled, narrow stream": (*FAST, "stream=narrow", *MOCK),
    "bf16, compiled, in a graph": (*FAST, "graphs=true", *MOCK),
    "bf16, compiled, flash attention": (*FAST, "attention=flash", *MOCK),
    "fp8, compiled": ("precision=fp8", "compile=true", *MOCK),
    "bf16, compiled, 8 loader processes": (*FAST, "data.workers=8"),
    "bf16, compiled, threads": (*FAST, "data.loader=threads", "data.workers=12"),
    "bf16, compiled, DALI": (*FAST, "data.loader=dali", "data.workers=12"),
    "bf16, compiled, DALI on .npy files": (*FAST, "data.loader=dali_numpy", "data.workers=12"),
    "width 1024: bf16": ("precision=bf16", *WIDE),
    "width 1024: bf16, compiled": (*FAST, *WIDE),
    "width 1024: bf16, compiled, narrow stream": (*FAST, "stream=narrow", *WIDE),
    "width 1024: fp8, compiled": ("precision=fp8", "compile=true", *WIDE),
    "width 1024: fp8, compiled, narrow stream": ("precision=fp8", "compile=true", "stream=narrow", *WIDE),
    "width 1024: fp8 by Transformer Engine": ("precision=fp8", "fp8.by=te", "stream=narrow", *WIDE),
    "one sample: eager": SMALL,
    "one sample: in a graph": (*SMALL, "graphs=true"),
    "one sample: compiled": (*SMALL, "compile=true"),
    "one sample: compiled, in a graph": (*SMALL, "compile=true", "graphs=true"),
}
TINY = ("model.grid=[16,32]", "model.channels=3", "model.dim=32", "model.depth=2", "model.heads=2", "train.global_batch=2",
        "train.device=cpu")


def main(out: Path, names: Sequence[str], small: bool) -> list[Row]:
    """Run rungs, on all GPUs of this machine side by side, those that read files one after another; write the rows.

    small: tiny, on the CPU, only to see that it works.
    """
    unknown = sorted(set(names) - RUNGS.keys())
    if unknown:
        raise CourseError(f"course bench vit has no rung {unknown[0]!r}: there are {'; '.join(RUNGS)}")
    gpus = [""] if small else [str(i) for i in range(torch.cuda.device_count())]
    if not gpus:
        raise CourseError("course bench vit needs a GPU, and this machine shows none: --small tries it on the CPU")
    chosen = {name: RUNGS[name] for name in names or RUNGS}
    reading = [name for name, settings in chosen.items() if "data.source=mock" not in settings]
    if reading and not small:
        loaders.make_data(Path(FILES), 20, (360, 720))
    free: SimpleQueue[str] = SimpleQueue()
    for gpu in gpus:
        free.put(gpu)
    rows: list[Row] = []
    writing = Lock()

    def run(name: str) -> None:
        """A rung; the file is written after each, so that whoever has to stop keeps what there is."""
        row = rung(name, free, small)
        with writing, atomic(out) as temporary:
            rows.append(row)
            rows.sort(key=lambda row: list(chosen).index(row["rung"]))
            temporary.write_text(json.dumps({**head, "rows": rows}, indent=1))

    head = {**bench.machine(torch.device("cpu" if small else "cuda")), "command": "course bench vit --out FILE",
            "meaning": "whole training steps of vit-short (360 x 720, patch 8, depth 12, width 384, batch 16) with changed "
                       "settings; first_s: from the start of the process to the end of its first step, with nothing in the "
                       "compiler's cache, again_s with it"}
    with ThreadPoolExecutor(len(gpus)) as pool:
        list(pool.map(run, [name for name in chosen if name not in reading]))
    for name in reading:
        run(name)
    return rows


def rung(name: str, free: "SimpleQueue[str]", small: bool) -> Row:
    """One rung on a GPU that is free, in a process of its own; of one that fails the last line of what it said."""
    gpu, flags = free.get(), ["--small"] if small else []
    try:
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "TORCHINDUCTOR_CACHE_DIR": cache}
            row = {"rung": name, **start([name, *flags], environment)}
            if name == AGAIN and "error" not in row:
                row["again_s"] = start([name, "--first", *flags], environment).get("first_s")
    finally:
        free.put(gpu)
    print(text(row), flush=True)
    return row


def start(arguments: list[str], environment: dict[str, str]) -> Row:
    """What this module, started as a program, measured; or the last line of what it said."""
    done = subprocess.run([sys.executable, "-m", "course.perf.ladder", *arguments], env=environment, capture_output=True,
                          text=True, timeout=600)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or [f"exit status {done.returncode}"]
    return json.loads(lines[-1]) if done.returncode == 0 else {"error": lines[-1][:300]}


def text(row: Row) -> str:
    """A row for people."""
    if "error" in row:
        return f"{row['rung']:38s} {row['error']}"
    mfu = f"{row['mfu']:4.0%} MFU" if row["mfu"] else ""
    again = f" ({row['again_s']:.1f} s with the compiler's cache)" if row.get("again_s") else ""
    return (f"{row['rung']:38s} {row['samples_per_s']:8.2f} samples/s  {row['memory_gb']:6.2f} GB  first step after "
            f"{row['first_s']:5.1f} s{again}  {row['kernels']:5d} kernels  {mfu}")


def measure(name: str, small: bool, only_first: bool) -> Row:
    """Train this rung's configuration, here and now; or no more than the first step."""
    files = () if "data.source=mock" in RUNGS[name] else (f"data.path={FILES}",)
    config = configuration.load("vit-short", [*files, *RUNGS[name], *(TINY if small else ())])
    world = join(config.train.device)
    try:
        mesh = build_mesh(config.parallel, world)
        training = assemble(config, mesh)
        with closing(train_loader(config, mesh.dp, world.device, 0, training.model.example)) as batches:    # type: ignore[arg-type]
            training.step(next(batches))
            bench.wait(world.device)
            first = time.time() - psutil.Process().create_time()
            if only_first:
                return {"first_s": first}
            ms = 1e3 * statistics.median(laps(training.step, batches, world.device))
            kernels = kernels_of(training.step, next(batches), world.device)
    finally:
        leave()
    rate = 1e3 * config.train.global_batch / ms
    peak = flops.peak_tflops(world.device, config.precision)
    memory = torch.cuda.max_memory_allocated() / 1e9 if world.device.type == "cuda" else 0.0
    return {"samples_per_s": rate, "ms": ms, "memory_gb": memory, "first_s": first, "kernels": kernels,
            "mfu": flops.step(config.model, 1) * rate / 1e12 / peak if peak else None, "settings": [*RUNGS[name]]}


def kernels_of(step: Any, batch: Any, device: torch.device) -> int:
    """How many kernels a step runs on a GPU; 0 on a CPU. Copies and fills of memory count, they are launched as kernels are."""
    if device.type != "cuda":
        return 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        step(batch)
        bench.wait(device)
    return sum(event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
               for event in found.events() or [])


def laps(step: Any, batches: Iterator[Any], device: torch.device) -> Iterator[float]:
    """Seconds of a step, lap after lap of as many as take LAP seconds; the steps before the first do not count."""
    steps, spent = WARM, 0.0
    for lap in range(LAPS + 2):
        begin = time.perf_counter()
        for _ in range(steps):
            step(next(batches))
        bench.wait(device)
        spent = (time.perf_counter() - begin) / steps
        steps = max(2, round(LAP / spent)) if lap == 1 else steps               # lap 0 also warmed up
        if lap > 1:
            yield spent


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], "--small" in sys.argv, "--first" in sys.argv)))
