"""Layout-independent checkpoints: any parallel layout can read what another one wrote.

    checkpoints/step_000128/
        index.json               where each tensor is, the run's state and config, checksums of every file and of itself
        rank00000.safetensors    the pieces that rank 0 owned

`index.json` maps each serial parameter name (and `name.exp_avg` and so on for optimizer states) to its global shape, dtype and
pieces. A piece is a box of the global tensor in one file; in a ZeRO-1 run it may be a flat range of such a box. A reader in any
layout takes the box that it needs from the pieces. Nothing is pickled: reading a checkpoint executes nothing. A folder gets its
final name only when all of it is on the disk.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from course.checkpoint.index import FORMAT, OtherFormat, format_of, read_index, write_index
from course.checkpoint.shards import (
    Damaged,
    Misplaced,
    Shard,
    read_box,
    read_placed,
    write_shards,
)
from course.ops.ema import moving_average
from course.ops.muon import Muon
from course.ops.storage import has_memory
from course.parallel.agree import run_on_all
from course.parallel.layout import Layout
from course.parallel.mesh import Axis
from course.parallel.placement import Placement, Placements
from course.utils.atomic_files import flush, free_bytes, remove
from course.utils.errors import CourseError

DAMAGED = ".damaged"                                 # suffix of a checkpoint that a resume skipped

# a state by which each kind of optimizer is known; Muon comes before Adam, whose states it has, too
KINDS: dict[type, str] = {Muon: "momentum", torch.optim.Adam: "exp_avg", torch.optim.SGD: "momentum_buffer"}


class NotSaved(CourseError):
    """A checkpoint could not be written; earlier ones are intact."""


def save(folder: Path, optimizer: torch.optim.Optimizer, state: dict[str, Any], config: dict[str, Any], layout: Layout,
         more: Mapping[str, Tensor] | None = None) -> Path:
    """Write the optimizer's parameters and states to `folder/step_N`, where N is state["step"].

    Every rank calls it and writes the pieces that it owns. more: tensors by name, whole and the same on every rank.

    Raises `NotSaved` on every rank if any rank cannot write, `Misplaced` if the ranks' pieces do not hold every tensor exactly
    once. Then nothing of this checkpoint stays, and earlier ones are untouched.
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
    except CourseError as error:                     # raised on all ranks: none of them is still writing
        room = run_on_all(everyone, lambda: make_room(final) if everyone.rank == 0 else None)[0]
        if isinstance(error, Misplaced):
            raise Misplaced(f"{final} was not written: {error}") from error
        raise NotSaved(f"{final} was not written. It takes {sum(sizes) / 1e6:.1f} MB, and {room / 1e6:.1f} MB are free in "
                       f"{folder} without it. {error}") from error
    return final


def make_room(final: Path) -> int:
    """Remove the remains of an interrupted write; return the number of free bytes."""
    remove(temporary(final))
    return free_bytes(final)


def temporary(final: Path) -> Path:
    """The folder in which a checkpoint is written before it gets its final name."""
    return final.with_name(f".{final.name}.partial")


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that an optimizer updates, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parameter_states(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """A parameter's optimizer states and its moving average."""
    average = moving_average(optimizer)
    return dict(optimizer.state.get(parameter, {})) | ({"ema": average[parameter]} if average else {})


def owned_tensors(optimizer: torch.optim.Optimizer, placements: Placements) -> Iterator[tuple[str, Tensor, Placement]]:
    """(name, local tensor, the parameter's placement) of each parameter and optimizer state that this rank owns."""
    for parameter in optimizer_parameters(optimizer):
        where = placements[parameter]
        if where.owner:
            yield where.name, parameter.data, where
            for key, value in parameter_states(optimizer, parameter).items():
                if torch.is_tensor(value):
                    yield f"{where.name}.{key}", value, where if value.ndim else Placement(where.name, (), ())


def whole_tensors(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Placement]]:
    """The same for tensors that are not parameters: each is placed whole."""
    for name, tensor in tensors.items():
        yield name, tensor, Placement(name, tuple(tensor.shape), tuple((0, n) for n in tensor.shape))


def publish(final: Path, entries: list[dict[str, Any]], state: dict[str, Any], config: dict[str, Any]) -> None:
    """Write the index from the ranks' entries, and rename the folder. Raises `Misplaced` if a tensor has a gap or an overlap."""
    write_index(temporary(final), entries, state, config)
    clear(final)                                     # the same step again: after a resume from an older one
    temporary(final).rename(final)
    flush(final.parent)
    flush(final.parent.parent)                       # in which the folder of checkpoints may be new


def clear(final: Path) -> None:
    """Free the name of a new checkpoint: remove an old one of this version, rename one of another, which nobody here can read."""
    if (kept := format_of(final)) == FORMAT:
        remove(final)
    elif final.exists():
        final.rename(final.with_name(f"{final.name}.format_{kept}"))


def prune(folder: Path, keep: int, saved: Path | None = None) -> None:
    """Remove all checkpoints but the newest `keep` (0: keep all), all damaged ones but the newest, and unfinished writes.

    Checkpoints of another version stay, and do not count. saved: the one just written; newer ones stay, too.
    """
    found = [one for one in steps(folder) if one == saved or format_of(one) == FORMAT]
    for old in (found[:found.index(saved) + 1] if saved in found else found)[:-keep or 0]:
        remove(temporary(old))
        old.rename(temporary(old))                   # removed below: if killed there, no half-removed one has this name
    for old in steps(folder, DAMAGED)[:-1]:
        remove(old)
    for unfinished in folder.glob(".step_*.partial"):
        remove(unfinished)


