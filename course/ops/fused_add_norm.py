"""Fused residual add and LayerNorm: add a branch to the residual stream and normalize the sum for the next branch.

    z = x + gate · y                                            the residual sum
    n = (z - mean z) / std z · (offset + weight) + bias         its LayerNorm

With adaLN, gate, weight (scale) and bias (shift) are per sample, (B, D), and offset is 1. With an ordinary LayerNorm, weight
and bias are (1, D), offset is 0, and there is no gate. A block has three such steps: a norm; a sum and a norm; a sum. GELU,
between the matmuls of the MLP, is in `fused_gelu.py`.

All steps are memory-bound. So forward is one pass that reads x and y and writes z and n. Backward is one pass that reads z, y
and the gradients of z and n, writes the gradients of x and y, and sums those of gate, weight and bias. On a GPU, the kernels in
`fused_add_norm_triton.py` do this. This module has the plain PyTorch version, for CPUs and as the kernels' reference.

`training/fuse_blocks.py` puts them into a model's blocks if `kernels=triton`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from course.ops.autograd import Context
from course.ops.custom_op import register_operator
from course.ops.number_formats import matmul_dtype


def add_norm_plain(x: Tensor, y: Tensor | None, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float, offset: float,
                   out: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(z, n in dtype `out`, each token's mean and 1 / std): 2 x (B, T, D), 3 x (B or 1, D) -> 2 x (B, T, D), 2 x (B, T).

    Without y, z equals x, and the returned z is empty. Sums are in float32, or in float64 if x is.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    z = x
    if y is not None:
        z = (x.to(wide) + y.to(wide) * expand_gate(gate, wide)).to(torch.promote_types(x.dtype, y.dtype))  # (B, T, D)
    spread, mean = torch.var_mean(z.to(wide), -1, correction=0, keepdim=True)           # 2 x (B, T, 1)
    rstd = (spread + eps).rsqrt()                                                       # (B, T, 1)
    n = (z.to(wide) - mean) * rstd * (offset + weight[:, None].to(wide)) + bias[:, None].to(wide)       # (B, T, D)
    return x.new_empty(0) if y is None else z.contiguous(), n.to(out).contiguous(), mean.squeeze(-1), rstd.squeeze(-1)


def add_norm_backward_plain(dz: Tensor | None, dn: Tensor | None, z: Tensor | None, y: Tensor | None, gate: Tensor | None,
                            weight: Tensor | None, mean: Tensor | None, rstd: Tensor | None, offset: float, total: bool,
                            to_x: torch.dtype, to_y: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(dx in dtype `to_x`, dy in dtype `to_y`, the stacked gradients of weight, bias and gate), from dz and dn.

    Without dn there was no norm: weight and bias have no gradients, dx equals dz and is returned empty. Without a gate, dy equals
    dx and is returned empty. total: append the sum of dy over tokens, the gradient of the bias in the linear before.
    """
    given = dn if dn is not None else dz
    assert given is not None
    wide, none, sums = torch.promote_types(given.dtype, torch.float32), given.new_empty(0), []
    grad = torch.zeros_like(given, dtype=wide) if dz is None else dz.to(wide)           # (B, T, D)
    over = [0, 1] if weight is not None and weight.shape[0] == 1 else [1]               # one weight for all samples, or one each
    if dn is not None and z is not None and mean is not None and rstd is not None and weight is not None:
        unit = (z.to(wide) - mean[..., None]) * rstd[..., None]                         # (B, T, D)
        sums = [x.sum(over).view_as(weight) for x in (dn.to(wide) * unit, dn.to(wide))] # 2 x (B or 1, D)
        out = dn.to(wide) * (offset + weight[:, None].to(wide))                         # (B, T, D)
        grad = grad + rstd[..., None] * (out - out.mean(-1, keepdim=True) - unit * (out * unit).mean(-1, keepdim=True))
    dx, dy = none if dn is None else grad.to(to_x).contiguous(), none
    if gate is not None and y is not None:
        dy = (grad * expand_gate(gate, wide)).to(to_y).contiguous()     # (B, T, D)
        sums.append((grad * y.to(wide)).sum(1))                                         # (B, D)
    if total:                                       # sum the rounded values, as the weight gradient uses them
        sums.append((dx if gate is None else dy).to(wide).sum(over).view(-1, given.shape[-1]))          # (B or 1, D)
    return dx, dy, torch.stack(sums)                                                    # (1 to 4, B or 1, D)


