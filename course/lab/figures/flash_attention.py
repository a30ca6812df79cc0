"""Figures and tables of lesson 19: the tiles that FlashAttention reads, a running maximum and sum, recorded speeds."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from course.lab.figures.style import label, panel
from course.lab.instruments.watched_memory import Accesses
from course.utils.colors import BLUE, GRAY, ORANGE


def tile_order(accesses: Accesses, rows: int, columns: int, D: int) -> np.ndarray:
    """(blocks of queries, tiles of keys): the place of each tile's load among those of its program, from 1; 0 if it is not read.

    accesses: of a forward pass of one head, watched(q, k, ...), contiguous with heads of D. A program loads its queries first.
    """
    blocks = {visit.program: visit.first // D // rows for visit in accesses.visits if visit.tensor == 0}
    reads = [(blocks[visit.program], visit.first // D // columns) for visit in accesses.visits if visit.tensor == 1]
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


def square(block: int, tile: int, color: str) -> Rectangle:
    """A tile's square."""
    return Rectangle((tile, block), 1, 1, facecolor=color, edgecolor=GRAY, linewidth=1)


def running_softmax(tops: Tensor, totals: Tensor, rows: Sequence[str]) -> Figure:
    """The maximum and the sum of each row after each tile. tops, totals: (tiles, rows)."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes: Any = figure.subplots(1, 2)
    tiles = range(1, len(tops) + 1)
    for i, (name, color) in enumerate(zip(rows, (BLUE, ORANGE), strict=False)):
        axes[0].step(tiles, tops[:, i], where="mid", color=color, marker="o", label=name)
        axes[1].step(tiles, totals[:, i], where="mid", color=color, marker="o", label=name)
    label(axes[0], "tiles so far", "largest score so far", "running maximum", "major")
    label(axes[1], "tiles so far", "sum of exponentials, relative to it", "running sum", "major")
    axes[0].legend()
    return figure


def speeds(rows: Sequence[Mapping[str, Any]], kernel: str) -> dict[str, dict[str, float]]:
    """TFLOP/s of "forward" or "backward" by shape and who computes it, and the lesson's over flash's; rows: recorded ones."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["kernel"] == kernel and (row["who"] != "lesson" or row.get("best")):
            shape = f"heads of {row['head_dim']}, {row['tokens']:,} tokens{', causal' if row['causal'] else ''}"
            found.setdefault(shape, {})[row["who"]] = row["tflops"]
    return {shape: rates | {"lesson / flash": rates["lesson"] / rates["flash"]} for shape, rates in found.items()}


def configurations(rows: Sequence[Mapping[str, Any]], kernel: str, head_dim: int, tokens: int,
                   causal: bool) -> dict[str, dict[str, Any]]:
    """TFLOP/s and the compiler's report by configuration, the fastest first; those that do not fit are left out."""
    fitting = [row for row in rows if "programs_per_sm" in row and (row["kernel"], row["head_dim"], row["tokens"], row["causal"])
               == (kernel, head_dim, tokens, causal)]
    return {configuration_name(row): {
        "TFLOP/s": row["tflops"], "registers": row["registers"], "spilled": row["spills"], "shared KB": row["shared_kb"],
        "programs on an SM": row["programs_per_sm"], "warps on an SM": row["programs_per_sm"] * row["warps"],
        "limited by": row["limited_by"]} for row in sorted(fitting, key=lambda row: -row["tflops"])}


def configuration_name(row: Mapping[str, Any]) -> str:
    """A configuration in words."""
    limit = f", at most {row['most_registers']} registers" if row["most_registers"] else ""
    return f"{row['rows']} x {row['columns']}, {row['warps']} warps, {row['stages']} stages{limit}"
