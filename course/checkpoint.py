"""Checkpoints in a logical format: what is written says nothing of the layout that wrote it.

    checkpoints/step_000128/
        index.json               what is where, the state of the run, its config, a checksum of each file and of itself
        rank00000.safetensors    the pieces that rank 0 owned

`index.json` maps each serial parameter name (and `name.exp_avg` and so on for optimizer states) to its
global shape, dtype and pieces; a piece is a box of the global tensor in one file, or, of a ZeRO-1 run, a
flat range of such a box. A reader in any layout takes from the pieces the box that it needs. Nothing is
pickled: reading a checkpoint executes nothing.
A folder appears under its name only when all of it is on the disk.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from course.average import average_of
from course.errors import CourseError
from course.files import atomic, flush, remove, sha256
from course.parallel.mesh import Axis
from course.parallel.placement import Box, Placement, box_shape, placement
from course.streaming import CODES, stream

FORMAT = 2                                           # 2: fused QKV weights are (3, heads, head_dim, dim)
DAMAGED = ".damaged"                                 # at the end of the name of one that a resume has passed over
PARTS = {"format", "state", "config", "tensors", "files"}        # of an index; and "sha256", which older ones lack
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, OverflowError)     # what JSON that is
                                                     # not an index runs into

KINDS: dict[type, str] = {torch.optim.SGD: "momentum_buffer", torch.optim.Adam: "exp_avg"}     # a state that no other kind has


class Damaged(CourseError):
    """A checkpoint that is not what was written."""


class OtherFormat(Damaged):
    """A checkpoint of another version: as good as damaged here, and not to be thrown away."""


class NotSaved(CourseError):
    """A checkpoint that could not be written; those before it are whole."""


class Misplaced(CourseError):
    """A checkpoint that would not be whole, nor would any later one: two ranks own the same part of a tensor, or none owns it."""


def save(folder: Path, optimizer: torch.optim.Optimizer, state: dict[str, Any], config: dict[str, Any], everyone: Axis,
         more: Mapping[str, Tensor] | None = None) -> Path:
    """Write `folder/step_N` (N is state["step"]): the optimizer's parameters and states.

    Every rank calls it and writes the pieces that it owns. more: tensors by name that every rank has, whole and the same.

    Raises `NotSaved` on every rank if any of them cannot write, `Misplaced` if what they own is not all of every tensor once;
    nothing of it stays, earlier checkpoints are untouched.
    """
    final = folder / f"step_{state['step']:06d}"
    shared = (more or {}) if everyone.rank == 0 else {}
    together(everyone, lambda: make_room(final) if everyone.rank == 0 else None)
    mine = [*owned(optimizer), *whole(shared)]
    pieces = [Piece(name, where, tensor.dtype) for name, tensor, where in mine]
    sizes = together(everyone, lambda: sum(tensor.nbytes for _, tensor, _ in mine))
    try:
        entries = together(everyone, lambda: write_pieces(temporary(final), everyone.rank, pieces, (x for _, x, _ in mine)))
        together(everyone, lambda: publish(final, entries, state, config) if everyone.rank == 0 else None)
    except CourseError as error:                     # the same on all ranks: none of them is writing any more
        room = together(everyone, lambda: make_room(final) if everyone.rank == 0 else None)[0]
        if isinstance(error, Misplaced):
            raise Misplaced(f"{final} was not written: {error}") from error
        raise NotSaved(f"{final} was not written. It takes {sum(sizes) / 1e6:.1f} MB, and {room / 1e6:.1f} MB are free in "
                       f"{folder} without it. {error}") from error
    return final


def make_room(final: Path) -> int:
    """Remove what an interrupted write has left; return the bytes that are then free."""
    remove(temporary(final))
    there = next((place for place in final.parents if place.is_dir()), None)
    return shutil.disk_usage(there).free if there else 0


def together(everyone: Axis, action: Callable[[], Any]) -> list[Any]:
    """Each rank's result of `action`; if it fails on one rank, all raise an error of that kind, and none waits for it."""
    result, error = None, None
    try:
        result = action()
    except (CourseError, OSError) as failure:
        error = type(failure) if isinstance(failure, CourseError) else CourseError, str(failure) or type(failure).__name__
    if everyone.size == 1:
        answers = [(result, error)]
    else:
        answers = [(None, None)] * everyone.size
        dist.all_gather_object(answers, (result, error), group=everyone.group)
    for rank, (_, failed) in enumerate(answers):
        if failed is not None:
            kind, sentence = failed
            raise kind(sentence if everyone.size == 1 else f"rank {rank}: {sentence}")
    return [answer for answer, _ in answers]


