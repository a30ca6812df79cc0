"""A small task that compares number formats by loss curves, for lesson 04 and `experiments/loss_curves.py`.

A small ViT learns a nonlinear function of random waves. All cases share weights and batches, so that curves differ only by the
number format. The first sample of the first batch is difficult: its target is a millionth of the others'. The loss is relative,
so its gradient is a million times larger than later ones. Clipping makes that step harmless, but amax histories remember it: a
gradient format with too narrow a range loses the gradients that follow.

Besides the formats of the machine, two cases are wrong on purpose: gradients in E4M3, and scales that are never updated.
"""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from course import config
from course.data import Batch
from course.parallel import World, build_mesh
from course.training.assemble import Training
from course.training.assemble import assemble as assemble_training

STEPS, MEAN = 300, 20                               # losses in a curve, without the first step; losses per mean
SAMPLES = 8                                         # per batch
VIT = ("model.grid=[16,32]", "model.patch=4", "model.channels=2", "model.dim=32", "model.depth=3", "model.heads=2",
       "model.residual=false", "data.source=mock", f"train.steps={STEPS + 1}", f"train.global_batch={SAMPLES}", "optim.lr=5e-3",
       "optim.warmup=40", "optim.clip=1")
REFERENCE, FROZEN = "bf16", "native fp8, scales frozen"
CASES: dict[str, tuple[str, ...]] = {
    "fp32": ("precision=fp32",), "tf32": ("precision=tf32",), "fp16": ("precision=fp16",), REFERENCE: ("precision=bf16",),
    "native fp8, delayed": ("precision=fp8",), "native fp8, current": ("precision=fp8", "fp8.recipe=current"),
    "native fp8, gradients in E4M3": ("precision=fp8", "fp8.gradients=e4m3"), FROZEN: ("precision=fp8",),
    **{f"TE, {recipe}": ("precision=fp8", "fp8.by=te", f"fp8.recipe={recipe}") for recipe in ("delayed", "current", "block")}}


@cache
def waves() -> Tensor:
    """Twelve plane waves on the grid, (12, 16, 32)."""
    y, x = torch.linspace(0, 6.283, 17)[:16, None], torch.linspace(0, 6.283, 33)[None, :32]
    return torch.stack([torch.sin(a * y + b * x + phase) for a in (0, 1) for b in (1, 2, 3) for phase in (0, 1.57)])


def batches(steps: int) -> Iterator[Batch]:
    """Random sums of waves, (8, 2, 16, 32), and a nonlinear function of them, on the CPU; the same in every call."""
    generator = torch.Generator().manual_seed(0)
    for number in range(steps):
        x = torch.einsum("bci,iyx->bcyx", torch.randn(SAMPLES, 2, 12, generator=generator), waves()) / 2.1
        target = x + torch.tanh(2 * x) * x.flip(1)
        if number == 0:
            target[0] *= 1e-6
        yield {"input": x, "target": target, "sample": torch.arange(SAMPLES)}


def assemble(overrides: tuple[str, ...], device: torch.device) -> Training:
    """Assemble the training of the small ViT with these settings, in one process."""
    c = config.load("vit-demo", [*VIT, f"train.device={device.type}", *overrides])
    return assemble_training(c, build_mesh(c.parallel, World(device=device)))


def losses(overrides: tuple[str, ...], device: torch.device, steps: int = STEPS, frozen: bool = False) -> Tensor:
    """The loss of each step except the first, (steps,). `frozen`: keep FP8's scales from after the first step."""
    training, found = assemble(overrides, device), []
    for batch in batches(steps + 1):
        found.append(training.step({name: tensor.to(device) for name, tensor in batch.items()})[0])
        if frozen:
            training.scaling.update = lambda bad: None      # type: ignore[method-assign]
    return torch.stack(found[1:]).cpu()


def means(curve: Tensor) -> Tensor:                                     # (steps,) -> (steps // 20,)
    """Average a curve over windows of 20 losses, because single losses are noisy."""
    return curve.unfold(0, MEAN, MEAN).mean(1)


def gap(curve: Tensor, reference: Tensor) -> float:                     # 2 x (steps,)
    """The largest relative difference between the means of two curves."""
    return (means(curve) / means(reference) - 1).abs().max().item()
