"""How much memory does NCCL hold for each communicator? `python -m experiments.communicators FILE`, on two GPUs or more.

PyTorch makes an NCCL communicator for each process group, and `torch.cuda.memory_reserved` does not see its buffers. Each
layout trains a small GPT for some steps, in processes of its own. `others_gb` is what the fullest GPU holds besides PyTorch's
memory, and `alone` is the same model on one GPU.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from course import config as configuration
from course.bench import gpu_pool, timing
from course.bench.command_line import command
from course.bench.gpu_pool import Row
from course.parallel import build_mesh, joined
from course.planner import peak_memory
from course.training.assemble import assemble

STEPS = 3
LAYOUTS = {
    "alone": [], "dp": ["parallel.dp=2"], "zero 1": ["parallel.dp=2", "parallel.zero=1"],
    "zero 3": ["parallel.dp=2", "parallel.zero=3"], "tp": ["parallel.tp=2", "parallel.sp=false"],
    "sp": ["parallel.tp=2", "parallel.sp=true", "parallel.overlap=nccl"],
    "ring": ["parallel.cp=2", "parallel.context=ring"], "all-to-all": ["parallel.cp=2", "parallel.context=all_to_all"],
    "pp": ["parallel.pp=2", "parallel.schedule=1f1b"], "interleaved": ["parallel.pp=2", "parallel.schedule=interleaved",
                                                                       "parallel.chunks=2"],
    "ep": ["parallel.dp=2", "parallel.ep=2", "model.experts=4", "model.top_k=2"]}


def config_of(layout: str) -> configuration.Config:
    """A small GPT in a layout, four samples of 256 tokens a step in bf16."""
    return configuration.load("gpt-124m", [
        "data.source=mock", "parallel.dp=1", "parallel.tp=1", "model.depth=4", "model.context=256", "train.global_batch=4",
        "train.micro_batch=1", "precision=bf16", "compile=false", *LAYOUTS[layout]])


def measure(layout: str) -> Row:
    """GB that the fullest GPU holds outside PyTorch after a few steps, and the process groups of a rank."""
    config = config_of(layout)
    with joined("cuda") as world:
        training: Any = assemble(config, build_mesh(config.parallel, world))
        batch = training.model.example(4 // config.parallel.dp, world.device)
        for _ in range(STEPS):
            training.step(batch)
        timing.wait(world.device)
        held = timing.device_memory(world.device)
        others = torch.tensor(held["used_gb"] - held["reserved_gb"], device=world.device)
        made = len(distributed_c10d._world.pg_map)
        if world.size > 1:
            dist.all_reduce(others, dist.ReduceOp.MAX)
        return {"others_gb": others.item(), "groups": made, "rank": world.rank}


def main(file: Path) -> None:
    """Measure each layout, and write the rows."""
    gpus = gpu_pool.gpus_of("python -m experiments.communicators", False)
    head = {**timing.machine(torch.device("cuda")), "command": "python -m experiments.communicators FILE",
            "meaning": "a GPT of 4 blocks, trained in bf16. others_gb: what the fullest GPU holds besides PyTorch's memory; "
                       "groups: process groups of a rank; planned: as the planner counts them"}
    rows = gpu_pool.Rows(file, head, list(LAYOUTS), "layout")
    done = rows.resume("others_gb")
    for layout in (layout for layout in LAYOUTS if layout not in done):
        program = ["-m", "experiments.communicators", "measure", layout]
        if layout != "alone":
            program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program]
        row = {"layout": layout, **gpu_pool.start(program, ",".join(gpus[:1 + (layout != "alone")]), timeout=120)}
        row["planned"] = peak_memory.communicators(config_of(layout), 0) + peak_memory.wires(config_of(layout), 0)
        rows.add(row)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    with command("FILE") as words:
        if words[0] == "measure":
            measured = measure(words[1])
            if measured.pop("rank") == 0:
                print(json.dumps(measured))
        else:
            main(Path(words[0]))
