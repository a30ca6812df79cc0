"""Record which collective each rank is in: a line in a file before every collective, `with Trace(folder, rank): ...`.

A rank that hangs does so inside C++, where it cannot report anything. By then its file says what it was about to do.
`course/ranks/collective_mismatch.py` reads these files.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from course.ranks.collective_mismatch import CELL, Record, at, trace_file
from course.utils.errors import rank_names

# the first of these in an operator's name says what it does: reduce_scatter before scatter and reduce
WORDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "scatter", "reduce", "gather", "barrier",
         "send", "recv")
DIRECTION = {"broadcast": "from", "scatter": "from", "recv": "from", "reduce": "to", "gather": "to", "send": "to"}
_resolve: Any = distributed_c10d._resolve_process_group
KERNELS = {kind: torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, kind.upper())) for kind in ("cpu", "cuda")}
LIBRARIES = os.path.dirname(os.path.dirname(torch.__file__))


class Seen(TorchDispatchMode):
    """Within this context `seen` is called before every collective of this thread, forward and backward.

    Not seen: collectives that other threads call.
    """

    supports_higher_order_operators = True           # such as flex_attention

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile work within this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False                                 # else the first tensor operation imports torch._dynamo, a second and more

    def seen(self, word: str, given: dict[str, Any]) -> None:
        """Called before a collective. word: what it does, one of `WORDS`; given: its arguments by name."""
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):       # the collectives that it calls come here anyway
            return NotImplemented
        word, names = _operator(func)
        if word:
            self.seen(word, dict(zip(names, args, strict=False)))
        if func.namespace == "course":               # an operator of ours: what it calls must come here, too
            with self._again():
                return func.redispatch(KERNELS[args[0].device.type], *args, **(kwargs or {}))    # past this mode
        return func(*args, **(kwargs or {}))

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Enter this mode again: PyTorch disables it while it handles an operator."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)


class Trace(Seen):
    """Within this context every collective of this thread, forward and backward, is recorded before it starts.

    Not seen: collectives that other threads call, and `new_group(use_local_synchronization=True)`.
    """

    def __init__(self, folder: Path | str, rank: int):
        super().__init__()
        self.rank = rank
        self.file = os.open(trace_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __enter__(self) -> "Trace":
        # making a group is not an operator; dist.new_group and DeviceMesh both call this function
        self.make_group = distributed_c10d._new_group_with_tag
        distributed_c10d._new_group_with_tag = self._new_group
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        distributed_c10d._new_group_with_tag = self.make_group
        os.close(self.file)

    def seen(self, word: str, given: dict[str, Any]) -> None:
        """Record the collective."""
        op, group, ranks, one = called(word, given)
        place, inside = _user(sys._getframe())
        blocks = word in inside if word in ("send", "recv") else not given.get("async_op", True)    # recv does, irecv does not
        self._write(op, brought(word, given), group, ranks, place,
                    waits=_awaited(word, one, self.rank, ranks) if blocks else [], tag=given.get("tag", 0))

    def _new_group(self, ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        world = dist.group.WORLD
        if world is not None and not kwargs.get("use_local_synchronization"):
            everyone = dist.get_process_group_ranks(world)          # all must call it, members or not
            self._write(f"new_group of {rank_names(ranks or everyone)}", [], world, everyone, _user(sys._getframe())[0], waits=[])
        return self.make_group(ranks, *args, **kwargs)

    def _write(self, op: str, tensors: list[Tensor], group: dist.ProcessGroup, ranks: list[int], place: Record,
               **more: Any) -> None:
        record = {"op": op, "shapes": [list(tensor.shape) for tensor in tensors],
                  "dtype": str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
                  "group": group.group_name, "ranks": ranks, **more, **place}
        os.write(self.file, json.dumps(record).encode() + b"\n")


def called(word: str, given: dict[str, Any]) -> tuple[str, dist.ProcessGroup, list[int], int | None]:
    """(name, such as "all-reduce" or "send to 1", group, its ranks, root or peer rank if there is one) of a collective."""
    group = given["process_group" if "process_group" in given else "group_name"]
    group = _resolve(group) if isinstance(group, str) else dist.ProcessGroup.unbox(group)
    ranks = dist.get_process_group_ranks(group)
    end = next((given[key] for key in ("root_rank", "src", "dst") if key in given), None)
    one = None if end is None else ranks[end]
    return word if one is None else f"{word} {DIRECTION[word]} {one}", group, ranks, one


def where(frame: FrameType | None) -> str:
    """The line that a frame is at, or, if that is inside PyTorch, the line that called PyTorch."""
    return at(_user(frame)[0])


@cache
def _operator(func: Any) -> tuple[str, list[str]]:
    """What an operator does ("" if it is not a collective), and the names of its arguments."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return "", []
    spelling = func.name().replace("_", "")
    word = next((word for word in WORDS if word.replace("-", "") in spelling), "")
    return word, [argument.name for argument in func._schema.arguments]


def _awaited(word: str, one: int | None, me: int, ranks: list[int]) -> list[int]:
    """The ranks whose part a rank needs before it can go on."""
    if word in ("reduce", "gather") and one != me:
        return []
    return [one] if one is not None and word not in ("reduce", "gather") else ranks


def brought(word: str, given: dict[str, Any]) -> list[Tensor]:
    """What each rank contributes; for a scatter, to which only the root contributes, what each rank receives."""
    if word == "barrier":
        return []
    wanted = "output_tensors" if word == "scatter" else next(key for key in given if key.startswith(("input", "tensor")))
    return _flat(given[wanted])


def _flat(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else [tensor for part in tensors for tensor in _flat(part)]


def _user(frame: FrameType | None) -> tuple[Record, set[str]]:
    """The innermost line outside PyTorch (in a check, of the answer's cell), and the names of PyTorch's functions inside it."""
    inside = set()
    while frame and frame.f_code.co_filename.startswith((LIBRARIES, __file__)):
        inside.add(frame.f_code.co_name)
        frame = frame.f_back
    outer = frame
    while outer and not outer.f_code.co_filename.startswith(CELL):
        outer = outer.f_back
    frame = outer or frame
    file, line = (frame.f_code.co_filename, frame.f_lineno) if frame else ("?", 0)
    return {"file": file, "line": line, "code": getline(file, line).strip()}, inside
