"""`course data latents`: pack class folders into shards (`shards.py`): .npy or .pt latents, or pictures for a VAE."""

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from course.data.hdf5_storage import first_line, open_hdf5
from course.data.latents.shards import SPLITS
from course.data.latents.vae import PictureEncoder
from course.data.weather.layout import open_data_file
from course.resilience.folder_lock import only_maker
from course.utils.atomic_files import atomic, os_error_cure, read_text, write_json
from course.utils.errors import CourseError

SD_SCALE = 0.18215                                  # scales the latents of Stable Diffusion's VAE to a std of about 1
PICTURES = (".jpg", ".jpeg", ".png", ".webp")


@dataclass(frozen=True)
class Shard:
    """A planned shard: its name in the data folder, its input files, their labels, and a hash of the files and settings."""

    name: str
    files: list[Path]
    labels: list[int]
    made_of: str


Read = Callable[[list[Path]], Iterator[np.ndarray | str]]      # for each file a latent (C, H, W), or the reason for none


def pack(folder: Path, out: Path, scale: float | None = None, valid: int = 50, samples: int = 4096,
         vae: str = "", pixels: int = 256) -> dict[str, Any]:
    """Write the shards for a folder of class folders; an interrupted run resumes. Returns the content of latents.json.

    scale: factor that brings latents to a standard deviation of about 1; None: the VAE's. valid: every valid-th sample is for
    validation; 0: none. samples: per shard. vae: name or folder of the autoencoder for pictures of `pixels` x `pixels`.

    Damaged files are left out and listed in `out/damaged.txt`. Raises `CourseError` if no data set can be made.
    """
    if scale is not None and not 0 < scale < math.inf:
        raise CourseError(f"--scale {scale:g}: it multiplies the latents, so it must be above 0; leave it out for the "
                          f"VAE's, {SD_SCALE}")
    if out.resolve() == folder.resolve() or (out.resolve().parent == folder.resolve() and not out.name.startswith(".")):
        raise CourseError(f"--out {out} is in {folder}, where it would count as a class: choose a folder beside it")
    encoder = PictureEncoder(vae, pixels) if vae else None
    scale = scale or (encoder.scale if encoder else SD_SCALE)
    read: Read = encoder.read if encoder else read_latents
    files, labels, names = find_files(folder, PICTURES if vae else (".npy", ".pt"))
    how = f"{scale} {vae} {pixels if vae else ''}" + (f" {encoder.shift}" if encoder and encoder.shift else "")
    shards = plan_shards(folder, files, labels, how, valid, samples)
    shape = first_shape(files, read)
    if vae and any(side % 2 for side in shape[1:]):
        raise CourseError(f"--pixels {pixels} gives latents of {shape[1]}x{shape[2]}, which no patches of 2 cover: take a "
                          "multiple of 16")
    return write_shards(out, shards, folder, shape, scale, read, names, encoder.shift if encoder else 0.0)


def write_shards(out: Path, shards: list[Shard], folder: Path, shape: tuple[int, ...], scale: float, read: Read, names: list[str],
          shift: float = 0.0) -> dict[str, Any]:
    """Write the missing shards, then latents.json, which marks the data set as complete."""
    with only_maker(out):
        refuse_foreign_shards(out, shards)
        for shard in shards:
            if not is_done(out / shard.name):
                write_shard(out / shard.name, shard, folder, shape, scale, read)
                print(f"wrote {out / shard.name}", flush=True)
        return write_summary(out, shards, shape, scale, names, shift)


LOOKS = ("a folder should hold one folder a class (0000, 0001 ..., or names), or features and labels in two folders of files of "
         "the same names, such as imagenet256_features/0.npy and imagenet256_labels/0.npy")
LEFT_BY_SYSTEMS = {"__MACOSX", "lost+found", "$RECYCLE.BIN", "System Volume Information", "@eaDir"}
MOST_CLASSES = 1_000_000                            # a larger number is probably a date


