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

LAYERS = 4
STRENGTH = 3e-4                                      # of the loss: without a scale most gradients are subnormal in float16
# what is special about a step: gradients that are clipped; large ones that cancel; a finite norm above float16's largest number;
# a loss above it; an overflow; overflows of opposite signs
KINDS = ("", "clipped", "cancel", "norm", "loss", "overflow", "opposite")
BAD = ("overflow", "opposite")
MICROS = {"cancel": 4, "norm": 1, "overflow": 2, "opposite": 3}          # micro-batches; others have 1 to 3
STRENGTHS = {"": 0.4, "clipped": 6.0}                # times STRENGTH; others have 1
BYTES, SPARE = 18, 0.5                              # per parameter at any time, with weights and velocities; for activations
BIG = 2.0**29.3                                      # over the scale: how many times as large are the gradients that cancel
FAINT, FAINTER = 16, 2.0**-7                         # features of x, and how much smaller they are than others
MICRO = ("x", "y", "linear", "strength", "offset", "spikes")
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
            for name, gradient in zip(halves, torch.autograd.grad(loss * self.scale, list(halves.values())), strict=True):
                sums[name] += gradient
            total += loss.detach()
        del halves, gradient
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
    """Counts the numbers that operations turn into float16, whichever wider format they come from."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = max((tensor.numel() for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)
                    and tensor.is_floating_point() and tensor.dtype != torch.float16), default=0)
        out = func(*args, **(kwargs or {}))
        made = args[0] if out is None and args else out         # operations on a list in place return nothing
        self.numbers += sum(tensor.numel() for tensor in tree_leaves(made) if isinstance(tensor, Tensor)
                            and tensor.dtype == torch.float16 and tensor.numel() <= wide)
        return out


class Network:
    """Linears with SiLU between them, computed in float16, and the losses that it returned."""

    def __init__(self, inputs: Tensors):
        self.weights = {name: inputs[name].clone() for layer in range(LAYERS) for name in (f"w{layer}", f"b{layer}")}
        self.losses = list[Tensor]()                 # since the list was emptied

    def loss_of(self, halves: Tensors, micro: Batch) -> Tensor:
        """The mean square of the last layer's errors, or of y times its outputs where `linear` is 1, times `strength`.

        `offset` is added to it, and `spikes` to the gradient of each parameter's last number.
        """
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
        lasts = torch.stack([halves[name].flatten()[-1] for name in self.weights]).float()
        loss = (micro["strength"] * (linear * y * x + (1 - linear) * (x - y).square()).mean() + micro["offset"]
                + (micro["spikes"] * (lasts - lasts.detach())).sum())
        self.losses.append(loss.detach())
        return loss


def kinds_of_steps(generator: torch.Generator, grow_after: int) -> list[str]:
    """What is special about each step.

    Good steps are in rows of `grow_after` + 1 and of twice as many as `grow_after`, with overflows after each. The last row is
    one too short to double the scale.
    """

    def shuffled(values: Sequence[Any]) -> list[Any]:
        return [values[place] for place in torch.randperm(len(values), generator=generator).tolist()]

    good = shuffled(["cancel", "norm", "loss", "", "clipped", "clipped", *["", "clipped", "", "clipped"] * (grow_after - 2)])
    good.insert(0, "clipped")
    good.insert(grow_after - 1, "")                  # the scale doubles after a step that is not clipped
    bad, found = shuffled([["overflow"], shuffled(BAD)]), list[str]()
    for count, overflows in zip(shuffled([grow_after + 1, 2 * grow_after]), bad, strict=True):
        found += [good.pop(0) for _ in range(count)] + overflows
    return found + good


def scales_of_steps(kinds: Sequence[str], scale: float, grow_after: int) -> list[float]:
    """The scale of each step."""
    found, good = [scale], 0
    for kind in kinds:
        good = 0 if kind in BAD else good + 1
        found.append(found[-1] / 2 if kind in BAD else found[-1] * 2 ** (good == grow_after))
        good %= grow_after
    return found[:-1]


def draw(seed: int, hidden: bool) -> Tensors:
    """Weights, micro-batches, what each step is, rates, momentum, the norm at which gradients are clipped, and the scaler's."""
    generator = random_inputs.generator(seed)
    samples, width = (5, 72) if hidden else (4, 64)
    found: Tensors = {}
    for layer in range(LAYERS):
        found[f"w{layer}"] = random_inputs.normal(generator, width, width).float() * (2 / width) ** 0.5
        found[f"b{layer}"] = 0.1 * random_inputs.normal(generator, width).float()
    grow_after = 2 + int(torch.randint(2, (), generator=generator))
    scale = 2.0 ** int(torch.randint(13, 16, (), generator=generator))
    kinds = kinds_of_steps(generator, grow_after)
    steps = [drawn_step(generator, kind, scale, samples, width, number)
             for number, (kind, scale) in enumerate(zip(kinds, scales_of_steps(kinds, scale, grow_after), strict=True))]
    return found | {name: torch.cat([step[name] for step in steps]) for name in MICRO} | {
        "counts": torch.tensor([len(step["x"]) for step in steps]), "kinds": torch.tensor(list(map(KINDS.index, kinds))),
        "rates": 60 + 60 * torch.rand(len(steps), generator=generator).double(),
        "momentum": 0.5 + 0.3 * torch.rand((), generator=generator).double(),
        "clip": 1e-3 * (1 + 0.3 * torch.rand((), generator=generator).double()),
        "scale": torch.tensor(scale), "grow_after": torch.tensor(grow_after)}


