"""Bring tokens into the order of their experts, and sum the experts' outputs for each token.

Each of N tokens has k rows among the M = N·k that are sorted by expert (named as in Megatron-LM).

    permute      rows[order[t, j]] = x[t]                           backward: dx[t] = Σ_j drows[order[t, j]]
    unpermute    y[t] = Σ_j gates[t, j] · rows[order[t, j]]         backward: drows[order[t, j]] = gates[t, j] · dy[t],
                                                                    dgates[t, j] = rows[order[t, j]] · dy[t]

order[t, j] < 0: this choice of the token has no row. Rows that no token has are undefined, in backward too.

Plain PyTorch reads and writes a tensor of M rows for the order, for the gates and for the sum, and the backward of indexing adds
atomically or sorts. Here each pass reads and writes rows once (`permutation_triton.py`), and sums are in float32.
"""

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from course.ops.autograd import Context
from course.ops.custom_op import register_operator


def sum_rows_plain(rows: Tensor, order: Tensor, gates: Tensor | None) -> Tensor:
    """The gated sum of each token's rows: (M, D), (N, k), (N, k) -> (N, D)."""
    each = rows[order.clamp(min=0)].to(torch.promote_types(rows.dtype, torch.float32))  # (N, k, D)
    each = each.masked_fill(order[..., None] < 0, 0)
    return (each if gates is None else each * gates[..., None]).sum(1).to(rows.dtype)   # (N, D)


def sum_rows_backward_plain(dy: Tensor, rows: Tensor, order: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of rows, gradient of gates): (N, D), (M, D), 2 x (N, k) -> (M, D), (N, k)."""
    wide, here = torch.promote_types(rows.dtype, torch.float32), order >= 0             # (N, k)
    drows = torch.zeros_like(rows)                                                      # (M, D)
    drows[order[here]] = (gates[..., None] * dy[:, None].to(wide)).to(rows.dtype)[here]
    each = rows[order.clamp(min=0)].to(wide)                                            # (N, k, D)
    return drows, (each * dy[:, None].to(wide)).sum(-1).masked_fill(~here, 0).to(gates.dtype)


register_operator("sum_rows", "(Tensor rows, Tensor order, Tensor? gates) -> Tensor", sum_rows_plain, "ops.permutation_triton")
register_operator("sum_rows_backward", "(Tensor dy, Tensor rows, Tensor order, Tensor gates) -> (Tensor, Tensor)",
                  sum_rows_backward_plain, "ops.permutation_triton")


class Permute(Function):
    """The tokens of the rows, in their order | each token's sum over its rows."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, token: Tensor, order: Tensor) -> Tensor:      # (N, D), (M,), (N, k)
        ctx.save_for_backward(order)
        return x.index_select(0, token)                                 # (M, D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        return torch.ops.course.sum_rows(grad, ctx.saved_tensors[0], None), None, None


class Unpermute(Function):
    """The gated sum of each token's rows | the gradients of rows and gates."""

    @staticmethod
    def forward(ctx: Context, rows: Tensor, order: Tensor, gates: Tensor) -> Tensor:   # (M, D), 2 x (N, k)
        ctx.save_for_backward(rows, order, gates)
        return torch.ops.course.sum_rows(rows, order, gates)            # (N, D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        drows, dgates = torch.ops.course.sum_rows_backward(grad, *ctx.saved_tensors)
        return drows, None, dgates


def permute(x: Tensor, token: Tensor, order: Tensor) -> Tensor:
    """Row i is token[i] of x: (N, D), (M,), (N, k) -> (M, D). order: the rows of each token."""
    return Permute.apply(x, token, order)


def unpermute(rows: Tensor, order: Tensor, gates: Tensor) -> Tensor:
    """The gated sum of each token's rows, in the dtype of rows: (M, D), 2 x (N, k) -> (N, D)."""
    return Unpermute.apply(rows, order, gates)
