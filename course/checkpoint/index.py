"""A checkpoint's index: where each tensor lies, the run's state and config, and checksums of every file and of itself.

`checkpoint.py` describes the format. An index is read only after its files have been compared with their checksums.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch.distributed as dist

from course.checkpoint.safetensors_writer import CODES
from course.checkpoint.shards import MALFORMED, Damaged, check_whole, merge_entries
from course.parallel.mesh import Axis
from course.utils.atomic_files import NotAnOrdinaryFile, atomic, os_error_cure, read_file, sha256
from course.utils.errors import CourseError

FORMAT = 2                                           # 2: fused QKV weights are (3, heads, head_dim, dim)
PARTS = {"format", "state", "config", "tensors", "files"}        # keys of an index, besides "sha256", which older ones lack


class OtherFormat(Damaged):
    """A checkpoint of another format version: unreadable here, but not to be thrown away."""


def write_index(folder: Path, entries: list[dict[str, Any]], state: dict[str, Any], config: dict[str, Any]) -> None:
    """Write `index.json` from the ranks' entries. Raises `Misplaced` if a tensor has a gap or an overlap."""
    tensors = merge_entries(entry["tensors"] for entry in entries)
    check_whole(tensors)
    index = {"format": FORMAT, "state": state, "config": config, "tensors": tensors,
             "files": {name: found for entry in entries for name, found in entry["files"].items()}}
    index["sha256"] = checksum(json.loads(json.dumps(index)))
    with atomic(folder / "index.json") as file:
        file.write_text(json.dumps(index, indent=1), encoding="utf-8")


def format_of(checkpoint: Path) -> int:
    """The format version of a checkpoint's index, or this library's if the index cannot be read."""
    try:
        return int(json.loads(read_file(checkpoint / "index.json"))["format"])
    except (OSError, *MALFORMED):
        return FORMAT


def checksum(index: dict[str, Any]) -> str:
    """The SHA-256 of an index's content without the checksum itself; JSON formatting does not matter."""
    rest = {name: value for name, value in index.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_index(checkpoint: Path, everyone: Axis | None = None) -> dict[str, Any]:
    """The index of a checkpoint whose files are intact.

    Raises `Damaged` with the reason if they are not, and `CourseError` if they cannot be reached, so that nothing is known.

    everyone: ranks that read it together. Each verifies its share of the files, and all raise if any finds damage.
    """
    rank, size = (everyone.rank, everyone.size) if everyone else (0, 1)
    index: dict[str, Any] = {}
    damages: list[CourseError | None] = [None] * size
    try:
        index = check_files(checkpoint, rank, size)
    except CourseError as damage:
        damages[rank] = damage.with_traceback(None)
    if everyone and size > 1:
        dist.all_gather_object(damages, damages[rank], group=everyone.group)
    if first := next(filter(None, damages), None):
        raise first
    return index


def check_files(checkpoint: Path, rank: int, size: int) -> dict[str, Any]:
    """The index, after verifying every `size`-th of its files, from the `rank`-th on."""
    try:
        index: dict[str, Any] = json.loads(read_file(checkpoint / "index.json"))
        if index["format"] != FORMAT:
            raise OtherFormat(f"{checkpoint} is of format {index['format']}, this version reads {FORMAT}: read it with the "
                              "version that wrote it")
        check_index(index)
        for name, found in list(index["files"].items())[rank::size]:
            check_file(checkpoint, name, found["bytes"], found["sha256"])
    except (FileNotFoundError, NotAnOrdinaryFile, *MALFORMED) as error:
        raise Damaged(f"{checkpoint}/index.json is missing or damaged: restore it, or move {checkpoint} away") from error
    except OSError as error:
        raise unreachable(checkpoint / "index.json", error) from error
    return index


def check_index(index: dict[str, Any]) -> None:
    """Raise one of MALFORMED if an index is not what was written. One without a checksum is only checked for consistency."""
    found = checksum(index)
    if index.keys() - {"sha256"} != PARTS or index.get("sha256", found) != found:
        raise ValueError("not what was written")
    if "sha256" in index:
        return
    _ = index["state"].keys(), index["config"].keys()
    dtypes = [str(dtype).removeprefix("torch.") for dtype in CODES]
    for tensor in index["tensors"].values():
        if tensor["dtype"] not in dtypes or not tensor["pieces"]:
            raise ValueError("no tensor")
        for piece in tensor["pieces"]:
            sides = list(zip(piece["box"], tensor["shape"], strict=True))
            last = math.prod(stop - start for (start, stop), _ in sides)
            first, end = piece["flat"] or (0, last)
            if not (isinstance(piece["key"], str) and piece["file"] in index["files"] and 0 <= first <= end <= last
                    and all(0 <= start <= stop <= n for (start, stop), n in sides)):
                raise ValueError("no piece")


def check_file(checkpoint: Path, name: str, size: int, digest: str) -> None:
    """Raise `Damaged` if a file is missing or not what was written."""
    file = checkpoint / name
    if Path(name).name != name or not file.is_file():
        raise Damaged(f"{checkpoint} lacks {name}: restore it, or move {checkpoint} away")
    try:
        good = file.stat().st_size == size and sha256(file) == digest
    except OSError as error:
        raise unreachable(file, error) from error
    if not good:
        raise Damaged(f"{file} is damaged (its checksum does not match): restore it, or move {checkpoint} away")


def unreachable(file: Path, error: OSError) -> CourseError:
    """The error for an unreadable file that may be intact. Skipping it would take the run back to an older checkpoint."""
    return CourseError(f"{file} cannot be read ({error.strerror}): "
                       f"{os_error_cure(error, 'run again')}; to resume from an older checkpoint, move {file.parent} away")
