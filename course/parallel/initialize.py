"""Initial parameter values: each element is a function of the seed, the parameter's serial name and the element's index."""

from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import Tensor, nn

from course.models import Model
from course.ops.storage import free_memory
from course.parallel.placement import Placement, Placements, box_shape, serial_placements
from course.utils import random
from course.utils.errors import CourseError

M = TypeVar("M", bound=Model)


def initialize(model: Model, placements: Placements, seed: int, device: torch.device, dtype: torch.dtype = torch.float32,
               noise: float = 0.0, later: bool = False) -> None:
    """Allocate and initialize every parameter of a model on the meta device; each stays the same object.

    The model's `init_plan()` maps patterns of serial names to a standard deviation, "ones", "zeros" or `Uniform`; the first
    match counts. noise: a standard deviation to use instead of "zeros". A rank allocates only its own part: a box, or a flat
    range of one. later: trainable parameters get a device and a dtype, but no memory: `initial_values` draws shares of them.
    Raises `CourseError` for a parameter without a rule, and for buffers: layouts and checkpoints support none.
    """
    for name, _ in model.named_buffers():
        raise CourseError(f"{type(model).__name__} has a buffer, {name}, and layouts know parameters alone: compute it in "
                          "forward, or make it a parameter with requires_grad_(False)")
    for parameter in model.parameters():
        if later and parameter.requires_grad:
            value = torch.empty(parameter.shape, dtype=dtype, device=device)
            free_memory(value)
        else:
            value = initial_values(model, placements[parameter], seed, device, noise).view(parameter.shape).to(dtype)
        give_memory(parameter, value)


def initial_values(model: Model, where: Placement, seed: int, device: torch.device, noise: float = 0.0) -> Tensor:
    """The initial values of a placement's elements, in float64. Raises `CourseError` for a parameter without a rule."""
    rule = next((rule for pattern, rule in model.init_plan().items() if fnmatchcase(where.name, pattern)), None)
    if rule is None:
        raise CourseError(f"no rule in {type(model).__name__}.init_plan() fits parameter {where.name}: add one, "
                          f"such as '{where.name}': 0.02")
    return first_value(noise if noise and rule == "zeros" else rule, random.key(seed, "weights", where.name), where, device)


def initialize_serial(model: M, seed: int, device: torch.device, dtype: torch.dtype = torch.float32) -> M:
    """Initialize a model that this process holds whole, as `initialize` does, and return it."""
    initialize(model, serial_placements(model), seed, device, dtype)
    return model


def give_memory(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter on the meta device the memory and device of `value`; it stays the same object."""
    torch.utils.swap_tensors(parameter, nn.Parameter(value, parameter.requires_grad))


def first_value(rule: float | str | random.Uniform, key: int, where: Placement, device: torch.device) -> Tensor:
    """The initial values of this rank's part of a parameter, in float64: its box, or the flat range of the box."""
    shape = box_shape(where.box) if where.flat is None else (where.flat[1] - where.flat[0],)
    if isinstance(rule, str):
        return torch.full(shape, {"zeros": 0.0, "ones": 1.0}[rule], dtype=torch.float64, device=device)
    element = random.element_index(where.global_shape, where.box, device, where.flat)
    if isinstance(rule, random.Uniform):
        return rule.bound * (2 * random.uniform(key, element, torch.float64) - 1)
    return rule * random.normal(key, element, torch.float64)
