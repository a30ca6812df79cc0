"""Folders of named tensors as other libraries write them: one file, or several and an index that says what is where.

    model.safetensors     or  model.safetensors.index.json    and its files
    pytorch_model.bin     or  pytorch_model.bin.index.json    and its files, read with weights only: nothing in them executes

or one file of any name: .safetensors, or .pt, .pth and .bin. Of a training checkpoint of the latter kind, with several sets of
weights, the moving average counts. What it has beside them, such as an argparse.Namespace, is what it says of its model. One
tensor is in memory at a time: a file of PyTorch's is mapped, not read. What DistributedDataParallel, torch.compile and their like
put before names (`module.`, `_orig_mod.`) is taken off.
"""

import argparse
import json
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from course.checkpoint.safetensors_writer import stream
from course.config import schema, validation
from course.models import KINDS
from course.utils.atomic_files import atomic, os_error_cure, read_text
from course.utils.errors import CourseError

MODEL = "course.model"                               # under which our model's configuration stands in the header of a file
FILES = ("model.safetensors", "pytorch_model.bin")   # the first that is there counts
SHARD = 4 * 2**30                                    # bytes of tensors in a file that is written
# where training scripts keep a model's weights in a checkpoint, the moving average first
SETS = ("ema", "ema_state_dict", "state_dict_ema", "model_ema", "ema_model", "model", "state_dict", "model_state_dict", "module")
# parts of a name that wrappers add, wherever they stand: DistributedDataParallel, torch.compile, FSDP, checkpointing, Fabric
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
# by which a model is found whatever stands before: DiT's first layer, GPT-2's and Llama's, whole and bare, and ours
FIRST = ("x_embedder.proj.weight", "transformer.wte.weight", "wte.weight", "model.embed_tokens.weight", "embed_tokens.weight",
         "embed.token.weight", "embed.proj.weight")


