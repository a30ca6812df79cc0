"""`course data latents`: packs class folders, of latents in .npy or .pt or of pictures for a VAE, into shards (`latents.py`)."""

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from course.data.latents import SPLITS
from course.data.layout import data_file, first_line
from course.data.vae import Encoder
from course.errors import CourseError
from course.files import atomic
from course.lock import only_maker

SD_SCALE = 0.18215                                  # Stable Diffusion's VAE: times this, its latents are about 1 in size
PICTURES = (".jpg", ".jpeg", ".png", ".webp")


@dataclass(frozen=True)
class Shard:
    """A shard to be written: its name under the data folder, its files, their labels, and what all this was made of."""

    name: str
    files: list[Path]
    labels: list[int]
    made_of: str


Read = Callable[[list[Path]], Iterator[np.ndarray | str]]      # of each file a latent (C, H, W), or why there is none


def pack(folder: Path, out: Path, scale: float | None = None, valid: int = 50, samples: int = 4096,
         vae: str = "", pixels: int = 256) -> dict[str, Any]:
    """Write the shards of a folder of class folders; goes on where it was interrupted. Returns what latents.json holds.

    scale: what latents are multiplied with, so that they are about 1 in size; None: the VAE's. valid: every valid-th sample is
    for validation; 0: none. samples: in a shard. vae: name or folder of the autoencoder for pictures, of `pixels` on a side.

    Damaged files are left out, and named in `out/damaged.txt`. Raises `CourseError` where nothing can be made.
    """
    if scale is not None and not 0 < scale < math.inf:
        raise CourseError(f"--scale {scale:g}: latents are multiplied with it, so it is more than 0; leave it out for the "
                          f"VAE's, {SD_SCALE}")
    if out.resolve() == folder.resolve() or (out.resolve().parent == folder.resolve() and not out.name.startswith(".")):
        raise CourseError(f"--out {out} is in {folder}, where it would count as a class: choose a folder beside it")
    encoder = Encoder(vae, pixels) if vae else None
    scale = scale or (encoder.scale if encoder else SD_SCALE)
    read: Read = encoder.read if encoder else read_latents
    files, labels, names = find_files(folder, PICTURES if vae else (".npy", ".pt"))
    how = f"{scale} {vae} {pixels if vae else ''}" + (f" {encoder.shift}" if encoder and encoder.shift else "")
    shards = plan(folder, files, labels, how, valid, samples)
    shape = first_shape(files, read)
    if vae and any(side % 2 for side in shape[1:]):
        raise CourseError(f"--pixels {pixels} gives latents of {shape[1]}x{shape[2]}, which no patches of 2 cover: take a "
                          "multiple of 16")
    return write(out, shards, folder, shape, scale, read, names, encoder.shift if encoder else 0.0)


def write(out: Path, shards: list[Shard], folder: Path, shape: tuple[int, ...], scale: float, read: Read, names: list[str],
          shift: float = 0.0) -> dict[str, Any]:
    """Write the shards that are not there yet, and what says that all are."""
    with only_maker(out):
        refuse_others(out, shards)
        for shard in shards:
            if not is_done(out / shard.name):
                write_shard(out / shard.name, shard, folder, shape, scale, read)
                print(f"wrote {out / shard.name}", flush=True)
        return finish(out, shards, shape, scale, names, shift)


def find_files(folder: Path, endings: tuple[str, ...]) -> tuple[list[Path], list[int], list[str]]:
    """(files, their labels, names of the classes). Folders 0000, 0001 ... have these numbers, others are numbered by name.

    Hidden ones, such as .ipynb_checkpoints, are no classes: they would number the others anew.
    """
    classes = sorted(path for path in folder.glob("[!.]*") if path.is_dir()) if folder.is_dir() else []
    numbered = all(path.name.isdecimal() for path in classes)
    files, labels = [], []
    for number, path in enumerate(classes):
        found = sorted(file for file in path.glob("[!.]*") if file.suffix.lower() in endings)
        files += found
        labels += [int(path.name) if numbered else number] * len(found)
    if not files:
        what = "has no class folders with" if folder.is_dir() else "does not exist: it should hold class folders with"
        raise CourseError(f"{folder} {what} {' or '.join(endings)} files, such as {folder}/0000/name{endings[0]}; give another "
                          "folder" + (", or --vae for pictures" if ".npy" in endings else ""))
    names = [str(number) for number in range(max(labels) + 1)] if numbered else [path.name for path in classes]
    return files, labels, names


def plan(folder: Path, files: list[Path], labels: list[int], how: str, valid: int, samples: int) -> list[Shard]:
    """Which file goes where: a function of the listing alone."""
    shards = []
    for split in SPLITS:
        mine = [i for i in range(len(files)) if (valid > 0 and i % valid == valid - 1) == (split == "valid")]
        for number, start in enumerate(range(0, len(mine), samples)):
            part = mine[start:start + samples]
            listing = json.dumps([how, [str(files[i].relative_to(folder)) for i in part], [labels[i] for i in part]])
            shards.append(Shard(f"{split}/{number:05d}.h5", [files[i] for i in part], [labels[i] for i in part],
                                sha256(listing.encode()).hexdigest()))
    return shards


def refuse_others(out: Path, shards: list[Shard]) -> None:
    """Raise `CourseError` if there are shards of other data, or of the same packed otherwise."""
    planned = {shard.name: shard.made_of for shard in shards}
    for file in (file for split in SPLITS for file in sorted((out / split).glob("*.h5"))):
        if is_done(file) != planned.get(f"{file.parent.name}/{file.name}"):
            raise CourseError(f"{file} is of other files or settings, or damaged: choose another --out, or remove "
                              f"{' and '.join(str(out / split) for split in SPLITS)}")


