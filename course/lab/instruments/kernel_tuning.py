"""Try a Triton kernel's configurations one after another, and read the compiler's report on each."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from course.bench import timing
from course.ops.triton_language import triton

REGISTERS, THREADS, PROGRAMS = 65536, 2048, 32       # of one multiprocessor of a Hopper GPU
SHARED, SHARED_RESERVED = 228 * 1024, 1024           # bytes; a program takes 1 KB besides its own
Configuration = TypeVar("Configuration")


def compiler_report(compiled: Any) -> dict[str, Any]:
    """Registers and spilled registers of a thread, shared memory, and how many programs a multiprocessor has room for.

    compiled: what a launch returned; {} for None, which an interpreted one returns.
    """
    if compiled is None:
        return {}
    compiled._init_handles()
    threads = 32 * compiled.metadata.num_warps
    per_thread = -(-compiled.n_regs // 8) * 8                           # a thread gets registers in eights
    room = {"registers": REGISTERS // (per_thread * threads),
            "shared memory": SHARED // (compiled.metadata.shared + SHARED_RESERVED),
            "threads": min(THREADS // threads, PROGRAMS)}
    limit = min(room, key=lambda name: room[name])
    return {"registers": compiled.n_regs, "spills": compiled.n_spills, "shared_kb": compiled.metadata.shared / 1024,
            "programs_per_sm": room[limit], "limited_by": limit}


def tune(launch: Callable[[Configuration], Any], candidates: Sequence[Configuration],
         device: torch.device) -> dict[Configuration, dict[str, Any]]:
    """Of each configuration its "seconds" and the compiler's report; or an "error" if a GPU has too little room for it.

    `launch(configuration)` runs the kernel and returns what the launch returned. This is what `triton.autotune` does, but it
    keeps the times.
    """
    tried: dict[Configuration, dict[str, Any]] = {}
    for configuration in candidates:
        try:
            report = compiler_report(launch(configuration))
            seconds = timing.seconds(partial(launch, configuration), device, laps=5)
            tried[configuration] = {"seconds": seconds} | report
        except triton.runtime.errors.OutOfResources as error:
            tried[configuration] = {"error": str(error)}
    return tried


def fastest(tried: dict[Configuration, dict[str, Any]]) -> Configuration:
    """The configuration with the fewest seconds."""
    return min((one for one in tried if "seconds" in tried[one]), key=lambda one: tried[one]["seconds"])
