"""A tensor as pieces that ranks own: boxes, and flat ranges of boxes, each in one rank's file.

The index describes what the ranks wrote, tensor by tensor:

    {"shape": [6, 2], "dtype": "float32", "pieces": [{"file": "rank00000.safetensors", "key": "w", "box": [[0, 3], [0, 2]],
                                                      "flat": null}, ...]}

A box is where a piece begins and ends along each dim. A flat range (ZeRO-1) is a range of a box's elements in row-major order. It
also consists of boxes: part of a row, whole rows, part of a row. So a reader only ever intersects two boxes.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from course.checkpoint.safetensors_writer import stream
from course.parallel.placement import Box, Placement, box_shape
from course.utils.atomic_files import atomic, os_error_cure, sha256
from course.utils.errors import CourseError

MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, OverflowError)     # what reading JSON
                                                     # that is no index raises


class Damaged(CourseError):
    """A checkpoint differs from what was written."""


class Misplaced(CourseError):
    """Two ranks own the same part of a tensor, or no rank owns it: neither this checkpoint nor any later one would be whole."""


class Shard(NamedTuple):
    """A piece of a tensor that a rank writes."""

    name: str                                        # the tensor's name in the index
    where: Placement                                 # which part of it
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the box, or the length of the flat range."""
        flat = self.where.flat
        return (flat[1] - flat[0],) if flat else box_shape(self.where.box)


def write_shards(folder: Path, rank: int, pieces: Sequence[Shard], tensors: Iterable[Tensor]) -> dict[str, Any]:
    """Write a rank's file into `folder`, copying one tensor at a time to the host; return its part of the index."""
    if not pieces:
        return {"tensors": {}, "files": {}}
    name = f"rank{rank:05d}.safetensors"
    with atomic(folder / name) as file:
        stream(file, [(piece.name, piece.dtype, piece.shape) for piece in pieces], tensors)
    return {"tensors": merge_entries({piece.name: entry(name, piece)} for piece in pieces),
            "files": {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}}}


def entry(file: str, piece: Shard) -> dict[str, Any]:
    """The index entry of a tensor with one piece, in one rank's file."""
    where = piece.where
    return {"shape": list(where.global_shape), "dtype": str(piece.dtype).removeprefix("torch."),
            "pieces": [{"file": file, "key": piece.name, "box": [list(side) for side in where.box],
                        "flat": list(where.flat) if where.flat else None}]}


