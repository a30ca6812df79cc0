"""Predict the time of the kernels of a training step on a GPU, from a measured table or from a roofline.

A table is a file of `course bench kernels` (course/bench/kernel_table.py): seconds on grids of shapes. This module converts them
to *efficiencies*, FLOP/s over the peak or bytes/s over the memory bandwidth, which vary slowly between points. Efficiency is
interpolated linearly in the logarithm of each size, and constant beyond the grid.

Hardware without its own table uses the H200's efficiencies with its own peaks and bandwidth. Kernels scale with these roughly,
and well within a generation of GPUs. Without any table, the constants below apply.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from course.planner.collectives import Curve
from course.planner.hardware import RESULTS, Hardware, load, table_file
from course.utils.errors import CourseError

REFERENCE = ("h200", "kernels_h200.json")            # stands for hardware without a table

# minimum seconds of a kernel: 734 mostly tiny kernels of a graph took 3.3 ms (results/vit_h200.json, "one sample: compiled, in a
# graph")
LEAST = 3e-6
# seconds of a kernel on a few thousand numbers, and of the gap after it: in the step of GPT 124M with one sample in a graph
# (`profile` in results/gpt_h200.json), 150 of 586 took 1.1 each, the gaps between all 0.5, and sums of partial sums 3.8
TINY_KERNEL = 1.8e-6

# Efficiencies of an H200, used without a table. Matmuls: sustained rates of layers of width 4096 in results/fp8_h200.json (bf16
# 660 to 690 of 989 TFLOP/s, FP8 1240 to 1310 of 1979; short runs before the clock falls reach 750 to 800, beginning_h200.json);
# squares in results/ceilings_h200.json (TF32 332 of 495, fp32 51 of 67). Operands without reuse are bound by the copy rate.
MATMUL = {"bf16": 0.68, "fp16": 0.68, "fp8": 0.64, "tf32": 0.67, "fp32": 0.76}
# Memory-bound kernels, bytes/s over the nominal bandwidth: copies 4.26 of 4.8 TB/s (ceilings_h200.json), the others from kernels
# in results/profile_h200.json, 64,800 tokens of width 384 (bytes follow from the shapes):
#   fused        compiled: GELU forward 2.6 TB/s, backward 2.9, LayerNorm with sums 2.5 to 3
#   elementwise  PyTorch: sums of two formats, 2.4 TB/s
#   norm         LayerNorm forward 1.5 TB/s; norm_back: gradient of its input; columns: sums over tokens, for the gradients of
#                biases and of norms' weights, 0.9 and 1.6 TB/s
#   shuffle      concatenation and transposition, 1.0 to 1.3 TB/s
#   adam         PyTorch's fused Adam, 85 million parameters in 0.80 ms at 28 bytes
#   cast         FP8's cast into both memory orders, 3.5 TB/s (fp8_h200.json)
MEMORY = {"copy": 0.88, "fused": 0.55, "elementwise": 0.50, "norm": 0.31, "norm_back": 0.40, "columns": 0.25, "shuffle": 0.25,
          "adam": 0.62, "cast": 0.75}
# Attention in 16 bits by cuDNN. A score costs head_dim products, padded to a multiple of 64, and one exponential. Recorded in
# results/beginning_h200.json: 560 TFLOP/s at head_dim 128 and 16,384 tokens or more, 411 at 64 (308 at 48, padded to 64). Causal
# attention computes whole blocks on the diagonal: 512 / tokens more time (274, 444, 549 TFLOP/s at 1024, 2048, 32,768 tokens).
EXPONENTIAL = 92.0                                   # cost of one exponential, in numbers of a head
ATTENTION = 0.97                                     # of the peak, without exponentials
DIAGONAL = 512
# Speed of other backends over cuDNN's (beginning_h200.json, six shapes: 0.58 to 0.72 and 0.27 to 0.35). PyTorch's flash attention
# is written for Ampere: there it counts as cuDNN does on Hopper.
BACKENDS = {"default": 1.0, "cudnn": 1.0, "triton": 1.0, "flash": 0.61, "efficient": 0.28}
# batched matmuls with head_dim as one side, over the peak: assumed half of large matmuls
UNFUSED = 0.35
# float32 attention is PyTorch's memory-efficient kernel: 26 TFLOP/s of TF32's 495 (profile_h200.json, 16 samples, tf32).
ATTENTION32 = 0.053


@dataclass(frozen=True)
class Grid:
    """Values on a grid of sizes. axes: the sizes of each dim, increasing; values: flattened, the last dim fastest."""

    axes: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]
    known: dict[tuple[float, ...], float] = field(default_factory=dict, compare=False, repr=False)      # cache of `at`

    def at(self, point: tuple[float, ...]) -> float:
        """The value at a point: multilinear in the logarithms, constant beyond the grid.

        Cached: a search asks half a million times for two thousand points.
        """
        if point not in self.known:
            self.known[point] = self.between(point)
        return self.known[point]

    def between(self, point: tuple[float, ...]) -> float:
        """Interpolate the value at a point."""
        corners = [(0, 1.0)]                        # (index, weight), dim after dim
        for axis, x in zip(self.axes, point, strict=True):
            low, share = place(axis, x)
            corners = [(index * len(axis) + low + step, weight * part) for index, weight in corners
                       for step, part in ((0, 1 - share), (1, share)) if part]
        return sum(weight * self.values[index] for index, weight in corners)


def place(axis: Sequence[float], x: float) -> tuple[int, float]:
    """(index of the axis point at or below a size, fraction of the way to the next point), in logarithms."""
    if x <= axis[0]:
        return 0, 0.0
    at = bisect_right(axis, x) - 1
    if at == len(axis) - 1:
        return at, 0.0
    return at, math.log(x / axis[at]) / math.log(axis[at + 1] / axis[at])


# grids of compiled norms in a table (kernel_table.norm_grids)
NORMS = ("forward", "backward", "forward ada", "backward ada")
# grids of attention, PyTorch's and in Triton
ATTENTION_GRIDS = ("forward", "backward", "forward causal", "backward causal")


@dataclass(frozen=True)
class Kernels:
    """The kernels of a GPU; methods return seconds. grids: kind of kernel -> efficiencies; curves: measured all-reduces."""

    hardware: Hardware
    grids: Mapping[str, Grid]
    curves: tuple[tuple[int, Curve], ...] = ()

    def matmul(self, m: float, k: float, n: float, precision: str) -> float:
        """Seconds of (m, k) @ (k, n): 2·m·k·n FLOPs over peak and efficiency, or its bytes over the copy rate if longer."""
        peak = self.hardware.peak(precision)
        grid = self.grids.get(f"matmul {precision}") or self.grids.get(f"matmul {SAME.get(precision)}")
        share = grid.at((m, k, n)) if grid else MATMUL[precision]
        wide = BYTES[precision]
        moved = wide * (m * k + k * n) + max(2, wide) * m * n
        return max(2 * m * k * n / (share * peak), moved / (MEMORY["copy"] * self.hardware.bandwidth), LEAST)

    def grouped(self, groups: float, m: float, k: float, n: float, precision: str) -> float:
        """Seconds of so many products (m, k) @ (k, n).

        In bf16 they are one kernel, with the efficiency of one matmul of all rows (assumed, not measured). In other formats they
        follow one another."""
        if precision != "bf16":
            return groups * self.matmul(m, k, n, precision)
        moved = 2 * groups * (m * k + k * n + m * n)
        return max(self.matmul(groups * m, k, n, precision), moved / (MEMORY["copy"] * self.hardware.bandwidth))

    def attention(self, heads: float, queries: float, keys: float, width: float, causal: bool, precision: str,
                  backend: str = "default", backward: bool = False) -> float:
        """Seconds of attention with `heads` = batch x heads and so many queries and keys of `width` numbers.

        FLOPs per head: 4·queries·keys·width forward, 10 backward (scores are recomputed), half of these if causal. Backends that
        keep the scores always compute all of them, and take 8 backward. These are "math", PyTorch's in 32 bits, and "unfused",
        16-bit matmuls around a softmax kernel, as in Megatron-LM of 2021.
        """
        if backend in ("math", "unfused"):
            kind = ("tf32" if "tf32" in self.hardware.peaks else "fp32") if backend == "math" else precision
            number = heads * queries * keys
            return number * width * (8 if backward else 4) / (UNFUSED * self.hardware.peak(kind)) + self.scores(
                number * BYTES[kind], backward)
        work = (10 if backward else 4) * heads * queries * keys * width * (0.5 if causal else 1.0)
        slower = 1.0 if backend == "flash" and "fp8" not in self.hardware.peaks else BACKENDS[backend]
        which = f"attention {'backward' if backward else 'forward'}{' causal' * causal}"
        if backend == "triton" and f"{which} in Triton" in self.grids:
            which += " in Triton"
        if precision in ("fp32", "tf32"):
            tensor, grid = self.hardware.peaks.get("tf32", self.hardware.peak(precision)), self.grids.get(f"{which} 32")
            share = grid.at((heads, math.sqrt(queries * keys), width)) if grid else ATTENTION32
            return max(work / (share * tensor), LEAST)
        grid = self.grids.get(which)
        share = (grid.at((heads, math.sqrt(queries * keys), width)) if grid else
                 attention_share(math.sqrt(queries * keys), width, causal))
        return max(work / (share * slower * self.hardware.peak(precision)), LEAST)

    def scores(self, size: float, backward: bool) -> float:
        """Seconds in which unfused attention moves `size` bytes of scores 6 times forward, 7 times backward.

        Forward: a matmul writes them, mask and softmax each read and write them, a matmul reads them. Backward: the gradient is
        written, transformed and read twice, and the softmax output is read twice."""
        return self.memory("elementwise", size * (7 if backward else 6))

    def memory(self, kind: str, size: float) -> float:
        """Seconds of a memory-bound kernel that reads and writes `size` bytes in all."""
        if size <= 0:
            return 0.0
        grid = self.grids.get(kind)
        if grid:
            return max(LEAST, size / (grid.at((size,)) * self.hardware.bandwidth))
        return LEAST + size / (MEMORY[kind] * self.hardware.bandwidth)

    def norm(self, sizes: Sequence[float], width: float, ada: bool, backward: bool) -> float:
        """Seconds of a compiled residual sum and norm over rows of `width` numbers. ada: with DiT's gate, scale and shift.

        sizes: bytes of each kernel. The measured grid takes their sum and the width. Without a grid, or below its smallest size,
        the kernels run one after another at the rate of other compiled kernels.
        """
        grid = self.grids.get(f"norms {'backward' if backward else 'forward'}{' ada' * ada}")
        size = sum(sizes)
        if grid is None or size < grid.axes[0][0]:
            return sum(self.memory("fused", each) for each in sizes)
        return max(LEAST, size / (grid.at((size, width)) * self.hardware.bandwidth))


BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
SAME = {"fp16": "bf16"}                              # formats of equal speed: use the other one's table


def attention_share(tokens: float, width: float, causal: bool) -> float:
    """Efficiency of fused 16-bit attention without a table. FLOPs count without padding."""
    padded = 64 * math.ceil(width / 64)
    share = ATTENTION * width / (padded + EXPONENTIAL)
    return share / (1 + (DIAGONAL if causal else 90) / tokens)


@cache
def kernels_of(hardware: Hardware) -> Kernels:
    """The kernels of some hardware: from its own table, the H200's, or the constants of this module."""
    if hardware.table:
        return read(table_file(hardware, hardware.table, "kernels"), hardware, hardware)
    name, file = REFERENCE
    if (RESULTS / file).exists():
        return read(RESULTS / file, load(name), hardware)
    return Kernels(hardware, {})


