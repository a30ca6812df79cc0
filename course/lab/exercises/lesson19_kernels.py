"""Lesson 19: a copy, a fused GELU, a softmax, and a fused residual add with LayerNorm, as Triton kernels.

The functions here are the answers to the exercises. A kernel computes in float32, whatever it loads and stores.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from course.lab.checks import random_inputs
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.exercises.lesson19_flash_attention import GUARD, GUARD_VALUE, guards_kept, near
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


def warps(block: int) -> int:
    """Warps for a row of `block` numbers, 2 to 16: a thread holds 32 numbers, or fewer of a short row."""
    return min(max(block // 1024, 2), 16)


@triton.jit
def softmax_kernel(x, y, C, x_row, y_row, BLOCK: tl.constexpr):
    """y = softmax(x) for one row of x, y (R, C). BLOCK: a power of two, at least C.

    x_row, y_row: elements of memory between two rows of x and of y. Columns are adjacent.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < C
    numbers = tl.load(x + row * x_row + column, mask=inside, other=-float("inf")).to(tl.float32)
    weights = tl.exp(numbers - tl.max(numbers, 0))
    y_numbers = weights / tl.sum(weights, 0)
    tl.store(y + row * y_row + column, y_numbers.to(y.dtype.element_ty), mask=inside)


def softmax(x: Tensor, y: Tensor) -> None:
    """y = softmax of each row of x: x, y (R, C), with adjacent columns. A program for each row."""
    R, C = x.shape
    block = triton.next_power_of_2(C)
    softmax_kernel[(R,)](x, y, C, x.stride(0), y.stride(0), block, num_warps=warps(block))


@triton.jit
def add_norm_kernel(x, y, weight, bias, z, n, mean, rstd, T, C, x_row, y_row, z_row, n_row, eps, ROWS: tl.constexpr,
                    BLOCK: tl.constexpr):
    """z = x + y and n = LayerNorm(z) for ROWS tokens, one after another. BLOCK: a power of two, at least C.

    x, y, z, n (T, C): x_row to n_row are the elements of memory between two rows; columns are adjacent. weight, bias (C,).
    mean, rstd (T,), contiguous: each token's mean and 1 / sqrt(variance + eps). The norm is of z as it is stored, rounded.
    """
    column = tl.arange(0, BLOCK)
    inside = column < C
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for token in tl.range(first, tl.minimum(first + ROWS, T), num_stages=3):
        value = tl.load(x + token * x_row + column, mask=inside, other=0.0).to(tl.float32)
        value += tl.load(y + token * y_row + column, mask=inside, other=0.0).to(tl.float32)
        value = value.to(z.dtype.element_ty)
        tl.store(z + token * z_row + column, value, mask=inside)
        value = value.to(tl.float32)
        middle = tl.sum(value, 0) / C
        centered = tl.where(inside, value - middle, 0.0)
        inverse = tl.rsqrt(tl.sum(centered * centered, 0) / C + eps)
        normal = centered * inverse * w + b
        tl.store(n + token * n_row + column, normal.to(n.dtype.element_ty), mask=inside)
        tl.store(mean + token, middle)
        tl.store(rstd + token, inverse)


def add_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, z: Tensor, n: Tensor, mean: Tensor, rstd: Tensor,
             eps: float = 1e-5, rows: int = 32) -> None:
    """z = x + y and n = LayerNorm(z) · weight + bias, with each token's mean and 1 / std. A program takes `rows` tokens.

    x, y, z, n (T, C), with adjacent columns. weight, bias (C,). mean, rstd (T,) in float32.
    """
    T, C = x.shape
    block = triton.next_power_of_2(C)
    add_norm_kernel[(triton.cdiv(T, rows),)](x, y, weight, bias, z, n, mean, rstd, T, C, x.stride(0), y.stride(0), z.stride(0),
                                             n.stride(0), eps, rows, block, num_warps=warps(block))


