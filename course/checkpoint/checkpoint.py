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
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course.checkpoint.safetensors_writer import CODES
from course.checkpoint.shards import (
    MALFORMED,
    Damaged,
    Misplaced,
    Shard,
    check_whole,
    merge_entries,
    read_box,
    read_placed,
    write_shards,
)
from course.ops.ema import moving_average
from course.parallel.agree import run_on_all
from course.parallel.layout import Layout
from course.parallel.mesh import Axis
from course.parallel.placement import Placement, Placements
from course.utils.atomic_files import NotAnOrdinaryFile, atomic, flush, free_bytes, os_error_cure, read_file, remove, sha256
from course.utils.errors import CourseError

FORMAT = 2                                           # 2: fused QKV weights are (3, heads, head_dim, dim)
DAMAGED = ".damaged"                                 # at the end of the name of one that a resume has passed over
PARTS = {"format", "state", "config", "tensors", "files"}        # of an index; and "sha256", which older ones lack

KINDS: dict[type, str] = {torch.optim.SGD: "momentum_buffer", torch.optim.Adam: "exp_avg"}     # a state that no other kind has


class OtherFormat(Damaged):
    """A checkpoint of another version: as good as damaged here, and not to be thrown away."""


class NotSaved(CourseError):
    """A checkpoint that could not be written; those before it are whole."""


def save(folder: Path, optimizer: torch.optim.Optimizer, state: dict[str, Any], config: dict[str, Any], layout: Layout,
         more: Mapping[str, Tensor] | None = None) -> Path:
    """Write `folder/step_N` (N is state["step"]): the optimizer's parameters and states.

    Every rank calls it and writes the pieces that it owns. more: tensors by name that every rank has, whole and the same.

    Raises `NotSaved` on every rank if any of them cannot write, `Misplaced` if what they own is not all of every tensor once;
    nothing of it stays, earlier checkpoints are untouched.
    """
    final, everyone = folder / f"step_{state['step']:06d}", layout.mesh.all
    shared = (more or {}) if everyone.rank == 0 else {}
    run_on_all(everyone, lambda: make_room(final) if everyone.rank == 0 else None)
    mine = [*owned_tensors(optimizer, layout.placements), *whole_tensors(shared)]
    pieces = [Shard(name, where, tensor.dtype) for name, tensor, where in mine]
    sizes = run_on_all(everyone, lambda: sum(tensor.nbytes for _, tensor, _ in mine))
    try:
        entries = run_on_all(everyone, lambda: write_shards(temporary(final), everyone.rank, pieces, (x for _, x, _ in mine)))
        run_on_all(everyone, lambda: publish(final, entries, state, config) if everyone.rank == 0 else None)
    except CourseError as error:                     # the same on all ranks: none of them is writing any more
        room = run_on_all(everyone, lambda: make_room(final) if everyone.rank == 0 else None)[0]
        if isinstance(error, Misplaced):
            raise Misplaced(f"{final} was not written: {error}") from error
        raise NotSaved(f"{final} was not written. It takes {sum(sizes) / 1e6:.1f} MB, and {room / 1e6:.1f} MB are free in "
                       f"{folder} without it. {error}") from error
    return final


def make_room(final: Path) -> int:
    """Remove what an interrupted write has left; return the bytes that are then free."""
    remove(temporary(final))
    return free_bytes(final)


def temporary(final: Path) -> Path:
    """Where a checkpoint is gathered before it gets its name."""
    return final.with_name(f".{final.name}.partial")


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """What an optimizer updates, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parameter_states(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """What belongs to a parameter besides its value: the optimizer's states and the moving average."""
    average = moving_average(optimizer)
    return dict(optimizer.state.get(parameter, {})) | ({"ema": average[parameter]} if average else {})


def owned_tensors(optimizer: torch.optim.Optimizer, placements: Placements) -> Iterator[tuple[str, Tensor, Placement]]:
    """(name, tensor here, place of the parameter) of every parameter and optimizer state that this rank owns."""
    for parameter in optimizer_parameters(optimizer):
        where = placements[parameter]
        if where.owner:
            yield where.name, parameter.data, where
            for key, value in parameter_states(optimizer, parameter).items():
                if torch.is_tensor(value):
                    yield f"{where.name}.{key}", value, where if value.ndim else Placement(where.name, (), ())


def whole_tensors(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Placement]]:
    """The same of tensors that are nobody's parameters, with the place of one that is whole."""
    for name, tensor in tensors.items():
        yield name, tensor, Placement(name, tuple(tensor.shape), tuple((0, n) for n in tensor.shape))


