"""A diffusion transformer: from a noisy latent, its time and its class it predicts the noise, or the flow's velocity.

Peebles and Xie 2023, "Scalable diffusion models with transformers" (arXiv:2212.09748), with adaLN-Zero blocks (section
3.2): the norms have no weights of their own; a linear map computes shift, scale and the gate of each residual branch from
the condition, time plus class. That map starts at zero, so every block starts as the identity. The noise, its schedule
and the prediction targets are in `diffusion.py`. Unlike the paper's model, this one has no learned variance.

Tensor parallelism cuts the modulation's weights, a third of the model's, and gathers the few shifts, scales and gates. With
sequence parallelism a rank modulates its own tokens only. The gradients of shifts, scales and gates are then sums over these
tokens, and the gather's backward, a reduce-scatter, adds them up over the ranks. The gradient of the condition, and so of the
time and class embeddings, is partial, too: each rank has the contribution of some features. It is completed once per step
(`Placement.partial_over`).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course.models import diffusion
from course.models.interface import Batch, Loss, Model, Rule
from course.models.layers import (
    MLP,
    TENSOR_PLAN,
    TOKEN_PLAN,
    Attention,
    Linear,
    PatchShape,
    SumOverTokens,
    to_fields,
    to_patches,
)
from course.utils import random

Pair = tuple[Tensor, Tensor]                        # passes from block to block: x (B, T, D) and the condition c (B, D)


@dataclass(frozen=True)
class DiTConfig(PatchShape):
    """A diffusion transformer: latents, patches, classes, and the training objective."""

    kind: str = "dit"                               # which model; it decides which settings there are
    latent: tuple[int, int, int] = (4, 32, 32)      # channels, height, width: a 256x256 image, 8 times smaller
    patch: int = 2                                  # points per side
    dim: int = 1152                                 # width: features per token between blocks
    depth: int = 28                                 # blocks
    heads: int = 16                                 # attention heads, which share the width
    mlp_ratio: float = 4.0                          # width of the MLP over dim
    classes: int = 1000                             # number of image labels
    label_drop: float = 0.1                         # probability of hiding the class, for classifier-free guidance
    objective: Literal["epsilon", "flow"] = "epsilon"       # predict the noise (the paper), or rectified flow's velocity

    @property
    def tokens(self) -> int:
        """T, the number of patches in a latent."""
        return self.latent[1] * self.latent[2] // self.patch**2


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:        # (B, T, D), 2 x (B, D)
    """Shift and scale the features of a sample's tokens; zeros change nothing."""
    return x * (1 + scale[:, None]) + shift[:, None]                    # (B, T, D)


