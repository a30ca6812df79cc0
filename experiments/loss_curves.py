"""Loss curves in every number format that the machine supports: `python -m experiments.loss_curves FILE`.

--small takes seconds on a CPU. The task and the cases are those of lesson 04 (`course/lab/instruments/loss_curves.py`).
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from course.bench import timing
from course.bench.command_line import command
from course.lab.instruments.loss_curves import CASES, FROZEN, MEAN, REFERENCE, STEPS, gap, losses, means
from course.parallel import joined
from course.utils.atomic_files import write_json

SMALL = 60                                          # steps of --small


def measure(device: torch.device, steps: int) -> dict[str, Any]:
    """The curves of all cases that run here, their gaps to bf16's, and why the other cases do not run."""
    curves: dict[str, Tensor] = {}
    skipped: dict[str, str] = {}
    for name, overrides in CASES.items():
        if name == "tf32" and device.type == "cpu":
            skipped[name] = "a CPU has no TF32: it would be fp32 again"
            continue
        try:
            curves[name] = losses(overrides, device, steps, name == FROZEN)
        except Exception as error:                  # the package or GPU lacks something: skip this curve only
            skipped[name] = " ".join(f"{error or type(error).__name__}".split())[:300]
    gaps = {name: gap(curve, curves[REFERENCE]) for name, curve in curves.items()}
    return {"steps": steps, "mean of": MEAN, "gap": gaps, "skipped": skipped,
            "curves": {name: [round(loss, 6) for loss in curve.tolist()] for name, curve in curves.items()}}


def main(file: Path, small: bool) -> None:
    """Measure, print, and write the curves as JSON."""
    with joined("cpu" if small else "auto") as world:
        if world.device.type == "cpu":
            torch.set_num_threads(1)                    # the tensors are too small for more threads
        found = {**timing.machine(world.device), "command": "python -m experiments.loss_curves FILE" + " --small" * small,
                 "meaning": "losses of a small ViT from the same weights and batches; gap: of means, relative to bf16's, at most",
                 **measure(world.device, SMALL if small else STEPS)}
    for name, value in found["gap"].items():
        print(f"{name:32s} ends at {means(torch.tensor(found['curves'][name]))[-1]:.4f}, at most {value:7.2%} from bf16's")
    for name, why in found["skipped"].items():
        print(f"{name:32s} left out: {why}")
    write_json(file, found)


if __name__ == "__main__":
    with command("FILE [--small]") as words:
        main(Path(words[0]), small="--small" in sys.argv)
