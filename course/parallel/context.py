"""Context parallelism: attention over a sequence of which each rank has a piece. Three ways, one interface.

    gather     every rank gathers all keys and values                       simple; memory for all of them
    ring       keys and values go round, one piece at a time                memory for two pieces; sending hides behind work
    all_to_all each rank gets all tokens of some heads (Ulysses)            few bytes; heads have to divide

A block of keys gives a block of the answer and, for each query, the logarithm of its softmax's denominator (log-sum-exp).
From these, answers for different keys merge into the answer for all of them (online softmax; Milakov and Gimelshein
2018, arXiv:1805.02867; Liu, Zaharia and Abbeel 2023, arXiv:2310.01889). Ulysses: Jacobs et al. 2023, arXiv:2309.14509.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._python_dispatch import _disable_current_modes

from course.attention import attend
from course.errors import CourseError
from course.parallel import blocks, mappings
from course.parallel.mesh import Axis
from course.parallel.placement import placement
from course.parallel.sequence import SplitTokens, fill


class GatherAttend(nn.Module):
    """Gather the keys and values of all ranks; each rank answers its own queries."""

    def __init__(self, causal: bool, tokens: SplitTokens):
        super().__init__()
        self.causal, self.tokens = causal, tokens

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:       # (B, h, T / cp, d), 2 x (B, g, T / cp, d)
        k, v = gather_in_order(torch.stack([k, v]), self.tokens)        # 2 x (B, g, T, d)
        if not self.causal:
            return attend(q, k, v)
        return torch.cat([look_back(piece, k[:, :, :end], v[:, :, :end])                # front and back, a zigzag
                          for piece, end in zip(q.chunk(2, 2), self.ends(), strict=True)], 2)       # (B, h, T / cp, d)

    def ends(self) -> tuple[int, int]:
        """Where this rank's two pieces end: their queries see the keys up to there."""
        size, rank, width = self.tokens.cp.size, self.tokens.cp.rank, self.tokens.here // 2
        return (rank + 1) * width, (2 * size - rank) * width


def gather_in_order(pairs: Tensor, tokens: SplitTokens) -> Tensor:
    """The keys and values of all ranks, in the order of time: (2, B, h, T / cp, d) -> (2, B, h, T, d)."""
    order = torch.cat(tokens.order(pairs.device))                       # (T,) the positions, as gathered
    pairs = mappings.gather(pairs, 3, tokens.cp, len(order))
    return pairs.index_select(3, order.argsort()) if tokens.zigzag else pairs


@mappings.uncompiled                                 # which cannot make this mask
def look_back(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in which the last query sees all keys and each one before it one key less; no kernel need build the mask."""
    from torch.nn.attention.bias import causal_lower_right  # imports the compiler: a second, only where it is needed

    with _disable_current_modes():                  # PyTorch fails to make it within a mode such as FlopCounterMode or Trace
        mask = causal_lower_right(q.shape[2], k.shape[2])
    return attend(q, k, v, mask=mask)


class AllToAllAttend(nn.Module):
    """Exchange tokens for heads, attend, and exchange them back."""

    def __init__(self, causal: bool, tokens: SplitTokens):
        super().__init__()
        self.causal, self.tokens = causal, tokens

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:       # 3 x (B, h, T / cp, d)
        cp, total = self.tokens.cp, self.tokens.total
        q, k, v = mappings.all_to_all(torch.stack([q, k, v]), 2, 3, cp, total)          # 3 x (B, h / cp, T, d)
        y = attend(q, k, v, self.causal)
        return mappings.all_to_all(y, 2, 1, cp, q.shape[1] * cp.size)   # (B, h, T / cp, d)


class GroupedAllToAllAttend(AllToAllAttend):
    """The same where a head of keys and values serves a group of queries' heads: it goes with these, in one exchange."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:       # (B, h, T / cp, d), 2 x (B, g, T / cp, d)
        if q.shape[1] == k.shape[1]:
            return super().forward(q, k, v)
        cp, total = self.tokens.cp, self.tokens.total
        groups = torch.cat([q.unflatten(1, (k.shape[1], -1)), k[:, :, None], v[:, :, None]], 2)     # (B, g, h / g + 2, T / cp, d)
        groups = mappings.all_to_all(groups, 1, 3, cp, total)           # (B, g / cp, h / g + 2, T, d)
        q, k, v = groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]   # (B, h / cp, T, d), 2 x (B, g / cp, T, d)
        y = attend(q, k, v, self.causal)
        return mappings.all_to_all(y, 2, 1, cp, q.shape[1] * cp.size)   # (B, h, T / cp, d)


class RingAttend(nn.Module):
    """Keys and values go round the ranks; each answers its queries for the block that is there, and merges the answers."""

    def __init__(self, causal: bool, tokens: SplitTokens):
        super().__init__()
        self.causal, self.tokens = causal, tokens

    @mappings.uncompiled                             # its sends and receives run beside the computation
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:       # (B, h, T / cp, d), 2 x (B, g, T / cp, d)
        lengths = [len(piece) for piece in self.tokens.order(torch.device("cpu"))]
        return Ring.apply(q, k, v, self.causal, self.tokens.cp, lengths)


