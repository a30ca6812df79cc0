"""What holds memory at its peak: an account of a memory snapshot by line of source.

A snapshot is what `torch.cuda.memory._dump_snapshot` writes: with profile.memory=true a run writes `memory-RANK.pickle`. It
lists every allocation and every free, in order, with the Python frames that asked for it.
"""

import gzip
import pickle
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from course.utils.errors import CourseError

Event = tuple[str, int, int, str]                    # "alloc" or "free", address, bytes, and for an alloc the line that asked
ACTIONS = {"alloc": "alloc", "free_completed": "free"}       # a free is also *requested* before it happens
NO_FRAMES = "no Python frame: the backward pass"
MOST = 12                                            # lines in the table


class PlainUnpickler(pickle.Unpickler):
    """Reads numbers, strings, lists and dicts. A pickle that asks for anything else could run a program: it is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse every object that is no number, string, list or dict."""
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read(path: Path) -> list[Event]:
    """The events of a snapshot, .pickle or .pickle.gz, of the device with the most. Raises `CourseError`."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            traces = PlainUnpickler(file).load()["device_traces"]
        found = max(traces, key=len)
        return [(ACTIONS[event["action"]], event["addr"], event["size"], line_of(event["frames"]))
                for event in found if event["action"] in ACTIONS]
    except FileNotFoundError as error:
        raise CourseError(f"there is no file {path}: give a snapshot, which profile.memory=true writes on a GPU") from error
    except (OSError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise CourseError(f"{path} is no memory snapshot ({type(error).__name__}: {error}): record one with "
                          "`course profile PRESET profile.memory=true` on a GPU") from error


def line_of(frames: Sequence[dict[str, Any]]) -> str:
    """The innermost line outside PyTorch, as "folder/file.py:line function"."""
    for frame in frames:
        parts = Path(frame["filename"]).parts
        if frame["filename"].endswith(".py") and "torch" not in parts:
            return f"{'/'.join(parts[-3:])}:{frame['line']} {frame['name']}"
    return NO_FRAMES


def peak(events: Sequence[Event]) -> tuple[int, int]:
    """(most bytes above those at the start, number of events until then)."""
    now = most = when = 0
    for number, (action, _, size, _) in enumerate(events, 1):
        now += size if action == "alloc" else -size
        if now > most:
            most, when = now, number
    return most, when


def alive_at_peak(events: Sequence[Event]) -> dict[str, int]:
    """The bytes that each source line holds when memory is at its peak.

    Only blocks whose allocation is in `events` have a line. Freeing another block lowers the total all the same.
    """
    alive: dict[int, tuple[str, int]] = {}           # address -> (line, bytes); a freed address is used again
    held: list[tuple[str, int]] = []
    now = most = 0
    for action, address, size, line in events:
        if action == "alloc":
            alive[address] = line, size
            now += size
        else:
            alive.pop(address, None)
            now -= size
        if now > most:
            most, held = now, list(alive.values())
    lines = Counter[str]()
    for line, size in held:
        lines[line] += size
    return dict(lines)


def over_time(events: Sequence[Event], lines: Sequence[str]) -> list[list[int]]:
    """Bytes alive after each event: for each of `lines`, and last for all other lines together."""
    place, alive = {line: number for number, line in enumerate(lines)}, dict[int, tuple[int, int]]()
    now, found = [0] * (len(lines) + 1), []
    for action, address, size, line in events:
        if action == "alloc":
            alive[address] = place.get(line, len(lines)), size
            now[alive[address][0]] += size
        elif address in alive:
            row, size = alive.pop(address)
            now[row] -= size
        found.append(list(now))
    return [list(row) for row in zip(*found, strict=True)]


def text(events: Sequence[Event]) -> str:
    """The account as a table, the largest lines first."""
    lines, (most, _) = alive_at_peak(events), peak(events)
    largest = sorted(lines, key=lambda line: -lines[line])
    rows = [f"  {lines[line] / 1e6:10.1f} MB {lines[line] / max(1, sum(lines.values())):6.1%}  {line}" for line in largest[:MOST]]
    if rest := sum(lines[line] for line in largest[MOST:]):
        rows.append(f"  {rest / 1e6:10.1f} MB {rest / sum(lines.values()):6.1%}  {len(largest) - MOST} other lines")
    return "\n".join([f"memory rises {most / 1e6:.1f} MB above where the recording began; then these lines hold it:", "", *rows])
