"""Trace a rank's forward pass: the output shape of each module, the collectives in between, and the rank's parameters.

`trace` runs on a rank of `ranks(n)`, or in one process for the serial model. `figures/who_holds.py` draws the result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from course import config, parallel
from course.data import train_loader
from course.parallel.placement import Box
from course.ranks.collective_trace import Seen, brought, called
from course.training.assemble import assemble


@dataclass(frozen=True)
class Event:
    """A module's output or a collective: its name, and the shape of the output or of the collective's input."""

    name: str                                        # "blocks.0.mlp.up", "all-reduce", "send to 1"
    shape: tuple[int, ...]
    collective: bool = False


@dataclass(frozen=True)
class Part:
    """The part of a serial model's tensor that a rank holds: a box, or if `flat` is set only that range of its elements."""

    name: str
    shape: tuple[int, ...]                           # of the serial model's tensor
    box: Box
    flat: tuple[int, int] | None = None


@dataclass(frozen=True)
class Held:
    """A rank's forward pass, its parameters, and the parts for which it holds optimizer states."""

    events: list[Event]
    parameters: list[Part]
    states: list[Part]


class Collectives(Seen):
    """Record collectives among the events."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self.events = events

    def seen(self, word: str, given: dict[str, Any]) -> None:
        """Record a collective."""
        shapes = [tuple(tensor.shape) for tensor in brought(word, given)]
        self.events.append(Event(called(word, given)[0], shapes[0] if shapes else (), collective=True))


def trace(preset: str, *settings: str) -> Held:
    """Assemble a training from a preset and settings, run one step on the CPU, and return what this rank held."""
    chosen = config.load(preset, ["train.device=cpu", "data.source=mock", *settings])
    world = parallel.join("cpu") if torch.distributed.is_initialized() else parallel.World()
    training = assemble(chosen, parallel.build_mesh(chosen.parallel, world))
    events: list[Event] = []
    for name, module in training.model.named_modules():
        module.register_forward_hook(note(name, events))
    batch = next(iter(train_loader(chosen, training.mesh.dp, world.device, 0, training.model.example)))
    with Collectives(events):
        training.step(batch)
    last = max((number for number, event in enumerate(events) if not event.collective), default=-1)
    placements = training.layout.placements
    states = [p for group in training.optimizer.param_groups for p in group["params"]]
    return Held(events[:last + 1], [part(placements[p]) for p in training.model.parameters() if p in placements],
                [part(placements[p]) for p in states if p in placements])


def note(name: str, events: list[Event]) -> Callable[[nn.Module, Any, Any], None]:
    """A forward hook that records a module's output shape."""
    def hook(module: nn.Module, given: Any, out: Any) -> None:
        if isinstance(out, Tensor):
            events.append(Event(name, tuple(out.shape)))

    return hook


def part(where: parallel.Placement) -> Part:
    """The part of a placement that can be sent to another process."""
    return Part(where.name, where.global_shape, where.box, where.flat)
