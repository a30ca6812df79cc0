"""Choose what `parallel.overlap=auto` takes: symmetric memory where the GPUs allow it, else NCCL.

Symmetric memory is faster in all recorded steps that keep the GPU busy (bench/results/tp_h200.json, symmetric_2xh100.json). It
requires that the ranks of every tensor-parallel group share a node and reach each other's memory. All ranks tell each other where
they are and which GPUs they reach, so all make the same choice. Then every group makes a small buffer, because a driver or a
container may forbid what the hardware allows.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from course.parallel.agree import run_on_all
from course.parallel.mesh import Axis, Mesh, node
from course.parallel.tensor_parallel import symmetric_memory
from course.utils.errors import CourseError

if TYPE_CHECKING:
    from course.config import Parallel


@dataclass(frozen=True)
class Overlap:
    """How the linears of sequence parallelism communicate, the same on all ranks."""

    how: str                                        # none, nccl or symmetric
    why: str = ""                                   # the reason for the choice; "" if the configuration says how


NO_OVERLAP = Overlap("none")


@dataclass(frozen=True)
class Place:
    """Where a rank computes."""

    node: str                                       # its name
    gpu: str                                        # UUID of its GPU
    reached: frozenset[str]                         # UUIDs of the other GPUs whose memory this GPU reads and writes


def choose_overlap(mesh: Mesh, settings: "Parallel") -> Overlap:
    """The configured overlap, or for `auto` the fastest that these GPUs allow. All ranks must call it."""
    if not settings.overlapped:
        return NO_OVERLAP
    if settings.overlap != "auto":
        return Overlap(settings.overlap)
    if mesh.world.device.type != "cuda":
        return Overlap("nccl", "there are no GPUs, so no symmetric memory")
    lines, places = mesh.lines("tp"), run_on_all(mesh.all, lambda: place_of(mesh.world.device))
    why = obstacle(lines, places)
    if not why:                                     # alike on all ranks, so all make a buffer or none does
        why = next(filter(None, run_on_all(mesh.all, lambda: failure(mesh.tp))), "")
    if why:
        return Overlap("nccl", f"no symmetric memory, because {why}")
    return Overlap("symmetric", f"the {len(lines[0])} GPUs of each tensor-parallel group reach each other's memory")


def place_of(device: torch.device) -> Place:
    """Where this rank computes. A process asks only about GPUs that it sees."""
    here = torch.cuda.current_device() if device.index is None else device.index
    others = [gpu for gpu in range(torch.cuda.device_count()) if gpu != here and torch.cuda.can_device_access_peer(here, gpu)]
    return Place(node(), uuid_of(here), frozenset(map(uuid_of, others)))


def uuid_of(gpu: int) -> str:
    """The UUID of a GPU: processes may number the GPUs of a node differently."""
    return str(torch.cuda.get_device_properties(gpu).uuid)


def obstacle(lines: list[list[int]], places: list[Place]) -> str:
    """Why some tensor-parallel group cannot share memory, as the end of a sentence, or "".

    lines: the ranks of each group. places: of all ranks.
    """
    for line in lines:
        for rank in line[1:]:
            if places[rank].node != places[line[0]].node:
                return (f"ranks {line[0]} and {rank} of a tensor-parallel group are on different nodes "
                        f"({places[line[0]].node}, {places[rank].node})")
    for line in lines:
        for rank in line:
            for other in line:
                if other != rank and places[other].gpu not in places[rank].reached:
                    return f"the GPU of rank {rank} does not reach the memory of rank {other}'s, or its process does not see it"
    return ""


def failure(axis: Axis) -> str:
    """Make a small buffer of an axis's ranks; returns why that fails, as the end of a sentence, or "".

    The buffer stays: the other ranks map it.
    """
    try:
        symmetric_memory.double_buffer("check", (axis.size,), torch.float32, axis)
    except (CourseError, ImportError) as error:
        return str(error.__cause__ or error).splitlines()[0]
    return ""
