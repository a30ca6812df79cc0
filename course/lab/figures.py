"""Figures of the lessons: pure functions from numbers to a matplotlib figure, in colours that the colour-blind tell apart."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course.pictures import FIELD

BLUE, ORANGE, GREEN, PURPLE, SKY, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#666666"
MARKS = [("o", BLUE), ("s", ORANGE), ("^", GREEN), ("D", PURPLE), ("v", SKY), ("P", GREY)]


def roofline(ceilings: Mapping[str, tuple[float, float]], points: Mapping[str, tuple[float, float]] | None = None,
             title: str = "") -> Figure:
    """FLOP/s against arithmetic intensity, both logarithmic.

    `ceilings`: machine -> (FLOP/s, bytes/s), drawn as a roof each. `points`: name -> (FLOPs a byte, FLOP/s), named in the
    legend, each with a mark of its own: names beside dots that lie close together would cover one another.
    """
    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axis = figure.subplots()
    intensity = np.logspace(-2, 4, 200)
    for (name, (peak, width)), dash in zip(ceilings.items(), cycle(("-", "--", "-."))):
        axis.loglog(intensity, np.minimum(peak, width * intensity), color=GREY, linestyle=dash, label=name)
        axis.axvline(peak / width, color=GREY, linestyle=":", linewidth=1)
    for (name, (x, y)), (mark, colour) in zip((points or {}).items(), cycle(MARKS)):
        axis.plot(x, y, mark, color=colour, label=name, linestyle="")
    axis.set_xlabel("arithmetic intensity (FLOPs a byte)")
    axis.set_ylabel("FLOP/s")
    axis.grid(alpha=0.3, which="both")
    axis.legend(loc="lower right")
    axis.set_title(title)
    return figure


def curves(lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], x: str, y: str, title: str = "",
           levels: Mapping[str, float] | None = None) -> Figure:
    """Lines, name -> (xs, ys), over one another; `levels` are horizontal lines to compare with."""
    figure = Figure(figsize=(6.5, 3.8), layout="constrained")
    axis = figure.subplots()
    for (name, (xs, ys)), (mark, colour) in zip(lines.items(), cycle(MARKS)):
        axis.plot(xs, ys, color=colour, label=name, marker=mark if len(xs) < 60 else "", markevery=1 + len(xs) // 15,
                  linewidth=1.5 if len(xs) < 100 else 0.9)
    for (name, level), dash in zip((levels or {}).items(), cycle(("--", ":", "-."))):
        axis.axhline(level, color=GREY, linestyle=dash, label=name)
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, level - 0.04 * (high - low)), max(high, level + 0.04 * (high - low)))    # off the frame
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)
    if len(lines) + len(levels or {}) > 5:           # too many to leave the lines room
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    else:
        axis.legend()
    axis.set_title(title)
    return figure


def patches(field: np.ndarray, side: int, title: str = "") -> Figure:
    """An (H, W) field with the grid of patches of `side` points, one of them marked: a patch becomes a token."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axis: Any = figure.subplots()
    axis.imshow(field, cmap=FIELD, interpolation="nearest")
    height, width = field.shape
    axis.set_xticks(np.arange(0, width, side) - 0.5, labels=[])
    axis.set_yticks(np.arange(0, height, side) - 0.5, labels=[])
    axis.grid(color="white", linewidth=0.8)
    axis.tick_params(length=0)
    axis.add_patch(Rectangle((side * (width // side // 2) - 0.5, side * (height // side // 3) - 0.5), side, side, fill=False,
                             edgecolor=ORANGE, linewidth=3))
    axis.set_title(title)
    return figure


def rungs(groups: Mapping[str, Mapping[str, float]], unit: str, title: str = "",
          predicted: Mapping[str, float] | None = None) -> Figure:
    """Group -> rung -> number: a panel for each group, all on one scale, with how many times its group's first each rung is.

    `predicted` of some rungs are diamonds on their lines.
    """
    figure = Figure(figsize=(9, 0.36 * sum(map(len, groups.values())) + 0.5 * len(groups) + 1), layout="constrained")
    axes: Any = figure.subplots(len(groups), 1, squeeze=False, sharex=True, height_ratios=[len(bars) for bars in groups.values()])
    most = max([*(value for bars in groups.values() for value in bars.values()), *(predicted or {}).values()])
    marks = []
    for axis, (group, bars) in zip(axes[:, 0], groups.items(), strict=True):
        for row, (name, value) in enumerate(bars.items()):
            axis.barh(row, value, height=0.7, color=BLUE if row else GREY)
            times = f",  {value / next(iter(bars.values())):.2f}×" if row else ""
            axis.text(value + 0.01 * most, row, f"{value:.3g}{times}", va="center", fontsize=9)
            if predicted and name in predicted:
                marks = axis.plot(predicted[name], row, "D", color=ORANGE, markeredgecolor="white", label="you said")
        axis.set_yticks(range(len(bars)), list(bars), fontsize=9)
        axis.set_ylim(len(bars) - 0.5, -0.5)
        axis.set_title(group, fontsize=10, loc="left")
    axes[-1, 0].set_xlim(0, 1.2 * most)
    axes[-1, 0].set_xlabel(unit)
    figure.suptitle(title, fontsize=10)
    if marks:
        figure.legend(handles=marks, loc="outside lower center", frameon=False, fontsize=9)
    return figure