def drawn_step(generator: torch.Generator, kind: str, scale: float, samples: int, width: int, number: int) -> Tensors:
    """The micro-batches of a step of this kind, which has this scale and number. The first step has two.

    Of two overflows one after another, one is in a matrix, and one in a bias.
    """
    count = MICROS.get(kind, 2 if number == 0 else 1 + int(torch.randint(3, (), generator=generator)))
    x, y = (random_inputs.normal(generator, count, samples, width).float() for _ in range(2))
    x[..., :FAINT] *= FAINTER
    found = {"x": x, "y": y, "linear": torch.zeros(count), "strength": torch.full((count,), STRENGTH * STRENGTHS.get(kind, 1.0)),
             "offset": torch.zeros(count), "spikes": torch.zeros(count, 2 * LAYERS)}
    parameter = 2 * int(torch.randint(LAYERS, (), generator=generator)) + number % 2
    if kind == "cancel":
        x[-1], y[0], y[-1] = x[0], BIG / scale * y[0], -BIG / scale * y[0]
        found["linear"][[0, -1]] = 1
    elif kind == "norm":
        found["spikes"][:] = 4e4 / scale
    elif kind == "loss":
        found["offset"][:] = 1e4
    elif kind == "overflow":
        found["spikes"][int(torch.randint(count, (), generator=generator)), parameter] = 1e7 / scale
    elif kind == "opposite":
        found["spikes"][[0, -1], parameter] = torch.tensor([1e7, -1e7]) / scale
    return found | {"x": x.half()}


def batches(inputs: Tensors) -> list[list[Batch]]:
    """The micro-batches of each step, in memory of their own."""
    parts = [inputs[name].split(inputs["counts"].tolist()) for name in MICRO]
    return [[dict(zip(MICRO, (tensor.clone() for tensor in micro), strict=True)) for micro in zip(*step, strict=True)]
            for step in zip(*parts, strict=True)]


def run(inputs: Tensors) -> Tensors:
    """How each step moves the weights, its loss over that of its micro-batches, the next scale's power of two; and counts."""
    network, memory = Network(inputs), MemoryMeter()
    numbers = sum(weight.numel() for weight in network.weights.values())
    moves, losses, scales, stall, once, kept = [], list[Tensor](), list[float](), False, True, True
    with memory:
        trainer = HalfTrainer(network.loss_of, dict(network.weights), float(inputs["momentum"]), float(inputs["clip"]),
                              float(inputs["scale"]), int(inputs["grow_after"]))
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
        moved = {name: weight.detach() - before[name] for name, weight in network.weights.items()}
        moved["w0"][:FAINT] /= FAINTER               # so that these count as much as others
        moves.append(torch.cat([move.flatten() for move in moved.values()]))
        stall |= reads.values > 0
        once &= casts.numbers <= numbers + sum(micro["y"].numel() + micro["spikes"].numel() for micro in micros)
        kept &= all(torch.equal(tensor, copy[name]) for micro, copy in zip(micros, copies, strict=True)
                    for name, tensor in micro.items())
    spent = (memory.peak + 4 * numbers) / numbers
    return {"moved": torch.stack(moves).nan_to_num(LOST, LOST, LOST),
            "means": torch.stack(losses).double().round(decimals=3),
            "scales": (torch.tensor(scales, dtype=torch.float64) / inputs["scale"]).log2(), "bytes": torch.tensor(spent)} | {
        name: torch.tensor(float(holds)) for name, holds in
        {"kept": kept, "stall": not stall, "once": once, "small": spent <= BYTES + SPARE}.items()}


