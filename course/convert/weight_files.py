"""Named tensors in files as other libraries write them: one file, or several and an index that says what is where.

    model.safetensors     or  model.safetensors.index.json    and its files
    pytorch_model.bin     or  pytorch_model.bin.index.json    and its files, read with weights only: nothing in them executes

or one file of any name: .safetensors, or .pt, .pth and .bin. If a pickled training checkpoint has several sets of weights, the
moving average counts. Its other contents, such as an argparse.Namespace, describe the model. One tensor is in memory at a time: a
PyTorch file is mapped, not read. Prefixes that DistributedDataParallel, torch.compile and the like add to names (`module.`,
`_orig_mod.`) are removed.
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

MODEL = "course.model"                               # the key of a file's header for our model's configuration
FILES = ("model.safetensors", "pytorch_model.bin")   # the first that exists counts
SHARD = 4 * 2**30                                    # bytes of tensors in a written file, at most
# where training scripts keep a model's weights in a checkpoint, the moving average first
SETS = ("ema", "ema_state_dict", "state_dict_ema", "model_ema", "ema_model", "model", "state_dict", "model_state_dict", "module")
# parts that wrappers add anywhere in a name: DistributedDataParallel, torch.compile, FSDP, checkpointing, Fabric
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
# the first layers of DiT, GPT-2 and Llama (with and without their prefix), and ours: they show any other prefix of a model
FIRST = ("x_embedder.proj.weight", "transformer.wte.weight", "wte.weight", "model.embed_tokens.weight", "embed_tokens.weight",
         "embed.token.weight", "embed.proj.weight")


class Weights(Mapping[str, Tensor]):
    """The tensors of a folder, or of a file, by name, each read when asked for.

    Raises `CourseError` if there are none, or a file is missing or damaged.
    """

    def __init__(self, path: Path):
        self.folder, self.of_folder = path.parent if path.is_file() else path, path.is_dir()
        self.pickled: dict[str, tuple[Mapping[str, Tensor], dict[str, Any]]] = {}
        files = dict.fromkeys(self._names(path), path.name) if path.is_file() else find(path, self._names)
        self.there = unwrapped(files, path)          # name -> name in the file
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
        """The plain values beside the tensors, by the last part of their names: a checkpoint's arguments, a safetensors header,
        the folder's config.json. Of equal names the outermost value counts."""
        beside = self.folder / "config.json"
        config = read_json(beside) if beside.is_file() and self.of_folder else {}
        return leaves({name: from_json(text) for name, text in self.about().items() if name != MODEL}) | leaves(config) | {
            name: value for _, says in self.pickled.values() for name, value in says.items()}

    def about(self) -> dict[str, str]:
        """The metadata in the header of the first file, if it is a safetensors file."""
        file = self.folder / next(iter(self.where.values()), "")
        if file.suffix != ".safetensors":
            return {}
        with opened(file) as tensors:
            return tensors.metadata() or {}


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file for reading. Raises `CourseError` if it is damaged, or lacks a tensor that is read."""
    try:
        with safe_open(file, "pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise damaged(file, error) from error


def about(c: Any) -> dict[str, str]:
    """The header of every file that we write: `transformers` needs the first entry, the second is ours."""
    return {"format": "pt", MODEL: json.dumps(schema.as_plain(c))}


def model_in(path: Path, header: Mapping[str, str]) -> Any:
    """The model's configuration if this library wrote the file, else None. Raises `CourseError` if it is invalid."""
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
    """Names without the prefixes of wrappers and training scripts -> names in the file.

    Raises `CourseError` if the file has several models, which differ only in these prefixes.
    """
    plain = {there: ".".join(part for part in there.split(".") if part not in WRAPPERS) for there in names}
    plain = {there: name for there, name in plain.items() if name != "n_averaged"}      # AveragedModel's counter
    whole = set(plain.values())
    for first in FIRST:
        before = sorted({name.removesuffix(first) for name in whole if name == first or name.endswith(f".{first}")})
        if len(before) > 1:
            raise CourseError(f"{path} has several models, whose names begin with {' and '.join(map(repr, before))}: save the "
                              "state_dict of only one of them")
        if before:
            plain = {there: name.removeprefix(before[0]) for there, name in plain.items()}
            break
    originals = {name: there for there, name in plain.items()}
    if len(originals) < len(plain):
        twice = next(there for there, name in plain.items() if originals[name] != there)
        raise CourseError(f"{path} has {twice} and {originals[plain[twice]]}, which are the same name without wrappers' "
                          "prefixes: save the state_dict of one model only")
    return originals


