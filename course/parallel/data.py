"""Data parallelism: every rank computes the gradients of its own samples, then all take the average."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from course.parallel.mesh import Axis
from course.parallel.placement import placement


def average_gradients(parameters: Iterable[nn.Parameter], axis: Axis) -> None:
    """Replace every gradient by its mean over the axis: one all-reduce of all of them, laid end to end."""
    if axis.size == 1:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = _flatten_dense_tensors(gradients)
    dist.all_reduce(flat, group=axis.group)
    flat /= axis.size
    for gradient, mean in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(mean)


def add_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Complete gradients of which several ranks have a part (`partial_over`): one all-reduce of all of them, for each axis."""
    partial: dict[str, list[nn.Parameter]] = {}
    for parameter in parameters:
        axis = placement(parameter).partial_over
        if axis is not None and parameter.grad is not None:
            partial.setdefault(axis.name, []).append(parameter)
    for held in partial.values():
        gradients, axis = [p.grad for p in held if p.grad is not None], placement(held[0]).partial_over
        flat = _flatten_dense_tensors(gradients)
        dist.all_reduce(flat, group=axis.group)     # type: ignore[union-attr]
        for gradient, whole in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(whole)
