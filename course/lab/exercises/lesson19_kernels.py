"""Lesson 19: a copy, a fused GELU, a softmax, and a fused residual add with LayerNorm, as Triton kernels.

The functions here are the answers to the exercises. A kernel computes in float32, whatever it loads and stores.
"""

import torch
from torch import Tensor

from course.lab.checks import random_inputs
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.exercises.lesson19_flash_attention import GUARD_VALUE, guards_kept, near
from course.lab.instruments.watched_memory import Accesses, watched
from course.lab.sandbox.limits import Limits
from course.ops.triton_language import tl, triton

QUICK = Limits(seconds=120)
FORMATS = (("", torch.float32), ("bf16_", torch.bfloat16))


@triton.jit
def copy_kernel(x, y, R, C, x_row, x_column, y_row, y_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy a tile of ROWS x COLUMNS numbers of x (R, C) to y (R, C). The grid is (tiles of rows, tiles of columns).

    x_row, x_column: elements of memory between two rows of x, and between two columns. y_row, y_column: of y.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]            # (ROWS, 1)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]   # (1, COLUMNS)
    inside = (row < R) & (column < C)                                                   # (ROWS, COLUMNS)
    tile = tl.load(x + row * x_row + column * x_column, mask=inside)
    tl.store(y + row * y_row + column * y_column, tile, mask=inside)


def copy(x: Tensor, y: Tensor, rows: int = 4, columns: int = 512) -> None:
    """Copy x (R, C) to y (R, C), each with any strides, in tiles of rows x columns numbers: a program for each tile."""
    R, C = x.shape
    grid = (triton.cdiv(R, rows), triton.cdiv(C, columns))
    copy_kernel[grid](x, y, R, C, x.stride(0), x.stride(1), y.stride(0), y.stride(1), rows, columns)


