"""Sequence parallelism's linears with the communication beside the matmuls, where it costs no time of its own.

    gather_linear    y = gather(x) W' + b        forward: while one part of the batch is multiplied, the next is gathered
                                                 backward: x is gathered again beside dx's matmul, dx scattered beside dW's
    linear_scatter   y = scatter(x W')           forward: while one part is multiplied, the one before is scattered
                                                 backward: while one part is multiplied, the next gradient is gathered

A batch of short samples is one part: there only what is gathered again and dx have something beside them.

The same numbers as `mappings.gather` before and `mappings.scatter` after `F.linear`, which save the gathered x instead of
gathering it twice (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2; Wang et al. 2023, "Overlap communication with
dependent computation via decomposition", ASPLOS). The collectives run on the stream of their process group; `wait` makes the
computation wait for them, not the host.

A collective puts pieces one after the other, and of a batch that would be all samples' first pieces, then all their second ones.
So long samples are gathered and scattered one by one, a part's in one kernel, and each lies where it belongs. Short ones go as
one tensor, which a copy puts in order, and in one part: two halve what the matmuls have to do and double what the host has to
start, and a call for each sample is a little more. On two H100s a DiT-XL/2 with 32 samples of 0.6 MB takes 67 ms so and 72 ms
in two parts, one by one, both in a graph; left to the host, 123 and 155. GPT 124M, with 1.6 MB, takes 65 ms in place of 88 with
its host, but 57 in place of 56 in a graph (perf/results/sp_2xh100.json). Beyond that one part has not been measured.

Each is an operator of its own to PyTorch, `torch.ops.course.gather_linear` and so on: torch.compile does not look into it, so
that its order stays and the block around it is one graph, and `recompute` can keep what it puts out. An operator takes a
group by name. `symmetric.py` has the same linears by symmetric memory.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from course.parallel import mappings
from course.parallel.mesh import Axis, axis_of, group_of
from course.parallel.sequence import whole_samples
from course.precision import format_of_matmuls

PARTS = 2                                           # of a batch, one after the other: more cost the host more than they hide
SHORT = 2**21                                       # bytes of all tokens of a sample, below which it is short
Pending = Callable[[], Tensor]                      # a result that is under way: call it to have it
operator: Any = torch.library.custom_op


@operator("course::gather_linear", mutates_args=())
def gather_linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, n: int) -> Tensor:
    """(B, T/tp, D), (F, D), (F,) -> (B, T, F) with T = n."""
    y = x.new_empty(len(x), n, len(weight))
    for rows, whole in gathered(x, axis_of(group), n):
        multiply(whole, weight.t(), bias, y[rows])
    return y


@operator("course::gather_linear_backward", mutates_args=())
def gather_linear_backward(grad: Tensor, x: Tensor, weight: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """(B, T, F), (B, T/tp, D), (F, D) -> the gradients of x and of the weight."""
    axis = axis_of(group)
    again = gather(x, axis, grad.shape[1])                              # whole, beside the matmul that does not need it
    sums = grad @ weight
    whole = again()
    going = scatter(sums, axis, new_piece(grad, x.shape[2], axis))
    dw = weight_gradient(grad, whole)
    return going(), dw


@operator("course::linear_scatter", mutates_args=())
def linear_scatter_forward(x: Tensor, weight: Tensor, group: str) -> Tensor:
    """(B, T, F), (D, F) -> (B, T/tp, D)."""
    axis = axis_of(group)
    y = new_piece(x, len(weight), axis)
    whole = short(len(x), x.shape[1] * len(weight) * x.itemsize)
    going = [scatter(F.linear(x[rows], weight), axis, y[rows]) for rows in parts(len(x), whole)]
    for part in going:
        part()
    return y


@operator("course::linear_scatter_backward", mutates_args=())
def linear_scatter_backward(grad: Tensor, x: Tensor, weight: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """(B, T/tp, D), (B, T, F), (D, F) -> the gradients of x and of the weight."""
    whole, dx = grad.new_empty(len(x), x.shape[1], len(weight)), x.new_empty(x.shape)
    for rows, part in gathered(grad, axis_of(group), x.shape[1], whole):
        multiply(part, weight, None, dx[rows])
    return dx, weight_gradient(whole, x)


@gather_linear_forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, n: int) -> Tensor:
    return x.new_empty(len(x), n, len(weight))


@linear_scatter_forward.register_fake
def _(x: Tensor, weight: Tensor, group: str) -> Tensor:
    return new_piece(x, len(weight), axis_of(group))


@gather_linear_backward.register_fake
@linear_scatter_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, group: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


class GatherLinear(Function):
    """(B, T/tp, D), (F, D), (F,) -> (B, T, F) with T = n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: str, n: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.has_bias = group, bias is not None
        y: Tensor = gather_linear_forward(x, weight, bias, group, n)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = gather_linear_backward(grad, *ctx.saved_tensors, ctx.group)
        return dx, dw, grad.sum((0, 1)) if ctx.has_bias else None, None, None


