"""Shared style and basic plots of the lessons' figures; their colors are in `course/utils/colors.py`."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course.utils.colors import AXES, BLUE, GRAY, GREEN, MEMORY, ORANGE, PURPLE, SKY, field_map

MARKS = [("o", BLUE), ("s", ORANGE), ("^", GREEN), ("D", PURPLE), ("v", SKY), ("P", GRAY)]


def panel(width: float, height: float) -> tuple[Figure, Any]:
    """A figure of this size in inches, and its only axis."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def label(axis: Any, x: str = "", y: str = "", title: str = "", grid: Literal["", "major", "both"] = "") -> None:
    """Label an axis, with a title and a pale grid."""
    axis.set(xlabel=x, ylabel=y)
    axis.set_title(title, fontsize=10)
    if grid:
        axis.grid(alpha=0.3, which=grid)


def name_rows(axis: Any, names: Iterable[str], size: int = 10) -> None:
    """Name the rows of horizontal bars, the first at the top."""
    words = list(names)
    axis.set_yticks(range(len(words)), words, fontsize=size)
    axis.set_ylim(len(words) - 0.5, -0.5)


def stacked(bars: Mapping[str, Mapping[str, float]], x: str, title: str = "",
            limits: Mapping[str, float] | None = None) -> Figure:
    """A stacked horizontal bar per name, with its sum; `limits` are vertical lines to stay below. Mesh axes and kinds of memory
    have colors of their own."""
    figure, axis = panel(8, 0.36 * len(bars) + 1.6)
    left = [0.0] * len(bars)
    known = {**AXES, **MEMORY}
    for part, (_, other) in zip(dict.fromkeys(part for row in bars.values() for part in row), cycle(MARKS)):
        widths = [row.get(part, 0.0) for row in bars.values()]
        axis.barh(range(len(bars)), widths, left=left, color=known.get(part, other), edgecolor="white", label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        axis.annotate(f"{total:.3g}", (total, row), (4, 0), textcoords="offset points", va="center", fontsize=9, zorder=3,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})        # above the limit lines
    name_rows(axis, bars)
    for name, limit in (limits or {}).items():
        axis.axvline(limit, color=GRAY, linestyle="--")
        axis.text(limit, -0.72, f"{name} ", fontsize=8, ha="right", va="center", color=GRAY)
        axis.set_ylim(top=-1.0)
    axis.set_xlim(0, 1.15 * max([*left, *(limits or {}).values()]))
    label(axis, x=x, title=title)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


def bars(values: Mapping[str, float], unit: str, title: str = "") -> Figure:
    """A horizontal bar per name, with its value."""
    figure, axis = panel(8, 0.36 * len(values) + 1.2)
    bar_rows(axis, values, unit, title)
    return figure


def bar_rows(axis: Any, values: Mapping[str, float], unit: str, title: str, colors: Mapping[str, str] | None = None) -> None:
    """Draw horizontal bars on an axis, the first at the top, each with its value."""
    most = max(values.values())
    for row, (name, value) in enumerate(values.items()):
        axis.barh(row, value, color=(colors or {}).get(name, BLUE), edgecolor="white")
        axis.text(value + 0.01 * most, row, f"{value:,.3g}" if value < 1000 else f"{value:,.0f}", va="center", fontsize=9)
    name_rows(axis, values, size=9)
    axis.set_xlim(0, 1.22 * most)
    axis.locator_params(axis="x", nbins=5)           # so that tick labels of narrow panels do not overlap
    axis.set_xlabel(unit)
    axis.set_title(title, fontsize=10, loc="left")


def roofline(ceilings: Mapping[str, tuple[float, float]], points: Mapping[str, tuple[float, float]] | None = None,
             title: str = "") -> Figure:
    """A roofline plot: FLOP/s over arithmetic intensity, both logarithmic.

    `ceilings`: machine -> (FLOP/s, bytes/s), one roof each. `points`: name -> (FLOPs per byte, FLOP/s). The legend names the
    points by mark, because names next to close points would overlap.
    """
    figure, axis = panel(6.5, 4.2)
    intensity = np.logspace(-2, 4, 200)
    for (name, (peak, width)), dash in zip(ceilings.items(), cycle(("-", "--", "-."))):
        axis.loglog(intensity, np.minimum(peak, width * intensity), color=GRAY, linestyle=dash, label=name)
        axis.axvline(peak / width, color=GRAY, linestyle=":", linewidth=1)
    for (name, (x, y)), (mark, color) in zip((points or {}).items(), cycle(MARKS)):
        axis.plot(x, y, mark, color=color, label=name, linestyle="")
    label(axis, x="arithmetic intensity (FLOPs a byte)", y="FLOP/s", title=title, grid="both")
    axis.legend(loc="lower right")
    return figure


