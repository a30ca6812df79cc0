"""Check that this machine is idle. Other programs slow a measurement down, and the number does not show it."""

import os
import time

import psutil


def busy_cores(seconds: float = 0.5) -> tuple[float, int]:
    """(cores that other programs keep busy, on average over `seconds`; cores that this process may use)."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(psutil.cpu_count())
    psutil.cpu_percent(percpu=True)                  # starts the interval
    mine = time.process_time()
    time.sleep(seconds)
    percent = psutil.cpu_percent(percpu=True)
    busy = sum(percent[core] for core in cores if core < len(percent)) / 100
    return max(0.0, busy - (time.process_time() - mine) / seconds), len(cores)


def report() -> None:
    """Print whether other programs are busy enough to spoil a measurement."""
    busy, cores = busy_cores()
    message = f"Other programs keep {busy:.1f} of {cores} cores busy: "
    if busy > max(0.5, cores / 20):
        print(message + "what you measure now comes out too slow. Close them, or run this cell again when they are done.")
    else:
        print(message + "quiet enough to measure.")
