"""Pictures of where the bytes of training go, and how many there are by counting."""

from matplotlib.figure import Figure

from course.lab.figures.style import stacked
from course.planner.hardware import load

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


def explore_memory(size: str, precision: str, dp: int, zero: int, recompute: str) -> Figure:
    """What a rank of such a training needs, with nothing saved and as chosen, beside the memory of a GPU."""
    bars = {"nothing saved": footprint(size, precision, 1, 0, "none"),
            f"ZeRO-{zero} over {dp}, recompute {recompute}": footprint(size, precision, dp, zero, recompute)}
    return stacked(bars, "GB", limits={"one H200": load("h200").memory / 1e9},
                   title=f"{size} parameters, {precision}, Adam, 4096 tokens on a rank")
