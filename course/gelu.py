"""GELU of an MLP as one operator, whose backward also adds up the gradient of the bias before it.

Backward, a pass over memory reads dy and x, writes dx, and would be read again to sum it over tokens for the gradient of the bias
that is in x. Here the sum is made in the same pass. On a GPU that is a kernel (`between_kernel.py`); here the same is in plain
operations, for CPUs and all else.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from course.models import dit, layers
from course.operators import BiasApart, apart, operator
from course.parallel.tensor import ColumnLinear, RowLinear, with_first_bias


def gelu_plain(x: Tensor, tanh: bool) -> Tensor:
    """GELU of each number, exact or its approximation through tanh. Any shape."""
    return F.gelu(x, approximate="tanh" if tanh else "none").contiguous()


def gelu_backward_plain(x: Tensor, dy: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """The gradient of x, (..., F), from that of its GELU, and its sum over all but the last dim, (F,) in float32 or 64."""
    dx = torch.ops.aten.gelu_backward(dy, x, approximate="tanh" if tanh else "none").contiguous()
    return dx, dx.flatten(0, -2).sum(0, dtype=torch.promote_types(dx.dtype, torch.float32))


operator("gelu", "(Tensor x, bool tanh) -> Tensor", gelu_plain, "between_kernel")
operator("gelu_backward", "(Tensor x, Tensor dy, bool tanh) -> (Tensor, Tensor)", gelu_backward_plain, "between_kernel")


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


def fuse_mlp(mlp: Any) -> None:
    """Let an MLP with GELU compute so."""
    set_apart(mlp.up)
    mlp.forward = mlp_forward.__get__(mlp)


def set_apart(linear: Any) -> None:
    """Let the gradient of a linear's bias be computed elsewhere, if it has one."""
    if isinstance(linear, layers.Linear | ColumnLinear | RowLinear) and linear.bias is not None:
        linear.matmul = BiasApart(linear.matmul)
        if type(linear) is RowLinear:
            linear.forward = with_first_bias.__get__(linear)            # type: ignore[method-assign]


def mlp_forward(mlp: Any, x: Tensor) -> Tensor:                         # (B, T, D)
    """`forward` of an MLP with GELU fused."""
    tanh = isinstance(mlp, dit.MLP) or getattr(mlp, "approximate", "") == "tanh"
    return mlp.down(Gelu.apply(mlp.up(x), apart(mlp.up), tanh))         # (B, T, D)
