"""Figures of profiler traces: the timeline of a step, and several steps' time by part."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course.lab.figures.style import MARKS, label, name_rows, panel
from course.training import memory_snapshot, trace_breakdown
from course.training.trace_breakdown import LABELS
from course.utils.colors import GRAY, KERNELS, STEP

LANES = ("parts", "launches", "operators", "GPU", "other streams", "communication")
MOST_NAMED = 0.04                                    # share of the width: shorter boxes get no name


def last_step(events: list[trace_breakdown.Event]) -> list[list[Any]]:
    """The last step of a trace as [row, name, kind, begin, end], in microseconds since its start; rows are `LANES`."""
    parts = trace_breakdown.parts_of(events)
    steps = sorted(event["ts"] for event in parts if event["name"] == trace_breakdown.PARTS[0])
    begin, end = steps[-1], max(event["ts"] + event["dur"] for event in parts)
    gpu = any(event.get("cat") == "kernel" for event in events)
    lanes = {"user_annotation": "parts", "cuda_runtime": "launches", "cuda_driver": "launches", "cpu_op": "operators",
             **dict.fromkeys(trace_breakdown.ON_DEVICE, "GPU")}
    main = main_stream(events)
    rows = []
    for event in events:
        lane = lanes.get(event.get("cat", ""))
        if event.get("ph") != "X" or not lane or event["ts"] < begin or (lane == "parts"
                                                                         and event["name"] not in trace_breakdown.PARTS):
            continue
        if lane == "launches" and "Launch" not in event["name"]:
            continue
        if lane == "operators" and (gpu or "::" not in event["name"]):
            continue
        kind = trace_breakdown.kind_of(event["name"]) if lane in ("GPU", "operators") else ""
        if kind == "communication":
            lane = "communication"
        elif lane == "GPU" and event.get("args", {}).get("stream", main) != main:
            lane = "other streams"
        start, stop = event["ts"] - begin, event["ts"] + event["dur"] - begin
        rows.append([lane, event["name"][:40], kind, round(start, 2), round(stop, 2)])
    return [row for row in rows if row[3] <= max(end - begin, *(row[4] for row in rows if row[0] == "parts"))]


def main_stream(events: list[trace_breakdown.Event]) -> Any:
    """The number of the GPU's stream on which kernels run longest; communication does not count."""
    busy = Counter[Any]()
    for event in events:
        if event.get("cat") == "kernel" and trace_breakdown.kind_of(event["name"]) != "communication":
            busy[event.get("args", {}).get("stream")] += event["dur"]
    return busy.most_common(1)[0][0] if busy else None


def timeline(rows: Sequence[Sequence[Any]], title: str = "", until: float | None = None, since: float = 0.0) -> Figure:
    """A step as boxes over time, from the rows of `last_step`, in microseconds from `since` to `until`."""
    lanes = [lane for lane in LANES if any(row[0] == lane for row in rows)]
    end = until or max(row[4] for row in rows)
    figure, axis = panel(9, 0.55 * len(lanes) + 1.5)
    for lane, name, kind, start, stop in rows:
        start, stop = max(start, since), min(stop, end)
        if start >= stop:
            continue
        place = lanes.index(lane)
        axis.barh(place, stop - start, left=start, height=0.8, color=KERNELS.get(kind, GRAY),
                  edgecolor="white", linewidth=0.3 if lane != "parts" else 1.0)
        if lane == "parts" and stop - start > MOST_NAMED * (end - since):
            axis.text((start + stop) / 2, place, name, ha="center", va="center", fontsize=8, color="white")
    name_rows(axis, lanes)
    axis.set_xlim(since, end)
    label(axis, x="microseconds", title=title)
    kinds = [kind for kind in KERNELS if any(row[2] == kind for row in rows)]
    figure.legend(handles=[Patch(color=KERNELS[kind], label=kind) for kind in kinds], loc="outside lower center", ncols=6,
                  frameon=False, fontsize=8)
    return figure


