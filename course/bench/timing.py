"""Time operations on a CPU or GPU: medians after warmup."""

import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date

import torch

SETTLE = 3                                           # warmup calls


def seconds(run: Callable[[], object], device: torch.device, laps: int = 7, least: float = 0.05) -> float:
    """The median seconds of one call of `run`; each lap repeats it for at least `least` seconds and then waits once."""
    for _ in range(SETTLE):
        run()
    one = _lap(run, 1, device)
    calls = max(1, round(least / max(one, 1e-7)))
    return statistics.median(_lap(run, calls, device) for _ in range(laps))


def graphed_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Like `seconds`; on a GPU each call is replayed from a CUDA graph, without the time that its launches take."""
    if device.type == "cpu":
        return seconds(run, device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        for _ in range(SETTLE):
            run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return seconds(graph.replay, device)


def _lap(run: Callable[[], object], calls: int, device: torch.device) -> float:
    wait(device)
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    wait(device)
    return (time.perf_counter() - begin) / calls


def wait(device: torch.device) -> None:
    """Wait until the device is done: a GPU still works after the call that started it has returned."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_memory(device: torch.device) -> dict[str, float]:
    """GB that a GPU holds now: `used_gb` by all, `reserved_gb` by this process's PyTorch, used or not; {} on a CPU.

    The rest is the CUDA context, compiled code, and what libraries such as NCCL hold.
    """
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {"used_gb": (total - free) / 1e9, "reserved_gb": torch.cuda.memory_reserved(device) / 1e9}


def matmul(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of (m, k) @ (k, n) in `dtype`, into preallocated memory."""
    a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (k, n)))
    out = torch.empty(m, n, dtype=dtype, device=device)
    return seconds(lambda: torch.mm(a, b, out=out), device)


def copy(megabytes: float, device: torch.device) -> float:
    """Seconds of copying so many MB within the device's memory, which reads and writes each byte."""
    source = torch.ones(int(megabytes * 250_000), device=device)
    target = torch.empty_like(source)
    return seconds(lambda: target.copy_(source), device)


def ceilings(device: torch.device, largest: int) -> dict[str, float]:
    """The best rates that the device reaches: FLOP/s of a square matmul in each format, bytes/s of a copy.

    largest: the side of the matrices. The copy moves 64 MB on a CPU and 1 GB on a GPU, beyond any cache.
    """
    formats = {"fp32": torch.float32} | ({"bf16": torch.bfloat16} if device.type == "cuda" else {})
    rates = {f"matmul {name}": 2 * largest**3 / matmul(largest, largest, largest, kind, device) for name, kind in formats.items()}
    if device.type == "cuda":
        with tf32():
            rates["matmul tf32"] = 2 * largest**3 / matmul(largest, largest, largest, torch.float32, device)
    megabytes = 1000.0 if device.type == "cuda" else 64.0
    return rates | {"copy": 2e6 * megabytes / copy(megabytes, device)}


@contextmanager
def tf32() -> Iterator[None]:
    """Allow float32 matmuls inside the block to round their inputs to TF32's ten mantissa bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def machine(device: torch.device) -> dict[str, str]:
    """Describe the machine, versions and date of a measurement."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.processor() or platform.machine()} CPU"
    return {"hardware": name, "torch": torch.__version__, "cuda": str(torch.version.cuda), "python": platform.python_version(),
            "date": date.today().isoformat()}


def record_ceilings(device: torch.device) -> dict[str, object]:
    """Measure a device's ceilings, and points for its roofline: matmuls from small to large."""
    sides = (128, 256, 512, 1024, 2048, 4096, 8192) if device.type == "cuda" else (32, 64, 128, 256, 512, 1024)
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    squares = {str(n): 2 * n**3 / matmul(n, n, n, kind, device) for n in sides}
    return {**machine(device), "command": f"course bench ceilings --device {device.type}", "unit": "FLOP/s; copy: bytes/s",
            "ceilings": ceilings(device, sides[-1]), "matmul format": str(kind).removeprefix("torch."), "matmul": squares}