def curves(lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], x: str, y: str, title: str = "",
           levels: Mapping[str, float] | None = None) -> Figure:
    """Lines, name -> (xs, ys), in one panel; `levels` are horizontal lines to compare with."""
    figure, axis = panel(6.5, 3.8)
    for (name, (xs, ys)), (mark, color) in zip(lines.items(), cycle(MARKS)):
        axis.plot(xs, ys, color=color, label=name, marker=mark if len(xs) < 60 else "", markevery=1 + len(xs) // 15,
                  linewidth=1.5 if len(xs) < 100 else 0.9)
    for (name, level), dash in zip((levels or {}).items(), cycle(("--", ":", "-."))):
        axis.axhline(level, color=GRAY, linestyle=dash, label=name)
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, level - 0.04 * (high - low)), max(high, level + 0.04 * (high - low)))    # away from the frame
    label(axis, x=x, y=y, grid="major")
    if len(lines) + len(levels or {}) > 5:           # a legend inside would cover the lines
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    else:
        axis.legend()
    axis.set_title(title)
    return figure


def patches(field: np.ndarray, side: int, title: str = "") -> Figure:
    """An (H, W) field with its grid of patches of `side` x `side` points, one of them marked: each becomes a token."""
    figure, axis = panel(7, 3.6)
    palette, low, high = field_map(float(field.min()), float(field.max()))
    axis.imshow(field, cmap=palette, vmin=low, vmax=high, interpolation="nearest")
    height, width = field.shape
    axis.set_xticks(np.arange(0, width, side) - 0.5, labels=[])
    axis.set_yticks(np.arange(0, height, side) - 0.5, labels=[])
    axis.grid(color="white", linewidth=0.8)
    axis.tick_params(length=0)
    axis.add_patch(Rectangle((side * (width // side // 2) - 0.5, side * (height // side // 3) - 0.5), side, side, fill=False,
                             edgecolor=ORANGE, linewidth=3))
    axis.set_title(title)
    return figure


def grouped_bars(groups: Mapping[str, Mapping[str, float]], unit: str, title: str = "",
          predicted: Mapping[str, float] | None = None) -> Figure:
    """Group -> name -> value: a panel per group, all on one scale; each bar shows its ratio to the first of its group.

    `predicted` values, by name, are diamonds.
    """
    figure = Figure(figsize=(9, 0.36 * sum(map(len, groups.values())) + 0.5 * len(groups) + 1), layout="constrained")
    axes: Any = figure.subplots(len(groups), 1, squeeze=False, sharex=True, height_ratios=[len(bars) for bars in groups.values()])
    most = max([*(value for bars in groups.values() for value in bars.values()), *(predicted or {}).values()])
    marks = []
    for axis, (group, bars) in zip(axes[:, 0], groups.items(), strict=True):
        for row, (name, value) in enumerate(bars.items()):
            axis.barh(row, value, height=0.7, color=BLUE if row else GRAY)
            times = f",  {value / next(iter(bars.values())):.2f}×" if row else ""
            axis.text(value + 0.01 * most, row, f"{value:.3g}{times}", va="center", fontsize=9)
            if predicted and name in predicted:
                marks = axis.plot(predicted[name], row, "D", color=ORANGE, markeredgecolor="white", label="you said")
        name_rows(axis, bars, size=9)
        axis.set_title(group, fontsize=10, loc="left")
    axes[-1, 0].set_xlim(0, 1.2 * most)
    axes[-1, 0].set_xlabel(unit)
    figure.suptitle(title, fontsize=10)
    if marks:
        figure.legend(handles=marks, loc="outside lower center", frameon=False, fontsize=9)
    return figure
