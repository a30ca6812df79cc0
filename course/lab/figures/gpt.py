"""Figures of lesson 14: token files and their samples, the memory of logits, and the grid of dp x tp x pp."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from course import config
from course.bench.megatron_grid import CASES, Case
from course.lab.figures.style import bar_rows, bars, panel
from course.planner import flops
from course.utils.colors import AXES, BLUE, GRAY, RANKS

KINDS = {**{name: AXES[name] for name in ("dp", "tp", "pp", "several")}, "one GPU": GRAY}
# choices of the widget: name -> cases of the source
GROUPS = {"8 GPUs, 1536x16": [c for c in CASES if c.name.endswith("_16_1536x16")],
          "tp within a node and across": [c for c in CASES if c.layout[1] >= 8 and c.layout[2] == 1],
          "data parallel": [c for c in CASES if c.layout[1:] == (1, 1) and c.name.endswith("1536x16")],
          "pipelines": [c for c in CASES if c.layout[2] > 1],
          "all": list(CASES)}


def packed_samples(lengths: Sequence[int], context: int) -> Figure:
    """Concatenated documents, a box per token in its document's color; below, the samples cut from them."""
    total = sum(lengths)
    samples = max(0, total - 1) // context
    figure, axis = panel(9, 1.0 + 0.42 * samples)
    start = 0
    for number, (length, color) in enumerate(zip(lengths, cycle(RANKS))):
        for token in range(start, start + length):
            axis.add_patch(Rectangle((token, 0.1), 1, 0.8, facecolor=color, edgecolor="white"))
        axis.text(start + length / 2, 0.5, f"document {number}" if length > 5 else str(number), ha="center", va="center",
                  color="white", fontsize=8)
        start += length
    for sample in range(samples):
        row, first = -0.9 - 0.9 * sample, sample * context
        axis.add_patch(Rectangle((first, row), context, 0.7, facecolor=GRAY, alpha=0.35, edgecolor=GRAY))
        axis.add_patch(Rectangle((first + context, row), 1, 0.7, facecolor="white", edgecolor=GRAY, hatch="///"))
        axis.text(first + context / 2, row + 0.35, f"sample {sample}", ha="center", va="center", fontsize=8)
    axis.set_xlim(-0.3, total + 0.3)
    axis.set_ylim(-0.9 * samples - 0.2, 1.0)
    axis.set_axis_off()
    axis.set_title(f"{total} tokens of {len(lengths)} documents; samples of {context} and one token more (hatched)", fontsize=9)
    return figure


def kind(layout: tuple[int, int, int]) -> str:
    """Which axis of (dp, tp, pp) is larger than 1: its name, "several" or "one GPU" (keys of `KINDS`)."""
    names = [name for name, size in zip(("dp", "tp", "pp"), layout, strict=True) if size > 1]
    return names[0] if len(names) == 1 else "several" if names else "one GPU"


def tflops(case: Case, ms: float = 0.0) -> float:
    """Model TFLOP/s per GPU in a case that takes `ms` per iteration, by default the source's time."""
    c = config.load("gpt-124m", case.settings)
    return flops.step(c.model, c.train.global_batch) / ((ms or case.ms) / 1e3) / case.gpus / 1e12


def grid(cases: Sequence[Case], title: str = "") -> Figure:
    """Three panels over the source's cases: milliseconds per iteration, MiB and model TFLOP/s per GPU."""
    figure = Figure(figsize=(11, 0.34 * len(cases) + 1.5), layout="constrained")
    axes: Any = figure.subplots(1, 3, sharey=True)
    kinds = {case.name: kind(case.layout) for case in cases}
    colors = {name: KINDS.get(of, BLUE) for name, of in kinds.items()}
    panels: dict[str, dict[str, float]] = {
        "ms an iteration": {case.name: case.ms for case in cases}, "MiB of a GPU": {case.name: case.mib for case in cases},
        "TFLOP/s of a GPU": {case.name: tflops(case) for case in cases}}
    for axis, (unit, values) in zip(axes, panels.items(), strict=True):
        bar_rows(axis, values, unit, "", colors)
    there = [name for name in KINDS if name in kinds.values()]
    figure.legend(handles=[Patch(color=KINDS[name], label=name) for name in there], loc="outside lower center", ncol=len(there),
                  fontsize=9, frameon=False)
    figure.suptitle(title, fontsize=10)
    return figure


