"""Figures of lesson 09's section on links: a node's NVLinks, and bandwidth over message size.

`CUBE_MESH` is a node of eight V100 GPUs as `nvidia-smi topo -m` shows it, without the columns for CPUs. NVIDIA calls it a
hybrid
cube mesh ("NVIDIA DGX-1 With Tesla V100 System Architecture", WP-08437-002, "NVLink"): each GPU has six links, to four others.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from course.lab.figures.style import MARKS, label, panel
from course.utils.colors import BLUE, GRAY

CUBE_MESH = """\
        GPU0    GPU1    GPU2    GPU3    GPU4    GPU5    GPU6    GPU7
GPU0     X      NV1     NV1     NV2     NV2     SYS     SYS     SYS
GPU1    NV1      X      NV2     NV1     SYS     NV2     SYS     SYS
GPU2    NV1     NV2      X      NV2     SYS     SYS     NV1     SYS
GPU3    NV2     NV1     NV2      X      SYS     SYS     SYS     NV1
GPU4    NV2     SYS     SYS     SYS      X      NV1     NV1     NV2
GPU5    SYS     NV2     SYS     SYS     NV1      X      NV2     NV1
GPU6    SYS     SYS     NV1     SYS     NV1     NV2      X      NV2
GPU7    SYS     SYS     SYS     NV1     NV2     NV1     NV2      X
"""
PLACES = ((0, 1), (1, 1), (1, 0), (0, 0))           # of GPUs 0 to 3: a square; 4 to 7: the same, to the right and higher


def node(pairs: Mapping[tuple[int, int], int], groups: Sequence[Sequence[int]] = (), title: str = "") -> Figure:
    """Eight GPUs and their NVLinks, one line or two for each pair. A group's GPUs share a color.

    pairs: (GPU, GPU) -> number of NVLinks, each pair once.
    """
    figure, axis = panel(7.5, 3.4)
    places = [(x + 1.7 * (gpu // 4), y + 0.5 * (gpu // 4)) for gpu, (x, y) in enumerate(PLACES * 2)]
    for (a, b), count in pairs.items():
        (x0, y0), (x1, y1) = places[a], places[b]
        length = np.hypot(x1 - x0, y1 - y0)
        for offset in ((-0.025, 0.025) if count == 2 else (0.0,)):
            side = offset * (y0 - y1) / length, offset * (x1 - x0) / length
            axis.plot([x0 + side[0], x1 + side[0]], [y0 + side[1], y1 + side[1]], color=BLUE if count == 2 else GRAY,
                      linewidth=1.6, zorder=1)
    colors = {gpu: MARKS[number % len(MARKS)][1] for number, group in enumerate(groups) for gpu in group}
    for gpu, place in enumerate(places):
        axis.add_patch(Circle(place, 0.13, facecolor="white", edgecolor=colors.get(gpu, GRAY), linewidth=3, zorder=2))
        axis.text(*place, str(gpu), ha="center", va="center", zorder=3)
    axis.set_aspect("equal")
    axis.autoscale_view()
    axis.set_axis_off()
    axis.set_title(title, fontsize=10)
    return figure


def bandwidths(curves: Mapping[str, Sequence[tuple[float, float]]], fits: Mapping[str, tuple[float, float]]) -> Figure:
    """Bus bandwidth in GB/s over message size, both logarithmic; a dashed line for each fit.

    curves: name -> (bytes, GB/s) points. fits: name -> (latency in us, GB/s), for bytes that all cross the link.
    """
    figure, axis = panel(7.5, 4.2)
    for (name, points), (mark, color) in zip(curves.items(), MARKS, strict=False):
        x, y = np.array(points).T
        axis.loglog(x, y, mark, color=color, label=name)
        if name in fits:
            axis.loglog(x, fitted(x, *fits[name]), "--", color=color, linewidth=1)
    label(axis, x="message in bytes", y="bus bandwidth in GB/s", title="all-reduce; dashed: latency + bytes / bandwidth",
          grid="major")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def fitted(size: Any, latency_us: float, gb_s: float) -> Any:
    """The bandwidth in GB/s of messages of `size` bytes that take latency_us + bytes / gb_s."""
    return size / (1e3 * latency_us + size / gb_s)
