"""The slots of a linear (`course/models/layers.Linear`), which surgery fills one by one.

    product           x W' + b in a number format: PyTorch's (`Product`), or FP8's (`course/fp8/native.py`)
    communication     what ranks exchange before and after the product: nothing (`Communication`), or what tensor parallelism
                      needs (`course/parallel/tensor_parallel/linear.py`)
    deferred_bias     whether a fused operator after the linear computes the gradient of its bias
    weight_gradients  a list on which the gradient of the weight waits until somebody asks for it (`WeightGradients`)
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

Later = Callable[[Callable[[], Tensor]], None]      # takes what computes a weight's gradient, and calls it some time


class Product:
    """x W' + b in the format of the tensors, or of autocast: (..., K), (N, K), (N,) -> (..., N)."""

    plain = True                                    # whether it is F.linear, which a loss in chunks may take apart
    later: Later | None = None                      # where the weight's gradient is left; None: it is computed at once

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias) if self.later is None else LinearLater.apply(x, weight, bias, self.later)

    def put_off(self, later: Later) -> "Product":
        """The same product, whose backward pass leaves the gradient of the weight to `later`. Not within torch.compile."""
        product = copy.copy(self)
        product.later = later
        return product

    def check(self, weight: Tensor) -> None:
        """Raise `CourseError` if the format cannot multiply with a weight of this shape, (N, K), as it is on this rank."""

    def split_over(self, axis: Any) -> None:
        """Tensor parallelism cuts the operands over an axis, which a format with one scale for a whole tensor has to know."""


class LinearLater(Function):
    """`F.linear` whose backward pass gives the gradients of input and bias, and leaves the weight's to `later`."""

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
    """The gradient of a linear's weight, (N, K), from those of its output and its input, (..., N) and (..., K)."""
    return grad.flatten(0, -2).T @ x.flatten(0, -2)


class WeightGradients:
    """Gradients of weights that a backward pass has put off, in the order in which it met them."""

    def __init__(self) -> None:
        self.pending: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def of(self, weight: Tensor) -> Later:
        """Where a product leaves the gradient of this weight."""
        return lambda compute: self.pending.append((weight, compute))

    def compute(self) -> None:
        """Compute them all, add them to `.grad`, and let whatever waits for a gradient (a bucket) know."""
        pending, self.pending = self.pending, []
        for weight, compute in pending:
            weight.backward(compute())


class OneRank(NamedTuple):
    """An axis of one rank."""

    size: int = 1
    rank: int = 0
    group: None = None


class Communication:
    """What ranks exchange around a linear's product: nothing."""

    mode: str | None = None                         # "column": each rank has a part of the outputs; "row": of the inputs
    axis: Any = OneRank()                           # over which ranks (`course/parallel/mesh.Axis`)
    deferred: "Communication | None" = None         # what takes its place where the bias has its gradient from elsewhere

    def __call__(self, multiply: Product, x: Tensor, weight: Tensor, bias: Any) -> Tensor:
        return multiply(x, weight, bias)
