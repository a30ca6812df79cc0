"""Figures of which rank holds and sends what: parameters, optimizer states and activations.

They draw what `instruments/forward_trace.trace` recorded on real ranks. Only which part of an activation a rank has is not
recorded: rank r is drawn with the r-th part, which holds along one axis without zigzag.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course.lab.instruments.forward_trace import Event, Held, Part
from course.utils.colors import COLLECTIVES, GRAY, RANKS

CELLS = 48                                           # maximum squares per side in the picture of a tensor


def held_share(parts: Sequence[Part]) -> np.ndarray:
    """The share that these parts cover of the serial tensor, in at most 48 x 48 squares, (rows, columns)."""
    shape = parts[0].shape
    mask = np.zeros(shape, dtype=bool)
    for part in parts:
        box = np.zeros([stop - start for start, stop in part.box], dtype=bool)
        first, last = part.flat or (0, box.size)
        box.reshape(-1)[first:last] = True
        mask[tuple(slice(*side) for side in part.box)] |= box
    matrix = mask.reshape(-1, shape[-1]) if len(shape) > 1 else mask.reshape(1, -1)
    for dim in (0, 1):
        edges = np.linspace(0, matrix.shape[dim], min(CELLS, matrix.shape[dim]) + 1).astype(int)
        matrix = np.add.reduceat(matrix.astype(float), edges[:-1], axis=dim) / np.diff(edges).reshape(
            (-1, 1) if dim == 0 else (1, -1))
    return matrix


def parameters(ranks: Sequence[Held], names: Mapping[str, str], of: str = "parameters", title: str = "") -> Figure:
    """A row per rank, a column per tensor (label -> name): its outline, and in color the part that the rank holds.

    of: "parameters", or "states" for the parameters whose optimizer states the rank holds.
    """
    figure = Figure(figsize=(1.5 + 1.15 * len(names), 0.4 + 1.05 * len(ranks)), layout="constrained")
    axes: Any = figure.subplots(len(ranks), len(names), squeeze=False)
    for rank, (held, color) in enumerate(zip(ranks, cycle(RANKS))):
        for axis, (label, name) in zip(axes[rank], names.items(), strict=True):
            parts = [part for part in getattr(held, of) if part.name == name]
            share = held_share(parts) if parts else np.zeros((1, 1))
            rows, columns = share.shape
            axis.imshow(rgba(color, share), extent=(0, columns, rows, 0), aspect="auto", interpolation="nearest")
            axis.set(xticks=[], yticks=[], facecolor="white")
            axis.set_xlabel(f"{share.mean():.0%}", fontsize=8, labelpad=2)
            if rank == 0:
                axis.set_title(label, fontsize=8)
        axes[rank, 0].set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center", fontsize=10)
    figure.suptitle(title, fontsize=10)
    return figure


def rgba(color: str, share: np.ndarray) -> np.ndarray:
    """(rows, columns, 4): a color with the share as opacity."""
    red, green, blue = (int(color[place:place + 2], 16) / 255 for place in (1, 3, 5))
    return np.stack([np.full_like(share, value) for value in (red, green, blue)] + [0.85 * share], axis=-1)


def chosen(events: Sequence[Event], names: Mapping[str, str]) -> list[tuple[str, Event]]:
    """Select the events to draw: the named modules (label -> name), and collectives between, just before and just after.

    It leaves out receives, because the sending rank shows them.
    """
    labels = {name: label for label, name in names.items()}
    places = [place for place, event in enumerate(events) if event.name in labels and not event.collective]
    first, last = places[0], places[-1]
    while first and events[first - 1].collective:
        first -= 1
    while last + 1 < len(events) and events[last + 1].collective:
        last += 1
    return [(labels.get(event.name, event.name), event) for event in events[first:last + 1]
            if event.name in labels or (event.collective and not event.name.startswith("recv"))]


def forward(serial: Held, ranks: Sequence[Held], names: Mapping[str, str], title: str = "") -> Figure:
    """The forward pass from left to right, a row per rank. Each activation is the outline of the serial model's, tokens
    downwards and features across, with the rank's part filled. Bars across all ranks are collectives, arrows are messages.

    names: label -> name of the modules to show.
    """
    whole = {event.name: event.shape for event in serial.events}
    rows = [chosen(held.events, names) for held in ranks]
    figure = Figure(figsize=(1.2 + 0.95 * len(rows[0]), 0.9 + 1.15 * len(ranks)), layout="constrained")
    axis: Any = figure.subplots()
    for rank, (row, color) in enumerate(zip(rows, cycle(RANKS))):
        for place, (label, event) in enumerate(row):
            if event.collective:
                draw_collective(axis, place, rank, len(ranks), event)
                continue
            draw_activation(axis, place, rank, event.shape, whole[event.name], color)
            if rank == 0:
                axis.text(place + 0.5, -0.55, label, ha="center", va="bottom", fontsize=9)
    axis.set_xlim(0, len(rows[0]))
    axis.set_ylim(len(ranks) - 0.3, -0.85)
    axis.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
    axis.set_xticks([])
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)
    axis.set_title(title, fontsize=10)
    return figure


def draw_collective(axis: Any, place: float, rank: int, ranks: int, event: Event) -> None:
    """Draw a collective once, as a bar across all ranks with a rank's input shape; or a send as an arrow between ranks."""
    kind, *target = event.name.split()
    if kind == "send":
        to = int(target[-1])
        axis.annotate("", (place + 0.62, to), (place + 0.38, rank), arrowprops={
            "arrowstyle": "->", "color": COLLECTIVES[kind], "linewidth": 1.5, "connectionstyle": "arc3,rad=-0.15"})
    elif rank == 0:
        axis.add_patch(Rectangle((place + 0.32, -0.42), 0.36, ranks - 0.16, facecolor=COLLECTIVES.get(kind, GRAY), alpha=0.5))
        axis.text(place + 0.5, ranks / 2 - 0.5, f"{event.name}\n{' × '.join(map(str, event.shape))}", rotation=90, ha="center",
                  va="center", fontsize=8)


def tokens_and_features(shape: tuple[int, ...]) -> tuple[int, int]:
    """The numbers of tokens and features of an activation (batch, tokens, features) or (batch, heads, tokens, head_dim)."""
    return (shape[2], shape[1] * shape[3]) if len(shape) == 4 else (shape[-2], shape[-1])


def draw_activation(axis: Any, place: float, rank: int, shape: tuple[int, ...], whole: tuple[int, ...], color: str) -> None:
    """Draw the outline of the whole activation in a rank's row, with the rank's part filled."""
    (tokens, features), (all_tokens, all_features) = tokens_and_features(shape), tokens_and_features(whole)
    left, top, side = place + 0.14, rank - 0.36, 0.72
    down, across = side * tokens / all_tokens, side * features / all_features
    first_row, first_column = (rank * part % side if part < side else 0.0 for part in (down, across))     # the rank's part
    axis.add_patch(Rectangle((left + first_column, top + first_row), across, down, facecolor=color, alpha=0.85))
    axis.add_patch(Rectangle((left, top), side, side, fill=False, edgecolor=GRAY, linewidth=1))
    axis.text(place + 0.5, rank + 0.42, f"{tokens} × {features}", ha="center", va="top", fontsize=7)
