"""Lesson 08: the noise in a gradient, a learning-rate schedule, and the samples that training needs to a target."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from course import step
from course.config import Optim, Train
from course.lab import returned, tiny
from course.lab.exercise import Exercise, Tensors


def noise_scale(small: float, large: float, b: int, B: int) -> float:
    """tr(S) / |G|^2 in samples, from the mean squared norms of gradients over b and over B samples, b < B."""
    signal = (B * large - b * small) / (B - b)                          # |G|^2
    noise = (small - large) / (1 / b - 1 / B)                           # tr(S)
    return noise / signal


def scaled_rate(lr: float, batch: int, new_batch: int, rule: str) -> float:
    """The learning rate for `new_batch`, if `lr` is right for `batch`; the rule is "linear" or "sqrt"."""
    ratio = new_batch / batch
    return lr * (ratio if rule == "linear" else math.sqrt(ratio))


def samples_to(target: float, steps: Sequence[float], losses: Sequence[float], batch: int) -> float:
    """Samples after which the loss first reaches the target, by a straight line between two validations; infinity if never."""
    before: tuple[float, float] | None = None
    for at, loss in zip(steps, losses, strict=True):
        if loss <= target:
            if before is None:
                return batch * at
            part = (before[1] - target) / (before[1] - loss)            # of the way from the validation before
            return batch * (before[0] + part * (at - before[0]))
        before = (at, loss)
    return math.inf


def draw_noise(seed: int, hidden: bool) -> Tensors:
    """Gradients' true squared norms and variances, and two batch sizes, for several cases."""
    generator = torch.Generator().manual_seed(seed)
    many = 12 if hidden else 6
    b = torch.randint(1, 8, (many,), generator=generator)
    return {"signal": 0.1 + torch.rand(many, generator=generator, dtype=torch.float64),
            "noise": 0.1 + 50 * torch.rand(many, generator=generator, dtype=torch.float64),
            "b": b, "B": b * torch.randint(2, 40, (many,), generator=generator)}


def estimate(inputs: Tensors) -> Tensors:
    """The noise scale from the squared norms that these cases have on average."""
    signal, noise, b, B = (inputs[name] for name in ("signal", "noise", "b", "B"))
    small, large = signal + noise / b, signal + noise / B
    cases = zip(small.tolist(), large.tolist(), b.tolist(), B.tolist(), strict=True)
    found = [returned.number(noise_scale(*case), "noise_scale") for case in cases]
    return {"scale": torch.tensor(found, dtype=torch.float64)}


def draw_rates(seed: int, hidden: bool) -> Tensors:
    """Learning rates and pairs of batches, larger and smaller."""
    generator = torch.Generator().manual_seed(seed)
    many = 10 if hidden else 6
    return {"lr": torch.rand(many, generator=generator, dtype=torch.float64) * 1e-2,
            "batches": torch.randint(1, 3000, (many, 2), generator=generator)}


def scale(inputs: Tensors) -> Tensors:
    """The new rates by both rules."""
    def rates(rule: str) -> torch.Tensor:
        found = [returned.number(scaled_rate(lr, batch, other, rule), "scaled_rate") for lr, (batch, other) in
                 zip(inputs["lr"].tolist(), inputs["batches"].tolist(), strict=True)]
        return torch.tensor(found, dtype=torch.float64)
    return {"linear": rates("linear"), "sqrt": rates("sqrt")}


def draw_schedules(seed: int, hidden: bool) -> Tensors:
    """Settings of schedules: the peak, the steps of warm-up and of all, and where the cosine ends."""
    generator = torch.Generator().manual_seed(seed)
    many = 4 if hidden else 3
    return {"lr": 1e-3 + torch.rand(many, generator=generator, dtype=torch.float64) * 1e-2,
            "warmup": torch.randint(3, 12, (many,), generator=generator),
            "steps": torch.randint(20, 60, (many,), generator=generator)}


def schedules(inputs: Tensors) -> Tensors:
    """The learning rate at every step, and beyond the last, of several settings."""
    def rates(**more: object) -> torch.Tensor:
        found = []
        for lr, warmup, steps in zip(*(inputs[name].tolist() for name in ("lr", "warmup", "steps")), strict=True):
            c = replace(tiny.settings(), train=Train(steps=steps))
            c = replace(c, optim=replace(Optim(lr=lr, warmup=warmup), **more))      # type: ignore[arg-type]
            found += [returned.tensor(step.learning_rate(torch.tensor(at), c), "learning_rate", (), torch.float32)
                      for at in range(steps + 3)]
        return torch.stack(found)
    return {"cosine": rates(), "floor": rates(min_lr=5e-4), "constant": rates(schedule="constant"), "cold": rates(warmup=0)}


def draw_curves(seed: int, hidden: bool) -> Tensors:
    """Validation losses that fall, and rise a little now and then, and targets; the last curve never gets there."""
    generator = torch.Generator().manual_seed(seed)
    many, points = (6, 20) if hidden else (4, 12)
    falling = 0.4 * torch.rand(many, points, generator=generator, dtype=torch.float64).cumsum(1) / points
    rough = 0.02 * torch.rand(many, points, generator=generator, dtype=torch.float64)
    losses = 0.5 - falling + rough
    target = 0.3 * losses[:, 0] + 0.7 * losses.min(1).values
    target[0], target[-1] = losses[0, 0] + 0.1, losses[-1].min() - 0.1          # reached at the first validation; and never
    return {"losses": losses, "target": target, "every": torch.randint(3, 30, (many,), generator=generator),
            "batch": torch.randint(1, 200, (many,), generator=generator)}


def reach(inputs: Tensors) -> Tensors:
    """Samples to the target on each curve; where it is infinite, -1, and a note that it is."""
    found = []
    for losses, target, every, batch in zip(*(inputs[name].tolist() for name in ("losses", "target", "every", "batch")),
                                            strict=True):
        steps = [every * (number + 1) for number in range(len(losses))]
        found.append(returned.number(samples_to(target, steps, losses, batch), "samples_to"))
    reached = torch.tensor(found, dtype=torch.float64)
    return {"samples": reached.where(reached.isfinite(), -1), "never": reached.isinf()}


EXERCISES = [
    Exercise("noise-scale", "08", (f"{__name__}.noise_scale",), draw_noise, estimate, {
        "scale": "it finds the noise scale from the squared norms at two batch sizes"}),
    Exercise("scaled-rate", "08", (f"{__name__}.scaled_rate",), draw_rates, scale, {
        "linear": "the linear rule, for larger and smaller batches",
        "sqrt": "the square-root rule"}),
    Exercise("learning-rate", "08", ("course.step.learning_rate",), draw_schedules, schedules, {
        "cosine": "warm-up, then half a cosine, which ends at the last step and stays there",
        "floor": "the cosine ends at min_lr",
        "constant": "a constant rate, after its warm-up",
        "cold": "without warm-up the cosine begins at once"},
        tolerance=1e-5, why_tolerance="rates are float32", points=2),
    Exercise("samples-to-target", "08", (f"{__name__}.samples_to",), draw_curves, reach, {
        "samples": "it finds the samples to the target, between two validations",
        "never": "and says so where a run never gets there"}, points=2),
]