def expand_gate(gate: Tensor | None, wide: torch.dtype) -> Any:         # (B, D)
    """The gate broadcast over tokens, or 1 without a gate."""
    return 1 if gate is None else gate[:, None].to(wide)                                # (B, 1, D)


register_operator("add_norm",
                  "(Tensor x, Tensor? y, Tensor? gate, Tensor weight, Tensor bias, float eps, float offset, ScalarType out) "
                  "-> (Tensor, Tensor, Tensor, Tensor)", add_norm_plain, "ops.fused_add_norm_triton")
register_operator("add_norm_backward",
                  "(Tensor? dz, Tensor? dn, Tensor? z, Tensor? y, Tensor? gate, Tensor? weight, Tensor? mean, "
                  "Tensor? rstd, float offset, bool total, ScalarType to_x, ScalarType to_y) -> (Tensor, Tensor, Tensor)",
                  add_norm_backward_plain, "ops.fused_add_norm_triton")


class AddNorm(Function):
    """(z, n) as above. Backward: the gradients of all inputs. Without y, z is x, and backward adds z's gradient to x's.

    before: a bias (D,) that is already in y; its gradient is the sum of y's.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, y: Tensor | None, gate: Tensor | None, weight: Tensor, bias: Tensor,
                before: Tensor | None, eps: float, offset: float, out: torch.dtype) -> tuple[Tensor, Tensor]:
        z, n, mean, rstd = torch.ops.course.add_norm(x, y, gate, weight, bias, eps, offset, out)
        z = x.view_as(x) if y is None else z                            # (B, T, D)
        ctx.save_for_backward(z, y if gate is not None else None, gate, weight, mean, rstd)
        ctx.offset, ctx.kinds = offset, [x.dtype, x.dtype if y is None else y.dtype]
        ctx.kind_of_bias, ctx.has_y, ctx.before = bias.dtype, y is not None, None if before is None else before.dtype
        return z, n

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dz: Tensor | None, dn: Tensor | None) -> tuple[Tensor | None, ...]:
        z, y, gate, weight, mean, rstd = ctx.saved_tensors
        total = ctx.before is not None
        dx, dy, sums = torch.ops.course.add_norm_backward(dz, dn, z, y, gate, weight, mean, rstd, ctx.offset, total, *ctx.kinds)
        if gate is None:
            dy = dx.to(ctx.kinds[1]) if ctx.has_y else None
        return (dx, dy, None if gate is None else sums[2].to(gate.dtype), sums[0].to(weight.dtype),
                sums[1].to(ctx.kind_of_bias), sums[-1].sum(0).to(ctx.before) if total else None, None, None, None)


class Add(Function):
    """x + gate · y. Backward: the gradients of x, y (B, T, D), gate (B, D), and a bias (D,) that is already in y."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, y: Tensor, gate: Tensor, before: Tensor | None) -> Tensor:
        ctx.save_for_backward(y, gate)
        ctx.kinds, ctx.before = [x.dtype, y.dtype], None if before is None else before.dtype
        return x + gate[:, None] * y                                    # (B, T, D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dz: Tensor) -> tuple[Tensor | None, ...]:
        y, gate = ctx.saved_tensors
        total = ctx.before is not None
        _, dy, sums = torch.ops.course.add_norm_backward(dz, None, None, y, gate, None, None, None, 1.0, total, *ctx.kinds)
        return dz.to(ctx.kinds[0]), dy, sums[0].to(gate.dtype), sums[1].sum(0).to(ctx.before) if total else None


def add_norm(x: Tensor, y: Tensor | None, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float, offset: float,
             before: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(z, n) as above, n in the dtype of the next matmul: 2 x (B, T, D), 3 x (B or 1, D), (D,) -> 2 x (B, T, D)."""
    return AddNorm.apply(x, y, gate, weight, bias, before, eps, offset, matmul_dtype(x))


