"""Lesson 06's open task: training with gradient accumulation from graphs."""

from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from course.data import Batch
from course.lab.checks import random_inputs, return_values
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn, describe_value
from course.lab.exercises.lesson05_compile_and_fuse import Looks
from course.lab.exercises.lesson06_cuda_graphs import CPU, mean_square
from course.lab.instruments import cpu_graph
from course.lab.instruments.cpu_graph import capturing, new_graph, warming

WARM, SPARE = 2, 4                                   # steps that Python may run; operations of a step beside copies and replays
NAMES = ("first", "bias", "second")


class GraphTrainer:
    """Stochastic gradient descent with momentum and clipping, for any number of micro-batches, replayed from graphs."""

    def __init__(self, loss_of: Callable[[Batch], Tensor], parameters: Iterable[nn.Parameter], momentum: float, clip: float,
                 device: torch.device):
        """loss_of(micro): the mean loss of a micro-batch, (). clip: the largest norm of all gradients together."""
        self.loss_of, self.parameters, self.momentum, self.clip, self.device = loss_of, list(parameters), momentum, clip, device
        for p in self.parameters:
            p.grad = torch.zeros_like(p)
        self.velocities = [torch.zeros_like(p) for p in self.parameters]
        self.rate, self.micros, self.total, self.loss = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(4))
        self.batch: Batch = {}                       # what replays read
        self.graphs: dict[Callable[[], None], Any] = {}
        self.steps, self.losses = 0, list[Tensor]()

    def step(self, micros: list[Batch], rate: float) -> None:
        """One update from the mean of the micro-batches' gradients. Their memory is the loader's again afterwards."""
        self.steps += 1
        self.rate.fill_(rate)
        self.micros.fill_(len(micros))
        self.batch = self.batch or {name: tensor.clone() for name, tensor in micros[0].items()}
        for micro in micros:
            for name, tensor in self.batch.items():
                tensor.copy_(micro[name])
            self.run(self.accumulate)
        self.run(self.update)
        self.losses.append(self.loss.clone())

    def read_losses(self) -> list[float]:
        """The mean loss of each step since the last call."""
        losses, self.losses = self.losses, []
        return torch.stack(losses).tolist() if losses else []

    def run(self, work: Callable[[], None]) -> None:
        """Run a part of the step, or replay it once it was captured."""
        if self.steps <= WARM:
            with warming(self.device):
                work()
            return
        if work not in self.graphs:
            self.graphs[work] = new_graph(self.device)
            with capturing(self.graphs[work]):
                work()
        self.graphs[work].replay()

    def accumulate(self) -> None:
        """Add the gradients and the loss of a micro-batch to those of the others."""
        loss = self.loss_of(self.batch) / self.micros
        loss.backward()
        self.total += loss.detach()

    @torch.no_grad()
    def update(self) -> None:
        """Clip and move; then make zero what the next step adds to."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        factor = (self.clip / norm).clamp(max=1.0)
        for p, gradient, velocity in zip(self.parameters, gradients, self.velocities, strict=True):
            velocity.mul_(self.momentum).add_(gradient * factor)
            p.sub_(self.rate * velocity)
            gradient.zero_()
        self.loss.copy_(self.total)
        self.total.zero_()


class Reads(Looks):
    """Counts the operations that are launched one by one, and how often the host asks for a value, for which it has to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.functions = ReadingFunctions(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += not func.is_view and func.overloadpacket.__name__ not in ("detach", *cpu_graph.ALLOCATIONS)
        self.values += cpu_graph.has_dynamic_shape(func, args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __enter__(self) -> Any:
        self.functions.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.functions.__exit__(*raised)


class ReadingFunctions(TorchFunctionMode):
    """Counts functions that read a tensor without an operation."""

    def __init__(self, reads: Reads):
        super().__init__()
        self.reads = reads

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads.values += function in cpu_graph.READING_FUNCTIONS
        return function(*args, **(kwargs or {}))


def draw(seed: int, hidden: bool) -> Tensors:
    """Micro-batches, how many each step has, rates, weights, and others that are loaded before a step.

    Later steps have more micro-batches than any before. Targets are large in every second step, so that gradients are clipped.
    """
    generator = random_inputs.generator(seed)
    samples, features, width = (5, 4, 7) if hidden else (4, 3, 6)
    micros = [*torch.randint(2, 4, (2,), generator=generator).tolist(), 3, 1,
              *(1 + torch.randperm(3, generator=generator)).tolist(), 5 if hidden else 4, 2]

    def some(*shape: int) -> Tensor:
        return random_inputs.normal(generator, *shape)

    x, y = some(sum(micros), samples, features), some(sum(micros), samples, 1)
    step_of = torch.arange(len(micros)).repeat_interleave(torch.tensor(micros))
    return {"micros": torch.tensor(micros), "x": x, "y": torch.where((step_of % 2 > 0)[:, None, None], 30 * y, y),
            "rates": 0.01 + 0.05 * torch.rand(len(micros), generator=generator, dtype=torch.float64),
            "first": some(features, width), "bias": some(width), "second": some(width, 1), "loaded": some(features, width),
            "momentum": 0.5 + 0.4 * torch.rand((), generator=generator, dtype=torch.float64), "clip": torch.tensor(10.0)}


LOADED = 6                                           # the step before which weights are loaded


class Network:
    """A small network, and how often Python ran its loss."""

    def __init__(self, inputs: Tensors, device: torch.device):
        self.parameters = [nn.Parameter(inputs[name].clone().to(device)) for name in NAMES]
        self.runs = 0

    def loss_of(self, micro: Batch) -> Tensor:
        """The mean loss of a micro-batch."""
        self.runs += 1
        first, bias, second = self.parameters
        return mean_square(torch.tanh(micro["x"] @ first + bias) @ second - micro["y"])

    def weights(self) -> Tensor:
        """All parameters as they are now."""
        return torch.cat([p.detach().flatten() for p in self.parameters]).clone()


def micros_of(inputs: Tensors, device: torch.device) -> list[list[Batch]]:
    """The micro-batches of each step."""
    counts = inputs["micros"].tolist()
    pairs = zip(*(inputs[name].clone().to(device).split(counts) for name in "xy"), strict=True)
    return [[{"x": a.clone(), "y": b.clone()} for a, b in zip(x, y, strict=True)] for x, y in pairs]


def run(inputs: Tensors) -> Tensors:
    """Train on tapes."""
    return train(inputs, CPU)


def train(inputs: Tensors, device: torch.device) -> Tensors:
    """Train by calls of `GraphTrainer`: the weights after every step, the losses, and what was counted."""
    network, replays, used = Network(inputs, device), 0, list[Tensor]()
    graph_type: Any = torch.cuda.CUDAGraph if device.type == "cuda" else cpu_graph.Graph
    original = graph_type.replay

    def replay(graph: Any) -> None:
        nonlocal replays
        replays += 1
        with _disable_current_modes():               # its operations were launched at once
            original(graph)

    weights, losses, counted = [], list[float](), dict.fromkeys(("kept", "captured", "launches", "stall", "reads"), True)
    with mock.patch.object(graph_type, "replay", replay):
        trainer = GraphTrainer(network.loss_of, network.parameters, float(inputs["momentum"]), float(inputs["clip"]), device)
        for step, (micros, rate) in enumerate(zip(micros_of(inputs, device), inputs["rates"].tolist(), strict=True)):
            if step == LOADED:
                with torch.no_grad():
                    network.parameters[0].copy_(inputs["loaded"])
            given = [tensor for micro in micros for tensor in micro.values()]
            copies = [tensor.clone() for tensor in given]
            before, runs, reads = replays, network.runs, Reads()
            with reads:
                trainer.step(micros, rate)
            counted["kept"] &= all(torch.equal(one, other) for one, other in zip(given, copies, strict=True))
            used += [tensor.fill_(torch.nan) for tensor in given]       # its memory is the loader's again
            weights.append(network.weights())
            counted["stall"] &= reads.values == 0
            if step > WARM:                          # the step after the warm-up captures
                counted["captured"] &= network.runs == runs and replays > before
                counted["launches"] &= replays - before <= len(micros) + 1 and \
                    reads.operations <= len(micros) * len(micros[0]) + SPARE
            if step % 4 == 3 or step == len(inputs["rates"]) - 1:
                reads = Reads()
                with reads:
                    found = trainer.read_losses()
                if not isinstance(found, list):
                    raise InvalidReturn(f"`read_losses` returned {describe_value(found)}", "return a list of numbers")
                counted["reads"] &= reads.values <= 1
                losses += return_values.numbers(found, "read_losses").tolist()
    counted["kept"] &= all(bool(tensor.isnan().all()) for tensor in used)
    return {"weights": torch.stack(weights).cpu(), "losses": torch.tensor(losses, dtype=torch.float64)} | {
        name: torch.tensor(float(holds)) for name, holds in counted.items()}


def explain(inputs: Tensors, expected: Tensors, got: Tensors) -> str:
    """After which step the weights differ first, and what that says."""
    if got["weights"].shape != expected["weights"].shape:
        return ""
    off = (got["weights"] - expected["weights"]).norm(dim=1) / expected["weights"].norm(dim=1)
    first = next((step for step, much in enumerate(off.tolist(), 1) if not much < 1e-6), 0)
    if not first:
        return "the weights are right: look at how the loss of a step becomes the mean over its micro-batches, and is read"
    where = f"the weights are wrong from step {first} on"
    if first <= WARM:
        return f"{where}, which Python runs: look at the arithmetic, the mean over micro-batches, the norm and the momentum"
    if first == LOADED + 1:
        return f"{where}, before which other weights are loaded in place: read the parameters themselves, keep no copy of them"
    return (f"{where}, and not before: if Python runs no step, look for what a replay cannot see. A number that Python "
            "holds, a tensor under a new name, also `p.data = ...`, or a micro-batch in memory that was not captured")


EXERCISES = [
    Exercise("graph-trainer", "06", (f"{__name__}.GraphTrainer",), draw, run, {
        "losses": "`read_losses` returns the mean loss of each step, in order, whenever you call it",
        "weights": "after every step, the weights match those of eager training",
        "kept": "it writes nothing into the memory of a micro-batch",
        "captured": f"from step {WARM + 2} on Python never runs the loss, whatever the number of micro-batches",
        "launches": f"from step {WARM + 2} on a step is a copy of each tensor, a replay for each micro-batch and one more, and "
                    f"at most {SPARE} operations",
        "stall": "no step waits for a value from the GPU",
        "reads": "`read_losses` waits once"},
        flags={"kept": "it does", "captured": "it does, or nothing is replayed", "launches": "there are more",
               "stall": "the host reads one, or tests one", "reads": "it reads one loss after the other"},
        levels={"captured": "captured", "launches": "few launches", "stall": "no stall", "reads": "no stall"}, tolerance=1e-5,
        explain=explain,
        ladder=("Begin with eager code: `loss.backward()` adds to gradients, so the sum over micro-batches comes by itself. "
                "Divide, clip, move, and make the gradients zero. Then ask of each number that Python holds: does it change from "
                "step to step? It must be a tensor, filled in place: the rate, the number of micro-batches.",
                "Capture a micro-batch, not a step: its graph can be replayed any number of times. It adds to gradients that "
                "exist before the capture and keep their addresses, so never set `p.grad = None`. Who makes them "
                "zero, and when?",
                "A second graph does the rest: norm, `clamp` of clip / norm, momentum, weights, gradients to zero, the loss to a "
                "tensor of its own. After the replay, clone this tensor into a list; `read_losses` stacks the list and reads it "
                "at once. Whatever a capture records does not happen: replay after it.")),
]