class Weights(Mapping[str, Tensor]):
    """The tensors of a folder, or of a file, by name, read when they are asked for.

    Raises `CourseError` where there is none, or a file is missing or damaged.
    """

    def __init__(self, path: Path):
        self.folder, self.of_folder = path.parent if path.is_file() else path, path.is_dir()
        self.pickled: dict[str, tuple[Mapping[str, Tensor], dict[str, Any]]] = {}
        files = dict.fromkeys(self._names(path), path.name) if path.is_file() else find(path, self._names)
        self.there = unwrapped(files, path)          # name -> that in the file
        self.where = {name: files[there] for name, there in self.there.items()}

    def __getitem__(self, name: str) -> Tensor:
        file, there = self.folder / self.where[name], self.there[name]
        if file.suffix == ".safetensors":
            with opened(file) as tensors:
                return tensors.get_tensor(there)
        if there not in self._pickled(file):
            raise CourseError(f"{file} lacks {there}, which its index says it has: download both again")
        tensor = self._pickled(file)[there]
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
            raise CourseError(f"{file} has {name} as numbers that are not laid out one after another (sparse, quantized, nested "
                              "or left out): save plain tensors there")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.where)

    def __len__(self) -> int:
        return len(self.where)

    def _names(self, file: Path) -> list[str]:
        if file.suffix != ".safetensors":
            return list(self._pickled(file))
        with opened(file) as tensors:
            return list(tensors.keys())

    def _pickled(self, file: Path) -> Mapping[str, Tensor]:
        if file.name not in self.pickled:
            self.pickled[file.name] = read_pickled(file)
        return self.pickled[file.name][0]

    def says(self) -> dict[str, Any]:
        """What stands beside the tensors, by the last part of its name: a checkpoint's arguments, the words of a safetensors
        header, a config.json in the folder. Of what stands there twice the outermost counts."""
        beside = self.folder / "config.json"
        config = read_json(beside) if beside.is_file() and self.of_folder else {}
        return leaves({name: from_json(text) for name, text in self.about().items() if name != MODEL}) | leaves(config) | {
            name: value for _, says in self.pickled.values() for name, value in says.items()}

    def about(self) -> dict[str, str]:
        """The words in the header of the first file, if it is a safetensors file."""
        file = self.folder / next(iter(self.where.values()), "")
        if file.suffix != ".safetensors":
            return {}
        with opened(file) as tensors:
            return tensors.metadata() or {}


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file to read from; `CourseError` if it is damaged, or lacks what is wanted of it."""
    try:
        with safe_open(file, "pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise damaged(file, error) from error


def about(c: Any) -> dict[str, str]:
    """What stands in the header of every file that is written: `transformers` wants the first, the second is ours."""
    return {"format": "pt", MODEL: json.dumps(schema.as_plain(c))}


def model_in(path: Path, header: Mapping[str, str]) -> Any:
    """The model's configuration, if this library wrote the file; else None. `CourseError` for one that is none."""
    if MODEL not in header:
        return None
    try:
        values = json.loads(header[MODEL])
        kind = KINDS[values["kind"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CourseError(f"the header of {path} has a {MODEL} that is no model's configuration: write the file again") from error
    c: Any = schema.build(kind, values, f"the header of {path}")
    validation.check_model(c)
    return c


def unwrapped(names: Iterable[str], path: Path) -> dict[str, str]:
    """Names without what wrappers and training scripts put before them -> as they stand in the file.

    Raises `CourseError` where several models are there, which differ in that alone.
    """
    plain = {there: ".".join(part for part in there.split(".") if part not in WRAPPERS) for there in names}
    plain = {there: name for there, name in plain.items() if name != "n_averaged"}      # AveragedModel's counter
    whole = set(plain.values())
    for first in FIRST:
        before = sorted({name.removesuffix(first) for name in whole if name == first or name.endswith(f".{first}")})
        if len(before) > 1:
            raise CourseError(f"{path} has several models, whose names begin with {' and '.join(map(repr, before))}: save the "
                              "state_dict of one of them alone")
        if before:
            plain = {there: name.removeprefix(before[0]) for there, name in plain.items()}
            break
    originals = {name: there for there, name in plain.items()}
    if len(originals) < len(plain):
        twice = next(there for there, name in plain.items() if originals[name] != there)
        raise CourseError(f"{path} has {twice} and {originals[plain[twice]]}, which are one name without what wrappers add: save "
                          "the state_dict of one model alone")
    return originals


def leaves(found: Any) -> dict[str, Any]:
    """The plain values in nested names and values, by the last part of their names; of several of one name the outermost's."""
    level, values = [found], dict[str, Any]()
    while level:
        inner = []
        for one in level:
            for name, value in (vars(one) if isinstance(one, argparse.Namespace) else one).items():
                if isinstance(value, Mapping | argparse.Namespace):
                    inner.append(value)
                elif isinstance(name, str) and (value is None or isinstance(value, bool | int | float | str)):
                    values.setdefault(name, value)
        level = inner
    return values


def read_pickled(file: Path) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """The tensors of a file of PyTorch's, mapped into memory, and what else it says. Nothing in it is executed.

    Of classes it may name argparse.Namespace, which training scripts keep their arguments in: it is a dict with dots, and making
    one runs nothing.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            values = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:                      # weights_only raises what the bytes suggest, RuntimeError to KeyError
        raise more_than_tensors(file, error) or damaged(file, error) from error
    if not isinstance(values, Mapping):
        raise CourseError(f"{file} holds a {type(values).__name__}, not tensors by name: save a model's state_dict there")
    says: dict[str, Any] = {}
    while inner := next((values[part] for part in SETS if has_tensors(values.get(part))), None):
        # an optimizer's groups are lists, and its states have numbers for names: neither looks like an argument
        says |= {key: value for key, value in leaves({k: v for k, v in values.items() if k not in SETS}).items()
                 if key not in says}
        values = inner
    return {name: x for name, x in values.items() if isinstance(name, str) and isinstance(x, Tensor)}, says


def from_json(text: str) -> Any:
    """What a word of a header holds, such as a number; the text itself if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def has_tensors(found: Any) -> bool:
    """Whether names and values hold tensors, perhaps further in."""
    return isinstance(found, Mapping) and any(isinstance(x, Tensor) or has_tensors(x) for x in found.values())


def find(folder: Path, names: Any) -> dict[str, str]:
    """The file of each tensor. names: what gives the names in a file. `CourseError` where a file is missing."""
    for file in FILES:
        if (folder / file).is_file():
            return dict.fromkeys(names(folder / file), file)
        if (folder / f"{file}.index.json").is_file():
            where = read_json(folder / f"{file}.index.json").get("weight_map")
            if not isinstance(where, dict) or not all(isinstance(part, str) for part in where.values()):
                raise CourseError(f"{folder / file}.index.json has no weight_map, which says what is where: download it again")
            for part in sorted(set(where.values())):
                if Path(part).name != part or not (folder / part).is_file():
                    raise CourseError(f"{folder} lacks {part}, which its index names: download that file too")
            return where
    raise CourseError(f"{folder} has neither {' nor '.join(FILES)}, nor an index of several: give the folder of a model")


def read_json(file: Path) -> dict[str, Any]:
    """An object from a JSON file; `CourseError` if it holds none."""
    try:
        values = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        cure = os_error_cure(error, "download that file again")
        raise CourseError(f"{file} is missing or no JSON: give a model's folder, or {cure}") from error
    if not isinstance(values, dict):
        raise CourseError(f"{file} holds a {type(values).__name__}, not names and values: download it again")
    return values


def damaged(file: Path, error: Exception) -> CourseError:
    """The sentence for a file that cannot be read."""
    if file.suffix == ".json":
        return CourseError(f"{file} has no weights: give the folder that it is in, which has them beside it")
    kind = "safetensors file" if file.suffix == ".safetensors" else "file of PyTorch's since 1.6"
    return CourseError(f"{file} cannot be read ({type(error).__name__}): it is damaged, or no {kind}; download it again, or save "
                       "a state_dict of tensors alone there")


def more_than_tensors(file: Path, error: Exception) -> CourseError | None:
    """The sentence for a whole file that would execute something when it is unpickled; none for one that is not whole."""
    if not isinstance(error, pickle.UnpicklingError):
        return None
    named_class = re.search(r"GLOBAL ([\w.]+)", str(error))
    named = f" (it names {named_class[1]})" if named_class else ""
    return CourseError(f"{file} holds more than tensors, which is never unpickled, since that could execute anything{named}: "
                       "where you trust the file, save its tensors alone, as a state_dict")


class Entry(NamedTuple):
    """A tensor that will be written."""

    name: str                                        # there
    dtype: torch.dtype
    shape: tuple[int, ...]
    ours: str                                        # of which of our tensors it is made
    number: int                                      # which of those that are made of it


def divide(entries: Iterable[Entry], shard: int = SHARD) -> dict[str, list[Entry]]:
    """Files of up to `shard` bytes, by name as others name them: model.safetensors, or model-00001-of-00003.safetensors."""
    parts: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        bytes_ = entry.dtype.itemsize * torch.Size(entry.shape).numel()
        if parts[-1] and size + bytes_ > shard:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += bytes_
    if len(parts) == 1:
        return {FILES[0]: parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def write_file(file: Path, entries: list[Entry], make: Callable[[str], Sequence[Tensor]], about: Mapping[str, str]) -> None:
    """Write a file, one tensor after another. make: the name of one of ours -> the tensors that are made of it."""
    def tensors() -> Iterator[Tensor]:
        for ours, group in groupby(entries, key=lambda entry: entry.ours):
            made = make(ours)
            yield from (made[entry.number] for entry in group)

    with atomic(file) as temporary:
        stream(temporary, [(entry.name, entry.dtype, entry.shape) for entry in entries], tensors(), about)


def index_of(files: Mapping[str, Sequence[Entry]]) -> dict[str, Any]:
    """What stands beside several files: which tensor is in which."""
    total = sum(e.dtype.itemsize * torch.Size(e.shape).numel() for part in files.values() for e in part)
    return {"metadata": {"total_size": total}, "weight_map": {e.name: file for file, part in files.items() for e in part}}
