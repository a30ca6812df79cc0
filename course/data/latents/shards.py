"""Sharded latents with class labels: the training data of a DiT.

    PATH/latents.json       shape, classes, scale and shift, samples per shard; written last, so it marks a complete data set
    PATH/train/00000.h5     `latents` float32 (N, C, H, W), standard deviation about 1, and `labels` int64 (N,)
    PATH/valid/00000.h5     the same for validation

`course data latents` (`packing.py`) and `course data digits` (`digits.py`) make it.
"""

import json
import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import Dataset

from course.data.hdf5_storage import MAKE_AGAIN, check_size, open_hdf5
from course.data.weather.layout import open_data_file
from course.data.weather.pairs import Batch, entry_errors
from course.utils.atomic_files import os_error_cure, read_text
from course.utils.errors import CourseError, does_not_exist

SPLITS = ("train", "valid")
SMALL, LOOKS = 1 << 23, 8                            # shards up to SMALL bytes are checked whole, others at about LOOKS latents
MAKE = "make it with `course data latents` or `course data digits`"


class Latents(Dataset[Batch]):
    """All samples of one split, numbered through its shards in order.

    The worker that reads opens a shard on first use. Raises `CourseError` for data that does not fit the model, or is damaged.
    """

    def __init__(self, path: str, split: str, latent: tuple[int, int, int], classes: int, limit: int = 0):
        made = read_summary(Path(path))
        if split not in SPLITS:
            raise CourseError(f"{path} has no split {split}: it has {' and '.join(SPLITS)}")
        self.shape = tuple(made["latent"])
        if self.shape != tuple(latent):
            raise CourseError(f"{path} has latents of {list(self.shape)} but model.latent={list(latent)}: set model.latent="
                              f"[{','.join(map(str, self.shape))}] or use other data")
        if made["classes"] > classes:
            raise CourseError(f"{path} has {made['classes']} classes but model.classes={classes}: set "
                              f"model.classes={made['classes']} or use other data")
        self.files = [Path(path) / name for name in made["shards"] if name.startswith(f"{split}/")]
        counts = [made["shards"][f"{split}/{file.name}"] for file in self.files]
        for file, count in zip(self.files, counts, strict=True):
            check_shard(file, (count, *self.shape), made["classes"])
        self.first = np.concatenate([[0], np.cumsum(counts)]).astype(int)               # number of each shard's first sample
        self.size = min(limit or self.first[-1], self.first[-1])
        if not self.size:
            raise CourseError(f"{path} has no {split} samples: pack it again with a --valid that leaves some")
        self._open: dict[int, h5py.File] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without open files: a worker process opens the shards itself."""
        return vars(self) | {"_open": {}}

    def __len__(self) -> int:
        return int(self.size)

    def __getitems__(self, samples: list[int]) -> Batch:
        """Read one batch: `latent` (B, C, H, W) float32, `label` and `sample` (B,) int64. Padding (sample -1) is zeros."""
        latent, label = np.zeros((len(samples), *self.shape), np.float32), np.zeros(len(samples), np.int64)
        for i, sample in enumerate(samples):
            if sample >= 0:
                number = int(np.searchsorted(self.first, sample, side="right")) - 1
                label[i] = self._read(number, int(sample - self.first[number]), latent[i])
        return {"latent": torch.from_numpy(latent), "label": torch.from_numpy(label), "sample": torch.tensor(samples)}

    def _read(self, number: int, entry: int, into: np.ndarray) -> int:
        """Read a latent into `into`; return its label. Raises `CourseError` if it is unreadable or all zeros."""
        with entry_errors(self.files[number], entry):
            if number not in self._open:
                self._open[number] = open_hdf5(self.files[number])
            shard = self._open[number]
            shard["latents"].read_direct(into, np.s_[entry])
            label = int(shard["labels"][entry])
            check_size(shard["latents"])
        if not into.any():
            raise unwritten_latent(self.files[number], entry)
        return label


def read_summary(path: Path) -> dict[str, Any]:
    """Read latents.json, which exists once all shards do. Raises `CourseError` if it is missing or damaged."""
    try:
        made = json.loads(read_text(path / "latents.json"))
        if not is_valid_summary(made):
            raise ValueError("not what was written")
        return dict(made)
    except FileNotFoundError as error:
        what = f"the data folder {path} is not packed to its end (no latents.json):" if path.is_dir() else does_not_exist(path)
        raise CourseError(f"{what} {MAKE}, or set data.path") from error
    except OSError as error:
        raise CourseError(f"{path}/latents.json cannot be read ({error.strerror}): "
                          f"{os_error_cure(error, 'run again')}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CourseError(f"{path}/latents.json is damaged: remove it, and {MAKE} again") from error


def is_valid_summary(made: dict[str, Any]) -> bool:
    """Whether the content of latents.json is plausible. May raise Python's own errors for values of the wrong type."""
    counts, shards = [*made["latent"], made["classes"], *made["shards"].values()], [Path(name) for name in made["shards"]]
    return (len(made["latent"]) == 3 and all(type(count) is int and 0 < count < 2**62 for count in counts)
            and math.isfinite(made["scale"]) and math.isfinite(made.get("shift", 0.0))
            and all(str(one) == f"{one.parent.name}/{one.name}" for one in shards))


def unwritten_latent(file: Path, entry: int) -> CourseError:
    """The error for a latent of zeros."""
    return CourseError(f"{file}: the latent of entry {entry} is nothing but zeros: it was never written; {MAKE_AGAIN}")


def check_shard(file: Path, shape: tuple[int, ...], classes: float = math.inf) -> None:
    """Raise `CourseError` unless a shard is complete, has latents of `shape` (N, C, H, W), and labels below `classes`."""
    cure = f"move it away, and {MAKE} again"
    with open_data_file(file) as shard:
        found = shard["latents"].shape, shard["labels"].shape
        if found != (shape, shape[:1]):
            raise CourseError(f"{file} holds latents {found[0]} and labels {found[1]}, not {shape}: {cure}")
        shard["latents"][-1, -1, -1, -1]             # fails if the file is truncated
        few = range(shape[0]) if 4 * math.prod(shape) <= SMALL else range(0, shape[0], max(1, shape[0] // LOOKS))
        zeros = next((i for i in few if not shard["latents"][i].any()), None)
        if zeros is not None:
            raise unwritten_latent(file, zeros)
        labels = shard["labels"][:]
        if labels.min() < 0 or labels.max() >= classes:
            raise CourseError(f"{file} has labels from {labels.min()} to {labels.max()} for {classes} classes: {cure}")
