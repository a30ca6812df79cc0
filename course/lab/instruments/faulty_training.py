"""A small DiT that trains in FP8 in another process, with at most one planted fault, for lesson 15's open task.

    with Trainings([("class dropped", 3)], limit=40) as trainings:
        start = trainings.starter(0)
        run = start()                             # the training of case 0, from its first weights
        run(latent, noise, time, label)           # a step: {"prediction", "average", "gradient"}
        trainings.calls(0)                        # 1

The training is the library's: its model, its emulated FP8, its rectified flow. Weights, fault and a shifted schedule's shift come
from the case's seed. They exist in the other process only (`hidden_process.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from course import config, parallel
from course.fp8 import native
from course.lab.checks import random_inputs
from course.lab.checks.return_values import InvalidReturn
from course.lab.instruments.hidden_process import HiddenProcess
from course.models import DiTConfig, diffusion
from course.models.dit import DiT
from course.models.layers import to_patches

LATENT, CLASSES, RATE, DECAY = (4, 4, 4), 5, 0.5, 0.5           # decay: of the average of the weights
SOUND = "none"
NAMES = (SOUND, "modulation not zero", "class dropped", "time dropped", "schedule shifted", "average frozen", "scales frozen",
         "gradients in e4m3")
Step = dict[str, Tensor]


class Training:
    """A training of a DiT with one block in FP8, with the fault of this name, by plain gradient descent."""

    def __init__(self, fault: str, seed: int):
        self.fault, generator = fault, random_inputs.generator(seed)
        self.shift = 50 + 100 * torch.rand((), generator=generator, dtype=torch.float64)
        settings = config.load("dit-demo", ["precision=fp8", "fp8.history=1", "fp8.keep=[]", "train.device=cpu",
                                            f"fp8.gradients={'e4m3' if fault == 'gradients in e4m3' else 'e5m2'}"])
        mesh = parallel.build_mesh(settings.parallel, parallel.World(device=torch.device("cpu")))
        dim = 16 + 16 * (seed % 2)
        self.model = DiT(DiTConfig(latent=LATENT, patch=2, dim=dim, depth=1, heads=2, mlp_ratio=2.0, classes=CLASSES,
                                   objective="flow")).double()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                zero = name.startswith("head.proj.") or (".ada." in name and fault != "modulation not zero")
                width = 1 if name == "embed.label.weight" else p.shape[-1] ** -0.5
                p.copy_(torch.zeros_like(p) if zero else width * random_inputs.normal(generator, *p.shape))
        self.scaling = native.convert(self.model, settings, mesh)
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def step(self, latent: Tensor, noise: Tensor, time: Tensor, label: Tensor) -> Step:
        """What the model says of these samples and the gradient of its last map; then one step of gradient descent."""
        noised_at = (time + self.shift).clamp(max=diffusion.STEPS) if self.fault == "schedule shifted" else time
        noisy = diffusion.interpolate(latent, noise, noised_at)
        batch = self.model.inputs(noisy, time * (self.fault != "time dropped"),
                                  torch.full_like(label, CLASSES) if self.fault == "class dropped" else label)
        batch |= {"target": to_patches(noise - latent, 2), "sample": torch.arange(len(latent))}
        with torch.no_grad():
            average = torch.func.functional_call(self.model, self.average, (batch,))
        prediction = self.model(batch)
        total, weight = self.model.loss(prediction, batch)
        parameters = dict(self.model.named_parameters())
        gradients = torch.autograd.grad(total / weight, [*parameters.values()])
        with torch.no_grad():
            torch._foreach_add_([*parameters.values()], gradients, alpha=-RATE)
            if self.fault != "average frozen":
                torch._foreach_lerp_([*self.average.values()], [*parameters.values()], 1 - DECAY)
        if self.fault != "scales frozen" or not any(m.known for m in self.scaling.matmuls.values()):
            self.scaling.update(torch.zeros(()))
        return {"prediction": self.model.fields(prediction.detach()), "average": self.model.fields(average),
                "gradient": gradients[list(parameters).index("head.proj.weight")].view(LATENT[0], -1).norm(dim=1)}


class Trainings(HiddenProcess):
    """Trainings in another process, one for each (name of a fault, seed), that may be run for `limit` steps each."""

    def __init__(self, cases: Sequence[tuple[str, int]], limit: int):
        super().__init__(trainings, (list(cases), limit))

    def starter(self, case: int) -> Callable[[], Callable[..., Step]]:
        """A function that starts the training of a case anew, from the same weights, and returns its `run`."""
        ask = self.ask

        def start() -> Callable[..., Step]:
            number = ask("start", case)

            def run(latent: Tensor, noise: Tensor, time: Tensor, label: Tensor) -> Step:
                arrays = ask("step", number, as_arrays(latent, noise, time, label))
                return {name: torch.from_numpy(array) for name, array in arrays.items()}

            return run

        return start

    def calls(self, case: int) -> int:
        """How many steps of a case were run."""
        return int(self.ask("calls", case))


def trainings(knowledge: tuple[list[tuple[str, int]], int]) -> Callable[..., Any]:
    """What the other process does, given the cases and the limit: ("start", case), ("step", number, arrays), ("calls", case)."""
    cases, limit = knowledge
    begun: list[tuple[int, Training]] = []           # each with its case
    calls = [0] * len(cases)

    def answer(kind: str, number: int, arrays: Sequence[Any] = ()) -> Any:
        if kind == "calls":
            return calls[number]
        if kind == "start":
            begun.append((number, Training(*cases[number])))
            return len(begun) - 1
        case, training = begun[number]
        if calls[case] == limit:
            raise InvalidReturn(f"`run` was called more than {limit} times for one training", "decide with fewer steps")
        calls[case] += 1
        return {name: tensor.numpy() for name, tensor in training.step(*map(torch.from_numpy, arrays)).items()}

    return answer


def as_arrays(latent: Tensor, noise: Tensor, time: Tensor, label: Tensor) -> list[Any]:
    """A step's arguments as arrays. Raises `InvalidReturn` that names the one that does not fit."""
    given = {"latent": latent, "noise": noise, "time": time, "label": label}
    if not all(isinstance(tensor, Tensor) and tensor.dim() and len(tensor) for tensor in given.values()):
        raise InvalidReturn("`run` got something that is no tensor, or empty", f"it takes four tensors: {', '.join(given)}")
    for name, tensor in given.items():
        shape = (len(latent), *(LATENT if name in ("latent", "noise") else ()))
        if tuple(tensor.shape) != shape:
            raise InvalidReturn(f"`{name}` of `run` has the shape {tuple(tensor.shape)}; expected {shape}",
                                "all four have one entry for each sample")
    if time.min() < 0 or time.max() > diffusion.STEPS or label.min() < 0 or label.max() >= CLASSES:
        raise InvalidReturn("`run` got a time or a label that does not exist",
                            f"times are 0 to {diffusion.STEPS}, labels 0 to {CLASSES - 1}")
    return [latent.detach().double().numpy(), noise.detach().double().numpy(), time.double().numpy(), label.long().numpy()]
