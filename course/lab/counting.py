"""Counted, not timed: which collectives a function calls, and how many bytes a forward pass keeps for its backward pass.

Counts are the same on a laptop and on a cluster, and do not care what else the machine does.
"""

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course.meet import trace_file
from course.parallel.trace import Trace


@dataclass(frozen=True)
class Collective:
    """One call of one rank: what, among which ranks, and the bytes of the tensor that this rank brings."""

    op: str                                          # "all-reduce", "send to 1"
    ranks: tuple[int, ...]
    bytes: int

    @property
    def sent(self) -> float:
        """The bytes that each rank sends in the ring form, in which all links are busy all the time."""
        n = len(self.ranks)
        factor = {"all-reduce": 2 * (n - 1) / n, "all-gather": n - 1, "reduce-scatter": (n - 1) / n, "all-to-all": (n - 1) / n,
                  "send": 1, "recv": 0, "barrier": 0}
        return factor.get(self.op.split()[0], 1) * self.bytes


def collectives(function: Callable[[], Any]) -> tuple[Any, list[Collective]]:
    """The function's result, and every collective that it called on this rank, in order."""
    with tempfile.TemporaryDirectory() as folder:
        rank = dist.get_rank()
        with Trace(folder, rank):
            result = function()
        file = trace_file(folder, rank)
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if os.path.exists(file) else []
    return result, [Collective(record["op"], tuple(record["ranks"]), size(record)) for record in records
                    if not record["op"].startswith("new_group")]


def size(record: dict[str, Any]) -> int:
    """The bytes of the tensors in a line of a trace."""
    numbers: int = sum(map(math.prod, record["shapes"]))
    return numbers * getattr(torch, record["dtype"]).itemsize if record["dtype"] else 0


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
