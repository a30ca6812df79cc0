"""`course reshard RUN parallel.tp=4 parallel.pp=2`: write a run's newest checkpoint again, for another layout.

Resharding is optional: any layout reads any checkpoint box by box. But if a thousand ranks each need a corner of every file, cut
it up once. Afterwards each rank of the new layout finds all its parts in one file.

This runs in one process, on any machine, for any number of ranks. PyTorch's fake process group lets it build each rank's model in
turn, without memory. The placements say which boxes (with ZeRO-1, which flat ranges of them) that rank owns. These are read and
written one at a time, so at most one tensor is in memory.
"""

import math
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from course import config
from course.checkpoint import checkpoint
from course.checkpoint.shards import Shard, read_placed, write_shards
from course.config import Config, schema, validation
from course.config.axes import AXES
from course.data import order
from course.data.text import end_tokens
from course.fp8 import native
from course.inference.forecast_scores import read_config
from course.models import build_model
from course.ops.number_formats import working_dtype
from course.parallel import Mesh, Placement, World, build_gradient_sync, build_mesh, parallelize
from course.training.trainer import run_folder
from course.utils.atomic_files import atomic
from course.utils.errors import CourseError

Index = dict[str, Any]


def main(run: Path, settings: Iterable[str], name: str, say: Callable[[str], None] = print) -> Path:
    """Write a new run, `name`, in the layout of `settings`, with the newest checkpoint of `run` and its metrics.

    Raises `CourseError` if there is no setting or one outside `parallel`, if the layout is impossible, if the run has no
    checkpoint, or if the new run exists already.
    """
    old = read_config(run)
    new = resettled(run, old, settings, name)
    newest = checkpoint.newest(run / "checkpoints", say)
    if newest is None:
        raise CourseError(f"{run} has no checkpoint yet: let it train to its first one")
    source, index = newest
    target, ranks = run_folder(new), ranks_of(new)
    if target.exists():
        owned(new, 0, ranks)                        # refuse an impossible layout before anyone removes a folder for it
        raise CourseError(f"{target} is there already: choose another --name, or move the folder away")
    with atomic(target) as temporary:
        final = reshard(source, index, new, temporary / "checkpoints")
        config.save(new, temporary / "config.yaml")
        if (run / "metrics.jsonl").is_file():
            shutil.copyfile(run / "metrics.jsonl", temporary / "metrics.jsonl")
        for beside in ("tokenizer.json", end_tokens.NOTE):
            if (run / beside).is_file():
                shutil.copyfile(run / beside, temporary / beside)
    say(f"wrote {target} with {final.name} for {ranks} rank{'s' * (ranks > 1)}; go on, there and in this "
        f"layout, with: {go_on(target, new, index['state']['step'])}")
    return target


def go_on(run: Path, settings: Config, step: int) -> str:
    """The command that continues a run in the layout of its own config.yaml. A finished run trains as long again."""
    ranks = ranks_of(settings)
    course = "course" if ranks == 1 else f"torchrun --standalone --nproc-per-node={ranks} -m course.cli"
    more = f" train.steps={2 * step}" if 0 < settings.train.steps <= step else ""
    p, share = settings.parallel, settings.train.global_batch // max(settings.parallel.dp, 1)
    if p.chunks > 1 and validation.micro_batches(settings) < p.pp <= share:
        more += f" train.micro_batch={share // p.pp}"               # interleaved: a round has one micro-batch for each rank
    return f"{course} train {shlex.quote(str(run / 'config.yaml'))}{more}"


def place_of(run: Path) -> tuple[str, str]:
    """(log.dir, preset) of a run's folder, which is log.dir/preset/log.name. A path too short to show both is resolved first."""
    whole = run if run.name != ".." and run.parent.name not in ("", "..") else run.resolve()
    return str(whole.parent.parent), whole.parent.name


