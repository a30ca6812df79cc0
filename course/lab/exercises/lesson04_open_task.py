"""Lesson 04's open task: training in float16, with all that keeps it right."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course.data import Batch
from course.lab.checks import random_inputs, return_values
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn
from course.lab.exercises.lesson06_open_task import Reads
from course.lab.instruments.tensor_memory import MemoryMeter

LAYERS, FIRST_SCALE, GROW_AFTER = 4, 2.0**14, 2
STRENGTH = 3e-4                                      # of the loss: without a scale most gradients are subnormal in float16
# micro-batches of each step, and what is special: large gradients that cancel, an overflow, overflows of opposite signs
STEPS = ((2, ""), (1, ""), (4, ""), (8, "cancel"), (1, ""), (2, "overflow"), (1, ""), (4, "opposite"), (2, ""))
BYTES, SPARE = 18, 0.5                              # per parameter at any time, with weights and velocities; for activations
BIG = 2e4                                            # times as large as others are the gradients that cancel
MICRO = ("x", "y", "linear")
TOLERANCE = 1e-2                                     # right answers differ by up to 0.1%: PyTorch adds 1e-6 to the norm
LOST = 9.0                                           # instead of a move that is not finite
Loss = Callable[[Tensors, Batch], Tensor]


class HalfTrainer:
    """Stochastic gradient descent with momentum and clipping, of a loss that is computed in float16."""

    def __init__(self, loss_of: Loss, weights: Tensors, momentum: float, clip: float, scale: float, grow_after: int):
        """loss_of(halves, micro): the mean loss of a micro-batch, (), float32; `halves` are the weights in float16, by name.

        weights: the master weights, float32, which `step` changes in place. clip: the largest norm of all gradients together.
        scale: the first loss scale. grow_after: good steps in a row until it doubles.
        """
        self.loss_of, self.weights, self.momentum, self.clip, self.grow_after = loss_of, weights, momentum, clip, grow_after
        self.scale, self.good = torch.tensor(scale), torch.tensor(0)
        self.velocities = {name: torch.zeros_like(weight) for name, weight in weights.items()}

    def step(self, micros: Sequence[Batch], rate: float) -> Tensor:
        """One update from the mean of the micro-batches' gradients. Returns the mean loss, (), float32, not scaled."""
        halves = {name: weight.half().requires_grad_() for name, weight in self.weights.items()}
        sums = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        total = torch.zeros(())
        for micro in micros:
            loss = self.loss_of(halves, micro)
            (loss * self.scale).backward()
            total += loss.detach()
            for name, half in halves.items():
                sums[name] += half.grad          # type: ignore[arg-type]
                half.grad = None
        del halves, half
        self.update(sums, len(micros), rate)
        return total / len(micros)

    @torch.no_grad()
    def update(self, sums: Tensors, micros: int, rate: float) -> None:
        """Unscale, clip and move; or keep everything but the scale."""
        for gradient in sums.values():
            gradient /= self.scale * micros
        norm = torch.stack([gradient.norm() for gradient in sums.values()]).norm()
        bad, factor = ~norm.isfinite(), (self.clip / norm).clamp(max=1.0)
        for name, weight in self.weights.items():
            velocity = self.velocities[name]
            new = (self.momentum * velocity).add_(sums[name].mul_(factor))
            velocity.copy_(torch.where(bad, velocity, new))
            weight.copy_(torch.where(bad, weight, weight - rate * new))
        self.good = torch.where(bad, 0, self.good + 1)
        grows = self.good == self.grow_after
        self.scale = torch.where(bad, self.scale / 2, torch.where(grows, self.scale * 2, self.scale))
        self.good = torch.where(grows, 0, self.good)


