"""Is this machine quiet? What is measured while others compute is too slow, and nothing in the number tells."""

import os
import time

import psutil


def busy_cores(seconds: float = 0.5) -> tuple[float, int]:
    """How many cores other programs kept busy, on average over so many seconds, and how many this process may use."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(psutil.cpu_count())
    psutil.cpu_percent(percpu=True)                  # from here on
    mine = time.process_time()
    time.sleep(seconds)
    percent = psutil.cpu_percent(percpu=True)
    busy = sum(percent[core] for core in cores if core < len(percent)) / 100
    return max(0.0, busy - (time.process_time() - mine) / seconds), len(cores)


def report() -> None:
    """Say whether other programs are busy enough to spoil a measurement."""
    busy, cores = busy_cores()
    message = f"Other programs keep {busy:.1f} of {cores} cores busy: "
    if busy > max(0.5, cores / 20):
        print(message + "what you measure now comes out too slow. Close them, or run this cell again when they are done.")
    else:
        print(message + "quiet enough to measure.")
