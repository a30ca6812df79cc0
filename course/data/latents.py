"""Latents with their classes: what a DiT learns from. Packed in shards, and how they are packed.

    PATH/latents.json       shape, classes, scale and shift, how many samples each shard holds; written last, when all is there
    PATH/train/00000.h5     `latents` float32 (N, C, H, W), about 1 in size, and `labels` int64 (N,)
    PATH/valid/00000.h5     the same, to watch while training

`course data latents FOLDER` makes this of class folders: of latents in .npy or .pt, or of pictures, which a VAE encodes.
`course data digits` makes it of the handwritten digits that come with scikit-learn; their pixels are their latents.
"""

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
import torch.nn.functional as F
from torch.utils.data import Dataset

from course import random
from course.data.layout import data_file, first_line
from course.data.pairs import Batch, reading
from course.errors import CourseError
from course.files import atomic
from course.lock import only_maker

SPLITS = ("train", "valid")
SD_SCALE = 0.18215                                  # Stable Diffusion's VAE: times this, its latents are about 1 in size
LARGEST = 2**34                                     # bytes of the digits, made in memory
PICTURES = (".jpg", ".jpeg", ".png", ".webp")
AGAIN = "make it with `course data latents` or `course data digits`"


class Latents(Dataset[Batch]):
    """All samples of one split, numbered through its shards in order.

    Shards are opened on first use, so in the worker that reads.
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
            inspect(file, (count, *self.shape))
        self.first = np.concatenate([[0], np.cumsum(counts)]).astype(int)               # number of each shard's first sample
        self.size = min(limit or self.first[-1], self.first[-1])
        if not self.size:
            raise CourseError(f"{path} has no {split} samples: pack it again with a --valid that leaves some")
        self._open: dict[int, h5py.File] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which opens the shards itself."""
        return vars(self) | {"_open": {}}

    def __len__(self) -> int:
        return int(self.size)

    def __getitems__(self, samples: list[int]) -> Batch:
        """One whole batch: `latent` (B, C, H, W) float32, `label` and `sample` (B,) int64. Padding, sample -1, is zeros."""
        latent, label = np.zeros((len(samples), *self.shape), np.float32), np.zeros(len(samples), np.int64)
        for i, sample in enumerate(samples):
            if sample >= 0:
                number = int(np.searchsorted(self.first, sample, side="right")) - 1
                label[i] = self._read(number, int(sample - self.first[number]), latent[i])
        return {"latent": torch.from_numpy(latent), "label": torch.from_numpy(label), "sample": torch.tensor(samples)}

    def _read(self, number: int, entry: int, into: np.ndarray) -> int:
        """Read a latent; its label."""
        with reading(self.files[number], entry):
            if number not in self._open:
                self._open[number] = h5py.File(self.files[number], "r")
            self._open[number]["latents"].read_direct(into, np.s_[entry])
            return int(self._open[number]["labels"][entry])


def read_summary(path: Path) -> dict[str, Any]:
    """latents.json, which is there when all shards are."""
    try:
        made = json.loads((path / "latents.json").read_text())
        _ = made["latent"], made["classes"], made["shards"], made["scale"]
        return dict(made)
    except FileNotFoundError as error:
        what = "is not packed to its end" if path.is_dir() else "does not exist"
        raise CourseError(f"the data folder {path} {what} (no latents.json): {AGAIN}, or set data.path") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CourseError(f"{path}/latents.json is damaged: remove it, and {AGAIN} again") from error


def inspect(file: Path, shape: tuple[int, ...]) -> None:
    """Raise `CourseError` unless a shard can be read to its end and holds latents of this shape, (N, C, H, W)."""
    cure = f"remove it, and {AGAIN} again"
    with data_file(file, cure) as shard:
        found = shard["latents"].shape, shard["labels"].shape
        if found != (shape, shape[:1]):
            raise CourseError(f"{file} holds latents {found[0]} and labels {found[1]}, not {shape}: {cure}")
        shard["latents"][-1, -1, -1, -1]             # the last bytes are there


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


def load_vae(vae: str) -> Any:
    """The autoencoder of that name or in that folder: `diffusers`' AutoencoderKL."""
    try:
        from diffusers import AutoencoderKL  # big, and needed for this alone
    except ImportError as error:
        raise CourseError("a VAE (--vae) needs the package diffusers: pip install diffusers, or work with latents, "
                          "without --vae") from error
    try:
        return AutoencoderKL.from_pretrained(vae).eval()
    except Exception as error:                      # whatever its download or files lead to
        raise CourseError(f"the VAE {vae} cannot be loaded ({first_line(error)}): give the folder of one, or a name such as "
                          "stabilityai/sd-vae-ft-ema") from error


