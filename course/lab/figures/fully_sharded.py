"""Figures of fully sharded data parallelism, from a step that `instruments/fully_sharded_timeline.py` recorded."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course.lab.figures.style import BLUE, GREEN, GREY, ORANGE, SKY, label, name_rows
from course.lab.instruments.fully_sharded_timeline import ShardedTimeline, Span


def timeline(recorded: ShardedTimeline, all_bytes: int, title: str = "") -> Figure:
    """A rank's step: what it computes, gathers and reduces, with the unit's number; below, the bytes of weights that it holds.

    all_bytes: the bytes of all weights, for comparison.
    """
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    axes: Any = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    draw_spans(axes[0], 0, recorded.gathers, SKY)
    draw_spans(axes[0], 1, recorded.forward, BLUE)
    draw_spans(axes[0], 1, recorded.backward, ORANGE)
    draw_spans(axes[0], 2, recorded.reduces, GREEN)
    name_rows(axes[0], ["all-gather", "compute", "reduce-scatter"])
    label(axes[0], title=title)
    times = [0.0, *(1e3 * time for time, _ in recorded.memory)]
    axes[1].step(times, [(recorded.share_bytes + whole) / 1e6 for whole in (0, *(whole for _, whole in recorded.memory))],
                 where="post", color=BLUE)
    axes[1].axhline(all_bytes / 1e6, color=GREY, linestyle="--")
    axes[1].text(0, all_bytes / 1e6, " all weights", color=GREY, fontsize=8, va="bottom")
    axes[1].set_ylim(0, 1.15 * all_bytes / 1e6)
    label(axes[1], x="ms since the step began", y="MB of weights", grid="major")
    figure.legend(handles=[Patch(color=colour, label=name) for name, colour in (("forward", BLUE), ("backward", ORANGE))],
                  loc="outside lower center", ncol=2, frameon=False, fontsize=9)
    return figure


def draw_spans(axis: Any, row: int, spans: Sequence[Span], colour: str) -> None:
    """Draw spans as bars of a row, each with its unit's number."""
    for unit, begin, end in spans:
        axis.barh(row, 1e3 * (end - begin), left=1e3 * begin, height=0.7, color=colour, edgecolor="white", linewidth=0.5)
        axis.text(1e3 * (begin + end) / 2, row, str(unit), ha="center", va="center", fontsize=8)
