"""Explain whether ranks meet in their collectives, and if not, who waits for whom, from the traces of `collective_trace.py`.

    text, certain = explain(folder, states)        called by the process that watches the ranks

Nothing here imports PyTorch: a process that starts ranks need not have it in memory.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from course.utils.errors import CourseError, rank_names

ANYONE = -1
CELL = "the cell "  # the prefix of checks' names for cells (`lab/checks/notebook_cells.py`); no file's name has it
WORLD = "0"                                          # the name of the group of all ranks
DISAGREE = "The ranks disagree"                      # the start of an explanation of calls that differ
# how gloo and NCCL say that another rank ended
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited", "ncclRemoteError")
FATES = {"returned": "returned", "raised": "raised an exception", "died": "died"}

Record = dict[str, Any]                              # one call of one rank: a line of its file
Channel = tuple[Any, ...]                            # (group, ranks) or, for messages, (group, (from, to), tag)
Calls = dict[int, list[Record]]                      # each rank's calls on a channel: they must match one by one


def trace_file(folder: Path | str, rank: int) -> Path:
    """The file of a rank's trace."""
    return Path(folder, f"rank-{rank}.jsonl")


def lost(error: BaseException) -> bool:
    """Whether an exception says only that another rank is gone."""
    return not isinstance(error, CourseError) and any(words in str(error) for words in LOST)


def explain(folder: Path | str, states: Sequence[str]) -> tuple[str, bool]:
    """What keeps the ranks from meeting ("" if nothing does), and whether it is certain that they never will.

    states: "running", "returned", "raised" or "died" for each rank. A rank that waits for another may still meet it. Certain are
    calls that differ, a call that a rank which has ended never made, and waiting in a circle.
    """
    traces = [_read(trace_file(folder, rank)) for rank in range(len(states))]
    sentences, certain = [], False
    waits: dict[int, set[int]] = {}                  # rank inside a call -> the ranks that it waits for there
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
    if waits:                                        # each remaining rank waits for another one
        sentences.append(f"{rank_names(sorted(waits)).capitalize()} wait for each other: a deadlock.")
    return "\n".join(sentences), certain or bool(waits)


def _read(file: Path) -> list[Record]:
    """The complete lines of a trace; its rank may be writing another."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
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
    # a receive from anyone may take any message: nothing can be matched there
    open_to_all = {channel[1][1] for channel in channels if channel[1][0] == ANYONE}
    return {channel: calls for channel, calls in channels.items() if len(channel) == 2 or channel[1][1] not in open_to_all}


def _mismatch(channel: Channel, calls: Calls) -> str:
    """A sentence on the first calls that should match and differ; "" if there are none."""
    for index in range(max(map(len, calls.values()))):
        kinds: dict[Any, list[int]] = {}
        for rank in (rank for rank in calls if len(calls[rank]) > index):
            kinds.setdefault(_kind(calls[rank][index]), []).append(rank)
        if len(kinds) > 1:
            told = "; ".join(f"{rank_names(ranks)} {_tell(calls[ranks[0]][index])}" for ranks in kinds.values())
            return f"{DISAGREE} at {_title(channel, index)}: {told}."
    return ""


def _kind(record: Record) -> tuple[Any, ...]:
    op = "message" if record["op"].startswith(("send", "recv")) else record["op"]
    return op, record["dtype"], op == "all-to-all" or str(record["shapes"])      # its pieces may differ


def _absence(channel: Channel, calls: Calls, index: int, states: Sequence[str]) -> str:
    """A sentence on which ranks made a call, and which did not."""
    there = [rank for rank in calls if len(calls[rank]) > index]
    missing = [rank for rank in calls if rank not in there]
    record = calls[there[0]][index]
    waiting = states[there[0]] == "running" and set(missing) & set(record["waits"])
    verb = "reached" if not waiting else "waits at" if len(there) == 1 else "wait at"
    text = f"{rank_names(there).capitalize()} {verb} {_title(channel, index)}, {_tell(record)}"
    gone = [f" Rank {rank} {FATES[states[rank]]} before it." for rank in missing if states[rank] != "running"]
    return text + (f", for {rank_names(missing)}." if waiting else ".") + "".join(gone)


def _title(channel: Channel, index: int) -> str:
    if len(channel) == 2:
        return f"collective {index + 1} of {rank_names(channel[1])}" + (f" (group {channel[0]})" if channel[0] != WORLD else "")
    return f"message {index + 1} from rank {channel[1][0]} to rank {channel[1][1]}"


def _tell(record: Record) -> str:
    shapes = ", ".join(str(tuple(shape)) for shape in record["shapes"][:4]) + (", ..." if len(record["shapes"]) > 4 else "")
    return f"{record['op']}{f' of {shapes} ' if shapes else ''}{record['dtype']} in {at(record)}"


def at(place: Record) -> str:
    """A line of source in words."""
    file = place["file"]
    if not file.startswith(CELL):
        file = "the cell" if "ipykernel" in file else os.path.basename(file)
    return f"line {place['line']} of {file}: `{place['code']}`"