def one_block(rows: Sequence[Sequence[Any]]) -> list[tuple[str, float, float]]:
    """The GPU kernels of one block in the middle of a step, from one attention to the next, as (kind, begin, end)."""
    on_gpu = sorted((row for row in rows if row[0] == "GPU"), key=lambda row: float(row[3]))
    attention = [row[3] for row in on_gpu if row[2] == "attention"]
    first, last = attention[len(attention) // 2], attention[len(attention) // 2 + 1]
    return [(kind, start - first, stop - first) for _, _, kind, start, stop in on_gpu if first <= start < last]


def blocks(steps: Mapping[str, Sequence[Sequence[Any]]], title: str = "") -> Figure:
    """The GPU kernels of one block in each of several steps on a shared time axis, and their number."""
    figure, axis = panel(9, 0.6 * len(steps) + 1.5)
    found = {name: one_block(rows) for name, rows in steps.items()}
    longest = max(stop for kernels in found.values() for _, _, stop in kernels)
    for place, kernels in enumerate(found.values()):
        for kind, start, stop in kernels:
            axis.barh(place, stop - start, left=start, height=0.7, color=KERNELS.get(kind, GRAY), edgecolor="white",
                      linewidth=0.3)
        axis.text(kernels[-1][2], place, f" {len(kernels)} kernels", va="center", fontsize=9)
    name_rows(axis, steps)
    axis.set_xlim(0, 1.14 * longest)
    label(axis, x="microseconds", title=title)
    kinds = {kind for kernels in found.values() for kind, _, _ in kernels}
    figure.legend(handles=[Patch(color=KERNELS[kind], label=kind) for kind in KERNELS if kind in kinds],
                  loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return figure


def shares(accounts: Mapping[str, Mapping[str, float]], title: str = "") -> Figure:
    """A bar per step, normalized to 100%, split by where its time goes (keys of `trace_breakdown.LABELS`)."""
    figure, axis = panel(9, 0.45 * len(accounts) + 1.6)
    for row, time in enumerate(accounts.values()):
        whole, left = sum(time.values()), 0.0
        for key in LABELS:
            share = 100 * time.get(key, 0.0) / whole
            axis.barh(row, share, left=left, color=STEP[key], edgecolor="white")
            left += share
    axis.set_yticks(range(len(accounts)), [f"{name}: {sum(time.values()):.3g} ms" for name, time in accounts.items()])
    axis.set_ylim(len(accounts) - 0.5, -0.5)
    axis.set_xlim(0, 100)
    label(axis, x="% of the step", title=title)
    there = [key for key in LABELS if any(time.get(key, 0.0) > 0 for time in accounts.values())]
    figure.legend(handles=[Patch(color=STEP[key], label=LABELS[key]) for key in there], loc="outside lower center", ncols=4,
                  frameon=False, fontsize=8)
    return figure


def memory(events: Sequence[memory_snapshot.Event], title: str = "", most: int = 5) -> Figure:
    """Memory over a snapshot's allocations and frees, by the lines that hold most of it at the peak."""
    lines = memory_snapshot.alive_at_peak(events)
    largest = sorted(lines, key=lambda line: -lines[line])[:most]
    heights = [[size / 1e6 for size in row] for row in memory_snapshot.over_time(events, largest)]
    figure, axis = panel(9, 3.6 + 0.2 * len(largest))
    colors = [*[color for _, color in MARKS][:len(largest)], GRAY]
    axis.stackplot(range(len(events)), heights, colors=colors, step="post")
    axis.axvline(memory_snapshot.peak(events)[1] - 1, color="black", linestyle="--", linewidth=1)
    axis.set_xlim(0, len(events))
    label(axis, "allocations and frees", "MB", title)
    names = [*largest, "other lines"]                # a label of matplotlib's own that begins with _ would be left out
    figure.legend([Patch(color=color) for color in colors], names, loc="outside lower center", frameon=False, fontsize=8)
    return figure
