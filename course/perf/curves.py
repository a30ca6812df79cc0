"""Loss curves in every number format that a machine has: `python -m course.perf.curves FILE`; with --small in seconds on a CPU.

A small ViT learns a nonlinear function of random waves, in each case from the same weights and the same batches, so that the
number format is all in which the curves differ. One sample is made to be difficult: the target of the first one in the first
batch is a millionth of the others'. The loss is relative, so its gradient is a million times as large as those that follow.
Clipping makes that step harmless, but amax histories remember it: a format of gradients with too narrow a range loses what
follows.

Besides what the machine has there are two that are wrong on purpose: gradients in E4M3, and scales that are never renewed.
"""

import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from course import config, train
from course.data import Batch
from course.files import atomic
from course.parallel import World, build_mesh, joined
from course.perf import bench
from course.perf.command import command

STEPS, MEAN = 300, 20                               # losses in a curve, after that of the first step; and in each mean of it
SAMPLES = 8                                         # in a batch
SMALL = 60                                          # steps of --small
VIT = ("model.grid=[16,32]", "model.patch=4", "model.channels=2", "model.dim=32", "model.depth=3", "model.heads=2",
       "model.residual=false", "data.source=mock", f"train.steps={STEPS + 1}", f"train.global_batch={SAMPLES}", "optim.lr=5e-3",
       "optim.warmup=40", "optim.clip=1")
REFERENCE, FROZEN = "bf16", "fp8 by hand, scales frozen"
CASES: dict[str, tuple[str, ...]] = {
    "fp32": ("precision=fp32",), "tf32": ("precision=tf32",), "fp16": ("precision=fp16",), REFERENCE: ("precision=bf16",),
    "fp8 by hand, delayed": ("precision=fp8",), "fp8 by hand, current": ("precision=fp8", "fp8.recipe=current"),
    "fp8 by hand, gradients in E4M3": ("precision=fp8", "fp8.gradients=e4m3"), FROZEN: ("precision=fp8",),
    **{f"TE, {recipe}": ("precision=fp8", "fp8.by=te", f"fp8.recipe={recipe}") for recipe in ("delayed", "current", "block")}}


@cache
def waves() -> Tensor:
    """Twelve plane waves on the grid, (12, 16, 32)."""
    y, x = torch.linspace(0, 6.283, 17)[:16, None], torch.linspace(0, 6.283, 33)[None, :32]
    return torch.stack([torch.sin(a * y + b * x + phase) for a in (0, 1) for b in (1, 2, 3) for phase in (0, 1.57)])


def batches(steps: int) -> Iterator[Batch]:
    """Random sums of waves, (8, 2, 16, 32), and a nonlinear function of them; the same in every call, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    for number in range(steps):
        x = torch.einsum("bci,iyx->bcyx", torch.randn(SAMPLES, 2, 12, generator=generator), waves()) / 2.1
        target = x + torch.tanh(2 * x) * x.flip(1)
        if number == 0:
            target[0] *= 1e-6
        yield {"input": x, "target": target, "sample": torch.arange(SAMPLES)}


def assemble(overrides: tuple[str, ...], device: torch.device) -> train.Training:
    """What trains the small ViT with these settings, in one process."""
    c = config.load("vit-demo", [*VIT, f"train.device={device.type}", *overrides])
    return train.assemble(c, build_mesh(c.parallel, World(device=device)))


def losses(overrides: tuple[str, ...], device: torch.device, steps: int = STEPS, frozen: bool = False) -> Tensor:
    """The loss of each step but the first, (steps,); `frozen`: FP8's scales stay what they are after the first step."""
    training, found = assemble(overrides, device), []
    for batch in batches(steps + 1):
        found.append(training.step({name: tensor.to(device) for name, tensor in batch.items()})[0])
        if frozen:
            training.scaling.update = lambda bad: None      # type: ignore[method-assign]
    return torch.stack(found[1:]).cpu()


def means(curve: Tensor) -> Tensor:                                     # (steps,) -> (steps // 20,)
    """A curve in means of 20 losses: single ones are noise."""
    return curve.unfold(0, MEAN, MEAN).mean(1)


def gap(curve: Tensor, reference: Tensor) -> float:                     # 2 x (steps,)
    """How far the means of a curve are from those of another at most, relative."""
    return (means(curve) / means(reference) - 1).abs().max().item()


def measure(device: torch.device, steps: int) -> dict[str, Any]:
    """The curves of all cases that run here, their gaps to bf16's, and why the others do not run."""
    curves: dict[str, Tensor] = {}
    skipped: dict[str, str] = {}
    for name, overrides in CASES.items():
        if name == "tf32" and device.type == "cpu":
            skipped[name] = "a CPU has no TF32: it would be fp32 again"
            continue
        try:
            curves[name] = losses(overrides, device, steps, name == FROZEN)
        except Exception as error:                  # of a package or a GPU that lacks something: the other curves still count
            skipped[name] = " ".join(f"{error or type(error).__name__}".split())[:300]
    gaps = {name: gap(curve, curves[REFERENCE]) for name, curve in curves.items()}
    return {"steps": steps, "mean of": MEAN, "gap": gaps, "skipped": skipped,
            "curves": {name: [round(loss, 6) for loss in curve.tolist()] for name, curve in curves.items()}}


def main(file: Path, small: bool) -> None:
    """Measure, print, and write the curves as JSON."""
    with joined("cpu" if small else "auto") as world:
        if world.device.type == "cpu":
            torch.set_num_threads(1)                    # the tensors are too small to be shared
        found = {**bench.machine(world.device), "command": "python -m course.perf.curves FILE" + " --small" * small,
                 "meaning": "losses of a small ViT from the same weights and batches; gap: of means, relative to bf16's, at most",
                 **measure(world.device, SMALL if small else STEPS)}
    for name, value in found["gap"].items():
        print(f"{name:32s} ends at {means(torch.tensor(found['curves'][name]))[-1]:.4f}, at most {value:7.2%} from bf16's")
    for name, why in found["skipped"].items():
        print(f"{name:32s} left out: {why}")
    with atomic(file) as temporary:
        temporary.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    with command("FILE [--small]") as words:
        main(Path(words[0]), small="--small" in sys.argv)
