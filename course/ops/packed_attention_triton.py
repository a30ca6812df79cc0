"""Triton kernels behind `course.ops.packed_attention`: FlashAttention-2 (Dao 2023, arXiv:2307.08691) on the packed qkv tensor.

The head width is split into two parts, each a power of two: 72 becomes 64 + 16 (the last 8 are zeros). A kernel that pads to
the next power of two would compute with 128. Scores are in units of log2, because GPUs have an exp2 instruction.

Forward: a program holds some queries of one head and loops over tiles of keys and values. Backward has two kernels, which both
recompute the scores: `queries` holds some queries and accumulates their gradient; `keys` holds some keys and values. So no
atomic additions are needed, and every sum has a fixed order. Accumulating dq with atomics would save two of seven matmuls.

The tiles in the loop are loaded through tensor descriptors (TMA), without address computations in the threads. A descriptor
knows rows of tokens and columns, but not where a head or a sample ends. Beyond a head's width it loads the next head, which is
multiplied by zeros in the held tile. Beyond the last token it loads the next sample, which a mask removes.

Shapes, all contiguous: qkv, dqkv (B, T, 3, h, d); y, dy (B, T, h, d); lse, delta (B, h, T) in float32.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from course.utils.errors import CourseError

WARPS = 4
PART = tl.constexpr(64)                             # tokens per partial sum of a gradient


@triton.jit
def pair(x, row, step, tokens, width: tl.constexpr, main: tl.constexpr, rest: tl.constexpr,
         masked: tl.constexpr):
    """Load the two parts of some rows of x with stride `step`; zeros beyond the width and, if masked, beyond the tokens."""
    first, second = tl.arange(0, main), main + tl.arange(0, rest if rest else 16)
    inside = (row < tokens)[:, None]
    x += row[:, None] * step
    if masked:
        one = tl.load(x + first[None, :], mask=inside, other=0.0)
    else:
        one = tl.load(x + first[None, :])
    if rest == 0:
        two = tl.zeros((row.shape[0], 16), x.dtype.element_ty)          # nothing uses it
    elif masked:
        two = tl.load(x + second[None, :], mask=inside & (second < width)[None, :], other=0.0)
    elif main + rest > width:
        two = tl.load(x + second[None, :], mask=(second < width)[None, :], other=0.0)
    else:
        two = tl.load(x + second[None, :])
    return one, two


@triton.jit
def passing(one, two, row, column, main: tl.constexpr, rest: tl.constexpr):
    """Load the two parts of a tile that starts at `row`, of the head that starts at `column`. one, two: tensor descriptors."""
    first = one.load([row, column])
    if rest:
        second = two.load([row, column + main])
    else:
        second = tl.zeros((first.shape[0], 16), first.dtype)            # nothing uses it
    return first, second


@triton.jit
def times(a1, a2, b1, b2, rest: tl.constexpr):
    """a bᵀ: (M, d), (N, d) -> (M, N)."""
    s = tl.dot(a1, tl.trans(b1))
    if rest:
        s = tl.dot(a2, tl.trans(b2), s)
    return s


@triton.jit
def added(sum1, sum2, p, b1, b2, rest: tl.constexpr):
    """sum + p b: (M, d), (M, N), (N, d) -> (M, d)."""
    sum1 = tl.dot(p, b1, sum1)
    if rest:
        sum2 = tl.dot(p, b2, sum2)
    return sum1, sum2


@triton.jit
def keep(x, one, two, row, step, tokens, width: tl.constexpr, main: tl.constexpr, rest: tl.constexpr):
    """Store the two parts of some rows."""
    first, second = tl.arange(0, main), main + tl.arange(0, rest if rest else 16)
    inside = (row < tokens)[:, None]
    x += row[:, None] * step
    tl.store(x + first[None, :], one.to(x.dtype.element_ty), mask=inside)
    if rest:
        tl.store(x + second[None, :], two.to(x.dtype.element_ty), mask=inside & (second < width)[None, :])


@triton.jit
def total(x, one, two, row, tokens, kind: tl.constexpr, width: tl.constexpr, main: tl.constexpr, rest: tl.constexpr):
    """Store the sum over rows of the rounded values that `keep` stores, from which the weight gradient is computed too."""
    first, second = tl.arange(0, main), main + tl.arange(0, rest if rest else 16)
    inside = (row < tokens)[:, None]
    tl.store(x + first, tl.sum(tl.where(inside, one.to(kind).to(tl.float32), 0.0), 0))
    if rest:
        tl.store(x + second, tl.sum(tl.where(inside, two.to(kind).to(tl.float32), 0.0), 0), mask=second < width)


@triton.jit
def answer(y1, y2, top, sums, q1, q2, one, two, at, k, v, row, begin, end, tokens, scale, causal: tl.constexpr,
           masked: tl.constexpr, main: tl.constexpr, rest: tl.constexpr, columns: tl.constexpr, stages: tl.constexpr):
    """Online softmax: loop over keys and values from `begin` to `end` for some queries."""
    for start in tl.range(begin, end, columns, num_stages=stages):
        k1, k2 = passing(one, two, at + start, k, main, rest)
        s = times(q1, q2, k1, k2, rest)
        if masked:
            key = start + tl.arange(0, columns)
            seen = (key < tokens)[None, :]
            if causal:
                seen = seen & (key[None, :] <= row[:, None])
            s = tl.where(seen, s, -float("inf"))
        new = tl.maximum(top, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - new[:, None])
        by = tl.exp2(top - new)
        sums = sums * by + tl.sum(p, 1)
        top = new
        v1, v2 = passing(one, two, at + start, v, main, rest)
        y1, y2 = added(y1 * by[:, None], y2 * by[:, None], p.to(v1.dtype), v1, v2, rest)
    return y1, y2, top, sums


@triton.jit
def forward(qkv, one, two, y, lse, tokens, heads, scale, causal: tl.constexpr, even: tl.constexpr, width: tl.constexpr,
            main: tl.constexpr, rest: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, stages: tl.constexpr):
    """y and lse for some queries of a head."""
    block, own = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)       # causal: the longest first
    sample, head = own // heads, own % heads
    narrow = heads * width
    q = qkv + sample * tokens * 3 * narrow + head * width
    at, k = (sample * tokens).to(tl.int32), (narrow + head * width).to(tl.int32)
    row = block * rows + tl.arange(0, rows)
    q1, q2 = pair(q, row, 3 * narrow, tokens, width, main, rest, not even)
    y1, y2 = tl.zeros((rows, main), tl.float32), tl.zeros((rows, rest if rest else 16), tl.float32)
    top, sums = tl.full((rows,), -float("inf"), tl.float32), tl.zeros((rows,), tl.float32)
    end = tl.minimum((block + 1) * rows, tokens) if causal else tokens
    clear = (block * rows if causal else end) // columns * columns      # up to here every query sees every key
    y1, y2, top, sums = answer(y1, y2, top, sums, q1, q2, one, two, at, k, k + narrow, row, 0, clear, tokens, scale, causal,
                               False, main, rest, columns, stages)
    if causal or not even:
        y1, y2, top, sums = answer(y1, y2, top, sums, q1, q2, one, two, at, k, k + narrow, row, clear, end, tokens, scale, causal,
                                   True, main, rest, columns, stages)
    y += sample * tokens * narrow + head * width
    keep(y, y1 / sums[:, None], y2 / sums[:, None], row, narrow, tokens, width, main, rest)
    tl.store(lse + own * tokens + row, top + tl.log2(sums), mask=row < tokens)


@triton.jit
def asked(dq1, dq2, q1, q2, g1, g2, lse, delta, one, two, at, k, v, row, begin, end, tokens, scale,
          causal: tl.constexpr, masked: tl.constexpr, main: tl.constexpr, rest: tl.constexpr, columns: tl.constexpr,
          stages: tl.constexpr):
    """Loop over keys and values from `begin` to `end`, and accumulate the gradient of some queries."""
    for start in tl.range(begin, end, columns, num_stages=stages):
        k1, k2 = passing(one, two, at + start, k, main, rest)
        v1, v2 = passing(one, two, at + start, v, main, rest)
        s, dp = times(q1, q2, k1, k2, rest), times(g1, g2, v1, v2, rest)
        p = tl.exp2(s * scale - lse[:, None])
        if masked:
            key = start + tl.arange(0, columns)
            seen = (key < tokens)[None, :]
            if causal:
                seen = seen & (key[None, :] <= row[:, None])
            p = tl.where(seen, p, 0.0)
        dq1, dq2 = added(dq1, dq2, (p * (dp - delta[:, None])).to(k1.dtype), k1, k2, rest)
    return dq1, dq2


@triton.jit
def queries(qkv, one, two, y, dy, lse, delta, dqkv, parts, tokens, heads, scale, causal: tl.constexpr, even: tl.constexpr,
            width: tl.constexpr, main: tl.constexpr, rest: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
            stages: tl.constexpr):
    """The gradient of some queries of a head and its sum; also delta, each query's dy · y, which `keys` needs too."""
    block, own = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    sample, head = own // heads, own % heads
    narrow = heads * width
    q = qkv + sample * tokens * 3 * narrow + head * width
    at, k = (sample * tokens).to(tl.int32), (narrow + head * width).to(tl.int32)
    own_y = sample * tokens * narrow + head * width
    row = block * rows + tl.arange(0, rows)
    q1, q2 = pair(q, row, 3 * narrow, tokens, width, main, rest, not even)
    g1, g2 = pair(dy + own_y, row, narrow, tokens, width, main, rest, not even)
    y1, y2 = pair(y + own_y, row, narrow, tokens, width, main, rest, not even)
    d = tl.sum(y1.to(tl.float32) * g1.to(tl.float32), 1) + tl.sum(y2.to(tl.float32) * g2.to(tl.float32), 1)
    tl.store(delta + own * tokens + row, d, mask=row < tokens)
    top = tl.load(lse + own * tokens + row, mask=row < tokens, other=0.0)
    dq1, dq2 = tl.zeros((rows, main), tl.float32), tl.zeros((rows, rest if rest else 16), tl.float32)
    end = tl.minimum((block + 1) * rows, tokens) if causal else tokens
    clear = (block * rows if causal else end) // columns * columns
    dq1, dq2 = asked(dq1, dq2, q1, q2, g1, g2, top, d, one, two, at, k, k + narrow, row, 0, clear, tokens, scale, causal, False,
                     main, rest, columns, stages)
    if causal or not even:
        dq1, dq2 = asked(dq1, dq2, q1, q2, g1, g2, top, d, one, two, at, k, k + narrow, row, clear, end, tokens, scale, causal,
                         True, main, rest, columns, stages)
    scale *= 0.6931471805599453                     # ln 2: convert from units of log2
    keep(dqkv + sample * tokens * 3 * narrow + head * width, dq1 * scale, dq2 * scale, row, 3 * narrow, tokens, width, main, rest)
    part = parts + (sample * tl.cdiv(tokens, PART) + block * (rows // PART)) * 3 * narrow + head * width
    total(part, dq1 * scale, dq2 * scale, row, tokens, dqkv.dtype.element_ty, width, main, rest)


@triton.jit
def shown(dk1, dk2, dv1, dv2, k1, k2, v1, v2, one, two, dy1, dy2, at, q, g, lse, delta, row, begin, end, tokens, scale,
          causal: tl.constexpr, masked: tl.constexpr, main: tl.constexpr, rest: tl.constexpr, columns: tl.constexpr,
          stages: tl.constexpr):
    """Loop over queries from `begin` to `end`, and accumulate the gradients of some keys and values."""
    for start in tl.range(begin, end, columns, num_stages=stages):
        query = start + tl.arange(0, columns)
        q1, q2 = passing(one, two, at + start, q, main, rest)
        g1, g2 = passing(dy1, dy2, at + start, g, main, rest)
        if masked:
            top = tl.load(lse + query, mask=query < tokens, other=0.0)
            d = tl.load(delta + query, mask=query < tokens, other=0.0)
        else:
            top, d = tl.load(lse + query), tl.load(delta + query)
        s, dp = times(k1, k2, q1, q2, rest), times(v1, v2, g1, g2, rest)
        p = tl.exp2(s * scale - top[None, :])
        if masked:
            seen = (query < tokens)[None, :]
            if causal:
                seen = seen & (row[:, None] <= query[None, :])
            p = tl.where(seen, p, 0.0)
        dv1, dv2 = added(dv1, dv2, p.to(g1.dtype), g1, g2, rest)
        dk1, dk2 = added(dk1, dk2, (p * (dp - d[None, :])).to(q1.dtype), q1, q2, rest)
    return dk1, dk2, dv1, dv2


@triton.jit
def keys(qkv, one, two, dy1, dy2, lse, delta, dqkv, parts, tokens, heads, scale, causal: tl.constexpr, even: tl.constexpr,
         width: tl.constexpr, main: tl.constexpr, rest: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
         stages: tl.constexpr):
    """The gradients of some keys and values of a head, and the gradients' sums."""
    block, own = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sample, head = own // heads, own % heads
    narrow = heads * width
    of = sample * tokens * 3 * narrow + head * width
    q, at, column = qkv + of, (sample * tokens).to(tl.int32), (head * width).to(tl.int32)
    lse, delta = lse + own * tokens, delta + own * tokens
    row = block * rows + tl.arange(0, rows)
    k1, k2 = pair(q + narrow, row, 3 * narrow, tokens, width, main, rest, not even)
    v1, v2 = pair(q + 2 * narrow, row, 3 * narrow, tokens, width, main, rest, not even)
    dk1, dk2 = tl.zeros((rows, main), tl.float32), tl.zeros((rows, rest if rest else 16), tl.float32)
    dv1, dv2 = tl.zeros((rows, main), tl.float32), tl.zeros((rows, rest if rest else 16), tl.float32)
    clear = 0                                       # from here on every query sees every key
    if causal:
        clear = tl.minimum(tl.cdiv((block + 1) * rows, columns) * columns, tokens)
        dk1, dk2, dv1, dv2 = shown(dk1, dk2, dv1, dv2, k1, k2, v1, v2, one, two, dy1, dy2, at, column, column, lse, delta, row,
                                   block * rows // columns * columns, clear, tokens, scale, causal, True, main, rest, columns,
                                   stages)
    end = tokens // columns * columns
    dk1, dk2, dv1, dv2 = shown(dk1, dk2, dv1, dv2, k1, k2, v1, v2, one, two, dy1, dy2, at, column, column, lse, delta, row,
                               clear, end, tokens, scale, False, False, main, rest, columns, stages)
    if not even:
        dk1, dk2, dv1, dv2 = shown(dk1, dk2, dv1, dv2, k1, k2, v1, v2, one, two, dy1, dy2, at, column, column, lse, delta, row,
                                   tl.maximum(clear, end), tokens, tokens, scale, False, True, main, rest, columns, stages)
    scale *= 0.6931471805599453
    part = parts + (sample * tl.num_programs(0) + block) * 3 * narrow + head * width
    keep(dqkv + of + narrow, dk1 * scale, dk2 * scale, row, 3 * narrow, tokens, width, main, rest)
    keep(dqkv + of + 2 * narrow, dv1, dv2, row, 3 * narrow, tokens, width, main, rest)
    total(part + narrow, dk1 * scale, dk2 * scale, row, tokens, dqkv.dtype.element_ty, width, main, rest)
    total(part + 2 * narrow, dv1, dv2, row, tokens, dqkv.dtype.element_ty, width, main, rest)


def attention(qkv: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """`course.ops.packed_attention.attention_plain` on a GPU, in 16 bits."""
    qkv = qkv.contiguous()
    B, T, _, h, d = qkv.shape
    y, lse = qkv.new_empty(B, T, h, d), qkv.new_empty(B, h, T, dtype=torch.float32)
    tile = Tile(64, 64, 2) if causal else Tile(128, 64, 3)
    forward[tile.grid(qkv)](qkv, *tile.views(qkv), y, lse, *tile.others(qkv, causal), **tile.how())
    return y, lse


def attention_backward(dy: Tensor, qkv: Tensor, y: Tensor, lse: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """`course.ops.packed_attention.attention_backward_plain` on a GPU, in 16 bits."""
    qkv, y, dy, dqkv, delta = qkv.contiguous(), y.contiguous(), dy.contiguous(), torch.empty_like(qkv), torch.empty_like(lse)
    B, T, _, h, d = qkv.shape
    sums = qkv.new_zeros(B, triton.cdiv(T, PART.value), 3, h, d, dtype=torch.float32)
    tile = Tile(64, 32, 3) if causal or T < 512 or cramped(qkv) else Tile(128, 64, 3, 240)
    queries[tile.grid(qkv)](qkv, *tile.views(qkv), y, dy, lse, delta, dqkv, sums, *tile.others(qkv, causal), **tile.how())
    tile = Tile(PART.value, 32 if parts(d)[1] else 64, 3, 168)
    keys[tile.grid(qkv)](qkv, *tile.views(qkv), *tile.views(dy), lse, delta, dqkv, sums, *tile.others(qkv, causal), **tile.how())
    return dqkv, sums.sum((0, 1))


def cramped(qkv: Tensor) -> bool:
    """Whether the larger tile of heads wider than 96 needs more shared memory than the GPU has.

    Where tiles are loaded by TMA, it needs 131 KB, but workstation Blackwell (capability 12) has 99 KB. Ada also has 99 KB, but
    there the tile needs 84 KB.
    """
    return qkv.shape[-1] > 96 and torch.cuda.get_device_capability(qkv.device)[0] == 12


class Tile(NamedTuple):
    """Tile sizes: a program holds `rows` tokens of a head and loops over tiles of `columns` tokens, with `stages` in flight.

    The sizes above are the best of those tried on an H200 for heads of 48, 64 and 72. Small tiles and a limit of `registers` per
    thread (0: the compiler's choice) let three programs share a multiprocessor: one computes matmuls while others compute
    exponentials.
    """

    rows: int
    columns: int
    stages: int
    registers: int = 0

    def grid(self, qkv: Tensor) -> tuple[int, int]:
        """The launch grid: (programs per head, heads of all samples).

        Raises `CourseError` for more heads than a launch allows, and for samples too long for 32-bit offsets.
        """
        B, T, _, h, d = qkv.shape
        if T * 3 * h * d >= 2**31:
            raise CourseError(f"packed attention: {T} tokens of {h} heads of {d} are {T * 3 * h * d} numbers in a sample, and "
                              "2147483647 are the most: use a shorter context, or attention=cudnn")
        if B * h > 65535:
            raise CourseError(f"packed attention: {B} samples of {h} heads are {B * h} heads at a time, and 65535 is the most: "
                              "use a smaller train.micro_batch, or attention=cudnn")
        return triton.cdiv(T, self.rows), B * h

    def views(self, x: Tensor) -> list[TensorDescriptor]:
        """Tensor descriptors for the two parts of a tile in the loop; they view x, (B, T, ..., d), as rows of tokens."""
        rows, step = x.shape[0] * x.shape[1], x[0, 0].numel()
        return [TensorDescriptor(x, [rows, step], [step, 1], [self.columns, part or 16]) for part in parts(x.shape[-1])]

    def others(self, qkv: Tensor, causal: bool) -> tuple[float, ...]:
        """The kernels' last arguments."""
        _, T, _, h, d = qkv.shape
        even = T % max(self.rows, self.columns) == 0                    # tiles end where the tokens end
        return T, h, math.log2(math.e) / math.sqrt(d), causal, even, d, *parts(d), self.rows, self.columns, self.stages

    def how(self) -> dict[str, Any]:
        """Launch options: warps, and the most registers per thread."""
        return {"num_warps": WARPS, "maxnreg": self.registers or None}


def parts(width: int) -> tuple[int, int]:
    """Split a head width: (the largest power of two in it, the smallest power of two >= 16 that covers the rest, or 0)."""
    main = 1 << (width.bit_length() - 1)
    return main, 0 if main == width else max(16, triton.next_power_of_2(width - main))
