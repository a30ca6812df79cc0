"""Counted, not timed: which collectives a function calls, and how many bytes a forward pass keeps for its backward pass.

Counts are the same on a laptop and on a cluster, and do not care what else the machine does.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from course.lab.traffic import Collective, Traffic


def collectives(function: Callable[[], Any]) -> tuple[Any, list[Collective]]:
    """The function's result, and every collective that it called on this rank, in order."""
    with Traffic() as traffic:
        result = function()
    return result, traffic.calls


def saved(forward: Callable[[], Any], without: Iterable[Tensor] = ()) -> tuple[Any, int]:
    """The function's result, and the bytes of what it keeps for the backward pass; `without` is not counted (parameters).

    Tensors that share their memory count once.
    """
    given = {tensor.untyped_storage().data_ptr() for tensor in without}
    kept: dict[int, int] = {}                        # address -> bytes

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return result, sum(kept.values())