def leaves(found: Any) -> dict[str, Any]:
    """The plain values in nested mappings, by the last part of their names. Of equal names the outermost value counts."""
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
    """The tensors of a PyTorch file, mapped into memory, and what else it says. Nothing in it is executed.

    The file may also name argparse.Namespace, in which training scripts keep their arguments: creating one runs nothing.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            values = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:                      # weights_only raises almost anything, from RuntimeError to KeyError
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
    """The value of a header's text, such as a number; the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def has_tensors(found: Any) -> bool:
    """Whether a mapping holds tensors, perhaps nested deeper."""
    return isinstance(found, Mapping) and any(isinstance(x, Tensor) or has_tensors(x) for x in found.values())


def find(folder: Path, names: Any) -> dict[str, str]:
    """The file of each tensor. names: a function that lists the names in a file. Raises `CourseError` if a file is missing."""
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
    """An object from a JSON file. Raises `CourseError` if the file holds none."""
    try:
        values = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        cure = os_error_cure(error, "download that file again")
        raise CourseError(f"{file} is missing or no JSON: give a model's folder, or {cure}") from error
    if not isinstance(values, dict):
        raise CourseError(f"{file} holds a {type(values).__name__}, not names and values: download it again")
    return values


def damaged(file: Path, error: Exception) -> CourseError:
    """The error for a file that cannot be read."""
    if file.suffix == ".json":
        return CourseError(f"{file} has no weights: give the folder that it is in, which has them beside it")
    kind = "safetensors file" if file.suffix == ".safetensors" else "file of PyTorch's since 1.6"
    return CourseError(f"{file} cannot be read ({type(error).__name__}): it is damaged, or no {kind}; download it again, or save "
                       "a state_dict of only tensors there")


def more_than_tensors(file: Path, error: Exception) -> CourseError | None:
    """The error for an intact file that would execute something when unpickled; None for any other failure."""
    if not isinstance(error, pickle.UnpicklingError):
        return None
    named_class = re.search(r"GLOBAL ([\w.]+)", str(error))
    named = f" (it names {named_class[1]})" if named_class else ""
    return CourseError(f"{file} holds more than tensors, and the course never unpickles it, because that could run any "
                       f"code{named}: if you trust the file, save only its tensors, as a state_dict")


class Entry(NamedTuple):
    """A tensor to be written."""

    name: str                                        # in the file
    dtype: torch.dtype
    shape: tuple[int, ...]
    ours: str                                        # the tensor of ours that it is made from
    number: int                                      # its index among the tensors made from that one


def divide(entries: Iterable[Entry], shard: int = SHARD) -> dict[str, list[Entry]]:
    """Group tensors into files of up to `shard` bytes, named as usual: model.safetensors, or model-00001-of-00003.safetensors."""
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
    """Write a file, one tensor after another. make: the name of one of ours -> the tensors made from it."""
    def tensors() -> Iterator[Tensor]:
        for ours, group in groupby(entries, key=lambda entry: entry.ours):
            made = make(ours)
            yield from (made[entry.number] for entry in group)

    with atomic(file) as temporary:
        stream(temporary, [(entry.name, entry.dtype, entry.shape) for entry in entries], tensors(), about)


def index_of(files: Mapping[str, Sequence[Entry]]) -> dict[str, Any]:
    """The index beside several files: which tensor is in which."""
    total = sum(e.dtype.itemsize * torch.Size(e.shape).numel() for part in files.values() for e in part)
    return {"metadata": {"total_size": total}, "weight_map": {e.name: file for file, part in files.items() for e in part}}
