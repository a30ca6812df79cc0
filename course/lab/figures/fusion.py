"""Figure of what kernel fusion saves: the memory accesses of a chain of kernels."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from course.utils.colors import BLUE, GRAY, ORANGE, PALE, SKY

Kernel = tuple[str, Sequence[str], Sequence[str]]    # its name, and the names of the tensors that it reads and writes
STEP = 0.42                                          # distance between two arrows


def trips(panels: Mapping[str, Sequence[Kernel]]) -> Figure:
    """One panel per chain: kernels above, memory below, an arrow for each tensor that a kernel reads (up) or writes (down)."""
    figure = Figure(figsize=(9, 2.15 * len(panels)), layout="constrained")
    ends = []
    for number, (title, kernels) in enumerate(panels.items()):
        axis: Any = figure.add_subplot(len(panels), 1, number + 1)
        left = 0.0
        for name, reads, writes in kernels:
            width = STEP * (len(reads) + len(writes) + 1)
            axis.add_patch(FancyBboxPatch((left, 1.0), width, 0.5, boxstyle="round,pad=0.02", facecolor=SKY, edgecolor="white"))
            axis.text(left + width / 2, 1.25, name, ha="center", va="center", fontsize=8)
            for i, (tensor, up) in enumerate([*((each, True) for each in reads), *((each, False) for each in writes)]):
                x = left + STEP * (i + 1)
                low, high = (x, 0.22), (x, 0.95)
                axis.annotate("", high if up else low, low if up else high,
                              arrowprops={"arrowstyle": "-|>", "color": BLUE if up else ORANGE, "linewidth": 2,
                                          "linestyle": "-" if up else "--"})
                axis.text(x + 0.05, 0.6, tensor, fontsize=8, va="center")
            left += width + STEP / 2
        ends.append(left)
        count = sum(len(reads) + len(writes) for _, reads, writes in kernels)
        axis.set_title(f"{title}: {count} trips", fontsize=10, loc="left")
        axis.axis("off")
    for axis in figure.axes:
        axis.add_patch(FancyBboxPatch((0, 0), max(ends) - STEP / 2, 0.18, boxstyle="round,pad=0.02", facecolor=PALE,
                                      edgecolor="white"))
        axis.text((max(ends) - STEP / 2) / 2, 0.09, "memory", ha="center", va="center", fontsize=8, color=GRAY)
        axis.set_xlim(-0.1, max(ends))
        axis.set_ylim(-0.05, 1.6)
    return figure
