"""Lesson 00: what a matrix multiplication costs, and how long a machine must take for it at least.

The functions here are the answers to the exercises written inside a cell of the lesson.
"""

import torch

from course.lab.checks import random_inputs, return_values
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.sandbox.limits import Limits

QUICK = Limits(seconds=30)                           # far more than it takes, for machines that are busy


def matmul_cost(m: int, k: int, n: int, itemsize: int) -> tuple[int, int]:
    """The FLOPs of (m, k) @ (k, n), and the fewest bytes that it can move, with `itemsize` bytes a number."""
    flops = 2 * m * k * n
    moved = (m * k + k * n + m * n) * itemsize
    return flops, moved


def roofline_seconds(flops: float, moved: float, peak_flops: float, peak_bytes: float) -> float:
    """The least time, in seconds, for this work on a machine with these ceilings, per second."""
    return max(flops / peak_flops, moved / peak_bytes)


def draw_sizes(seed: int, hidden: bool) -> Tensors:
    """Shapes of matrices and the size of a number."""
    generator = random_inputs.generator(seed)
    shapes = torch.randint(1, 9000 if hidden else 500, (12 if hidden else 6, 3), generator=generator)
    itemsize = torch.tensor([1, 2, 4, 8])[torch.randint(0, 4, (len(shapes),), generator=generator)]
    return {"shapes": shapes, "itemsize": itemsize}


def run_matmul_cost(inputs: Tensors) -> Tensors:
    """The cost of each multiplication."""
    costs = [return_values.pair(matmul_cost(*size), "matmul_cost", "(flops, moved)") for size in sizes(inputs)]
    return {name: return_values.numbers((cost[i] for cost in costs), "matmul_cost")
            for i, name in enumerate(("flops", "bytes"))}


def sizes(inputs: Tensors) -> list[list[int]]:
    """What `matmul_cost` is called with: m, k, n, itemsize."""
    return torch.cat([inputs["shapes"], inputs["itemsize"][:, None]], 1).tolist()


def draw_work(seed: int, hidden: bool) -> Tensors:
    """Work, and the ceilings of a machine, such that now one bounds and now the other."""
    generator = random_inputs.generator(seed)
    exponent = torch.rand(40 if hidden else 12, 4, generator=generator, dtype=torch.float64)
    return {"work": 10 ** (9 + 3 * exponent)}


def run_roofline(inputs: Tensors) -> Tensors:
    """The least time of each piece of work."""
    return {"seconds": return_values.numbers((roofline_seconds(*row) for row in inputs["work"].tolist()), "roofline_seconds")}


EXERCISES = [
    Exercise("matmul-cost", "00", (f"{__name__}.matmul_cost",), draw_sizes, run_matmul_cost, {
        "flops": "it counts the floating-point operations",
        "bytes": "it counts the bytes that must move"}, limits=QUICK,
        cases=lambda inputs: ["matmul_cost(m={}, k={}, n={}, itemsize={})".format(*size) for size in sizes(inputs)]),
    Exercise("roofline", "00", (f"{__name__}.roofline_seconds",), draw_work, run_roofline, {
        "seconds": "it gives the least time, whichever ceiling bounds it"}, limits=QUICK,
        tolerance=1e-6,                              # whoever takes torch.max of a tensor computes in float32
        cases=lambda inputs: ["roofline_seconds(flops={:.6g}, moved={:.6g}, peak_flops={:.6g}, peak_bytes={:.6g})".format(*row)
                              for row in inputs["work"].tolist()]),
]
