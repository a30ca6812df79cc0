"""`course data digits`: scikit-learn's handwritten digits as shards (`shards.py`). The pixels serve as latents."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from course.data.latents.packing import plan_shards, write_shards
from course.utils.errors import CourseError

LARGEST = 2**34                                     # bytes: the digits are made in memory


def make_digits(out: Path, latent: tuple[int, int, int] = (1, 8, 8), valid: int = 6) -> dict[str, Any]:
    """Write scikit-learn's 1797 handwritten digits, 8x8 pixels from -1 to 1, as shards; every `valid`th is for validation.

    latent: (channels, height, width) to enlarge them to (`enlarged`), such as the shape of ImageNet latents.
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
    shards = plan_shards(Path("digits"), files, [int(label) for label in labels], how, valid, len(images))
    return write_shards(out, shards, Path("digits"), latent, 1 / 8, lambda files: map(found.__getitem__, files),
                 [str(digit) for digit in range(10)])


def enlarged(pictures: np.ndarray, latent: tuple[int, int, int]) -> np.ndarray:
    """Enlarge pictures (N, 1, h, w) bicubically and unshuffle blocks of pixels to channels: (N, C, H, W).

    Raises `CourseError` if C is not a square, or if the result exceeds `LARGEST`.
    """
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