def steps(folder: Path, suffix: str = "") -> list[Path]:
    """The finished checkpoints, oldest first; with a suffix, those whose name ends in it instead."""
    names = {path: path.name.removeprefix("step_").removesuffix(suffix) for path in folder.glob(f"step_*{suffix}")}
    return sorted((path for path, number in names.items() if number.isdecimal()), key=lambda path: int(names[path]))


def quarantine(checkpoints: list[Path]) -> None:
    """Rename damaged checkpoints: they no longer count, but can still be inspected."""
    for checkpoint in checkpoints:
        aside = checkpoint.with_name(checkpoint.name + DAMAGED)
        remove(aside)
        checkpoint.rename(aside)


def newest(folder: Path, say: Callable[[str], None], everyone: Axis | None = None,
           writes: bool = False) -> tuple[Path, dict[str, Any]] | None:
    """The newest undamaged checkpoint and its index, or None; reports each one that it skips. All of `everyone` call it.

    writes: `everyone` writes this run, and nobody else does. If there is an intact checkpoint, the damaged ones skipped are
    renamed to NAME.damaged.

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
    """Fill the model's parameters and the optimizer's states; each rank reads only its boxes.

    average: load the moving average of the weights in place of the last weights. If the optimizer keeps an average and the
    checkpoint has none, it starts at the weights. States of another kind of optimizer (`other_optimizer`) are not read.

    Raises `CourseError`, before anything is changed, if the checkpoint is of another model or has no average.
    """
    placements = layout.placements
    updates = optimizer_parameters(optimizer) if optimizer is not None else []
    parameters, kind = list(model.parameters()), ".ema" if average else ""
    fits(checkpoint, index, [placements[p] for p in parameters])
    if average and any(placements[p].name + kind not in index["tensors"] for p in parameters):
        raise CourseError(f"{checkpoint} has no moving average of the weights: train with optim.ema=0.9999, or use the last "
                          "weights (--no-ema)")

    def read(name: str, parameter: nn.Parameter) -> Tensor:
        """The local part of a global tensor, in the parameter's shape."""
        return read_placed(checkpoint, index, name, placements[parameter]).view(parameter.shape)

    for parameter in dict.fromkeys([*parameters, *updates]):            # the two mostly overlap
        if has_memory(parameter):                   # else its shares are among `updates`
            parameter.data.copy_(read(placements[parameter].name + kind, parameter))
    for parameter, value in moving_average(optimizer).items():
        name = placements[parameter].name
        value.copy_(read(f"{name}.ema" if f"{name}.ema" in index["tensors"] else name, parameter))
    plain = {parameter for group in getattr(optimizer, "param_groups", ()) if not group.get("momentum", 1)
             for parameter in group["params"]}       # SGD without momentum would keep an old buffer forever, and save it again
    for parameter in [] if other_optimizer(index, optimizer) else [p for p in updates if p not in plain]:
        for key, found in index["tensors"].items():
            stem, _, leaf = key.rpartition(".")
            if stem == placements[parameter].name and leaf != "ema" and optimizer is not None:
                # in the parameter's dtype, as PyTorch expects; a step counter keeps its own
                value = (read(key, parameter).to(parameter.dtype) if found["shape"]
                         else read_box(checkpoint, index, key, ()))
                optimizer.state[parameter][leaf] = value.to(parameter.device)


def nothing_over(checkpoint: Path, index: dict[str, Any], layout: Layout) -> None:
    """Raise `CourseError` if the checkpoint has a parameter that no pipeline stage has, such as one of a deeper model."""
    known = set[str]().union(*run_on_all(layout.mesh.pp, lambda: [where.name for where in layout.placements.values()]))
    for name in index["tensors"]:
        stem, _, leaf = name.rpartition(".")
        if name not in known and stem not in known and leaf != "amax_history":          # neither a parameter nor its state
            raise CourseError(f"{checkpoint} belongs to another model: it has {name}, which this model lacks; use the model's "
                              "own settings, or another log.name")


def other_optimizer(index: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether the checkpoint's states are of another kind of optimizer. Then this optimizer starts without states."""
    leaves = {name.rpartition(".")[2] for name in index["tensors"]}
    saved_by = next((kind for kind, leaf in KINDS.items() if leaf in leaves), None)
    return saved_by is not None and not isinstance(optimizer, saved_by)


def read_named(checkpoint: Path, index: dict[str, Any], names: Iterable[str]) -> dict[str, Tensor]:
    """The named tensors that the checkpoint has, each one whole."""
    found = {name: index["tensors"][name]["shape"] for name in names if name in index["tensors"]}
    return {name: read_box(checkpoint, index, name, tuple((0, n) for n in shape)) for name, shape in found.items()}


def fits(checkpoint: Path, index: dict[str, Any], placements: list[Placement]) -> None:
    """Raise `CourseError` naming the first parameter that the checkpoint lacks or has in another shape."""
    for place in placements:
        found = index["tensors"].get(place.name)
        shape = None if found is None else tuple(found["shape"])
        if shape != place.global_shape:
            has = "does not have it" if shape is None else f"has it as {list(shape)}"
            raise CourseError(f"{checkpoint} belongs to another model: {place.name} is {list(place.global_shape)} here, "
                              f"but the checkpoint {has}; use the model's own settings, or another log.name")
