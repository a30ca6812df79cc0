"""The library's model and training step at the smallest sizes, for checks: float64, plain gradient descent.

It uses gradient descent without momentum because Adam hides a gradient of the wrong scale.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from course import config
from course.config import Config
from course.data import Batch, order
from course.lab.checks import random_inputs, return_values
from course.models import Model, ViTConfig, build_model
from course.parallel import Layout, Mesh, build_gradient_sync, build_mesh, initialize, join, parallelize
from course.training import step
from course.training.optimizer import build_optimizer

TINY = ["model.grid=[8,16]", "model.channels=3", "model.patch=4", "model.dim=16", "model.depth=2", "model.heads=2",
        "data.source=mock", "optim.name=sgd", "optim.momentum=0", "optim.lr=0.1", "optim.schedule=constant", "optim.warmup=0",
        "precision=fp64", "parallel.data=naive", "train.device=cpu", "train.eval_every=0"]


def settings(*overrides: str) -> Config:
    """The smallest configuration, with overrides such as `train.global_batch=4`."""
    return config.load("vit-demo", [*TINY, *overrides])


def mesh(c: Config) -> Mesh:
    """The mesh over all ranks."""
    return build_mesh(c.parallel, join("cpu"))


def model(c: Config, over: Mesh, seed: int) -> tuple[Any, Layout]:
    """The model with weights drawn from `seed`, consistent on all ranks, and its layout."""
    built = build_model(c.model, seed)
    layout = parallelize(built, over, c.parallel)
    initialize(built, layout.placements, seed, torch.device("cpu"), torch.float64)
    return built, layout


def train(batches: Sequence[Batch], seed: int, *overrides: str, loss_scale: float = 1.0) -> dict[str, Tensor]:
    """Train on global batches with the library's own step; each rank takes its slice of every batch.

    Returns `losses`, the global mean of each step, (steps,); `norms`, of the gradients, (steps,); `weights`, all parameters
    concatenated; `seen`, the samples in each
    forward pass on this rank; and flags: `cast` is 1.0 if all forward passes ran inside autocast, `turns` is 1.0 if each began
    after the previous backward pass, `free` is 1.0 if no loss keeps its graph. Raises `InvalidReturn` if the return value of
    `eager` or of its `compute` cannot be used.
    """
    c = settings(f"train.global_batch={len(batches[0]['sample'])}", *overrides)
    over = mesh(c)
    built, layout = model(c, over, seed)
    progress = step.Progress.start(c, torch.device("cpu"))
    progress.loss_scale.fill_(loss_scale)
    gradients = build_gradient_sync(built, layout, c.parallel)
    optimizer = build_optimizer(gradients.optimizer_parameters, progress.lr, c)
    compute = return_values.function(step.build_compute(gradients.trained(built), progress, c, layout), "eager", "compute")
    run_step = step.train_step(lambda batch: return_values.tensor(compute(batch), "compute", (), torch.float64), built, gradients,
                          optimizer, progress, c, layout)
    my_samples = order.my_slice(c.train.global_batch, over.dp.size, over.dp.rank)
    seen: list[float] = []
    cast: list[bool] = []
    built.register_forward_pre_hook(lambda module, arguments: seen.append(float(len(arguments[0]["sample"]))))
    built.register_forward_pre_hook(lambda module, arguments: cast.append(torch.is_autocast_enabled("cpu")))
    turns = watch_turns(built)
    steps = [run_step({name: tensor[my_samples] for name, tensor in batch.items()}) for batch in batches]
    losses, norms = map(list, zip(*steps, strict=True))
    free = not any(loss.requires_grad for loss in losses)
    gradients.wait_parameters()
    return {"losses": sum_over_ranks(torch.stack(losses).detach(), over), "norms": torch.stack(norms).double(),
            "weights": flat_parameters(built), "seen": torch.tensor(seen), "cast": torch.tensor(float(all(cast))),
            "free": torch.tensor(float(free)), "turns": torch.tensor(float(all(turns)))}


def watch_turns(model: nn.Module) -> list[bool]:
    """A list that grows with each forward pass: whether all earlier passes had received their gradient by then."""
    turns: list[bool] = []
    waiting: set[int] = set()

    def forward(module: nn.Module, arguments: Any, output: Any) -> None:
        turns.append(not waiting)
        number = len(turns)
        if isinstance(output, Tensor) and output.requires_grad:
            waiting.add(number)
            output.register_hook(lambda gradient: waiting.discard(number))

    model.register_forward_hook(forward)
    return turns


def sum_over_ranks(value: Tensor, over: Mesh) -> Tensor:
    """Sum over the data-parallel ranks, in place. Any shape, the same on every rank."""
    if over.dp.size > 1:
        torch.distributed.all_reduce(value, group=over.dp.group)
    return value


def flat_parameters(built: nn.Module) -> Tensor:
    """All parameters of a model, flattened and concatenated."""
    return torch.cat([p.detach().flatten() for p in built.parameters()])


def draw_inputs(seed: int, samples: int, padding: int = 0) -> dict[str, Tensor]:
    """Draw the inputs of `train` from a seed: two global batches, the first with padding, and the seed of the weights."""
    generator = random_inputs.generator(seed)
    batches = [random_batch(generator, settings(), samples, padding), random_batch(generator, settings(), samples)]
    return {f"{name}{i}": tensor for i, batch in enumerate(batches) for name, tensor in batch.items()} | {
        "seed": torch.tensor(random_inputs.number(seed))}


def batches_of(inputs: dict[str, Tensor]) -> list[Batch]:
    """The batches of `draw_inputs`."""
    return [{name: inputs[f"{name}{i}"] for name in ("input", "target", "sample")} for i in (0, 1)]


def prepare_batch(model: Model, batch: Batch) -> Batch:
    """A batch in the form that the model's forward takes."""
    return model.prepare(batch, torch.zeros((), dtype=torch.int64))


def random_batch(generator: torch.Generator, c: Config, samples: int, padding: int = 0) -> Batch:
    """A random batch of weather states; the last `padding` samples are zeros with sample id -1."""
    assert isinstance(c.model, ViTConfig)
    shape = (samples, c.model.channels, *c.model.grid)
    batch = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name in ("input", "target")}
    batch["sample"] = torch.arange(samples)
    for tensor, value in ((batch["input"], 0), (batch["target"], 0), (batch["sample"], -1)):
        tensor[samples - padding:] = value
    return batch
