"""Draw samples from a trained diffusion model or rectified flow, starting at noise.

A *predictor* is any function of latents (B, C, H, W) and their times (B,), 0 up to STEPS, that returns the noise in them, or the
velocity, (B, C, H, W). A sampler starts at noise and calls it `steps` times. All random numbers are functions of the seed, the
sample's number and the step, so a sample does not depend on its batch.

`ddim`      for noise: Song, Meng and Ermon 2021 (arXiv:2010.02502), equation 12. With eta=0 only the start is random; with
            eta=1 each step adds as much noise as in DDPM.
`euler`     for velocity: straight steps along it. Liu, Gong and Liu 2022 (arXiv:2209.03003).
`guided`    classifier-free guidance: Ho and Salimans 2022 (arXiv:2207.12598), with the scale of Peebles and Xie 2023
            (arXiv:2212.09748), section 3.2: 1 means none.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from course.models import DiT, DiTConfig
from course.models.diffusion import STEPS, signal_variance
from course.ops.number_formats import autocast, precision_of_weights
from course.utils import random
from course.utils.errors import CourseError

Noise = Callable[[int], Tensor]                     # the fresh noise of a step, (B, C, H, W)
Predictor = Callable[[Tensor, Tensor], Tensor]      # latents (B, C, H, W), times (B,) -> noise or velocity (B, C, H, W)
START, FRESH = random.key("sampling", "start"), random.key("sampling", "fresh noise")


@dataclass(frozen=True)
class SamplerSettings:
    """How to draw samples."""

    sampler: Literal["auto", "ddim", "euler"] = "auto"      # auto: the one for the model's objective
    steps: int = 50
    guidance: float | None = None                   # 1: none; more: more typical of the class, less varied; None: `guidance_of`
    channels: int = 0                               # guide only this many channels, as the paper does with 3; 0: all
    eta: float = 0.0                                # for ddim: how much of DDPM's noise each step adds
    seed: int = 0
    batch: int = 64                                 # samples at a time; with guidance twice as many go through the model


@torch.no_grad()
def sample_latents(model: DiT, labels: Tensor, settings: SamplerSettings, precision: str = "fp32") -> Tensor:
    """Draw a sample for each label (N,), on the model's device: (N, C, H, W), float32 (float64 for a float64 model).

    A model with 16-bit weights (`course/parallel/data_parallel/master_weights.py`) multiplies in 16 bits, whatever the precision.

    Raises `CourseError` if the settings do not fit the model.
    """
    c, weight = model.c, next(model.parameters())
    wide = torch.promote_types(weight.dtype, torch.float32)
    sampler = choose_sampler(settings, c)
    parts, labels, guidance = [], labels.to(weight.device), guidance_of(settings, c)
    for ids in torch.arange(len(labels), device=weight.device).split(settings.batch):
        predict = guided(model, labels[ids], guidance, settings.channels, precision)
        x = sample_noise(START, settings.seed, 0, ids, c.latent, wide)
        if sampler == "euler":
            parts.append(euler(predict, x, settings.steps))
        else:
            fresh = partial(sample_noise, FRESH, settings.seed, ids=ids, shape=c.latent, dtype=wide)
            parts.append(ddim(predict, x, settings.steps, settings.eta, fresh))
    return torch.cat(parts)


def choose_sampler(s: SamplerSettings, c: DiTConfig) -> str:
    """The sampler to use for a DiT's configuration. Raises `CourseError` if the settings do not fit it."""
    fits = "euler" if c.objective == "flow" else "ddim"
    if s.sampler not in ("auto", fits):
        raise CourseError(f"the sampler {s.sampler} does not fit a model with model.objective={c.objective}: use {fits}")
    if not 1 <= s.steps <= STEPS:
        raise CourseError(f"{s.steps} steps: a sampler takes 1 to {STEPS}")
    guidance = guidance_of(s, c)
    if not math.isfinite(guidance):
        raise CourseError(f"guidance={guidance} would make every sample NaN: use 1, which means none, to about 10")
    if guidance != 1 and not c.label_drop:
        raise CourseError(f"guidance={guidance} needs a model that was trained with hidden classes, and model.label_drop=0 hides "
                          "none: use 1, which means no guidance")
    if not 0 <= s.channels <= c.latent[0]:
        raise CourseError(f"guidance of {s.channels} channels: the model has {c.latent[0]}; 0 means all")
    if s.eta and fits == "euler":
        raise CourseError(f"eta={s.eta} is the fresh noise of ddim, and euler adds none: use eta 0")
    return fits


