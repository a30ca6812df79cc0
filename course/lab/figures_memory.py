"""Pictures of where the bytes of training go, and how many there are by counting."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from course.lab.figures import BLUE, GREEN, GREY, ORANGE, PURPLE

COLOURS = {"weights": BLUE, "gradients": ORANGE, "optimizer states": PURPLE, "activations": GREEN}
# width, depth, of GPTs with about as many parameters; 12·depth·width² each, embeddings aside
SIZES = {"0.35 B": (1024, 24), "1.3 B": (2048, 24), "7 B": (4096, 32), "13 B": (5120, 40), "70 B": (8192, 80)}
# bytes a parameter: weights, gradients, states. bf16 has a float32 copy of the weights among the states (arXiv:1910.02054, 3.1)
PRECISIONS = {"fp32": (4, 4, 8), "bf16": (2, 2, 12)}
# numbers that a block keeps for each token, in units of its width; see lesson 13
KEPT = {"none": 16, "selective": 11, "full": 1}


def footprint(size: str, precision: str, dp: int, zero: int, recompute: str, tokens: int = 4096) -> dict[str, float]:
    """GB on each rank, by kind, for a GPT of `SIZES` and so many tokens on a rank. Logits and work space are left out."""
    width, depth = SIZES[size]
    parameters = 12 * depth * width**2
    weights, gradients, states = (parameters * each / 1e9 for each in PRECISIONS[precision])
    itemsize = PRECISIONS[precision][0]
    kept = KEPT[recompute] * depth + (KEPT["none"] if recompute == "full" else 0)       # one block whole, while it is recomputed
    return {"weights": weights / (dp if zero >= 3 else 1), "gradients": gradients / (dp if zero >= 2 else 1),
            "optimizer states": states / (dp if zero >= 1 else 1), "activations": kept * tokens * width * itemsize / 1e9}


def stacked(bars: Mapping[str, Mapping[str, float]], unit: str = "GB", limits: Mapping[str, float] | None = None,
            title: str = "") -> Figure:
    """A horizontal bar for each name, in pieces by kind, with its total; `limits` are vertical lines to stay below."""
    figure = Figure(figsize=(8, 0.5 * len(bars) + 1.7), layout="constrained")
    axis: Any = figure.subplots()
    named: set[str] = set()
    for row, parts in enumerate(bars.values()):
        start = 0.0
        for kind, value in parts.items():
            axis.barh(row, value, left=start, color=COLOURS.get(kind, GREY), edgecolor="white",
                      label=None if kind in named else kind)
            named.add(kind)
            start += value
        axis.annotate(f"{start:.3g} {unit}", (start, row), (4, 0), textcoords="offset points", va="center", fontsize=9,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1}, zorder=3)          # over a limit's line
    for name, limit in (limits or {}).items():
        axis.axvline(limit, color=GREY, linestyle="--")
        axis.text(limit, -0.72, f"{name} ", fontsize=8, ha="right", va="center", color=GREY)
    axis.set_yticks(range(len(bars)), list(bars))
    axis.set_ylim(len(bars) - 0.5, -1.0)
    axis.set_xlim(0, 1.18 * max([*(sum(parts.values()) for parts in bars.values()), *(limits or {}).values()]))
    axis.set_xlabel(unit)
    if title:
        axis.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncol=len(named), fontsize=9)
    return figure


def explained(size: str, precision: str, dp: int, zero: int, recompute: str) -> Figure:
    """What a rank of such a training needs, with nothing saved and as chosen, beside the memory of a GPU."""
    bars = {"nothing saved": footprint(size, precision, 1, 0, "none"),
            f"ZeRO-{zero} over {dp}, recompute {recompute}": footprint(size, precision, dp, zero, recompute)}
    return stacked(bars, limits={"one H200": 141.0}, title=f"{size} parameters, {precision}, Adam, 4096 tokens on a rank")
