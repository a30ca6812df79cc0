"""What this process may use of the machine that it runs on."""

import os


def cores() -> int:
    """Processor cores: those that it is bound to, where the system says it (Linux; a Slurm job's), else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