class Casts(TorchDispatchMode):
    """Counts the numbers that operations cast from float32 to float16."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        single = {tensor.dtype for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        out = func(*args, **(kwargs or {}))
        if torch.float32 in single and func.overloadpacket.__name__ in ("_to_copy", "copy_", "_foreach_copy_"):
            into = args[0] if func.overloadpacket.__name__ != "_to_copy" else out
            self.numbers += sum(tensor.numel() for tensor in tree_leaves(into) if tensor.dtype == torch.float16)
        return out


class Network:
    """Linears with SiLU between them, computed in float16, and the losses that it returned."""

    def __init__(self, inputs: Tensors):
        self.weights = {name: inputs[name].clone() for layer in range(LAYERS) for name in (f"w{layer}", f"b{layer}")}
        self.losses = list[Tensor]()                 # since the list was emptied

    def loss_of(self, halves: Tensors, micro: Batch) -> Tensor:
        """The mean square of the last layer's errors, or of y times its outputs where `linear` is 1, times `STRENGTH`."""
        for name, weight in self.weights.items():
            given = halves.get(name) if isinstance(halves, dict) else None
            if not isinstance(given, Tensor) or given.dtype != torch.float16 or given.shape != weight.shape:
                raise InvalidReturn(f"`loss_of` got {return_values.describe_value(given)}"
                                    f"{f' of type {given.dtype}' if isinstance(given, Tensor) else ''} as {name!r}",
                                    "it takes all weights in float16, in a dict with the names that `weights` has")
        x = micro["x"]
        for layer in range(LAYERS):
            x = (silu(x) if layer else x) @ halves[f"w{layer}"] + halves[f"b{layer}"]
        x, y, linear = x.float(), micro["y"], micro["linear"]
        loss = STRENGTH * (linear * y * x + (1 - linear) * (x - y).square()).mean()
        self.losses.append(loss.detach())
        return loss


def draw(seed: int, hidden: bool) -> Tensors:
    """Weights, micro-batches, rates, momentum and the norm at which gradients are clipped."""
    generator = random_inputs.generator(seed)
    samples, width = (5, 72) if hidden else (4, 64)
    found: Tensors = {}
    for layer in range(LAYERS):
        found[f"w{layer}"] = random_inputs.normal(generator, width, width).float() * (2 / width) ** 0.5
        found[f"b{layer}"] = 0.1 * random_inputs.normal(generator, width).float()
    total = sum(count for count, _ in STEPS)
    x, y = (random_inputs.normal(generator, total, samples, width) for _ in range(2))
    linear, first = torch.zeros(total), 0
    for count, what in STEPS:
        last = first + count - 1
        if what == "cancel":
            x[last], y[first], y[last] = x[first], BIG * y[first], -BIG * y[first]
            linear[first] = linear[last] = 1
        elif what:
            several = (first, last) if what == "opposite" else (first + int(torch.randint(count, (), generator=generator)),)
            far = 150 * x[first], 2.4e4 * y[first]
            for place, sign in zip(several, (1, -1), strict=False):
                x[place], y[place] = far[0], sign * far[1]
        first += count
    return found | {"x": x.half(), "y": y.float(), "linear": linear,
                    "rates": 60 + 60 * torch.rand(len(STEPS), generator=generator).double(),
                    "momentum": 0.5 + 0.3 * torch.rand((), generator=generator).double(),
                    "clip": 9e-4 * (1 + 0.5 * torch.rand((), generator=generator).double())}


def batches(inputs: Tensors) -> list[list[Batch]]:
    """The micro-batches of each step, in memory of their own."""
    parts = [inputs[name].split([count for count, _ in STEPS]) for name in MICRO]
    return [[dict(zip(MICRO, (tensor.clone() for tensor in micro), strict=True)) for micro in zip(*step, strict=True)]
            for step in zip(*parts, strict=True)]


