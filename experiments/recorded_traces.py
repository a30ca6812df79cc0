"""Traces and memory snapshots that lesson 02 reads: `python -m experiments.recorded_traces FOLDER [NAME]...` on one GPU.

With `torchrun --nproc-per-node 2 -m experiments.recorded_traces FOLDER` it records data parallelism, on rank 0. A trace is cut
to its last step, to the parts, the kernels and copies, and the host's calls that launched them; Perfetto opens it. A snapshot
is cut to one step and to the frames outside PyTorch; `course profile` and pytorch.org/memory_viz read it.
"""

import gzip
import json
import pickle
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from course import config as configuration
from course.bench import loaders, timing
from course.bench.command_line import command
from course.config import Config
from course.models import layers
from course.parallel import World, build_mesh, join, leave
from course.training import memory_snapshot, profile_run, trace_breakdown
from course.training.assemble import assemble
from course.training.profiler import PARTS, SNAPSHOT
from course.training.run_log import memory_gb
from course.utils.atomic_files import atomic, write_json

WEATHER = ("precision=bf16", "compile=true", "profile.after=15")
FILES = {"read by the training process": ("data.loader=native", "data.workers=0"),
         "threads": ("data.loader=threads", "data.workers=12"), "dali": ("data.loader=dali", "data.workers=12")}
DATA_PARALLEL = ("data.source=mock", "model.vocab=8192", "train.global_batch=16", "train.micro_batch=0", "compile=true",
                 "parallel.dp=2")
GPT = ("data.source=mock", "train.global_batch=8", "train.micro_batch=0")
SETTLE, KEPT_FRAMES, LONGEST_NAME = 3, 6, 80
CALLS = ("Launch", "Memcpy", "Synchronize")
ARGUMENTS = ("stream", "correlation", "bytes", "memory bandwidth (GB/s)", "External id")


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    """Attention as in a textbook, q, k, v: (B, h, T, d). What it keeps for backward grows with T squared."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(later, float("-inf")).float().softmax(-1)
    return weights.to(v.dtype) @ v


SNAPSHOTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "library": nullcontext, "changed": lambda: mock.patch.object(layers, "attend", attend)}


def main(folder: Path, names: list[str]) -> None:
    """Record what this number of processes can, or what is named of it."""
    world = join("auto")
    small = world.device.type == "cpu"
    file = folder / "about.json"
    about: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {
        **timing.machine(world.device), "command": "python -m experiments.recorded_traces FOLDER",
        "meaning": "milliseconds of a step's parts; peak GB of a step", "accounts": {}, "memory_gb": {}}
    cases: dict[str, Config] = {}
    if world.size == 1:
        for name, settings in FILES.items():
            cases[name] = loaders.configure([*WEATHER, *settings], small)
        for name, patch in SNAPSHOTS.items():
            if not small and (name in names or not names):
                about["memory_gb"][name] = snapshot(folder / f"memory_{name}.pickle.gz", patch, world)
    else:
        cases["data parallel"] = configuration.load("gpt-350m", DATA_PARALLEL) if not small else configuration.load(
            "gpt-demo", ["parallel.dp=2"])
    for name, config in cases.items():
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as runs:
            events = trace_breakdown.read(trace_of(config, runs))
        about["accounts"][name] = trace_breakdown.account(events).time
        if world.rank == 0:
            save_trace(folder / f"{name.replace(' ', '_')}.json.gz", events)
        print(name, {key: round(ms, 2) for key, ms in about["accounts"][name].items() if ms}, flush=True)
        torch._dynamo.reset()
    if world.rank == 0:
        write_json(file, about)
    leave()


def trace_of(config: Config, folder: str) -> Path:
    """Profile three steps of a configuration. Returns this rank's trace."""
    config = replace(config, log=replace(config.log, dir=folder), profile=replace(config.profile, steps=3))
    return cast(Path, profile_run.record(config))


def save_trace(file: Path, events: list[trace_breakdown.Event]) -> None:
    """Write the last step of a trace: its parts, what the GPU ran, and the calls that launched it."""
    parts = trace_breakdown.parts_of(events)
    begin = max(event["ts"] for event in parts if event["name"] == PARTS[0])
    kept = [event for event in events if event.get("ph") == "M"]
    others = [event for event in events if event.get("cat") in trace_breakdown.ON_DEVICE
              or (event.get("cat") in ("cuda_runtime", "cuda_driver") and any(word in event["name"] for word in CALLS))
              or event["name"].startswith(trace_breakdown.BACKWARD)]     # these tell backward from forward
    for event in parts + others:
        if event.get("ph") == "X" and event["ts"] + event["dur"] >= begin:
            args = {key: value for key, value in event.get("args", {}).items() if key in ARGUMENTS}
            kept.append({**event, "name": event["name"][:LONGEST_NAME], "ts": round(event["ts"] - begin, 3), "args": args})
    with atomic(file) as temporary, gzip.open(temporary, "wt") as out:
        json.dump({"traceEvents": kept}, out)


def snapshot(file: Path, patch: Callable[[], AbstractContextManager[Any]], world: World) -> float:
    """Record the memory of one step of GPT 124M. Returns its peak in GB."""
    config = configuration.load("gpt-124m", GPT)
    with patch():
        training: Any = assemble(config, build_mesh(config.parallel, world))
        batch = training.model.example(8, world.device)
        for _ in range(SETTLE):
            training.step(batch)
        timing.wait(world.device)
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT)
        training.step(batch)
        timing.wait(world.device)
        recorded = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
    kept = {"device_traces": [[{**event, "frames": frames_of(event)} for event in trace] for trace in recorded["device_traces"]],
            "segments": [{**segment, "frames": [], "blocks": [{**block, "frames": []} for block in segment["blocks"]]}
                         for segment in recorded["segments"]]}
    with atomic(file) as temporary, gzip.open(temporary, "wb") as out:
        pickle.dump(kept, out)
    print(memory_snapshot.text(memory_snapshot.read(file)), flush=True)
    return memory_gb(world.device)


def frames_of(event: dict[str, Any]) -> list[dict[str, Any]]:
    """The innermost frames of this repository, their files named from its root on."""
    found = []
    for frame in event["frames"]:
        parts = Path(frame["filename"]).parts
        roots = [place for place, part in enumerate(parts[:-1]) if part in ("course", "experiments")]
        if roots:
            found.append({**frame, "filename": "/".join(parts[roots[-1]:])})
    return found[:KEPT_FRAMES]


if __name__ == "__main__":
    with command("FOLDER [NAME]...") as words:
        main(Path(words[0]), words[1:])
