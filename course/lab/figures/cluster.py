"""Figures of lesson 18: the events around the time limit, and the cost of checkpoints and failures."""

from collections.abc import Mapping
from itertools import cycle

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from course.lab.figures.checkpoints import Curves
from course.lab.figures.style import MARKS, label, panel
from course.utils.colors import BLUE, GRAY, GREEN, ORANGE, SKY

LANES = ("Slurm", "script", "srun", "ranks")
# (lane, from, to, what, color), in arbitrary units: only the order matters
BARS = (("script", 0, 1, "prepares", SKY), ("script", 1, 5, "waits", GRAY), ("script", 5, 6, "waits again", GRAY),
        ("script", 6, 6.9, "requeues", ORANGE), ("srun", 1, 6, "waits for the ranks", GRAY), ("ranks", 1.2, 5.2, "train", BLUE),
        ("ranks", 5.2, 6, "save", GREEN), ("script", 8, 9, "prepares", SKY), ("script", 9, 12, "waits", GRAY),
        ("srun", 9, 12, "waits", GRAY), ("ranks", 9.2, 10, "load", GREEN), ("ranks", 10, 12, "train", BLUE))
# (from lane, to lane, when, what)
ARROWS = (("Slurm", "script", 0, "sbatch"), ("script", "srun", 1, ""), ("Slurm", "script", 5, "USR1"),
          ("script", "srun", 5.05, ""),
          ("srun", "ranks", 5.1, ""), ("ranks", "srun", 6, "75"), ("script", "Slurm", 6.8, ""),
          ("Slurm", "script", 8, "again"))


def time_limit() -> Figure:
    """A timeline with rows for Slurm, script, srun and ranks: a warning, a save, and the requeued job."""
    figure, axis = panel(9, 3.4)
    at = {lane: len(LANES) - row for row, lane in enumerate(LANES)}
    for lane, start, stop, what, color in BARS:
        axis.barh(at[lane], stop - start, left=start, height=0.45, color=color, edgecolor="white", alpha=0.75)
        axis.text((start + stop) / 2, at[lane], what, ha="center", va="center", fontsize=8)
    axis.plot([0, 12], [at["Slurm"]] * 2, color=GRAY, linewidth=1)
    for source, target, when, what in ARROWS:
        side = 1 if at[target] < at[source] else -1  # arrows go from edge to edge
        axis.annotate("", (when, at[target] + 0.24 * side), (when, at[source] - (0.2 * side if source != "Slurm" else 0)),
                      arrowprops={"arrowstyle": "->", "color": "black"})
        axis.text(when + 0.08, (at[source] + at[target]) / 2, what, fontsize=8, va="center")
    axis.axvline(6.95, ymax=0.85, color=ORANGE, linestyle=":")
    axis.text(7.02, 1, "in the queue", va="center", fontsize=8)
    axis.set_yticks([at[lane] for lane in LANES], LANES)
    axis.set_xticks([])
    axis.set_xlabel("time")
    axis.set_ylim(0.4, len(LANES) + 0.5)
    return figure


def shares(lines: Curves, dots: Curves, least: Mapping[str, tuple[float, float]], title: str = "") -> Figure:
    """The share of lost time over the checkpoint interval in seconds: lines are formulas, marks simulations, stars minima."""
    figure, axis = panel(7, 4)
    for (name, (xs, ys)), (mark, color) in zip(lines.items(), cycle(MARKS)):
        axis.plot(xs, ys, color=color, label=name)
        if name in dots:
            axis.plot(*dots[name], mark, color=color, markersize=5)
        if name in least:
            axis.plot(*least[name], "*", color=color, markersize=16, markeredgecolor="black")
    axis.set_xscale("log")
    axis.set_ylim(0, None)
    axis.yaxis.set_major_formatter(PercentFormatter(1))
    label(axis, x="seconds between two checkpoints", y="share of the time that is lost", title=title, grid="both")
    axis.legend()
    return figure