def run(inputs: Tensors) -> Tensors:
    """How each step moves the weights, its loss over that of its micro-batches, the next scale's power of two; and counts."""
    network, memory = Network(inputs), MemoryMeter()
    numbers = sum(weight.numel() for weight in network.weights.values())
    moves, losses, scales, stall, once, kept = [], list[Tensor](), list[float](), False, True, True
    with memory:
        trainer = HalfTrainer(network.loss_of, dict(network.weights), float(inputs["momentum"]), float(inputs["clip"]),
                              FIRST_SCALE, GROW_AFTER)
    for micros, rate in zip(batches(inputs), inputs["rates"].tolist(), strict=True):
        before = {name: weight.detach().clone() for name, weight in network.weights.items()}
        copies = [{name: tensor.clone() for name, tensor in micro.items()} for micro in micros]
        with memory, Casts() as casts, Reads() as reads:
            loss = trainer.step(micros, rate)
        losses.append(return_values.tensor(loss, "step", (), torch.float32, " as the loss").detach() /
                      torch.stack(network.losses).mean())
        del loss
        network.losses.clear()
        scales.append(return_values.number(trainer.scale, "scale"))
        moves.append(torch.cat([(weight.detach() - before[name]).flatten() for name, weight in network.weights.items()]))
        stall |= reads.values > 0
        once &= casts.numbers <= numbers + sum(micro["y"].numel() for micro in micros)
        kept &= all(torch.equal(tensor, copy[name]) for micro, copy in zip(micros, copies, strict=True)
                    for name, tensor in micro.items())
    spent = (memory.peak + 4 * numbers) / numbers
    return {"moved": torch.stack(moves).nan_to_num(LOST, LOST, LOST),
            "losses": torch.stack(losses).double().round(decimals=3),
            "scales": (torch.tensor(scales, dtype=torch.float64) / FIRST_SCALE).log2(), "bytes": torch.tensor(spent)} | {
        name: torch.tensor(float(holds)) for name, holds in
        {"kept": kept, "stall": not stall, "once": once, "small": spent <= BYTES + SPARE}.items()}


def explain(_: Tensors, expected: Tensors, got: Tensors) -> str:
    """In which step the weights move wrongly first, and what is special there."""
    if got["moved"].shape != expected["moved"].shape:
        return ""
    off = (got["moved"] - expected["moved"]).norm(dim=1) > TOLERANCE * expected["moved"].norm(dim=1)
    first = next((step for step, wrong in enumerate(off.tolist()) if wrong), None)
    if first is None:
        return ""
    special = {
        "cancel": "its first and its last micro-batch have large gradients that cancel, and a sum in float16 loses the others",
        "overflow": "in one micro-batch the gradients of matrices are infinite, and those of biases are finite. Neither weights "
                    "nor velocities may change",
        "opposite": "infinities of opposite signs meet in it, and their sum is NaN. Neither weights nor velocities may change"}
    what = special.get(STEPS[first][1], "nothing is special about it: compare it with a step in float32, without a scale")
    return f"the weights move wrongly for the first time in step {first + 1}: {what}"


EXERCISES = [
    Exercise("half-trainer", "04", (f"{__name__}.HalfTrainer",), draw, run, {
        "moved": "each step moves the float32 weights as it should, and a step with an overflow moves none",
        "losses": "each step returns its mean loss, as it is without a scale",
        "scales": "`scale` is halved after an overflow, and doubled after `grow_after` good steps in a row",
        "kept": "nothing is written into a micro-batch",
        "stall": "a step waits for no value",
        "once": "a step casts each weight to float16 once, whatever the number of micro-batches",
        "small": f"at most {BYTES} bytes per parameter are in use at any time: {{:.1f}}"},
        flags={"kept": "something is", "stall": "the host reads one, or looks at one", "once": "it casts more",
               "small": "there are more"},
        levels={"stall": "no stall", "once": "one cast", "small": "memory budget"}, measured={"small": "bytes"},
        tolerance=TOLERANCE, explain=explain,
        ladder=("Begin with one micro-batch and no overflow. Cast the weights, `w.half().requires_grad_()`, multiply the loss by "
                "the scale and call `backward`. Cast the gradients to float32 and divide them by the scale; only then clip, and "
                "move. With several micro-batches, add up their gradients in float32.",
                "One infinity or NaN in any gradient makes the norm of all gradients infinite or NaN. So one flag tells whether "
                "the step is bad, for all parameters alike: `~norm.isfinite()`. It stays a tensor. Compute the new state, and "
                "choose with `torch.where`: a product of NaN and 0 is NaN.",
                "Cast once before the micro-batches. The copies are leaves, so `backward` leaves a float16 gradient in each. Add "
                "it to a float32 sum, then set it to None, so that the next one does not add to it in float16. Drop the copies "
                "before the update, and update one parameter after the other, so that few temporary tensors are alive.")),
]
