"""The products of linears, by hand: which of a library's algorithms computes them is tried out, instead of taken on trust.

    y  = x W' + b       forward
    dx = dy W           backward, for what comes before
    dW = dy' x          and for the weight

cuBLAS, which PyTorch asks for these, has many algorithms for each shape (tiles of the result, programs that share their
factors, the order of tiles), and a rule that says which is probably the fastest. Here some that give the same bits are timed,
once for each shape, in a training's first step (`cublaslt.py`, `trial.py`), which takes 20 s of it. On an H200 whole steps of
GPTs and DiTs are 0.3 to 3.5% shorter (results/products_h200.json). On CPUs, and in other formats than 16 bits, nothing is chosen.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from course.operators import operator
from course.precision import format_of_matmuls


def product_plain(x: Tensor, weight: Tensor, turned: bool, bias: Tensor | None = None) -> Tensor:
    """x times weight, (n, K) and (K, N), or, turned, (N, K); plus bias, (N,) -> (n, N)."""
    weight = weight.T if turned else weight
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def weight_gradient_plain(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of a weight from that of y = x W' and from x: (n, N), (n, K) -> (N, K)."""
    return dy.T @ x


operator("weight_gradient", "(Tensor dy, Tensor x) -> Tensor", weight_gradient_plain, "cublaslt")
operator("product", "(Tensor x, Tensor weight, bool turned, Tensor? bias) -> Tensor", product_plain, "cublaslt")


def times(x: Tensor, weight: Tensor, bias: Tensor | None = None, turned: bool = True) -> Tensor:
    """x W' + b, or, not turned, x W, without gradients: (..., K), (N, K) or (K, N), (N,) -> (..., N)."""
    return torch.ops.course.product(x.flatten(0, -2), weight, turned, bias).unflatten(0, x.shape[:-1])


class Product(Function):
    """x W' + b | the gradients of all three: (..., K), (N, K), (N,) -> (..., N)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return times(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = dy.flatten(0, -2)                                        # (n, N)
        dx = times(dy, weight, turned=False) if ctx.needs_input_grad[0] else None       # (..., K)
        dw = torch.ops.course.weight_gradient(rows, x.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        return dx, dw, rows.sum(0) if ctx.needs_input_grad[2] else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, (..., K), (N, K), (N,) -> (..., N), for the seam of a linear."""
    kind = format_of_matmuls(x)
    return Product.apply(x.to(kind), weight.to(kind), None if bias is None else bias.to(kind))


def choose_products(model: Any) -> nn.Module:
    """Let a model's linears compute so, all whose product is PyTorch's; and a head that never has all logits, chunk by chunk."""
    head: Any = getattr(model, "head", None)
    in_chunks = getattr(head, "chunk", 0) > 0
    for module in model.modules():
        matmul = getattr(module, "matmul", None)
        if matmul is F.linear and not (in_chunks and module is head.proj):
            module.matmul = linear
        elif isinstance(matmul, partial) and "chosen" in matmul.keywords:               # beside communication
            module.matmul = partial(matmul, chosen=True)
    if in_chunks:
        head.of_chunk.product = torch.ops.course.product
    return model
