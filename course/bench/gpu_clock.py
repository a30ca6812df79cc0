"""What a GPU's driver says while something runs: its clock, and the power that it draws.

Long matrix multiplications draw all the power that a GPU may, and then its clock goes down until they no longer do: an H200
promises 1980 MHz, and trains a GPT at less than 1600. Two GPUs of one make differ there by percents, and so does one of them
from a cool start to a long run. So a speed that is to be compared with another one stands beside its clock.
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
    """Inside the block the driver is asked ten times a second; at its end the dict has the medians, in MHz and W.

    It stays empty without an NVIDIA GPU, or where nvidia-smi is missing or does not know a number.
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
    """A process that prints a line each time."""
    if device.type != "cuda":
        return None
    gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"        # the driver's own numbers know no CUDA_VISIBLE_DEVICES
    try:
        return subprocess.Popen(["nvidia-smi", "-i", gpu, f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits",
                                 f"--loop-ms={EVERY_MS}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8")
    except FileNotFoundError:
        return None


def medians(said: str) -> dict[str, float]:
    """Of each number over the lines; a line that is cut off, and what the driver calls [N/A], count for nothing."""
    rows = [line.split(", ") for line in said.splitlines()]
    values_by_name: dict[str, float] = {}
    for place, name in enumerate(ASKED.values()):
        values = [float(row[place]) for row in rows if len(row) == len(ASKED) and row[place].replace(".", "", 1).isdigit()]
        if values:
            values_by_name[name] = median(values)
    return values_by_name