def is_done(file: Path) -> str:
    """What a shard was made of; empty if it is not there, or damaged."""
    try:
        with data_file(file) as shard:
            return str(shard.attrs["made_of"])
    except CourseError:
        return ""


def first_shape(files: list[Path], read: Read) -> tuple[int, ...]:
    """The shape of the first latent that can be read, which all must have."""
    reasons = []
    for file in files:
        found = next(read([file]))
        if not isinstance(found, str):
            return found.shape
        reasons.append(f"{file}: {found}")
        if len(reasons) == 100:
            break
    raise CourseError(f"none of the first {len(reasons)} files can be used, the first because: {reasons[0]}; mend or replace "
                      "them")


def write_shard(path: Path, shard: Shard, folder: Path, shape: tuple[int, ...], scale: float, read: Read) -> None:
    """Read, scale and write one shard, with the names of the files that it could not take."""
    latents, labels, damaged = [], [], []
    for file, label, found in zip(shard.files, shard.labels, read(shard.files), strict=True):
        if isinstance(found, str) or found.shape != shape:
            why = found if isinstance(found, str) else f"its shape is {list(found.shape)}, not {list(shape)}"
            damaged.append(f"{file.relative_to(folder)}: {why}")
        elif not np.isfinite(scaled := times(found, scale)).all():
            damaged.append(f"{file.relative_to(folder)}: times {scale:g} it holds numbers that are not finite in float32")
        else:
            latents.append(scaled)
            labels.append(label)
    with atomic(path) as temporary, h5py.File(temporary, "w") as made:
        made["latents"] = np.stack(latents) if latents else np.zeros((0, *shape), np.float32)
        made["labels"] = np.array(labels, np.int64)
        made.attrs["made_of"], made.attrs["scale"] = shard.made_of, scale
        made["damaged"] = np.array(damaged, h5py.string_dtype())


def times(latent: np.ndarray, scale: float) -> np.ndarray:
    """A latent, scaled, in float32; infinite where that is too large for it."""
    with np.errstate(over="ignore"):
        return (latent * np.float32(scale)).astype(np.float32)


def finish(out: Path, shards: list[Shard], shape: tuple[int, ...], scale: float, names: list[str], shift: float = 0.0
           ) -> dict[str, Any]:
    """Write latents.json and damaged.txt of all shards; say what there is. shift: what a VAE's were less, before the scale."""
    counts, damaged, some = {}, [], []
    for shard in shards:
        with data_file(out / shard.name, "remove it and run again") as held:
            counts[shard.name] = len(held["labels"])
            damaged += [text.decode() for text in held["damaged"][:]]
            some.append(held["latents"][:16])        # of many classes
    size = float(np.concatenate(some).std())
    made = {"latent": list(shape), "classes": len(names), "scale": scale, "shift": shift, "names": names,
            "damaged": len(damaged), "std": size, "shards": {name: count for name, count in counts.items() if count}}
    if damaged:
        with atomic(out / "damaged.txt") as file:
            file.write_text("\n".join(damaged) + "\n")
        print(f"{len(damaged)} files are damaged and left out, all named in {out / 'damaged.txt'}; the first: {damaged[0]}")
    with atomic(out / "latents.json") as file:
        file.write_text(json.dumps(made, indent=1) + "\n")
    print(f"wrote {out}: {sum(counts.values())} latents of {list(shape)} in {len(names)} classes; standard deviation {size:.3g}")
    if math.isfinite(size) and not 0.5 < size < 2:
        print("diffusion expects a standard deviation of about 1: pack again into another folder with --scale "
              f"{scale / (size or 1):.3g}")
    return made


def read_latents(files: list[Path]) -> Iterator[np.ndarray | str]:
    """Latents from .npy and .pt files, in order; many at a time, since each waits for the disk."""
    with ThreadPoolExecutor(8) as pool:
        yield from pool.map(read_latent, files)


def read_latent(file: Path) -> np.ndarray | str:
    """One latent, (C, H, W) float32, or why it cannot be used. Nothing is unpickled but tensors."""
    try:
        if file.suffix.lower() == ".npy":
            found = np.load(file, allow_pickle=False)
        else:
            tensor = torch.load(file, map_location="cpu", weights_only=True)
            found = tensor.detach().float().numpy() if torch.is_tensor(tensor) and not tensor.is_complex() else None
    except Exception as error:                      # the libraries raise whatever the bytes suggest
        return f"cannot be read ({first_line(error) if file.suffix.lower() == '.npy' else why_not(error)})"
    if found is None or found.dtype.kind not in "fiu":
        return "holds no array of numbers"
    found = found[0] if found.ndim == 4 and len(found) == 1 else found
    if found.ndim != 3:
        return f"its shape is {list(found.shape)}, not (channels, height, width)"
    found = times(found, 1)
    return found if np.isfinite(found).all() else "holds numbers that are not finite in float32"


def why_not(error: Exception) -> str:
    """Why `torch.load` reads nothing, without its paragraphs."""
    if "GLOBAL" in str(error):                       # what a pickle would import, and call
        return "it holds Python objects, which could run code, so nothing was: save the tensor alone, torch.save(tensor, file)"
    return "it is damaged, or torch.save did not write it"