@triton.jit
def add_norm_backward_kernel(dz, dn, z, weight, mean, rstd, dx, parts, T, C, dz_row, dn_row, z_row, dx_row, ROWS: tl.constexpr,
                             BLOCK: tl.constexpr):
    """dx of ROWS tokens, one after another, and this program's share of the gradients of weight and bias.

    dz, dn, z, dx (T, C): dz_row to dx_row are the elements of memory between two rows. weight (C,). mean, rstd (T,).
    parts (2, programs, C) in float32, contiguous: sums over each program's tokens, first for weight, then for bias.
    """
    column = tl.arange(0, BLOCK)
    inside = column < C
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for token in tl.range(first, tl.minimum(first + ROWS, T), num_stages=3):
        grad = tl.load(dn + token * dn_row + column, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(z + token * z_row + column, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(rstd + token)
        unit = (value - tl.load(mean + token)) * inverse
        dweight += grad * unit
        dbias += grad
        grad *= w
        back = inverse * (grad - tl.sum(grad, 0) / C - unit * tl.sum(grad * unit, 0) / C)
        back += tl.load(dz + token * dz_row + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + token * dx_row + column, back.to(dx.dtype.element_ty), mask=inside)
    part = parts + tl.program_id(0) * C + column
    tl.store(part, dweight, mask=inside)
    tl.store(part + tl.num_programs(0) * C, dbias, mask=inside)


def add_norm_backward(dz: Tensor, dn: Tensor, z: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, dx: Tensor, parts: Tensor,
                      rows: int = 32) -> Tensor:
    """Write the gradient dx of x (y has the same), and return those of weight and bias, (2, C) in float32.

    dz, dn: gradients of the sum z and of the norm n. dz, dn, z, dx (T, C), with adjacent columns. weight (C,). mean, rstd (T,).
    parts (2, programs, C) in float32: room for the partial sums, which are added after the kernel. A program takes `rows` tokens.
    """
    T, C = dz.shape
    block = triton.next_power_of_2(C)
    add_norm_backward_kernel[(triton.cdiv(T, rows),)](dz, dn, z, weight, mean, rstd, dx, parts, T, C, dz.stride(0), dn.stride(0),
                                                      z.stride(0), dx.stride(0), rows, block, num_warps=warps(block))
    return parts.sum(1)


def guarded(x: Tensor, transposed: bool = False, extra: int = 50, guard: float = GUARD_VALUE) -> Tensor:
    """A copy of x (R, C) inside a matrix with `extra` more rows and columns; transposed: inside the transpose of one."""
    rows, columns = reversed(x.shape) if transposed else x.shape
    room = torch.full((rows + extra, columns + extra), guard, dtype=x.dtype)
    view = room[3:3 + rows, 5:5 + columns]
    return (view.T if transposed else view).copy_(x)


class Flags(dict[str, float]):
    """Claims by name: 1.0 if one held in every run of a kernel, else what it was in the first run in which it did not."""

    def note(self, **held: float) -> None:
        """Note what became of claims in one more run: 1.0 or True if they held."""
        for name, value in held.items():
            if self.get(name, 1.0) == 1.0:
                self[name] = float(value)

    def tensors(self) -> Tensors:
        """Each claim as a tensor."""
        return {name: torch.tensor(value) for name, value in self.items()}


def share(counted: Sequence[int], wanted: Sequence[int]) -> float:
    """How many times as many elements were touched as wanted: 1.0 if just those of each tensor, 0.0 if as many, but others."""
    return 1.0 if [*counted] == [*wanted] else sum(counted) / sum(wanted) if sum(counted) != sum(wanted) else 0.0


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
        flags.note(loads=share(accesses.loads, [x.numel(), 0]), stores=share(accesses.stores, [0, x.numel()]),
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
        flags.note(loads=share([x_loads, y_loads], [x.numel(), 0]), stores=share(accesses.stores, [0, 0, x.numel()]),
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


def run_softmax(inputs: Tensors) -> Tensors:
    """Softmax in float32 of ordinary and of large numbers, and in bf16, of rows that do not follow each other.

    One row of large numbers is far below zero.
    """
    found, flags, programs = dict[str, Tensor](), Flags(), []
    for name, dtype, size in (("", torch.float32, 1.0), ("large_", torch.float32, 100.0), ("bf16_", torch.bfloat16, 1.0)):
        numbers = inputs["x"] * size
        numbers[1] -= 20 * (size - 1)
        x = guarded(numbers.to(dtype), extra=40)
        y, before = guarded(torch.zeros_like(inputs["x"], dtype=dtype)), x.clone()
        with watched(x, y) as accesses:
            softmax(x, y)
        flags.note(loads=share(accesses.loads, [x.numel(), 0]), stores=share(accesses.stores, [0, x.numel()]),
                   alone=not accesses.pytorch, guards=accesses.inside and guards_kept(y) and torch.equal(x, before))
        found[f"{name}y"] = y
        programs.append(len(accesses.programs))
    return found | flags.tensors() | {"programs": torch.tensor(programs)}


def weigh_softmax(inputs: Tensors, returned: Tensors) -> Tensors:
    """Replace the result in bf16 by whether it is near the one in float64."""
    wanted = inputs["x"].bfloat16().double().softmax(-1)
    return {key: value for key, value in returned.items() if key != "bf16_y"} | {"bf16": near((returned.get("bf16_y"), wanted))}


EACH = 4                                             # tokens of a program in the checks
EPS = 1e-3


def draw_tokens(seed: int, hidden: bool) -> Tensors:
    """x, y, dz and dn (T, C), weight and bias (C,). One token is near zero."""
    generator = random_inputs.generator(seed)
    T, C = (23, 83) if hidden else (19, 70)
    x, y, dz, dn = random_inputs.normal(generator, 4, T, C)
    x[1], y[1] = x[1] / 30, y[1] / 30
    return {"x": x, "y": y, "dz": dz, "dn": dn, "weight": 1 + random_inputs.normal(generator, C) / 2,
            "bias": random_inputs.normal(generator, C)}


def guarded_row(n: int) -> Tensor:
    """Memory for n numbers in float32, with guarded ones behind them."""
    return torch.full((n + GUARD,), GUARD_VALUE)[:n]


def run_add_norm(inputs: Tensors) -> Tensors:
    """Sum, norm, mean and 1 / std in float32, also of numbers near 100, and in bf16; rows do not follow each other."""
    found, flags, programs = dict[str, Tensor](), Flags(), []
    (T, C), zeros = inputs["x"].shape, torch.zeros_like(inputs["x"])
    for name, dtype, shift in (("", torch.float32, 0.0), ("far_", torch.float32, 100.0), ("bf16_", torch.bfloat16, 0.0)):
        x, y = guarded((inputs["x"] + shift).to(dtype), extra=40), guarded(inputs["y"].to(dtype), extra=44)
        weight, bias, before = inputs["weight"].to(dtype), inputs["bias"].to(dtype), torch.stack([x, y])
        z, n, mean, rstd = guarded(zeros.to(dtype)), guarded(zeros.to(dtype), extra=54), guarded_row(T), guarded_row(T)
        with watched(x, y, z, n, mean, rstd, weight, bias) as accesses:
            add_norm(x, y, weight, bias, z, n, mean, rstd, EPS, EACH)
        flags.note(loads=share(accesses.loads[:6], [T * C, T * C, 0, 0, 0, 0]),
                   stores=share(accesses.stores, [0, 0, T * C, T * C, T, T, 0, 0]),
                   alone=not accesses.pytorch, weights=max(accesses.loads[6:]) <= triton.cdiv(T, EACH) * C,
                   guards=accesses.inside and guards_kept(z, n, mean, rstd) and torch.equal(torch.stack([x, y]), before))
        found |= {f"{name}z": z, f"{name}n": n, f"{name}mean": mean, f"{name}rstd": rstd}
        programs.append(len(accesses.programs))
    return found | flags.tensors() | {"programs": torch.tensor(programs)}


def weigh_add_norm(inputs: Tensors, returned: Tensors) -> Tensors:
    """Replace the results in bf16 by whether they are near those in float64, and whether the norm is of z as it is stored.

    The latter is 1.0 if it is, 0.0 if it is of the sum before rounding, and 0.5 if it is of something else.
    """
    x, y, weight, bias = (inputs[name].bfloat16().double() for name in ("x", "y", "weight", "bias"))
    z = (x + y).bfloat16().double()
    wanted, mean = torch.nn.functional.layer_norm(z, z.shape[-1:], weight, bias, EPS), returned.get("bf16_mean")
    stored, kept = (mean is not None and mean.shape == z.shape[:1] and torch.allclose(mean.double(), total.mean(-1), 0, 1e-6)
                    for total in (z, x + y))
    return {key: value for key, value in returned.items() if not key.startswith("bf16")} | {
        "bf16": near((returned.get("bf16_z"), z), (returned.get("bf16_n"), wanted)),
        "rounded": torch.tensor(1.0 if stored else 0.0 if kept else 0.5)}


def run_add_norm_backward(inputs: Tensors) -> Tensors:
    """Gradients in float32 and in bf16, of rows that do not follow each other, and what was read and written."""
    found, flags, programs = dict[str, Tensor](), Flags(), []
    T, C = inputs["x"].shape
    blocks = triton.cdiv(T, EACH)
    for name, dtype in FORMATS:
        z, dz, dn, weight = (x.to(dtype) for x in (inputs["x"] + inputs["y"], inputs["dz"], inputs["dn"], inputs["weight"]))
        mean, rstd = z.double().mean(-1).float(), (z.double().var(-1, correction=0) + EPS).rsqrt().float()
        z, dz, dn, dx = (guarded(x, extra=40 + 4 * i) for i, x in enumerate((z, dz, dn, torch.zeros_like(z))))
        parts, before = guarded_row(2 * blocks * C).view(2, blocks, C), torch.stack([z, dz, dn])
        with watched(dz, dn, z, dx, parts, weight, mean, rstd) as accesses:
            sums = add_norm_backward(dz, dn, z, weight, mean, rstd, dx, parts, EACH)
        flags.note(loads=share(accesses.loads[:5], [T * C, T * C, T * C, 0, 0]),
                   stores=share(accesses.stores, [0, 0, 0, T * C, 2 * blocks * C, 0, 0, 0]), alone=accesses.pytorch == ["sum"],
                   weights=max(accesses.loads[5:]) <= blocks * C,
                   guards=accesses.inside and guards_kept(dx, parts) and torch.equal(torch.stack([z, dz, dn]), before))
        found |= {f"{name}dx": dx, f"{name}parts": parts, f"{name}sums": sums}
        programs.append(len(accesses.programs))
    return found | flags.tensors() | {"programs": torch.tensor(programs)}


def weigh_add_norm_backward(inputs: Tensors, returned: Tensors) -> Tensors:
    """Replace dx in bf16 by whether it is near the one in float64."""
    z, dz, dn, weight = (x.bfloat16().double() for x in (inputs["x"] + inputs["y"], inputs["dz"], inputs["dn"], inputs["weight"]))
    norm = torch.nn.functional.layer_norm(z.requires_grad_(), z.shape[-1:], weight, eps=EPS)
    wanted, = torch.autograd.grad(norm, z, dn)
    return {key: value for key, value in returned.items() if not key.startswith("bf16")} | {
        "bf16": near((returned.get("bf16_dx"), wanted + dz))}


HERE = __name__
ROUNDING = {"bf16": "it is further from the result in float64 than rounding explains, or not in bf16"}
FLAGS = {"loads": "more or fewer elements were loaded",
         "stores": "more or fewer elements were stored",
         "bias": "it is loaded more often",
         "weights": "one of them is loaded more often",
         "rounded": "the means are not those of the z in memory",
         "alone": "an operator of PyTorch computed or copied something",
         "tiles": "one of them touches more",
         "guards": "a pointer leads elsewhere, or memory has changed that belongs to no element of the result"}
ALONE = "PyTorch computes and copies nothing"
GUARDS = "nothing is read or written outside the tensors, and the inputs stay unchanged"
EXERCISES = [
    Exercise("copy", "19", (f"{HERE}.copy_kernel", f"{HERE}.copy"), draw_matrix, run_copy, limits=QUICK, flags=FLAGS, claims={
        "y": "every number arrives, from rows that do not follow each other in memory",
        "from_y": "so it does from a transposed matrix",
        "to_y": "and to one",
        "bf16_y": "bf16 numbers arrive unchanged",
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
    Exercise("row-softmax", "19", (f"{HERE}.softmax_kernel", f"{HERE}.softmax"), draw_matrix, run_softmax, weigh=weigh_softmax,
             tolerance=1e-5, limits=QUICK, flags=FLAGS | ROUNDING, claims={
        "y": "each row of the result is the softmax of a row of x",
        "large_y": "numbers of several hundred, whose exponential float32 cannot hold, give finite results",
        "bf16": "in bf16 it is right up to rounding",
        "loads": "your kernel loads each element of x once",
        "stores": "and stores each element of y once",
        "programs": "one program runs for each row",
        "alone": ALONE, "guards": GUARDS}),
    Exercise("add-norm", "19", (f"{HERE}.add_norm_kernel", f"{HERE}.add_norm"), draw_tokens, run_add_norm, weigh=weigh_add_norm,
             tolerance=1e-4, limits=QUICK, points=2, flags=FLAGS | ROUNDING, claims={
        "z": "z is the sum of x and y",
        "n": "n is the norm of each token, times weight, plus bias",
        "mean": "each token's mean is right",
        "rstd": "and so is its 1 / sqrt(variance + eps)",
        "far_n": "numbers near 100 keep their digits",
        "bf16": "in bf16 both results are right up to rounding",
        "rounded": "in bf16 the norm is of z as it is stored, from which the backward pass starts",
        "loads": "your kernel loads each element of x and y once",
        "stores": "and stores z, n, mean and rstd once",
        "weights": "a program loads weight and bias at most once",
        "programs": "each program takes as many tokens as `rows` says",
        "alone": ALONE, "guards": GUARDS}),
    Exercise("add-norm-backward", "19", (f"{HERE}.add_norm_backward_kernel", f"{HERE}.add_norm_backward"), draw_tokens,
             run_add_norm_backward, weigh=weigh_add_norm_backward, tolerance=1e-4, limits=QUICK, points=2,
             flags=FLAGS | ROUNDING | {"alone": "another operator of PyTorch computed something, or none added the partial sums"},
             claims={
        "dx": "the gradient of x is right",
        "parts": "each program leaves the sums over its own tokens, for weight and for bias",
        "sums": "added, they are the gradients of weight and bias",
        "bf16": "in bf16 the gradient of x is right up to rounding",
        "loads": "your kernel loads each element of dz, dn and z once",
        "stores": "and stores dx and its partial sums once",
        "weights": "a program loads weight at most once",
        "programs": "each program takes as many tokens as `rows` says",
        "alone": "PyTorch adds the partial sums, and nothing else", "guards": GUARDS}),
]
