"""Figures of training memory by kind, from counting parameters and activations."""

from matplotlib.figure import Figure

from course.lab.figures.style import stacked
from course.planner.hardware import load

# (width, depth) of GPTs with about this many parameters: 12·depth·width², without embeddings
SIZES = {"0.35 B": (1024, 24), "1.3 B": (2048, 24), "7 B": (4096, 32), "13 B": (5120, 40), "70 B": (8192, 80)}
# bytes per parameter: weights, gradients, states; for bf16 states include float32 weights (arXiv:1910.02054, 3.1)
PRECISIONS = {"fp32": (4, 4, 8), "bf16": (2, 2, 12)}
# activations that a block keeps per token, in units of its width; see lesson 13
KEPT = {"none": 16, "selective": 11, "full": 1}


def footprint(size: str, precision: str, dp: int, zero: int, recompute: str, tokens: int = 4096) -> dict[str, float]:
    """GB per rank by kind, for a GPT of `SIZES` with `tokens` tokens per rank, without logits and workspace."""
    width, depth = SIZES[size]
    parameters = 12 * depth * width**2
    weights, gradients, states = (parameters * each / 1e9 for each in PRECISIONS[precision])
    itemsize = PRECISIONS[precision][0]
    kept = KEPT[recompute] * depth + (KEPT["none"] if recompute == "full" else 0)       # plus one full block during recomputation
    return {"weights": weights / (dp if zero >= 3 else 1), "gradients": gradients / (dp if zero >= 2 else 1),
            "optimizer states": states / (dp if zero >= 1 else 1), "activations": kept * tokens * width * itemsize / 1e9}


def explore_memory(size: str, precision: str, dp: int, zero: int, recompute: str) -> Figure:
    """Memory per rank without any savings and with the chosen ones, compared with the memory of one H200."""
    bars = {"nothing saved": footprint(size, precision, 1, 0, "none"),
            f"ZeRO-{zero} over {dp}, recompute {recompute}": footprint(size, precision, dp, zero, recompute)}
    return stacked(bars, "GB", limits={"one H200": load("h200").memory / 1e9},
                   title=f"{size} parameters, {precision}, Adam, 4096 tokens on a rank")
