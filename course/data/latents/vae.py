"""A VAE from `diffusers`: encodes pictures to latents for `course data latents --vae`, and is loaded to decode samples."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from course.data.hdf5_storage import first_line
from course.utils import random
from course.utils.errors import CourseError


def load_vae(vae: str) -> Any:
    """Load `diffusers`' AutoencoderKL by name or from a folder. Raises `CourseError` if that fails."""
    try:
        from diffusers import AutoencoderKL  # large, and only needed here
    except ImportError as error:
        raise CourseError("a VAE (--vae) needs the package diffusers: pip install diffusers, or work with latents, "
                          "without --vae") from error
    try:
        return AutoencoderKL.from_pretrained(vae).eval()
    except Exception as error:                      # a download or a file may fail in any way
        raise CourseError(f"the VAE {vae} cannot be loaded ({first_line(error)}): give the folder of one, or a name such as "
                          "stabilityai/sd-vae-ft-ema") from error


def scale_and_shift(vae: Any) -> tuple[float, float]:
    """(scale, shift): (latent - shift) · scale has a standard deviation of about 1. Most VAEs have no shift."""
    return float(vae.config.scaling_factor), float(getattr(vae.config, "shift_factor", None) or 0.0)


class PictureEncoder:
    """Encodes pictures to latents with a VAE."""

    BATCH = 16

    def __init__(self, vae: str, pixels: int):
        self.model = load_vae(vae)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model.to(self.device)
        (self.scale, self.shift), self.pixels = scale_and_shift(self.model), pixels

    @torch.no_grad()
    def read(self, files: list[Path]) -> Iterator[np.ndarray | str]:
        """Yield a latent for each picture, or why it cannot be read: a sample of the VAE's posterior, the same in every run."""
        with ThreadPoolExecutor(8) as pool:
            for start in range(0, len(files), self.BATCH):
                part = files[start:start + self.BATCH]
                found = list(pool.map(lambda file: read_picture(file, self.pixels), part))
                good = [(file, x) for file, x in zip(part, found, strict=True) if not isinstance(x, str)]
                latents = iter(self.encode(*zip(*good, strict=True)) if good else ())
                yield from (x if isinstance(x, str) else next(latents) for x in found)

    def encode(self, files: tuple[Path, ...], pictures: tuple[np.ndarray, ...]) -> np.ndarray:
        """Encode pictures to latents (N, C, H, W), not yet scaled; a picture's class and name determine its noise."""
        said = self.model.encode(torch.from_numpy(np.stack(pictures)).to(self.device)).latent_dist
        value = torch.arange(said.mean[0].numel(), device=self.device)
        keys = [random.key("vae", file.parent.name, file.name) for file in files]
        noise = torch.stack([random.normal(key, value) for key in keys]).view(said.mean.shape)
        return (said.mean + said.std * noise - self.shift).float().cpu().numpy()


def read_picture(file: Path, pixels: int) -> np.ndarray | str:
    """The center square of a picture, (3, pixels, pixels) float32 from -1 to 1, or why it cannot be read."""
    from PIL import Image  # installed with matplotlib

    try:
        with Image.open(file) as opened:
            picture = opened.convert("RGB")
    except Exception as error:                      # Pillow may raise anything for damaged files
        return f"cannot be read ({first_line(error)})"
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    square = picture.resize((pixels, pixels), Image.Resampling.LANCZOS, (left, top, left + side, top + side))
    return (np.asarray(square, np.float32) / 127.5 - 1).transpose(2, 0, 1).copy()
