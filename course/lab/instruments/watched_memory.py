"""Watch the loads and stores of Triton kernels that the interpreter runs."""

import functools
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class Accesses:
    """What interpreted kernels have loaded and stored."""

    loads: list[int]                                 # elements loaded from each watched tensor
    inside: bool = True                              # whether all loads and stores were in watched tensors
    visits: list[tuple[tuple[int, int, int], int, int]] = field(default_factory=list)
    """Each load in order: (program, which tensor, the first element's offset in that tensor's memory)."""


@contextmanager
def watched(*tensors: Tensor) -> Iterator[Accesses]:
    """Watch the kernels inside the block, which use these tensors alone. Each tensor has memory of its own.

    A load from elsewhere gives zeros, and a store to elsewhere is dropped. Without this the interpreter would crash.
    """
    from triton.runtime.interpreter import interpreter_builder as builder

    accesses = Accesses([0] * len(tensors))
    load, store = builder.create_masked_load, builder.create_masked_store
    bounds = [(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in tensors]

    def keep_inside(pointers: Any, mask: Any) -> list[Any]:
        owned = [(pointers.data >= begin) & (pointers.data < begin + size) & mask.data for begin, size in bounds]
        within = functools.reduce(operator.or_, owned)
        accesses.inside = accesses.inside and bool((within == mask.data).all())
        mask.data = within
        return owned

    def watched_load(pointers: Any, mask: Any, *others: Any) -> Any:
        for i, owned in enumerate(keep_inside(pointers, mask)):
            accesses.loads[i] += int(owned.sum())
            if owned.any():
                offset = (int(pointers.data[owned].min()) - bounds[i][0]) // tensors[i].element_size()
                accesses.visits.append((builder.grid_idx, i, offset))
        return load(pointers, mask, *others)

    def watched_store(pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        keep_inside(pointers, mask)
        return store(pointers, value, mask, *others)

    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
    try:
        yield accesses
    finally:
        del builder.create_masked_load, builder.create_masked_store