def source(hardware: Hardware) -> str:
    """Describe the source of `kernels_of`."""
    name, file = REFERENCE
    if hardware.table:
        return f"kernels measured on it ({hardware.table})"
    if (RESULTS / file).exists():
        measured = "kernels measured on it" if name == hardware.name else f"kernels measured on {name}, scaled by the data sheets"
        return f"{measured} ({file})"
    return "rules of thumb, no measured table (course bench kernels makes one; name it as `table:` in a hardware YAML)"


def read(path: Path, measured: Hardware, hardware: Hardware) -> Kernels:
    """Read a table of `course bench kernels` (`from_table`). Raises `CourseError` if it is something else."""
    try:
        return from_table(json.loads(path.read_text(encoding="utf-8")), measured, hardware)
    except Exception as error:                       # a damaged or foreign file may raise anything
        raise CourseError(f"{path} is no table of kernels ({type(error).__name__}: {error}): make one with `course bench kernels "
                          "--out FILE`") from error


def from_table(table: Mapping[str, Any], measured: Hardware, hardware: Hardware) -> Kernels:
    """Convert a table measured on one hardware to efficiencies, for the same or other hardware."""
    grids: dict[str, Grid] = {}
    for precision, grid in table["matmul"].items():
        if precision in measured.peaks:
            grids[f"matmul {precision}"] = efficiencies(grid, matmul_flops, measured.peak(precision))
    triton = {f"{which} in Triton": table["packed"][which] for which in ATTENTION_GRIDS if "packed" in table}
    for which, grid in (table.get("attention", {}) | triton).items():
        factor = (10 if "backward" in which else 4) * (0.5 if "causal" in which else 1.0)
        kinds = ("tf32", "fp32") if which.endswith(" 32") else ("bf16", "fp16")
        peak = next((measured.peaks[kind] for kind in kinds if kind in measured.peaks), math.nan)
        grids[f"attention {which}"] = efficiencies(grid, lambda h, t, d, f=factor: f * h * t * t * d, peak)
    for kind, grid in table.get("memory", {}).items():
        grids[kind] = efficiencies(grid, lambda size: size, measured.bandwidth)
    for which in NORMS if "norms" in table else ():
        grids[f"norms {which}"] = efficiencies(table["norms"][which], lambda size, width: size, measured.bandwidth)
    scale = hardware.links[0].bandwidth / measured.links[0].bandwidth
    curves = []
    for ranks, points in sorted((int(ranks), points) for ranks, points in table.get("all_reduce", {}).items()):
        share = 2 * (1 - 1 / ranks)                  # of the bytes, sent by each rank
        sizes, seconds = axis_of(size for size, _ in points), above_0(taken for _, taken in points)
        sent = [share * size for size in sizes]
        curves.append((ranks, tuple((size, scale * size / taken) for size, taken in zip(sent, seconds, strict=True))))
    return Kernels(hardware, grids, tuple(curves))


