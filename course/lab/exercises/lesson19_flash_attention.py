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

from course.lab.checks import random_inputs
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.instruments.watched_memory import watched
from course.lab.sandbox.limits import Limits
from course.ops.triton_language import tl, triton
from course.utils.errors import CourseError

GUARD = 64                                           # rows behind a tensor's last token that no kernel may use or change
GUARD_VALUE = 5.0
BF16_ERROR = 0.01                                    # relative: bf16 keeps 8 bits
QUICK = Limits(seconds=120)


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

    top, total (M,) and y (M, D): float32, over the tiles so far. top, the largest score times `scale`, is -inf before the first
    tile, total and y are 0.
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
    end, first = T, T                                                   # first: keys that all queries see
    if causal:
        end = tl.minimum((block + 1) * ROWS, T)
        first = block * ROWS
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
        keys = load_tile(k, column, k_step, T, D, masked)               # (N, D)
        s = tl.dot(q, tl.trans(keys))                                   # (M, N)
        if masked:
            seen = (column < T)[None, :]
            if causal:
                seen = seen & (column[None, :] <= row[:, None])
            s = tl.where(seen, s, -float("inf"))
        values = load_tile(v, column, v_step, T, D, masked)             # (N, D)
        top, total, y = online_softmax(top, total, y, s, values, scale)
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
        clear = tl.cdiv((block + 1) * ROWS, COLUMNS) * COLUMNS
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


