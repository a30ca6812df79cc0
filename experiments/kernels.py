"""How fast are lesson 19's kernels between matmuls? `python -m experiments.kernels FILE` on one GPU; --small tries it on a CPU.

A copy, GELU(x + bias), softmax, residual add with LayerNorm, and the backward pass of that, in bf16: the lesson's kernels,
PyTorch's, those that torch.compile generates, and the library's. The smallest matrices fit into the GPU's cache, and the others
do not. Timed in a CUDA graph, to exclude launch overhead. The error of each result is relative to PyTorch's.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from course.bench import timing
from course.bench.command_line import command
from course.bench.gpu_clock import clock_and_power
from course.lab.instruments import kernel_speed
from course.lab.instruments.kernel_speed import Call
from course.ops.triton_language import triton
from course.parallel import joined
from course.utils.atomic_files import write_json

SIZES = ((4096, 1024), (65536, 1152), (65536, 4096))                    # rows, columns


def error(mine: Call, other: Call) -> float:
    """The largest relative difference of a result from another's, in the 2-norm."""
    pairs = zip(mine(), other(), strict=True)
    return max(((a.reshape(b.shape).double() - b.double()).norm() / b.double().norm()).item() for a, b in pairs)


def measure(device: torch.device, small: bool) -> list[dict[str, Any]]:
    """Measure each computation at each size."""
    rows = []
    for R, C in ((40, 48),) if small else SIZES:
        for name, make in kernel_speed.MATRIX_WORK.items():
            torch.manual_seed(0)
            torch._dynamo.reset()
            work = make(R, C, device, partial(torch.compile, backend="aot_eager" if small else "inductor"))
            for who, call in work.calls.items():
                difference = error(call, work.calls["PyTorch"])
                seconds = timing.graphed_seconds(call, device)
                rows.append({"kernel": name, "who": who, "rows": R, "columns": C, "ms": 1e3 * seconds,
                             "gb_per_s": work.rate(seconds), "error": difference})
                print(f"{name:18s} {R} x {C} {who:9s} {1e3 * seconds:8.4f} ms {work.rate(seconds):6.0f} GB/s, "
                      f"error {difference:.1e}", flush=True)
            del work
    return rows


def main(file: Path, small: bool) -> None:
    """Measure and write the rows as JSON."""
    with joined("cpu" if small else "auto") as world:
        with clock_and_power(world.device) as clock:
            rows = measure(world.device, small)
        found = {**timing.machine(world.device), "triton": triton.__version__, **clock,
                 "command": "python -m experiments.kernels FILE" + " --small" * small,
                 "meaning": "kernels of lesson 19 in bf16, in a CUDA graph; gb_per_s: the fewest bytes to read and write, per "
                            "second; error: relative difference from PyTorch's result; who: lesson, PyTorch (eager), compiled "
                            "(torch.compile), library (course.ops; its GELU takes a sum with the bias)",
                 "rows": rows}
    write_json(file, found)


if __name__ == "__main__":
    with command("FILE [--small]") as words:
        main(Path(words[0]), "--small" in sys.argv)
