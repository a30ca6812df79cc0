"""Differentiable collectives along one axis of the mesh, in transposed pairs: forward | backward.

    copy         identity       | all-reduce          enter a region where every rank computes a part (f in Megatron-LM)
    reduce       all-reduce     | identity            leave it: sum the parts (g in Megatron-LM)
    gather       all-gather     | reduce-scatter      concatenate the pieces of a dim
    scatter      reduce-scatter | all-gather          sum the parts and keep this rank's piece
    all_to_all   all-to-all     | all-to-all          change which dim is split
    dispatch     all-to-all     | all-to-all back     send rows to ranks, in numbers known only during the step: its transpose
    combine      all-to-all back| all-to-all          is combine, which returns them
    shard        slice          | zeros around it     keep this rank's piece of a tensor that every rank has whole
    collect      all-gather     | slice               concatenate pieces that every rank then uses in the same way

Each backward is the transpose of its forward, a linear map over all ranks at once; a tensor whose value and gradient are both
the same on all ranks counts once. So a program made of these has the gradients of the serial one, if every rank back-propagates
its share of the loss (Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022, arXiv:2205.05198, section 4.2).

`n` rows are cut as by `torch.tensor_split`: the first n % size ranks have one more. Along an axis of size 1 each mapping is the
identity. No mapping writes into its input, and no backward into its gradient. They use collectives on single tensors and pad
uneven pieces inside, because those compile without a graph break.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from course.ops.autograd import Context
from course.parallel.mesh import Axis

# `torch.compiler.disable` without its import of the compiler, which would delay the start of every rank by a second
uncompiled: Any = torch._disable_dynamo

# PyTorch 2.13 renames them
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def bounds(n: int, size: int, rank: int) -> tuple[int, int]:
    """(first, one past the last) of the n rows that `rank` of `size` has."""
    return rank * (n // size) + min(rank, n % size), (rank + 1) * (n // size) + min(rank + 1, n % size)


def lengths(n: int, size: int) -> list[int]:
    """How many of the n rows each rank has."""
    return [n // size + (rank < n % size) for rank in range(size)]


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis, in new memory. Any shape, the same on every rank."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=axis.group)
    # a view: if a function's forward returns a tensor that it changed in place, compiled PyTorch 2.11 silently computes wrong
    # gradients (pytorch/pytorch issue 180642); those of reduce were zeros
    return x.view_as(x)


def all_gather(x: Tensor, dim: int, axis: Axis, n: int) -> Tensor:      # (..., n / size, ...) -> (..., n, ...)
    """All ranks' pieces, concatenated along `dim`, which then has n rows."""
    most = -(-n // axis.size)
    piece = _padded(x.movedim(dim, 0), most)                            # (most, ...)
    pieces = piece.new_empty(axis.size * most, *piece.shape[1:])        # (size * most, ...)
    all_gather_single(pieces, piece, group=axis.group)
    if n < len(pieces):
        parts = pieces.view(axis.size, most, *piece.shape[1:])
        pieces = torch.cat([part[:rows] for part, rows in zip(parts, lengths(n, axis.size), strict=True)])
    return pieces.movedim(0, dim)                                       # n rows


def reduce_scatter(x: Tensor, dim: int, axis: Axis) -> Tensor:          # (..., n, ...) -> (..., n / size, ...)
    """This rank's piece, along `dim`, of the sum over the axis."""
    n, most = x.shape[dim], -(-x.shape[dim] // axis.size)
    rows = x.movedim(dim, 0)                                            # (n, ...)
    if n < axis.size * most:
        rows = torch.cat([_padded(part, most) for part in rows.tensor_split(axis.size)])
    piece = rows.new_empty(most, *rows.shape[1:])
    reduce_scatter_single(piece, rows.contiguous(), group=axis.group)
    return piece[:lengths(n, axis.size)[axis.rank]].movedim(0, dim)


def exchange(x: Tensor, split: int, join: int, axis: Axis, n: int) -> Tensor:
    """Split dim `split`, send one piece to each rank, and concatenate what arrives along dim `join`, which then has n rows:
    (..., m, ..., n / size, ...) -> (..., m / size, ..., n, ...)."""
    parts = x.tensor_split(axis.size, split)
    shape = list(parts[axis.rank].shape)
    shapes = [[rows if dim == join % x.dim() else size for dim, size in enumerate(shape)] for rows in lengths(n, axis.size)]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    sent = torch.cat([part.reshape(-1) for part in parts])
    got = sent.new_empty(sum(sizes))
    dist.all_to_all_single(got, sent, sizes, [part.numel() for part in parts], group=axis.group)
    return torch.cat([part.view(shape) for part, shape in zip(got.split(sizes), shapes, strict=True)], join)


def exchange_rows(x: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:       # (sum(sent), ...)
    """Send the first sent[0] rows to the first rank, the next sent[1] to the second; return the received rows by sender."""
    got = x.new_empty(sum(received), *x.shape[1:])                      # (sum(received), ...)
    dist.all_to_all_single(got, x.contiguous(), received, sent, group=axis.group)
    return got


def _padded(rows: Tensor, n: int) -> Tensor:
    """The rows, padded with zeros to n; contiguous."""
    if len(rows) < n:
        return torch.cat([rows, rows.new_zeros(n - len(rows), *rows.shape[1:])])
    return rows.contiguous()


class Copy(Function):
    """identity | all-reduce."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)                          # x itself would do: autograd makes a view of it by itself

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.axis), None


class Reduce(Function):
    """all-reduce | identity."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Gather(Function):
    """all-gather along a dim | reduce-scatter along it."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, dim: int, axis: Axis, n: int) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return all_gather(x, dim, axis, n)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return reduce_scatter(grad, ctx.dim, ctx.axis), None, None, None


class Collect(Function):
    """all-gather along a dim | this rank's piece of it."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, dim: int, axis: Axis, n: int) -> Tensor:
        ctx.dim, ctx.axis, ctx.n = dim, axis, n
        return all_gather(x, dim, axis, n)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None, None]:
        start, stop = bounds(ctx.n, ctx.axis.size, ctx.axis.rank)
        return grad.narrow(ctx.dim, start, stop - start), None, None, None


class Scatter(Function):
    """reduce-scatter along a dim | all-gather along it."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.dim, ctx.axis, ctx.n = dim, axis, x.shape[dim]
        return reduce_scatter(x, dim, axis)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.dim, ctx.axis, ctx.n), None, None


class AllToAll(Function):
    """all-to-all | the inverse all-to-all."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, split: int, join: int, axis: Axis, n: int) -> Tensor:
        ctx.split, ctx.join, ctx.axis, ctx.n = split, join, axis, x.shape[split]
        return exchange(x, split, join, axis, n)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return exchange(grad, ctx.join, ctx.split, ctx.axis, ctx.n), None, None, None, None


class ExchangeRows(Function):
    """all-to-all of rows | the inverse all-to-all."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
        ctx.sent, ctx.received, ctx.axis = sent, received, axis
        return exchange_rows(x, sent, received, axis)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange_rows(grad, ctx.received, ctx.sent, ctx.axis), None, None, None


def copy(x: Tensor, axis: Axis) -> Tensor:
    """identity | all-reduce. Any shape."""
    return x if axis.size == 1 else Copy.apply(x, axis)


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """all-reduce | identity. Any shape, the same on every rank."""
    return x if axis.size == 1 else Reduce.apply(x, axis)


def gather(x: Tensor, dim: int, axis: Axis, n: int | None = None) -> Tensor:
    """all-gather | reduce-scatter along `dim`: pieces in, the whole out. `n`: rows of the whole, if the pieces differ."""
    return x if axis.size == 1 else Gather.apply(x, dim, axis, n or x.shape[dim] * axis.size)


def collect(x: Tensor, dim: int, axis: Axis, n: int | None = None) -> Tensor:
    """all-gather | this rank's piece of `dim`: all ranks use the whole alike, so its gradient is the same. `n`: see `gather`."""
    return x if axis.size == 1 else Collect.apply(x, dim, axis, n or x.shape[dim] * axis.size)


def scatter(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """reduce-scatter | all-gather along `dim`: parts of a sum in, this rank's piece of the sum out."""
    return x if axis.size == 1 else Scatter.apply(x, dim, axis)


def all_to_all(x: Tensor, split: int, join: int, axis: Axis, n: int | None = None) -> Tensor:
    """all-to-all | all-to-all: split along `join` in, split along `split` out. `n`: rows of `join`, if the pieces differ."""
    return x if axis.size == 1 else AllToAll.apply(x, split, join, axis, n or x.shape[join] * axis.size)


def dispatch(x: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
    """all-to-all | all-to-all back: `sent` rows to each rank, `received` from each, (sum(sent), ...) -> (sum(received), ...)."""
    return x if axis.size == 1 else ExchangeRows.apply(x, sent, received, axis)


def combine(x: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
    """The way back of `dispatch` with the same numbers: (sum(received), ...) -> (sum(sent), ...)."""
    return x if axis.size == 1 else ExchangeRows.apply(x, received, sent, axis)


def shard(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """This rank's piece of `dim`, a view | zeros around the gradient."""
    start, stop = bounds(x.shape[dim], axis.size, axis.rank)
    return x if axis.size == 1 else x.narrow(dim, start, stop - start)
