"""Folders of named tensors as other libraries write them: one file, or several and an index that says what is where.

    model.safetensors     or  model.safetensors.index.json    and its files
    pytorch_model.bin     or  pytorch_model.bin.index.json    and its files, read with weights only: nothing in them executes

One tensor is in memory at a time.
"""

import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from course.checkpoint import save_tensors
from course.errors import CourseError

FILES = ("model.safetensors", "pytorch_model.bin")   # the first that is there counts
SHARD = 4 * 2**30                                    # bytes of tensors in a file that is written


class Weights(Mapping[str, Tensor]):
    """The tensors of a folder by name, read when they are asked for.

    Raises `CourseError` where the folder has none, or a file is missing or damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.pickled: dict[str, dict[str, Tensor]] = {}
        self.where = find(folder, self._names)

    def __getitem__(self, name: str) -> Tensor:
        file = self.folder / self.where[name]
        if file.suffix == ".bin":
            return self._bin(file)[name]
        try:
            with safe_open(file, "pt") as opened:
                return opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise damaged(file, error) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.where)

    def __len__(self) -> int:
        return len(self.where)

    def _names(self, file: Path) -> list[str]:
        if file.suffix == ".bin":
            return list(self._bin(file))
        try:
            with safe_open(file, "pt") as opened:
                return list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise damaged(file, error) from error

    def _bin(self, file: Path) -> dict[str, Tensor]:
        if file.name not in self.pickled:
            try:
                found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
                raise damaged(file, error) from error
            if not isinstance(found, Mapping):
                raise CourseError(f"{file} holds a {type(found).__name__}, not tensors by name: save a model's state_dict there")
            self.pickled[file.name] = {name: x for name, x in found.items() if isinstance(x, Tensor)}
        return self.pickled[file.name]


def find(folder: Path, names: Any) -> dict[str, str]:
    """The file of each tensor. names: what gives the names in a file."""
    for file in FILES:
        if (folder / file).is_file():
            return dict.fromkeys(names(folder / file), file)
        if (folder / f"{file}.index.json").is_file():
            where = read_json(folder / f"{file}.index.json").get("weight_map")
            if not isinstance(where, dict):
                raise CourseError(f"{folder / file}.index.json has no weight_map, which says what is where: download it again")
            for part in sorted(set(where.values())):
                if Path(part).name != part or not (folder / part).is_file():
                    raise CourseError(f"{folder} lacks {part}, which its index names: download that file too")
            return where
    raise CourseError(f"{folder} has neither {' nor '.join(FILES)}, nor an index of several: give the folder of a model")


def read_json(file: Path) -> dict[str, Any]:
    """An object from a JSON file."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CourseError(f"{file} is missing or no JSON: give a model's folder, or download that file again") from error
    if not isinstance(found, dict):
        raise CourseError(f"{file} holds a {type(found).__name__}, not names and values: download it again")
    return found


def damaged(file: Path, error: Exception) -> CourseError:
    """The sentence for a file that cannot be read."""
    return CourseError(f"{file} cannot be read ({' '.join(str(error).split())[:120]}): download or convert it again")


def write(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard: int = SHARD) -> None:
    """Write named tensors to a folder that is there, in files of up to `shard` bytes, and an index if that makes several."""
    files: list[dict[str, str]] = []
    part: dict[str, Tensor] = {}
    total = size = 0
    for name, tensor in tensors:
        if part and size + tensor.nbytes > shard:
            files.append(_write_part(folder, len(files), part))
            part, size = {}, 0
        part[name] = tensor.detach().cpu().contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    files.append(_write_part(folder, len(files), part))
    if len(files) == 1:
        (folder / "model-00001.safetensors").rename(folder / FILES[0])
        return
    index = {"metadata": {"total_size": total}, "weight_map": {name: file for found in files for name, file in found.items()}}
    (folder / f"{FILES[0]}.index.json").write_text(json.dumps(index, indent=1))


def _write_part(folder: Path, number: int, tensors: dict[str, Tensor]) -> dict[str, str]:
    name = f"model-{number + 1:05d}.safetensors"
    save_tensors(tensors, folder / name, {"format": "pt"})
    return dict.fromkeys(tensors, name)
