"""Which collective each rank is in: a line in a file before every collective, and an account of those that do not meet.

    with Trace(folder, rank): ...                  on each rank
    text, certain = explain(folder, states)        by whoever watches them

A rank that hangs does so inside C++, where it can tell nobody; what it was about to do is in its file by then.
"""

import json
import os
import sys
from collections.abc import Sequence
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

# an operator does the first of these that its name contains: reduce_scatter before scatter and reduce
WORDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "scatter", "reduce", "gather", "barrier",
         "send", "recv")
DIRECTION = {"broadcast": "from", "scatter": "from", "recv": "from", "reduce": "to", "gather": "to", "send": "to"}
ANYONE = -1
WORLD = "0"                                          # the name of the group of all ranks
DISAGREE = "The ranks disagree"                      # so begins an explanation of calls that differ
FATES = {"returned": "returned", "raised": "raised an exception", "died": "died"}
_resolve: Any = distributed_c10d._resolve_process_group
LIBRARIES = os.path.dirname(os.path.dirname(torch.__file__))

Record = dict[str, Any]                              # one call of one rank: a line of its file
Channel = tuple[Any, ...]                            # (group, ranks) or, of messages, (group, (from, to), tag)
Calls = dict[int, list[Record]]                      # what each rank of a channel called: these must match one by one


