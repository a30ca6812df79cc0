"""GELU of an MLP as one operator, whose backward also adds up the gradient of the bias before it.

Backward, a pass over memory reads dy and x, writes dx, and would be read again to sum it over tokens for the gradient of the bias
that is in x. Here the sum is made in the same pass. On a GPU that is a kernel (`fused_add_norm_triton.py`); here the same is in
plain operations, for CPUs and all else.
"""


import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from course.ops.autograd import Context
from course.ops.custom_op import register_operator


def gelu_plain(x: Tensor, tanh: bool) -> Tensor:
    """GELU of each number, exact or its approximation through tanh. Any shape."""
    return F.gelu(x, approximate="tanh" if tanh else "none").contiguous()


def gelu_backward_plain(x: Tensor, dy: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """The gradient of x, (..., F), from that of its GELU, and its sum over all but the last dim, (F,) in float32 or 64."""
    dx = torch.ops.aten.gelu_backward(dy, x, approximate="tanh" if tanh else "none").contiguous()
    return dx, dx.flatten(0, -2).sum(0, dtype=torch.promote_types(dx.dtype, torch.float32))


register_operator("gelu", "(Tensor x, bool tanh) -> Tensor", gelu_plain, "ops.fused_add_norm_triton")
register_operator("gelu_backward", "(Tensor x, Tensor dy, bool tanh) -> (Tensor, Tensor)", gelu_backward_plain,
                  "ops.fused_add_norm_triton")


class Gelu(Function):
    """GELU(x) | the gradients of x and of a bias that is already in x, (F,): the sum of x's over all tokens, in the same pass."""

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