def publish(final: Path, entries: list[dict[str, Any]], state: dict[str, Any], config: dict[str, Any]) -> None:
    """Join the ranks' entries to the index and give the folder its name, if all of every tensor is there once (`Misplaced`)."""
    tensors = merge_entries(entry["tensors"] for entry in entries)
    check_whole(tensors)
    index = {"format": FORMAT, "state": state, "config": config, "tensors": tensors,
             "files": {name: found for entry in entries for name, found in entry["files"].items()}}
    index["sha256"] = checksum(json.loads(json.dumps(index)))
    with atomic(temporary(final) / "index.json") as file:
        file.write_text(json.dumps(index, indent=1), encoding="utf-8")
    clear(final)                                     # the same step again: after a resume from an older one
    temporary(final).rename(final)
    flush(final.parent)
    flush(final.parent.parent)                       # in which the folder of checkpoints may be new


def clear(final: Path) -> None:
    """Remove what has the name of a checkpoint to be written; one of another version is renamed: nobody here can read it."""
    if (kept := format_of(final)) == FORMAT:
        remove(final)
    elif final.exists():
        final.rename(final.with_name(f"{final.name}.format_{kept}"))


def format_of(checkpoint: Path) -> int:
    """Of which version its index is; of this one, if it cannot be read."""
    try:
        return int(json.loads(read_file(checkpoint / "index.json"))["format"])
    except (OSError, *MALFORMED):
        return FORMAT