def matmul_flops(m: float, k: float, n: float) -> float:
    """FLOPs of (m, k) x (k, n): 2·m·k·n, since a multiplication and an addition count as two."""
    return 2 * m * k * n


def efficiencies(grid: Mapping[str, Any], work: Any, peak: float) -> Grid:
    """Work per second over the peak, at each point of a measured grid {axes, seconds}. work: sizes -> FLOPs or bytes."""
    axes = tuple(axis_of(axis) for axis in grid["axes"])
    points = zip(product(*axes), above_0(grid["seconds"]), strict=True)
    return Grid(axes, tuple(work(*point) / seconds / peak for point, seconds in points))


def axis_of(sizes: Iterable[float]) -> tuple[float, ...]:
    """The sizes as an axis. Raises `ValueError` if they are empty or not increasing."""
    axis = above_0(sizes)
    if not axis or list(axis) != sorted(set(axis)):
        raise ValueError(f"sizes must grow, unlike {axis}")
    return axis


def above_0(numbers: Iterable[float]) -> tuple[float, ...]:
    """The numbers as floats. Raises `ValueError` if one is not positive and finite."""
    values = tuple(float(number) for number in numbers)
    if not all(0 < number < math.inf for number in values):
        raise ValueError("sizes and seconds must be above 0")
    return values
