"""The recorded looks into training steps of lesson 02: `python -m course.perf.looks FILE` on one GPU.

For each configuration an account of three steps (`account.py`), for two of them also the timeline of one step; and what a clock
around a matrix multiplication shows if nobody waits for the GPU. Under `torchrun --nproc-per-node 2 -m course.perf.looks FILE`
the tensor-parallel one instead, over all of them, of rank 0.
"""

import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from course import config as configuration
from course.files import atomic
from course.parallel import join, leave
from course.perf import account, bench, profile
from course.perf.account import Event
from course.perf.command import command
from course.perf.rungs import SMALL

REFERENCE = ("data.source=mock",)                    # vit-short: 360 x 720, width 384, 16 samples
ALONE = {"16 samples, tf32": REFERENCE, "16 samples, bf16": (*REFERENCE, "precision=bf16"),
         "16 samples, bf16, compiled": (*REFERENCE, "precision=bf16", "compile=true"),
         **{f"small batch of {n}, bf16": (*SMALL, f"train.global_batch={n}") for n in (1, 4, 16, 64)}}
TOGETHER = {"tensor parallel": (*REFERENCE, "model.dim=1024", "precision=bf16", "parallel.sp=true", "parallel.overlap=none")}
DRAWN = ("small batch of 1, bf16", "16 samples, bf16", *TOGETHER)


def main(file: Path) -> None:
    """Record on the processes that there are, and add to the file what this number of them allows."""
    world = join("auto")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {
        **bench.machine(world.device), "command": "python -m course.perf.looks FILE", "accounts": {}, "timelines": {}}
    if world.size == 1:
        found["clock"] = clock(world.device)
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in (ALONE if world.size == 1 else TOGETHER).items():
            trace = profile.record(configuration.load("vit-short", [*settings, f"parallel.tp={world.size}", f"log.dir={folder}",
                                                                    f"log.name={len(name)}", "profile.steps=3"]))
            events = account.read(trace)
            found["accounts"][name] = asdict(account.account(events))
            if name in DRAWN:
                found["timelines"][name] = timeline(events)
            print(name, found["accounts"][name]["time"], flush=True)
            torch._dynamo.reset()
    if world.rank == 0:
        with atomic(file) as temporary:
            temporary.write_text(json.dumps(found, indent=1), encoding="utf-8")
    leave()


def clock(device: torch.device) -> dict[str, float]:
    """Microseconds of a large matrix multiplication by a clock around the line: as it stands, and with waiting for the GPU."""
    side = 8192 if device.type == "cuda" else 256
    a = torch.randn(side, side, device=device).bfloat16()
    bench.seconds(lambda: a @ a, device)
    begin = time.perf_counter()
    a @ a
    line = time.perf_counter() - begin
    bench.wait(device)
    return {"the line": line * 1e6, "and waiting": (time.perf_counter() - begin) * 1e6, "side": side}


def timeline(events: list[Event]) -> list[list[Any]]:
    """One step of a trace, its last, as (lane, name, kind, begin, end) in microseconds from its begin."""
    parts = [event for event in events if event.get("cat") == "user_annotation" and event["name"] in account.PARTS]
    steps = sorted(event["ts"] for event in parts if event["name"] == account.PARTS[0])
    begin, end = steps[-1], max(event["ts"] + event["dur"] for event in parts)
    gpu = any(event.get("cat") == "kernel" for event in events)
    lanes = {"user_annotation": "parts", "cuda_runtime": "launches", "cpu_op": "operators",
             **dict.fromkeys(account.ON_DEVICE, "GPU")}
    rows = []
    for event in events:
        lane = lanes.get(event.get("cat", ""))
        if event.get("ph") != "X" or not lane or event["ts"] < begin or (lane == "parts" and event["name"] not in account.PARTS):
            continue
        if lane == "launches" and "Launch" not in event["name"]:
            continue
        if lane == "operators" and (gpu or "::" not in event["name"]):
            continue
        kind = account.kind_of(event["name"]) if lane in ("GPU", "operators") else ""
        if kind == "communication":
            lane = "communication"
        start, stop = event["ts"] - begin, event["ts"] + event["dur"] - begin
        rows.append([lane, event["name"][:40], kind, round(start, 2), round(stop, 2)])
    return [row for row in rows if row[3] <= max(end - begin, *(row[4] for row in rows if row[0] == "parts"))]


if __name__ == "__main__":
    with command("FILE") as words:
        main(Path(words[0]))
