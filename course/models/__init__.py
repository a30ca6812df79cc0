"""Serial models, each a config dataclass and a module that names its seams."""

import torch
from torch import nn

from course.models.dit import DiT, DiTConfig
from course.models.gpt import GPT, GPTConfig
from course.models.vit import ViT, ViTConfig

__all__ = ["GPT", "DiT", "DiTConfig", "GPTConfig", "ViT", "ViTConfig", "build_model"]


def build_model(config: ViTConfig | GPTConfig | DiTConfig, seed: int = 0) -> nn.Module:
    """The serial model, on the meta device: shapes and names without memory, to be cut up and then initialised."""
    with torch.device("meta"):
        match config:
            case GPTConfig():
                return GPT(config, seed)
            case DiTConfig():
                return DiT(config, seed)
            case _:
                return ViT(config, seed)