def temporary(final: Path) -> Path:
    """Where a checkpoint is gathered before it gets its name."""
    return final.with_name(f".{final.name}.partial")


def updated(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """What an optimizer updates, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def states(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """What belongs to a parameter besides its value: the optimizer's states and the moving average."""
    average = average_of(optimizer)
    return dict(optimizer.state.get(parameter, {})) | ({"ema": average[parameter]} if average else {})


def owned(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor, Placement]]:
    """(name, tensor here, place of the parameter) of every parameter and optimizer state that this rank owns."""
    for parameter in updated(optimizer):
        where = placement(parameter)
        if where.owner:
            yield where.name, parameter.data, where
            for key, value in states(optimizer, parameter).items():
                if torch.is_tensor(value):
                    yield f"{where.name}.{key}", value, where if value.ndim else Placement(where.name, (), ())


def whole(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Placement]]:
    """The same of tensors that are nobody's parameters, with the place of one that is whole."""
    for name, tensor in tensors.items():
        yield name, tensor, Placement(name, tuple(tensor.shape), tuple((0, n) for n in tensor.shape))


class Piece(NamedTuple):
    """What a rank writes of a tensor."""

    name: str                                        # of the tensor, in the index
    where: Placement                                 # which part of it
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The box's, or of a flat range how long it is."""
        flat = self.where.flat
        return (flat[1] - flat[0],) if flat else box_shape(self.where.box)


def write_pieces(folder: Path, rank: int, pieces: Sequence[Piece], tensors: Iterable[Tensor]) -> dict[str, Any]:
    """Write a rank's file into `folder`, copying a tensor at a time to the host; return its part of the index."""
    if not pieces:
        return {"tensors": {}, "files": {}}
    name = f"rank{rank:05d}.safetensors"
    with atomic(folder / name) as file:
        stream(file, [(piece.name, piece.dtype, piece.shape) for piece in pieces], tensors)
    return {"tensors": joined({piece.name: entry(name, piece)} for piece in pieces),
            "files": {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}}}


def entry(file: str, piece: Piece) -> dict[str, Any]:
    """What the index says of a tensor of which one rank's file has a piece."""
    where = piece.where
    return {"shape": list(where.global_shape), "dtype": str(piece.dtype).removeprefix("torch."),
            "pieces": [{"file": file, "key": piece.name, "box": [list(side) for side in where.box],
                        "flat": list(where.flat) if where.flat else None}]}


