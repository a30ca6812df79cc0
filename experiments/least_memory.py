"""How large a GPU does a run need? Test the planner's "fits": `python -m experiments.least_memory LIST FILE`.

PyTorch counts tensors. A GPU also holds what PyTorch's allocator keeps but does not use, and what it never sees: the CUDA
context, compiled code, workspaces of libraries. The planner adds a margin for both. Here configurations of a held-out list for
one GPU train under a limit on PyTorch's memory. Bisection finds the least limit under which whole steps run. With what others
hold, it is the least GPU that is large enough. The planner's total stands beside it.

`starts` says whether a fresh process also trains on a GPU of the size that the planner names, since the first step differs: the
compiler tries kernels.
"""

import gc
import json
from datetime import date
from pathlib import Path
from typing import Any

import torch

from course import config as configuration
from course.bench import gpu_pool, timing
from course.bench.command_line import command
from course.bench.gpu_pool import Row
from course.parallel import build_mesh, joined
from course.planner import peak_memory
from course.training.assemble import assemble
from experiments import heldout

STEPS, TRIALS = 3, 8                                 # steps under a limit; bisections: the interval shrinks to 1/256


def limit_memory(limit: float) -> None:
    """Let PyTorch's allocator hold at most so many bytes, and none that it does not use."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.get_device_properties(0).total_memory))


def runs(training: Any, batch: Any, limit: float) -> bool:
    """Whether whole steps run while PyTorch holds at most `limit` bytes."""
    limit_memory(limit)
    try:
        for _ in range(STEPS):
            training.step(batch)
        torch.cuda.synchronize()
        fits = True
    except torch.cuda.OutOfMemoryError:
        fits = False
    training.model.zero_grad()
    gc.collect()                                     # a traceback holds tensors
    return fits


def least(training: Any, batch: Any) -> float:
    """The least bytes that PyTorch must be allowed to hold for whole steps."""
    torch.cuda.empty_cache()
    low, high = float(torch.cuda.memory_allocated()), float(torch.cuda.max_memory_reserved())
    for _ in range(TRIALS):
        middle = (low + high) / 2
        low, high = (low, middle) if runs(training, batch, middle) else (middle, high)
    return high


def begun(row: Row) -> tuple[Any, Any, torch.device]:
    """A configuration's training, with a batch, after its first steps."""
    config = configuration.load(row["preset"], row["settings"])
    with joined("cuda") as world:
        training: Any = assemble(config, build_mesh(config.parallel, world))
        batch = training.model.example(config.train.global_batch, world.device)
        for _ in range(STEPS):
            training.step(batch)
        timing.wait(world.device)
        return training, batch, world.device


def measure(row: Row) -> Row:
    """GB: least that PyTorch must hold; its peak of tensors; what others hold on the GPU meanwhile."""
    training, batch, device = begun(row)
    found = timing.device_memory(device)
    peak = torch.cuda.max_memory_allocated() / 1e9
    return {"least_gb": least(training, batch) / 1e9, "memory_gb": peak, "others_gb": found["used_gb"] - found["reserved_gb"]}


def start(row: Row, others: float) -> Row:
    """Whether a fresh process trains on a GPU as large as the planner's total, of which others hold `others` GB."""
    limit_memory(1e9 * (planned(row)["planned_gb"] - others))
    try:
        begun(row)
    except torch.cuda.OutOfMemoryError as error:
        return {"starts": False, "said": str(error).splitlines()[0][:200]}
    return {"starts": True}


def planned(row: Row) -> Row:
    """GB that the planner predicts: all that the GPU must hold, and the tensors alone."""
    found = peak_memory.predict(configuration.load(row["preset"], row["settings"]))
    return {"planned_gb": found.total / 1e9, "planned_tensors_gb": found.allocated / 1e9}


def configurations(of: str) -> dict[str, Row]:
    """A list's configurations for one GPU, by name."""
    return {row["name"]: row for row in heldout.listed(of) if row["gpus"] == 1}


def run_one(of: str, name: str, gpu: str) -> Row:
    """Measure one configuration in processes of its own."""
    program = ["-m", "experiments.least_memory"]
    row = {"name": name, "date": date.today().isoformat(), **gpu_pool.start([*program, "measure", of, name], gpu, timeout=240)}
    if "least_gb" in row:
        row |= planned(configurations(of)[name])
        row |= gpu_pool.start([*program, "start", of, name, str(row["others_gb"])], gpu, timeout=240)
    return row


def main(of: str, file: Path) -> None:
    """Measure what a file lacks of a list's configurations for one GPU, side by side on all GPUs, and add the rows."""
    gpus = gpu_pool.gpus_of("python -m experiments.least_memory", False)
    names = list(configurations(of))
    head = {**timing.machine(torch.device("cuda")), "command": f"python -m experiments.least_memory {of} FILE",
            "meaning": f"configurations of {of}.json for one GPU. least_gb: the least memory of PyTorch's allocator with which "
                       "whole steps run; memory_gb: its peak of tensors; others_gb: what the GPU holds besides; planned_gb: "
                       "what the planner says that the GPU must hold; starts: whether a fresh process trains on a GPU of that "
                       "size"}
    rows = gpu_pool.Rows(file, head, names, "name")

    def done(row: Row) -> None:
        rows.add(row)
        print(json.dumps(row), flush=True)

    finished = rows.resume("starts")
    gpu_pool.side_by_side([name for name in names if name not in finished], lambda name, gpu: run_one(of, name, gpu), gpus, done)


if __name__ == "__main__":
    with command("LIST FILE", least=2) as words:
        if words[0] == "measure":
            print(json.dumps(measure(configurations(words[1])[words[2]])))
        elif words[0] == "start":
            print(json.dumps(start(configurations(words[1])[words[2]], float(words[3]))))
        else:
            main(words[0], Path(words[1]))