class Trace(TorchDispatchMode):
    """Within this context every collective of this thread, forward and backward, is written down before it starts.

    Not seen: collectives that other threads call, and `new_group(use_local_synchronization=True)`.
    """

    supports_higher_order_operators = True           # such as flex_attention

    def __init__(self, folder: Path | str, rank: int):
        super().__init__()
        self.rank = rank
        self.file = os.open(trace_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __enter__(self) -> "Trace":
        # making a group is no operator; dist.new_group and DeviceMesh both come through this function
        self.make_group = distributed_c10d._new_group_with_tag
        distributed_c10d._new_group_with_tag = self._new_group
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        distributed_c10d._new_group_with_tag = self.make_group
        os.close(self.file)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile work within this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False                                 # else the first tensor operation imports torch._dynamo for a second and more

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):       # the collectives that it calls come here by themselves
            return NotImplemented
        word, names = _operator(func)
        if word:
            self._collective(word, dict(zip(names, args, strict=False)))
        return func(*args, **(kwargs or {}))

    def _collective(self, word: str, given: dict[str, Any]) -> None:
        group = given["process_group" if "process_group" in given else "group_name"]
        group = _resolve(group) if isinstance(group, str) else dist.ProcessGroup.unbox(group)
        ranks = dist.get_process_group_ranks(group)
        end = next((given[key] for key in ("root_rank", "src", "dst") if key in given), None)
        one = None if end is None else ranks[end]    # the rank that has or gets all, or the other of two
        place, inside = _user(sys._getframe())
        blocks = word in inside if word in ("send", "recv") else not given.get("async_op", True)    # recv does, irecv does not
        self._write(word if one is None else f"{word} {DIRECTION[word]} {one}", _tensors(word, given), group, ranks, place,
                    waits=_awaited(word, one, self.rank, ranks) if blocks else [], tag=given.get("tag", 0))

    def _new_group(self, ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        world = dist.group.WORLD
        if world is not None and not kwargs.get("use_local_synchronization"):
            everyone = dist.get_process_group_ranks(world)          # must call it, members or not
            self._write(f"new_group of {name(ranks or everyone)}", [], world, everyone, _user(sys._getframe())[0], waits=[])
        return self.make_group(ranks, *args, **kwargs)

    def _write(self, op: str, tensors: list[Tensor], group: dist.ProcessGroup, ranks: list[int], place: Record,
               **more: Any) -> None:
        record = {"op": op, "shapes": [list(tensor.shape) for tensor in tensors],
                  "dtype": str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
                  "group": group.group_name, "ranks": ranks, **more, **place}
        os.write(self.file, json.dumps(record).encode() + b"\n")


def trace_file(folder: Path | str, rank: int) -> Path:
    """Where a rank writes."""
    return Path(folder, f"rank-{rank}.jsonl")


def where(frame: FrameType | None) -> str:
    """The line that a frame is at, or, if that is inside PyTorch, the line that called PyTorch."""
    return _at(_user(frame)[0])


def name(ranks: Sequence[int]) -> str:
    """"rank 2", "ranks 0 and 3", "ranks 0-3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


@cache
def _operator(func: Any) -> tuple[str, list[str]]:
    """What an operator does, "" if it is no collective, and the names of its arguments."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return "", []
    spelling = func.name().replace("_", "")
    word = next((word for word in WORDS if word.replace("-", "") in spelling), "")
    return word, [argument.name for argument in func._schema.arguments]


def _awaited(word: str, one: int | None, me: int, ranks: list[int]) -> list[int]:
    """Whose part a rank needs before it can go on."""
    if word in ("reduce", "gather") and one != me:
        return []
    return [one] if one is not None and word not in ("reduce", "gather") else ranks


def _tensors(word: str, given: dict[str, Any]) -> list[Tensor]:
    """What each rank contributes, or of scatter, to which one alone contributes, what it gets."""
    if word == "barrier":
        return []
    wanted = "output_tensors" if word == "scatter" else next(key for key in given if key.startswith(("input", "tensor")))
    return _flat(given[wanted])


def _flat(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else [tensor for part in tensors for tensor in _flat(part)]


def _user(frame: FrameType | None) -> tuple[Record, set[str]]:
    """The innermost line outside PyTorch, and the names of PyTorch's functions further in."""
    inside = set()
    while frame and frame.f_code.co_filename.startswith((LIBRARIES, __file__)):
        inside.add(frame.f_code.co_name)
        frame = frame.f_back
    file, line = (frame.f_code.co_filename, frame.f_lineno) if frame else ("?", 0)
    return {"file": file, "line": line, "code": getline(file, line).strip()}, inside


def explain(folder: Path | str, states: Sequence[str]) -> tuple[str, bool]:
    """What keeps the ranks from meeting ("" if nothing does), and whether it is certain that they never will.

    The state of each rank is "running", "returned", "raised" or "died". That one waits for another may come
    right. Certain are calls that differ, a call that a rank which is gone never made, and waiting in a circle.
    """
    traces = [_read(trace_file(folder, rank)) for rank in range(len(states))]
    sentences, certain = [], False
    waits: dict[int, set[int]] = {}                  # who is inside a call, and for whom it waits there
    for channel, calls in _channels(traces).items():
        done = {rank: len(made) for rank, made in calls.items()}
        wrong = _mismatch(channel, calls)
        missed = [count for rank, count in done.items() if states[rank] != "running" and count < max(done.values())]
        certain = certain or bool(wrong or missed)
        for rank, made in calls.items():
            if made and made[-1] is traces[rank][-1] and states[rank] == "running":
                waits[rank] = {other for other in made[-1]["waits"] if done[other] < done[rank]}
                missed += [done[rank] - 1] if waits[rank] else []
        if wrong or missed:
            sentences.append(wrong or _absence(channel, calls, min(missed), states))
    while free := [rank for rank, others in waits.items() if not others & waits.keys()]:
        waits = {rank: others for rank, others in waits.items() if rank not in free}
    if waits:                                        # who is left waits for another who is left
        sentences.append(f"{name(sorted(waits)).capitalize()} wait in a circle.")
    return "\n".join(sentences), certain or bool(waits)


def _read(file: Path) -> list[Record]:
    """The complete lines of a trace; its rank may be writing another."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def _channel(rank: int, record: Record) -> Channel:
    word, *rest = record["op"].split()
    if word not in ("send", "recv"):
        return record["group"], tuple(record["ranks"])
    peer = int(rest[-1]) if rest else ANYONE
    return record["group"], (rank, peer) if word == "send" else (peer, rank), record["tag"]


def _channels(traces: list[list[Record]]) -> dict[Channel, Calls]:
    channels: dict[Channel, Calls] = {}
    for rank, trace in enumerate(traces):
        for record in trace:
            channel = _channel(rank, record)
            channels.setdefault(channel, {member: [] for member in channel[1]})[rank].append(record)
    # whoever receives from anyone may take any message: nothing can be matched there
    open_to_all = {channel[1][1] for channel in channels if channel[1][0] == ANYONE}
    return {channel: calls for channel, calls in channels.items() if len(channel) == 2 or channel[1][1] not in open_to_all}


def _mismatch(channel: Channel, calls: Calls) -> str:
    """The first calls that should be one and differ."""
    for index in range(max(map(len, calls.values()))):
        kinds: dict[Any, list[int]] = {}
        for rank in (rank for rank in calls if len(calls[rank]) > index):
            kinds.setdefault(_kind(calls[rank][index]), []).append(rank)
        if len(kinds) > 1:
            told = "; ".join(f"{name(ranks)} {_tell(calls[ranks[0]][index])}" for ranks in kinds.values())
            return f"{DISAGREE} at {_title(channel, index)}: {told}."
    return ""


def _kind(record: Record) -> tuple[Any, ...]:
    op = "message" if record["op"].startswith(("send", "recv")) else record["op"]
    return op, record["dtype"], op == "all-to-all" or str(record["shapes"])      # whose pieces may differ


def _absence(channel: Channel, calls: Calls, index: int, states: Sequence[str]) -> str:
    """Who made a call, and who did not."""
    there = [rank for rank in calls if len(calls[rank]) > index]
    missing = [rank for rank in calls if rank not in there]
    record = calls[there[0]][index]
    waiting = states[there[0]] == "running" and set(missing) & set(record["waits"])
    verb = "reached" if not waiting else "waits at" if len(there) == 1 else "wait at"
    text = f"{name(there).capitalize()} {verb} {_title(channel, index)}, {_tell(record)}"
    gone = [f" Rank {rank} {FATES[states[rank]]} before it." for rank in missing if states[rank] != "running"]
    return text + (f", for {name(missing)}." if waiting else ".") + "".join(gone)


def _title(channel: Channel, index: int) -> str:
    if len(channel) == 2:
        return f"collective {index + 1} of {name(channel[1])}" + (f" (group {channel[0]})" if channel[0] != WORLD else "")
    return f"message {index + 1} from rank {channel[1][0]} to rank {channel[1][1]}"


def _tell(record: Record) -> str:
    shapes = ", ".join(str(tuple(shape)) for shape in record["shapes"][:4]) + (", ..." if len(record["shapes"]) > 4 else "")
    return f"{record['op']}{f' of {shapes} ' if shapes else ''}{record['dtype']} in {_at(record)}"


def _at(place: Record) -> str:
    file = place["file"]
    if not file.startswith("the cell "):             # as the checks call it
        file = "the cell" if "ipykernel" in file else os.path.basename(file)
    return f"line {place['line']} of {file}: `{place['code']}`"