def find_files(folder: Path, endings: tuple[str, ...]) -> tuple[list[Path], list[int], list[str]]:
    """(files, labels, class names). Folders 0000, 0001 ... are the labels; other folders are numbered in order of their names.

    A folder without such files is no class: a system's own folder, such as `__MACOSX`, would shift the labels. Labels may also
    come from a second folder, or from a `dataset.json` as in EDM and REPA. Raises `CourseError` for any other content.
    """
    found = {path: files for path in sorted(folder.glob("[!.]*")) if path.is_dir() and (files := class_files(path, endings))}
    if (folder / "dataset.json").is_file():
        return listed_labels(folder)
    if not found:
        what = "has no class folders with" if folder.is_dir() else "does not exist: it should hold class folders with"
        raise CourseError(f"{folder} {what} {' or '.join(endings)} files; {LOOKS}; give another folder" +
                          (", or --vae for pictures" if ".npy" in endings else ""))
    if pair := features_and_labels(list(found)):
        return paired_labels(found[pair[0]], {file.stem: file for file in found[pair[1]]}, *pair)
    check_classes(folder, list(found))
    if numbered := all(path.name.isdecimal() for path in found):
        names = [str(number) for number in range(max(int(path.name) for path in found) + 1)]
    else:
        names = [path.name for path in found]
    labels = [int(path.name) if numbered else number for number, (path, files) in enumerate(found.items()) for _ in files]
    return [file for files in found.values() for file in files], labels, names


def class_files(path: Path, endings: tuple[str, ...]) -> list[Path]:
    """The files of a class folder with these endings, sorted. Raises `CourseError` if the folder cannot be read."""
    if path.name in LEFT_BY_SYSTEMS:
        return []
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise CourseError(f"{path} cannot be read ({error.strerror}): {os_error_cure(error, 'run again')}; if it is no class, "
                          "move it away") from error
    return [path / name for name in names if not name.startswith(".") and Path(name).suffix.lower() in endings]


def check_classes(folder: Path, classes: list[Path]) -> None:
    """Raise `CourseError` for folders that cannot be classes: repeated or huge numbers, numbers and names, features alone."""
    numbers = {int(path.name) for path in classes if path.name.isdecimal()}
    if numbers and (len(numbers) < len(classes) or max(numbers) > MOST_CLASSES):
        some = ", ".join(path.name for path in classes[:8])
        raise CourseError(f"{folder} has the folders {some} ..., which are neither all numbers, each once, nor all names: move "
                          f"away what is no class; {LOOKS}")
    if len(classes) == 1 and re.search("feature|latent|moment|label", classes[0].name, re.IGNORECASE):
        raise CourseError(f"{classes[0]} alone does not say which class each file is of: {LOOKS}")


def features_and_labels(folders: list[Path]) -> tuple[Path, Path] | None:
    """(features, labels) if there are two folders and one is named for labels, as in latent caches of fast-DiT and SiT."""
    labels = [path for path in folders if "label" in path.name.lower()]
    if len(folders) != 2 or len(labels) != 1:
        return None
    return next(path for path in folders if path != labels[0]), labels[0]


def paired_labels(files: list[Path], labels: dict[str, Path], features: Path, folder: Path) -> tuple[list[Path], list[int],
                                                                                                     list[str]]:
    """The result of `find_files` where a file of the same name in `folder` holds each label."""
    for file in files:
        if file.stem not in labels:
            raise CourseError(f"{file} has no label in {folder}: {LOOKS}")
    if len(files) < len(labels):
        more = next(file for stem, file in labels.items() if not (features / file.name).exists())
        raise CourseError(f"{more} is the label of no file in {features}: {LOOKS}")
    files = sorted(files, key=lambda file: (len(file.stem), file.stem) if file.stem.isdecimal() else (0, file.stem))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(read_label, [labels[file.stem] for file in files]))
    return files, found, [str(number) for number in range(max(found) + 1)]


