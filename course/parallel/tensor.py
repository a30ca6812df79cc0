"""Tensor parallelism: the weights of a block cut over an axis, so that attention and MLP each need one all-reduce.

A *column* linear has a part of the output features on each rank, heads or hidden units; a *row* linear takes
that part as its input and adds the partial products up (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
Which linear is which is data on the model's class, `tensor_plan`.
"""

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from course.errors import CourseError
from course.parallel import mappings
from course.parallel.mesh import Axis
from course.parallel.placement import box_shape, place, placement
from course.parallel.sequence import SplitTokens


class ColumnLinear(nn.Module):
    """y = x W' + b with the output features cut: each rank computes its own of y."""

    def __init__(self, linear: nn.Linear, axis: Axis, tokens: SplitTokens | None = None):
        super().__init__()
        self.axis, self.tokens = axis, tokens
        heads = max(0, len(placement(linear.bias).global_shape) - 2)    # of (3, heads, head_dim), or the features of (F,)
        self.weight, self.bias = cut(linear.weight, heads, axis), cut(linear.bias, heads, axis)

    def forward(self, x: Tensor) -> Tensor:                             # (B, T, D), sequence parallel (B, T / tp, D)
        x = enter(x, self.axis, self.tokens)                            # (B, T, D)
        return F.linear(x, self.weight, self.bias)                      # (B, T, F / tp)


class RowLinear(nn.Module):
    """y = x W' + b with the input features cut: partial products are added up, then the bias, once."""

    def __init__(self, linear: nn.Linear, axis: Axis, tokens: SplitTokens | None = None):
        super().__init__()
        self.axis, self.tokens = axis, tokens
        self.weight = cut(linear.weight, len(placement(linear.weight).global_shape) - 1, axis)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:                             # (B, T, F / tp)
        part = F.linear(x, self.weight)                                 # (B, T, D)
        return leave(part, self.axis, self.tokens) + self.bias          # (B, T, D), sequence parallel (B, T / tp, D)


def enter(x: Tensor, axis: Axis, tokens: SplitTokens | None) -> Tensor:
    """Where each rank begins to compute a part: everyone's tokens, which with sequence parallelism have to be gathered."""
    return mappings.copy(x, axis) if tokens is None else mappings.gather(x, 1, axis, tokens.here)


def leave(x: Tensor, axis: Axis, tokens: SplitTokens | None) -> Tensor:
    """Where the parts are added up: for all tokens, or with sequence parallelism for this rank's own."""
    return mappings.reduce(x, axis) if tokens is None else mappings.scatter(x, 1, axis)


STYLES = {"column": ColumnLinear, "row": RowLinear}


def tensor_parallel(model: nn.Module, axis: Axis, tokens: SplitTokens | None = None) -> nn.Module:
    """Replace the linears that the model's `tensor_plan` names; everything else is whole on every rank of the axis.

    tokens: with sequence parallelism, how they are cut between those linears.

    Takes a model on the meta device with its placements. Raises `CourseError` where heads or hidden units
    are not divisible by the size of the axis.
    """
    if axis.size == 1:
        return model
    for name, linear in list(model.named_modules()):
        style = next((style for end, style in model.tensor_plan.items() if name.endswith(end)), None)    # type: ignore[union-attr, operator]
        if style is not None and isinstance(linear, nn.Linear):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, STYLES[style](linear, axis, tokens))
    for parameter in model.parameters():
        where = placement(parameter)
        if where.axis is None:                       # the same on all ranks: the first speaks for it
            place(parameter, replace(where, owner=where.owner and axis.rank == 0))
    return model


def cut(parameter: Tensor, dim: int, axis: Axis) -> nn.Parameter:
    """This rank's part of a parameter along a dim of its logical shape."""
    where = placement(parameter)
    size = where.global_shape[dim]
    if size % axis.size:
        raise CourseError(f"parallel.{axis.name}={axis.size} does not divide the {size} heads or features of {where.name}: "
                          f"choose a divisor of {size}")
    box = tuple(mappings.bounds(size, axis.size, axis.rank) if d == dim else side for d, side in enumerate(where.box))
    shape = box_shape(box)
    part = parameter.new_empty(shape).reshape(-1, *shape[len(shape) + 1 - parameter.dim():])        # rows are one dim of it
    return place(nn.Parameter(part), replace(where, box=box, axis=axis))
