"""Lesson 08: the noise in a gradient, a learning-rate schedule, and the samples that training needs to a target."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from course.config import Config, Optim, Train
from course.lab.checks import random_inputs, return_values, tiny_training
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn
from course.training import optimizer


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
    """Samples until the loss first reaches the target, interpolated linearly between validations; infinity if never."""
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
    """Gradients' true squared norms and variances, and two batch sizes, for several cases.

    In the last the squared norms do not fit together, as those of two runs may not: |G|^2 comes out below 0.
    """
    generator = random_inputs.generator(seed)
    many = 12 if hidden else 6
    b = torch.randint(1, 8, (many,), generator=generator)
    signal = 0.1 + torch.rand(many, generator=generator, dtype=torch.float64)
    noise = 0.1 + 50 * torch.rand(many, generator=generator, dtype=torch.float64)
    signal[-1], noise[-1] = -0.05, 20 + noise[-1]    # and yet both squared norms are positive
    return {"signal": signal, "noise": noise, "b": b, "B": b * torch.randint(2, 40, (many,), generator=generator)}


def run_noise_scale(inputs: Tensors) -> Tensors:
    """The noise scale from the squared norms that these cases have on average."""
    signal, noise, b, B = (inputs[name] for name in ("signal", "noise", "b", "B"))
    small, large = signal + noise / b, signal + noise / B
    cases = zip(small.tolist(), large.tolist(), b.tolist(), B.tolist(), strict=True)
    found = [return_values.number(noise_scale(*case), "noise_scale") for case in cases]
    return {"scale": torch.tensor(found, dtype=torch.float64)}


def noise_scale_cases(inputs: Tensors) -> list[str]:
    """Each case as a call, with numbers to try by hand."""
    signal, noise, b, B = (inputs[name] for name in ("signal", "noise", "b", "B"))
    return [f"noise_scale({small:.6g}, {large:.6g}, {one}, {many})" for small, large, one, many in
            zip((signal + noise / b).tolist(), (signal + noise / B).tolist(), b.tolist(), B.tolist(), strict=True)]


def draw_rates(seed: int, hidden: bool) -> Tensors:
    """Learning rates and pairs of batches, from a larger one to a smaller, the other way round, and others."""
    generator = random_inputs.generator(seed)
    many = 10 if hidden else 6
    rates = torch.rand(many, generator=generator, dtype=torch.float64)
    batches = torch.randint(1, 3000, (many, 2), generator=generator)
    batches[0], batches[1] = batches[0].sort(descending=True).values, batches[1].sort().values
    return {"lr": rates * 1e-2, "batches": batches}


def run_scaled_rate(inputs: Tensors) -> Tensors:
    """The new rates by both rules."""
    def rates(rule: str) -> torch.Tensor:
        found = [return_values.number(scaled_rate(lr, batch, other, rule), "scaled_rate") for lr, (batch, other) in
                 zip(inputs["lr"].tolist(), inputs["batches"].tolist(), strict=True)]
        return torch.tensor(found, dtype=torch.float64)
    return {"linear": rates("linear"), "sqrt": rates("sqrt")}


BEYOND = 3                                           # steps from the last one on
KINDS: dict[str, dict[str, object]] = {              # of schedules: what is not as in `Optim`
    "cosine": {}, "floor": {"min_lr": 5e-4}, "constant": {"schedule": "constant"}, "cold": {"warmup": 0}}


def draw_schedules(seed: int, hidden: bool) -> Tensors:
    """Settings of schedules: the peak, the steps of warm-up and of all, and where the cosine ends."""
    generator = random_inputs.generator(seed)
    many = 4 if hidden else 3
    return {"lr": 1e-3 + torch.rand(many, generator=generator, dtype=torch.float64) * 1e-2,
            "warmup": torch.randint(3, 12, (many,), generator=generator),
            "steps": torch.randint(20, 60, (many,), generator=generator)}


def rate_at(at: torch.Tensor, c: Config) -> torch.Tensor:
    """The learning rate at a step, a tensor of the type that the optimizers want."""
    found = optimizer.learning_rate(at, c)
    if isinstance(found, torch.Tensor) and found.dtype != torch.float32:
        raise InvalidReturn(f"`learning_rate` returned a tensor of type {found.dtype}; expected torch.float32",
                                "name the type where you make a tensor: dtype=torch.float32, or .float()")
    return return_values.tensor(found, "learning_rate", (), torch.float32)


def run_learning_rate(inputs: Tensors) -> Tensors:
    """The learning rate at every step, and beyond the last, of several settings; all steps at once, so that none is looked at."""
    def rates(kind: str) -> torch.Tensor:
        found = []
        for c in settings(inputs, kind):
            try:
                found.append(torch.vmap(partial(rate_at, c=c))(torch.arange(c.train.steps + BEYOND)))
            except RuntimeError as error:
                if "vmap" not in str(error):
                    raise
                raise InvalidReturn("`learning_rate` reads the value of `step` (an `if`, a float() or .item()): the host "
                                    "would have to wait for the GPU in every step",
                                        "compute both rates and choose with torch.minimum or torch.where") from error
        return torch.cat(found)
    return {kind: rates(kind) for kind in KINDS}


def settings(inputs: Tensors, kind: str) -> list[Config]:
    """The drawn settings of schedules of this kind."""
    found = []
    for lr, warmup, steps in zip(*(inputs[name].tolist() for name in ("lr", "warmup", "steps")), strict=True):
        c = replace(tiny_training.settings(), train=Train(steps=steps))
        found.append(replace(c, optim=replace(Optim(lr=lr, warmup=warmup), **KINDS[kind])))      # type: ignore[arg-type]
    return found


def rates_asked(inputs: Tensors) -> dict[str, list[str]]:
    """Each step of each schedule, with the settings that there are."""
    def told(c: Config) -> str:
        o = c.optim
        return f"lr={o.lr:.6g}, warmup={o.warmup}, schedule={o.schedule}, min_lr={o.min_lr:g}, train.steps={c.train.steps}"

    return {kind: [f"step {at} of {told(c)}" for c in settings(inputs, kind) for at in range(c.train.steps + BEYOND)]
            for kind in KINDS}


def draw_curves(seed: int, hidden: bool) -> Tensors:
    """Validation losses that fall, and rise a little now and then, and targets.

    The first curve is below its target from the start, the second just at it in its lowest point, the third reaches it, rises
    above it and reaches it again, the last never gets there. The others reach it once. Validations come at uneven steps.
    """
    generator = random_inputs.generator(seed)
    many, points = (8, 20) if hidden else (6, 12)
    falling = 0.4 * torch.rand(many, points, generator=generator, dtype=torch.float64).cumsum(1) / points
    rough = 0.02 * torch.rand(many, points, generator=generator, dtype=torch.float64)
    losses = 0.5 - falling + rough
    lowest = losses.min(1).values
    target = 0.3 * losses[:, 0] + 0.7 * lowest
    target[0], target[1], target[-1] = losses[0, 0] + 0.1, lowest[1], lowest[-1] - 0.1
    dip, again = 4, points // 2 + 2                  # between them lie the places where whoever bisects the curve looks
    below = torch.arange(points) >= again
    below[dip] = True
    target[2] = losses[2, :dip].min() - 0.01
    losses[2, dip:] = (target[2] + torch.where(below, -0.01 - rough[2], 0.01 + rough[2]))[dip:]
    late = losses[3:-1]                              # where they rise above the target again they are reflected at it
    reached = (late <= target[3:-1, None]).cumsum(1) > 0
    losses[3:-1] = torch.where(reached, target[3:-1, None] - (late - target[3:-1, None]).abs(), late)
    return {"losses": losses, "target": target, "steps": torch.randint(3, 30, (many, points), generator=generator).cumsum(1),
            "batch": torch.randint(2, 200, (many,), generator=generator)}


def run_samples_to_target(inputs: Tensors) -> Tensors:
    """Samples to the target on each curve; of the last, 1 if they are infinite."""
    found = []
    for losses, target, steps, batch in zip(*(inputs[name].tolist() for name in ("losses", "target", "steps", "batch")),
                                            strict=True):
        found.append(return_values.number(samples_to(target, steps, losses, batch), "samples_to"))
    reached = torch.tensor(found, dtype=torch.float64)
    return {"first": reached[0], "exact": reached[1], "samples": reached[2:-1], "never": (reached[-1] == math.inf).double()}


EXERCISES = [
    Exercise("noise-scale", "08", (f"{__name__}.noise_scale",), draw_noise, run_noise_scale, {
        "scale": "it finds the noise scale from the squared norms at two batch sizes"}, cases=noise_scale_cases),
    Exercise("scaled-rate", "08", (f"{__name__}.scaled_rate",), draw_rates, run_scaled_rate, {
        "linear": "the linear rule, for larger and smaller batches",
        "sqrt": "the square-root rule"}, tolerance=1e-6),           # a tensor of float32 will do
    Exercise("learning-rate", "08", ("course.training.optimizer.learning_rate",), draw_schedules, run_learning_rate, {
        "cosine": "warm-up, then half a cosine, which ends at the last step and stays there",
        "floor": "the cosine ends at min_lr",
        "constant": "a constant rate, after its warm-up",
        "cold": "without warm-up the cosine begins at once"}, cases=rates_asked,
        tolerance=1e-5, points=2),                       # rates are float32
    Exercise("samples-to-target", "08", (f"{__name__}.samples_to",), draw_curves, run_samples_to_target, {
        "samples": "it finds the samples when the target is first reached, between two validations",
        "first": "if the first validation is already below the target, its own samples count",
        "exact": "a loss equal to the target has reached it",
        "never": "if a run never gets there, they are infinite"}, flags={
            "never": "it returned something other than math.inf"}, points=2),
]
