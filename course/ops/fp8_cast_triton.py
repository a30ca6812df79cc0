"""Triton kernel behind `course.fp8.native.quantize`: scale, cast, transpose and record the amax, reading the tensor once.

Plain tensor operations need one pass each for |x|, its maximum, scaling, clamping, cast and transpose. This kernel holds a tile
of 128 x 128 numbers in registers and writes it twice: as it is, and transposed through shared memory. It is memory-bound: 2
bytes read and 2 written per number of a bf16 tensor.

It transposes 32-bit words. A word packs one column's numbers from four rows, which are adjacent in the transposed tensor. So
the transpose moves a quarter as many elements as with single bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128                                          # a row of the transposed tile has 128 bytes, one write of a warp
# Four float32 to four FP8 numbers in one word, saturating. In PTX, because ptxas 12.8 (of Triton 3.6) miscompiles Triton's own
# cast if its result is used twice, as here: it reads a register that was never set.
CAST = """{{ .reg .b16 low, high;
             cvt.rn.satfinite.{kind}x2.f32 low, $2, $1;
             cvt.rn.satfinite.{kind}x2.f32 high, $4, $3;
             mov.b32 $0, {{low, high}}; }}"""
CASTS = {torch.float8_e4m3fn: CAST.format(kind="e4m3"), torch.float8_e5m2: CAST.format(kind="e5m2")}


@triton.jit
def kernel(x, q, qt, scale, amax, rows, columns, padded, cast: tl.constexpr,
           both: tl.constexpr, note: tl.constexpr, tile: tl.constexpr):
    """x (rows, columns) -> q (rows, columns) bytes, qt (columns, padded / 4) words; one tile of x per program."""
    fours: tl.constexpr = tile // 4
    by = tl.load(scale)
    four = (tl.program_id(0) * fours + tl.arange(0, fours)).to(tl.int64)[:, None]       # (tile/4, 1) int64: x may be large
    n = (tl.program_id(1) * tile + tl.arange(0, tile))[None, :]                         # (1, tile)
    words = tl.zeros((fours, tile), tl.int32)
    most = tl.zeros((fours, tile), tl.float32)
    for i in tl.static_range(4):
        m = 4 * four + i                            # every fourth row
        inside = (m < rows) & (n < columns)
        value = tl.load(x + m * columns + n, mask=inside, other=0.0).to(tl.float32)     # (tile/4, tile)
        most = tl.maximum(most, tl.abs(value))
        value *= by
        value = tl.where(tl.abs(value) < float("inf"), value, float("nan"))             # an infinity must not saturate
        byte = tl.inline_asm_elementwise(cast, "=r,r,r,r,r", [value], dtype=tl.uint8, is_pure=True, pack=4)
        tl.store(q + m * columns + n, byte, mask=inside)
        words |= byte.to(tl.int32) << 8 * i
    if note:
        top = tl.max(tl.max(most, 1), 0)
        if top > tl.load(amax):                     # amax only grows, so few programs need the slow update
            tl.atomic_max(amax, top, sem="relaxed")
    if both:
        four, n = tl.trans(four), tl.trans(n).to(tl.int64)                              # (1, tile/4), (tile, 1)
        line = tl.multiple_of(padded // 4, 4)       # words per row of qt; zeros beyond x's rows
        tl.store(qt + n * line + four, tl.trans(words), mask=(n < columns) & (four < line))


def quantize(x: Tensor, scale: Tensor, amax: Tensor, kind: torch.dtype, both: bool, note: bool) -> tuple[Tensor, Tensor]:
    """`course.fp8.native.quantize` on a GPU."""
    rows, columns = x.shape
    padded = rows + -rows % 16
    x = x.contiguous()
    q = torch.empty_like(x, dtype=kind)
    qt = x.new_empty(columns, padded, dtype=kind) if both else q.new_empty(0)
    grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))
    kernel[grid](x, q.view(torch.uint8), qt.view(torch.int32), scale, amax, rows, columns, padded, CASTS[kind], both, note, TILE,
                 num_warps=8)
    return q, qt