@triton.jit
def fold_tiles_kernel(s, v, y, lse, tops, totals, R, S, scale, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Run `online_softmax` over ROWS rows of given scores: s (R, S), v (S, D), y (R, D), lse (R,), all contiguous.

    It also stores the running maximum and sum after each tile: tops, totals (tiles, R).
    """
    row, zeros = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.zeros((ROWS,), tl.float32)
    top, total, out = zeros - float("inf"), zeros, tl.zeros((ROWS, D), tl.float32)
    for start in range(0, S, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < R)[:, None] & (column < S)[None, :]
        tile = tl.load(s + row[:, None] * S + column[None, :], mask=inside, other=-float("inf"))
        tile = tl.where((row < R)[:, None], tile, 0.0)
        top, total, out = online_softmax(top, total, out, tile, load_tile(v, column, D, S, D, True), scale)
        tl.store(tops + start // COLUMNS * R + row, top, mask=row < R)
        tl.store(totals + start // COLUMNS * R + row, total, mask=row < R)
    store_tile(y, out / total[:, None], row, D, R, D)
    tl.store(lse + row, top + tl.log2(total), mask=row < R)


@triton.jit
def key_range_kernel(ranges, T, causal: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store `key_range` of each block of queries: ranges (blocks, 2)."""
    clear, end = key_range(tl.program_id(0), T, causal, ROWS, COLUMNS)
    tl.store(ranges + 2 * tl.program_id(0), clear)
    tl.store(ranges + 2 * tl.program_id(0) + 1, end)


@triton.jit
def query_range_kernel(ranges, T, causal: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store `query_range` of each block of keys: ranges (blocks, 2)."""
    begin, clear = query_range(tl.program_id(0), T, causal, ROWS, COLUMNS)
    tl.store(ranges + 2 * tl.program_id(0), begin)
    tl.store(ranges + 2 * tl.program_id(0) + 1, clear)


def draw_scores(seed: int, hidden: bool) -> Tensors:
    """Scores (R, S), some of them -inf, that rise from tile to tile in half of the rows and fall in the others; values (S, D)."""
    generator = random_inputs.generator(seed)
    R, S, D = (21, 53, 32) if hidden else (19, 37, 16)
    scores = 2 * random_inputs.normal(generator, R, S)
    slope = torch.linspace(-3, 3, R, dtype=torch.float64)[:, None]
    scores += slope * torch.linspace(-1, 1, S, dtype=torch.float64)
    scores[torch.rand(R, S, generator=generator) < 0.1] = -math.inf
    scores[:, 0] = scores[:, 0].nan_to_num(neginf=0.0)                  # every first tile has a key that is seen
    scores[1] -= 30                                                     # and one row lies below zero
    return {"scores": scores, "values": random_inputs.normal(generator, S, D)}


def fold_tiles(scores: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`online_softmax` over tiles of 16 keys: (softmax(scores) values, log-sum-exp, and after each tile maximum and sum).

    scores (R, S) float32, values (S, D) -> (R, D), (R,), 2 x (tiles, R).
    """
    (R, S), D = scores.shape, values.shape[1]
    y, lse, (tops, totals) = values.new_empty(R, D), torch.empty(R), torch.empty(2, triton.cdiv(S, 16), R)
    fold_tiles_kernel[(triton.cdiv(R, 16),)](scores, values, y, lse, tops, totals, R, S, scale, D, 16, 16)
    return y, lse, tops, totals


def run_online_softmax(inputs: Tensors) -> Tensors:
    """Output and log-sum-exp of rows in float32, with large scores too, and with values in bf16."""
    found: Tensors = {}
    for name, size, dtype in (("", 1.0, torch.float32), ("large_", 300.0, torch.float32), ("bf16_", 1.0, torch.bfloat16)):
        y, lse, *_ = fold_tiles((inputs["scores"] * size).float(), inputs["values"].to(dtype), math.log2(math.e) / 4)
        found |= {f"{name}y": y, f"{name}lse": lse}
    return found


def weigh_online_softmax(inputs: Tensors, returned: Tensors) -> Tensors:
    """Replace the output in bf16 by whether it is near the one in float64."""
    p = (inputs["scores"] / 4).softmax(-1)
    return exact(returned, "y", "lse", "large_y", "large_lse") | {
        "bf16": near((returned.get("bf16_y"), p @ inputs["values"].bfloat16().double()))}


def exact(returned: Tensors, *names: str) -> Tensors:
    """The outputs of these names that were returned."""
    return {name: returned[name] for name in names if name in returned}


def near(*pairs: tuple[Tensor | None, Tensor]) -> Tensor:
    """1.0 if each first tensor, which an answer returned, is in bf16 and near the second one; else 0.0."""
    return torch.tensor(float(all(
        got is not None and got.shape == wanted.shape and got.dtype == torch.bfloat16
        and bool((got.double() - wanted).norm() <= BF16_ERROR * wanted.norm()) for got, wanted in pairs)))


def draw_attention(seed: int, hidden: bool) -> Tensors:
    """Queries, keys, values and the gradient of the output, (4, B, H, T, D); T is no multiple of a tile."""
    generator = random_inputs.generator(seed)
    return {"qkvg": random_inputs.normal(generator, *((4, 2, 2, 43, 32) if hidden else (4, 2, 2, 37, 16)))}


def laid_out(x: Tensor, layout: int) -> Tensor:
    """A copy of x (B, H, T, D) in one of four layouts, none contiguous, with guarded rows behind each head's last token."""
    B, H, T, D = x.shape
    shape = ((B, T + GUARD, H, D), (B, H, T + GUARD, D), (B, T + GUARD, H, 2 * D), (B, H, T + GUARD, 2 * D))[layout]
    room = torch.full(shape, GUARD_VALUE, dtype=x.dtype)
    view = (room if layout % 2 else room.transpose(1, 2))[:, :, :T, -D:]
    return view.copy_(x)


def guarded_lse(B: int, H: int, T: int) -> Tensor:
    """Memory for (B, H, T) numbers, contiguous, with guarded ones behind them."""
    return torch.full((B * H * T + GUARD,), GUARD_VALUE)[:B * H * T].view(B, H, T)


def guards_kept(*tensors: Tensor) -> bool:
    """Whether nothing has changed in the memory of these tensors that is not theirs."""
    for x in tensors:
        room = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).clone()
        room.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(GUARD_VALUE)
        if not (room == GUARD_VALUE).all():
            return False
    return True


def ranges(kernel: Any, T: int) -> Tensor:
    """What a kernel of ranges stores, causal and not, for several tile sizes, end to end."""
    found = []
    for causal in (True, False):
        for rows, columns in ((16, 32), (32, 16)):
            blocks = triton.cdiv(T, rows)
            stored = torch.full((blocks, 2), -1, dtype=torch.int32)
            kernel[(blocks,)](stored, T, causal, rows, columns)
            found.append(stored.flatten())
    return torch.cat(found).double()


CASES = (("wide", True, Tiles(16, 32), 1.0), ("tall", True, Tiles(32, 16), 1.0), ("all", False, Tiles(16, 16), 1.0),
         ("large", True, Tiles(16, 16), 40.0))       # name, causal, tiles, factor of the queries


def run_flash_forward(inputs: Tensors) -> Tensors:
    """Output and log-sum-exp in float32 of four cases, output in bf16, the ranges, and what is read, masked and written."""
    found: Tensors = {}
    kept, thrifty, clear = 1.0, True, True            # kept: 0.5 if memory was only read, 0.0 if it has changed
    cases = [(name, causal, tiles, inputs["qkvg"][:3, :1].float() * torch.tensor([size, 1, 1]).view(3, 1, 1, 1, 1))
             for name, causal, tiles, size in CASES]                    # one sample
    for _, _, _, qkv in cases:
        qkv[1, :, :, 0] = -3 * inputs["qkvg"][0, :1, :, 0].float()      # the only key that query 0 sees: a score far below zero
    for name, causal, tiles, qkv in [*cases, ("bf16", True, Tiles(32, 32), inputs["qkvg"][:3].bfloat16())]:
        q, k, v = (laid_out(x, i) for i, x in enumerate(qkv))
        y, lse = laid_out(torch.zeros_like(q), 3), guarded_lse(*q.shape[:3])
        with watched(q, k, v, y, lse) as accesses:
            launch_forward(q, k, v, y, lse, causal, tiles)
        kept = min(kept, (1.0 if accesses.inside else 0.5) if guards_kept(y, lse) else 0.0)
        thrifty = thrifty and max(accesses.loads[1:3]) <= most_loads(q, causal, tiles)
        clear = clear and max(map(accesses.masked_loads, (1, 2))) <= most_masked(q, causal, tiles)
        found |= {f"{name}_y": y, f"{name}_lse": lse}
    return found | {"ranges": ranges(key_range_kernel, q.shape[2]), "reads": torch.tensor(float(thrifty)),
                    "masks": torch.tensor(float(clear)), "guards": torch.tensor(kept)}


def most_loads(x: Tensor, causal: bool, tiles: Tiles) -> int:
    """The elements of whole tiles that a kernel has to load of keys, or of values, for all blocks of queries."""
    B, H, T, D = x.shape
    ends = [min((block + 1) * tiles.rows, T) if causal else T for block in range(triton.cdiv(T, tiles.rows))]
    return B * H * D * sum(triton.cdiv(end, tiles.columns) * tiles.columns for end in ends)


def most_masked(x: Tensor, causal: bool, tiles: Tiles) -> int:
    """The elements of keys, or of values, in tiles that some query of a block does not see whole, for all blocks of queries."""
    B, H, T, D = x.shape
    keys = 0
    for block in range(triton.cdiv(T, tiles.rows)):
        end, seen = (min((block + 1) * tiles.rows, T), block * tiles.rows) if causal else (T, T)
        keys += min(triton.cdiv(end, tiles.columns) * tiles.columns, T) - seen // tiles.columns * tiles.columns
    return B * H * D * keys


def weigh_flash_forward(inputs: Tensors, returned: Tensors) -> Tensors:
    """Replace output and log-sum-exp in bf16 by whether they are near those in float64."""
    q, k, v = inputs["qkvg"][:3].bfloat16().double()
    wanted, lse = plain_scores(q, k, True).logsumexp(-1) * math.log2(math.e), returned.get("bf16_lse")
    right_lse = lse is not None and lse.shape == wanted.shape and torch.allclose(lse.double(), wanted, 1e-3, 1e-3)
    names = [f"{case[0]}_{part}" for case in CASES for part in ("y", "lse")]
    return exact(returned, *names, "ranges", "reads", "masks", "guards") | {
        "bf16": near((returned.get("bf16_y"), plain_attention(q, k, v, True))) * right_lse}


def plain_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """All scores of attention, (B, H, T, T)."""
    s = q @ k.mT / math.sqrt(q.shape[-1])
    return s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf) if causal else s


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention with all scores in memory."""
    return plain_scores(q, k, causal).softmax(-1) @ v


def run_flash_backward(inputs: Tensors) -> Tensors:
    """Gradients in float32 of three cases and in bf16, the ranges, and whether the kernel of keys reads too much."""
    found: Tensors = {}
    thrifty = True
    cases = [(name, causal, tiles, inputs["qkvg"][:, :1].float()) for name, causal, tiles, _ in CASES[:3]]
    for name, causal, tiles, qkvg in [*cases, ("bf16", True, Tiles(32, 32), inputs["qkvg"].bfloat16())]:
        q, k, v, dy = (laid_out(x, i) for i, x in enumerate(qkvg))
        y, lse = flash_forward(q, k, v, causal, tiles)
        dq, dk, dv = (laid_out(torch.zeros_like(q), i) for i in (3, 2, 1))
        delta = guarded_lse(*q.shape[:3])
        launch_backward_queries(q, k, v, y, dy, lse, delta, dq, causal, tiles)
        with watched(q, dy, k, v, lse, delta, dk, dv) as accesses:
            launch_backward_keys(q, k, v, dy, lse, delta, dk, dv, causal, tiles)
        thrifty = thrifty and accesses.inside and max(accesses.loads[:2]) <= most_queries(q, causal, tiles)
        found |= {f"{name}_dq": dq, f"{name}_dk": dk, f"{name}_dv": dv}
    return found | {"ranges": ranges(query_range_kernel, q.shape[2]), "reads": torch.tensor(float(thrifty))}


def most_queries(x: Tensor, causal: bool, tiles: Tiles) -> int:
    """The elements of whole tiles that a kernel has to load of queries, or of gradients, for all blocks of keys."""
    B, H, T, D = x.shape
    begins = [block * tiles.rows // tiles.columns * tiles.columns if causal else 0 for block in range(triton.cdiv(T, tiles.rows))]
    return B * H * D * sum(T - begin for begin in begins)


def weigh_flash_backward(inputs: Tensors, returned: Tensors) -> Tensors:
    """Replace the gradients in bf16 by whether they are near those in float64."""
    q, k, v, dy = inputs["qkvg"].bfloat16().double()
    for x in (q, k, v):
        x.requires_grad_()
    wanted = torch.autograd.grad(plain_attention(q, k, v, True), (q, k, v), dy)
    names = [f"{case[0]}_{part}" for case in CASES[:3] for part in ("dq", "dk", "dv")]
    pairs = [(returned.get(f"bf16_{name}"), gradient) for name, gradient in zip(("dq", "dk", "dv"), wanted, strict=True)]
    return exact(returned, *names, "ranges", "reads") | {"bf16": near(*pairs)}


HERE = __name__
ROUNDING = {"bf16": "it is further from the result in float64 than rounding explains, or not in bf16"}
OUTSIDE = "a pointer leads elsewhere or behind token T, or rows of y or numbers of lse behind it have changed"
READS = "more is loaded than the tiles that causality leaves, each once"
MASKS = "it also masks tiles that every query sees in full"
EXERCISES = [
    Exercise("online-softmax", "19", (f"{HERE}.online_softmax",), draw_scores, run_online_softmax, weigh=weigh_online_softmax,
             tolerance=1e-5, limits=QUICK, flags=ROUNDING, claims={
        "y": "after the last tile the output is the softmax of all scores, times the values",
        "lse": "the running maximum and sum give the log-sum-exp of all scores",
        "large_y": "scores of a thousand, whose exponential no number can hold, give finite outputs",
        "large_lse": "and their log-sum-exps are right",
        "bf16": "with values in bf16 the output is right up to rounding"}),
    Exercise("flash-forward", "19", tuple(f"{HERE}.{name}" for name in ("key_range", "attend_keys", "flash_forward_kernel")),
             draw_attention, run_flash_forward, weigh=weigh_flash_forward, tolerance=1e-5, limits=QUICK, points=3,
             flags=ROUNDING | {"reads": READS, "masks": MASKS, "guards": OUTSIDE}, claims={
        "ranges": "each block of queries knows up to which key it sees all, and after which key it sees none",
        "wide_y": "causal attention is right if a tile has more keys than the block has queries",
        "wide_lse": "and so is its log-sum-exp",
        "tall_y": "causal attention is right if the block has more queries than a tile has keys",
        "tall_lse": "and so is its log-sum-exp",
        "all_y": "without causality every query sees every key, and none beyond the last one",
        "all_lse": "and so its log-sum-exp counts them all",
        "large_y": "large scores give finite outputs",
        "large_lse": "and finite log-sum-exps",
        "bf16": "in bf16 both are right up to rounding, for each head of each sample",
        "reads": "each block loads the tiles that its queries see, once, and no others",
        "masks": "and uses a mask only for tiles that some query sees in part",
        "guards": "nothing is read or written outside the tensors, or written beyond the last token"}),
    Exercise("flash-backward", "19", tuple(f"{HERE}.{name}" for name in ("query_gradient", "key_gradients", "query_range")),
             draw_attention, run_flash_backward, weigh=weigh_flash_backward, tolerance=1e-5, limits=QUICK, points=3,
             flags=ROUNDING | {"reads": READS}, claims={
        "ranges": "each block of keys knows which queries are the first to see it, and from which one on all do",
        "wide_dq": "the gradient of the queries is right with causality",
        "wide_dk": "so is that of the keys",
        "wide_dv": "and that of the values",
        "tall_dq": "with blocks larger than tiles, the gradient of the queries is right",
        "tall_dk": "so is that of the keys",
        "tall_dv": "and that of the values",
        "all_dq": "without causality the gradient of the queries is right",
        "all_dk": "so is that of the keys",
        "all_dv": "and that of the values",
        "bf16": "in bf16 all three are right up to rounding",
        "reads": "each block of keys loads the tiles of queries that see it, once, and no others"}),
]
