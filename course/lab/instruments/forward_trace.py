"""What a rank has while a model computes: the shape that each module puts out, the collectives between them, and its parameters.

`trace` runs in a rank of `ranks(n)`, or in one process for the serial model. `figures/who_holds.py` draws what it returns.
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
    """A module's output, or a collective: the name of either, and the shape of the tensor (for a collective what it brings)."""

    name: str                                        # "blocks.0.mlp.up", "all-reduce", "send to 1"
    shape: tuple[int, ...]
    collective: bool = False


@dataclass(frozen=True)
class Part:
    """What a rank holds of a tensor of the serial model: a box of it, of which only the elements of `flat` where that is set."""

    name: str
    shape: tuple[int, ...]                           # of the serial model's
    box: Box
    flat: tuple[int, int] | None = None


@dataclass(frozen=True)
class Held:
    """A rank's forward pass, its parameters, and the parts of them whose optimizer states it has."""

    events: list[Event]
    parameters: list[Part]
    states: list[Part]


class Collectives(Seen):
    """Notes collectives among the events."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self.events = events

    def seen(self, word: str, given: dict[str, Any]) -> None:
        """Note one."""
        shapes = [tuple(tensor.shape) for tensor in brought(word, given)]
        self.events.append(Event(called(word, given)[0], shapes[0] if shapes else (), collective=True))


def trace(preset: str, *settings: str) -> Held:
    """Assemble a training of a preset with these settings, run one step of it, and return what this rank has, on the CPU."""
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
    """A hook that notes a module's output."""
    def hook(module: nn.Module, given: Any, out: Any) -> None:
        if isinstance(out, Tensor):
            events.append(Event(name, tuple(out.shape)))

    return hook


def part(where: parallel.Placement) -> Part:
    """A placement without what cannot leave its process."""
    return Part(where.name, where.global_shape, where.box, where.flat)
