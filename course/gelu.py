"""GELU of an MLP by hand: its gradient in a pass over memory of its own, or in the matmul before it.

A matmul has its result in registers before it writes it; what it does there is its epilogue. Backward, GELU's gradient is the
epilogue of the linear that comes after GELU forward, y = h V' + c with h = GELU(a):

    da = (dy V) · GELU'(a)

Apart, a pass over memory reads dy V and a, writes da, and adds it up over tokens for the gradient of the bias that is in a.
Merged, the matmul reads a, and the sum reads da: two tensors of three. On a GPU from Hopper on it is cuBLASLt's (`cublaslt.py`);
here the same is in plain operations, for CPUs and all else.

Forward stays apart. cuBLASLt has an epilogue that writes both a and GELU(a), but no fast algorithm for it: on an H200 it takes up
to 7% longer than GELU after a product by the algorithm that won its trial (results/gelu_h200.json).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from course.models import dit, layers
from course.operators import BiasApart, apart, operator
from course.parallel import overlap
from course.parallel.mesh import Axis, axis_of, group_of
from course.parallel.tensor import ColumnLinear, RowLinear, with_first_bias
from course.precision import format_of_matmuls
from course.products import times


def gelu_plain(x: Tensor, tanh: bool) -> Tensor:
    """GELU of each number, exact or its approximation through tanh. Any shape."""
    return F.gelu(x, approximate="tanh" if tanh else "none").contiguous()


def gelu_backward_plain(x: Tensor, dy: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """The gradient of x, (..., F), from that of its GELU, and its sum over all but the last dim, (F,) in float32 or 64."""
    dx = torch.ops.aten.gelu_backward(dy, x, approximate="tanh" if tanh else "none").contiguous()
    return dx, summed(dx, True)


def gelu_linear_backward_plain(dy: Tensor, weight: Tensor, a: Tensor, total: bool) -> tuple[Tensor, Tensor]:
    """The gradient of a, (..., N), from that of a linear of its GELU through tanh, (..., M), whose weight is (M, N); and, if
    total, its sum over all but the last dim, (N,) in float32 or 64, otherwise an empty tensor."""
    da, sums = torch.ops.course.gelu_backward(a, dy @ weight, True)     # in whose pass the sum costs nothing
    return da, sums if total else summed(da, False)


def summed(x: Tensor, total: bool) -> Tensor:
    """The sum of x, (..., N), over all but the last dim, (N,) in float32 or 64; without total, empty."""
    kind = torch.promote_types(x.dtype, torch.float32)
    return x.flatten(0, -2).sum(0, dtype=kind) if total else x.new_empty(0, dtype=kind)


operator("gelu", "(Tensor x, bool tanh) -> Tensor", gelu_plain, "between_kernel")
operator("gelu_backward", "(Tensor x, Tensor dy, bool tanh) -> (Tensor, Tensor)", gelu_backward_plain, "between_kernel")
operator("gelu_linear_backward", "(Tensor dy, Tensor weight, Tensor a, bool total) -> (Tensor, Tensor)",
         gelu_linear_backward_plain, "cublaslt")


class Gelu(Function):
    """GELU(x) | the gradients of x and of a bias that is already in x, (F,): the sum of x's over all tokens, in the same pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tanh, ctx.bias = tanh, None if bias is None else bias.dtype
        return torch.ops.course.gelu(x, tanh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        dx, dbias = torch.ops.course.gelu_backward(ctx.saved_tensors[0], dy, ctx.tanh)
        return dx, dbias.to(ctx.bias) if ctx.bias else None, None


class GeluLinear(Function):
    """GELU(a) W' + b, GELU through tanh | the gradients of a, of a bias that is already in a, (N,), and of W and b.

    group: by name, the ranks over which the sum is scattered, of a row linear with sequence parallelism (`overlap.py`); or "".
    direct: through each other's memory.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, group: str,
                direct: bool) -> Tensor:
        h = torch.ops.course.gelu(a, True)                              # (..., N)
        ctx.save_for_backward(h, a, weight)
        ctx.before, ctx.how = None if before is None else before.dtype, (group, direct)
        return overlap.linear_scatter_forward(h, weight, bias, group, True, direct) if group else times(h, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        h, a, weight = ctx.saved_tensors
        total = ctx.before is not None
        if ctx.how[0]:
            da, dbefore, dweight = gelu_scatter_backward(dy, h, a, weight, total, *ctx.how)
        else:
            da, dbefore = torch.ops.course.gelu_linear_backward(dy, weight, a, total)
            dweight = overlap.weight_gradient(dy, h, chosen=True) if ctx.needs_input_grad[2] else None
        dbias = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None           # scattered, of this rank's tokens
        return da, dbefore.to(ctx.before) if total else None, dweight, dbias, None, None


@overlap.operator("course::gelu_scatter_backward", mutates_args=())
def gelu_scatter_backward(dy: Tensor, h: Tensor, a: Tensor, weight: Tensor, total: bool, group: str,
                          direct: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T/tp, M), 2 x (B, T, N), (M, N) -> what `gelu_linear_backward` gives of the gathered dy, and the weight's gradient."""
    whole = overlap.gather(dy, axis_of(group), h.shape[1], direct)()    # (B, T, M)
    return *torch.ops.course.gelu_linear_backward(whole, weight, a, total), overlap.weight_gradient(whole, h, chosen=True)


@gelu_scatter_backward.register_fake
def _(dy: Tensor, h: Tensor, a: Tensor, weight: Tensor, total: bool, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    kind = torch.promote_types(a.dtype, torch.float32)
    return torch.empty_like(a), a.new_empty(a.shape[-1] if total else 0, dtype=kind), torch.empty_like(weight)


def gelu_linear(x: tuple[Tensor, Tensor | None], weight: Tensor, bias: Tensor | None = None, axis: Axis | None = None,
                direct: bool = False) -> Tensor:
    """At the seam of the linear after GELU. x: what GELU is of and the bias that is in it, (..., N) and (N,) -> (..., M). axis:
    over which the sum is scattered, if it is; direct: through each other's memory."""
    a, before = x
    kind = format_of_matmuls(a)
    group = "" if axis is None else group_of(axis).group_name
    return GeluLinear.apply(a.to(kind), before, weight.to(kind), None if bias is None else bias.to(kind), group, direct)


def fuse_mlp(mlp: Any, merged: bool) -> None:
    """Let an MLP with GELU compute so: merged, if that is asked for and possible, or apart."""
    merged = merged and can_merge(mlp)
    if merged:
        mlp.down.matmul = gelu_linear if not scatters(mlp.down) else partial(
            gelu_linear, axis=mlp.down.axis, direct=mlp.down.matmul.keywords["direct"])
    set_apart(mlp.up)
    mlp.forward = (merged_forward if merged else apart_forward).__get__(mlp)


def set_apart(linear: Any) -> None:
    """Let the gradient of a linear's bias be computed elsewhere, if it has one."""
    if isinstance(linear, layers.Linear | ColumnLinear | RowLinear) and linear.bias is not None:
        linear.matmul = BiasApart(linear.matmul)
        if type(linear) is RowLinear:
            linear.forward = with_first_bias.__get__(linear)            # type: ignore[method-assign]


def can_merge(mlp: Any) -> bool:
    """Whether GELU is the one through tanh, and the linear after it the course's own with a plain product: not in FP8."""
    plain = isinstance(mlp.down, layers.Linear | RowLinear) and mlp.down.matmul is F.linear
    return through_tanh(mlp) and (plain or scatters(mlp.down))


def scatters(linear: Any) -> bool:
    """Whether a linear's product is scattered as `overlap.py` does it."""
    return isinstance(linear.matmul, partial) and linear.matmul.func is overlap.linear_scatter


def through_tanh(mlp: Any) -> bool:
    """Whether an MLP's GELU is the approximation."""
    return isinstance(mlp, dit.MLP) or getattr(mlp, "approximate", "") == "tanh"


def merged_forward(mlp: Any, x: Tensor) -> Tensor:                      # (B, T, D)
    """`forward` of an MLP whose second linear has GELU in it."""
    return mlp.down((mlp.up(x), apart(mlp.up)))                         # (B, T, D)


def apart_forward(mlp: Any, x: Tensor) -> Tensor:                       # (B, T, D)
    """`forward` of an MLP with GELU between them."""
    return mlp.down(Gelu.apply(mlp.up(x), apart(mlp.up), through_tanh(mlp)))            # (B, T, D)