class LinearScatter(Function):
    """(B, T, F), (D, F) -> (B, T/tp, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        y: Tensor = linear_scatter_forward(x, weight, group)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dx, dw = linear_scatter_backward(grad, *ctx.saved_tensors, ctx.group)
        return dx, dw, None


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """x @ weight + bias of (B, T, K) and (K, N), written into `out` (B, T, N)."""
    rows, into = x.flatten(0, 1), out.view(-1, out.shape[2])            # a view or an error: a copy would swallow the result
    if bias is None:
        torch.mm(rows, weight, out=into)
    else:
        torch.addmm(bias, rows, weight, out=into)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Of a linear's weight, (F, D), from the gradient of its output (B, T, F) and its input (B, T, D)."""
    return grad.flatten(0, 1).T @ x.flatten(0, 1)


def short(samples: int, nbytes: float) -> bool:
    """Whether so many samples, each of so many bytes, go as one tensor. A single one is in order as it is."""
    return samples > 1 and nbytes < SHORT


def parts(samples: int, whole: bool) -> Iterator[slice]:
    """The batch in up to `PARTS` parts, or whole."""
    count = 1 if whole else min(PARTS, samples)
    for start, stop in (mappings.bounds(samples, count, part) for part in range(count)):
        yield slice(start, stop)


