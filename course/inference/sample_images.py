"""`course generate RUN`: draw samples from a trained DiT, one row of the picture for each label."""

import time
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from course.config import Config
from course.data.latents.shards import read_summary
from course.data.latents.vae import load_vae, scale_and_shift
from course.inference.diffusion_sampler import SamplerSettings, sample_latents
from course.inference.forecast_scores import device_of, load_model, read_config
from course.models import DiT, DiTConfig
from course.utils import plots
from course.utils.atomic_files import atomic
from course.utils.errors import CourseError

ROWS, COLUMNS = 20, 16                               # in the picture, at most


def sample_run(run: Path, labels: list[int], each: int, settings: SamplerSettings, average: bool | None = None,
               vae: str = "") -> Path:
    """Draw `each` samples of each label with a run's newest checkpoint; write them to `run/samples`, return the picture's path.

    labels: empty means the first ten. average: use the moving average of the weights; None: if there is one. vae: decodes latents
    to pictures (diffusers). If there are many samples, the picture shows some. `samples.npy` (N, C, H, W) float32 has all latents
    and `labels.npy` (N,) their labels, label by label.

    Raises `CourseError` if the run is not a DiT's, it lacks a label, or a checkpoint, average or decoder is missing.
    """
    config = read_config(run)
    c = config.model
    if not isinstance(c, DiTConfig):
        raise CourseError(f"{run} is of a model of kind {c.kind}: only a DiT draws samples of labels")
    labels = labels or list(range(min(10, c.classes)))
    if not 0 <= min(labels) <= max(labels) < c.classes:
        raise CourseError(f"--labels {','.join(map(str, labels))}: this model has the labels 0 to {c.classes - 1}")
    decode = Decoder(vae, *latent_scale_and_shift(config)) if vae else None        # report what is missing before drawing
    model, step = load_model(run, config, device_of(config), average)
    if not isinstance(model, DiT):
        raise CourseError(f"{run} has your own model, {type(model).__name__}, which draws no samples: derive it from "
                          "course.models.DiT, which denoises with guidance")
    start = time.perf_counter()
    each_label = torch.tensor(labels).repeat_interleave(each)
    samples = sample_latents(model, each_label, settings, config.precision).float()
    images = (decode(samples) if decode else to_images(samples)).cpu().numpy()
    seconds = time.perf_counter() - start
    save_npy(run / "samples" / "samples.npy", samples.cpu().numpy())
    save_npy(run / "samples" / "labels.npy", each_label.numpy())
    print(f"{len(samples)} samples of the model of step {step} in {seconds:.1f} s; latents: {run / 'samples' / 'samples.npy'}",
          flush=True)
    shown = images.reshape(len(labels), each, *images.shape[1:])[:ROWS, :COLUMNS]
    picture = plots.save(grid(shown.reshape(-1, *images.shape[1:]), labels[:ROWS], shown.shape[1]),
                            run / "samples" / "samples.png")
    some = f", {shown.shape[1]} of each of {len(shown)} labels" if shown.shape[:2] != (len(labels), each) else ""
    print(f"picture: {picture}{some}", flush=True)
    return picture


def to_images(samples: torch.Tensor) -> torch.Tensor:
    """Latents as pictures with values from 0 to 1, channels first: (N, C, H, W) -> (N, 1 or 3, H, W).

    One channel, such as the digits', is gray. Of three or more, the first three become colors, which gives an idea of a picture.
    """
    return ((samples[:, :3 if samples.shape[1] >= 3 else 1] + 1) / 2).clamp(0, 1)


def grid(images: np.ndarray, labels: list[int], each: int) -> Figure:
    """A picture with a row of `each` images for each label: (N, 1 or 3, H, W) from 0 to 1, label by label."""
    figure = Figure(figsize=(0.5 + each, len(labels)), layout="constrained")
    axes = figure.subplots(len(labels), each, squeeze=False)
    for axis, image in zip(axes.flat, images, strict=True):
        axis.imshow(image.transpose(1, 2, 0), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axis.set_xticks([])
        axis.set_yticks([])
    for axis, label in zip(axes[:, 0], labels, strict=True):
        axis.set_ylabel(str(label), rotation=0, ha="right", va="center")
    return figure


def save_npy(path: Path, array: np.ndarray) -> None:
    """Write an array as .npy."""
    with atomic(path) as temporary, open(temporary, "wb") as file:
        np.save(file, array)


def latent_scale_and_shift(config: Config) -> tuple[float | None, float | None]:
    """(scale, shift) with which a run's latents were packed: the shift is subtracted first. (None, None) if the data is gone."""
    if config.data.source == "mock" or not (Path(config.data.path) / "latents.json").exists():
        return None, None
    made = read_summary(Path(config.data.path))
    return made["scale"], made.get("shift", 0.0)


class Decoder:
    """Decode latents to pictures with the VAE that made them (`diffusers`): x / scale + shift. None: the VAE's own numbers."""

    def __init__(self, vae: str, scale: float | None = None, shift: float | None = None):
        self.model = load_vae(vae)
        own, off = scale_and_shift(self.model)
        self.scale, self.shift = own if scale is None else scale, off if shift is None else shift

    @torch.no_grad()
    def __call__(self, samples: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) standardized -> (N, 3, 8·H, 8·W) from 0 to 1."""
        self.model.to(samples.device)
        parts = [self.model.decode(part / self.scale + self.shift).sample for part in samples.split(16)]
        return to_images(torch.cat(parts).float())
