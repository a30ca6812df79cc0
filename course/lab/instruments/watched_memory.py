"""Watch the loads and stores of Triton kernels that the interpreter runs."""

import functools
import operator
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from course.ops import triton_language

LIFT = "lift_fresh"                                  # what `torch.tensor` calls
NAN_OF_BFLOAT16 = 0x7FC0                             # the interpreter holds the bits of bfloat16 as integers


class Visit(NamedTuple):
    """A load or a store of one program."""

    program: tuple[int, int, int]
    tensor: int                                      # which of the watched tensors
    elements: np.ndarray                             # offsets in that tensor's memory, in elements; masked ones are left out
    stored: bool = False
    masked: bool = False                             # whether it had a mask
    launch: int = 0                                  # which launch of a kernel, from 1
    values: np.ndarray = np.zeros(0)                 # what was loaded or stored, element by element; of bfloat16 the bits

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
    raced: set[tuple[int, int]] = field(default_factory=set)    # tensor and element, touched by threads that did not wait
    programs: list[tuple[int, int, int]] = field(default_factory=list)      # all that ran, in order
    visits: list[Visit] = field(default_factory=list)                       # in order
    pytorch: list[str] = field(default_factory=list)                        # operators that PyTorch computed outside of kernels
    largest: int = 0                                 # numbers of the largest tensor that such an operator took or made
    made: list[Tensor] = field(default_factory=list)                        # tensors with new memory from PyTorch, in order
    computed: set[int] = field(default_factory=set)                         # addresses of memory into which PyTorch computed
    used: set[int] = field(default_factory=set)                             # and of memory that its operators read or wrote

    def masked_loads(self, tensor: int) -> int:
        """Elements loaded from a watched tensor by loads with a mask."""
        return sum(visit.elements.size for visit in self.visits if visit.tensor == tensor and visit.masked and not visit.stored)


class ComputedByPyTorch(TorchDispatchMode):
    """Note what PyTorch computes and makes. Views and empty tensors cost nothing and do not count as computed.

    An empty tensor of floating-point numbers holds NaN: elsewhere it holds what was there before. `torch.tensor` calls
    `lift_fresh`, which counts as a view in PyTorch. Here it makes a tensor, and is no operator.
    """

    def __init__(self, accesses: Accesses):
        super().__init__()
        self.accesses, self.in_kernel = accesses, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        result = func(*args, **(kwargs or {}))
        if self.in_kernel or (func.is_view and name != LIFT):
            return result
        taken, made = ([x for x in tree_iter(tree) if isinstance(x, Tensor)] for tree in ((args, kwargs), result))
        if name.startswith("new_") or name.endswith("_like") or name == LIFT:
            taken = []                               # it reads a tensor's shape and format, and no number
        if "empty" not in name:
            self.accesses.pytorch += [name] * (name != LIFT)
            self.accesses.largest = max([self.accesses.largest, *(x.numel() for x in (*taken, *made))])
            written = [x for x, argument in zip(args, func._schema.arguments, strict=False)
                       if argument.alias_info and argument.alias_info.is_write]
            self.accesses.computed |= {address(x) for x in (*made, *written) if isinstance(x, Tensor)}
            self.accesses.used |= set(map(address, taken))
        else:
            for x in filter(torch.is_floating_point, made):
                x.fill_(torch.nan)
        old = set(map(address, taken))
        self.accesses.made += [x for x in made if address(x) not in old]
        return result


def address(x: Tensor) -> int:
    """Where a tensor's memory begins."""
    return x.untyped_storage().data_ptr()


