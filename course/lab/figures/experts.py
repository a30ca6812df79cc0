"""Figures of mixtures of experts: the experts' loads over training, which expert takes which token, the ranks' tokens."""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

from matplotlib.figure import Figure

from course.lab.figures.style import label
from course.lab.instruments.expert_placement import Placement, rank_tokens
from course.utils.colors import AMBER, GRAY, LIGHT, PURPLE, RANKS, SKY

EXPERTS = (*RANKS, AMBER, LIGHT)                     # eight differ
BRIGHT = (PURPLE, SKY, AMBER, LIGHT)                 # colors on which text is black


def expert_colors(count: int) -> list[str]:
    """A color for each expert."""
    return list(islice(cycle(EXPERTS), count))


def loads(runs: dict[str, Sequence[Sequence[float]]], title: str = "") -> Figure:
    """For each run a panel: the share of the choices that each expert gets, stacked, over the steps."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes: Any = figure.subplots(1, len(runs), squeeze=False, sharey=True)
    for axis, (name, steps) in zip(axes[0], runs.items(), strict=True):
        axis.stackplot(range(len(steps)), *zip(*steps, strict=True), colors=expert_colors(len(steps[0])), edgecolor="white",
                       linewidth=0.3)
        axis.set(ylim=(0, 1), xlim=(0, len(steps) - 1))
        label(axis, x="step", title=name)
    axes[0, 0].set_ylabel("share of the choices")
    figure.suptitle(title, fontsize=10)
    return figure


def tokens(lines: Sequence[Sequence[tuple[str, int]]], experts: int, title: str = "") -> Figure:
    """Lines of text, token by token, each on the color of its first expert. lines: (text, expert) pairs."""
    figure = Figure(figsize=(9, 0.34 * len(lines) + 1.0), layout="constrained")
    axis: Any = figure.subplots()
    colors, widest = expert_colors(experts), 0.0
    for row, line in enumerate(lines):
        column = 0.0
        for text, expert in line:
            shown = text.replace("\n", "⏎")
            axis.text(column, row, shown.replace(" ", "·"), family="monospace", fontsize=8.5, va="center",
                      color="black" if colors[expert] in BRIGHT else "white",
                      bbox={"facecolor": colors[expert], "edgecolor": "white", "pad": 1.5})
            column += len(shown) + 0.8
        widest = max(widest, column)
    axis.set(xlim=(-1, widest + 1), ylim=(len(lines) - 0.4, -0.6))
    axis.axis("off")
    for expert, color in enumerate(colors):
        axis.plot([], [], "s", color=color, label=str(expert))
    figure.legend(loc="outside lower center", ncols=experts, frameon=False, fontsize=8, title="expert", title_fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def placements(tokens: Sequence[int], several: dict[str, Placement], title: str = "") -> Figure:
    """For each placement a panel: a bar for each rank, of its experts' shares of the tokens, with their numbers; the mean."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes: Any = figure.subplots(1, len(several), squeeze=False, sharey=True)
    colors = expert_colors(len(tokens))
    for axis, (name, placement) in zip(axes[0], several.items(), strict=True):
        load, mean = rank_tokens(tokens, placement), sum(tokens) / len(placement)
        for rank, experts in enumerate(placement):
            bottom = 0.0
            for expert in experts:
                height = tokens[expert] / sum(expert in row for row in placement)
                axis.bar(rank, height, bottom=bottom, color=colors[expert], edgecolor="white", linewidth=0.5)
                if height > 0.05 * max(load):
                    axis.text(rank, bottom + height / 2, str(expert), ha="center", va="center", fontsize=9,
                              color="black" if colors[expert] in BRIGHT else "white")
                bottom += height
        axis.axhline(mean, color=GRAY, linestyle="--")
        axis.set_xticks(range(len(placement)), [f"rank {rank}\n{', '.join(map(str, experts))}"
                                                for rank, experts in enumerate(placement)], fontsize=8)
        label(axis, title=f"{name}: busiest / mean {max(load) / mean:.2f}")
    axes[0, 0].set_ylabel("tokens")
    figure.suptitle(title, fontsize=10)
    return figure
