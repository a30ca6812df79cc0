"""Figures of data loading: which rank reads which sample, queues, CUDA streams, and loader throughput."""

import heapq
from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course.data import order
from course.lab.figures.style import MARKS, label, name_rows, panel
from course.utils.colors import GRAY, RANKS, STEP

KINDS = {"copy": STEP["copy"], "compute": STEP["forward"], "wait": STEP["idle"]}


def stream(seed: int, samples: int, batch: int, ranks: int, steps: int) -> Figure:
    """The first global batches, one row each: tiles with sample ids, colored by the rank that reads them."""
    figure, axis = panel(min(9, 0.75 * batch + 2.2), 0.42 * steps + 1.3)
    for step in range(steps):
        ids = order.samples_at(seed, samples, step * batch, (step + 1) * batch)
        for i, sample in enumerate(ids.tolist()):
            epoch = (step * batch + i) // samples
            axis.barh(step, 0.94, left=i + 0.03, height=0.86, color=RANKS[i * ranks // batch], alpha=(0.8, 0.35)[epoch % 2])
            axis.text(i + 0.5, step, str(sample), ha="center", va="center", fontsize=9)
    axis.set_yticks(range(steps), [f"global batch {step}" for step in range(steps)])
    axis.set_ylim(steps - 0.5, -0.5)
    axis.set_xlim(0, batch)
    axis.set_xticks([])
    axis.set_title(f"{samples} samples; the paler tiles are of the second epoch", fontsize=10)
    figure.legend(handles=[Patch(color=RANKS[rank], label=f"rank {rank}") for rank in range(ranks)], loc="outside lower center",
                  ncols=ranks, frameon=False, fontsize=9)
    return figure


def waiting_share(reads: Sequence[float], step: float, depth: int, readers: int = 1) -> float:
    """The share of a run in which steps wait for data, with a prefetch queue of `depth` batches.

    A batch is requested when a slot is free, `depth` batches before its step, and the next free reader takes it. With depth 0
    a batch is read when its step needs it, and nothing overlaps.
    """
    free = [0.0] * readers                           # when each reader is free
    heapq.heapify(free)
    begun: list[float] = []                          # start of each step
    now = waiting = 0.0                              # end of the previous step
    for number, seconds in enumerate(reads):
        asked = now if depth == 0 else begun[number - depth] if number >= depth else 0.0
        there = max(asked, heapq.heappop(free)) + seconds
        heapq.heappush(free, there)
        waiting += max(0.0, there - now)
        begun.append(max(now, there))
        now = begun[-1] + step
    return waiting / now


def read_times(average: float, slow: float, every: int, count: int = 600, seed: int = 0) -> list[float]:
    """Random read times: about one in `every` takes `slow`, the others take equally long, and the mean is `average`."""
    late = np.random.default_rng(seed).random(count) < 1 / every
    fast = (average * count - slow * late.sum()) / (count - late.sum())
    return np.where(late, slow, fast).tolist()


def streams(rows: Sequence[tuple[str, str, str, float, float]], title: str = "") -> Figure:
    """Boxes in rows over time: (row, name, kind, begin, end); the kinds are copy, compute and wait."""
    lanes = list(dict.fromkeys(row[0] for row in rows))
    figure, axis = panel(8, 0.55 * len(lanes) + 1.1)
    for lane, name, kind, begin, end in rows:
        axis.barh(lanes.index(lane), end - begin, left=begin, height=0.75, color=KINDS[kind], edgecolor="white",
                  alpha=0.4 if kind == "wait" else 0.85)
        axis.text((begin + end) / 2, lanes.index(lane), name, ha="center", va="center", fontsize=9)
    name_rows(axis, lanes)
    axis.set_xlim(0, max(row[4] for row in rows))
    axis.set_xticks([])
    label(axis, x="time", title=title)
    return figure


def copy_and_compute(copy: float, compute: float, steps: int, ahead: bool) -> list[tuple[str, str, str, float, float]]:
    """Rows for `streams`: copy and compute one after the other, or `ahead`, the next copy overlapping with compute."""
    rows, copied, start, computed = [], 0.0, 0.0, 0.0    # end of the last copy; start and end of the last step
    for number in range(1, steps + 1):
        begin = max(copied, start) if ahead else computed
        copied = begin + copy
        rows.append(("copies" if ahead else "one stream", f"copy {number}", "copy", begin, copied))
        start = max(copied, computed)
        computed = start + compute
        rows.append(("computing" if ahead else "one stream", f"step {number}", "compute", start, computed))
    return rows


def speeds_by_workers(speeds: Mapping[str, Mapping[str, float]], floors: Mapping[str, Mapping[str, float]],
                      needs: Mapping[str, float],
            title: str = "") -> Figure:
    """Pairs per second over workers, both logarithmic: loaders as marks, floors dashed, the models' needs as horizontal lines."""
    figure, axis = panel(7.5, 4.2)
    for (name, row), (mark, color) in zip(speeds.items(), cycle(MARKS)):
        there = {int(n): value for n, value in row.items() if int(n) > 0}
        axis.loglog(list(there), list(there.values()), mark + "-", color=color, label=name)
    for name, row in floors.items():
        axis.loglog([int(n) for n in row], list(row.values()), "--", color="black", label=name)
    for (name, level), dash in zip(needs.items(), cycle((":", "-."))):
        axis.axhline(level, color=GRAY, linestyle=dash, label=name)
    counts = sorted({int(n) for row in [*speeds.values(), *floors.values()] for n in row if int(n) > 0})
    axis.set_xticks(counts, [str(n) for n in counts])
    axis.minorticks_off()
    label(axis, x="worker processes or threads", y="pairs per second", title=title, grid="major")
    figure.legend(loc="outside right upper", fontsize=8)
    return figure
