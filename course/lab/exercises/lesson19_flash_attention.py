"""Lesson 19: online softmax, FlashAttention's forward pass, and its backward pass, as Triton kernels.

FlashAttention-2 (Dao 2023, arXiv:2307.08691). The functions here are the answers to the exercises. Scores are in units of log2,
because GPUs have an exp2 instruction: `scale` is log2(e) / sqrt(D), and a log-sum-exp is log2 of the sum of exp2.

A program holds one block of rows of one head of one sample in registers, and loops over tiles. Shapes: q, k, v, y and their
gradients (B, H, T, D), whose last dim is adjacent in memory; lse and delta (B, H, T) in float32, contiguous. D is a power of two
and at least 16.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from course.ops.triton_language import tl, triton
from course.utils.errors import CourseError


@triton.jit
def load_tile(x, row, step, T, D: tl.constexpr, masked: tl.constexpr):
    """Load these rows of one head, (rows, D). x: the head's first element. step: elements between rows. Zeros beyond row T."""
    pointers = x + row[:, None] * step + tl.arange(0, D)[None, :]
    if masked:
        tile = tl.load(pointers, mask=(row < T)[:, None], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(x, tile, row, step, T, D: tl.constexpr):
    """Store these rows of one head, (rows, D), in the number format of x; nothing beyond row T."""
    pointers = x + row[:, None] * step + tl.arange(0, D)[None, :]
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=(row < T)[:, None])


@triton.jit
def load_row(x, row, T, other: tl.constexpr, masked: tl.constexpr):
    """Load one number for each of these rows, (rows,); `other` beyond row T."""
    if masked:
        numbers = tl.load(x + row, mask=row < T, other=other)
    else:
        numbers = tl.load(x + row)
    return numbers


@triton.jit
def head_offset(sample, head, steps):
    """Where a head of a sample begins. steps: elements between samples, heads and tokens."""
    return sample.to(tl.int64) * steps[0] + head.to(tl.int64) * steps[1]


@triton.jit
def online_softmax(top, total, y, s, v, scale):
    """Fold one tile of scores and values into the running maximum, sum and output.

    top, total (M,) and y (M, D): float32, over the tiles so far. top is -inf, total and y are 0 before the first tile.
    s (M, N): the tile's scores without `scale`, -inf where a query does not see a key. v (N, D): its values. Returns the new top,
    total and y: y / total is the softmax of all scores so far, in units of log2, times their values.
    """
    new = tl.maximum(top, tl.max(s, 1) * scale)                         # (M,)
    p = tl.exp2(s * scale - new[:, None])                               # (M, N)
    shrink = tl.exp2(top - new)                                         # (M,)
    total = total * shrink + tl.sum(p, 1)
    y = tl.dot(p.to(v.dtype), v, y * shrink[:, None])
    return new, total, y


