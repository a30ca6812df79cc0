"""Lesson 16: what two boxes share, a tensor of one layout from the pieces of another, another library's weights, and a crash.

All but `overlap` are the answers to exercises written inside a cell of the lesson.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from course.checkpoint import shards
from course.checkpoint.shards import overlap
from course.lab.checks import random_inputs, return_values, transcript
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn
from course.lab.instruments.crash_disk import CRASH_KINDS, Disk
from course.lab.sandbox.limits import Limits
from course.models.layers import Attention
from course.parallel.placement import Box, box_shape

QUICK = Limits(seconds=60)
Slices = tuple[slice, ...]


def put_together(pieces: list[tuple[Box, Callable[[Slices], Tensor]]], wanted: Box, dtype: torch.dtype) -> Tensor:
    """Assemble the box `wanted` of a tensor. Each piece is its box and `read(slices)`, which reads a part of the piece."""
    whole = torch.empty([stop - start for start, stop in wanted], dtype=dtype)
    for box, read in pieces:
        shared = overlap(wanted, box)
        if shared is not None:
            source, target = shared
            whole[target] = read(source)
    return whole


def to_ours(theirs: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Convert the other library's attention to ours; see the table."""
    def rows(x: Tensor) -> Tensor:                   # (heads · 3 · d, ...) -> (3 · heads · d, ...)
        return x.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)

    return {"qkv.weight": rows(theirs["query_key_value.weight"].T), "qkv.bias": rows(theirs["query_key_value.bias"]),
            "out.weight": theirs["dense.weight"].T, "out.bias": theirs["dense.bias"]}


def to_theirs(ours: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Convert our attention to the other library's: the inverse of `to_ours`."""
    def rows(x: Tensor) -> Tensor:                   # (3 · heads · d, ...) -> (heads · 3 · d, ...)
        return x.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)

    return {"query_key_value.weight": rows(ours["qkv.weight"]).T, "query_key_value.bias": rows(ours["qkv.bias"]),
            "dense.weight": ours["out.weight"].T, "dense.bias": ours["out.bias"]}


def publish(disk: Disk, name: str, files: dict[str, bytes], old: str) -> None:
    """Write the files of a checkpoint to the folder `name`, and remove the folder `old`, so that no crash loses both."""
    partial = f".{name}.partial"
    for file, data in files.items():
        disk.write(f"{partial}/{file}", data)
        disk.flush(f"{partial}/{file}")
    disk.flush(partial)
    disk.rename(partial, name)
    disk.flush("")
    disk.remove(old)


def draw_boxes(seed: int, hidden: bool) -> Tensors:
    """Pairs of boxes in three dims; among them some that touch, that hold one another, that share a part, and nothing."""
    generator = random_inputs.generator(seed)
    count, pairs = 40 if hidden else 16, []
    for number in range(count):
        sides = []
        for dim in range(3):
            a, c = torch.randint(0, 6, (2,), generator=generator).tolist()
            b, d = (start + int(torch.randint(1, 6, (1,), generator=generator)) for start in (a, c))
            if number % 4 == 1 and dim == number // 4 % 3:
                c, d = b, b + 2                      # begins where the other ends
            if number % 4 == 2:
                a, b, c, d = a + 1, b + 1, a, b + 2  # holds the other
            if number % 4 == 3:
                a, b, c, d = a, b + 1, b, b + 3      # begins in the other, and ends after it
            sides.append([a, b, c, d])
        pairs.append(sides)
    cuts = torch.randint(1, 7, (3,), generator=generator)
    return {"pairs": torch.tensor(pairs), "tensor": torch.randn(8, 8, 8, generator=generator), "cuts": cuts}


def slices_of(value: Any, who: str, dims: int) -> Slices:
    """The slices that somebody returned for a tensor of so many dims."""
    if not isinstance(value, tuple) or len(value) != dims or not all(isinstance(part, slice) for part in value):
        raise InvalidReturn(f"`{who}` returned {return_values.describe_value(value)} as slices; a tuple of {dims} slices is "
                            "wanted",
                                "make one slice(start, stop) for each dim, and a tuple of them")
    return value


