"""Check that this machine is idle. Other programs slow a measurement down, and the number does not show it."""

import time

from course.utils.machine import OtherPrograms


def busy_cores(seconds: float = 0.5) -> tuple[float, int]:
    """(cores that other programs keep busy, on average over `seconds`; cores that this process may use)."""
    others = OtherPrograms()
    time.sleep(seconds)
    return others.busy_cores(), len(others.cores)


def report() -> None:
    """Print whether other programs are busy enough to spoil a measurement."""
    busy, cores = busy_cores()
    message = f"Other programs keep {busy:.1f} of {cores} cores busy: "
    if busy > max(0.5, cores / 20):
        print(message + "what you measure now comes out too slow. Close them, or run this cell again when they are done.")
    else:
        print(message + "quiet enough to measure.")
