"""A model of one's own, in one file: a ViT whose blocks compute attention and MLP side by side, from one norm.

    COURSE_MODELS=examples/side_vit.py course verify examples/side_vit.yaml parallel.tp=2

Dehghani et al. 2023 (arXiv:2302.05442) for the block. Everything else is the ViT's; `course/models/interface.py` says what a
layout asks of a model that shares less. Nothing here knows of ranks: the plan of the ViT names the linears by their ends.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from course.models import ViT, ViTConfig, register
from course.models.interface import Batch
from course.models.layers import MLP, Attention, Dropout, DropPath


@dataclass(frozen=True)
class SideViTConfig(ViTConfig):
    """The settings of a ViT."""

    kind: str = "side_vit"


class SideBlock(nn.Module):
    """Attention and MLP of the same norm, both added to the input. Its linears have the names that `TENSOR_PLAN` knows."""

    def __init__(self, dim: int, heads: int, hidden: int, name: str, dropout: float = 0.0, drop_path: float = 0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.mlp = MLP(dim, hidden)
        self.drop, self.path = Dropout(dropout, f"{name}.drop"), DropPath(drop_path, f"{name}.path")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:               # (B, T, D)
        y = self.norm1(x)                                               # (B, T, D)
        return x + self.path(self.drop(self.attn(y) + self.mlp(y), batch), batch)       # (B, T, D)


class SideViT(ViT):
    """The ViT with these blocks."""

    def __init__(self, c: SideViTConfig, seed: int = 0):
        super().__init__(c, seed)
        for i, name in enumerate(self.blocks):
            self.blocks[name] = SideBlock(c.dim, c.heads, c.hidden, f"blocks.{name}", c.dropout,
                                          c.drop_path * i / max(1, c.depth - 1))


register(SideViTConfig, SideViT)
