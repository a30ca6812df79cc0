"""Watch the loads and stores of Triton kernels that the interpreter runs."""

import functools
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from course.ops import triton_language

NAN_OF_BFLOAT16 = 0x7FC0                             # the interpreter holds the bits of bfloat16 as integers


class Visit(NamedTuple):
    """A load or a store of one program."""

    program: tuple[int, int, int]
    tensor: int                                      # which of the watched tensors
    elements: np.ndarray                             # offsets in that tensor's memory, in elements; masked ones are left out
    stored: bool = False
    masked: bool = False                             # whether it had a mask

    @property
    def first(self) -> int:
        """The smallest offset."""
        return int(self.elements.min())


@dataclass
class Accesses:
    """What interpreted kernels have loaded and stored."""

    loads: list[int]                                 # elements loaded from each watched tensor
    stores: list[int]                                # elements stored to each
    inside: bool = True                              # whether all stayed in watched tensors, not in memory between rows
    programs: list[tuple[int, int, int]] = field(default_factory=list)      # all that ran, in order
    visits: list[Visit] = field(default_factory=list)                       # in order
    pytorch: list[str] = field(default_factory=list)                        # operators that PyTorch computed outside of kernels

    def masked_loads(self, tensor: int) -> int:
        """Elements loaded from a watched tensor by loads with a mask."""
        return sum(visit.elements.size for visit in self.visits if visit.tensor == tensor and visit.masked and not visit.stored)


class ComputedByPyTorch(TorchDispatchMode):
    """Note which operators PyTorch computes. Views and empty tensors cost nothing and do not count."""

    def __init__(self, names: list[str]):
        super().__init__()
        self.names, self.in_kernel = names, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not (self.in_kernel or func.is_view or "empty" in name):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def own_elements(x: Tensor) -> np.ndarray:
    """For each element of a tensor's memory, whether it belongs to the tensor: a slice leaves some out."""
    own = np.zeros(x.untyped_storage().nbytes() // x.element_size(), dtype=bool)
    np.lib.stride_tricks.as_strided(own[x.storage_offset():], x.shape, x.stride())[...] = True        # one byte each
    return own


@contextmanager
def watched(*tensors: Tensor) -> Iterator[Accesses]:
    """Watch the kernels inside the block, which use these tensors alone. Each tensor has memory of its own, on the CPU.

    Kernels inside the block are interpreted, also on a machine with a GPU. A load from elsewhere is left out, as by a mask, and
    so is a store to elsewhere. Without this the interpreter would crash. What a load
    without `other` leaves out is NaN here, and undefined on a GPU. Raises `CourseError` where Triton is not installed.
    """
    if not triton_language.INSTALLED:
        raise triton_language.missing("watching a kernel")
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.interpreter import interpreter_builder as builder

    accesses = Accesses([0] * len(tensors), [0] * len(tensors))
    mode = ComputedByPyTorch(accesses.pytorch)
    load, store, start = builder.create_masked_load, builder.create_masked_store, builder.set_grid_idx
    load_all, whole = builder.create_load, False     # whole: inside a load without a mask
    launch = GridExecutor.__call__
    own = list(map(own_elements, tensors))
    bounds = [(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in tensors]

    def visit(pointers: Any, mask: Any, counts: list[int], stored: bool) -> None:
        owned = [(pointers.data >= begin) & (pointers.data < begin + size) & mask.data for begin, size in bounds]
        within = functools.reduce(operator.or_, owned)
        accesses.inside &= bool((within == mask.data).all())
        mask.data = within
        for i, ours in enumerate(owned):
            counts[i] += int(ours.sum())
            if ours.any():
                elements = (pointers.data[ours].astype(np.int64) - bounds[i][0]) // tensors[i].element_size()
                accesses.inside &= bool(own[i][elements].all())
                accesses.visits.append(Visit(builder.grid_idx, i, elements, stored, not whole))

    def watched_load(pointers: Any, mask: Any, other: Any, *options: Any) -> Any:
        visit(pointers, mask, accesses.loads, False)
        loaded = load(pointers, mask, other, *options)
        if other is None and loaded.dtype.is_floating():
            loaded.data[~mask.data] = NAN_OF_BFLOAT16 if str(loaded.dtype) == "bf16" else np.nan
        return loaded

    def watched_load_all(*arguments: Any) -> Any:
        nonlocal whole
        whole = True
        try:
            return load_all(*arguments)
        finally:
            whole = False

    def watched_store(pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        visit(pointers, mask, accesses.stores, True)
        return store(pointers, value, mask, *others)

    def watched_start(*program: int) -> None:
        start(*program)
        accesses.programs.append(builder.grid_idx)

    def watched_launch(*arguments: Any, **options: Any) -> None:
        mode.in_kernel = True
        try:
            launch(*arguments, **options)
        finally:
            mode.in_kernel = False

    builder.create_load, builder.create_masked_load, builder.create_masked_store = watched_load_all, watched_load, watched_store
    builder.set_grid_idx, GridExecutor.__call__ = watched_start, watched_launch
    try:
        with triton_language.interpreted(), mode:
            yield accesses
    finally:
        del builder.create_load, builder.create_masked_load, builder.create_masked_store, builder.set_grid_idx
        GridExecutor.__call__ = launch
