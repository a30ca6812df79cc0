"""Lesson 06: a step that is captured once and replayed, a step that can be captured, and when that is worth it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from course.data import Batch
from course.lab.checks import random_inputs, return_values
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.instruments import cpu_graph
from course.lab.instruments.cpu_graph import capturing, new_graph, warming
from course.utils import random
from course.utils.errors import CourseError

PEAK, RAMP = 0.25, 8                                # of the learning rate; powers of two, so float32 and float64 agree
SHARE = 0.25                                        # of the inputs that are dropped
LEAST = (0.1, 0.33)                                 # gains that make a graph worth it
CPU = torch.device("cpu")


class Captured:
    """A step that runs eagerly in its first calls, is then captured, and is replayed from then on."""

    def __init__(self, step: Callable[[Batch], tuple[Tensor, ...]], device: torch.device, warm: int = 3):
        self.step, self.warm, self.device = step, warm, device
        self.calls = 0                              # so far
        self.graph = new_graph(device)
        self.batch: Batch = {}                      # what replays read
        self.results: tuple[Tensor, ...] = ()       # what replays write

    def __call__(self, batch: Batch) -> tuple[Tensor, ...]:
        """What a step on this batch returns: run in the first `warm` calls, replayed in all others. Results are the caller's."""
        self.calls += 1
        if self.calls <= self.warm:
            with warming(self.device):
                return self.step(batch)
        if self.calls == self.warm + 1:
            self.capture(batch)
        self.fill(batch)
        self.graph.replay()
        return tuple(result.clone() for result in self.results)

    def capture(self, batch: Batch) -> None:
        """Capture the step on tensors of its own, like those of the batch. The step does not happen meanwhile."""
        self.batch = {name: tensor.clone() for name, tensor in batch.items()}
        with capturing(self.graph):
            self.results = self.step(self.batch)

    def fill(self, batch: Batch) -> None:
        """Copy a batch to where replays read it. `CourseError` if its `kinds` are not those that were captured."""
        if kinds(batch) != kinds(self.batch):
            raise CourseError(f"the step was captured with {kinds(self.batch)}, and this batch has {kinds(batch)}")
        for name, tensor in self.batch.items():
            tensor.copy_(batch[name])


def kinds(batch: Batch) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> (shape, type) of a batch's tensors."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items()}


@dataclass
class OnHost:
    """What training changes, some of it on the host."""

    weight: Tensor                                  # (F,)
    count: int = 0                                  # of steps
    skipped: int = 0


@dataclass
class OnDevice:
    """What training changes, all of it on the device."""

    weight: Tensor                                  # (F,)
    count: Tensor                                   # (), int64
    skipped: Tensor                                 # (), int64


def on_host(state: OnHost, batch: Batch) -> Tensor:
    """A training step that takes three decisions in Python. Returns the loss, ()."""
    rate = PEAK * min(1.0, (state.count + 1) / RAMP)                # warm-up of the learning rate
    step = torch.tensor(state.count, device=batch["x"].device)      # ()
    x = dropout(batch["x"], step)                                   # (B, F), of other inputs in every step
    loss = mean_square(x @ state.weight - batch["y"])
    gradient, = torch.autograd.grad(loss, state.weight)
    if loss.isfinite():
        with torch.no_grad():
            state.weight -= rate * gradient
    else:
        state.skipped += 1
    state.count += 1
    return loss.detach()


def on_device(state: OnDevice, batch: Batch) -> Tensor:
    """The same step with every decision taken on the device, so that it can be captured. Returns the loss, ()."""
    rate = PEAK * ((state.count + 1) / RAMP).clamp(max=1.0)         # ()
    x = dropout(batch["x"], state.count)                            # (B, F)
    loss = mean_square(x @ state.weight - batch["y"])
    gradient, = torch.autograd.grad(loss, state.weight)
    good = loss.isfinite()
    with torch.no_grad():
        state.weight.copy_(torch.where(good, state.weight - rate * gradient, state.weight))
    state.skipped += ~good
    state.count += 1
    return loss.detach()


