"""Test the performance model on held-out configurations, drawn by seed: `python -m experiments.heldout LIST FILE`.

A performance model must predict configurations that it was not fitted to. `draw` takes them from `GRID`, each setting
independently. It skips those that the library refuses, that `rough_bytes` says do not fit, or that are too small to measure.
Each list, heldout.json to heldout_5.json next to the results, has its own seed and was committed before it was measured. The
model was improved after each list, so each next list is held out again. All of the fourth list is measured, and of the three
before it the configurations for one and two GPUs. The fifth is of sharded weights and of experts, on two GPUs.

Each configuration trains whole steps on random data. The time is the median of the slowest rank. The memory is the peak of the
fullest rank after the first step, in which the compiler tries kernels. A lap is several steps without a wait between them, as in
training. The host's speed is measured along with them, since it differs between hosts of the same model and varies over time.
`predicted` takes it from the row.
"""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from course import config as configuration
from course.bench import gpu_pool, host_overhead_table, layout_harness, timing
from course.bench.command_line import command
from course.bench.gpu_pool import Row
from course.bench.results import FOLDER
from course.convert import reshard
from course.models import DiTConfig, GPTConfig, build_model
from course.parallel import build_mesh, joined
from course.planner import flops, hardware, peak_memory, step_time
from course.planner.rank_workload import workload_of
from course.planner.step_time import Time
from course.training.assemble import assemble
from course.training.run_log import memory_gb
from course.utils.atomic_files import write_json
from course.utils.errors import CourseError

SEEDS = {"heldout": 7, "heldout_2": 8, "heldout_3": 9, "heldout_4": 10, "heldout_5": 11}     # seed of each list
LAPS, LEAST = 5, 0.3                                 # laps, and least seconds per lap
# the axes that get each factor of two of the GPUs, one entry per configuration: all axes occur, alone and in pairs
AXES = {1: [""] * 12, 2: ["dp", "tp", "cp", "pp"] * 2,
        4: ["dp dp", "dp tp", "dp cp", "dp pp", "tp tp", "tp cp", "tp pp", "cp cp", "cp pp", "pp pp"]}
MEMORY = 90e9                                        # most rough bytes on a GPU; an H200 has 141e9
WORK = (5e12, 4e14)                                  # least and most model FLOPs per GPU in a step
MODELS: dict[str, dict[str, list[Any]]] = {
    "vit-base": {"model.grid": ["[176,352]", "[360,720]"], "model.dim": [384, 768, 1024], "model.depth": [6, 12, 18],
                 "model.heads": [8], "model.channels": [20], "model.patch": [8]},
    "gpt-124m": {"model.dim": [768, 1024, 1536, 2048], "model.depth": [8, 12, 24], "model.heads": [16],
                 "model.context": [1024, 2048, 4096], "model.mlp": ["gelu_tanh", "swiglu"], "model.norm": ["layer", "rms"],
                 "model.position": ["learned", "rotary"], "model.kv_heads": [0, 8], "model.loss_chunk": [0, 4096],
                 "model.tied": ["true", "false"]},
    "dit-xl": {"model.dim": [768, 1152, 1536], "model.depth": [8, 16, 28], "model.heads": [16],
               "model.latent": ["[4,32,32]", "[4,64,64]"], "model.patch": [2, 4], "optim.ema": [0, 0.9999]},
}
COMMON: dict[str, list[Any]] = {
    "train.global_batch": [4, 8, 16, 32, 64], "micro-batches": [1, 1, 2, 4], "precision": ["bf16", "bf16", "bf16", "tf32", "fp8"],
    "stream": ["wide", "narrow"], "compile": ["true", "true", "false"], "train.recompute": ["none", "none", "selective", "full"]}
LAYOUT: dict[str, list[Any]] = {
    "parallel.sp": ["true", "false"], "parallel.zero": ["true", "false"],
    "parallel.context": ["ring", "gather", "all_to_all"], "parallel.schedule": ["gpipe", "1f1b", "interleaved"]}
GRID: dict[str, Any] = {"axes": AXES, "models": MODELS, "common": COMMON, "layout": LAYOUT}
SHARDED: dict[str, Any] = GRID | {"axes": {2: ["dp"] * 8}, "layout": {
    "parallel.zero": [2, 3, 3], "parallel.reduce_in": ["float32", "matmul"],
    "parallel.reshard_after": ["forward", "backward", "step"]}}