class Ring(Function):
    """Attention of this rank's queries with the keys of all ranks."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, axis: Axis, lengths: list[int]) -> Tensor:
        turns = rounds(torch.stack([k, v]), axis, lengths)
        _, (keys, values) = next(turns)                                 # my own
        part, lse = blocks.forward(q, keys, values, causal)             # (B, h, T, d), (B, h, T)
        out = part.to(lse.dtype, copy=True)                             # added up in float32 or float64, in place
        for source, (keys, values) in turns:
            rows, columns = visible(causal, axis.rank, source, q.shape[2], keys.shape[2])
            new = blocks.forward(q[:, :, rows], keys[:, :, columns], values[:, :, columns], False)
            merge(out[:, :, rows], lse[:, :, rows], *new)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.axis, ctx.lengths = causal, axis, lengths
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        axis = ctx.axis
        turns = rounds(torch.stack([k, v]), axis, ctx.lengths)
        _, (keys, values) = next(turns)
        dq, dk, dv = (x.to(lse.dtype) for x in blocks.backward(grad, q, keys, values, out, lse, ctx.causal))
        home = Homewards(axis, ctx.lengths, (2, *k.shape), lse)
        for source, (keys, values) in turns:
            rows, columns = visible(ctx.causal, axis.rank, source, q.shape[2], keys.shape[2])
            a, b, c = blocks.backward(grad[:, :, rows], q[:, :, rows], keys[:, :, columns], values[:, :, columns],
                                      out[:, :, rows], lse[:, :, rows], False)
            dq[:, :, rows] += a
            sums = home.arrived(source)                                 # (2, B, h, T_source, d)
            sums[0, :, :, columns] += b
            sums[1, :, :, columns] += c
            home.send(sums, source)
        others = home.arrived(axis.rank)
        return dq.to(q.dtype), (dk + others[0]).to(k.dtype), (dv + others[1]).to(v.dtype), None, None, None


def visible(causal: bool, rank: int, source: int, queries: int, keys: int) -> tuple[slice, slice]:
    """Which rows (queries here) and columns (keys from another rank, `source`) see each other: all that is in both slices.

    Causal in a zigzag: each rank has a piece from the front and one from the back. A lower rank's front piece lies before
    all of mine, its back piece behind; of a higher rank, my back piece sees everything, my front piece nothing. So every
    round is the same work on every rank: a half of the square.
    """
    if not causal:
        return slice(None), slice(None)
    return (slice(None), slice(0, keys // 2)) if source < rank else (slice(queries // 2, None), slice(None))


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Make `out` (B, h, T, d) and `lse` (B, h, T) the answer for the keys of both: means weighed by exp(lse), in place."""
    both = torch.logaddexp(lse, new_lse)
    out.mul_((lse - both).exp()[..., None]).add_(new_out * (new_lse - both).exp()[..., None])
    lse.copy_(both)


def rounds(pair: Tensor, axis: Axis, lengths: list[int]) -> Iterator[tuple[int, Tensor]]:
    """(rank it comes from, its keys and values) for every rank of the ring, my own first. The next is under way meanwhile."""
    for turn in range(axis.size):
        source, coming = (axis.rank - turn) % axis.size, None
        if turn < axis.size - 1:
            shape = (*pair.shape[:3], lengths[(source - 1) % axis.size], *pair.shape[4:])
            coming = pair.new_empty(shape)
            works = pass_on(pair, coming, axis)
        yield source, pair
        if coming is not None:
            for work in works:
                work.wait()
            pair = coming


class Homewards:
    """Gradients of keys and values travel after them, each rank adding its part, until they are back where they belong."""

    def __init__(self, axis: Axis, lengths: list[int], shape: tuple[int, ...], like: Tensor):
        self.axis, self.lengths, self.shape, self.like = axis, lengths, shape, like
        self.coming: Tensor | None = None
        self.works: list[Any] = []
        self.sent: Tensor | None = None

    def arrived(self, source: int) -> Tensor:
        """The sums for the keys of `source`, so far."""
        for work in self.works:
            work.wait()
        if self.coming is None:
            return self.like.new_zeros(self._shape(source))
        return self.coming

    def send(self, sums: Tensor, source: int) -> None:
        """Pass them on; those of the rank before come in."""
        self.sent, self.coming = sums, self.like.new_empty(self._shape((source - 1) % self.axis.size))
        self.works = pass_on(sums, self.coming, self.axis)

    def _shape(self, source: int) -> tuple[int, ...]:
        return (*self.shape[:3], self.lengths[source], *self.shape[4:])


def pass_on(out: Tensor, into: Tensor, axis: Axis) -> list[Any]:
    """Send to the next rank of the ring and receive from the one before; returns what to wait for."""
    after, before = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[(axis.rank - 1) % axis.size]
    return dist.batch_isend_irecv([dist.P2POp(dist.isend, out.contiguous(), after, axis.group),
                                   dist.P2POp(dist.irecv, into, before, axis.group)])


METHODS = {"gather": GatherAttend, "ring": RingAttend, "all_to_all": GroupedAllToAllAttend}


def context_parallel(model: nn.Module, tokens: SplitTokens, method: str) -> nn.Module:
    """Put the attention of `method` at the model's seams. Raises `CourseError` if all_to_all cannot share out the heads."""
    size = tokens.cp.size
    if size == 1:
        return model
    if method == "all_to_all":
        for name, module in model.named_modules():
            if hasattr(module, "qkv"):
                start, stop = placement(module.qkv.weight).box[1]
                if (stop - start) % size:
                    raise CourseError(f"parallel.context=all_to_all gives each of parallel.cp={size} ranks a part of the "
                                      f"{stop - start} heads that tp leaves in {name}: choose a cp that divides them, "
                                      "or parallel.context=ring")
    fill(model, "attend", lambda old: METHODS[method](old.causal, tokens))              # type: ignore[arg-type]
    return model


def needs_zigzag(model: nn.Module, method: str) -> bool:
    """Causal attention is balanced by a zigzag; all_to_all has all tokens of a head anyway."""
    return method != "all_to_all" and any(getattr(module, "seam", None) == "attend" and module.causal
                                          for module in model.modules())