def read_label(file: Path) -> int:
    """Read the label from a file with one number. Raises `CourseError` if it holds anything else."""
    try:
        found = np.load(file, allow_pickle=False) if file.suffix.lower() == ".npy" else torch.load(file, weights_only=True)
        label = int(np.asarray(found).reshape(-1)[0]) if np.asarray(found).size == 1 else -1
        if not 0 <= label <= MOST_CLASSES or label != np.asarray(found).reshape(-1)[0]:
            raise ValueError("it holds no class, one whole number from 0 on")
    except Exception as error:                      # np.load and torch.load may raise anything
        raise CourseError(f"{file} cannot be read as a label ({first_line(error)}): {LOOKS}") from error
    return label


def listed_labels(folder: Path) -> tuple[list[Path], list[int], list[str]]:
    """The result of `find_files` where `dataset.json` lists each file's label: {"labels": [["00000/a.npy", 5], ...]}."""
    try:
        labels = {str(name): int(label) for name, label in json.loads(read_text(folder / "dataset.json"))["labels"]}
        if not labels or not 0 <= min(labels.values()) <= max(labels.values()) <= MOST_CLASSES:
            raise ValueError("no labels from 0 on")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CourseError(f"{folder}/dataset.json does not say the label of each file ({first_line(error)}): it should hold "
                          '{"labels": [["00000/a.npy", 5], ...]}') from error
    names = sorted(labels)
    missing = next((name for name in names if not (folder / name).is_file()), None)
    if missing:
        raise CourseError(f"{folder}/dataset.json names {missing}, which is not there: restore it, or give the folder whose "
                          "files it names")
    return [folder / name for name in names], [labels[name] for name in names], [str(i) for i in range(max(labels.values()) + 1)]


def plan_shards(folder: Path, files: list[Path], labels: list[int], how: str, valid: int, samples: int) -> list[Shard]:
    """Assign files to shards: a pure function of the listing."""
    shards = []
    for split in SPLITS:
        mine = [i for i in range(len(files)) if (valid > 0 and i % valid == valid - 1) == (split == "valid")]
        for number, start in enumerate(range(0, len(mine), samples)):
            part = mine[start:start + samples]
            listing = json.dumps([how, [str(files[i].relative_to(folder)) for i in part], [labels[i] for i in part]])
            shards.append(Shard(f"{split}/{number:05d}.h5", [files[i] for i in part], [labels[i] for i in part],
                                sha256(listing.encode()).hexdigest()))
    return shards


def refuse_foreign_shards(out: Path, shards: list[Shard]) -> None:
    """Raise `CourseError` if `out` holds shards of other files or settings."""
    planned = {shard.name: shard.made_of for shard in shards}
    for file in (file for split in SPLITS for file in sorted((out / split).glob("*.h5"))):
        if is_done(file) != planned.get(f"{file.parent.name}/{file.name}"):
            raise CourseError(f"{file} is of other files or settings, or damaged: choose another --out, or "
                              f"move {' and '.join(str(out / split) for split in SPLITS)} away")


def is_done(file: Path) -> str:
    """The hash of the files and settings that a shard was made of; "" if it is missing or damaged."""
    try:
        with open_data_file(file) as shard:
            return str(shard.attrs["made_of"])
    except CourseError:
        return ""


def first_shape(files: list[Path], read: Read) -> tuple[int, ...]:
    """The shape of the first readable latent; all must have it. Raises `CourseError` if the first 100 files are unusable."""
    reasons = []
    for file in files:
        found = next(read([file]))
        if not isinstance(found, str):
            return found.shape
        reasons.append(f"{file}: {found}")
        if len(reasons) == 100:
            break
    raise CourseError(f"none of the first {len(reasons)} files can be used, the first because: {reasons[0]}; repair or replace "
                      "them")