def gathered(x: Tensor, axis: Axis, n: int, whole: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
    """(samples, all their tokens) of one part after the other, in `whole` if it is given; the next is under way meanwhile."""
    rows = list(parts(len(x), short(len(x), n * x.shape[2] * x.itemsize)))
    into = [None if whole is None else whole[part] for part in rows]
    coming = gather(x[rows[0]], axis, n, into[0])
    for now, after, place in zip(rows, [*rows[1:], None], [*into[1:], None], strict=True):
        have = coming()
        if after is not None:
            coming = gather(x[after], axis, n, place)
        yield now, have


def gather(x: Tensor, axis: Axis, n: int, into: Tensor | None = None) -> Pending:
    """Begin to gather the n tokens of each sample, (B, T/tp, D) -> (B, T, D), in `into` if it is given."""
    whole = x.new_empty(len(x), n, x.shape[2]) if into is None else into
    most = -(-n // axis.size)
    piece = padded(x, most).contiguous()
    if short(len(x), n * x.shape[2] * x.itemsize):
        come = x.new_empty(axis.size * len(x), most, x.shape[2])        # rank by rank
        wait, pieces = begin_gather([come], [piece], axis), come.chunk(axis.size)
    else:
        come = whole if n % axis.size == 0 else x.new_empty(len(x), axis.size * most, x.shape[2])
        wait, pieces = begin_gather(list(come), list(piece), axis), come.chunk(axis.size, 1)

    def finish() -> Tensor:
        wait()
        if come is not whole:
            lengths = mappings.lengths(n, axis.size)
            torch.cat([part[:, :tokens] for part, tokens in zip(pieces, lengths, strict=True)], 1, out=whole)
        return whole

    return finish


def new_piece(x: Tensor, width: int, axis: Axis) -> Tensor:
    """Room for this rank's tokens of x (B, T, ...): (B, T/tp, width)."""
    return x.new_empty(len(x), mappings.lengths(x.shape[1], axis.size)[axis.rank], width)


def scatter(x: Tensor, axis: Axis, into: Tensor) -> Pending:
    """Begin to add up each sample's tokens and keep this rank's piece of them, (B, T, D) -> (B, T/tp, D), in `into`."""
    n, most = x.shape[1], -(-x.shape[1] // axis.size)
    if n % axis.size:
        x = torch.cat([padded(part, most) for part in x.tensor_split(axis.size, 1)], 1)
    piece = into if n % axis.size == 0 else x.new_empty(len(x), most, x.shape[2])
    if short(len(x), n * x.shape[2] * x.itemsize):
        pieces, sums = [piece], [rank_by_rank(x, axis.size)]
    else:
        pieces, sums = list(piece), list(x.contiguous())
    wait = group_of(axis).reduce_scatter_tensor_coalesced(pieces, sums).wait

    def finish() -> Tensor:
        wait()
        return into if piece is into else into.copy_(piece[:, :into.shape[1]])

    return finish


def rank_by_rank(x: Tensor, size: int) -> Tensor:
    """(B, size * t, D) -> (size * B, t, D), of memory that begins with x: all samples' first pieces, then all their second ones.

    A number of 16 bytes is copied as fast as one of two, so 16 bytes are called a number, where they fit: a third of the time of
    `torch.cat`, or half ("copies" in perf/results/sp_2xh100.json).
    """
    whole = x.new_empty(size, len(x), x.shape[1] // size, x.shape[2])
    to, of = (part.view(torch.complex128) if x.shape[2] * x.itemsize % 16 == 0 else part for part in (whole, x.contiguous()))
    to.copy_(of.unflatten(1, (size, -1)).transpose(0, 1))
    return whole.flatten(0, 1)


def begin_gather(wholes: list[Tensor], pieces: list[Tensor], axis: Axis) -> Callable[[], object]:
    """Begin to gather the ranks' pieces (m, ...), one after the other, in each of the wholes (tp * m, ...): what awaits it.

    On a CPU it is awaited here, and is another collective. Each group of gloo has two threads, and these write the name of the
    collective that they have done into one string without a lock (PyTorch 2.13, `ProcessGroupGloo::runLoop`), when its result
    may be long in use: on a busy machine as late as the end of the next one. ALLGATHER_COALESCED, of more than the 15 letters
    that a string holds in itself, is then freed twice, and the process dies of it, soon or late. Other collectives here have
    shorter names.
    """
    if wholes[0].is_cpu:
        for whole, piece in zip(wholes, pieces, strict=True):
            mappings.all_gather_single(whole, piece, group=axis.group)
        return lambda: None
    return group_of(axis).allgather_into_tensor_coalesced(wholes, pieces).wait


def padded(x: Tensor, tokens: int) -> Tensor:
    """(B, T, D) -> (B, tokens, D) with zeros at the end."""
    missing = tokens - x.shape[1]
    return F.pad(x, (0, 0, 0, missing)) if missing else x                           # padding with nothing would copy


def gather_linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, n: int) -> Tensor:
    """Column linear of gathered tokens, (B, T/tp, D) -> (B, T, F/tp); n = T. Bias may be None."""
    x, weight, bias = cast(whole_samples(x), weight, bias)
    with torch.autocast(x.device.type, enabled=False):                  # what a linear computes is cast by now
        return GatherLinear.apply(x, weight, bias, group_of(axis).group_name, n)


def linear_scatter(x: Tensor, weight: Tensor, axis: Axis) -> Tensor:
    """Row linear whose sum is scattered, (B, T, F/tp) -> (B, T/tp, D). The bias is added after it."""
    x, weight, _ = cast(x, weight, None)
    with torch.autocast(x.device.type, enabled=False):
        return LinearScatter.apply(x, weight, group_of(axis).group_name)


def cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What autocast does to the arguments of F.linear."""
    dtype = format_of_matmuls(x)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