def overlap_pair(value: Any) -> tuple[Any, Any] | None:
    """What `overlap` returned, or None."""
    return None if value is None else return_values.pair(value, "overlap", "(slices of the piece, slices of the wanted box)")


def run_box_overlap(inputs: Tensors) -> Tensors:
    """What the pairs share, by the slices, and two boxes without dims; a checkpoint in eight pieces read in other boxes."""
    found: dict[str, list[Tensor]] = {"nothing": [], "piece": [], "wanted": []}
    for sides in inputs["pairs"].tolist():
        wanted, piece = tuple((a, b) for a, b, _, _ in sides), tuple((c, d) for _, _, c, d in sides)
        shared = overlap_pair(shards.overlap(wanted, piece))
        found["nothing"].append(torch.tensor(float(shared is None)))
        for name, box, part in (("piece", piece, 0), ("wanted", wanted, 1)):
            grid = torch.zeros(box_shape(box))
            if shared is not None:
                grid[slices_of(shared[part], "overlap", 3)] = 1
            found[name].append((grid.flatten() * torch.arange(1.0, grid.numel() + 1)).sum())
    single = overlap_pair(shards.overlap((), ()))            # of one number, such as Adam's count of steps
    if single is not None:
        slices_of(single[0], "overlap", 0), slices_of(single[1], "overlap", 0)
    return {name: torch.stack(parts).double() for name, parts in found.items()} | {
        "single": torch.tensor(float(single is not None)), "read": read_in_boxes(inputs)}


def read_in_boxes(inputs: Tensors) -> Tensor:
    """A tensor that lies in a checkpoint in eight pieces, in two boxes."""
    whole, cuts = inputs["tensor"], inputs["cuts"].tolist()
    written, tensors = [], {}
    for corner in range(8):
        box = [[0, cut] if corner >> dim & 1 == 0 else [cut, 8] for dim, cut in enumerate(cuts)]
        tensors[str(corner)] = whole[tuple(slice(*side) for side in box)].contiguous()
        written.append({"file": "pieces.safetensors", "key": str(corner), "box": box, "flat": None})
    index = {"tensors": {"w": {"shape": [8, 8, 8], "dtype": "float32", "pieces": written}}}
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder, "pieces.safetensors"))
        try:
            parts = [shards.read_box(Path(folder), index, "w", box)
                     for box in (((0, 4), (0, 8), (3, 8)), ((4, 8), (2, 7), (0, 8)))]
        except (shards.Damaged, ValueError, IndexError):            # slices that fit no tensor
            return torch.zeros(1).double()
    return torch.cat([part.flatten() for part in parts]).double().nan_to_num(0, 0, 0)


def grids(inputs: Tensors) -> list[list[Box]]:
    """The drawn layouts of one tensor: rows and columns cut at the drawn places."""
    rows, columns = inputs["tensor"].shape
    found: list[list[Box]] = []
    for cut in inputs["cuts"].tolist():
        ends = [sorted({0, size, *(c for c in part if c < size)}) for size, part in ((rows, cut[:2]), (columns, cut[2:]))]
        found.append([((a, b), (c, d)) for a, b in zip(ends[0], ends[0][1:], strict=False)
                      for c, d in zip(ends[1], ends[1][1:], strict=False)])
    return found


def draw_layouts(seed: int, hidden: bool) -> Tensors:
    """A matrix and three layouts of it: whole rows, whole columns, and both cut; and a single number."""
    generator = random_inputs.generator(seed)
    rows, columns = (13, 17) if hidden else (9, 12)
    cuts = [[*(1 + torch.randperm(rows - 1, generator=generator)[:2]).tolist(),
             *(1 + torch.randperm(columns - 1, generator=generator)[:2]).tolist()] for _ in range(3)]
    cuts[0][2:], cuts[1][:2] = [columns, columns], [rows, rows]
    return {"tensor": torch.randn(rows, columns, generator=generator).double(), "cuts": torch.tensor(cuts),
            "single": torch.randn((), generator=generator)}


