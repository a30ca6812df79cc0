"""Triton kernels behind `course.ops.permutation`: a program has one token, reads its k rows, and keeps the sum in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def forward(rows, order, gates, y, k: tl.constexpr, gated: tl.constexpr, width: tl.constexpr, block: tl.constexpr):
    """rows (M, width), order, gates (N, k), y (N, width)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    total = tl.zeros((block,), tl.float32)
    for j in tl.static_range(k):
        row = tl.load(order + token * k + j)
        value = tl.load(rows + row * width + at, mask=(at < width) & (row >= 0), other=0.0).to(tl.float32)
        if gated:
            value *= tl.load(gates + token * k + j).to(tl.float32)
        total += value
    tl.store(y + token * width + at, total, mask=at < width)


@triton.jit
def backward(dy, rows, order, gates, drows, dgates, k: tl.constexpr, width: tl.constexpr, block: tl.constexpr):
    """dy (N, width), rows, drows (M, width), order, gates, dgates (N, k)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    grad = tl.load(dy + token * width + at, mask=at < width, other=0.0).to(tl.float32)
    for j in tl.static_range(k):
        row = tl.load(order + token * k + j)
        here = (at < width) & (row >= 0)
        value = tl.load(rows + row * width + at, mask=here, other=0.0).to(tl.float32)
        gate = tl.load(gates + token * k + j).to(tl.float32)
        tl.store(drows + row * width + at, grad * gate, mask=here)
        tl.store(dgates + token * k + j, tl.sum(value * grad, 0))


def sum_rows(rows: Tensor, order: Tensor, gates: Tensor | None) -> Tensor:
    """The gated sum of each token's rows on a GPU: (M, D), (N, k), (N, k) -> (N, D)."""
    rows, order, gates = rows.contiguous(), order.contiguous(), None if gates is None else gates.contiguous()
    (tokens, k), width = order.shape, rows.shape[1]
    y, block = rows.new_empty(tokens, width), triton.next_power_of_2(width)
    forward[(tokens,)](rows, order, gates, y, k, gates is not None, width, block, num_warps=warps(block))
    return y


def sum_rows_backward(dy: Tensor, rows: Tensor, order: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of rows, gradient of gates) on a GPU: (N, D), (M, D), 2 x (N, k) -> (M, D), (N, k)."""
    dy, rows, order, gates = dy.contiguous(), rows.contiguous(), order.contiguous(), gates.contiguous()
    (tokens, k), width = order.shape, rows.shape[1]
    drows, dgates, block = torch.empty_like(rows), torch.empty_like(gates), triton.next_power_of_2(width)
    backward[(tokens,)](dy, rows, order, gates, drows, dgates, k, width, block, num_warps=warps(block))
    return drows, dgates


def warps(block: int) -> int:
    """Warps for a row: each thread has 16 bytes of 16-bit numbers at a time, and at most 8 warps work on one."""
    return min(max(block // 256, 1), 8)