def explore_cases(cases: str) -> Figure:
    """The widget's figure: the source's cases in one of `GROUPS`."""
    return grid(GROUPS[cases], f"{cases}: V100 GPUs of 16 GB, 8 in a node")


def measured(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Model TFLOP/s per GPU in our own measurements, one panel per software."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if "tflops" in row:
            found.setdefault(row["by"], {})[row["case"]] = row["tflops"]
    counts = [len(values) for values in found.values()]
    figure = Figure(figsize=(9, 0.34 * sum(counts) + 0.6 * len(found) + 0.8), layout="constrained")
    axes: Any = figure.subplots(len(found), 1, squeeze=False, sharex=True, height_ratios=counts)
    most = max(value for values in found.values() for value in values.values())
    for axis, (by, values) in zip(axes[:, 0], found.items(), strict=True):
        bar_rows(axis, values, "", by, {name: KINDS.get(kind(Case(name, 0, 0, 0).layout), BLUE) for name in values})
        axis.set_xlim(0, 1.15 * most)
    axes[-1, 0].set_xlabel("model TFLOP/s of a GPU")
    return figure


def describe_measured(rows: Sequence[Mapping[str, Any]]) -> str:
    """Alt text for `measured`: the slowest and the fastest case of each software."""
    told = []
    for by in dict.fromkeys(row["by"] for row in rows):
        slow, *_, fast = sorted((row for row in rows if row["by"] == by and "tflops" in row), key=lambda row: row["tflops"]) * 2
        told.append(f"{by} from {slow['tflops']:.0f} ({slow['case']}) to {fast['tflops']:.0f} ({fast['case']})")
    return "; ".join(told)


def table(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """A row for each of our own cases: the source's case that it scales down, GPUs, and each software's measurements."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        source = "" if row["source"] == row["case"] else row["source"]
        found.setdefault(row["case"], {"stands for": source, "GPUs": str(row["gpus"])})
    for case, values in found.items():
        for by in dict.fromkeys(row["by"] for row in rows):
            mine = next((row for row in rows if row["case"] == case and row["by"] == by), {})
            taken = f"{mine['ms']:,.0f} ms, {mine['mib']:,.0f} MiB, {mine['tflops']:.0f} TFLOP/s" if "ms" in mine else ""
            error = mine.get("error", "")
            values[by] = taken or ("does not fit" if "out of memory" in error else error)
    return found


def logits_bytes(batch: int, tokens: int, vocab: int, tp: int = 1, chunk: int = 0) -> int:
    """Bytes of float32 logits that a rank holds at a time: for all its tokens or a chunk, and its part of the vocabulary."""
    return (min(chunk, batch * tokens) or batch * tokens) * (vocab // tp) * 4


def explore_logits(vocabulary: int, batch: int, tp: int, chunk: int) -> Figure:
    """The widget's figure: logits that a rank holds at a time, and activations of GPT 124M's 12 blocks for the same tokens."""
    block = 16 * batch * 1024 * 768 * 2
    values = {"logits of all tokens": logits_bytes(batch, 1024, vocabulary) / 1e9,
              "as chosen": logits_bytes(batch, 1024, vocabulary, tp, chunk) / 1e9,
              "kept by 12 blocks": 12 * block / 1e9}
    return bars(values, "GB", f"{batch} x 1024 tokens: logits in float32, activations of GPT 124M in bf16")
