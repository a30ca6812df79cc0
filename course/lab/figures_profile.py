"""Pictures of what a profiler saw: a step's timeline, and where the time of several went."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course.lab.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY
from course.perf.account import COLOURS, LABELS

KIND = {"attention": ORANGE, "matmul": BLUE, "optimizer": GREEN, "communication": PURPLE, "copy": "#E69F00", "other": SKY}
LANES = ("parts", "launches", "operators", "GPU", "communication")
MOST_NAMED = 0.04                                    # of the width: shorter boxes have no room for their names


def timeline(rows: Sequence[Sequence[Any]], title: str = "", until: float | None = None) -> Figure:
    """A step as boxes in lanes over the time: (lane, name, kind, begin, end), in microseconds, up to `until`."""
    lanes = [lane for lane in LANES if any(row[0] == lane for row in rows)]
    end = until or max(row[4] for row in rows)
    figure = Figure(figsize=(9, 0.55 * len(lanes) + 1.5), layout="constrained")
    axis: Any = figure.subplots()
    for lane, name, kind, start, stop in rows:
        if start > end:
            continue
        place = lanes.index(lane)
        axis.barh(place, min(stop, end) - start, left=start, height=0.8, color=KIND.get(kind, GREY),
                  edgecolor="white", linewidth=0.3 if lane != "parts" else 1.0)
        if lane == "parts" and min(stop, end) - start > MOST_NAMED * end:
            axis.text((start + min(stop, end)) / 2, place, name, ha="center", va="center", fontsize=8, color="white")
    axis.set_yticks(range(len(lanes)), lanes)
    axis.set_ylim(len(lanes) - 0.5, -0.5)
    axis.set_xlim(0, end)
    axis.set_xlabel("microseconds")
    axis.set_title(title, fontsize=10)
    kinds = [kind for kind in KIND if any(row[2] == kind for row in rows)]
    figure.legend(handles=[Patch(color=KIND[kind], label=kind) for kind in kinds], loc="outside lower center", ncols=6,
                  frameon=False, fontsize=8)
    return figure


def shares(accounts: Mapping[str, Mapping[str, float]], title: str = "") -> Figure:
    """A bar for each step, all of the same length, in the parts that its time went to (keys of `account.LABELS`)."""
    figure = Figure(figsize=(9, 0.45 * len(accounts) + 1.6), layout="constrained")
    axis: Any = figure.subplots()
    for row, time in enumerate(accounts.values()):
        whole, left = sum(time.values()), 0.0
        for key in LABELS:
            share = 100 * time.get(key, 0.0) / whole
            axis.barh(row, share, left=left, color=COLOURS[key], edgecolor="white")
            left += share
    axis.set_yticks(range(len(accounts)), [f"{name}: {sum(time.values()):.3g} ms" for name, time in accounts.items()])
    axis.set_ylim(len(accounts) - 0.5, -0.5)
    axis.set_xlim(0, 100)
    axis.set_xlabel("% of the step")
    axis.set_title(title, fontsize=10)
    there = [key for key in LABELS if any(time.get(key, 0.0) > 0 for time in accounts.values())]
    figure.legend(handles=[Patch(color=COLOURS[key], label=LABELS[key]) for key in there], loc="outside lower center", ncols=4,
                  frameon=False, fontsize=8)
    return figure
