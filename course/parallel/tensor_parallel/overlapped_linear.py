"""Linears for sequence parallelism that overlap communication with matmuls where the backward pass allows it.

    gather_linear    y = gather(x) W' + b        backward: x is gathered again beside dx's matmul, dx scattered beside dW's
    linear_scatter   y = scatter(x W') + b       backward: the gradient is gathered, then multiplied twice

They compute the same numbers as `mappings.gather` before, and `mappings.scatter` after, `F.linear`. Those save the gathered x;
here a rank saves its own tokens and gathers twice (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2). The collectives
run on the stream of their process group; `wait` makes the computation wait for them, not the host.

A matmul could be split, too, to communicate one part of the batch while another is multiplied (Wang et al. 2023, "Overlap
communication with dependent computation via decomposition", ASPLOS). Over NVLink that costs more than it hides: two H100s take
65.7 ms for a DiT-XL/2 as it is here and 72.8 in two parts, and GPT 1.3B 102.9 and 106.8, both in a graph
(bench/results/sp_2xh100.json). Beside a matmul that fills the GPU, NCCL hides nothing there. With `parallel.overlap=symmetric`
ranks write into each other's memory, and copy engines do the transfers that are to be hidden (`symmetric_memory.py`).

An NCCL collective concatenates the ranks' pieces: for a whole batch, all samples' first pieces, then all their second ones. So
samples are gathered and scattered one by one, all in one kernel, and each lands where it belongs. This takes a call per sample,
which costs time if the GPU waits for its host. So small batches of short samples go as one tensor, unless a graph replays them,
and a copy puts them in order. So do tokens that a group cannot cut evenly, which have to be copied anyway.

Each is a custom operator, such as `torch.ops.course.gather_linear`. torch.compile does not look into it: its order stays, and the
block around it is one graph. `checkpoint_activations` can keep its output. A custom operator takes a group by name.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from course.ops.autograd import Context
from course.ops.linear_op import Later, weight_gradient
from course.ops.number_formats import matmul_dtype
from course.parallel import mappings
from course.parallel.mesh import Axis, axis_of, group_of
from course.parallel.tensor_parallel import symmetric_memory
from course.parallel.token_split import SplitTokens, whole_samples

# SMALL: bytes of a batch below which its GPU is assumed to wait for its host. With slow hosts all batches of 19 to 50 MB did; one
# of 201 MB did not, and was 8% slower as one. SHORT: bytes of a sample below which a copy is worth saving a call. With samples of
# up to 2.4 MB steps were up to 15% shorter as one, in one case of eight 1% longer; with samples of 8.4 MB they were by 4% shorter
# or 14% longer (bench/results/sp_2xh100.json, sp_4xh100.json).
SMALL, SHORT = 2**26, 2**22
Pending = Callable[[], Tensor]                      # a result in flight: call it to get it
operator: Any = torch.library.custom_op


@operator("course::gather_linear", mutates_args=())
def gather_linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, n: int, direct: bool) -> Tensor:
    """(B, T/tp, D), (F, D), (F,) -> (B, T, F) with T = n."""
    return F.linear(gather(x, axis_of(group), n, direct)(), weight, bias)


@operator("course::gather_linear_backward", mutates_args=())
def gather_linear_backward(grad: Tensor, x: Tensor, weight: Tensor, group: str, direct: bool) -> tuple[Tensor, Tensor]:
    """(B, T, F), (B, T/tp, D), (F, D) -> the gradients of x and of the weight."""
    axis = axis_of(group)
    again = gather(x, axis, grad.shape[1], direct, hidden=True)         # beside the matmul that does not need it
    sums = grad @ weight
    whole = again()
    going = scatter(sums, axis, direct, hidden=True)
    dw = weight_gradient(grad, whole)
    return going(), dw


@operator("course::linear_scatter", mutates_args=())
def linear_scatter_forward(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, direct: bool) -> Tensor:
    """(B, T, F), (D, F), (D,) -> (B, T/tp, D). The first rank's product adds the bias, which is the same on all ranks."""
    axis = axis_of(group)
    return scatter(F.linear(x, weight, None if axis.rank else bias), axis, direct)()


@operator("course::linear_scatter_backward", mutates_args=())
def linear_scatter_backward(grad: Tensor, x: Tensor, weight: Tensor, group: str, direct: bool) -> tuple[Tensor, Tensor]:
    """(B, T/tp, D), (B, T, F), (D, F) -> the gradients of x and of the weight."""
    whole = gather(grad, axis_of(group), x.shape[1], direct)()          # (B, T, D)
    return whole @ weight, weight_gradient(whole, x)


@gather_linear_forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, n: int, direct: bool) -> Tensor:
    return x.new_empty(len(x), n, len(weight))


