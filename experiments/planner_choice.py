"""Is the planner's first choice the fastest? `python -m experiments.planner_choice FILE`.

For each of three models, the planner ranks the layouts for this machine's four GPUs, or two. The planner's best variant of each
pp x dp x cp x tp factorization is measured: whole training steps on random data. Neighbors of the first choice are measured
too: other micro-batches, ZeRO-1 toggled, other recomputation. `verdict` compares the first choice with the fastest.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from course import config as configuration
from course.bench import gpu_pool, layout_harness, timing
from course.bench.command_line import command
from course.bench.gpu_pool import Row
from course.config import Config, validation
from course.parallel import World, build_mesh, joined
from course.planner import hardware, kernel_efficiency, peak_memory, step_time
from course.planner.hardware import Hardware
from course.planner.search import find_layouts
from course.planner.search_space import Choice, changed, settings
from course.training.assemble import assemble
from course.training.run_log import memory_gb
from course.utils.atomic_files import write_json
from course.utils.errors import CourseError

GPUS, LAPS = 4, 5
NEAR = 3                                            # neighbors of the first choice
CLAIM = 1.05                                        # the first choice's time may be this multiple of the best
TIMEOUT = 240                                       # seconds for the layouts of one model
# Not compiled: torch.compile takes half a minute per layout, and its gain is the same in all layouts
MODELS = {"gpt-1.3b": ["train.global_batch=32"], "dit-xl": ["train.global_batch=256"],
          "vit-mp": ["train.global_batch=32", "data.source=mock"]}
TINY = {"gpt-1.3b": ["model.vocab=64", "model.context=32", "model.dim=32", "model.depth=4", "model.heads=4",
                     "train.global_batch=8"],
        "dit-xl": ["model.latent=[4,8,8]", "model.dim=32", "model.depth=4", "model.heads=4", "train.global_batch=8"],
        "vit-mp": ["model.grid=[16,32]", "model.channels=3", "model.dim=32", "model.depth=4", "model.heads=4",
                   "train.global_batch=8", "data.source=mock"]}
TOYS = "--small: the models are toys on CPU processes, and the times mean nothing"


def cases_of(preset: str, own: Sequence[str], h: Hardware, gpus: int, most: int = 0) -> list[Row]:
    """The planner's layouts in its order, then neighbors of its first choice: {preset, name, choice, settings, predicted_ms,
    predicted_gb}. choice: the rank in the planner's list, 0 for a neighbor. most: how many of the planner's; 0: all."""
    config = configuration.load(preset, own)
    plan = find_layouts(config, h, gpus)
    chosen = plan.layouts[:most or None]
    found = [case(preset, own, config, one.config, h, gpus, place) for place, one in enumerate(chosen, 1)]
    return found + [case(preset, own, config, one, h, gpus, 0) for one in neighbors(chosen[0].config, h)]


def neighbors(first: Config, h: Hardware) -> list[Config]:
    """Variants of the first choice with one setting changed that are valid and fit into memory."""
    t, p = first.train, first.parallel
    changes: list[Choice] = [{"train.micro_batch": max(1, t.micro_batch // 2)}]
    changes += [{"parallel.zero": not p.zero}] * (p.dp * p.cp > 1)
    changes += [{"train.recompute": "selective" if t.recompute == "none" else "none"}]
    changes += [{"parallel.sp": not p.sp}] * (p.tp > 1)
    changes += [{"train.micro_batch": t.micro_batch * 2}] * (validation.micro_batches(first) > 1)
    tried = [changed(first, change) for change in changes]
    return [one for one in tried if one != first and not validation.refusal(one) and peak_memory.predict(one).total
            <= h.memory][:NEAR]


def case(preset: str, own: Sequence[str], base: Config, config: Config, h: Hardware, gpus: int, choice: int) -> Row:
    """One layout to measure, with its predicted time and memory."""
    chosen = [*own, *settings(config, base)]
    return {"preset": preset, "choice": choice, "name": " ".join([preset, *settings(config, base)]), "settings": chosen,
            "predicted_ms": 1e3 * step_time.predict(config, h, gpus).step,
            "predicted_gb": peak_memory.predict(config).allocated / 1e9}


def main(file: Path, small: bool) -> None:
    """Measure on all GPUs, model after model, and write the rows as they come."""
    gpus = gpu_pool.gpus_of("python -m experiments.planner_choice", small)
    n = GPUS if small or len(gpus) >= GPUS else len(gpus) // 2 * 2
    if not n:
        raise CourseError("python -m experiments.planner_choice needs two GPUs, and this machine shows one: "
                          "--small tries it on the CPU")
    h = (None if small else hardware.of_device(torch.cuda.get_device_name(0))) or hardware.load("h200")
    found = [row for preset, own in (TINY if small else MODELS).items()
             for row in cases_of(preset, own, h, n, 2 if small else 0)]
    head = {**timing.machine(torch.device("cpu" if small else "cuda")), "command": "python -m experiments.planner_choice FILE",
            "kernels": kernel_efficiency.source(h), "predicted_for": h.name,
            "meaning": f"{TOYS}; without it " * small + "whole training steps of the planner's layouts for "
                       f"{n} GPUs: milliseconds, peak GB of the fullest rank; choice: the place in its list, 0 a neighbor of "
                       "its first choice. verdict: the first choice's time over the fastest's"}
    if small:
        print(TOYS, flush=True)
    rows = gpu_pool.Rows(file, head, [row["name"] for row in found], "name")
    with tempfile.TemporaryDirectory() as folder:
        cases = Path(folder) / "cases.json"
        cases.write_text(json.dumps(found), encoding="utf-8")
        for preset in MODELS:
            waiting = {row["name"]: row for row in found if row["preset"] == preset}
            for measured in started(cases, preset, gpus[:n], n, small):
                rows.add(waiting.pop(measured["name"]) | measured)
                print(text(rows.rows, measured["name"]), flush=True)
            for row in waiting.values():
                rows.add(row | {"error": "not measured: the processes ended before"})
    ends = verdict(rows.rows)
    write_json(file, {**head, "verdict": ends, "rows": rows.rows})
    for preset, ratio in ends.items():
        print(f"{preset}: the first choice takes {ratio:.3f} of the fastest's time" + ("" if ratio <= CLAIM else ", too much"))


def text(rows: Iterable[Row], name: str) -> str:
    """Format a row for printing."""
    row = next(row for row in rows if row["name"] == name)
    return f"{row['predicted_ms']:9.1f} ms predicted, {row['ms']:9.1f} measured, {row['memory_gb']:5.1f} GB  {name}"


def started(cases: Path, preset: str, gpus: Sequence[str], n: int, small: bool) -> Iterable[Row]:
    """Start the processes of one model and yield the rows that they measure."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", "-m",
               "experiments.planner_choice", "run", str(cases), preset, *["--small"] * small]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    assert process.stdout is not None
    late = threading.Timer(TIMEOUT, process.terminate)                  # torchrun then ends its ranks, which ends the output
    late.start()
    try:
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    finally:
        late.cancel()
        process.terminate()
        process.wait()