EXPERTS: dict[str, Any] = GRID | {
    "axes": {2: ["dp", "dp ep", "tp", "cp ep", "dp", "dp ep"]},
    "models": {"gpt-moe-8x350m": {
        "model.dim": [768, 1024, 1536], "model.depth": [8, 12, 24], "model.heads": [16], "model.context": [1024, 2048],
        "model.mlp": ["gelu_tanh", "swiglu"], "model.norm": ["layer", "rms"], "model.experts": [4, 8, 16], "model.top_k": [1, 2],
        "model.expert_width": [0, 1024], "model.shared_experts": [0, 1], "model.moe_every": [1, 2]}},
    "common": COMMON | {"precision": ["bf16"] * 4 + ["tf32"]}, "layout": LAYOUT | {"parallel.zero": [0, 1, 3]}}
# of the lists that are not drawn from `GRID` alone
GRIDS = {"heldout_5": {"sharded weights": SHARDED, "experts": EXPERTS}}


def runs_as_recorded(config: configuration.Config) -> bool:
    """Whether the current code still runs a configuration as it was when the lists were measured.

    With tp > 1 three things have changed: a DiT's modulation, symmetric memory, and Triton kernels next to communication.
    """
    p = config.parallel
    return p.tp == 1 or not (p.symmetric or isinstance(config.model, DiTConfig) or config.kernels == "triton")


def draw(axes: str, generator: random.Random, grid: dict[str, Any] = GRID) -> tuple[str, list[str]]:
    """Draw (preset, settings) from a grid for axes such as "dp tp"; the result may not be `possible`."""
    preset = generator.choice(list(grid["models"]))
    parts = grid["models"][preset], grid["common"], grid["layout"]
    chosen = {key: generator.choice(values) for part in parts for key, values in part.items()}
    sizes = dict.fromkeys(("dp", "tp", "cp", "pp"), 1)
    for axis in axes.split():
        sizes[axis] = 2 * sizes.get(axis, 1)
    chosen |= {f"parallel.{axis}": size for axis, size in sizes.items()}
    chosen["train.micro_batch"] = chosen["train.global_batch"] // sizes["dp"] // chosen.pop("micro-batches")
    belongs = {"parallel.sp": "tp", "parallel.context": "cp", "parallel.schedule": "pp"}
    drop = [key for key, axis in belongs.items() if sizes[axis] == 1]
    if sizes["dp"] * sizes["cp"] == 1:
        drop.append("parallel.zero")
    if chosen.get("parallel.schedule") == "interleaved" and sizes["pp"] > 1:
        chosen["parallel.chunks"] = 2
    if chosen["precision"] == "tf32":
        drop.append("stream")                        # stream is a 16-bit option
    return preset, ["data.source=mock", *(f"{key}={value}" for key, value in chosen.items() if key not in drop)]


def rough_bytes(config: configuration.Config) -> float:
    """A GPU's memory within a factor of two: 16 bytes per parameter, 34 per token, feature and block, 6 per logit."""
    c: Any = config.model
    p = config.parallel
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build_model(c).parameters())
    samples = config.train.micro_batch * (p.pp if p.pp > 1 else 1)
    kept = {"none": 34, "selective": 22, "full": 4}[config.train.recompute] * (1 if config.precision != "tf32" else 2)
    if isinstance(c, GPTConfig) and c.experts:      # a token's choices take as much as so many MLPs, half of a block
        kept = kept * (1 + c.top_k) / 2
    activations = kept * samples * c.tokens * c.dim * c.depth / p.cp / p.tp / p.pp
    logits = 6 * config.train.micro_batch * c.tokens * c.vocab / p.tp / p.cp if isinstance(c, GPTConfig) else 0
    return 16 * parameters / p.tp / p.pp + activations + logits


def possible(preset: str, settings: list[str], gpus: int) -> bool:
    """Whether the library accepts a configuration, it fits, and a step is neither too short nor too long to measure."""
    try:
        # the default when the lists were drawn, refused by FP8
        config = configuration.load(preset, ["parallel.overlap=nccl", *settings])
        trial(config)
    except CourseError:
        return False
    p, t = config.parallel, config.train
    if t.micro_batch < 1 or t.global_batch % (p.dp * t.micro_batch) or config.model.depth % (p.pp * p.chunks):
        return False
    if p.pp > 1 and t.global_batch // p.dp // t.micro_batch < 2:
        return False                                 # with one micro-batch, a pipeline has nothing to overlap
    work = flops.step(config.model, t.global_batch) / gpus
    return WORK[0] <= work <= WORK[1] and rough_bytes(config) <= MEMORY


def trial(config: configuration.Config) -> None:
    """Shard the model for its layout without computing anything. Raises the errors that a run would raise."""
    size = reshard.ranks_of(config)
    reshard.owned(config, size - 1, size)