def write_shard(path: Path, shard: Shard, folder: Path, shape: tuple[int, ...], scale: float, read: Read) -> None:
    """Read, scale and write one shard, with a list of the unusable files and the reasons."""
    latents, labels, damaged = [], [], []
    for file, label, found in zip(shard.files, shard.labels, read(shard.files), strict=True):
        if isinstance(found, str) or found.shape != shape:
            why = found if isinstance(found, str) else f"its shape is {list(found.shape)}, not {list(shape)}"
            damaged.append(f"{file.relative_to(folder)}: {why}")
        elif not np.isfinite(scaled := scale_latent(found, scale)).all():
            damaged.append(f"{file.relative_to(folder)}: times {scale:g} it holds numbers that are not finite in float32")
        elif not scaled.any():
            damaged.append(f"{file.relative_to(folder)}: nothing but zeros, so it was never written")
        else:
            latents.append(scaled)
            labels.append(label)
    with atomic(path) as temporary, open_hdf5(temporary, "w") as made:
        made["latents"] = np.stack(latents) if latents else np.zeros((0, *shape), np.float32)
        made["labels"] = np.array(labels, np.int64)
        made.attrs["made_of"], made.attrs["scale"] = shard.made_of, scale
        made["damaged"] = np.array(damaged, h5py.string_dtype())


def scale_latent(latent: np.ndarray, scale: float) -> np.ndarray:
    """Scale a latent to float32; values that overflow become infinite."""
    with np.errstate(over="ignore"):
        return (latent * np.float32(scale)).astype(np.float32)


def write_summary(out: Path, shards: list[Shard], shape: tuple[int, ...], scale: float, names: list[str], shift: float = 0.0
           ) -> dict[str, Any]:
    """Write latents.json and damaged.txt for all shards, and print a summary. shift: subtracted before the scale (by a VAE)."""
    counts, damaged, some = {}, [], []
    for shard in shards:
        with open_data_file(out / shard.name) as held:
            counts[shard.name] = len(held["labels"])
            damaged += [text.decode() for text in held["damaged"][:]]
            some.append(held["latents"][:16])        # a few of every shard
    size = float(np.concatenate(some).std())
    made = {"latent": list(shape), "classes": len(names), "scale": scale, "shift": shift, "names": names,
            "damaged": len(damaged), "std": size, "shards": {name: count for name, count in counts.items() if count}}
    if damaged:
        with atomic(out / "damaged.txt") as file:
            file.write_text("\n".join(damaged) + "\n", encoding="utf-8")
        print(f"{len(damaged)} files are damaged and left out, all named in {out / 'damaged.txt'}; the first: {damaged[0]}")
    write_json(out / "latents.json", made)
    print(f"wrote {out}: {sum(counts.values())} latents of {list(shape)} in {len(names)} classes; standard deviation {size:.3g}")
    if math.isfinite(size) and not 0.5 < size < 2:
        print("diffusion expects a standard deviation of about 1: pack again into another folder with --scale "
              f"{scale / (size or 1):.3g}")
    return made


def read_latents(files: list[Path]) -> Iterator[np.ndarray | str]:
    """Yield latents from .npy and .pt files in order; eight threads read, since each waits for the disk."""
    with ThreadPoolExecutor(8) as pool:
        yield from pool.map(read_latent, files)


def read_latent(file: Path) -> np.ndarray | str:
    """Read one latent, (C, H, W) float32, or return why it cannot be used. Only tensors are unpickled."""
    try:
        if file.suffix.lower() == ".npy":
            found = np.load(file, allow_pickle=False)
        else:
            tensor = torch.load(file, map_location="cpu", weights_only=True)
            found = tensor.detach().float().numpy() if torch.is_tensor(tensor) and not tensor.is_complex() else None
    except Exception as error:                      # np.load and torch.load may raise anything
        return f"cannot be read ({first_line(error) if file.suffix.lower() == '.npy' else torch_load_reason(error)})"
    if found is None or found.dtype.kind not in "fiu":
        return "holds no array of numbers"
    found = found[0] if found.ndim == 4 and len(found) == 1 else found
    if found.ndim != 3:
        return f"its shape is {list(found.shape)}, not (channels, height, width)"
    found = scale_latent(found, 1)
    return found if np.isfinite(found).all() else "holds numbers that are not finite in float32"


def torch_load_reason(error: Exception) -> str:
    """Why `torch.load` failed, in one sentence."""
    if "GLOBAL" in str(error):                       # a pickle opcode that imports an object
        return "it holds Python objects, which could run code, so nothing was: save the tensor alone, torch.save(tensor, file)"
    return "it is damaged, or torch.save did not write it"
