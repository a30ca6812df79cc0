"""Sequence parallelism's linears with the communication beside the matmuls, where it costs no time of its own.

    gather_linear    y = gather(x) W' + b        forward: while one part of the batch is multiplied, the next is gathered
                                                 backward: x is gathered again beside dx's matmul, dx scattered beside dW's
    linear_scatter   y = scatter(x W')           forward: while one part is multiplied, the one before is scattered
                                                 backward: while one part is multiplied, the next gradient is gathered

The same numbers as `mappings.gather` before and `mappings.scatter` after `F.linear`, which save the gathered x instead of
gathering it twice (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2; Wang et al. 2023, "Overlap communication with
dependent computation via decomposition", ASPLOS). The collectives run on the stream of their process group; `wait` makes the
computation wait for them, not the host. Samples are gathered one by one, several in a call, so that each lies in one piece.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from course.parallel import mappings
from course.parallel.mesh import Axis

PARTS = 4                                           # of a batch, one after the other
Pending = Callable[[], Tensor]                      # a result that is under way: call it to have it


class GatherLinear(Function):
    """(B, T/tp, D), (F, D), (F,) -> (B, T, F) with T = n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, n: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.n, ctx.has_bias = axis, n, bias is not None
        y = x.new_empty(len(x), n, len(weight))
        for rows, whole in gathered(x, axis, n):
            y[rows] = F.linear(whole, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        again = [gather(x[rows], ctx.axis, ctx.n) for rows in parts(len(x))]
        pieces = [scatter(grad[rows] @ weight, ctx.axis) for rows in parts(len(x))]
        whole = torch.cat([part() for part in again])                   # (B, T, D)
        return torch.cat([piece() for piece in pieces]), *weight_and_bias(grad, whole, ctx.has_bias), None, None


class LinearScatter(Function):
    """(B, T, F), (D, F) -> (B, T/tp, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: Axis) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis = axis
        pieces = [scatter(F.linear(x[rows], weight), axis) for rows in parts(len(x))]
        return torch.cat([piece() for piece in pieces])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        whole, dx = [], torch.empty_like(x)
        for rows, part in gathered(grad, ctx.axis, x.shape[1]):
            dx[rows] = part @ weight
            whole.append(part)
        return dx, weight_and_bias(torch.cat(whole), x, False)[0], None


def weight_and_bias(grad: Tensor, x: Tensor, bias: bool) -> tuple[Tensor, Tensor | None]:
    """The gradients of a linear's weight, (F, D), and bias, (F,), from those of its output (B, T, F) and its input (B, T, D)."""
    return grad.flatten(0, 1).T @ x.flatten(0, 1), grad.sum((0, 1)) if bias else None


def parts(samples: int) -> Iterator[slice]:
    """The batch in up to `PARTS` parts."""
    for start, stop in (mappings.bounds(samples, min(PARTS, samples), part) for part in range(min(PARTS, samples))):
        yield slice(start, stop)


def gathered(x: Tensor, axis: Axis, n: int) -> Iterator[tuple[slice, Tensor]]:
    """(samples, all their tokens) of one part after the other; the next is under way meanwhile."""
    rows = list(parts(len(x)))
    coming = gather(x[rows[0]], axis, n)
    for now, after in zip(rows, [*rows[1:], None], strict=True):
        whole = coming()
        if after is not None:
            coming = gather(x[after], axis, n)
        yield now, whole


def gather(x: Tensor, axis: Axis, n: int) -> Pending:
    """Begin to gather the n tokens of each sample, (B, T/tp, D) -> (B, T, D)."""
    if n % axis.size:
        return lambda: mappings.all_gather(x, 1, axis, n)
    whole = x.new_empty(len(x), n, *x.shape[2:])
    x = x.contiguous()
    works = [mappings.all_gather_single(out, one, group=axis.group, async_op=True) for out, one in zip(whole, x, strict=True)]
    return lambda: finished(works, whole, x)


def scatter(x: Tensor, axis: Axis) -> Pending:
    """Begin to add up each sample's tokens and keep this rank's piece of them, (B, T, D) -> (B, T/tp, D)."""
    if x.shape[1] % axis.size:
        return lambda: mappings.reduce_scatter(x, 1, axis)
    piece = x.new_empty(len(x), x.shape[1] // axis.size, *x.shape[2:])
    x = x.contiguous()
    works = [mappings.reduce_scatter_single(out, one, group=axis.group, async_op=True) for out, one in zip(piece, x, strict=True)]
    return lambda: finished(works, piece, x)


def finished(works: list[Any], result: Tensor, source: Tensor) -> Tensor:
    """The result, when it is there; until then its source must live."""
    for work in works:
        work.wait()
    return result


@torch.compiler.disable(reason="its collectives run beside its matmuls")
def gather_linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, n: int) -> Tensor:
    """Column linear of gathered tokens, (B, T/tp, D) -> (B, T, F/tp); n = T. Bias may be None."""
    x, weight, bias = cast(x, weight, bias)
    return GatherLinear.apply(x, weight, bias, axis, n)


@torch.compiler.disable(reason="its collectives run beside its matmuls")
def linear_scatter(x: Tensor, weight: Tensor, axis: Axis) -> Tensor:
    """Row linear whose sum is scattered, (B, T, F/tp) -> (B, T/tp, D). The bias is added after it."""
    x, weight, _ = cast(x, weight, None)
    return LinearScatter.apply(x, weight, axis)


def cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What autocast does to the arguments of F.linear."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