def guidance_of(s: SamplerSettings, c: DiTConfig) -> float:
    """The guidance asked for; by default 4, or 1 (none) for a model that always saw the class in training."""
    return (4.0 if c.label_drop else 1.0) if s.guidance is None else s.guidance


def sample_noise(key: int, seed: int, step: int, ids: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Standard normal numbers of a step for each sample (B,): (B, *shape)."""
    keys = random.fold(random.key(key, seed, step), ids)                # (B,)
    value = torch.arange(math.prod(shape), device=ids.device)
    return random.normal(keys[:, None], value, dtype).view(len(ids), *shape)


def predictor(model: DiT, labels: Tensor, precision: str) -> Predictor:
    """The predictor of a DiT, whole on this device, for latents with these labels (B,)."""
    matmuls = precision_of_weights(model, precision)

    def predict(x: Tensor, time: Tensor) -> Tensor:
        with autocast(matmuls, x.device):
            output = model(model.inputs(x, time, labels))               # (B, T, P)
        return model.fields(output.to(x.dtype))

    return predict


def guided(model: DiT, labels: Tensor, scale: float, channels: int = 0, precision: str = "fp32") -> Predictor:
    """Lead away from the prediction for the unknown class: unknown + scale · (known - unknown).

    Both go through the model as the halves of one batch. channels: guide only the first ones, this many (0: all).
    """
    if scale == 1:
        return predictor(model, labels, precision)
    both = predictor(model, torch.cat([labels, torch.full_like(labels, model.c.classes)]), precision)

    def predict(x: Tensor, time: Tensor) -> Tensor:
        known, unknown = both(torch.cat([x, x]), torch.cat([time, time])).chunk(2)      # 2 x (B, C, H, W)
        led = unknown + scale * (known - unknown)
        return torch.cat([led[:, :channels], known[:, channels:]], 1) if channels else led

    return predict


def ddim(predict: Predictor, x: Tensor, steps: int, eta: float = 0.0, fresh: Noise | None = None) -> Tensor:
    """Go from noise (B, C, H, W), at the last time, to samples: remove the noise, put back as much as the next time has.

    The times are evenly spread from STEPS - 1 to 0; after them comes the sample itself. With eta, part of the noise put back is
    `fresh`.
    """
    kept = signal_variance(torch.device("cpu"))
    times = torch.linspace(STEPS - 1, 0, steps, dtype=torch.float64).round().long() if steps > 1 else torch.tensor([STEPS - 1])
    signals = [*kept[times].tolist(), 1.0]          # the part of the variance that is signal, at each time
    for number, (time, a, after) in enumerate(zip(times.tolist(), signals, signals[1:], strict=False)):
        e = predict(x, torch.full((len(x),), time, device=x.device))    # (B, C, H, W)
        clean = (x - (1 - a) ** 0.5 * e) / a**0.5
        spread = eta * ((1 - after) / (1 - a) * (1 - a / after)) ** 0.5
        x = after**0.5 * clean + max(0.0, 1 - after - spread**2) ** 0.5 * e
        if spread and fresh is not None:
            x = x + spread * fresh(number)
    return x


def euler(predict: Predictor, x: Tensor, steps: int) -> Tensor:
    """Go from noise (B, C, H, W), at time 1, along the velocity to samples, at time 0."""
    for number in range(steps, 0, -1):
        time = torch.full((len(x),), STEPS * number / steps, device=x.device, dtype=x.dtype)
        x = x - predict(x, time) / steps
    return x
