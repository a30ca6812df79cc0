"""Check before a run whether it fits the free memory, and suggest settings that fit if it does not or if memory runs out.

`peak_memory.py` predicts what a step needs. Free memory comes from the GPU, or from the machine and its control groups, which
limit containers and Slurm jobs. Since a prediction may be wrong, a run is refused only if a share of it (`SURE`) exceeds free
memory.
"""

import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import psutil
import torch

from course.config import Config
from course.config.schema import as_text
from course.config.validation import refusal
from course.models import build_model
from course.ops.number_formats import parameter_dtype
from course.parallel import Mesh
from course.parallel.agree import run_on_all
from course.planner import peak_memory
from course.planner.search_space import changed, get_value
from course.planner.why_infeasible import TERMS
from course.utils.errors import CourseError, is_out_of_memory

SURE = 0.75                                         # of the predicted tensor bytes: no run should need less
ON_CPU = 1.5                                        # CPU runs take up to this multiple of a GPU's activations
PROCESS = 512 * 2**20                               # bytes of a process on a CPU with nothing in it, by rule of thumb
OWN, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# files and keys of control groups (version 1, version 2): limit, usage, reclaimable parts of the usage
FIRST = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"
SECOND = "memory.max", "memory.current", "inactive_file", "active_file", "slab_reclaimable"


def check(config: Config, mesh: Mesh) -> None:
    """Raise `CourseError` on all ranks if a run cannot fit, with the nearest settings that should. All ranks must call it."""
    if not config.train.check_memory:
        return
    device = mesh.world.device
    hosts = run_on_all(mesh.all, socket.gethostname)
    ranks = hosts.count(socket.gethostname()) if device.type == "cpu" else 1          # ranks that share this memory
    config = with_dp(config, mesh)
    needs = min((peak_memory.of_rank(rank) for rank in peak_memory.ranks(config)), key=lambda one: one.allocated)
    run_on_all(mesh.all, lambda: refuse(config, needs, free(device), ranks, device))


def refuse(config: Config, needs: peak_memory.Memory, there: int, ranks: int, device: torch.device) -> None:
    """Raise `CourseError` if `ranks` ranks with these `needs` each cannot fit in `there` bytes."""
    if least_bytes(needs, device) * ranks <= there:
        return
    term = max((name for name in TERMS if name != "reserve"), key=lambda name: getattr(needs, name))
    shared = f" for its {ranks} processes here" if ranks > 1 else ""
    raise CourseError(f"{config.preset} needs about {needs.allocated * ranks / 1e9:.1f} GB{shared}, of which {TERMS[term]} are "
                      f"{getattr(needs, term) * ranks / 1e9:.1f}, and {there / 1e9:.1f} GB are free on {where(device)}: "
                      f"{cure(config, there / ranks, ranks, device)}; or try anyway with train.check_memory=false")


def least_bytes(needs: peak_memory.Memory, device: torch.device) -> float:
    """Bytes that a run needs in any case, given its prediction. A CPU needs no cuBLAS workspace."""
    return SURE * (needs.allocated - (peak_memory.CUBLAS if device.type == "cpu" else 0))


def check_weights(config: Config, device: torch.device) -> None:
    """Raise `CourseError` if the weights of a run's model alone do not fit, so that it cannot be loaded."""
    count = sum(parameter.numel() for parameter in build_model(config.model).parameters())
    needs, there = count * parameter_dtype(config.precision).itemsize, free(device)
    if config.train.check_memory and needs > there:
        raise CourseError(f"the model's weights take {needs / 1e9:.1f} GB, and {there / 1e9:.1f} GB are free on {where(device)}: "
                          "use a machine with more")


@contextmanager
def explained(config: Config, mesh: Mesh) -> Iterator[None]:
    """Wrap training: turn an out-of-memory error into a `CourseError` with settings that should fit."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        device, config = mesh.world.device, with_dp(config, mesh)
        before = needed(config, device)
        there = free(device)
        # the prediction was too low for this run, so suggest only settings predicted well below it
        raise CourseError(f"the memory of {where(device)} ran out (a step was predicted to take {before / 1e9:.1f} GB, and "
                          f"{there / 1e9:.1f} GB are free without this process's own): "
                          f"{cure(config, there, 1, device, 0.9 * before)}") from error


def with_dp(config: Config, mesh: Mesh) -> Config:
    """The configuration with the mesh's number of data-parallel ranks."""
    return replace(config, parallel=replace(config.parallel, dp=mesh.dp.size))


