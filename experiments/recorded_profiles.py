"""Profiles of training steps for lessons 02 and 05: `python -m experiments.recorded_profiles FILE [NAME]...` on one GPU.

For each configuration, or for those named, it records a time breakdown of three steps (`training/trace_breakdown.py`), and for
some a timeline of one step. It also times a matmul with and without waiting for the GPU. With
`torchrun --nproc-per-node 2 -m experiments.recorded_profiles FILE` it records tensor parallelism instead, on rank 0.
"""

import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from course import config as configuration
from course.bench import timing
from course.bench.command_line import command
from course.bench.one_gpu_configs import SMALL
from course.lab.figures.profile import last_step
from course.parallel import join, leave
from course.training import profile_run, trace_breakdown
from course.utils.atomic_files import write_json

REFERENCE = ("data.source=mock",)                    # vit-short: 360 x 720, width 384, 16 samples
ALONE = {"16 samples, tf32": REFERENCE, "16 samples, bf16": (*REFERENCE, "precision=bf16"),
         "16 samples, bf16, compiled": (*REFERENCE, "precision=bf16", "compile=true"),
         **{f"small batch of {n}, bf16": (*SMALL, f"train.global_batch={n}") for n in (1, 4, 16, 64)}}
TOGETHER = {"tensor parallel": (*REFERENCE, "model.dim=1024", "precision=bf16", "parallel.sp=true", "parallel.overlap=none")}
DRAWN = ("small batch of 1, bf16", "16 samples, bf16", "16 samples, bf16, compiled", *TOGETHER)


def main(file: Path, names: list[str]) -> None:
    """Record the configurations for this number of processes, and add them to the file."""
    world = join("auto")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {
        **timing.machine(world.device), "accounts": {}, "timelines": {},
        "command": " ".join(["python -m experiments.recorded_profiles FILE", *(f'"{name}"' for name in names)])}
    if world.size == 1:
        found["clock"] = clock(world.device)
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in (ALONE if world.size == 1 else TOGETHER).items():
            if names and name not in names:
                continue
            trace = profile_run.record(configuration.load("vit-short",
                                                          [*settings, f"parallel.tp={world.size}", f"log.dir={folder}",
                                                                    f"log.name={len(name)}", "profile.steps=3"]))
            events = trace_breakdown.read(trace)
            found["accounts"][name] = asdict(trace_breakdown.account(events))
            if name in DRAWN:
                found["timelines"][name] = last_step(events)
            print(name, found["accounts"][name]["time"], flush=True)
            torch._dynamo.reset()
    if world.rank == 0:
        write_json(file, found)
    leave()


def clock(device: torch.device) -> dict[str, float]:
    """Microseconds of a large matmul, timed around the line alone, and including the wait for the GPU."""
    side = 8192 if device.type == "cuda" else 256
    a = torch.randn(side, side, device=device).bfloat16()
    timing.seconds(lambda: a @ a, device)
    begin = time.perf_counter()
    a @ a
    line = time.perf_counter() - begin
    timing.wait(device)
    return {"the line": line * 1e6, "and waiting": (time.perf_counter() - begin) * 1e6, "side": side}


if __name__ == "__main__":
    with command("FILE [NAME]...") as words:
        main(Path(words[0]), words[1:])