@gather_linear_backward.register_fake
@linear_scatter_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


@linear_scatter_forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, direct: bool) -> Tensor:
    axis = axis_of(group)
    return x.new_empty(len(x), mappings.lengths(x.shape[1], axis.size)[axis.rank], len(weight))


class GatherLinear(Function):
    """(B, T/tp, D), (F, D), (F,) -> (B, T, F) with T = n."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, group: str, n: int, direct: bool,
                later: Later | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how, ctx.later = (group, direct), later
        y: Tensor = gather_linear_forward(x, weight, bias, group, n, direct)
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        db = grad.sum((0, 1)) if ctx.needs_input_grad[2] else None
        if ctx.later is None:
            return *gather_linear_backward(grad, *ctx.saved_tensors, *ctx.how), db, *[None] * 4
        (x, weight), (group, direct) = ctx.saved_tensors, ctx.how
        axis = axis_of(group)
        ctx.later(lambda: weight_gradient(grad, gather(x, axis, grad.shape[1], direct)()))
        return scatter(grad @ weight, axis, direct)(), None, db, *[None] * 4


class LinearScatter(Function):
    """(B, T, F), (D, F), (D,) -> (B, T/tp, D)."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, group: str, direct: bool,
                later: Later | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how, ctx.later = (group, direct), later
        y: Tensor = linear_scatter_forward(x, weight, bias, group, direct)
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        db = grad.sum((0, 1)) if ctx.needs_input_grad[2] else None      # of this rank's tokens
        if ctx.later is None:
            return *linear_scatter_backward(grad, *ctx.saved_tensors, *ctx.how), db, *[None] * 3
        (x, weight), (group, direct) = ctx.saved_tensors, ctx.how
        whole = gather(grad, axis_of(group), x.shape[1], direct)().clone()              # other ranks overwrite the original later
        ctx.later(lambda: weight_gradient(whole, x))
        return whole @ weight, None, db, *[None] * 3


def small(samples: int, nbytes: float) -> bool:
    """Whether a batch of so many samples and bytes goes as one tensor, if no graph replays it. One sample is in order anyway."""
    return samples > 1 and nbytes < min(SMALL, samples * SHORT)


def as_one(x: Tensor, n: int, axis: Axis) -> bool:
    """Whether a batch (B, any, D) with n tokens per sample goes as one tensor over the ranks of an axis."""
    if n % axis.size:
        return True                                 # padding copies anyway: as well in order
    replayed = x.is_cuda and torch.cuda.is_current_stream_capturing()               # a replay waits for no host
    return small(len(x), len(x) * n * x.shape[2] * x.itemsize) and not replayed


def gather(x: Tensor, axis: Axis, n: int, direct: bool = False, hidden: bool = False) -> Pending:
    """Begin to gather the n tokens of each sample, (B, T/tp, D) -> (B, T, D).

    direct: through each other's memory, where supported; the result must then be used before the next call begins. hidden: other
    work runs meanwhile.
    """
    if direct and symmetric_memory.is_supported(x, axis, n):
        return symmetric_memory.Gather(x, axis, n, hidden)
    lengths = mappings.lengths(n, axis.size)
    piece = padded(x, lengths[0]).contiguous()
    if not as_one(x, n, axis):
        whole = x.new_empty(len(x), n, x.shape[2])
        wait = begin_gather(list(whole), list(piece), axis)

        def in_place() -> Tensor:
            wait()
            return whole

        return in_place
    come = x.new_empty(axis.size * len(x), lengths[0], x.shape[2])      # rank by rank
    wait = begin_gather([come], [piece], axis)

    def in_order() -> Tensor:
        wait()
        return sample_by_sample(come, lengths)

    return in_order


def scatter(x: Tensor, axis: Axis, direct: bool = False, hidden: bool = False) -> Pending:
    """Begin to sum x over the ranks and keep this rank's tokens, (B, T, D) -> (B, T/tp, D). direct, hidden: see `gather`."""
    if direct and symmetric_memory.is_supported(x, axis, x.shape[1]):
        return symmetric_memory.Scatter(x, axis, hidden)
    lengths = mappings.lengths(x.shape[1], axis.size)
    piece = x.new_empty(len(x), lengths[0], x.shape[2])
    if as_one(x, x.shape[1], axis):
        pieces, sums = [piece], [rank_by_rank(x, lengths)]
    else:
        pieces, sums = list(piece), list(x.contiguous())
    wait = group_of(axis).reduce_scatter_tensor_coalesced(pieces, sums).wait

    def finish() -> Tensor:
        wait()
        mine = lengths[axis.rank]
        if mine == lengths[0]:
            return piece
        return piece[:, :mine].clone(memory_format=torch.contiguous_format)         # a view could not be written into

    return finish


