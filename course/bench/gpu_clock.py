"""Record a GPU's clock and power during a measurement.

Long matmuls reach a GPU's power limit, and then the GPU lowers its clock: an H200 with nominal 1980 MHz trains a GPT below 1600.
Two GPUs of one model differ by a few percent, and so does one GPU between a cool start and a long run. So record the clock with
every speed that you want to compare.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

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
    gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"        # the driver's indices ignore CUDA_VISIBLE_DEVICES
    try:
        return subprocess.Popen(["nvidia-smi", "-i", gpu, f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits",
                                 f"--loop-ms={EVERY_MS}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8")
    except FileNotFoundError:
        return None


def medians(said: str) -> dict[str, float]:
    """The median of each number over all lines, without truncated lines and values of [N/A]."""
    rows = [line.split(", ") for line in said.splitlines()]
    values_by_name: dict[str, float] = {}
    for place, name in enumerate(ASKED.values()):
        values = [float(row[place]) for row in rows if len(row) == len(ASKED) and row[place].replace(".", "", 1).isdigit()]
        if values:
            values_by_name[name] = median(values)
    return values_by_name
