"""Figures of fully sharded data parallelism, from a step that was recorded (`instruments/fully_sharded_timeline.py`) or simulated
(`instruments/simulated_sharding.py`)."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course.lab.figures.style import label, name_rows
from course.lab.instruments.fully_sharded_timeline import ShardedTimeline, Span
from course.lab.instruments.simulated_sharding import Step
from course.utils.colors import COLLECTIVES, GRAY, MEMORY, STEP


def timeline(recorded: ShardedTimeline, all_bytes: int, title: str = "") -> Figure:
    """A rank's step: what it computes, gathers and reduces, with the unit's number; below, the bytes of weights that it holds.

    all_bytes: the bytes of all weights, for comparison.
    """
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    axes: Any = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    draw_spans(axes[0], 0, recorded.gathers, COLLECTIVES["all-gather"])
    draw_spans(axes[0], 1, recorded.forward, STEP["forward"])
    draw_spans(axes[0], 1, recorded.backward, STEP["backward"])
    draw_spans(axes[0], 2, recorded.reduces, COLLECTIVES["reduce-scatter"])
    name_rows(axes[0], ["all-gather", "compute", "reduce-scatter"])
    label(axes[0], title=title)
    times = [0.0, *(1e3 * time for time, _ in recorded.memory)]
    axes[1].step(times, [(recorded.share_bytes + whole) / 1e6 for whole in (0, *(whole for _, whole in recorded.memory))],
                 where="post", color=MEMORY["weights"])
    axes[1].axhline(all_bytes / 1e6, color=GRAY, linestyle="--")
    axes[1].text(0, all_bytes / 1e6, " all weights", color=GRAY, fontsize=8, va="bottom")
    axes[1].set_ylim(0, 1.15 * all_bytes / 1e6)
    label(axes[1], x="ms since the step began", y="MB of weights", grid="major")
    figure.legend(handles=[Patch(color=STEP[name], label=name) for name in ("forward", "backward")],
                  loc="outside lower center", ncol=2, frameon=False, fontsize=9)
    return figure


def simulated(step: Step, limit: int, title: str = "") -> Figure:
    """A step on simulated clocks: what the rank computes and the link sends; below, the bytes of whole weights and gradients."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes: Any = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    kinds = {"gather": COLLECTIVES["all-gather"], "reduce": COLLECTIVES["reduce-scatter"],
             "forward": STEP["forward"], "backward": STEP["backward"]}
    for row, spans in enumerate((step.sending, step.computing)):
        for kind, color in kinds.items():
            draw_spans(axes[0], row, [(unit, begin, end) for what, unit, begin, end in spans if what == kind], color)
    name_rows(axes[0], ["link", "compute"])
    label(axes[0], title=title)
    times, used = zip((0.0, 0), *sorted(step.memory, key=lambda change: change[0]), strict=True)
    axes[1].step([1e3 * time for time in times], [size / 1e6 for size in used], where="post", color=MEMORY["weights"])
    axes[1].axhline(limit / 1e6, color=GRAY, linestyle="--")
    axes[1].text(0, limit / 1e6, " limit", color=GRAY, fontsize=8, va="bottom")
    axes[1].set_ylim(0, 1.2 * limit / 1e6)
    label(axes[1], x="ms since the step began", y="MB whole", grid="major")
    figure.legend(handles=[Patch(color=color, label=name) for name, color in kinds.items()], loc="outside lower center",
                  ncol=len(kinds), frameon=False, fontsize=9)
    return figure


def draw_spans(axis: Any, row: int, spans: Sequence[Span], color: str) -> None:
    """Draw spans as bars of a row, each with its unit's number."""
    for unit, begin, end in spans:
        axis.barh(row, 1e3 * (end - begin), left=1e3 * begin, height=0.7, color=color, edgecolor="white", linewidth=0.5)
        axis.text(1e3 * (begin + end) / 2, row, str(unit), ha="center", va="center", fontsize=8)