def dropout(x: Tensor, step: Tensor) -> Tensor:
    """x, (B, F), with some of its numbers set to 0 and the others scaled up: a pure function of the step, an int64 tensor."""
    places = torch.arange(x.numel(), device=x.device).view(x.shape)
    kept = random.uniform(random.fold(random.key("lesson 06"), step), places) >= SHARE
    return torch.where(kept, x / (1 - SHARE), 0.0)


def mean_square(x: Tensor) -> Tensor:
    """A number of a tensor of any shape."""
    return (x**2).mean()


def eager_time(launches: Sequence[float], works: Sequence[float], gap: float) -> float:
    """Seconds until the GPU is done if the host launches kernel after kernel.

    Like `replay` of lesson 02, but the GPU takes `gap` seconds to go from one kernel to the next.
    """
    host, gpu = 0.0, -gap
    for launch, work in zip(launches, works, strict=True):
        host += launch
        gpu = max(host, gpu + gap) + work
    return gpu


def graphed_time(works: Sequence[float], once: float, gap: float) -> float:
    """Seconds until the GPU is done with a graph of kernels.

    The host launches all of them at once, in `once` seconds. Then the GPU runs them one after another, works[i]
    seconds each, and takes `gap` seconds to go from one to the next.
    """
    return once + sum(works) + gap * (len(works) - 1)


def break_even(works: Sequence[float], launch: float, once: float, gap: float, least: float) -> int:
    """The smallest batch at which an eager step takes less than (1 + least) times as long as a graphed one.

    works: each kernel's seconds for one sample; they grow in proportion to the batch. Each kernel takes `launch` seconds to
    launch. 0 if no batch up to 1000 is large enough.
    """
    for batch in range(1, 1001):
        scaled = [batch * work for work in works]
        if eager_time([launch] * len(works), scaled, gap) < (1 + least) * graphed_time(scaled, once, gap):
            return batch
    return 0


def draw_training(seed: int, hidden: bool) -> Tensors:
    """Batches, a learning rate for each step, and how many steps come before the capture."""
    generator = random_inputs.generator(seed)
    steps, samples, features = (11, 6, 5) if hidden else (9, 4, 3)

    some = partial(random_inputs.normal, generator)
    rates = 0.01 + 0.1 * torch.rand(steps, generator=generator, dtype=torch.float64)
    # not 3, as usual, nor one step from it
    warm = 4 + random_inputs.number(seed) % 4 if hidden else 5 - random_inputs.number(seed) % 2
    return {"x": some(steps, samples, features), "y": some(steps, samples, 1), "rates": rates, "warm": torch.tensor(warm),
            "first": some(features, 8), "second": some(8, 1)}


def run_static_buffers(inputs: Tensors) -> Tensors:
    """Train a small network with Adam by calls of the captured step; then offer it batches that do not fit."""
    training = Training(inputs)
    captured = Captured(training.step, CPU, int(inputs["warm"]))
    given = [{"x": x.clone(), "y": y.clone()} for x, y in zip(inputs["x"], inputs["y"], strict=True)]
    results, seen = [], []
    warmed: list[float] = []                        # what Python runs meanwhile, in each warm-up
    with (mock.patch.object(cpu_graph.Graph, "replay", autospec=True, side_effect=cpu_graph.Graph.replay) as replay,
          mock.patch.object(cpu_graph, "nullcontext", count_runs(warmed, training))):                # which `warming` is on a CPU
        for batch, rate in zip(given, inputs["rates"], strict=True):
            training.rate.copy_(rate)               # from outside, as a schedule does
            loss, norm = return_values.pair(captured(batch), "__call__", "(loss, norm), what the step returns")
            results.append([return_values.tensor(value, "__call__", (), torch.float64) for value in (loss, norm)])
            seen.append(stack(results[-1]))         # now; and at the end once more
    weights, runs, replays = training.weights(), float(training.runs), float(replay.call_count)
    kept = all(torch.equal(batch[name], inputs[name][i]) for i, batch in enumerate(given) for name in batch)
    x, y = inputs["x"][0].clone(), inputs["y"][0].clone()
    others = [{"x": x[:1], "y": y}, {"x": x.float(), "y": y}, {"x": x}, {"x": x, "y": y, "z": y}]
    refused = torch.tensor([float(refuses(captured, batch)) for batch in others])
    return {"results": torch.stack(seen), "weights": weights, "held": torch.stack([stack(pair) for pair in results]),
            "runs": torch.tensor(runs), "replays": torch.tensor(replays), "kept": torch.tensor(float(kept)), "refused": refused,
            "after": training.weights(), "warmed": torch.tensor(warmed[:int(inputs["warm"])])}


