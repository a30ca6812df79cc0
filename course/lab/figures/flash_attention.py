"""Figures of lesson 19: which tiles FlashAttention reads, and how the running maximum and sum of an online softmax move."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from course.lab.figures.style import BLUE, GREY, ORANGE, label, panel
from course.lab.instruments.watched_memory import Accesses


def tile_order(accesses: Accesses, rows: int, columns: int, D: int) -> np.ndarray:
    """(blocks of queries, tiles of keys): the place of each tile's load among those of its program, from 1; 0 if it is not read.

    accesses: of a forward pass of one head, watched(q, k, ...), contiguous with heads of D. A program loads its queries first.
    """
    blocks = {program: offset // D // rows for program, tensor, offset in accesses.visits if tensor == 0}
    reads = [(blocks[program], offset // D // columns) for program, tensor, offset in accesses.visits if tensor == 1]
    order = np.zeros((1 + max(blocks.values()), 1 + max(tile for _, tile in reads)), dtype=int)
    for block, tile in reads:
        order[block, tile] = order[block].max() + 1
    return order


def tiles_read(order: np.ndarray, rows: int, columns: int) -> Figure:
    """A square for each tile of scores, with the number of its load in its program; tiles that no program reads are empty."""
    figure, axis = panel(5.6, 4.4)
    for block, tile in np.ndindex(order.shape):
        place = order[block, tile]
        diagonal = (tile + 1) * columns > block * rows + 1
        axis.add_patch(square(block, tile, "none" if not place else ORANGE if diagonal else BLUE))
        if place:
            axis.text(tile + 0.5, block + 0.5, str(place), ha="center", va="center", color="white", fontsize=11)
    axis.set(xlim=(0, order.shape[1]), ylim=(order.shape[0], 0), aspect="equal")
    axis.set_xticks(np.arange(order.shape[1]) + 0.5, [f"{tile * columns}" for tile in range(order.shape[1])])
    axis.set_yticks(np.arange(order.shape[0]) + 0.5, [f"{block * rows}" for block in range(order.shape[0])])
    label(axis, "first key of a tile", "first query of a program", f"{(order > 0).sum()} of {order.size} tiles are read")
    return figure


def square(block: int, tile: int, colour: str) -> Rectangle:
    """A tile's square."""
    return Rectangle((tile, block), 1, 1, facecolor=colour, edgecolor=GREY, linewidth=1)


def running_softmax(tops: Tensor, totals: Tensor, rows: Sequence[str]) -> Figure:
    """The maximum and the sum of each row after each tile. tops, totals: (tiles, rows)."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes: Any = figure.subplots(1, 2)
    tiles = range(1, len(tops) + 1)
    for i, (name, colour) in enumerate(zip(rows, (BLUE, ORANGE), strict=False)):
        axes[0].step(tiles, tops[:, i], where="mid", color=colour, marker="o", label=name)
        axes[1].step(tiles, totals[:, i], where="mid", color=colour, marker="o", label=name)
    label(axes[0], "tiles so far", "largest score so far", "running maximum", "major")
    label(axes[1], "tiles so far", "sum of exponentials, relative to it", "running sum", "major")
    axes[0].legend()
    return figure
