"""Serial models, each a config dataclass and a module that names its seams."""

import torch
from torch import nn

from course.models.vit import ViT, ViTConfig

__all__ = ["ViT", "ViTConfig", "build_model"]


def build_model(config: ViTConfig, seed: int = 0) -> nn.Module:
    """The serial model, on the meta device: shapes and names without memory, to be cut up and then initialised."""
    with torch.device("meta"):
        return ViT(config, seed)
