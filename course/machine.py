"""This machine, as its processes see it."""

import os
import sys
from contextlib import suppress


def cores() -> int:
    """Processor cores: those that it is bound to, where the system says it (Linux; a Slurm job's), else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> str:
    """How busy it is, in half a sentence."""
    import psutil

    memory = psutil.virtual_memory()
    return (f"this machine has a load of {os.getloadavg()[0]:.1f} on {cores()} cores, and {memory.available / 1e9:.1f} of "
            f"{memory.total / 1e9:.1f} GB of memory are free")


def end_with_parent() -> None:
    """On Linux, have the kernel kill this process when the thread that started it ends, even while this one is stopped."""
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)   # PR_SET_PDEATHSIG, SIGKILL