def numbers_of(vae: Any) -> tuple[float, float]:
    """(scale, shift): a VAE's latents less the shift, times the scale, are about 1 in size. Most have no shift."""
    return float(vae.config.scaling_factor), float(getattr(vae.config, "shift_factor", None) or 0.0)


class Encoder:
    """A VAE that turns pictures into latents."""

    BATCH = 16

    def __init__(self, vae: str, pixels: int):
        self.model = load_vae(vae)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model.to(self.device)
        (self.scale, self.shift), self.pixels = numbers_of(self.model), pixels

    @torch.no_grad()
    def read(self, files: list[Path]) -> Iterator[np.ndarray | str]:
        """A latent of each picture: a draw from what the VAE says of it, the same in every run."""
        with ThreadPoolExecutor(8) as pool:
            for start in range(0, len(files), self.BATCH):
                part = files[start:start + self.BATCH]
                found = list(pool.map(lambda file: read_picture(file, self.pixels), part))
                good = [(file, x) for file, x in zip(part, found, strict=True) if not isinstance(x, str)]
                latents = iter(self.encode(*zip(*good, strict=True)) if good else ())
                yield from (x if isinstance(x, str) else next(latents) for x in found)

    def encode(self, files: tuple[Path, ...], pictures: tuple[np.ndarray, ...]) -> np.ndarray:
        """Latents (N, C, H, W), not yet scaled; each picture's noise is a function of its class and name."""
        said = self.model.encode(torch.from_numpy(np.stack(pictures)).to(self.device)).latent_dist
        value = torch.arange(said.mean[0].numel(), device=self.device)
        keys = [random.key("vae", file.parent.name, file.name) for file in files]
        noise = torch.stack([random.normal(key, value) for key in keys]).view(said.mean.shape)
        return (said.mean + said.std * noise - self.shift).float().cpu().numpy()


def read_picture(file: Path, pixels: int) -> np.ndarray | str:
    """The middle square of a picture, (3, pixels, pixels) float32 from -1 to 1, or why it cannot be read."""
    from PIL import Image  # with matplotlib

    try:
        with Image.open(file) as opened:
            picture = opened.convert("RGB")
    except Exception as error:                      # as above
        return f"cannot be read ({first_line(error)})"
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    square = picture.resize((pixels, pixels), Image.Resampling.LANCZOS, (left, top, left + side, top + side))
    return (np.asarray(square, np.float32) / 127.5 - 1).transpose(2, 0, 1).copy()


def make_digits(out: Path, latent: tuple[int, int, int] = (1, 8, 8), valid: int = 6) -> dict[str, Any]:
    """The 1797 handwritten digits of scikit-learn, 8x8 points from -1 to 1: each `valid`th is for validation.

    latent: channels, height and width of larger ones, such as those that models of ImageNet's latents take (`enlarged`).
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise CourseError("the handwritten digits come with scikit-learn, which is not installed: pip install "
                          "scikit-learn") from error
    images, labels = load_digits(return_X_y=True)
    files = [Path(f"digits/{i}") for i in range(len(images))]
    pictures = enlarged(images.reshape(-1, 1, 8, 8).astype(np.float32) - 8, latent)      # 0 to 16
    found = dict(zip(files, pictures, strict=True))
    how = "digits" if latent == (1, 8, 8) else f"digits of {latent}"
    shards = plan(Path("digits"), files, [int(label) for label in labels], how, valid, len(images))
    return write(out, shards, Path("digits"), latent, 1 / 8, lambda files: map(found.__getitem__, files),
                 [str(digit) for digit in range(10)])


def enlarged(pictures: np.ndarray, latent: tuple[int, int, int]) -> np.ndarray:
    """Pictures (N, 1, h, w) made larger, bicubic, with each block of points laid out as channels: (N, C, H, W)."""
    block = math.isqrt(max(0, latent[0]))
    if block**2 != latent[0] or min(latent) < 1:
        raise CourseError(f"digits of {list(latent)} cannot be made: the channels of a point are a square of points, so their "
                          "number is 1, 4, 9 ..., as in 4,32,32")
    if (needed := 4 * len(pictures) * math.prod(latent)) > LARGEST:
        raise CourseError(f"digits of {list(latent)} would be {needed / 1e9:.0f} GB in memory: {LARGEST / 1e9:.0f} are the most")
    if pictures.shape[1:] == latent:
        return pictures
    size = (block * latent[1], block * latent[2])
    return F.pixel_unshuffle(F.interpolate(torch.from_numpy(pictures), size, mode="bicubic"), block).numpy()
