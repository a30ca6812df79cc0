"""Figures of lesson 15: samples in rows, and loss curves compared with the spread of seeds."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from course.lab.figures.style import MARKS, label, panel
from course.utils.colors import BLUE, GRAY, ORANGE


def images(rows: Mapping[str, np.ndarray], columns: Sequence[object], title: str = "") -> Figure:
    """A row of gray images, (N, H, W) from -1 to 1, for each name; `columns` are the titles above."""
    figure = Figure(figsize=(1.4 + 0.62 * len(columns), 0.62 * len(rows) + 0.6), layout="constrained")
    axes: Any = figure.subplots(len(rows), len(columns), squeeze=False)
    for line, (name, pictures) in zip(axes, rows.items(), strict=True):
        for axis, picture in zip(line, pictures, strict=True):
            axis.imshow(picture, cmap="gray", vmin=-1, vmax=1, interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    for axis, column in zip(axes[0], columns, strict=True):
        axis.set_title(str(column), fontsize=9)
    figure.suptitle(title, fontsize=10)
    return figure


def curves_beside_seeds(x: Sequence[float], seeds: np.ndarray, curves: Mapping[str, Sequence[float]], y: str,
                        title: str = "") -> Figure:
    """Curves, (windows,) each, in percent relative to the first seed, over the band of all seeds, (seeds, windows)."""
    figure, axis = panel(6.5, 4.4)
    others = 100 * (seeds / seeds[0] - 1)
    deviation = 100 * seeds.std(0, ddof=1) / seeds[0]
    axis.fill_between(x, -deviation, deviation, color=GRAY, alpha=0.25, linewidth=0, label="one standard deviation of the seeds")
    for number, other in enumerate(others[1:]):
        axis.plot(x, other, color=GRAY, linewidth=0.9, linestyle=":", label="" if number else "other seeds")
    for (name, curve), (mark, color) in zip(curves.items(), cycle(MARKS)):
        axis.plot(x, 100 * (np.asarray(curve) / seeds[0] - 1), color=color, marker=mark, label=name)
    axis.axhline(0, color=GRAY, linewidth=0.8)
    label(axis, x="step", y=y, grid="major")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)          # outside, so that it hides no curve
    axis.set_title(title, fontsize=10)
    return figure


# of a branch, from left to right: what computes, and which of the block's vectors go in there
BRANCH = (("norm", ()), ("modulate", ("shift", "scale")), ("{}", ()), ("×", ("gate",)), ("+", ()))


def adaln_block() -> Figure:
    """The path of the tokens through an adaLN block, a row for each branch, and where the six vectors of the condition enter."""
    figure = Figure(figsize=(9, 4.7), layout="constrained")
    axis: Any = figure.subplots()
    for row, branch in enumerate(("attention", "MLP")):
        y = -2.0 * row
        axis.annotate("", (len(BRANCH) + 0.6, y), (-0.9, y), arrowprops={"arrowstyle": "->", "color": GRAY})
        axis.text(-1.0, y, "tokens" if row == 0 else "", ha="right", va="center", fontsize=10)
        end = len(BRANCH) - 1                        # the sum, which also gets what went around the branch
        axis.plot([-0.6, -0.6, end], [y, y - 0.5, y - 0.5], color=BLUE)
        axis.annotate("", (end, y - 0.2), (end, y - 0.52), arrowprops={"arrowstyle": "->", "color": BLUE})
        for place, (what, vectors) in enumerate(BRANCH):
            text = axis.text(place, y, what.format(branch), ha="center", va="center", fontsize=10,
                             bbox={"boxstyle": "round,pad=0.45", "facecolor": "white", "edgecolor": BLUE})
            text.set_zorder(3)
            for number, vector in enumerate(vectors):
                left = place + (number - (len(vectors) - 1) / 2) * 0.55
                axis.annotate(vector, (left, y + 0.27), (left, y + 0.95), ha="center", fontsize=9, color=ORANGE,
                              arrowprops={"arrowstyle": "->", "color": ORANGE})
    axis.text(-1.0, 1.05, "condition → SiLU → ada:\nsix vectors for each sample", ha="left", va="center", fontsize=9,
              color=ORANGE)
    axis.set_xlim(-1.9, len(BRANCH) + 0.7)
    axis.set_ylim(-2.9, 1.4)
    axis.set_axis_off()
    return figure