def rank_by_rank(x: Tensor, lengths: list[int]) -> Tensor:
    """(B, sum of lengths, D) -> (ranks * B, t, D) with t the longest: all samples' first pieces, then all their second ones and
    so on, shorter ones padded with zeros. lengths: `mappings.lengths`."""
    whole = x.new_empty(len(lengths), len(x), lengths[0], x.shape[2])
    to, of = copy_16_bytes(whole, x.contiguous())
    for ranks, tokens, pieces in same_layout(lengths):
        t = pieces[1]
        to[ranks, :, :t].copy_(of[:, tokens].unflatten(1, pieces).transpose(0, 1))
        if t < lengths[0]:
            to[ranks, :, t:].zero_()
    return whole.flatten(0, 1)


def sample_by_sample(x: Tensor, lengths: list[int]) -> Tensor:
    """The inverse of `rank_by_rank`: (ranks * B, t, D) -> (B, sum of lengths, D)."""
    whole = x.new_empty(len(x) // len(lengths), sum(lengths), x.shape[2])
    to, of = copy_16_bytes(whole, x.contiguous())
    of = of.unflatten(0, (len(lengths), -1))                            # (ranks, B, t, D)
    for ranks, tokens, pieces in same_layout(lengths):
        to[:, tokens].unflatten(1, pieces).copy_(of[ranks, :, :pieces[1]].transpose(0, 1))
    return whole


def same_layout(lengths: list[int]) -> list[tuple[slice, slice, tuple[int, int]]]:
    """Groups of ranks with equally long pieces, which one copy puts in order: (ranks, their tokens, (their number, length)).
    There is one group, or two, of which the first has one token more per rank."""
    more = lengths.count(lengths[0])
    tokens = more * lengths[0]
    groups = [(slice(more), slice(tokens), (more, lengths[0]))]
    if rest := lengths[more:]:
        groups.append((slice(more, None), slice(tokens, None), (len(rest), rest[0])))
    return groups


def copy_16_bytes(*tensors: Tensor) -> list[Tensor]:
    """View tensors as 16-byte numbers if all tokens start at multiples of 16 bytes. A 16-byte number is copied as fast as a
    2-byte one: in a third of the time of `torch.cat`, or half ("copies" in bench/results/sp_2xh100.json)."""
    fit = all(n > 0 and n * x.itemsize % 16 == 0 for x in tensors for n in (x.shape[-1], *x.stride()[:-1]))
    fit = fit and all(x.storage_offset() * x.itemsize % 16 == 0 for x in tensors)
    return [x.view(torch.complex128) for x in tensors] if fit else list(tensors)


def begin_gather(wholes: list[Tensor], pieces: list[Tensor], axis: Axis) -> Callable[[], object]:
    """Begin to concatenate the ranks' pieces (m, ...) in each of the wholes (tp * m, ...). Returns a function that waits for it.

    On a CPU it waits here, and uses another collective. The two threads of a gloo group write the name of a finished collective
    into one string without a lock (PyTorch 2.13, `ProcessGroupGloo::runLoop`). On a busy machine that can be as late as the end
    of the next collective. A name longer than the 15 letters that a string stores inline, ALLGATHER_COALESCED, can then be
    freed twice, and the process dies sooner or later. The other collectives here have shorter names.
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


def gather_linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, tokens: SplitTokens, direct: bool = False,
                  later: Later | None = None) -> Tensor:
    """Column linear of gathered tokens, (B, T/tp, D) -> (B, T, F/tp). direct: through each other's memory. later: takes the
    computation of the weight's gradient (`course/ops/linear_op.py`)."""
    later = in_format(later, weight.dtype)
    x, weight, bias = cast(whole_samples(x), weight, bias)
    with torch.autocast(x.device.type, enabled=False):                  # the arguments are cast by now
        return GatherLinear.apply(x, weight, bias, group_of(axis).group_name, tokens.local_len, direct, later)


def linear_scatter(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, direct: bool = False,
                   later: Later | None = None) -> Tensor:
    """Row linear whose sum is scattered, (B, T, F/tp) -> (B, T/tp, D). The bias is added once; its gradient is the one of this
    rank's tokens."""
    later = in_format(later, weight.dtype)
    x, weight, bias = cast(x, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        return LinearScatter.apply(x, weight, bias, group_of(axis).group_name, direct, later)


def in_format(later: Later | None, dtype: torch.dtype) -> Later | None:
    """`later` with gradients cast to the weight's own `dtype`, since autocast computes them in another."""
    return later and (lambda compute: later(lambda: compute().to(dtype)))


def cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:        # (..., K), (N, K), (N,)
    """Cast the arguments of F.linear as autocast does."""
    dtype = matmul_dtype(x)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
