"""A vision transformer that maps the state of the atmosphere to the state some hours later.

The architecture is from Dosovitskiy et al. 2020 (arXiv:2010.11929). The weather setup (patches of all
channels in, patches of all channels out, relative L2 loss) follows NERSC's course "Deep Learning at
Scale". The preset vit-reference also has the details of its model; docs/using.md lists them.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from course.models.interface import Batch, Loss, Model, Rule
from course.models.layers import (
    TENSOR_PLAN,
    TOKEN_PLAN,
    Block,
    Linear,
    PatchShape,
    SampleNorm,
    to_fields,
    to_patches,
)
from course.utils import random


@dataclass(frozen=True)
class ViTConfig(PatchShape):
    """A weather transformer: grid, channels, patches."""

    kind: str = "vit"                               # which model; it decides which settings there are
    grid: tuple[int, int] = (360, 720)              # latitudes, longitudes
    channels: int = 20                              # of input and output
    patch: int = 8                                  # grid points per side
    dim: int = 384                                  # width: features per token between blocks
    depth: int = 12                                 # blocks
    heads: int = 8                                  # attention heads, which share the width
    mlp_ratio: float = 4.0                          # width of the MLP over dim
    dropout: float = 0.0                            # after attention and MLP
    drop_path: float = 0.0                          # stochastic depth: rises linearly from 0 to this at the last block
    residual: bool = False                          # predict the change and add the input; the reference predicts the state
    norm_eps: float = 1e-5                          # added to variances in norms; the reference has 1e-6
    head_bias: bool = True                          # bias of the last linear map; the reference has none
    head_order: Literal["channel_first", "channel_last"] = "channel_first"     # of a patch's values in the head: (channel,
                                                    # row, column), or the reference's (row, column, channel)
    embed_init: Literal["normal", "uniform"] = "normal"     # of the patch embedding: as all others, or PyTorch's for convolutions

    @property
    def tokens(self) -> int:
        """T, the number of patches in a field."""
        return self.grid[0] * self.grid[1] // self.patch**2


class Embed(nn.Module):
    """Map each patch to a token and add the learned vector of its position."""

    def __init__(self, c: ViTConfig):
        super().__init__()
        self.proj = Linear(c.channels * c.patch**2, c.dim)
        self.pos = nn.Parameter(torch.empty(1, c.tokens, c.dim))

    def forward(self, batch: Batch) -> Tensor:
        pos = self.pos.index_select(1, batch["position"][0])            # (1, T, D)
        return self.proj(batch["input"]) + pos                          # (B, T, D)


class Head(nn.Module):
    """Map each token to a patch of all channels."""

    def __init__(self, c: ViTConfig):
        super().__init__()
        self.c = c
        self.norm = nn.LayerNorm(c.dim, c.norm_eps)
        self.proj = Linear(c.dim, c.channels * c.patch**2, bias=c.head_bias)

    def forward(self, x: Tensor) -> Tensor:                             # (B, T, D)
        x = self.proj(self.norm(x))                                     # (B, T, P)
        if self.c.head_order == "channel_last":
            x = x.unflatten(-1, (-1, self.c.channels)).transpose(-1, -2).flatten(-2)    # (B, T, P), channels first
        return x


class RelativeL2(Loss):
    """Each sample's error norm over its target's norm: (sum over the samples, number of samples).

    Padding has the sample id -1 and weighs nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = SampleNorm()

    def forward(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:           # (B, T, P)
        target = batch["target"]                                                        # (B, T, P)
        error = self.norm(output - target)                                              # (B,)
        weight = self.weight(batch)                                                     # (B,)
        size = self.norm(target).where(weight > 0, 1.0)                                 # (B,) padding is all zeros
        return (error / size * weight).sum(), weight.sum()

    def weight(self, batch: Batch) -> Tensor:
        """1 for each real sample, 0 for padding, (B,)."""
        return (batch["sample"] >= 0).to(batch["target"].dtype)


class ViT(Model):
    """A forecast, patch by patch: (B, T, P) -> (B, T, P) with P = channels · patch². `prepare` cuts the patches."""

    tensor_plan = TENSOR_PLAN
    token_plan = TOKEN_PLAN

    def __init__(self, c: ViTConfig, seed: int = 0):
        super().__init__(c, seed)
        self.embed = Embed(c)
        self.blocks = nn.ModuleDict({
            str(i): Block(c.dim, c.heads, c.hidden, f"blocks.{i}",
                          c.dropout, c.drop_path * i / max(1, c.depth - 1), norm_eps=c.norm_eps)
            for i in range(c.depth)})
        self.head = Head(c)
        self.loss = RelativeL2()

    def init_plan(self) -> dict[str, Rule]:
        """Pattern of serial names -> standard deviation, "ones", "zeros" or a range; the first match counts."""
        plan: dict[str, Rule] = {}
        if self.c.embed_init == "uniform":          # He et al. 2015 with PyTorch's a = sqrt(5), and the same for the bias
            plan["embed.proj.*"] = random.Uniform((self.c.channels * self.c.patch**2) ** -0.5)
        plan |= {"*norm*.weight": "ones", "*.bias": "zeros"}
        if self.c.residual:
            plan["head.proj.weight"] = "zeros"      # start as persistence
        return plan | {"*": 0.02}

    def prepare(self, batch: Batch, step: Tensor) -> Batch:
        """Prepare a loader's batch: `input` and `target` in patches, (B, T, P), `position`, (B, T), and `sample`, (B,).

        In training with dropout or stochastic depth also `keys`, one random key per sample, (B,).
        """
        sample, T = batch["sample"], self.c.tokens
        ready = {"sample": sample, "position": torch.arange(T, device=sample.device).expand(len(sample), T)}
        ready |= {name: to_patches(batch[name], self.c.patch) for name in ("input", "target") if name in batch}
        if self.training and (self.c.dropout or self.c.drop_path):
            ready["keys"] = random.sample_keys(self.seed, step, sample)
        return ready

    def forward(self, batch: Batch, x: Any = None) -> Any:
        """The output for a prepared batch. A pipeline stage, which lacks some parts, gets the previous one's output as `x`."""
        if self.embed is not None:
            x = self.embed(batch)                                       # (B, T, D)
        for block in self.blocks.values():
            x = block(x, batch)                                         # (B, T, D)
        if self.head is None:
            return x
        x = self.head(x)                                                # (B, T, P)
        return batch["input"] + x if self.c.residual else x

    def fields(self, output: Tensor) -> Tensor:
        """The output on the grid: (B, T, P) -> (B, C, H, W)."""
        return to_fields(output, self.c.grid, self.c.patch)

    def example(self, samples: int, device: torch.device, first: int = 0) -> Batch:
        """A random batch in the shapes of a loader's: samples `first` and on, the same in every run."""
        shape = (samples, self.c.channels, *self.c.grid)
        each = torch.Size(shape[1:]).numel()
        counter = torch.arange(first * each, (first + samples) * each, device=device).view(shape)
        input, target = (random.normal(random.key("example", part), counter) for part in ("input", "target"))
        return {"input": input, "target": target, "sample": torch.arange(first, first + samples, device=device)}
