"""Figures of kernel launches, one by one and as a graph, and of the memory that replays read and write."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch

from course.lab.figures.style import label, name_rows, panel
from course.utils.colors import BLUE, GRAY, GREEN, ORANGE, PALE, SKY, STEP

Bar = tuple[str, float, float]                       # "host" or "GPU", begin, length


def eager_bars(launches: Sequence[float], works: Sequence[float], gap: float) -> list[Bar]:
    """The bars of host and GPU when the host launches kernel after kernel, in the unit of the arguments."""
    bars: list[Bar] = []
    host, gpu = 0.0, -gap
    for launch, work in zip(launches, works, strict=True):
        bars += [("host", host, launch)]
        host += launch
        gpu = max(host, gpu + gap)
        bars += [("GPU", gpu, work)]
        gpu += work
    return bars


def graph_bars(works: Sequence[float], once: float, gap: float) -> list[Bar]:
    """The bars of host and GPU when the host launches all kernels as one graph."""
    bars: list[Bar] = [("host", 0.0, once)]
    now = once
    for work in works:
        bars += [("GPU", now, work)]
        now += work + gap
    return bars


def timeline(rows: Mapping[str, Sequence[Bar]], unit: str = "µs", title: str = "") -> Figure:
    """Steps, name -> bars, on a shared time axis, with a row for the host and one for the GPU each."""
    figure, axis = panel(9, 0.95 * len(rows) + 1.5)
    names = [f"{name}: {lane}" for name in rows for lane in ("host", "GPU")]
    for name, bars in rows.items():
        for lane, begin, length in bars:
            axis.barh(names.index(f"{name}: {lane}"), length, left=begin, height=0.7, edgecolor="white", linewidth=0.5,
                      color=STEP["launch"] if lane == "host" else BLUE)
        end = max(begin + length for _, begin, length in bars)
        axis.axvline(end, color=GRAY, linestyle=":", linewidth=1)
        axis.text(end, names.index(f"{name}: host"), f" {end:.3g} {unit}", va="center", fontsize=9, color=GRAY)
    name_rows(axis, names)
    axis.set_xlim(0, 1.12 * max(begin + length for bars in rows.values() for _, begin, length in bars))
    label(axis, x=unit, title=title)
    figure.legend(handles=[Patch(color=STEP["launch"], label="the host launches"), Patch(color=BLUE, label="the GPU works")],
                  loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def buffers() -> Figure:
    """Where a replay reads and writes: batches come and go, captured tensors keep their addresses."""
    figure, axis = panel(9, 3.4)

    def box(x: float, y: float, wide: float, text: str, color: str, dashed: bool = False) -> None:
        axis.add_patch(FancyBboxPatch((x, y), wide, 0.62, boxstyle="round,pad=0.03", facecolor="white" if dashed else color,
                                      edgecolor=color, linewidth=1.5, linestyle="--" if dashed else "-"))
        axis.text(x + wide / 2, y + 0.31, text, ha="center", va="center", fontsize=9, color="black" if dashed else "white")

    def arrow(start: tuple[float, float], stop: tuple[float, float], text: str = "") -> None:
        axis.annotate("", stop, start, arrowprops={"arrowstyle": "->", "color": GRAY, "linewidth": 1.5})
        axis.text((start[0] + stop[0]) / 2, max(start[1], stop[1]) + 0.1, text, ha="center", fontsize=9, color=GRAY)

    axis.add_patch(FancyBboxPatch((2.95, 0.55), 4.3, 1.6, boxstyle="round,pad=0.05", facecolor=PALE, alpha=0.4, edgecolor=GRAY))
    axis.text(5.1, 2.32, "the graph: addresses of the capture, for good", ha="center", fontsize=9, color=GRAY)
    for row, call in enumerate(("call 4", "call 5", "call 6")):
        box(0.0, 2.0 - 0.95 * row, 1.6, f"batch of {call}", SKY, dashed=True)
        box(8.6, 2.0 - 0.95 * row, 1.6, f"loss of {call}", GREEN, dashed=True)
    arrow((1.7, 1.36), (3.0, 1.36), "copy_")
    box(3.1, 1.05, 1.1, "captured\nbatch", BLUE)
    arrow((4.28, 1.36), (4.72, 1.36))
    box(4.75, 1.05, 0.95, "kernels", ORANGE)
    arrow((5.78, 1.36), (6.15, 1.36))
    box(6.2, 1.05, 0.95, "captured\nloss", GREEN)
    arrow((7.25, 1.36), (8.5, 1.36), "clone")
    axis.set_xlim(-0.1, 10.3)
    axis.set_ylim(-0.1, 2.75)
    axis.axis("off")
    return figure
