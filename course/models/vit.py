"""A vision transformer that maps the state of the atmosphere to the state some hours later.

Dosovitskiy et al. 2020 (arXiv:2010.11929) for the architecture; the weather set-up (patches of all
channels in, patches of all channels out, relative L2 loss) is that of the ERA5 course data.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from course import random
from course.models.layers import TENSOR_PLAN, Block

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class ViTConfig:
    kind: Literal["vit"] = "vit"
    grid: tuple[int, int] = (360, 720)              # latitudes, longitudes
    channels: int = 20                              # in and out
    patch: int = 8                                  # points on a side
    dim: int = 384
    depth: int = 12
    heads: int = 8
    mlp_ratio: float = 4.0                          # width of the MLP over dim
    dropout: float = 0.0                            # after attention and MLP
    drop_path: float = 0.0                          # stochastic depth: this at the last block, rising from 0 linearly
    residual: bool = False                          # predict the change and add the input; the reference predicts the state

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] // self.patch**2


class Embed(nn.Module):
    """Cut the fields into patches, map each to a token, add its learned position."""

    def __init__(self, c: ViTConfig):
        super().__init__()
        self.patch = c.patch
        self.proj = nn.Linear(c.channels * c.patch**2, c.dim)
        self.pos = nn.Parameter(torch.empty(1, c.tokens, c.dim))

    def forward(self, x: Tensor) -> Tensor:                             # (B, C, H, W)
        B, C, H, W = x.shape
        p = self.patch
        x = x.view(B, C, H // p, p, W // p, p).permute(0, 2, 4, 1, 3, 5)  # (B, H/p, W/p, C, p, p)
        return self.proj(x.reshape(B, -1, C * p * p)) + self.pos        # (B, T, D)


class Head(nn.Module):
    """Map each token to a patch of all channels and lay the patches out as fields."""

    def __init__(self, c: ViTConfig):
        super().__init__()
        self.patch, self.grid, self.channels = c.patch, c.grid, c.channels
        self.norm = nn.LayerNorm(c.dim)
        self.proj = nn.Linear(c.dim, c.channels * c.patch**2)

    def forward(self, x: Tensor) -> Tensor:                             # (B, T, D)
        (H, W), C, p = self.grid, self.channels, self.patch
        x = self.proj(self.norm(x)).view(-1, H // p, W // p, C, p, p)   # (B, H/p, W/p, C, p, p)
        return x.permute(0, 3, 1, 4, 2, 5).reshape(-1, C, H, W)         # (B, C, H, W)


class RelativeL2(nn.Module):
    """Each sample's error norm over its target's norm: (sum over the samples, number of samples).

    Padding has the sample id -1 and weighs nothing.
    """

    def forward(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:           # (B, C, H, W)
        target = batch["target"]
        error = (output - target).flatten(1).norm(dim=1)                                # (B,)
        weight = self.weight(batch)                                                     # (B,)
        size = target.flatten(1).norm(dim=1).where(weight > 0, 1.0)                     # (B,) padding is all zeros
        return (error / size * weight).sum(), weight.sum()

    def weight(self, batch: Batch) -> Tensor:
        """1 for each real sample, 0 for padding, (B,)."""
        return (batch["sample"] >= 0).to(batch["target"].dtype)


class ViT(nn.Module):
    """(B, C, H, W) -> (B, C, H, W). A batch holds `input`, `target` and `sample`."""

    tensor_plan = TENSOR_PLAN

    def __init__(self, c: ViTConfig, seed: int = 0):
        super().__init__()
        self.c, self.seed = c, seed
        self.embed = Embed(c)
        self.blocks = nn.ModuleDict({
            str(i): Block(c.dim, c.heads, int(c.dim * c.mlp_ratio), c.dropout,
                          c.drop_path * i / max(1, c.depth - 1), f"blocks.{i}")
            for i in range(c.depth)})
        self.head = Head(c)
        self.loss = RelativeL2()

    def init_plan(self) -> dict[str, float | str]:
        """Pattern of serial names -> standard deviation, "ones" or "zeros"; the first that fits counts."""
        plan: dict[str, float | str] = {"*norm*.weight": "ones", "*.bias": "zeros"}
        if self.c.residual:
            plan["head.proj.weight"] = "zeros"      # start as persistence
        return plan | {"*": 0.02}

    def prepare(self, batch: Batch, step: Tensor) -> Batch:
        """In training with dropout, add one random key for each sample."""
        if self.training and (self.c.dropout or self.c.drop_path):
            return batch | {"keys": random.sample_keys(self.seed, step, batch["sample"])}
        return batch

    def forward(self, batch: Batch) -> Tensor:
        x = self.embed(batch["input"])                                  # (B, T, D)
        for block in self.blocks.values():
            x = block(x, batch.get("keys"))                             # (B, T, D)
        x = self.head(x)                                                # (B, C, H, W)
        return batch["input"] + x if self.c.residual else x

    def example(self, samples: int, device: torch.device) -> Batch:
        """A batch of random numbers in the right shapes, the same in every run."""
        count = samples * self.c.channels * self.c.grid[0] * self.c.grid[1]
        shape = (samples, self.c.channels, *self.c.grid)
        counter = torch.arange(count, device=device).view(shape)
        input, target = (random.normal(random.key("example", part), counter) for part in ("input", "target"))
        return {"input": input, "target": target, "sample": torch.arange(samples, device=device)}
