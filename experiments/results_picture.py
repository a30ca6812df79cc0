"""Draw the README's picture of the recorded results: `python -m experiments.results_picture docs/h200.png`.

Three panels: the weather ViT's speed from a plain loop to the fastest configuration; the library compared with alternatives on
the same kind of GPU; and the efficiency on four GPUs compared with PyTorch's own parallelism.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from course.bench.command_line import command
from course.bench.results import load
from course.utils import plots
from course.utils.colors import BLUE, ORANGE

OURS, THEIRS = BLUE, ORANGE
ONE_GPU = {"TF32, files read in line": "tf32, read by the training process", "TF32": "tf32, on the device",
          "bf16": "bf16, on the device", "compiled": "bf16, compiled", "narrow stream": "bf16, compiled, narrow stream",
          "fed by threads": "bf16, compiled, threads", "fed by DALI": "bf16, compiled, DALI"}
HAND = "compiled, narrow stream, Triton kernels, in a graph"
FP8, ENGINE = f"fp8, {HAND}", "fp8 by Transformer Engine"
# label -> (file, name of our row, name of theirs); compares step times
BASELINES = {"GPT 124M: Hugging Face's GPT-2, compiled": ("gpt", f"124M: bf16, {HAND}",
                                                       "124M: Hugging Face's GPT-2, bf16, compiled"),
          "GPT 1.3B, FP8: Transformer Engine": ("gpt", f"1.3B: {FP8}", f"1.3B: {ENGINE}"),
          "DiT-XL 256 px, FP8: Transformer Engine": ("dit", f"256 px: {FP8}", f"256 px: {ENGINE}"),
          "DiT-XL 512 px, FP8: Transformer Engine": ("dit", f"512 px: {FP8}", f"512 px: {ENGINE}"),
          "ViT-1024, FP8: Transformer Engine": ("vit", "width 1024: fp8, compiled, narrow stream",
                                                "width 1024: fp8 by Transformer Engine"),
          "attention, cp=4: context_parallel": ("cp", "64k causal ring", "64k causal PyTorch context_parallel"),
          "tp=4: DTensor, compiled": ("tp", "symmetric, compiled", "DTensor sequence parallel, compiled"),
          "dp=4: DDP": ("dp", "bucketed", "ddp")}
# the same for efficiencies on four GPUs
FOUR = {"tp": ("tp", "symmetric, compiled", "DTensor sequence parallel, compiled"), "cp, causal": ("cp", "64k causal all_to_all",
        "64k causal PyTorch context_parallel"), "cp, full": ("cp", "64k full all_to_all", "64k full PyTorch context_parallel"),
        "dp": ("dp", "bucketed", "ddp"), "pp, 1F1B": ("pp", "1f1b", "PyTorch 1F1B"),
        "pp, interleaved": ("pp", "interleaved", "PyTorch Interleaved1F1B")}


def row(file: str, name: str) -> dict[str, Any]:
    """The row of that name with the most GPUs."""
    found = [one for one in load(f"{file}_h200")["rows"] if name in (one.get("configuration"), one.get("case"))]
    best: dict[str, Any] = max(found, key=lambda one: one.get("gpus", 1))
    return best


def one_gpu() -> dict[str, float]:
    """Samples/s of each ViT configuration."""
    return {label: row("vit", config)["samples_per_s"] for label, config in ONE_GPU.items()}


def baselines() -> dict[str, float]:
    """Speedup over each alternative."""
    return {label: row(file, theirs)["ms"] / row(file, ours)["ms"] for label, (file, ours, theirs) in BASELINES.items()}


def four() -> dict[str, tuple[float, float]]:
    """(our efficiency on four GPUs, PyTorch's) per kind of parallelism."""
    return {label: (row(file, ours)["efficiency"], row(file, theirs)["efficiency"])
            for label, (file, ours, theirs) in FOUR.items()}


def draw() -> Figure:
    """Draw all three panels."""
    figure = Figure(figsize=(15, 4), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    steps = one_gpu()
    bars(first, steps, range(len(steps)), OURS, "{:.0f}")
    first.set_xlabel("samples/s")
    first.set_title("weather ViT, one H200")
    times = baselines()
    bars(second, times, range(len(times)), OURS, "{:.2f} x")
    second.axvline(1, color=THEIRS, linestyle="--")
    second.set_xlabel("times as fast as what stands after the colon")
    second.set_title("beside what one would take instead")
    shares = four()
    for which, (shift, color) in enumerate(((-0.2, OURS), (0.2, THEIRS))):
        places = [i + shift for i in range(len(shares))]
        bars(third, {name: both[which] for name, both in shares.items()}, places, color, "{:.0%}", 0.38)
    third.set_yticks(range(len(shares)), list(shares))
    third.set_xlabel("efficiency; orange: PyTorch's own")
    third.set_title("four H200s")
    return figure


def bars(axis: Any, values: dict[str, float], places: Iterable[float], color: str, form: str, height: float = 0.7) -> None:
    """Draw horizontal bars, the first on top, each with its value."""
    places = list(places)
    drawn = axis.barh(places, list(values.values()), height=height, color=color)
    axis.bar_label(drawn, [form.format(value) for value in values.values()], padding=3, fontsize=8)
    axis.set_yticks(places, list(values))
    axis.set_ylim(max(len(values), 1) - 0.4, -0.6)
    axis.set_xlim(right=1.15 * max(values.values()))
    axis.grid(alpha=0.3, axis="x")


if __name__ == "__main__":
    with command("FILE") as words:
        print(f"wrote {plots.save(draw(), Path(words[0]))}")
