"""Measure tensor memory on any device: bytes of live tensors that PyTorch's operators created within a context.

Also measure the bytes that a forward pass keeps for its backward pass.
"""

import contextlib
import linecache
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from course.training.memory_snapshot import Event

INSIDE = (str(Path(torch.__file__).parent), contextlib.__file__)         # contextlib calls what `torch.no_grad()` decorates


class MemoryMeter(TorchDispatchMode):
    """Within this context, `now` is the bytes of live tensors created here, and `peak` their maximum.

    Memory from before the context, such as weights, does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, int] = {}              # storage -> its bytes if it is counted, 0 if it existed before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_iter((args, kwargs)):
            if isinstance(given, Tensor):
                self.notice(given, 0)
        out = func(*args, **(kwargs or {}))
        for made in tree_iter(out):
            if isinstance(made, Tensor):
                self.notice(made, 0 if made.is_meta else made.untyped_storage().nbytes())
        return out

    def notice(self, tensor: Tensor, size: int) -> None:
        """Count `size` bytes for a tensor's storage until it is freed, unless the storage is known."""
        storage = tensor.untyped_storage()
        name = storage._cdata
        if name not in self.known:
            self.known[name] = 0
            self.count(name, size)
            weakref.finalize(storage, self.freed, name)

    def count(self, name: int, size: int) -> None:
        """Count `size` bytes for a known storage from now on."""
        self.now += size - self.known[name]
        self.peak = max(self.peak, self.now)
        self.known[name] = size

    def freed(self, name: int) -> None:
        """Forget a freed storage; a new one may get its ID."""
        self.now -= self.known.pop(name)

    def __enter__(self) -> Self:
        """Also watch storages that are resized, which is no operator."""
        resize = torch.UntypedStorage.resize_

        def watched(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage._cdata in self.known:
                self.count(storage._cdata, size)

        self.patch = mock.patch.object(torch.UntypedStorage, "resize_", watched)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.patch.stop()
        super().__exit__(*raised)


class MemoryHistory(MemoryMeter):
    """Like `MemoryMeter`; `events` lists what was allocated and freed, as `memory_snapshot.read` does for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def count(self, name: int, size: int) -> None:
        """Count and list `size` bytes for a known storage from now on."""
        self.listed_free(name)
        if size:
            self.events.append(("alloc", name, size, line_outside()))
        super().count(name, size)

    def freed(self, name: int) -> None:
        """List and forget a freed storage."""
        self.listed_free(name)
        super().freed(name)

    def listed_free(self, name: int) -> None:
        """List that a storage's bytes are free, if it has any."""
        if size := self.known[name]:
            self.events.append(("free", name, size, ""))


def line_outside() -> str:
    """The innermost line that is neither PyTorch's nor this file's, as "function: its source"."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename.startswith(INSIDE) or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).partition("  #")[0].strip()
    return f"{frame.f_code.co_name}: {source}"


def saved_for_backward(forward: Callable[[], Any], without: Iterable[Tensor] = ()) -> tuple[Any, int]:
    """The function's result, and the bytes of what it keeps for the backward pass; `without` is not counted (parameters).

    Tensors that share their memory count once.
    """
    excluded = {tensor.untyped_storage().data_ptr() for tensor in without}
    sizes: dict[int, int] = {}                        # address -> bytes

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return result, sum(sizes.values())