def checked_box(part: Any, box: Box, dtype: torch.dtype) -> Tensor:
    """The box that somebody put together, if it is a tensor of its shape and format."""
    told = f"`put_together` returned {return_values.describe_value(part)}"
    if not isinstance(part, Tensor):
        raise InvalidReturn(f"{told}; expected a tensor",
                                     return_values.choose_cure(part, "return the tensor that you put together"))
    if part.shape != box_shape(box):
        raise InvalidReturn(f"`put_together` returned a tensor of shape {tuple(part.shape)} for the box {box}; its shape is "
                            f"{box_shape(box)}", "a side from `start` to `stop` has stop - start numbers")
    if part.dtype != dtype:
        raise InvalidReturn(f"`put_together` returned a tensor of type {part.dtype} where dtype={dtype} was asked for",
                                "make the empty tensor with dtype=dtype")
    return part


def run_put_together(inputs: Tensors) -> Tensors:
    """Every layout's boxes from the pieces of every other; how many numbers were read for it; other formats; a single number."""
    whole, layouts = inputs["tensor"], grids(inputs)
    values: list[Tensor] = []
    read = 0

    def reader(part: Tensor) -> Callable[[Slices], Tensor]:
        def give(slices: Slices) -> Tensor:
            nonlocal read
            found = part[slices_of(slices, "put_together", part.dim())].clone()
            read += found.numel()
            return found

        return give

    def cut(tensor: Tensor, boxes: list[Box]) -> list[tuple[Box, Callable[[Slices], Tensor]]]:
        return [(box, reader(tensor[tuple(slice(*side) for side in box)])) for box in boxes]

    for old in layouts:
        for new in layouts:
            for box in reversed(new):
                values.append(checked_box(put_together(cut(whole, old), box, whole.dtype), box, whole.dtype).flatten())
    count = read
    kept = []
    for given in ((1e18 * whole).long() + 1, -whole.relu().bfloat16()):        # more digits than float64 has; zeros with a sign
        part = put_together(cut(given, layouts[2]), layouts[0][-1], given.dtype)
        kept.append(checked_box(part, layouts[0][-1], given.dtype).contiguous().flatten().view(torch.uint8))
    single = checked_box(put_together([((), reader(inputs["single"]))], (), torch.float32), (), torch.float32)
    return {"values": torch.cat(values).nan_to_num(0, 0, 0), "read": torch.tensor([float(count)]), "formats": torch.cat(kept),
            "single": torch.tensor(float(torch.equal(single, inputs["single"])))}


def draw_attention(seed: int, hidden: bool) -> Tensors:
    """An attention layer of the other library, tokens, and how many heads it has."""
    generator = random_inputs.generator(seed)
    heads, d = (6, 5) if hidden else [(4, 3), (5, 4), (2, 5)][random_inputs.number(seed) % 3]           # not 3: q, k, v are
    D = heads * d

    drawn = partial(random_inputs.normal, generator)
    return {"query_key_value.weight": drawn(D, 3 * D), "query_key_value.bias": drawn(3 * D), "dense.weight": drawn(D, D),
            "dense.bias": drawn(D), "x": drawn(2, 7, D), "heads": torch.tensor(heads),
            "seed": torch.tensor(random_inputs.number(seed))}


THEIRS = ("query_key_value.weight", "query_key_value.bias", "dense.weight", "dense.bias")
OURS = ("qkv.weight", "qkv.bias", "out.weight", "out.bias")


