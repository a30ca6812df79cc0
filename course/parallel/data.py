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


def add_partial_gradients(parameters: Iterable[nn.Parameter], axis: Axis) -> None:
    """Complete the gradients of which every rank of the axis has a part (its tokens' part): one all-reduce of all of them."""
    partial = [p.grad for p in parameters if p.grad is not None and placement(p).partial_over is not None]
    if axis.size == 1 or not partial:
        return
    flat = _flatten_dense_tensors(partial)
    dist.all_reduce(flat, group=axis.group)
    for gradient, whole in zip(partial, _unflatten_dense_tensors(flat, partial), strict=True):
        gradient.copy_(whole)