def count_runs(warmed: list[float], training: "Training") -> Callable[[], AbstractContextManager[None]]:
    """A context that notes how often the step runs inside it."""
    @contextmanager
    def noted() -> Iterator[None]:
        before = training.runs
        yield
        warmed.append(float(training.runs - before))

    return noted


def stack(values: Sequence[Tensor]) -> Tensor:
    """Numbers as a tensor of its own, (n,)."""
    return torch.stack(list(values)).detach().clone()


def refuses(captured: Any, batch: Batch) -> bool:
    """Whether a call raises `CourseError`."""
    try:
        captured(batch)
    except CourseError:
        return True
    except Exception:                               # such as PyTorch's own, after some tensors may have been copied
        return False
    return False


class Training:
    """A network of two layers, Adam, and a learning rate on the device."""

    def __init__(self, inputs: Tensors):
        self.parameters = [nn.Parameter(inputs[name].clone()) for name in ("first", "second")]
        self.rate = torch.zeros((), dtype=torch.float64)
        self.adam = torch.optim.Adam(self.parameters, self.rate, fused=True)
        self.runs = 0                               # how often Python was here

    def step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss and the norm of its gradient."""
        self.runs += 1
        self.adam.zero_grad()
        loss = mean_square(torch.tanh(batch["x"] @ self.parameters[0]) @ self.parameters[1] - batch["y"])
        loss.backward()
        norm = torch.stack([parameter.grad.norm() for parameter in self.parameters if parameter.grad is not None]).norm()
        self.adam.step()
        return loss.detach(), norm

    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters])


def draw_decisions(seed: int, hidden: bool) -> Tensors:
    """Batches, which two of them are bad, and first weights."""
    generator = random_inputs.generator(seed)
    steps, samples, features = (14, 7, 4) if hidden else (12, 5, 3)

    some = partial(random_inputs.normal, generator)
    return {"x": some(steps, samples, features), "y": some(steps, samples), "weight": some(features),
            "bad": 4 + torch.randperm(steps - 5, generator=generator)[:2]}


def with_bad_ones(inputs: Tensors) -> list[Batch]:
    """The batches, one of which holds infinity, and one what is not a number."""
    x = inputs["x"].clone()
    y = inputs["y"].clone()
    infinite, undefined = inputs["bad"]
    sample = dropout(torch.ones_like(x[infinite]), infinite).sum(1).argmax()        # one that dropout leaves a feature
    y[infinite, sample], x[undefined] = torch.inf, torch.nan            # the loss: infinite in one, not a number in the other
    return [{"x": one, "y": other} for one, other in zip(x, y, strict=True)]


def run_decided_on_device(inputs: Tensors) -> Tensors:
    """The step as it is, called for each batch; then captured after two calls, and replayed."""
    def fresh() -> OnDevice:
        return OnDevice(inputs["weight"].clone().requires_grad_(), torch.zeros((), dtype=torch.int64),
                        torch.zeros((), dtype=torch.int64))

    def call(state: OnDevice, batch: Batch) -> Tensor:
        return return_values.tensor(on_device(state, batch), "on_device", (), torch.float64)

    batches = with_bad_ones(inputs)
    state = fresh()
    plain = [call(state, batch) for batch in batches]
    free = not any(loss.requires_grad for loss in plain)
    found = {"plain": finite([loss.detach() for loss in plain]), "plain_weight": state.weight.detach().clone(),
             "free": torch.tensor(float(free))}
    state, losses, weights = fresh(), [], []
    for batch in batches[:2]:
        losses.append(call(state, batch).detach().clone())
        weights.append(state.weight.detach().clone())
    static, graph = {name: tensor.clone() for name, tensor in batches[0].items()}, cpu_graph.Graph()
    with capturing(graph):
        loss = call(state, static)
    for batch in batches[2:]:
        for name, tensor in static.items():
            tensor.copy_(batch[name])
        graph.replay()
        losses.append(loss.detach().clone())
        weights.append(state.weight.detach().clone())
    counters = [torch.as_tensor(value).double().clone() for value in (state.count, state.skipped)]
    return found | {"losses": finite(losses), "weights": torch.stack(weights), "count": counters[0], "skipped": counters[1]}


def finite(values: Sequence[Tensor]) -> Tensor:
    """All of them as one tensor, with -1 for what is not finite: no loss is."""
    return torch.nan_to_num(torch.stack(list(values)), -1.0, -1.0, -1.0)


def draw_graphs(seed: int, hidden: bool) -> Tensors:
    """Steps of a few kernels: what they take for one sample, and what launching takes; (cases, kernels) and (cases, 3).

    Of two, work is so short that it takes hundreds of samples, or more than the thousand that are tried.
    """
    generator = random_inputs.generator(seed)
    cases, kernels = (6, 9) if hidden else (4, 6)
    works = 0.2 + 2.0 * torch.rand(cases, kernels, generator=generator, dtype=torch.float64)
    works[-2], works[-1] = works[-2] / 50, works[-1] / 1e4
    least = torch.tensor([9.0, 8.0, 0.4], dtype=torch.float64)                       # microseconds: launch, once, gap
    costs = least * (1 + torch.rand(cases, 3, generator=generator, dtype=torch.float64))
    return {"works": 1e-6 * works, "costs": 1e-6 * costs}


def run_graph_gain(inputs: Tensors) -> Tensors:
    """Microseconds of each graphed step, and batches at which graphs gain less than a tenth and less than a third."""
    cases, given = (list(zip(inputs["works"].tolist(), inputs["costs"].tolist(), strict=True)) for _ in range(2))
    times = [1e6 * return_values.number(graphed_time(works, once, gap), "graphed_time") for works, (_, once, gap) in given]
    batches = [return_values.number(break_even(works, launch, once, gap, least), "break_even") for works,
               (launch, once, gap) in given
               for least in LEAST]
    return {"time": torch.tensor(times, dtype=torch.float64), "batch": torch.tensor(batches, dtype=torch.float64),
            "kept": torch.tensor(float(given == cases))}


EXERCISES = [
    Exercise("static-buffers", "06", (f"{__name__}.Captured",), draw_training, run_static_buffers, {
        "results": "every call returns the loss and the norm of an eager step",
        "weights": "after all calls, the parameters match those of eager steps",
        "held": "results do not change while later steps replay",
        "runs": "Python runs the step in the warm-up and in the capture, and never again",
        "warmed": "each call of the warm-up runs the step inside `with warming(...)`, which on a GPU is another stream",
        "replays": "every call after the warm-up replays once",
        "kept": "it does not change the batches that it is given",
        "refused": "a batch of other shapes, types or names raises a CourseError",
        "after": "and such a batch changes nothing"},
        flags={"kept": "it overwrote a batch that its caller may still need",
               "refused": "one of four was not: another shape, another type, a name missing, a name too many"}, points=2),
    Exercise("decided-on-device", "06", (f"{__name__}.on_device",), draw_decisions, run_decided_on_device, {
        "plain": "called without a graph, it has the losses of `on_host`",
        "plain_weight": "and the same weights after all steps",
        "free": "the returned loss is detached from the autograd graph",
        "losses": "replayed, it has the same losses",
        "weights": "and the same weights after every step",
        "count": "replays count the steps",
        "skipped": "and the skipped ones among them"}, flags={"free": "its requires_grad is True"},
        tolerance=1e-5, points=2),                       # a learning rate in float32 is as good as one in float64
    Exercise("graph-gain", "06", (f"{__name__}.graphed_time", f"{__name__}.break_even"), draw_graphs, run_graph_gain, {
        "time": "one launch, the work, and the gaps between kernels",
        "batch": "the batch from which on a graph gains too little, even if it is large, and 0 if 1000 is not enough",
        "kept": "neither function changes `works`"}, flags={"kept": "they change its numbers"}),
]
