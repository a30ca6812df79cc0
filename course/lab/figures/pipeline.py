"""Figures of pipeline schedules: pure functions from the times of passes to a figure."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from course.lab.figures.style import panel
from course.parallel.pipeline_parallel.schedules import Pass, alive, bubble, idle_share, passes_of, timeline
from course.utils.colors import PALE, RANKS, STEP

When = Mapping[tuple[int, Pass], tuple[float, float]]
MOST_NUMBERED = 300                                  # with more boxes, they are too narrow for numbers
KINDS = {"F": "forward", "B": "backward", "W": "weight gradients"}
OPACITY = (1.0, 0.7, 0.5, 0.3)                       # of a chunk


def timelines(runs: Mapping[str, When], p: int, unit: str = "forward passes of a micro-batch", note: str = "") -> Figure:
    """Each rank's passes over time, one panel per run with a shared time axis: boxes with the micro-batch's number.

    `note` is the title above all panels.
    """
    figure = Figure(figsize=(9, (0.38 * p + 0.75) * len(runs) + 0.5), layout="constrained")
    longest = max(end for when in runs.values() for _, end in when.values())
    for number, (name, when) in enumerate(runs.items()):
        axis: Any = figure.add_subplot(len(runs), 1, number + 1)
        for (rank, work), (start, end) in when.items():
            axis.add_patch(Rectangle((start, rank - 0.42), end - start, 0.84, facecolor=STEP[KINDS[work.kind]],
                                     alpha=OPACITY[work.chunk % 4], edgecolor="white"))
            if len(when) <= MOST_NUMBERED:
                axis.text((start + end) / 2, rank, str(work.micro), ha="center", va="center", fontsize=7)
        axis.set_xlim(0, longest)
        axis.set_ylim(p - 0.5, -0.5)
        axis.set_yticks(range(p), [f"rank {rank}" for rank in range(p)])
        axis.set_facecolor(PALE)
        axis.set_title(f"{name}: idle {idle_share(when, p):.1%}", fontsize=10, loc="left")
    axis.set_xlabel(f"time ({unit})")
    if note:
        figure.suptitle(note, fontsize=9)
    chunks = 1 + max(work.chunk for when in runs.values() for _, work in when)
    there = {work.kind for when in runs.values() for _, work in when}
    boxes = [Patch(color=STEP[name], alpha=OPACITY[chunk], label=name + (f", chunk {chunk}" if chunks > 1 else ""))
             for chunk in range(min(chunks, 4)) for kind, name in KINDS.items() if kind in there]
    figure.legend(handles=[*boxes, Patch(color=PALE, label="idle")], loc="outside lower center", ncol=5, fontsize=8)
    return figure


def simulated(schedule: str, p: int, m: int, v: int = 1) -> Figure:
    """The simulated timeline of a schedule, with its theoretical bubble and the activations kept on each rank."""
    if schedule != "interleaved":
        v = 1
    elif m < p:
        m = p                                        # interleaving needs at least p micro-batches
    made = [passes_of(schedule, p, rank, m, v) for rank in range(p)]
    kept = ", ".join(f"{alive(passes) / v:g}" for passes in made)
    title = f"{schedule}, {p} ranks, {m} micro-batches" + (f", {v} chunks a rank" if v > 1 else "")
    note = f"in theory idle {bubble(p, m, v):.1%}; activations kept, in micro-batches of all of a rank's layers: {kept}"
    return timelines({title: timeline(made, v)}, p, note=note)


def activations_kept(runs: Mapping[str, list[list[Pass]]]) -> Figure:
    """Bars per rank: the most micro-batches whose activations it keeps."""
    figure, axis = panel(7, 3.2)
    width = 0.8 / len(runs)
    for number, ((name, made), color) in enumerate(zip(runs.items(), RANKS, strict=False)):
        heights = [alive(passes) for passes in made]
        axis.bar([rank + (number - (len(runs) - 1) / 2) * width for rank in range(len(made))], heights, width, label=name,
                 color=color, edgecolor="white")
    axis.set_xticks(range(len(made)), [f"rank {rank}" for rank in range(len(made))])
    axis.set_ylabel("micro-batches kept at most")
    axis.grid(alpha=0.3, axis="y")
    figure.legend(loc="outside lower center", ncol=len(runs), fontsize=9)
    return figure
