"""Serial models, each a config dataclass and a module that names its seams."""

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Discriminator, Tag
from torch import nn

from course.models.dit import DiT, DiTConfig
from course.models.gpt import GPT, GPTConfig
from course.models.vit import ViT, ViTConfig
from course.utils.errors import CourseError

__all__ = ["GPT", "KINDS", "DiT", "DiTConfig", "GPTConfig", "Model", "ViT", "ViTConfig", "build_model", "kind_of"]

KINDS: dict[str, type] = {"vit": ViTConfig, "gpt": GPTConfig, "dit": DiTConfig}


def kind_of(model: Any) -> str:
    """The kind of a model's configuration, of plain values or built: a ViT if it does not say."""
    return str(model.get("kind", "vit")) if isinstance(model, Mapping) else getattr(model, "kind", "vit")


Model = Annotated[Annotated[ViTConfig, Tag("vit")] | Annotated[GPTConfig, Tag("gpt")] | Annotated[DiTConfig, Tag("dit")],
                  Discriminator(kind_of)]


def build_model(config: Model, seed: int = 0) -> nn.Module:
    """The serial model, on the meta device: shapes and names without memory, to be cut up and then initialised."""
    with torch.device("meta"):
        match config:
            case GPTConfig():
                return GPT(config, seed)
            case DiTConfig():
                return DiT(config, seed)
            case ViTConfig():
                return ViT(config, seed)
    raise CourseError(f"build_model knows no {type(config).__name__}: add a line for it here, and to Model and KINDS above it "
                      "(docs/contributors.md, A model)")
