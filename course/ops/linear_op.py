"""The replaceable parts (slots) of a linear, `course/models/layers.Linear`.

    product           x W' + b in a number format: PyTorch's (`Product`), or FP8's (`course/fp8/native.py`)
    communication     around the product: none (`Communication`), or that of tensor parallelism
                      (`course/parallel/tensor_parallel/linear.py`)
    deferred_bias     whether a fused operator after the linear computes the gradient of its bias
    weight_gradients  a list of deferred weight gradients, computed on request (`WeightGradients`)
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from course.ops.autograd import Context
from course.ops.number_formats import matmul_dtype

Later = Callable[[Callable[[], Tensor]], None]      # takes a function that computes a weight gradient, and calls it later


class Product:
    """x W' + b in the dtype of the tensors or of autocast: (..., K), (N, K), (N,) -> (..., N)."""

    plain = True                                    # whether it is F.linear, so that a chunked loss may split it
    later: Later | None = None                      # takes a deferred weight gradient; None: compute it at once
    known = True                                    # whether its number format has what it needs
    small: torch.dtype | None = None                # the 8-bit dtype in which sharded weights may be gathered, once it is known
    gathered: Tensor | None = None                  # the weight in that dtype, (N, K), where the weight itself is not in memory

    def shrink(self, part: Tensor) -> Tensor:
        """Cast a part of the weight, of any shape, to `small`."""
        raise NotImplementedError

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias) if self.later is None else LinearLater.apply(x, weight, bias, self.later)

    def put_off(self, later: Later) -> "Product":
        """A copy of the product whose backward pass defers the weight gradient to `later`. Not inside torch.compile."""
        product = copy.copy(self)
        product.later = later
        return product

    def check(self, weight: Tensor) -> None:
        """Raise `CourseError` if the number format cannot multiply with this rank's weight (N, K)."""

    def split_over(self, axis: Any) -> None:
        """Set the axis over which tensor parallelism shards the operands: formats with one scale per tensor need it."""


class LinearLater(Function):
    """`F.linear` whose backward pass computes the gradients of input and bias, and defers the weight's to `later`."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, later: Later) -> Tensor:
        low = matmul_dtype(x)
        ctx.save_for_backward(x.to(low), weight.to(low))
        ctx.later, ctx.dtypes = later, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(low), weight.to(low), None if bias is None else bias.to(low))

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.dtypes
        ctx.later(lambda: weight_gradient(grad, x).to(to_weight))
        dx = (grad @ weight).to(to_x) if ctx.needs_input_grad[0] else None
        db = grad.flatten(0, -2).sum(0).to(to_bias) if ctx.needs_input_grad[2] else None
        return dx, None, db, None


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """A linear's weight gradient, (N, K), from the output's gradient (..., N) and the input (..., K)."""
    return grad.flatten(0, -2).T @ x.flatten(0, -2)


class WeightGradients:
    """The weight gradients that a backward pass has deferred, in its order."""

    def __init__(self) -> None:
        self.pending: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def of(self, weight: Tensor) -> Later:
        """The `later` function with which a product defers the gradient of this weight."""
        return lambda compute: self.pending.append((weight, compute))

    def compute(self) -> None:
        """Compute all deferred gradients and add them to `.grad`; this also triggers gradient hooks (buckets)."""
        pending, self.pending = self.pending, []
        for weight, compute in pending:
            weight.backward(compute())


class OneRank(NamedTuple):
    """An axis of one rank."""

    size: int = 1
    rank: int = 0
    group: None = None


class Communication:
    """The communication around a linear's product: none."""

    mode: str | None = None                         # "column": outputs are sharded over the axis; "row": inputs
    axis: Any = OneRank()                           # the ranks (`course/parallel/mesh.Axis`)
    deferred: "Communication | None" = None         # the variant for deferred_bias

    def __call__(self, multiply: Product, x: Tensor, weight: Tensor, bias: Any) -> Tensor:
        return multiply(x, weight, bias)
