"""The linears of `overlap.py` by symmetric memory: PyTorch's operators, in which a rank fetches the others' pieces over NVLink
with its copy engines, beside the matmuls. No multiprocessor is lost to communication, but the group must share a node.

What they cannot do goes `overlap.py`'s way: tokens that tp does not divide, and CPUs.
"""

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from course.parallel import mappings, overlap
from course.parallel.mesh import Axis, group_of
from course.parallel.sequence import SplitTokens, whole_samples


class GatherLinear(Function):
    """(B, T/tp, D), (F, D), (F,) -> (B, T, F)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis = axis
        _, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight.t()], 1, group_of(axis).group_name, return_A=False)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        again = overlap.gather(x, ctx.axis, grad.shape[1])
        dx = torch.ops.symm_mem.fused_matmul_reduce_scatter(grad, weight, "sum", 1, group_of(ctx.axis).group_name)
        return dx, weight_gradient(grad, again()), grad.sum((0, 1)) if ctx.has_bias else None, None


class LinearScatter(Function):
    """(B, T, F), (D, F), (D,) -> (B, T/tp, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis = axis
        y: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", 1, group_of(axis).group_name)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        whole, (dx,) = torch.ops.symm_mem.fused_all_gather_matmul(grad, [weight], 1, group_of(ctx.axis).group_name)
        return dx, weight_gradient(whole, x), grad.sum((0, 1)) if ctx.needs_input_grad[2] else None, None


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """`overlap.weight_gradient` of tensors that may have tokens outermost, as symmetric memory leaves them."""
    if grad.stride(0) < grad.stride(1):
        grad, x = grad.transpose(0, 1), x.transpose(0, 1)
    return overlap.weight_gradient(grad, x)


def operators() -> None:
    """Let PyTorch register torch.ops.symm_mem's."""
    importlib.import_module("torch.distributed._symmetric_memory")


@mappings.uncompiled                                 # copies run beside its matmuls
def gather_linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, tokens: SplitTokens,
                  chosen: bool = False) -> Tensor:
    """As `overlap.gather_linear`. Products that are chosen are not for pieces: on a GPU they are PyTorch's."""
    if not x.is_cuda or tokens.here % axis.size:
        return overlap.gather_linear(x, weight, bias, axis, tokens, chosen)
    x, weight, bias = overlap.cast(whole_samples(x), weight, bias)
    operators()
    with torch.autocast(x.device.type, enabled=False):                  # it would widen the sums of symmetric memory
        return GatherLinear.apply(x, weight, bias, axis)


@mappings.uncompiled                                 # copies run beside its matmuls
def linear_scatter(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, chosen: bool = False) -> Tensor:
    """As `overlap.linear_scatter`, likewise."""
    if not x.is_cuda or x.shape[1] % axis.size:
        return overlap.linear_scatter(x, weight, bias, axis, chosen)
    operators()
    x, weight, bias = overlap.cast(x, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        return LinearScatter.apply(x, weight, bias, axis)