def checked_tensors(value: Any, who: str, names: tuple[str, ...], shapes: list[tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors by name that somebody returned."""
    if not isinstance(value, dict) or set(value) != set(names):
        told = f"the names {', '.join(map(str, value))}" if isinstance(value, dict) else return_values.describe_value(value)
        raise InvalidReturn(f"`{who}` returned {told}; expected a dict with {', '.join(names)}",
                                return_values.choose_cure(value, f"return a dict with {', '.join(names)}"))
    return {name: return_values.tensor(value[name], who, shape, torch.float64, f" as {name}")
            for name, shape in zip(names, shapes, strict=True)}


def same_tensors(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    """Whether both have the same tensors by the same names."""
    return set(some) == set(others) and all(torch.equal(some[name], others[name]) for name in some)


def run_translate(inputs: Tensors) -> Tensors:
    """Theirs as ours, what our attention computes with it, and ours as theirs."""
    heads, x = int(inputs["heads"]), inputs["x"]
    D = x.shape[-1]
    given = {name: inputs[name].clone() for name in THEIRS}
    ours = checked_tensors(to_ours(given, heads), "to_ours", OURS, [(3 * D, D), (3 * D,), (D, D), (D,)])
    kept = same_tensors(given, {name: inputs[name] for name in THEIRS})
    ours = {name: value.clone() for name, value in ours.items()}
    module = Attention(D, heads).double()
    module.load_state_dict(ours)
    # of tensors of ours that are not what `to_ours` made: its mistakes do not count here
    generator = random_inputs.generator(int(inputs["seed"]))
    mine = {name: torch.randn(value.shape, generator=generator, dtype=torch.float64) for name, value in ours.items()}
    given = {name: value.clone() for name, value in mine.items()}
    theirs = checked_tensors(to_theirs(given, heads), "to_theirs", THEIRS, [(D, 3 * D), (3 * D,), (D, D), (D,)])
    kept = kept and same_tensors(given, mine)
    return {"weights": torch.cat([ours[name].flatten() for name in ("qkv.weight", "out.weight")]),
            "biases": torch.cat([ours["qkv.bias"], ours["out.bias"]]),
            "output": module(x).detach(), "back": torch.cat([theirs[name].flatten() for name in THEIRS]),
            "kept": torch.tensor(float(kept))}


class RecordingDisk(Disk):
    """A disk that writes down what a program does to it: [what, path, ...], of bytes which of the given files' they are."""

    def __init__(self, files: dict[str, bytes]):
        super().__init__()
        self.known, self.noted = list(files.values()), list[list[Any]]()

    def write(self, path: str, data: bytes) -> None:
        super().write(path, data)
        self.noted.append(["write", path, self.known.index(data) if data in self.known else -1])

    def flush(self, path: str = "") -> None:
        super().flush(path)
        self.noted.append(["flush", path])

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self.noted.append(["rename", old, new])

    def remove(self, path: str) -> None:
        super().remove(path)
        self.noted.append(["remove", path])


MOST = 300                                           # operations that are played through


def draw_files(seed: int, hidden: bool) -> Tensors:
    """The steps of an old checkpoint and a new one, and the bytes of their files, one row each; how many of them are a file's."""
    generator = random_inputs.generator(seed)
    files = 5 if hidden else 3
    steps = torch.randint(100, 500_000, (2,), generator=generator).cumsum(0)
    return {"steps": steps, "lengths": torch.randint(10, 200, (files,), generator=generator),
            "bytes": torch.randint(256, (2, files, 200), generator=generator, dtype=torch.uint8)}


def checkpoints(inputs: Tensors) -> list[tuple[str, dict[str, bytes]]]:
    """The old checkpoint and the new one: the folder's name, and the files by theirs."""
    return [(f"step_{step:06d}", {f"rank{i:05d}.safetensors": bytes(data[:length].tolist())
                                  for i, (data, length) in enumerate(zip(rows, inputs["lengths"].tolist(), strict=True))})
            for step, rows in zip(inputs["steps"].tolist(), inputs["bytes"], strict=True)]


def with_old(disk: Disk, inputs: Tensors) -> None:
    """Put the old checkpoint on a disk, safe from any crash."""
    old, files = checkpoints(inputs)[0]
    for file, data in files.items():
        disk.write(f"{old}/{file}", data)
        disk.flush(f"{old}/{file}")
    disk.flush(old)
    disk.flush("")
    disk.crashes.clear()


def run_publish(inputs: Tensors) -> Tensors:
    """Publish a checkpoint beside an older one; what was done to the disk."""
    (old, _), (new, files) = checkpoints(inputs)
    disk = RecordingDisk(files)
    with_old(disk, inputs)
    disk.noted.clear()
    publish(disk, new, dict(files), old)
    return {"noted": transcript.pack(disk.noted[:MOST])}


def weigh_publish(inputs: Tensors, noted: Tensors) -> Tensors:
    """Do to a disk what was noted, and look at what a crash leaves of it after every operation."""
    (old, past), (new, files) = checkpoints(inputs)
    contents, disk = [*files.values()], Disk()
    with_old(disk, inputs)
    for what, path, *more in transcript.unpack(noted["noted"])[:MOST]:
        match what, more:
            case "write", [int(number)]:
                disk.write(path, contents[number] if 0 <= number < len(contents) else b"other bytes")
            case "flush", []:
                disk.flush(path)
            case "rename", [str(name)]:
                disk.rename(path, name)
            case "remove", []:
                disk.remove(path)
            case _:
                raise ValueError("this is nothing that a disk does")
    before, after = ({f"{name}/{file}": data for file, data in made.items()} for name, made in ((old, past), (new, files)))

    def has(found: dict[str, bytes], files: dict[str, bytes]) -> bool:
        return all(found.get(path) == data for path, data in files.items())

    moments = disk.crashes or [disk.files()] * len(CRASH_KINDS)
    ours = [{path: data for path, data in found.items() if path.startswith(f"{new}/")} for found in moments]
    half = [bool(found) and found != after for found in ours]
    none = [not has(found, before) and not has(found, after) for found in moments]
    wrong = sum(found.get(path) != data for found, bad in zip(ours, half, strict=True) for path, data in after.items() if bad)
    kinds = range(len(CRASH_KINDS))                        # how often in each of the extremes, so that mistakes can be told apart
    return {"half": torch.tensor([float(sum(half[kind::len(CRASH_KINDS)])) for kind in kinds] + [float(wrong)]),
            "none": torch.tensor([float(sum(none[kind::len(CRASH_KINDS)])) for kind in kinds]),
            "lasting": torch.tensor([transcript.digest(*sorted(ours[-len(CRASH_KINDS)].items()))], dtype=torch.float64),
            "tidy": torch.tensor([transcript.digest(*sorted(disk.files().items()))], dtype=torch.float64)}


EXERCISES = [
    Exercise("box-overlap", "16", ("course.checkpoint.shards.overlap",), draw_boxes, run_box_overlap, {
        "nothing": "it returns None exactly where two boxes share nothing",
        "piece": "the first slices index the piece",
        "wanted": "the second slices index the wanted box",
        "single": "two boxes without dims share their single number",
        "read": "the library assembles boxes of a checkpoint with it"}, flags={
        "single": "it returns None",
        "read": "what it read is not what was saved"}, limits=QUICK),
    Exercise("put-together", "16", (f"{__name__}.put_together",), draw_layouts, run_put_together, {
        "values": "it assembles every box of three layouts from the pieces of each of them",
        "read": "it reads each wanted number once, and no others",
        "formats": "integers and bfloat16 keep every bit",
        "single": "so does a single number with the box (), such as Adam's step count"},
        flags={"single": "it returned another number"}, limits=QUICK, points=2, tolerance=0.0),
    Exercise("translate", "16", (f"{__name__}.to_ours", f"{__name__}.to_theirs"), draw_attention, run_translate, {
        "weights": "to_ours: the two weights are right",
        "biases": "to_ours: the two biases are right",
        "output": "with them our attention computes what theirs does",
        "back": "to_theirs: weights and biases are right",
        "kept": "it does not change the tensors that it is given"}, flags={
        "kept": "some were overwritten or transposed"}, limits=QUICK, points=3),
    Exercise("publish", "16", (f"{__name__}.publish",), draw_files, run_publish, weigh=weigh_publish, claims={
        "half": "no crash leaves an incomplete checkpoint under the new name",
        "none": "every crash leaves a whole checkpoint, the old one or the new one",
        "lasting": "once it has returned, no crash can lose the new checkpoint",
        "tidy": "only the new checkpoint is left"}, flags={
        "half": "the power failed, and some of its files were missing or incomplete",
        "none": "the power failed, and neither was there whole",
        "lasting": "its name was not safe yet", "tidy": "there are other files, or some of its own are missing"},
        limits=QUICK, points=2),
]
