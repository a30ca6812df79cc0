"""The kernel of `course.parallel.tensor_parallel.symmetric_memory.Scatter`: sum this rank's part and the other ranks' pieces.

It takes one pass over memory, and sums in float32, rounded once. A program sums the same range of each piece. PyTorch's sum over
the first dim needs this rank's part among the others, one more copy. On four H200s a scatter of 201 MB takes 505 us without it
(bench/results/exchange_h200.json), and 600 with it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 8


@triton.jit
def add(own, pieces, out, rank, blocks, apart, length, count, n: tl.constexpr,
        block: tl.constexpr):
    """own: samples of `length` numbers, `apart` numbers from one start to the next; pieces (n, count), without reading that of
    `rank`; out (count,)."""
    sample, at = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * block + tl.arange(0, block)
    inside = at < length
    total = tl.load(own + sample * apart + at, mask=inside, other=0.0).to(tl.float32)
    here = sample * length + at
    for other in tl.static_range(n):
        total += tl.load(pieces + here, mask=inside & (other != rank), other=0.0).to(tl.float32)
        pieces += count                             # not other * count, which may overflow 32 bits
    tl.store(out + here, total.to(out.dtype.element_ty), mask=inside)


def add_up(own: Tensor, pieces: Tensor, rank: int) -> Tensor:
    """`course.parallel.tensor_parallel.symmetric_memory.sum_pieces_plain` for contiguous samples and contiguous pieces."""
    assert pieces.is_contiguous() and own[:1].is_contiguous()
    out, length = torch.empty_like(pieces[0]), own[0].numel()
    blocks = triton.cdiv(length, BLOCK)
    add[(blocks * len(own),)](own, pieces, out, rank, blocks, own.stride(0), length, out.numel(), len(pieces),
                              BLOCK, num_warps=WARPS)
    return out
