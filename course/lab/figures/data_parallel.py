"""Figures of the lessons on data parallelism and scaling, and the pure functions behind them."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from course.lab.figures.style import MARKS, label, panel
from course.utils.colors import COLLECTIVES, COUNT, GRAY, GREEN, ORANGE, STEP

Span = tuple[float, float]                           # begin and end
SEVEN = [*MARKS, ("x", "black")]                     # one style per learning rate of the reference runs


def ring_counts(n: int, step: int) -> np.ndarray:
    """(rank, piece): how many ranks' numbers each piece sums up after `step` steps of a ring all-reduce."""
    counts = np.ones((n, n), int)
    for now in range(step):
        before = counts.copy()
        for rank in range(n):
            at = (rank - now - 1) % n                # the piece from the left neighbor
            came = before[(rank - 1) % n, at]
            counts[rank, at] = came + 1 if now < n - 1 else came
    return counts


def ring(n: int, step: int) -> Figure:
    """The pieces of every rank after `step` steps of a ring all-reduce, and which ones it sends next."""
    counts = ring_counts(n, step)
    figure, axis = panel(5.2, 4)
    axis.imshow(counts, cmap=COUNT, vmin=0, vmax=1.5 * n)
    for rank in range(n):
        for piece in range(n):
            leaves = step < 2 * (n - 1) and piece == (rank - step) % n
            axis.text(piece, rank, f"{counts[rank, piece]}{' ↓' if leaves else ''}", ha="center", va="center", fontsize=14,
                      color=ORANGE if leaves else "black")
    axis.set_xticks(range(n), [f"piece {piece}" for piece in range(n)])
    axis.set_yticks(range(n), [f"rank {rank}" for rank in range(n)])
    phase = "reduce-scatter" if step < n - 1 else "all-gather" if step < 2 * (n - 1) else "done"
    axis.set_title(f"After {step} of {2 * (n - 1)} steps: {phase}")
    return figure


def fill_buckets(parts: Sequence[tuple[float, float]], size: float) -> tuple[list[float], list[float]]:
    """Fill buckets with gradients, (seconds, bytes) in backward order; returns when each bucket is ready, and its bytes."""
    ready: list[float] = []
    loads: list[float] = []
    now = 0.0
    for seconds, load in parts:
        now += seconds
        if loads and loads[-1] + load <= size:
            ready[-1], loads[-1] = now, loads[-1] + load
        else:
            ready.append(now)
            loads.append(load)
    return ready, loads


def all_reduce_seconds(load: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Time of a ring all-reduce: a latency, plus 2 (n - 1) / n of the bytes at a bandwidth in bytes/s."""
    return latency + 2 * (ranks - 1) / ranks * load / bandwidth


def timeline(rows: Mapping[str, Sequence[Span]], end_of_backward: float, title: str = "", unit: str = "ms",
             scale: float = 1e3) -> Figure:
    """Bars over time, one row per name: backward, and the network's all-reduces. The dotted line marks the end of backward; time
    after it is exposed."""
    figure, axis = panel(7.5, 1.2 + 0.6 * len(rows))
    for number, (name, spans) in enumerate(rows.items()):
        color = STEP.get(name, COLLECTIVES["all-reduce"])
        for index, (begin, end) in enumerate(spans):
            axis.barh(number, (end - begin) * scale, left=begin * scale, height=0.6, color=color, alpha=(1.0, 0.5)[index % 2])
    axis.axvline(end_of_backward * scale, color=GRAY, linestyle=":")
    axis.set_yticks(range(len(rows)), list(rows))
    axis.invert_yaxis()
    label(axis, x=f"{unit} since backward began", title=title)
    return figure


def logarithmic(lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], x: str, y: str, title: str = "",
                dashed: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
                bars: Mapping[str, Sequence[Span]] | None = None) -> Figure:
    """Lines with marks on logarithmic axes, and dashed ones to compare; few points of the first line become the x ticks.

    `bars`: line name -> (lowest, highest) at each of its points.
    """
    figure, axis = panel(6.5, 4)
    for (name, (xs, ys)), (mark, color) in zip(lines.items(), cycle(SEVEN)):
        few = len(xs) < 15
        axis.plot(xs, ys, color=color, marker=mark, markersize=6 if few else 3.5, linewidth=1.5 if few else 1, label=name)
        for x_of, (low, high) in zip(xs, (bars or {}).get(name, ()), strict=False):
            axis.plot([x_of, x_of], [low, high], color=color, linewidth=6, alpha=0.3)
    for (name, (xs, ys)), color in zip((dashed or {}).items(), cycle((GRAY, GREEN))):
        axis.plot(xs, ys, color=color, linestyle="--", label=name)
    axis.set_xscale("log")
    axis.set_yscale("log")
    readable_ticks(axis.yaxis, *axis.get_ylim())
    xs = next(iter(lines.values()))[0]
    if len(xs) <= 8:
        axis.set_xticks(list(xs), [f"{tick:g}" for tick in xs])
        axis.set_xticks([], minor=True)
    else:
        readable_ticks(axis.xaxis, *axis.get_xlim())
    label(axis, x=x, y=y, title=title, grid="both")
    axis.legend()
    return figure


def readable_ticks(axis: Any, low: float, high: float) -> None:
    """Set ticks of a logarithmic axis at 1, 2, 5, 10, ..., or more densely if it spans less than a factor of five."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 5 * low else range(10, 100, 2 if high > 1.5 * low else 1)))
    axis.set_major_formatter(lambda tick, _: f"{tick:,.10g}")
    axis.set_minor_locator(NullLocator())