def where(device: torch.device) -> str:
    """Describe the device, for error messages."""
    return "this machine (or what its job or container may have)" if device.type == "cpu" else f"the GPU ({device})"


# ---- suggest settings

def cure(config: Config, room: float, ranks: int, device: torch.device, below: float = math.inf) -> str:
    """Advice: settings that should fit in `room` bytes per rank, fewer processes, or a smaller model. below: as in `nearest`."""
    if words := nearest(config, room, device, below):
        return f"set {words}"
    if ranks > 1 and (words := "as it is" if fits(config, room * ranks, device) else nearest(config, room * ranks, device)):
        return f"take fewer processes: one fits {'with ' * (words != 'as it is')}{words}"
    return ("no micro-batch and no recomputation makes it fit: take a smaller model (`course presets`), or spread it over GPUs "
            f"(`course plan {config.preset} --gpus 8`)")


def nearest(config: Config, room: float, device: torch.device, below: float = math.inf) -> str:
    """The fewest and smallest changes of settings that should make a run fit, as key=value; "" if there are none.

    below: an upper limit on the predicted bytes, for a run whose prediction was too low.
    """
    share = -(-config.train.global_batch // max(config.parallel.dp, 1))
    micro = min(config.train.micro_batch or share, share)
    again = ("none", "selective", "full")
    ways: dict[str, list[Any]] = {
        "train.micro_batch": [2**k for k in reversed(range(max(0, math.ceil(math.log2(micro))))) if 2**k < micro],
        "train.recompute": list(again[again.index(config.train.recompute) + 1:]),
        "parallel.zero": [*range(config.parallel.zero + 1, 4)] * (config.parallel.dp * config.parallel.cp > 1)}
    for count in range(1, len(ways) + 1):
        for keys in combinations(ways, count):
            for values in product(*(ways[key] for key in keys)):
                change = dict(zip(keys, values, strict=True))
                candidate = changed(config, change)
                if not refusal(candidate) and needed(candidate, device) <= min(room, below):
                    return " ".join(f"{key}={as_text(get_value(candidate, key))}" for key in change)
    return ""


def fits(config: Config, room: float, device: torch.device) -> bool:
    """Whether a run should fit in `room` bytes."""
    return needed(config, device) <= room


def needed(config: Config, device: torch.device) -> float:
    """Bytes that a run should need. On a CPU everything but weights, gradients and states counts `ON_CPU` times."""
    needs = peak_memory.predict(config)
    if device.type != "cpu":
        return needs.total
    fixed = needs.parameters + needs.gradients + needs.states + needs.average
    return fixed + ON_CPU * (needs.allocated - fixed + PROCESS)


# ---- free memory

def free(device: torch.device) -> int:
    """Bytes available to this process: free memory plus what it holds already."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    machine, swap = psutil.virtual_memory().available, psutil.swap_memory().free
    return min([machine, *in_groups()]) + swap + psutil.Process().memory_info().rss


def in_groups() -> Iterator[int]:
    """Yield the bytes left in each control group of this process, versions 1 and 2. Page cache counts as free."""
    try:
        lines = OWN.read_text(encoding="utf-8").splitlines()
    except OSError:                                  # not on Linux
        return
    for line in lines:
        number, kinds, path = [*line.split(":", 2), "", ""][:3]
        if number != "0" and "memory" not in kinds.split(","):
            continue
        root, names = (GROUPS, SECOND) if number == "0" else (GROUPS / "memory", FIRST)
        group = Path(os.path.normpath(f"/{path}"))
        for one in (group, *group.parents):          # in a container, the path may be the host's and not exist
            left = left_in(root / str(one).lstrip("/"), *names)
            if left is not None:
                yield left


def left_in(folder: Path, limit: str, used: str, *caches: str) -> int | None:
    """Bytes left in a control group; None if it has no limit or does not exist."""
    try:
        most, now = (folder / limit).read_text(encoding="utf-8").strip(), int((folder / used).read_text(encoding="utf-8"))
        if not most.isdecimal():                     # "max"
            return None
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(most) - now + sum(int(stat.get(name, 0)) for name in caches))