def own_elements(x: Tensor) -> np.ndarray:
    """For each element of a tensor's memory, whether it belongs to the tensor: a slice leaves some out."""
    own = np.zeros(x.untyped_storage().nbytes() // x.element_size(), dtype=bool)
    np.lib.stride_tricks.as_strided(own[x.storage_offset():], x.shape, x.stride())[...] = True        # one byte each
    return own


@contextmanager
def watched(*tensors: Tensor, made: bool = False) -> Iterator[Accesses]:
    """Watch the kernels inside the block, which use these tensors alone. Each tensor has memory of its own, on the CPU.

    made: kernels may also use tensors that PyTorch makes inside the block. They are watched, numbered behind the given ones.

    Kernels inside the block are interpreted, also on a machine with a GPU. A load from elsewhere is left out, as by a mask, and
    so is a store to elsewhere. Without this the interpreter would crash. An atomic addition and its kin count as stores. What a
    load without `other` leaves out is NaN here, and undefined on a GPU. Raises `CourseError` where Triton is not installed.

    A program's threads wait for each other in reductions such as `tl.sum`, in scans and in `tl.debug_barrier`. An element has
    raced if in between one line stores it and another line touches it in a tile of another size, such as one number. In tiles of
    one size the same thread may touch it, so they do not race here, and neither do atomic operations.
    """
    if not triton_language.INSTALLED:
        raise triton_language.missing("watching a kernel")
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import GridExecutor, ReduceScanOpInterface, TensorHandle
    from triton.runtime.interpreter import interpreter_builder as builder

    accesses = Accesses([0] * len(tensors), [0] * len(tensors))
    mode = ComputedByPyTorch(accesses)
    load, store, start = builder.create_masked_load, builder.create_masked_store, builder.set_grid_idx
    load_all, whole = builder.create_load, False     # whole: inside a load without a mask
    change, swap = builder.create_atomic_rmw, builder.create_atomic_cas
    launch, launches = GridExecutor.__call__, 0
    load_given, given = TritonSemantic.load, False   # given: inside a load with `other`, which the interpreter drops if it is 0
    reduce = ReduceScanOpInterface.apply
    # of each tensor and size of tile: whether it was stored and its elements, since the threads have waited for each other
    touched: defaultdict[tuple[int, int], list[tuple[bool, np.ndarray]]] = defaultdict(list)
    known, own = [*tensors], list(map(own_elements, tensors))

    def owned(pointers: Any, mask: Any) -> list[np.ndarray]:
        """Which of the elements lie in which tensor; the mask now leaves out those that lie in none."""
        for x in accesses.made[len(known) - len(tensors):] if made else ():
            known.append(x)
            own.append(own_elements(x))
            accesses.loads.append(0)
            accesses.stores.append(0)
        mask.data = mask.data.astype(bool)           # with a condition on one number it holds integers
        bounds = [(address(x), x.untyped_storage().nbytes()) for x in known]
        found = [(pointers.data >= begin) & (pointers.data < begin + size) & mask.data for begin, size in bounds]
        within = functools.reduce(operator.or_, found)
        accesses.inside &= bool((within == mask.data).all())
        mask.data = within
        return found

    def touch(tensor: int, size: int, elements: np.ndarray, stored: bool) -> None:
        tiles = [tile for (where, width), tiles in touched.items() if where == tensor and width != size for tile in tiles]
        for before in (before for was_stored, before in tiles if stored or was_stored):
            accesses.raced |= {(tensor, element) for element in np.intersect1d(elements, before).tolist()}
        touched[tensor, size].append((stored, elements))

    def visit(pointers: Any, values: Any, found: list[np.ndarray], counts: list[int], stored: bool, atomic: bool = False) -> None:
        for i, ours in enumerate(found):
            counts[i] += int(ours.sum())
            if ours.any():
                begin = address(known[i])
                elements = (pointers.data[ours].astype(np.int64) - begin) // known[i].element_size()
                accesses.inside &= bool(own[i][elements].all())
                accesses.visits.append(Visit(builder.grid_idx, i, elements, stored, not whole, launches,
                                             np.broadcast_to(values.data, ours.shape)[ours]))
                if not atomic:
                    touch(i, ours.size, elements, stored)

    def watched_load(pointers: Any, mask: Any, other: Any, *options: Any) -> Any:
        found = owned(pointers, mask)
        loaded = load(pointers, mask, other, *options)
        visit(pointers, loaded, found, accesses.loads, False)
        if other is None and not given and loaded.dtype.is_floating():
            loaded.data[~mask.data] = NAN_OF_BFLOAT16 if str(loaded.dtype) == "bf16" else np.nan
        return loaded

    def watched_load_given(self: Any, pointers: Any, mask: Any, other: Any, *options: Any) -> Any:
        nonlocal given
        given = other is not None
        return load_given(self, pointers, mask, other, *options)

    def watched_load_all(*arguments: Any) -> Any:
        nonlocal whole
        whole = True
        try:
            return load_all(*arguments)
        finally:
            whole = False

    def watched_store(pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        visit(pointers, value, owned(pointers, mask), accesses.stores, True)
        return store(pointers, value, mask, *others)

    def watched_change(operation: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        visit(pointers, value, owned(pointers, mask), accesses.stores, True, atomic=True)
        return change(operation, pointers, value, mask, *others)

    def watched_swap(pointers: Any, wanted: Any, value: Any, *others: Any) -> Any:
        mask = TensorHandle(np.ones(pointers.data.shape, dtype=bool), wanted.dtype)
        visit(pointers, value, owned(pointers, mask), accesses.stores, True, atomic=True)
        return swap(pointers, wanted, value, *others) if mask.data.all() else wanted

    def watched_reduce(self: Any, numbers: Any) -> Any:
        touched.clear()
        return reduce(self, numbers)

    def watched_start(*program: int) -> None:
        start(*program)
        touched.clear()
        accesses.programs.append(builder.grid_idx)

    def watched_launch(*arguments: Any, **options: Any) -> None:
        nonlocal launches
        mode.in_kernel, launches = True, launches + 1
        try:
            launch(*arguments, **options)
        finally:
            mode.in_kernel = False

    builder.create_load, builder.create_masked_load, builder.create_masked_store = watched_load_all, watched_load, watched_store
    builder.create_atomic_rmw, builder.create_atomic_cas, builder.create_barrier = watched_change, watched_swap, touched.clear
    builder.set_grid_idx, GridExecutor.__call__ = watched_start, watched_launch
    TritonSemantic.load, ReduceScanOpInterface.apply = watched_load_given, watched_reduce
    try:
        with triton_language.interpreted(), mode:
            yield accesses
    finally:
        del builder.create_load, builder.create_masked_load, builder.create_masked_store
        del builder.create_atomic_rmw, builder.create_atomic_cas, builder.create_barrier, builder.set_grid_idx
        GridExecutor.__call__, TritonSemantic.load, ReduceScanOpInterface.apply = launch, load_given, reduce
