"""Record a GPU's clock, power and energy during a measurement.

Long matmuls reach a GPU's power limit, and then the GPU lowers its clock: an H200 with nominal 1980 MHz trains a GPT below 1600.
Two GPUs of one model differ by a few percent, and so does one GPU between a cool start and a long run. So record the clock with
every speed that you want to compare. At the power limit, joules say more than seconds: they are what fewer bytes and fewer
operations save.
"""

import ctypes
import functools
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

ASKED = {"clocks.sm": "clock_mhz", "power.draw": "power_w", "power.limit": "power_limit_w"}
EVERY_MS = 100


@contextmanager
def clock_and_power(device: torch.device) -> Iterator[dict[str, float]]:
    """Query the driver ten times a second inside the block; at its end, fill the yielded dict with medians in MHz and W.

    The dict stays empty without an NVIDIA GPU or nvidia-smi, and lacks numbers that the driver does not report.
    """
    driver: dict[str, float] = {}
    asking = ask(device)
    try:
        yield driver
    finally:
        if asking is not None:
            asking.terminate()
            driver |= medians(asking.communicate()[0])


def ask(device: torch.device) -> subprocess.Popen[str] | None:
    """Start nvidia-smi, which prints a line per query; None without an NVIDIA GPU or nvidia-smi."""
    if device.type != "cuda":
        return None
    try:
        return subprocess.Popen(["nvidia-smi", "-i", uuid(device), f"--query-gpu={','.join(ASKED)}",
                                 "--format=csv,noheader,nounits", f"--loop-ms={EVERY_MS}"],
                                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8")
    except FileNotFoundError:
        return None


def uuid(device: torch.device) -> str:
    """The driver's name for a GPU: its indices ignore CUDA_VISIBLE_DEVICES."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


@contextmanager
def energy_used(device: torch.device) -> Iterator[dict[str, float]]:
    """At the end of the block, which waits for the GPU, fill the yielded dict with `joules`: what the board used meanwhile.

    The driver adds to its counter about ten times a second, so the block should take seconds. The dict stays empty without a
    GPU that counts.
    """
    used: dict[str, float] = {}
    begin = total_joules(device)
    yield used
    end = total_joules(device)
    if begin is not None and end is not None:
        used["joules"] = end - begin


def total_joules(device: torch.device) -> float | None:
    """Joules that a GPU's board has used since its driver was loaded; None if the driver does not say."""
    library = management_library() if device.type == "cuda" else None
    if library is None:
        return None
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    if library.nvmlDeviceGetHandleByUUID(uuid(device).encode(), ctypes.byref(handle)):
        return None
    if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
        return None
    return millijoules.value / 1e3


@functools.cache
def management_library() -> Any:
    """NVIDIA's management library (NVML), which comes with the driver; None without it."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library


def medians(said: str) -> dict[str, float]:
    """The median of each number over all lines, without truncated lines and values of [N/A]."""
    rows = [line.split(", ") for line in said.splitlines()]
    values_by_name: dict[str, float] = {}
    for place, name in enumerate(ASKED.values()):
        values = [float(row[place]) for row in rows if len(row) == len(ASKED) and row[place].replace(".", "", 1).isdigit()]
        if values:
            values_by_name[name] = median(values)
    return values_by_name