def checksum(index: dict[str, Any]) -> str:
    """The SHA-256 of what an index says, however its JSON is set, but for the checksum itself."""
    rest = {name: value for name, value in index.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def prune(folder: Path, keep: int, saved: Path | None = None) -> None:
    """Remove all but the newest `keep` checkpoints (0: none), all but the newest damaged one, and what an interrupted write left.

    Those of another version stay, and do not count. saved: the one just written; newer ones stay, too.
    """
    found = [one for one in steps(folder) if one == saved or format_of(one) == FORMAT]
    for old in (found[:found.index(saved) + 1] if saved in found else found)[:-keep or 0]:
        remove(temporary(old))
        old.rename(temporary(old))                   # and removed below: who is killed there leaves no half of one under its name
    for old in steps(folder, DAMAGED)[:-1]:
        remove(old)
    for unfinished in folder.glob(".step_*.partial"):
        remove(unfinished)


def steps(folder: Path, suffix: str = "") -> list[Path]:
    """The finished checkpoints, oldest first; suffix: those of a name that ends in it instead."""
    names = {path: path.name.removeprefix("step_").removesuffix(suffix) for path in folder.glob(f"step_*{suffix}")}
    return sorted((path for path, number in names.items() if number.isdecimal()), key=lambda path: int(names[path]))


def quarantine(checkpoints: list[Path]) -> None:
    """Rename damaged checkpoints, so that they count as none any more and can be looked into."""
    for checkpoint in checkpoints:
        aside = checkpoint.with_name(checkpoint.name + DAMAGED)
        remove(aside)
        checkpoint.rename(aside)


def read_index(checkpoint: Path, everyone: Axis | None = None) -> dict[str, Any]:
    """The index of a checkpoint whose files are whole; raises `Damaged` with the reason otherwise, and `CourseError` where they
    cannot be reached: nothing is known of them then.

    everyone: ranks that read it together. Each adds up the bytes of its share of the files, and all hear what any has found.
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
    """The index, and of every `size`-th of its files, from the `rank`-th on, whether it is what was written."""
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
        raise Damaged(f"{checkpoint} lacks {name}: restore it, or move {checkpoint} away")
    try:
        good = file.stat().st_size == size and sha256(file) == digest
    except OSError as error:
        raise unreachable(file, error) from error
    if not good:
        raise Damaged(f"{file} is damaged (its checksum does not match): restore it, or move {checkpoint} away")


def unreachable(file: Path, error: OSError) -> CourseError:
    """What to say of a file that may be good: a run that went on without it would go back to an older checkpoint."""
    return CourseError(f"{file} cannot be read ({error.strerror}), whether it is good or not: "
                       f"{os_error_cure(error, 'run again')}; to go on from an older checkpoint, move {file.parent} away")


def newest(folder: Path, say: Callable[[str], None], everyone: Axis | None = None,
           writes: bool = False) -> tuple[Path, dict[str, Any]] | None:
    """The newest undamaged checkpoint and its index, None if there is none; says which it passes over. All of `everyone` call it.

    writes: everyone writes the run, and nobody else: where there is a whole one, those passed over are renamed to NAME.damaged.

    Raises `CourseError` if there are checkpoints but all are damaged: starting afresh would overwrite the run.
    """
    # rank 0 lists them: another node may not see the newest yet
    found = run_on_all(everyone, lambda: steps(folder) if everyone.rank == 0 else [])[0] if everyone else steps(folder)
    passed = []
    for checkpoint in reversed(found):
        try:
            index = read_index(checkpoint, everyone)
        except Damaged as damage:
            say(f"passing over a checkpoint: {damage}")
            passed += [checkpoint] if not isinstance(damage, OtherFormat) else []
            continue
        if writes and everyone and passed:
            run_on_all(everyone, partial(quarantine, passed if everyone.rank == 0 else []))
            say(f"renamed: {', '.join(one.name + DAMAGED for one in passed)}; the newest of such stays")
        return checkpoint, index
    if found:
        raise CourseError(f"every checkpoint in {folder} is damaged: restore one, or start again under another log.name")
    return None


def load(checkpoint: Path, index: dict[str, Any], model: nn.Module, layout: Layout,
         optimizer: torch.optim.Optimizer | None = None, average: bool = False) -> None:
    """Fill the model's parameters, and the optimizer's states, each rank reading only its boxes.

    average: give the model the moving average of the weights instead of the last ones. An optimizer's average of which the
    checkpoint has none starts at the weights. Where its states are those of an `other_optimizer`, none is read.

    Raises `CourseError` if the checkpoint is of another model, or has no average, before anything is changed.
    """
    placements = layout.placements
    updates = optimizer_parameters(optimizer) if optimizer is not None else []
    parameters, kind = list(model.parameters()), ".ema" if average else ""
    fits(checkpoint, index, [placements[p] for p in parameters])
    if average and any(placements[p].name + kind not in index["tensors"] for p in parameters):
        raise CourseError(f"{checkpoint} has no moving average of the weights: train with optim.ema=0.9999, say, or use the last "
                          "weights (--no-ema)")

    def read(name: str, parameter: nn.Parameter) -> Tensor:
        """The part of a global tensor that belongs to what is here of a parameter."""
        return read_placed(checkpoint, index, name, placements[parameter]).view(parameter.shape)

    for parameter in dict.fromkeys([*parameters, *updates]):            # mostly the same
        parameter.data.copy_(read(placements[parameter].name + kind, parameter))
    for parameter, value in moving_average(optimizer).items():
        name = placements[parameter].name
        value.copy_(read(f"{name}.ema" if f"{name}.ema" in index["tensors"] else name, parameter))
    plain = {parameter for group in getattr(optimizer, "param_groups", ()) if not group.get("momentum", 1)
             for parameter in group["params"]}       # without momentum SGD would keep an old one for ever, and save it again
    for parameter in [] if other_optimizer(index, optimizer) else [p for p in updates if p not in plain]:
        for key, found in index["tensors"].items():
            stem, _, leaf = key.rpartition(".")
            if stem == placements[parameter].name and leaf != "ema" and optimizer is not None:
                # in the parameter's format, as PyTorch wants it; a count of steps stays as it is
                value = (read(key, parameter).to(parameter.dtype) if found["shape"]
                         else read_box(checkpoint, index, key, ()))
                optimizer.state[parameter][leaf] = value.to(parameter.device)


def nothing_over(checkpoint: Path, index: dict[str, Any], layout: Layout) -> None:
    """Raise `CourseError` if the checkpoint has a parameter that no stage has: one of a deeper model, say."""
    known = set[str]().union(*run_on_all(layout.mesh.pp, lambda: [where.name for where in layout.placements.values()]))
    for name in index["tensors"]:
        stem, _, leaf = name.rpartition(".")
        if name not in known and stem not in known and leaf != "amax_history":          # neither a parameter's nor its state
            raise CourseError(f"{checkpoint} is of another model: it has {name}, which is not here; use the model's own "
                              "settings, or another log.name")


def other_optimizer(index: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether a checkpoint's states are those of an optimizer of another kind, to which this one's first step is its first."""
    leaves = {name.rpartition(".")[2] for name in index["tensors"]}
    return any(leaf in leaves and not isinstance(optimizer, kind) for kind, leaf in KINDS.items())


def read_named(checkpoint: Path, index: dict[str, Any], names: Iterable[str]) -> dict[str, Tensor]:
    """Those of the named tensors that the checkpoint has, whole."""
    found = {name: index["tensors"][name]["shape"] for name in names if name in index["tensors"]}
    return {name: read_box(checkpoint, index, name, tuple((0, n) for n in shape)) for name, shape in found.items()}


def fits(checkpoint: Path, index: dict[str, Any], placements: list[Placement]) -> None:
    """Raise `CourseError` naming the first parameter that the checkpoint lacks or has in another shape."""
    for place in placements:
        found = index["tensors"].get(place.name)
        shape = None if found is None else tuple(found["shape"])
        if shape != place.global_shape:
            has = "does not have it" if shape is None else f"has it as {list(shape)}"
            raise CourseError(f"{checkpoint} is of another model: {place.name} is {list(place.global_shape)} here, "
                              f"but the checkpoint {has}; use the model's own settings, or another log.name")