@triton.jit
def key_range(block, T, causal: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Which keys the queries of a block look at: (clear, end).

    The block has the queries from block * ROWS to (block + 1) * ROWS - 1; causal: query i sees the keys up to i. Up to `clear`, a
    multiple of COLUMNS, every one of these queries sees every key. From `end` on, at most T, none of them sees any.
    """
    end = T
    first = T                                                           # the number of keys that the first query sees
    if causal:
        end = tl.minimum((block + 1) * ROWS, T)
        first = tl.minimum(block * ROWS + 1, T)
    return first // COLUMNS * COLUMNS, end


@triton.jit
def attend_keys(top, total, y, q, k, v, k_step, v_step, row, begin, end, T, scale, causal: tl.constexpr, masked: tl.constexpr,
                D: tl.constexpr, COLUMNS: tl.constexpr):
    """Fold the keys from `begin` to `end` into the running maximum, sum and output of the queries `row`.

    q (M, D): a tile. k, v: pointers to a head, whose tokens are k_step and v_step elements apart. begin is a multiple of COLUMNS.
    Not masked: all these queries see all these keys. masked: some keys lie beyond T or, if causal, behind some of the queries.
    """
    for start in range(begin, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        s = tl.dot(q, tl.trans(load_tile(k, column, k_step, T, D, masked)))             # (M, N)
        if masked:
            seen = (column < T)[None, :]
            if causal:
                seen = seen & (column[None, :] <= row[:, None])
            s = tl.where(seen, s, -float("inf"))
        top, total, y = online_softmax(top, total, y, s, load_tile(v, column, v_step, T, D, masked), scale)
    return top, total, y


@triton.jit
def flash_forward_kernel(q, k, v, y, lse, q_steps, k_steps, v_steps, y_steps, H, T, scale, causal: tl.constexpr, D: tl.constexpr,
                         ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """y and lse of ROWS queries of one head. The grid is (blocks of queries, B * H).

    q_steps, k_steps, v_steps, y_steps: elements between samples, heads and tokens. lse: log2 of the sum of exp2 of the scores.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)                   # causal: the longest first
    sample, head = tl.program_id(1) // H, tl.program_id(1) % H
    row = block * ROWS + tl.arange(0, ROWS)
    queries = load_tile(q + head_offset(sample, head, q_steps), row, q_steps[2], T, D, True)
    k += head_offset(sample, head, k_steps)
    v += head_offset(sample, head, v_steps)
    top, total = tl.full((ROWS,), -float("inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, D), tl.float32)
    clear, end = key_range(block, T, causal, ROWS, COLUMNS)
    top, total, out = attend_keys(top, total, out, queries, k, v, k_steps[2], v_steps[2], row, 0, clear, T, scale, causal, False,
                                  D, COLUMNS)
    top, total, out = attend_keys(top, total, out, queries, k, v, k_steps[2], v_steps[2], row, clear, end, T, scale, causal, True,
                                  D, COLUMNS)
    store_tile(y + head_offset(sample, head, y_steps), out / total[:, None], row, y_steps[2], T, D)
    tl.store(lse + tl.program_id(1) * T + row, top + tl.log2(total), mask=row < T)


@triton.jit
def query_gradient(dq, q, dy, lse, delta, k, v, seen, scale):
    """Add what one tile of keys and values contributes to the gradient of some queries, without the factor 1 / sqrt(D).

    dq (M, D), lse, delta (M,): float32. q, dy (M, D). k, v (N, D). seen: (M, N), whether a query sees a key, or True for all.
    scale: log2(e) / sqrt(D). delta: the sum of dy * y over each row. Returns the new dq.
    """
    p = tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])          # (M, N)
    p = tl.where(seen, p, 0.0)
    dp = tl.dot(dy, tl.trans(v))                                        # (M, N)
    ds = p * (dp - delta[:, None])                                      # (M, N)
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit
def key_gradients(dk, dv, k, v, q, dy, lse, delta, seen, scale):
    """Add what one tile of queries contributes to the gradients of some keys and values, to dk without the factor 1 / sqrt(D).

    dk, dv (N, D), lse, delta (M,): float32. k, v (N, D). q, dy (M, D). seen: (N, M), whether a query sees a key, or True for all.
    Scores have a row for each key, so that no product needs a transposed p. Returns the new dk and dv.
    """
    p = tl.exp2(tl.dot(k, tl.trans(q)) * scale - lse[None, :])          # (N, M)
    p = tl.where(seen, p, 0.0)
    dp = tl.dot(v, tl.trans(dy))                                        # (N, M)
    ds = p * (dp - delta[None, :])                                      # (N, M)
    dv = tl.dot(p.to(dy.dtype), dy, dv)
    dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def query_range(block, T, causal: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Which queries look at the keys of a block: (begin, clear), both multiples of COLUMNS.

    The block has the keys from block * ROWS to (block + 1) * ROWS - 1. Before `begin` no query sees any of these keys. From
    `clear` on every query sees all of them.
    """
    begin, clear = 0, 0
    if causal:
        begin = block * ROWS // COLUMNS * COLUMNS
        clear = tl.cdiv((block + 1) * ROWS - 1, COLUMNS) * COLUMNS
    return begin, clear


@triton.jit
def sum_over_keys(dq, q, dy, lse, delta, k, v, k_step, v_step, row, begin, end, T, scale, causal: tl.constexpr,
                  masked: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Loop over the keys from `begin` to `end` and accumulate the gradient of the queries `row`."""
    for start in range(begin, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        keys = load_tile(k, column, k_step, T, D, masked)
        values = load_tile(v, column, v_step, T, D, masked)
        if masked:
            seen = (column < T)[None, :]
            if causal:
                seen = seen & (column[None, :] <= row[:, None])
            dq = query_gradient(dq, q, dy, lse, delta, keys, values, seen, scale)
        else:
            dq = query_gradient(dq, q, dy, lse, delta, keys, values, True, scale)
    return dq


@triton.jit
def queries_backward_kernel(q, k, v, y, dy, lse, delta, dq, q_steps, k_steps, v_steps, y_steps, dy_steps, dq_steps, H, T, scale,
                            causal: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """dq and delta of ROWS queries of one head. The grid is (blocks of queries, B * H)."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)                   # causal: the longest first
    sample, head = tl.program_id(1) // H, tl.program_id(1) % H
    row = block * ROWS + tl.arange(0, ROWS)
    queries = load_tile(q + head_offset(sample, head, q_steps), row, q_steps[2], T, D, True)
    out = load_tile(y + head_offset(sample, head, y_steps), row, y_steps[2], T, D, True)
    grads = load_tile(dy + head_offset(sample, head, dy_steps), row, dy_steps[2], T, D, True)
    sums = tl.sum(out.to(tl.float32) * grads.to(tl.float32), 1)
    tl.store(delta + tl.program_id(1) * T + row, sums, mask=row < T)
    row_lse = load_row(lse + tl.program_id(1) * T, row, T, float("inf"), True)
    k += head_offset(sample, head, k_steps)
    v += head_offset(sample, head, v_steps)
    total = tl.zeros((ROWS, D), tl.float32)
    clear, end = key_range(block, T, causal, ROWS, COLUMNS)
    total = sum_over_keys(total, queries, grads, row_lse, sums, k, v, k_steps[2], v_steps[2], row, 0, clear, T, scale, causal,
                          False, D, COLUMNS)
    total = sum_over_keys(total, queries, grads, row_lse, sums, k, v, k_steps[2], v_steps[2], row, clear, end, T, scale, causal,
                          True, D, COLUMNS)
    store_tile(dq + head_offset(sample, head, dq_steps), total * (scale * 0.6931471805599453), row, dq_steps[2], T, D)


@triton.jit
def sum_over_queries(dk, dv, k, v, q, dy, lse, delta, q_step, dy_step, row, begin, end, T, scale, causal: tl.constexpr,
                     masked: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Loop over the queries from `begin` to `end` and accumulate the gradients of the keys and values `row`."""
    for start in range(begin, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        queries = load_tile(q, column, q_step, T, D, masked)
        grads = load_tile(dy, column, dy_step, T, D, masked)
        column_lse = load_row(lse, column, T, float("inf"), masked)     # exp2(s - inf) is 0
        sums = load_row(delta, column, T, 0.0, masked)
        if causal and masked:
            seen = row[:, None] <= column[None, :]
            dk, dv = key_gradients(dk, dv, k, v, queries, grads, column_lse, sums, seen, scale)
        else:
            dk, dv = key_gradients(dk, dv, k, v, queries, grads, column_lse, sums, True, scale)
    return dk, dv


@triton.jit
def keys_backward_kernel(q, k, v, dy, lse, delta, dk, dv, q_steps, k_steps, v_steps, dy_steps, dk_steps, dv_steps, H, T, scale,
                         causal: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """dk and dv of ROWS keys of one head. The grid is (blocks of keys, B * H)."""
    block, sample, head = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    row = block * ROWS + tl.arange(0, ROWS)
    keys = load_tile(k + head_offset(sample, head, k_steps), row, k_steps[2], T, D, True)
    values = load_tile(v + head_offset(sample, head, v_steps), row, v_steps[2], T, D, True)
    q += head_offset(sample, head, q_steps)
    dy += head_offset(sample, head, dy_steps)
    lse += tl.program_id(1) * T
    delta += tl.program_id(1) * T
    k_sums, v_sums = tl.zeros((ROWS, D), tl.float32), tl.zeros((ROWS, D), tl.float32)
    begin, clear = query_range(block, T, causal, ROWS, COLUMNS)
    whole = T // COLUMNS * COLUMNS                                      # behind it lies a tile that T cuts
    k_sums, v_sums = sum_over_queries(k_sums, v_sums, keys, values, q, dy, lse, delta, q_steps[2], dy_steps[2], row, begin,
                                      tl.minimum(clear, T), T, scale, causal, True, D, COLUMNS)
    k_sums, v_sums = sum_over_queries(k_sums, v_sums, keys, values, q, dy, lse, delta, q_steps[2], dy_steps[2], row, clear, whole,
                                      T, scale, causal, False, D, COLUMNS)
    k_sums, v_sums = sum_over_queries(k_sums, v_sums, keys, values, q, dy, lse, delta, q_steps[2], dy_steps[2], row,
                                      tl.maximum(clear, whole), T, T, scale, False, True, D, COLUMNS)
    store_tile(dk + head_offset(sample, head, dk_steps), k_sums * (scale * 0.6931471805599453), row, dk_steps[2], T, D)
    store_tile(dv + head_offset(sample, head, dv_steps), v_sums, row, dv_steps[2], T, D)


@dataclass(frozen=True)
class Tiles:
    """A kernel's configuration: a program holds `rows` tokens and loops over tiles of `columns`, with `stages` tiles in flight.

    registers: the most registers per thread; 0 leaves that to the compiler.
    """

    rows: int = 64
    columns: int = 64
    warps: int = 4
    stages: int = 3
    registers: int = 0

    def grid(self, q: Tensor) -> tuple[int, int]:
        """Programs: (blocks of tokens, heads of all samples)."""
        B, H, T, _ = q.shape
        return triton.cdiv(T, self.rows), B * H

    def others(self, q: Tensor, causal: bool) -> dict[str, Any]:
        """The arguments that all kernels share, and the launch options, by name."""
        _, H, T, D = q.shape
        return {"H": H, "T": T, "scale": math.log2(math.e) / math.sqrt(D), "causal": causal, "D": D, "ROWS": self.rows,
                "COLUMNS": self.columns, "num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers or None}


TILES = Tiles()


def steps(*tensors: Tensor) -> list[tuple[int, int, int]]:
    """Of each tensor, the elements between samples, heads and tokens. Raises `CourseError` if the last dim is not adjacent."""
    if any(x.stride(-1) != 1 for x in tensors):
        raise CourseError("flash attention: the last dim of a tensor is not adjacent in memory: call .contiguous() on it")
    return [(x.stride(0), x.stride(1), x.stride(2)) for x in tensors]


def launch_forward(q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool, tiles: Tiles) -> Any:
    """Write y and lse. This and the next two return what the launch returns: the compiled kernel, None if it is interpreted."""
    return flash_forward_kernel[tiles.grid(q)](q, k, v, y, lse, *steps(q, k, v, y), **tiles.others(q, causal))


def launch_backward_queries(q: Tensor, k: Tensor, v: Tensor, y: Tensor, dy: Tensor, lse: Tensor, delta: Tensor, dq: Tensor,
                            causal: bool, tiles: Tiles) -> Any:
    """Write delta and dq."""
    return queries_backward_kernel[tiles.grid(q)](q, k, v, y, dy, lse, delta, dq, *steps(q, k, v, y, dy, dq),
                                                  **tiles.others(q, causal))


def launch_backward_keys(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor,
                         causal: bool, tiles: Tiles) -> Any:
    """Write dk and dv."""
    return keys_backward_kernel[tiles.grid(q)](q, k, v, dy, lse, delta, dk, dv, *steps(q, k, v, dy, dk, dv),
                                               **tiles.others(q, causal))


def flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, tiles: Tiles = TILES) -> tuple[Tensor, Tensor]:
    """Attention, 3 x (B, H, T, D) -> (B, H, T, D), and log2 of each query's sum of exp2 of its scores, (B, H, T) in float32."""
    y, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    launch_forward(q, k, v, y, lse, causal, tiles)
    return y, lse


def flash_backward(q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, dy: Tensor, causal: bool, of_queries: Tiles = TILES,
                   of_keys: Tiles = TILES) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from what `flash_forward` took and returned, and the gradient dy of y."""
    dq, dk, dv, delta = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse)
    launch_backward_queries(q, k, v, y, dy, lse, delta, dq, causal, of_queries)
    launch_backward_keys(q, k, v, dy, lse, delta, dk, dv, causal, of_keys)
    return dq, dk, dv