def sinusoidal_embedding(t: Tensor, dim: int) -> Tensor:
    """Cosine and sine of each number at dim/2 frequencies, 1 down to almost 1/10000: (N,) -> (N, dim) float64.

    Vaswani et al. 2017 (arXiv:1706.03762), section 3.5.
    """
    half = torch.arange(dim // 2, dtype=torch.float64, device=t.device)
    angle = t[:, None] * torch.exp(-math.log(10_000) * half / len(half))        # (N, dim / 2)
    return torch.cat([angle.cos(), angle.sin()], 1)


def grid_positions(position: Tensor, columns: int, dim: int) -> Tensor:
    """Fixed position vectors: half the features embed a patch's row, half its column (`sinusoidal_embedding`). (T,) -> (T, D)."""
    return torch.cat([sinusoidal_embedding(position // columns, dim // 2), sinusoidal_embedding(position % columns, dim // 2)], 1)


class TimestepEmbedder(nn.Module):
    """Embed a time: 256 sinusoids, then two linear maps with SiLU between them."""

    WAVES = 256

    def __init__(self, dim: int):
        super().__init__()
        self.up = Linear(self.WAVES, dim)
        self.down = Linear(dim, dim)

    def forward(self, time: Tensor) -> Tensor:                          # (B,)
        x = sinusoidal_embedding(time, self.WAVES).to(self.up.weight.dtype)             # (B, 256)
        return self.down(F.silu(self.up(x)))                            # (B, D)


class Embed(nn.Module):
    """Map each patch to a token and add its position; map time and class to the condition."""

    def __init__(self, c: DiTConfig):
        super().__init__()
        self.columns = c.latent[2] // c.patch
        self.proj = Linear(c.latent[0] * c.patch**2, c.dim)
        self.time = TimestepEmbedder(c.dim)
        self.label = nn.Embedding(c.classes + 1, c.dim)                 # the last row: class unknown

    def forward(self, batch: Batch) -> Pair:                            # -> (B, T, D), (B, D)
        x = self.proj(batch["input"])                                   # (B, T, D)
        x = x + grid_positions(batch["position"][0], self.columns, x.shape[-1]).to(x.dtype)             # (B, T, D)
        return x, self.time(batch["time"]) + self.label(batch["label"])                 # (B, D)


def plain_norm(dim: int) -> nn.LayerNorm:
    """A LayerNorm without weights: `modulate` comes after it."""
    return nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)


class AdaLNBlock(nn.Module):
    """A transformer block whose norms and residual branches the condition modulates (adaLN-Zero)."""

    def __init__(self, dim: int, heads: int, hidden: int):
        super().__init__()
        self.norm1 = plain_norm(dim)
        self.attn = Attention(dim, heads)
        self.norm2 = plain_norm(dim)
        self.mlp = MLP(dim, hidden, approximate="tanh")             # as released checkpoints have it
        self.ada = Linear(dim, 6 * dim)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:                  # (B, T, D), (B, D)
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(F.silu(c)).chunk(6, 1)  # 6 x (B, D)
        x = x + gate1[:, None] * self.attn(modulate(self.norm1(x), shift1, scale1))     # (B, T, D)
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))   # (B, T, D)


class Head(nn.Module):
    """Map each token, modulated once more, to a patch of the prediction."""

    def __init__(self, c: DiTConfig):
        super().__init__()
        self.norm = plain_norm(c.dim)
        self.ada = Linear(c.dim, 2 * c.dim)
        self.proj = Linear(c.dim, c.latent[0] * c.patch**2)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:                  # (B, T, D), (B, D)
        shift, scale = self.ada(F.silu(c)).chunk(2, 1)                  # 2 x (B, D)
        return self.proj(modulate(self.norm(x), shift, scale))          # (B, T, P)


class MeanSquare(Loss):
    """Each sample's mean squared error over its `values` numbers: (sum over the samples, number of samples).

    Padding has the sample id -1 and weighs nothing.
    """

    def __init__(self, values: int):
        super().__init__()
        self.values = values                        # of the whole sample; a rank may have a part of its tokens
        self.sum_over_tokens = SumOverTokens()

    def forward(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:           # (B, T, P)
        squares = self.sum_over_tokens((output - batch["target"]).square().flatten(1).sum(1))                   # (B,)
        weight = self.weight(batch)                                                     # (B,)
        return (squares / self.values * weight).sum(), weight.sum()

    def weight(self, batch: Batch) -> Tensor:
        """1 for each real sample, 0 for padding, (B,)."""
        return (batch["sample"] >= 0).to(batch["target"].dtype)


# uses of random numbers for a sample in a step
NOISE, TIME, DROP = (random.key("dit", site) for site in ("noise", "time", "label drop"))


MODULATED_PLAN = {**TENSOR_PLAN, "ada": "gathered"}


class DiT(Model):
    """Predict the objective's target, patch by patch: (B, T, P) with P = channels · patch². `prepare` makes the noise."""

    tensor_plan = MODULATED_PLAN
    token_plan = TOKEN_PLAN

    def __init__(self, c: DiTConfig, seed: int = 0):
        super().__init__(c, seed)
        self.embed = Embed(c)
        self.blocks = nn.ModuleDict({str(i): AdaLNBlock(c.dim, c.heads, c.hidden) for i in range(c.depth)})
        self.head = Head(c)
        self.loss = MeanSquare(math.prod(c.latent))

    def init_plan(self) -> dict[str, Rule]:
        """Pattern of serial names -> standard deviation, "ones" or "zeros"; the first match counts.

        The modulation starts at zero, so that blocks start as the identity, and so does the head, so that the output starts at
        the noise's mean (section 3.2).
        """
        return {"*.bias": "zeros", "*.ada.weight": "zeros", "head.proj.weight": "zeros", "*": 0.02}

    def prepare(self, batch: Batch, step: Tensor) -> Batch:
        """Prepare a loader's batch, `latent` (B, C, H, W) and `label` (B,), for the model.

        Returns `input`, the noised latent, and `target` in patches (B, T, P); `time`, `label` and `sample` (B,); `position`
        (B, T). Noise, time and dropped labels depend on the seed, the step and the sample's id alone. In evaluation the step
        is 0 and no label is dropped.
        """
        sample, clean = batch["sample"], batch["latent"]
        keys = random.sample_keys(self.seed, step if self.training else torch.zeros_like(step), sample)         # (B,)
        time = diffusion.sample_times(self.c.objective, random.uniform(TIME, keys))     # (B,)
        value = torch.arange(clean[0].numel(), device=clean.device).view(clean.shape[1:])                       # (C, H, W)
        noise = random.normal(random.fold(NOISE, keys)[:, None, None, None], value, clean.dtype)                # (B, C, H, W)
        label = batch["label"]
        if self.training:
            label = label.where(random.uniform(DROP, keys) >= self.c.label_drop, self.c.classes)
        noised, target = diffusion.noisy_example(self.c.objective, clean, noise, time)  # 2 x (B, C, H, W)
        return {"sample": sample, "target": to_patches(target, self.c.patch), **self.inputs(noised, time, label)}

    def inputs(self, noised: Tensor, time: Tensor, label: Tensor) -> Batch:
        """The model's inputs from latents (B, C, H, W), their times (B,) and labels (B,); label `classes` means unknown."""
        position = torch.arange(self.c.tokens, device=noised.device).expand(len(noised), self.c.tokens)         # (B, T)
        return {"input": to_patches(noised, self.c.patch), "time": time, "label": label, "position": position}

    def forward(self, batch: Batch, x: Any = None) -> Any:
        """The output for a prepared batch. A pipeline stage, which lacks some parts, gets the previous one's output as `x`.

        A stage without a head returns a `Pair` for the next stage.
        """
        x, c = self.embed(batch) if self.embed is not None else x       # (B, T, D), (B, D)
        for block in self.blocks.values():
            x = block(x, c)                                             # (B, T, D)
        return (x, c) if self.head is None else self.head(x, c)         # (B, T, P)

    def fields(self, output: Tensor) -> Tensor:
        """The output as latents: (B, T, P) -> (B, C, H, W)."""
        return to_fields(output, self.c.latent[1:], self.c.patch)

    def example(self, samples: int, device: torch.device, first: int = 0) -> Batch:
        """A random batch in the shapes of a loader's: samples `first` and on, the same in every run."""
        each, sample = math.prod(self.c.latent), torch.arange(first, first + samples, device=device)
        counter = torch.arange(first * each, (first + samples) * each, device=device).view(samples, *self.c.latent)
        label = (random.uniform(random.key("example", "label"), sample) * self.c.classes).long()
        return {"latent": random.normal(random.key("example", "latent"), counter), "label": label, "sample": sample}