def resettled(run: Path, old: Config, settings: Iterable[str], name: str) -> Config:
    """The run's configuration with another layout and another name."""
    validation.check_name("--name", name)
    changes = schema.parse(settings)
    if not changes:
        raise CourseError("course reshard was given no layout: name what changes, such as parallel.tp=2")
    if others := sorted(changes.keys() - {"parallel"}):
        raise CourseError(f"course reshard changes only the layout, not {', '.join(others)}: give keys such as parallel.tp=2, "
                          "and change the rest when you train")
    values = schema.merge(schema.as_plain(old), changes)
    folder, preset = place_of(run)
    values["log"] |= {"name": name, "dir": folder}
    new = validation.check(schema.build(Config, values | {"preset": preset}, f"the configuration of {run}"))
    order.my_slice(new.train.global_batch, max(new.parallel.dp, 1), 0)      # raises if dp does not divide the batch
    return new


def ranks_of(settings: Config) -> int:
    """The number of ranks of a layout. dp=0, the remaining ranks, counts as 1 here, where the total is unknown."""
    return math.prod(max(getattr(settings.parallel, name), 1) for name in AXES)


def reshard(source: Path, index: Index, settings: Config, folder: Path) -> Path:
    """Write the checkpoint again under `folder`, one file for each rank of the layout in `settings`."""
    final = folder / source.name
    size = ranks_of(settings)

    def write(rank: int) -> dict[str, Any]:
        pieces = list(pieces_of(index, settings, rank, size))
        return write_shards(checkpoint.temporary(final), rank, pieces,
                            (read_placed(source, index, piece.name, piece.where) for piece in pieces))

    entries = [write(rank) for rank in range(size)]
    checkpoint.publish(final, entries, index["state"], schema.as_plain(settings))
    return final


def pieces_of(index: Index, settings: Config, rank: int, size: int) -> Iterator[Shard]:
    """The pieces that a rank of the layout owns: its parameters and their states; on rank 0, also tensors of no parameter."""
    tensors: dict[str, Any] = index["tensors"]
    names = {name for name, _ in build_model(settings.model).named_parameters()}
    leaves: dict[str, list[str]] = {}
    for name in tensors:
        stem = name.rpartition(".")[0]
        leaves.setdefault(stem if stem in names else "", []).append(name)
    if rank == 0:
        yield from (whole(tensors, name) for name in leaves.get("", []) if name not in names)
    for where in owned(settings, rank, size):
        for name in [where.name, *leaves.get(where.name, [])]:
            if not tensors[name]["shape"] and where.global_shape:       # a step counter: every owner of a part has it
                yield whole(tensors, name)
                continue
            yield Shard(name, where, getattr(torch, tensors[name]["dtype"]))


def whole(tensors: dict[str, Any], name: str) -> Shard:
    """A tensor as one piece."""
    shape = tuple(tensors[name]["shape"])
    return Shard(name, Placement(name, shape, tuple((0, n) for n in shape)), getattr(torch, tensors[name]["dtype"]))


def owned(settings: Config, rank: int, size: int) -> list[Placement]:
    """The placements of the parameters that this rank of the layout will own. Nothing is computed or sent."""
    with pretended(rank, size):
        return owned_in(settings, build_mesh(replace(settings.parallel, dp=max(settings.parallel.dp, 1)),
                                             World(rank, size, torch.device("cpu"))))


def owned_in(settings: Config, mesh: Mesh) -> list[Placement]:
    """The placements of the parameters that this rank of a mesh owns. The model is built without memory."""
    model = build_model(settings.model)
    native.convert(model, settings, mesh)           # weights that are gathered in 8 bits have a flat tensor of their own
    layout = parallelize(model, mesh, settings.parallel)
    gradients = build_gradient_sync(model, layout, settings.parallel, working_dtype(settings.precision))
    return [where for p in gradients.optimizer_parameters if (where := layout.placements[p]).owner]


@contextmanager
def pretended(rank: int, size: int) -> Iterator[None]:
    """Pretend that this process is one rank of several: groups can be made, and collectives do nothing."""
    if size == 1:
        yield
        return
    if dist.is_initialized():
        raise CourseError("course reshard runs in one process: start it without torchrun or srun")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