def merge_entries(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Merge the tensors of several indexes: each gets all of its pieces."""
    tensors: dict[str, Any] = {}
    for part in parts:
        for name, found in part.items():
            tensors.setdefault(name, {**found, "pieces": []})["pieces"] += found["pieces"]
    return tensors


def check_whole(tensors: dict[str, Any]) -> None:
    """Raise `Misplaced` if an element of a tensor is in no piece, or in two: it could not be read back."""
    for name, found in tensors.items():
        if not found["shape"]:                       # a scalar: every owner writes its own
            continue
        total, (numbers, twice) = math.prod(found["shape"]), count(found["pieces"])
        if numbers != total or twice:
            more = ", some of them twice" * twice
            raise Misplaced(f"the ranks own {numbers} numbers of {name}, which has {total}{more}; nobody could read it back: "
                            "correct its placement (course/parallel/placement.py) in this layout, or train in another one")


def count(pieces: list[dict[str, Any]]) -> tuple[int, bool]:
    """(number of elements in all pieces, whether an element is in two of them). Two boxes must be equal or disjoint."""
    ranges: dict[Box, list[tuple[int, int]]] = {}    # box -> its flat ranges
    for piece in pieces:
        box = tuple((start, stop) for start, stop in piece["box"])
        first, end = piece["flat"] or (0, math.prod(box_shape(box)))
        ranges.setdefault(box, []).append((first, end))
    twice = any(end > first for parts in ranges.values() for (_, end), (first, _) in pairwise(sorted(parts)))
    meet = any(all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=False))
               for one, other in combinations(ranges, 2))
    return sum(end - first for parts in ranges.values() for first, end in parts), twice or meet


def read_placed(checkpoint: Path, index: dict[str, Any], name: str, where: Placement) -> Tensor:
    """The box of a global tensor, or the flat range of it. Nothing else is read."""
    if where.flat is None:
        return read_box(checkpoint, index, name, where.box)
    none = torch.empty(0, dtype=getattr(torch, index["tensors"][name]["dtype"]))
    parts = [read_box(checkpoint, index, name, box).flatten() for box in boxes_of(where.box, where.flat)]
    return torch.cat([none, *parts]) if len(parts) != 1 else parts[0]


def read_box(checkpoint: Path, index: dict[str, Any], name: str, box: Box) -> Tensor:
    """The part `box` of a global tensor, assembled from the pieces that overlap it. Only the overlaps are read.

    Raises `Damaged` if the pieces do not hold what the index says, or leave a gap.
    """
    found = index["tensors"][name]
    numbers = 0                                      # elements read so far
    try:
        whole = torch.empty(box_shape(box), dtype=getattr(torch, found["dtype"]))
        for piece in found["pieces"] if box else found["pieces"][:1]:           # a scalar: every owner writes its own
            if any(overlap(box, part) for part in boxes_of(piece["box"], piece["flat"])):
                with safe_open(checkpoint / piece["file"], "pt") as file:
                    numbers += fill(whole, box, file, piece)
    except (SafetensorError, OSError, RuntimeError, *MALFORMED) as error:
        cure = os_error_cure(error, f"restore it, or move {checkpoint} away")
        raise Damaged(f"{checkpoint} does not hold {name} as its index says ({error}): {cure}") from error
    if numbers != whole.numel():
        raise Damaged(f"{checkpoint} has {numbers} of {whole.numel()} numbers of {name}: restore it, or move {checkpoint} away")
    return whole


def fill(whole: Tensor, box: Box, file: Any, piece: dict[str, Any]) -> int:
    """Copy the elements that a piece in an open file shares with a box into `whole`; return how many these are."""
    if not piece["box"]:
        whole.copy_(file.get_tensor(piece["key"]).view(()))
        return 1
    stored, parts = file.get_slice(piece["key"]), boxes_of(piece["box"], piece["flat"])
    sizes = [math.prod(box_shape(part)) for part in parts]
    if stored.get_shape() != (list(box_shape(piece["box"])) if piece["flat"] is None else [sum(sizes)]):
        raise ValueError("a piece of another shape")
    numbers = 0
    for part, size, end in zip(parts, sizes, accumulate(sizes), strict=True):
        if shared := overlap(box, part):
            source, target = shared
            found = stored[source] if piece["flat"] is None else box_of_flat(stored, end - size, box_shape(part), source)
            whole[target] = found
            numbers += found.numel()
    return numbers


def box_of_flat(stored: Any, start: int, shape: tuple[int, ...], source: tuple[slice, ...]) -> Tensor:
    """`x[source]` of an array x of this shape, stored at `start` in a flat range. Reads from its first to its last element."""
    strides = torch.empty(shape, device="meta").stride()
    first = start + sum(side.start * stride for side, stride in zip(source, strides, strict=True))
    last = start + sum((side.stop - 1) * stride for side, stride in zip(source, strides, strict=True))
    return stored[first:last + 1].as_strided([side.stop - side.start for side in source], strides)


def boxes_of(box: Box, flat: Sequence[int] | None) -> list[Box]:
    """Split a flat range of a box into boxes, in order: part of a row, whole rows, part of a row."""
    if flat is None or not box:
        return [box] if flat is None or flat[0] < flat[1] else []
    (top, _), *inner = box
    size = max(1, math.prod(box_shape(tuple(inner))))                   # elements in a row
    (first, skipped), (last, used) = divmod(flat[0], size), divmod(flat[1], size)

    def part_of_row(row: int, *part: int) -> list[Box]:
        return [((top + row, top + row + 1), *box) for box in boxes_of(tuple(inner), part)]

    if first == last:
        return part_of_row(first, skipped, used) if skipped < used else []
    before = part_of_row(first, skipped, size) if skipped else []
    after = part_of_row(last, 0, used) if used else []
    first += skipped > 0
    return [*before, *([((top + first, top + last), *inner)] if first < last else []), *after]


def overlap(wanted: Box, piece: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What two boxes share, as slices of a tensor that has the piece's numbers, and of one that will have the wanted ones.

    None if they share nothing.
    """
    both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, piece, strict=True)]
    if any(start >= stop for start, stop in both):
        return None
    in_piece = tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(both, piece, strict=True))
    in_wanted = tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(both, wanted, strict=True))
    return in_piece, in_wanted
