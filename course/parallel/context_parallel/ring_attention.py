"""Ring attention: keys and values circulate around the ranks; each rank attends with its queries to the block that it has.

For a block of keys, attention gives an output and, for each query, the log of its softmax's denominator (log-sum-exp). With
these, outputs for different keys merge into the output for all of them (online softmax; Milakov and Gimelshein 2018,
arXiv:1805.02867; Liu, Zaharia and Abbeel 2023, arXiv:2310.01889).

Forward and backward are custom operators, for the reasons given in `parallel/tensor_parallel/overlapped_linear.py`.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from course.ops.autograd import Context
from course.parallel.context_parallel import block_attention
from course.parallel.mesh import Axis, axis_of, group_of
from course.parallel.token_split import SplitTokens

operator: Any = torch.library.custom_op


class RingAttend(nn.Module):
    """Circulate keys and values; each rank attends with its queries to the block that it has, and merges the outputs."""

    def __init__(self, causal: bool, tokens: SplitTokens):
        super().__init__()
        self.causal, self.tokens = causal, tokens

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:       # (B, h, T / cp, d), 2 x (B, g, T / cp, d)
        return Ring.apply(q, k, v, self.causal, group_of(self.tokens.cp).group_name, self.tokens.lengths())


class Ring(Function):
    """Attention of this rank's queries with the keys of all ranks."""

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, causal: bool, group: str, lengths: list[int]) -> Tensor:
        out, lse = ring(q, k, v, causal, group, lengths)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.group, ctx.lengths = causal, group, lengths
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *ring_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.group, ctx.lengths), None, None, None


@operator("course::ring", mutates_args=())
def ring(q: Tensor, k: Tensor, v: Tensor, causal: bool, group: str, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """The answer and each query's log-sum-exp: (B, h, T / cp, d), 2 x (B, g, T / cp, d) -> (B, h, T / cp, d), (B, h, T / cp)."""
    axis = axis_of(group)
    turns = rounds(torch.stack([k, v]), axis, lengths)
    _, (keys, values) = next(turns)                                     # my own
    part, lse = block_attention.forward(q, keys, values, causal)                 # (B, h, T, d), (B, h, T)
    out, lse = to_bthd(part, lse.dtype), lse.contiguous()               # added up in float32 or float64, in place
    for source, (keys, values) in turns:
        rows, columns = visible(causal, axis.rank, source, q.shape[2], keys.shape[2])
        new = block_attention.forward(q[:, :, rows], keys[:, :, columns], values[:, :, columns], False)
        merge(out[:, :, rows], lse[:, :, rows], *new)
    return out.to(q.dtype), lse


@operator("course::ring_backward", mutates_args=())
def ring_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, group: str,
                  lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    axis = axis_of(group)
    turns = rounds(torch.stack([k, v]), axis, lengths)
    _, (keys, values) = next(turns)
    dq, dk, dv = (to_bthd(x, lse.dtype) for x in block_attention.backward(grad, q, keys, values, out, lse, causal))
    home = GradientReturn(axis, lengths, (2, *k.shape), lse)
    for source, (keys, values) in turns:
        rows, columns = visible(causal, axis.rank, source, q.shape[2], keys.shape[2])
        a, b, c = block_attention.backward(grad[:, :, rows], q[:, :, rows], keys[:, :, columns], values[:, :, columns],
                                  out[:, :, rows], lse[:, :, rows], False)
        dq[:, :, rows] += a
        sums = home.arrived(source)                                     # (2, B, h, T_source, d)
        sums[0, :, :, columns] += b
        sums[1, :, :, columns] += c
        home.send(sums, source)
    others = home.arrived(axis.rank)
    return dq.to(q.dtype), (dk + others[0]).to(k.dtype), (dv + others[1]).to(v.dtype)


@ring.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, group: str, lengths: list[int]) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return empty_bthd(q, q.dtype), q.new_empty(q.shape[:3], dtype=wide)


@ring_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, group: str,
      lengths: list[int]) -> tuple[Tensor, ...]:
    return tuple(empty_bthd(x, x.dtype) for x in (q, k, v))


def empty_bthd(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty (B, h, T, d) stored as (B, T, h, d): each token is contiguous, as in the linears around attention."""
    B, h, T, d = x.shape
    return x.new_empty(B, T, h, d, dtype=dtype).transpose(1, 2)


def to_bthd(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of x in that memory order: kernels differ in theirs, and a custom operator's output has a fixed one."""
    return empty_bthd(x, dtype).copy_(x)


def visible(causal: bool, rank: int, source: int, queries: int, keys: int) -> tuple[slice, slice]:
    """Which rows (queries here) and columns (keys from another rank, `source`) see each other, as two slices.

    Causal attention is in a zigzag: each rank has a piece from the front and one from the back.
    """
    if not causal:
        return slice(None), slice(None)
    # A lower rank's front piece lies before all of mine, its back piece behind; of a higher rank, my back piece sees everything,
    # my front piece nothing. So every round is the same work on every rank: a half of the square.
    return (slice(None), slice(0, keys // 2)) if source < rank else (slice(queries // 2, None), slice(None))


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Make `out` (B, h, T, d) and `lse` (B, h, T) the answer for the keys of both: means weighted by exp(lse), in place."""
    both = torch.logaddexp(lse, new_lse)
    out.mul_((lse - both).exp()[..., None]).add_(new_out * (new_lse - both).exp()[..., None])
    lse.copy_(both)


def rounds(pair: Tensor, axis: Axis, lengths: list[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, its keys and values) for every rank of the ring, my own first. Meanwhile the next block is on its way."""
    for turn in range(axis.size):
        source, coming = (axis.rank - turn) % axis.size, None
        if turn < axis.size - 1:
            shape = (*pair.shape[:3], lengths[(source - 1) % axis.size], *pair.shape[4:])
            coming = pair.new_empty(shape)
            works = exchange_with_neighbors(pair, coming, axis)
        yield source, pair
        if coming is not None:
            for work in works:
                work.wait()
            pair = coming


class GradientReturn:
    """Gradients of keys and values follow them around the ring; each rank adds its part until they are back home."""

    def __init__(self, axis: Axis, lengths: list[int], shape: tuple[int, ...], like: Tensor):
        self.axis, self.lengths, self.shape, self.like = axis, lengths, shape, like
        self.coming: Tensor | None = None
        self.works: list[Any] = []
        self.sent: Tensor | None = None

    def arrived(self, source: int) -> Tensor:
        """The sums so far for the keys and values of `source`, once they have arrived."""
        for work in self.works:
            work.wait()
        if self.coming is None:
            return self.like.new_zeros(self._shape(source))
        return self.coming

    def send(self, sums: Tensor, source: int) -> None:
        """Begin to send the sums to the next rank and to receive those from the rank before."""
        self.sent, self.coming = sums, self.like.new_empty(self._shape((source - 1) % self.axis.size))
        self.works = exchange_with_neighbors(sums, self.coming, self.axis)

    def _shape(self, source: int) -> tuple[int, ...]:
        return (*self.shape[:3], self.lengths[source], *self.shape[4:])


def exchange_with_neighbors(out: Tensor, into: Tensor, axis: Axis) -> list[Any]:
    """Begin to send `out` to the next rank of the ring and to receive `into`, which has the incoming shape, from the one before.
    Returns what to wait for; until then `out` must not change."""
    after, before = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[(axis.rank - 1) % axis.size]
    return dist.batch_isend_irecv([dist.P2POp(dist.isend, out.contiguous(), after, axis.group),
                                   dist.P2POp(dist.irecv, into, before, axis.group)])
