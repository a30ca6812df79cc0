"""The kernel behind `course.fp8.quantize` on a GPU: scale, cast, transpose and note the amax, reading the tensor once.

Plain tensor operations need a pass each for |x|, its maximum, the scaling, the cutting-off, the cast and the transpose. This
one holds a tile of 128 x 128 numbers in registers and writes it twice, as rows and, turned round in shared memory, as
columns. Memory is all that it waits for: 2 bytes read and 2 written for each number of a bf16 tensor.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128                                          # a row of the transposed tile is 128 bytes, what a warp writes at once


@triton.jit
def kernel(x, q, qt, scale, amax, rows, columns, padded, largest: tl.constexpr,      # type: ignore[no-untyped-def]
           both: tl.constexpr, note: tl.constexpr, tile: tl.constexpr):
    """x (rows, columns) -> q (rows, columns), qt (columns, padded); one tile of x for each program."""
    m = (tl.program_id(0) * tile + tl.arange(0, tile)).to(tl.int64)[:, None]            # (tile, 1) 64 bits: x may be large
    n = (tl.program_id(1) * tile + tl.arange(0, tile))[None, :]                         # (1, tile)
    inside = (m < rows) & (n < columns)
    value = tl.load(x + m * columns + n, mask=inside, other=0.0).to(tl.float32)         # (tile, tile)
    if note:
        most = tl.max(tl.max(tl.abs(value), 1), 0)
        if most > tl.load(amax):                    # what is there only grows, so few programs need the slow update
            tl.atomic_max(amax, most, sem="relaxed")
    value = value * tl.load(scale)
    finite = tl.abs(value) < float("inf")           # neither infinite nor NaN
    cut = tl.minimum(tl.maximum(value, -largest), largest)
    cast = tl.where(finite, cut, float("nan")).to(q.dtype.element_ty)
    tl.store(q + m * columns + n, cast, mask=inside)
    if both:
        m, n = tl.trans(m), tl.trans(n)             # (1, tile), (tile, 1)
        tl.store(qt + n.to(tl.int64) * padded + m, tl.trans(cast), mask=(n < columns) & (m < padded))   # zeros beyond the rows


def quantize(x: Tensor, scale: Tensor, amax: Tensor, kind: torch.dtype, both: bool, note: bool) -> tuple[Tensor, Tensor]:
    """As `course.fp8.quantize` says, on a GPU."""
    rows, columns = x.shape
    padded = rows + -rows % 16
    x = x.contiguous()
    q = torch.empty_like(x, dtype=kind)
    qt = x.new_empty(columns, padded, dtype=kind) if both else q.new_empty(0)
    grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))
    kernel[grid](x, q, qt, scale, amax, rows, columns, padded, torch.finfo(kind).max, both, note, TILE, num_warps=8)
    return q, qt
