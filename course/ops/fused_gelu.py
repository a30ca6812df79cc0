"""An MLP's GELU as one operator; its backward also computes the gradient of the bias before it.

PyTorch's backward reads dy and x, writes dx, and reads dx again to sum it over tokens for the gradient of the bias in x. Here
one pass does both. On a GPU a Triton kernel does it (`fused_add_norm_triton.py`); this module has the plain PyTorch version.
"""


import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from course.ops.autograd import Context
from course.ops.custom_op import register_operator


def gelu_plain(x: Tensor, tanh: bool) -> Tensor:
    """GELU of each element, exact or with the tanh approximation. Any shape."""
    return F.gelu(x, approximate="tanh" if tanh else "none").contiguous()


def gelu_backward_plain(x: Tensor, dy: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """(gradient of x (..., F), its sum over all but the last dim, (F,) in float32 or float64), from GELU's gradient dy."""
    dx = torch.ops.aten.gelu_backward(dy, x, approximate="tanh" if tanh else "none").contiguous()
    return dx, dx.flatten(0, -2).sum(0, dtype=torch.promote_types(dx.dtype, torch.float32))


register_operator("gelu", "(Tensor x, bool tanh) -> Tensor", gelu_plain, "ops.fused_add_norm_triton")
register_operator("gelu_backward", "(Tensor x, Tensor dy, bool tanh) -> (Tensor, Tensor)", gelu_backward_plain,
                  "ops.fused_add_norm_triton")


class Gelu(Function):
    """GELU(x). Backward: the gradients of x and of a bias (F,) that is already in x: the sum of x's gradient over tokens."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tanh, ctx.bias = tanh, None if bias is None else bias.dtype
        return torch.ops.course.gelu(x, tanh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        dx, dbias = torch.ops.course.gelu_backward(ctx.saved_tensors[0], dy, ctx.tanh)
        return dx, dbias.to(ctx.bias) if ctx.bias else None, None