def joined(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One index of tensors from several: each tensor with all of its pieces."""
    tensors: dict[str, Any] = {}
    for part in parts:
        for name, found in part.items():
            tensors.setdefault(name, {**found, "pieces": []})["pieces"] += found["pieces"]
    return tensors


def check_whole(tensors: dict[str, Any]) -> None:
    """Raise `Misplaced` for a tensor of which a number is in no piece, or in two: it could not be read back."""
    for name, found in tensors.items():
        if not found["shape"]:                       # all that own a part have a number of their own
            continue
        total, (numbers, twice) = math.prod(found["shape"]), count(found["pieces"])
        if numbers != total or twice:
            more = ", some of them twice" * twice
            raise Misplaced(f"the ranks own {numbers} numbers of {name}, which has {total}{more}; nobody could read it back: "
                            "correct its placement (course/parallel/placement.py) in this layout, or train in another one")


def count(pieces: list[dict[str, Any]]) -> tuple[int, bool]:
    """(how many numbers pieces have together, whether any of these is in two); boxes are the same or have nothing in common."""
    ranges: dict[Box, list[tuple[int, int]]] = {}    # of each box, in order
    for piece in pieces:
        box = tuple((start, stop) for start, stop in piece["box"])
        first, end = piece["flat"] or (0, math.prod(box_shape(box)))
        ranges.setdefault(box, []).append((first, end))
    twice = any(end > first for parts in ranges.values() for (_, end), (first, _) in pairwise(sorted(parts)))
    meet = any(all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=False))
               for one, other in combinations(ranges, 2))
    return sum(end - first for parts in ranges.values() for first, end in parts), twice or meet


def publish(final: Path, entries: list[dict[str, Any]], state: dict[str, Any], config: dict[str, Any]) -> None:
    """Join the ranks' entries to the index and give the folder its name, if all of every tensor is there once (`Misplaced`)."""
    tensors = joined(entry["tensors"] for entry in entries)
    check_whole(tensors)
    index = {"format": FORMAT, "state": state, "config": config, "tensors": tensors,
             "files": {name: found for entry in entries for name, found in entry["files"].items()}}
    index["sha256"] = checksum(json.loads(json.dumps(index)))
    with atomic(temporary(final) / "index.json") as file:
        file.write_text(json.dumps(index, indent=1))
    remove(final)                                    # the same step again: after a resume from an older one
    temporary(final).rename(final)
    flush(final.parent)


def checksum(index: dict[str, Any]) -> str:
    """The SHA-256 of what an index says, however its JSON is set, but for the checksum itself."""
    rest = {name: value for name, value in index.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def prune(folder: Path, keep: int, saved: Path | None = None) -> None:
    """Remove all but the newest `keep` checkpoints, all but the newest damaged one, and what an interrupted write left behind.

    saved: the one just written. Newer ones do not count and stay: they are of another version, and a resume has passed over them.
    """
    found = steps(folder)
    for old in (found[:found.index(saved) + 1] if saved in found else found)[:-keep]:
        remove(old)
    for old in steps(folder, DAMAGED)[:-1]:
        remove(old)
    for unfinished in folder.glob(".step_*.partial"):
        remove(unfinished)


def steps(folder: Path, suffix: str = "") -> list[Path]:
    """The finished checkpoints, oldest first; suffix: those of a name that ends in it instead."""
    names = {path: path.name.removeprefix("step_").removesuffix(suffix) for path in folder.glob(f"step_*{suffix}")}
    return sorted((path for path, number in names.items() if number.isdecimal()), key=lambda path: int(names[path]))


def set_aside(checkpoints: list[Path]) -> None:
    """Rename damaged checkpoints, so that they count as none any more and can be looked into."""
    for checkpoint in checkpoints:
        aside = checkpoint.with_name(checkpoint.name + DAMAGED)
        remove(aside)
        checkpoint.rename(aside)


def read_index(checkpoint: Path, everyone: Axis | None = None) -> dict[str, Any]:
    """The index of a checkpoint whose files are whole; raises `Damaged` with the reason otherwise.

    everyone: ranks that read it together. Each adds up the bytes of its share of the files, and all hear what any has found.
    """
    rank, size = (everyone.rank, everyone.size) if everyone else (0, 1)
    index: dict[str, Any] = {}
    damages: list[Damaged | None] = [None] * size
    try:
        index = check_files(checkpoint, rank, size)
    except Damaged as damage:
        damages[rank] = damage.with_traceback(None)
    if everyone and size > 1:
        dist.all_gather_object(damages, damages[rank], group=everyone.group)
    if first := next(filter(None, damages), None):
        raise first
    return index


def check_files(checkpoint: Path, rank: int, size: int) -> dict[str, Any]:
    """The index, and of every `size`-th of its files, from the `rank`-th on, whether it is what was written."""
    try:
        index: dict[str, Any] = json.loads((checkpoint / "index.json").read_text())
        if index["format"] != FORMAT:
            raise OtherFormat(f"{checkpoint} is of format {index['format']}, this version reads {FORMAT}: read it with the "
                              "version that wrote it")
        check_index(index)
        for name, found in list(index["files"].items())[rank::size]:
            check_file(checkpoint, name, found["bytes"], found["sha256"])
    except (OSError, *MALFORMED) as error:
        raise Damaged(f"{checkpoint}/index.json is missing or damaged: remove {checkpoint}") from error
    return index


def check_index(index: dict[str, Any]) -> None:
    """Raise one of MALFORMED if an index is not what was written, or, of one without a checksum, if it cannot be."""
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
    """Raise `Damaged` if a file is not what was written."""
    file = checkpoint / name
    if Path(name).name != name or not file.is_file():
        raise Damaged(f"{checkpoint} lacks {name}: restore it, or remove {checkpoint}")
    try:
        good = file.stat().st_size == size and sha256(file) == digest
    except OSError as error:
        raise Damaged(f"{file} cannot be read ({error.strerror}): restore it, or remove {checkpoint}") from error
    if not good:
        raise Damaged(f"{file} is damaged (its checksum does not match): remove {checkpoint}")


def newest(folder: Path, say: Callable[[str], None], everyone: Axis | None = None,
           writes: bool = False) -> tuple[Path, dict[str, Any]] | None:
    """The newest undamaged checkpoint and its index, None if there is none; says which it passes over. All of `everyone` call it.

    writes: everyone writes the run, and nobody else: where there is a whole one, those passed over are renamed to NAME.damaged.

    Raises `CourseError` if there are checkpoints but all are damaged: starting afresh would overwrite the run.
    """
    # rank 0 lists them: another node may not see the newest yet
    found = together(everyone, lambda: steps(folder) if everyone.rank == 0 else [])[0] if everyone else steps(folder)
    passed = []
    for checkpoint in reversed(found):
        try:
            index = read_index(checkpoint, everyone)
        except Damaged as damage:
            say(f"passing over a checkpoint: {damage}")
            passed += [checkpoint] if not isinstance(damage, OtherFormat) else []
            continue
        if writes and everyone and passed:
            together(everyone, partial(set_aside, passed if everyone.rank == 0 else []))
            say(f"renamed: {', '.join(one.name + DAMAGED for one in passed)}; the newest of such stays")
        return checkpoint, index
    if found:
        raise CourseError(f"every checkpoint in {folder} is damaged: restore one, or start again under another log.name")
    return None


def load(checkpoint: Path, index: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer | None = None,
         average: bool = False) -> None:
    """Fill the model's parameters, and the optimizer's states, each rank reading only its boxes.

    average: give the model the moving average of the weights instead of the last ones. An optimizer's average of which the
    checkpoint has none starts at the weights. Where its states are `of_another` optimizer, none is read.

    Raises `CourseError` if the checkpoint is of another model, or has no average, before anything is changed.
    """
    updates = updated(optimizer) if optimizer is not None else []
    parameters, kind = list(model.parameters()), ".ema" if average else ""
    fits(checkpoint, index, parameters)
    if average and any(placement(p).name + kind not in index["tensors"] for p in parameters):
        raise CourseError(f"{checkpoint} has no moving average of the weights: train with optim.ema=0.9999, say, or use the last "
                          "weights (--no-ema)")
    for parameter in [*parameters, *updates]:
        parameter.data.copy_(read_part(checkpoint, index, placement(parameter).name + kind, parameter))
    for parameter, value in average_of(optimizer).items():
        name = placement(parameter).name
        value.copy_(read_part(checkpoint, index, f"{name}.ema" if f"{name}.ema" in index["tensors"] else name, parameter))
    for parameter in [] if of_another(index, optimizer) else updates:
        for key, found in index["tensors"].items():
            stem, _, leaf = key.rpartition(".")
            if stem == placement(parameter).name and leaf != "ema" and optimizer is not None:
                value = read_part(checkpoint, index, key, parameter) if found["shape"] else read_box(checkpoint, index, key, ())
                optimizer.state[parameter][leaf] = value.to(parameter.device)


def of_another(index: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether a checkpoint's states are those of an optimizer of another kind, to which this one's first step is its first."""
    leaves = {name.rpartition(".")[2] for name in index["tensors"]}
    return any(leaf in leaves and not isinstance(optimizer, kind) for kind, leaf in KINDS.items())


def read_more(checkpoint: Path, index: dict[str, Any], names: Iterable[str]) -> dict[str, Tensor]:
    """Those of the named tensors that the checkpoint has, whole."""
    found = {name: index["tensors"][name]["shape"] for name in names if name in index["tensors"]}
    return {name: read_box(checkpoint, index, name, tuple((0, n) for n in shape)) for name, shape in found.items()}


def read_part(checkpoint: Path, index: dict[str, Any], name: str, parameter: Tensor) -> Tensor:
    """The part of a global tensor that belongs to what is here of a parameter, in its shape."""
    return read_placed(checkpoint, index, name, placement(parameter)).view(parameter.shape)


def read_placed(checkpoint: Path, index: dict[str, Any], name: str, where: Placement) -> Tensor:
    """The box of a global tensor, or the flat range of it: that alone is read."""
    if where.flat is None:
        return read_box(checkpoint, index, name, where.box)
    none = torch.empty(0, dtype=getattr(torch, index["tensors"][name]["dtype"]))
    parts = [read_box(checkpoint, index, name, box).flatten() for box in boxes_of(where.box, where.flat)]
    return torch.cat([none, *parts]) if len(parts) != 1 else parts[0]


def fits(checkpoint: Path, index: dict[str, Any], parameters: list[nn.Parameter]) -> None:
    """Raise `CourseError` naming the first parameter that the checkpoint lacks or has in another shape."""
    for parameter in parameters:
        place = placement(parameter)
        found = index["tensors"].get(place.name)
        shape = None if found is None else tuple(found["shape"])
        if shape != place.global_shape:
            has = "does not have it" if shape is None else f"has it as {list(shape)}"
            raise CourseError(f"{checkpoint} is of another model: {place.name} is {list(place.global_shape)} here, "
                              f"but the checkpoint {has}; use the model's own settings, or another log.name")


def read_box(checkpoint: Path, index: dict[str, Any], name: str, box: Box) -> Tensor:
    """The part `box` of a global tensor, put together from the pieces that overlap it; of each, that part alone is read.

    Raises `Damaged` where the pieces do not hold what the index says, or leave a gap.
    """
    found = index["tensors"][name]
    numbers = 0                                      # that have been read
    try:
        whole = torch.empty(box_shape(box), dtype=getattr(torch, found["dtype"]))
        for piece in found["pieces"] if box else found["pieces"][:1]:           # all that own a part have a number of their own
            if any(overlap(box, part) for part in boxes_of(piece["box"], piece["flat"])):
                with safe_open(checkpoint / piece["file"], "pt") as file:
                    numbers += fill(whole, box, file, piece)
    except (SafetensorError, OSError, RuntimeError, *MALFORMED) as error:
        raise Damaged(f"{checkpoint} does not hold {name} as its index says ({error}): remove {checkpoint}") from error
    if numbers != whole.numel():
        raise Damaged(f"{checkpoint} has {numbers} of {whole.numel()} numbers of {name}: remove {checkpoint}")
    return whole


def fill(whole: Tensor, box: Box, file: Any, piece: dict[str, Any]) -> int:
    """Copy what a piece of an opened file has of a box to where it belongs in `whole`; returns how many numbers these are."""
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
    """`x[source]` of an array x of a shape that lies at `start` of a stored flat range: from its first number to its last."""
    strides = torch.empty(shape, device="meta").stride()
    first = start + sum(side.start * stride for side, stride in zip(source, strides, strict=True))
    last = start + sum((side.stop - 1) * stride for side, stride in zip(source, strides, strict=True))
    return stored[first:last + 1].as_strided([side.stop - side.start for side in source], strides)


def boxes_of(box: Box, flat: Sequence[int] | None) -> list[Box]:
    """The boxes, in order, that a flat range of a box is made of: a part of a row, whole rows, a part of a row."""
    if flat is None or not box:
        return [box] if flat is None or flat[0] < flat[1] else []
    (top, _), *inner = box
    size = max(1, math.prod(box_shape(tuple(inner))))                   # of a row
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
