"""Lesson 15's open task: which fault does a training have?"""

from collections.abc import Callable

import torch
from torch import Tensor

from course.lab.checks import random_inputs
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn, describe_value
from course.lab.instruments.faulty_training import NAMES, Step, Trainings
from course.lab.sandbox.limits import Limits

LIMIT, FEW, FEWEST = 40, 8, 3                        # steps of one training: at most, and for the two budgets
Run = Callable[[Tensor, Tensor, Tensor, Tensor], Step]


def diagnose(start: Callable[[], Run]) -> str:
    """The name of a training's fault, or "none".

    start(): begins the training again, from the same weights, and returns `run`.
    run(latent, noise, time, label): one step on latents and noise (B, 4, 4, 4) float64, times (B,) from 0 to
    1000 and labels (B,) from 0 to 4. Returns {"prediction": the model's before the step, (B, 4, 4, 4),
    "average": that of the averaged weights, "gradient": the norm of the last map's gradient by channel, (4,)}.
    """
    run, generator = start(), torch.Generator().manual_seed(0)
    latent = torch.randn(5, 4, 4, 4, generator=generator, dtype=torch.float64)
    latent[1:3], latent[4] = latent[0], latent[3]
    time = torch.tensor([100.0, 100.0, 600.0, 0.0, 0.0])                # 0 and 1 differ in the label,
    label = torch.tensor([0, 1, 0, 2, 2])                               # 0 and 2 in the time, 3 and 4 in the noise

    def step(targets: dict[int, float]) -> Step:
        noise = latent.clone()                        # a target of zero, and the same input at all times
        for channel, target in targets.items():
            noise[3, channel] += target
            noise[4, channel] += target / 2
        return run(latent, noise, time, label)

    def alike(found: Step, one: int, other: int) -> bool:
        a, b = found["prediction"][one], found["prediction"][other]
        return bool((a - b).norm() <= 1e-6 * a.norm())

    step({0: 30})                                     # FP8 gets its scales, and the output layer leaves zero
    second = step({0: 30, 1: 3e-6, 2: 3000})          # the modulation leaves zero
    third = step({2: 3000})
    if not alike(second, 0, 1):
        return "modulation not zero"
    if not alike(second, 3, 4):
        return "schedule shifted"
    if not second["average"].any():
        return "average frozen"
    if second["gradient"][1] == 0:
        return "gradients in e4m3"
    if third["gradient"][2] < 30 * second["gradient"][2]:
        return "scales frozen"
    if alike(third, 0, 1):
        return "class dropped"
    return "time dropped" if alike(third, 0, 2) else "none"


def draw(seed: int, hidden: bool) -> Tensors:
    """Every fault and none, in any order, and some of them again; and each training's seed."""
    generator = random_inputs.generator(seed)
    faults = torch.cat([torch.arange(len(NAMES)), torch.randint(len(NAMES), (4 if hidden else 2,), generator=generator)])
    faults = faults[torch.randperm(len(faults), generator=generator)]
    return {"faults": faults, "seeds": torch.randint(2**62, (len(faults),), generator=generator)}


def run_diagnose(inputs: Tensors) -> Tensors:
    """What is said of each training, and whether few steps were enough. Nothing here knows the faults while `diagnose` runs."""
    cases = [(NAMES[fault], seed) for fault, seed in zip(inputs["faults"].tolist(), inputs["seeds"].tolist(), strict=True)]
    with Trainings(cases, LIMIT) as trainings:
        del cases
        for tensor in inputs.values():
            tensor.zero_()
        said = [diagnose(trainings.starter(case)) for case in range(len(inputs["faults"]))]
        most = max(trainings.calls(case) for case in range(len(said)))
    for name in said:
        if name not in NAMES:
            raise InvalidReturn(f"`diagnose` returned {name if isinstance(name, str) else describe_value(name)}",
                                f"return one of these: {', '.join(NAMES)}")
    return {"named": torch.tensor([float(1 + NAMES.index(name)) for name in said]),
            "few": torch.tensor(float(most <= FEW)), "fewest": torch.tensor(float(most <= FEWEST))}


def asked(inputs: Tensors) -> list[str]:
    """Each training, by its fault."""
    return [f"the training with the fault {NAMES[fault]!r}" for fault in inputs["faults"].tolist()]


EXERCISES = [
    Exercise("diagnose", "15", (f"{__name__}.diagnose",), draw, run_diagnose, {
        "named": f"it names the fault of every training, in at most {LIMIT} steps",
        "few": f"it runs at most {FEW} steps of a training",
        "fewest": f"it runs at most {FEWEST} steps of a training"},
        flags={"few": "some training needed more", "fewest": "some training needed more"},
        levels={"few": "few steps", "fewest": "fewest steps"}, cases=asked,
        read_as={float(number): name for number, name in enumerate(NAMES, 1)},
        ladder=("Look for what must be equal in a training without faults: two samples that differ in one thing only, of which "
                "the model must not know, or not know yet. Then look for what must differ. A batch can hold many such pairs.",
                "You choose the targets: `noise - latent`. With `noise = latent` the target is zero and the input is the same at "
                "all times. At time 0 the input is the latent, whatever the noise is. Remember when the gates open: the output "
                "layer moves in the first step, the modulation in the second.",
                "The rows of the last map's gradient that belong to a channel depend on that channel's target. A channel whose "
                "target is 10 million times smaller than another's still has a gradient in E5M2, but not in E4M3. A target that "
                "grows a hundredfold saturates for one step; with frozen scales it saturates forever."),
        limits=Limits(seconds=120)),
]
