"""Serial models, each a configuration and a module (`interface.Model`) that names its seams.

`MODELS` lists them. Your own model needs no entry here: its file calls `register`, and `COURSE_MODELS` names the file, or several
files separated by commas (`examples/side_vit.py`).
"""

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union

import torch
from pydantic import Discriminator, Tag

from course.models.dit import DiT, DiTConfig
from course.models.gpt import GPT, GPTConfig
from course.models.interface import Model
from course.models.vit import ViT, ViTConfig
from course.utils.errors import CourseError

__all__ = ["GPT", "KINDS", "MODELS", "DiT", "DiTConfig", "GPTConfig", "Model", "ModelConfig", "ViT", "ViTConfig", "build_model",
           "family_of", "kind_of", "register"]

FamilyConfig = ViTConfig | GPTConfig | DiTConfig
FAMILIES: dict[str, type[FamilyConfig]] = {"vit": ViTConfig, "gpt": GPTConfig, "dit": DiTConfig}
MODELS: dict[type[FamilyConfig], type[Model]] = {}        # configuration -> the model that it describes
KINDS: dict[str, type[FamilyConfig]] = {}                 # model.kind -> configuration


def register(config: type[FamilyConfig], model: type[Model]) -> None:
    """Register a model under the default `kind` of its configuration, so that `model.kind` selects it.

    The configuration is, or extends, `ViTConfig`, `GPTConfig` or `DiTConfig`: that determines which data the model reads, and as
    which model the planner predicts it. Raises `CourseError` if it extends none, or if another model has that kind.
    """
    if not (isinstance(config, type) and issubclass(config, FamilyConfig)):
        raise CourseError(f"{config} has to extend ViTConfig, GPTConfig or DiTConfig, which say what data a model reads")
    if KINDS.setdefault(config.kind, config) is not config:
        raise CourseError(f"two models are of the kind {config.kind}: {KINDS[config.kind].__name__} and {config.__name__}: "
                          "give yours another")
    MODELS[config] = model


register(ViTConfig, ViT)
register(GPTConfig, GPT)
register(DiTConfig, DiT)


def load_own_models(paths: str) -> None:
    """Run files that register models. paths: separated by commas. Raises `CourseError` if a file does not exist."""
    for path in filter(None, paths.split(",")):
        name = f"course_models_{Path(path).stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None or not Path(path).is_file():
            raise CourseError(f"COURSE_MODELS={path}: there is no Python file {Path(path).resolve()}: correct the path")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def kind_of(model: Any) -> str:
    """The kind of a model's configuration, a mapping or an object; "vit" if it has none."""
    return str(model.get("kind", "vit")) if isinstance(model, Mapping) else getattr(model, "kind", "vit")


def family_of(config: FamilyConfig) -> str:
    """The course's own model that a configuration belongs to or extends: "vit", "gpt" or "dit"."""
    return next(kind for kind, its_class in FAMILIES.items() if isinstance(config, its_class))


def build_model(config: FamilyConfig, seed: int = 0) -> Model:
    """Build the serial model on the meta device: names and shapes without memory, to be cut and then initialized."""
    if type(config) not in MODELS:
        raise CourseError(f"build_model knows no {type(config).__name__}: register its model (docs/contributors.md, A model)")
    with torch.device("meta"):
        return MODELS[type(config)](config, seed)


load_own_models(os.environ.get("COURSE_MODELS", ""))
if TYPE_CHECKING:
    ModelConfig = FamilyConfig
else:                                               # the type by which pydantic reads a section
    ModelConfig = Annotated[Union[tuple(Annotated[config, Tag(kind)] for kind, config in KINDS.items())],  # noqa: UP007
                            Discriminator(kind_of)]
