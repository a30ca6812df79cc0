"""The colors of all figures: one color for one concept, from colors that color-blind people can tell apart (Okabe and Ito's).

There are more concepts than such colors, so only those of one group differ from each other.
"""

BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, AMBER, YELLOW = "#56B4E9", "#E69F00", "#F0E442"
DARK, GRAY, LIGHT, PALE = "#555555", "#666666", "#BBBBBB", "#DDDDDD"

RANKS = (BLUE, ORANGE, GREEN, PURPLE, SKY, GRAY)     # and groups of ranks, Triton programs, documents: members of a sequence
AXES = {"pp": YELLOW, "dp": AMBER, "cp": PURPLE, "tp": ORANGE, "ep": SKY, "several": GREEN}
# the parts of a step; "gradients" is averaging and clipping them
STEP = {"forward": BLUE, "backward": ORANGE, "weight gradients": AMBER, "gradients": SKY, "optimizer": GREEN,
        "communication": PURPLE, "copy": AMBER, "data": YELLOW, "launch": DARK, "idle": LIGHT}
KERNELS = {"matmul": BLUE, "attention": SKY, "optimizer": STEP["optimizer"], "communication": STEP["communication"],
           "copy": STEP["copy"], "other": LIGHT}
COLLECTIVES = {"all-reduce": PURPLE, "all-gather": SKY, "reduce-scatter": GREEN, "all-to-all": YELLOW, "send": AMBER}
MEMORY = {"weights": BLUE, "gradients": STEP["gradients"], "optimizer states": STEP["optimizer"], "activations": ORANGE,
          "logits": AMBER, "workspace": YELLOW, "reserve": GRAY}
FORMATS = {"fp32": GRAY, "tf32": PURPLE, "bf16": BLUE, "fp16": GREEN, "E5M2": ORANGE, "E4M3": SKY}

FIELD, SIGNED, COUNT = "viridis", "PuOr", "Blues"    # color maps of fields, of fields with both signs, and of small numbers


def field_map(low: float, high: float) -> tuple[str, float, float]:
    """(color map, its lowest, its highest value) of a field: a field with both signs diverges from 0."""
    most = max(-low, high)
    return (SIGNED, -most, most) if low < 0 < high else (FIELD, low, high)