SPECIAL = {
    "": "all its gradients together are smaller than `clip`, so that nothing is clipped",
    "clipped": "all its gradients together are larger than `clip`, so that all are multiplied by one factor",
    "cancel": "its first and its last micro-batch have large gradients that cancel, and a sum in float16 loses the others",
    "norm": "no gradient overflows in it, but the norm of the scaled gradients is larger than float16's largest number. It is a "
            "good step, so compute the norm in float32",
    "loss": "its loss times the scale is larger than float16's largest number, but no gradient overflows. It is a good step: the "
            "loss stays in float32",
    "overflow": "in one micro-batch one parameter's gradient is infinite, and all others are finite. Neither weights nor "
                "velocities may change",
    "opposite": "infinities of opposite signs meet in it, and their sum is NaN. Neither weights nor velocities may change"}


def explain(inputs: Tensors, expected: Tensors, got: Tensors) -> str:
    """In which step the weights move wrongly first, or the scale is wrong, and what is special there."""
    kinds = [KINDS[kind] for kind in inputs["kinds"].tolist()]
    if got["moved"].shape != expected["moved"].shape:
        return ""
    off = (got["moved"] - expected["moved"]).norm(dim=1) > TOLERANCE * expected["moved"].norm(dim=1)
    first = next((step for step, wrong in enumerate(off.tolist()) if wrong), None)
    if first is None:
        return explain_scale(kinds, int(inputs["grow_after"]), expected["scales"], got["scales"])
    special = SPECIAL[kinds[first]]
    if first and kinds[first - 1] in BAD and kinds[first] not in BAD:
        special = f"nothing may be left of the overflow in the step before, and velocities are as they were before it; {special}"
    how_far = factor(expected["moved"][first], got["moved"][first])
    return f"the weights move wrongly for the first time in step {first + 1}{how_far}: {special}"


def factor(expected: Tensor, got: Tensor) -> str:
    """How many times as far the weights move as they should, in words; "" if the direction is wrong too."""
    if not got.any():
        return ", where they stay as they are"
    times = float(got @ expected / expected.square().sum().clamp(min=1e-30))
    along = expected.any() and (got - times * expected).norm() <= TOLERANCE * got.norm()
    return f", {times:.3g} times as far as they should" if along else ""


def explain_scale(kinds: Sequence[str], grow_after: int, expected: Tensor, got: Tensor) -> str:
    """After which step the scale is wrong first, and what that step was."""
    wrong = (got - expected).abs() > TOLERANCE
    if got.shape != expected.shape or not wrong.any():
        return ""
    first, row = int(wrong.nonzero()[0]), 0
    for kind in kinds[:first + 1]:
        row = 0 if kind in BAD else row % grow_after + 1
    what = "overflows" if row == 0 else f"is good step {row} in a row since the last overflow or doubling"
    return (f"after step {first + 1} `scale` is {2 ** float(got[first]):g} times what it was at first, and should be "
            f"{2 ** float(expected[first]):g} times that: this step {what}, and `grow_after` is {grow_after}")


EXERCISES = [
    Exercise("half-trainer", "04", (f"{__name__}.HalfTrainer",), draw, run, {
        "moved": "each step moves the float32 weights correctly, and a step with an overflow moves none",
        "means": "each step returns its mean loss, without the scale",
        "scales": "`scale` is halved after an overflow, and doubled after `grow_after` good steps in a row",
        "kept": "it writes nothing into a micro-batch",
        "stall": "no step waits for a value from the GPU",
        "once": "a step casts each weight to float16 once, whatever the number of micro-batches",
        "small": f"at most {BYTES} bytes per parameter are in use at any time: {{:.1f}}"},
        flags={"kept": "it does", "stall": "the host reads one, or tests one", "once": "it casts more",
               "small": "there are more"},
        levels={"stall": "no stall", "once": "one cast", "small": "memory budget"}, measured={"small": "bytes"},
        tolerance=TOLERANCE, explain=explain,
        ladder=("Begin with one micro-batch and no overflow. Cast the weights, `w.half().requires_grad_()`, multiply the loss by "
                "the scale and take the gradients of the copies. Cast them to float32 and divide them by the scale; only then "
                "clip, and move. With several micro-batches, add up their gradients in float32.",
                "One infinity or NaN in any gradient makes the norm of all gradients infinite or NaN. So one flag tells whether "
                "the step is bad, for all parameters alike: `~norm.isfinite()`. It stays a tensor. Compute the new state, and "
                "choose with `torch.where`: a product of NaN and 0 is NaN.",
                "Cast once before the micro-batches. `torch.autograd.grad` returns the copies' gradients, in float16: add each "
                "to a float32 sum. (`backward` adds to `.grad` in float16; set it to None after each micro-batch.) Drop the "
                "copies before the update, and update one parameter after the other, so that few temporary tensors are alive.")),
]
