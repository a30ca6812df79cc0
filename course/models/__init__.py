"""Serial models, each a config dataclass and a module that names its seams."""

import torch
from torch import nn

from course.errors import CourseError
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
            case ViTConfig():
                return ViT(config, seed)
    raise CourseError(f"build_model knows no {type(config).__name__}: add a line for it here, and to Model and KINDS of "
                      "course/config.py (docs/contributors.md, A model)")
