"""What a block does between its matmuls: add a branch to the stream, and normalise the sum for the next branch.

    z = x + gate · y                                            the residual sum
    n = (z - mean z) / std z · (offset + weight) + bias         its LayerNorm

gate, weight and bias are a sample's own, (B, D): then this is adaLN, weight its scale and bias its shift, with an offset of 1;
or weight and bias are a LayerNorm's, (1, D), with an offset of 0, and there is no gate. A block has three such steps: a norm;
a sum and a norm; a sum. And one between the matmuls of its MLP, GELU: that is in `fused_gelu.py`.

Nothing here computes much: each step takes as long as its tensors take to read and write. So forward is one pass over x and y
that writes z and n. Backward is one over the gradients of both, over z and y, that writes those of x and y and adds up those of
gate, weight and bias. That is what kernels in `fused_add_norm_triton.py` do on a GPU; here the same is in plain operations, for
CPUs, in each format the formula with which the kernels are compared.

`training/fuse_blocks.py` puts them into the blocks of a model, with `kernels=triton`.
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
    """(z, n in the format `out`, and of each token the mean and 1 / std, (B, T)): 2 x (B, T, D), 3 x (B or 1, D).

    Without y z is x, and comes out empty. Sums are in float32, or float64 where x is.
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
    """The gradients of x and y in the formats `to_x` and `to_y`, and, one under the other, those of weight, bias and gate.

    They follow from those of z and n. Without dn there was no norm: weight and bias have none, and x's is dz. Without a gate
    there is none of it, and y's is x's. What is not there, or is another, is empty. total: last among the sums is that of y's
    gradient, which the bias of the linear before has.
    """
    given = dn if dn is not None else dz
    assert given is not None
    wide, none, sums = torch.promote_types(given.dtype, torch.float32), given.new_empty(0), []
    grad = torch.zeros_like(given, dtype=wide) if dz is None else dz.to(wide)           # (B, T, D)
    over = [0, 1] if weight is not None and weight.shape[0] == 1 else [1]               # a weight of all samples, or of each
    if dn is not None and z is not None and mean is not None and rstd is not None and weight is not None:
        unit = (z.to(wide) - mean[..., None]) * rstd[..., None]                         # (B, T, D)
        sums = [x.sum(over).view_as(weight) for x in (dn.to(wide) * unit, dn.to(wide))] # 2 x (B or 1, D)
        out = dn.to(wide) * (offset + weight[:, None].to(wide))                         # (B, T, D)
        grad = grad + rstd[..., None] * (out - out.mean(-1, keepdim=True) - unit * (out * unit).mean(-1, keepdim=True))
    dx, dy = none if dn is None else grad.to(to_x).contiguous(), none
    if gate is not None and y is not None:
        dy = (grad * expand_gate(gate, wide)).to(to_y).contiguous()     # (B, T, D)
        sums.append((grad * y.to(wide)).sum(1))                                         # (B, D)
    if total:                                       # as rounded: what the gradient of a weight is of, too
        sums.append((dx if gate is None else dy).to(wide).sum(over).view(-1, given.shape[-1]))          # (B or 1, D)
    return dx, dy, torch.stack(sums)                                                    # (1 to 4, B or 1, D)


def expand_gate(gate: Tensor | None, wide: torch.dtype) -> Any:         # (B, D)
    """What to multiply each token of a sample with."""
    return 1 if gate is None else gate[:, None].to(wide)                                # (B, 1, D)


register_operator("add_norm",
                  "(Tensor x, Tensor? y, Tensor? gate, Tensor weight, Tensor bias, float eps, float offset, ScalarType out) "
                  "-> (Tensor, Tensor, Tensor, Tensor)", add_norm_plain, "ops.fused_add_norm_triton")
register_operator("add_norm_backward",
                  "(Tensor? dz, Tensor? dn, Tensor? z, Tensor? y, Tensor? gate, Tensor? weight, Tensor? mean, "
                  "Tensor? rstd, float offset, bool total, ScalarType to_x, ScalarType to_y) -> (Tensor, Tensor, Tensor)",
                  add_norm_backward_plain, "ops.fused_add_norm_triton")


class AddNorm(Function):
    """(z, n) as above | the gradients of all that they are of. Without y z is x, whose gradient from elsewhere is added here.

    before: a bias that is already in y, (D,); its gradient is the sum of y's.
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
    """x + gate · y | the gradients of all three, (B, T, D) twice, (B, D), and of a bias that is already in y, (D,)."""

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
    """(z, n) as above, (B, T, D), n in the format of the matmul that takes it: (B, T, D) twice, (B or 1, D) three times, (D,)."""
    return AddNorm.apply(x, y, gate, weight, bias, before, eps, offset, matmul_dtype(x))