def run(cases: Path, preset: str, small: bool) -> None:
    """Measure the layouts of one model in this process, as one of the ranks."""
    found = [row for row in json.loads(cases.read_text(encoding="utf-8")) if row["preset"] == preset]
    with joined("cpu" if small else "cuda") as world:
        for row in found:
            measured = measure(row, world, 1 if small else LAPS)
            if world.rank == 0:
                print(json.dumps({"name": row["name"], **measured}), flush=True)


def measure(row: Row, world: World, laps: int) -> Row:
    """Milliseconds and peak GB of one layout's steps."""
    config = configuration.load(row["preset"], row["settings"])
    training: Any = assemble(config, build_mesh(config.parallel, world))
    batch = training.model.example(config.train.global_batch // config.parallel.dp, world.device)
    training.step(batch)
    timing.wait(world.device)
    ms = layout_harness.milliseconds(partial(training.step, batch), world, laps)
    peak = torch.tensor(memory_gb(world.device), device=world.device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    del training, batch
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return {"ms": ms, "memory_gb": peak.item()}


def verdict(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """For each model, the time of the planner's first choice divided by the fastest measured time; at most `CLAIM` expected.

    Infinite if the first choice has no time. Models for which only the first choice was measured are left out.
    """
    found: dict[str, float] = {}
    every = list(rows)
    for preset in dict.fromkeys(row["preset"] for row in every):
        mine = [row for row in every if row["preset"] == preset]
        times = [row["ms"] for row in mine if "ms" in row]
        first = next((row["ms"] for row in mine if row["choice"] == 1 and "ms" in row), float("inf"))
        if len(times) != 1 or first == float("inf"):
            found[preset] = first / min(times) if times else float("inf")
    return found


if __name__ == "__main__":
    with command("FILE [--small]") as words:
        if words[0] == "run":
            run(Path(words[1]), words[2], "--small" in sys.argv)
        else:
            main(Path(words[0]), "--small" in sys.argv)