def listed(name: str) -> list[Row]:
    """Read the configurations of a list."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["configurations"]


def predicted(row: Row, plain_step: float = 0.0) -> Time:
    """The predicted step time of a configuration on H200s. plain_step: seconds of a plain step on the host, if measured."""
    local = workload_of(configuration.load(row["preset"], row["settings"]), hardware.load("h200"), row["gpus"])
    return step_time.time_of(replace(local, host=replace(local.host, plain_step=plain_step)) if plain_step else local)


def predicted_gb(row: Row) -> float:
    """The predicted peak GB that PyTorch allocates on a rank."""
    return peak_memory.predict(configuration.load(row["preset"], row["settings"])).allocated / 1e9


def drawn(name: str) -> list[Row]:
    """Draw a list: for each entry of its grids' axes the first possible configuration."""
    generator = random.Random(SEEDS[name])
    found: list[Row] = []
    for grid in GRIDS.get(name, {"": GRID}).values():
        for gpus, lines in grid["axes"].items():
            for axes in lines:
                preset, settings = draw(axes, generator, grid)
                while not possible(preset, settings, gpus):
                    preset, settings = draw(axes, generator, grid)
                number = sum(row["gpus"] == gpus for row in found)
                found.append({"name": f"{gpus}-{number:02d}", "gpus": gpus, "preset": preset, "settings": settings})
    return found


def measure(of: str, name: str) -> Row:
    """Train a configuration of a list in this process, one of its ranks: milliseconds, peak memory."""
    row = next(row for row in listed(of) if row["name"] == name)
    config = configuration.load(row["preset"], row["settings"])
    with joined("cuda") as world:
        training: Any = assemble(config, build_mesh(config.parallel, world))
        batch = training.model.example(config.train.global_batch // config.parallel.dp, world.device)
        training.step(batch)
        timing.wait(world.device)
        first = memory_gb(world.device)
        torch.cuda.reset_peak_memory_stats()
        runs: dict[str, Callable[[], object]] = {"step": partial(training.step, batch),
                                                 "plain": host_overhead_table.plain_step(world.device)}
        seconds = {name: median(laps) for name, laps in layout_harness.by_turns(runs, world, LAPS, LEAST).items()}
        peak = torch.tensor([memory_gb(world.device), first], device=world.device)
        if world.size > 1:
            dist.all_reduce(peak, dist.ReduceOp.MAX)
        steady, first = peak.tolist()
        rank, held = world.rank, timing.device_memory(world.device)
    return {"ms": 1e3 * seconds["step"], "plain_step": seconds["plain"], "memory_gb": steady, "first_gb": first, **held,
            "rank": rank}


def main(of: str, file: Path) -> None:
    """Measure what a file lacks of a list, each configuration on as many GPUs as it needs, and add the rows."""
    gpus = gpu_pool.gpus_of("python -m experiments.heldout", False)
    todo = listed(of)
    by_name = {row["name"]: row for row in todo}
    head = {**timing.machine(torch.device("cuda")), "command": f"python -m experiments.heldout {of} FILE",
            "meaning": f"whole training steps of the configurations of {of}.json: milliseconds, peak GB of the fullest rank; "
                       "plain_step: seconds of `host_overhead_table.plain_step`, measured by turns with them; predicted_ms, "
                       "predicted_gb: by the code that measured; used_gb: what rank 0's GPU holds in all at the end, "
                       "reserved_gb: what PyTorch holds of it"}
    rows = gpu_pool.Rows(file, head, [row["name"] for row in todo], "name")
    done = rows.resume("ms")
    left = [row for row in todo if row["name"] not in done]

    def run(name: str, group: str) -> Row:
        program = ["-m", "experiments.heldout", "run", of, name]
        if "," in group:
            program = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(group.split(','))}", *program]
        row = {"name": name, "date": head["date"], **gpu_pool.start(program, group, timeout=240)}
        if "ms" in row:                              # predicted by the code that measured
            about = by_name[name]
            row |= {"predicted_ms": 1e3 * predicted(about, row["plain_step"]).step, "predicted_gb": predicted_gb(about)}
        told = row.get("error") or f"{row['ms']:8.1f} ms {row['memory_gb']:6.1f} GB"
        print(f"{name} {told}", flush=True)
        return row

    for size in AXES:
        groups = [",".join(gpus[i:i + size]) for i in range(0, len(gpus) - size + 1, size)]
        if groups:
            gpu_pool.side_by_side([row["name"] for row in left if row["gpus"] == size], run, groups, rows.add)


if __name__ == "__main__":
    with command("LIST FILE, or draw LIST") as words:
        if words[0] == "draw":
            record = {"seed": SEEDS[words[1]], "grid": GRIDS.get(words[1], GRID), "configurations": drawn(words[1])}
            write_json(FOLDER / f"{words[1]}.json", record)
        elif words[0] == "run":
            measured = measure(words[1], words[2])
            if measured.pop("rank") == 0:
                print(json.dumps(measured))
        else:
            main(words[0], Path(words[1]))
