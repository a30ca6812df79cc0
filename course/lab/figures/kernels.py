"""Figures and tables of lesson 19: which program reads and writes which tile and when, recorded speeds."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from course.lab.figures.style import MARKS, label, panel
from course.lab.instruments.watched_memory import Accesses
from course.utils.colors import RANKS

OWN_WORDS = {"lesson": "this lesson", "compiled": "torch.compile"}


def touched_by(accesses: Accesses, tensor: int, x: Tensor) -> np.ndarray:
    """(R, C): which program touched each element of x (R, C), the watched tensor of this number; -1 if none did.

    Programs are numbered in the order in which they ran.
    """
    owner = np.full(x.untyped_storage().nbytes() // x.element_size(), -1)
    number = {program: i for i, program in enumerate(accesses.programs)}
    for visit in accesses.visits:
        if visit.tensor == tensor:
            owner[visit.elements] = number[visit.program]
    row, column = np.indices(x.shape)
    return owner[x.storage_offset() + row * x.stride(0) + column * x.stride(1)]


def tiles_of_programs(accesses: Accesses, matrices: Mapping[str, Tensor]) -> Figure:
    """A panel for each of these watched matrices, in their order: its elements by the program that touched them.

    Colors alternate from program to program, and each tile has its program's number.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes: Any = figure.subplots(1, len(matrices), squeeze=False)
    for tensor, (axis, (name, x)) in enumerate(zip(axes[0], matrices.items(), strict=True)):
        owner = touched_by(accesses, tensor, x)
        for program in range(len(accesses.programs)):
            place = np.argwhere(owner == program)
            if len(place):
                draw_tile(axis, place, program)
        axis.set(xlim=(0, x.shape[1]), ylim=(x.shape[0], 0))
        label(axis, "column", "row", f"{name}: {describe_visits(accesses, tensor)}")
    return figure


def draw_tile(axis: Any, place: np.ndarray, program: int) -> None:
    """Draw the elements of one program, (elements, 2), as a rectangle around them with the program's number."""
    top, left = place.min(0)
    height, width = place.max(0) + 1 - (top, left)
    axis.add_patch(Rectangle((left, top), width, height, facecolor=RANKS[program % len(RANKS)], edgecolor="white"))
    axis.text(left + width / 2, top + height / 2, str(program), ha="center", va="center", color="white", fontsize=9)


def describe_visits(accesses: Accesses, tensor: int) -> str:
    """How many elements of a tensor were read and written, in words."""
    counts = {"read": accesses.loads[tensor], "written": accesses.stores[tensor]}
    return ", ".join(f"{count:,} elements {verb}" for verb, count in counts.items() if count) or "untouched"


def accesses_over_time(accesses: Accesses, names: Sequence[str]) -> Figure:
    """Each load (circle) and store (square) in its order, in its program's row, in the color of its tensor."""
    figure, axis = panel(8, 0.28 * len(accesses.programs) + 1.6)
    number = {program: i for i, program in enumerate(accesses.programs)}
    for tensor, (name, (_, color)) in enumerate(zip(names, MARKS, strict=False)):
        for stored, mark, verb in ((False, "o", "read"), (True, "s", "write")):
            points = [(when, number[visit.program]) for when, visit in enumerate(accesses.visits)
                      if (visit.tensor, visit.stored) == (tensor, stored)]
            if points:
                axis.plot(*zip(*points, strict=True), mark, color=color, label=f"{verb} {name}", linestyle="")
    axis.locator_params(axis="x", integer=True)
    axis.set_yticks(range(len(accesses.programs)))
    axis.set_ylim(len(accesses.programs) - 0.5, -0.5)
    label(axis, "loads and stores so far", "program", grid="major")
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    return figure


def speeds(rows: Sequence[Mapping[str, Any]], kernel: str) -> dict[str, dict[str, float]]:
    """GB/s of an exercise's kernel by the size of its matrices and who computes it; rows: recorded ones."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["kernel"] == kernel:
            size = f"{row['rows']:,} x {row['columns']:,}"
            found.setdefault(size, {})[OWN_WORDS.get(row["who"], row["who"])] = row["gb_per_s"]
    return found
