"""The figure of lesson 22: what the planner says of many layouts."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from course.lab.exercises.lesson22_train_it import Prediction
from course.lab.figures.style import MARKS, label, panel
from course.utils.colors import AXES, GRAY, GREEN

KINDS = {"dp alone": "dp", "with tp": "tp", "with pp": "pp", "with tp and pp": "several"}     # group -> its color in AXES


def kind(chosen: tuple[str, ...]) -> str:
    """The group of a layout, by the axes that have more than one rank."""
    axes = [name for name in ("tp", "pp") if f"parallel.{name}=1" not in chosen]
    return f"with {' and '.join(axes)}" if axes else "dp alone"


def candidates(found: Mapping[tuple[str, ...], Prediction], limit: float) -> Figure:
    """Predicted time over predicted memory of each layout, with the memory of a rank as a line.

    The fastest that fits is ringed.
    """
    figure, axis = panel(7.5, 4.2)
    for (name, color), (mark, _) in zip(KINDS.items(), MARKS, strict=False):
        group = [each for chosen, each in found.items() if kind(chosen) == name]
        axis.plot([each.memory / 1e6 for each in group], [1e3 * each.seconds for each in group], mark, color=AXES[color],
                  markeredgecolor=GRAY, markeredgewidth=0.5, label=f"{name} ({len(group)})")
    best = min((each for each in found.values() if each.memory <= limit), key=lambda each: each.seconds)
    axis.plot([best.memory / 1e6], [1e3 * best.seconds], "o", markersize=14, markerfacecolor="none", markeredgecolor=GREEN,
              markeredgewidth=2, label="fastest that fits")
    axis.axvline(limit / 1e6, color=GRAY, linestyle="--", label="memory of a rank")
    axis.set_yscale("log")
    label(axis, x="predicted memory, MB", y="predicted time of a step, ms", grid="both")
    axis.legend(fontsize=8)
    return figure