@triton.jit
def bias_gelu_kernel(x, bias, y, R, C, x_row, y_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """y = GELU(x + bias) for a tile of ROWS x COLUMNS numbers, with the tanh approximation. x, y (R, C); bias (C,).

    x_row, y_row: elements of memory between two rows of x and of y. Columns are adjacent.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]            # (ROWS, 1)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)                         # (COLUMNS,)
    b = tl.load(bias + column, mask=column < C).to(tl.float32)
    inside = (row < R) & (column < C)[None, :]                                          # (ROWS, COLUMNS)
    z = tl.load(x + row * x_row + column[None, :], mask=inside).to(tl.float32) + b[None, :]
    u = 0.7978845608028654 * (z + 0.044715 * z * z * z)                                 # sqrt(2 / pi)
    gelu = z * tl.sigmoid(2 * u)                                                        # (1 + tanh u) / 2 = sigmoid(2 u)
    tl.store(y + row * y_row + column[None, :], gelu.to(y.dtype.element_ty), mask=inside)


def bias_gelu(x: Tensor, bias: Tensor, y: Tensor, rows: int = 4, columns: int = 512) -> None:
    """y = GELU(x + bias), with the tanh approximation: x, y (R, C), bias (C,). A program for each tile of rows x columns."""
    R, C = x.shape
    grid = (triton.cdiv(R, rows), triton.cdiv(C, columns))
    bias_gelu_kernel[grid](x, bias, y, R, C, x.stride(0), y.stride(0), rows, columns)


def guarded(x: Tensor, transposed: bool = False, extra: int = 50, guard: float = GUARD_VALUE) -> Tensor:
    """A copy of x (R, C) inside a matrix with `extra` more rows and columns; transposed: inside the transpose of one."""
    rows, columns = reversed(x.shape) if transposed else x.shape
    room = torch.full((rows + extra, columns + extra), guard, dtype=x.dtype)
    view = room[3:3 + rows, 5:5 + columns]
    return (view.T if transposed else view).copy_(x)


class Flags(dict[str, bool]):
    """Claims by name, each of which holds if it held in every run of a kernel."""

    def note(self, **held: bool) -> None:
        """Note which claims held in one more run."""
        for name, value in held.items():
            self[name] = self.get(name, True) and value

    def tensors(self) -> Tensors:
        """1.0 for each claim that holds, else 0.0."""
        return {name: torch.tensor(float(held)) for name, held in self.items()}


def draw_matrix(seed: int, hidden: bool) -> Tensors:
    """A matrix x (R, C) that no tile divides, and a bias (C,)."""
    generator = random_inputs.generator(seed)
    R, C = (29, 83) if hidden else (21, 70)
    return {"x": 2 * random_inputs.normal(generator, R, C), "bias": random_inputs.normal(generator, C)}


def largest_visit(accesses: Accesses) -> int:
    """The most elements that one load or store touched."""
    return max((visit.elements.size for visit in accesses.visits), default=0)


LAYOUTS = (("", torch.float32, False, False, 8, 32), ("from_", torch.float32, True, False, 4, 16),
           ("to_", torch.float32, False, True, 16, 16), ("bf16_", torch.bfloat16, False, False, 8, 32))
"""Name, number format, whether x and y are transposed, and the tile."""


def run_copy(inputs: Tensors) -> Tensors:
    """Copies between three layouts in float32, one in bf16, and what was read and written."""
    found, flags, programs = dict[str, Tensor](), Flags(), []
    for name, dtype, x_transposed, y_transposed, rows, columns in LAYOUTS:
        x = guarded(inputs["x"].to(dtype), x_transposed, 40, -GUARD_VALUE)
        y, before = guarded(torch.zeros_like(inputs["x"], dtype=dtype), y_transposed), x.clone()
        with watched(x, y) as accesses:
            copy(x, y, rows, columns)
        flags.note(loads=accesses.loads == [x.numel(), 0], stores=accesses.stores == [0, x.numel()],
                   alone=not accesses.pytorch, tiles=largest_visit(accesses) <= rows * columns,
                   guards=accesses.inside and guards_kept(y) and torch.equal(x, before))
        found[f"{name}y"] = y
        programs.append(len(accesses.programs))
    return found | flags.tensors() | {"programs": torch.tensor(programs)}


def run_bias_gelu(inputs: Tensors) -> Tensors:
    """GELU in float32 and bf16, of rows that do not follow each other, and what was read and written."""
    found, flags, programs, rows, columns = dict[str, Tensor](), Flags(), [], 8, 32
    for name, dtype in FORMATS:
        x, y = guarded(inputs["x"].to(dtype), extra=40), guarded(torch.zeros_like(inputs["x"], dtype=dtype))
        bias, before = inputs["bias"].to(dtype), x.clone()
        with watched(x, bias, y) as accesses:
            bias_gelu(x, bias, y, rows, columns)
        x_loads, bias_loads, y_loads = accesses.loads
        flags.note(loads=(x_loads, y_loads) == (x.numel(), 0), stores=accesses.stores == [0, 0, x.numel()],
                   alone=not accesses.pytorch, bias=bias_loads <= triton.cdiv(x.shape[0], rows) * x.shape[1],
                   tiles=largest_visit(accesses) <= rows * columns,
                   guards=accesses.inside and guards_kept(y) and torch.equal(x, before))
        found[f"{name}y"] = y
        programs.append(len(accesses.programs))
    return found | flags.tensors() | {"programs": torch.tensor(programs)}


def weigh_bias_gelu(inputs: Tensors, returned: Tensors) -> Tensors:
    """Replace the result in bf16 by whether it is near the one in float64."""
    z = inputs["x"].bfloat16().double() + inputs["bias"].bfloat16().double()
    wanted = torch.nn.functional.gelu(z, approximate="tanh")
    return {key: value for key, value in returned.items() if key != "bf16_y"} | {"bf16": near((returned.get("bf16_y"), wanted))}


HERE = __name__
ROUNDING = {"bf16": "it is further from the result in float64 than rounding explains, or not in bf16"}
FLAGS = {"loads": "more or fewer elements were loaded",
         "stores": "more or fewer elements were stored",
         "bias": "it is loaded more often",
         "alone": "an operator of PyTorch computed or copied something",
         "tiles": "one of them touches more",
         "guards": "a pointer leads elsewhere, or memory has changed that belongs to no element of the result"}
ALONE = "PyTorch computes and copies nothing"
GUARDS = "nothing is read or written outside the tensors, and what is given stays as it is"
EXERCISES = [
    Exercise("copy", "19", (f"{HERE}.copy_kernel", f"{HERE}.copy"), draw_matrix, run_copy, limits=QUICK, flags=FLAGS, claims={
        "y": "every number arrives, from rows that do not follow each other in memory",
        "from_y": "so it does from a transposed matrix",
        "to_y": "and to one",
        "bf16_y": "bf16 numbers arrive as they are",
        "loads": "your kernel loads each element of x once",
        "stores": "and stores each element of y once",
        "programs": "one program runs for each tile",
        "tiles": "and no program touches more than a tile at once",
        "alone": ALONE, "guards": GUARDS}),
    Exercise("fused-gelu", "19", (f"{HERE}.bias_gelu_kernel", f"{HERE}.bias_gelu"), draw_matrix, run_bias_gelu,
             weigh=weigh_bias_gelu, tolerance=1e-5, limits=QUICK, flags=FLAGS | ROUNDING, claims={
        "y": "the result is GELU(x + bias), with the tanh approximation",
        "bf16": "in bf16 it is right up to rounding",
        "loads": "your kernel loads each element of x once",
        "stores": "and stores each element of y once",
        "bias": "a program loads each number of the bias at most once",
        "programs": "one program runs for each tile",
        "tiles": "and no program touches more than a tile at once",
        "alone": ALONE, "guards": GUARDS}),
]
