"""Lesson 01: the loss, the training step by hand, and the loop's forward and backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from course.config import Config
from course.data import Batch
from course.lab.checks import random_inputs, return_values, tiny_training
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.sandbox.child import installed_answers
from course.models import vit
from course.parallel import Layout
from course.training import step


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    """One step of training on a batch; returns the mean loss of its samples, detached from the graph."""
    output = model(batch)
    total, weight = model.loss(output, batch)        # type: ignore[operator]
    loss = total / weight
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def draw_fields(seed: int, hidden: bool) -> Tensors:
    """Two global batches, the first with padding, the seed of the weights, and a loss scale."""
    scale = 1 + 9 * torch.rand((), generator=random_inputs.generator(seed))
    return tiny_training.draw_inputs(seed, samples=10 if hidden else 6, padding=1) | {"scale": scale}


def all_unchanged(inputs: Tensors, before: Tensors) -> Tensor:
    """1.0 if no input was written to, else 0.0."""
    return torch.tensor(float(all(torch.equal(inputs[name], before[name]) for name in before)))


def clone_all(inputs: Tensors) -> Tensors:
    """The inputs, copied."""
    return {name: tensor.clone() for name, tensor in inputs.items()}


def run_relative_l2(inputs: Tensors) -> Tensors:
    """The loss of drawn fields, its gradient, and a model trained with it."""
    c = tiny_training.settings()
    batch = tiny_training.prepare_batch(tiny_training.model(c, tiny_training.mesh(c), 0)[0], tiny_training.batches_of(inputs)[0])
    batch["sample"][-2] = -1                                 # padding whose target is not zero, beside one whose target is
    before = clone_all(batch)
    output = (batch["input"] * 3 + 1).requires_grad_()       # not zero on padding, whose input is
    loss, dtype = vit.RelativeL2(), batch["target"].dtype
    each = return_values.tensor(loss.weight(batch), "weight", (len(output),), dtype)
    total, weight = sum_and_weight(loss(output, batch), "forward", dtype)
    gradient, = torch.autograd.grad(total, output)
    kept = all_unchanged(batch, before)
    trained = tiny_training.train(tiny_training.batches_of(inputs), int(inputs["seed"]))
    return {"each": each, "sum": total.detach(), "weight": weight.detach(), "gradient": gradient, "kept": kept, **trained}


def sum_and_weight(value: Any, who: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a loss returned, if it can be trained with."""
    pair = zip(return_values.pair(value, who, "(sum, weight)"), (" as the sum", " as the weight"), strict=True)
    total, weight = (return_values.tensor(each, who, (), dtype, part) for each, part in pair)
    if total.requires_grad:
        return total, weight
    if weight.requires_grad:
        raise return_values.InvalidReturn(f"`{who}` returned the weight first", "return (sum, weight), in this order")
    raise return_values.InvalidReturn(f"the sum that `{who}` returned has no gradient",
                            "compute it from `output` by operations on tensors; .item(), .detach(), torch.tensor(...) and "
                            "torch.no_grad() cut it off")


def run_training_step(inputs: Tensors) -> Tensors:
    """Four steps with the learner's training step, on a model of the library."""
    c = tiny_training.settings()
    model, _ = tiny_training.model(c, tiny_training.mesh(c), int(inputs["seed"]))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, batches = [], [tiny_training.prepare_batch(model, batch) for batch in tiny_training.batches_of(inputs)]
    before = [clone_all(batch) for batch in batches]
    for batch in batches * 2:
        losses.append(return_values.tensor(training_step(model, optimizer, batch), "training_step", (), torch.float64))
    return {"losses": torch.stack([loss.detach() for loss in losses]), "weights": tiny_training.flat_parameters(model),
            "free": torch.tensor(float(not any(loss.requires_grad for loss in losses))),
            "kept": torch.stack([all_unchanged(*pair) for pair in zip(batches, before, strict=True)]).min()}


def run_accumulate(inputs: Tensors) -> Tensors:
    """The library's training step around the learner's compute: whole, in micro-batches, and as for 16 bits.

    The last asks for bf16 and scales the loss. Autocast lets float64 be, so numbers stay exact: that it was on is looked at.
    Losses in another format than float64 are not exact: they are left out, and the rest is there.
    """
    batches, seed = tiny_training.batches_of(inputs), int(inputs["seed"])
    found: Tensors = {}
    formats: set[torch.dtype] = set()
    for name, micro, scale, precision in (("whole", 0, 1.0, "fp64"), ("micro", 4, 1.0, "fp64"),
                                          ("scaled", 2, float(inputs["scale"]), "bf16")):
        with installed_answers(("course.training.step.eager",), {"eager": with_loss_scale(step.eager, scale, formats)}):
            trained = tiny_training.train(batches, seed, f"train.micro_batch={micro}", f"precision={precision}", loss_scale=scale)
        found |= {f"{name}_{key}": value for key, value in trained.items()}
    exact = formats == {torch.float64}
    if not exact:
        found |= {name: torch.zeros(0, dtype=torch.float64) for name in LOSSES}
    return found | {"format": torch.tensor(float(exact))}


def with_loss_scale(eager: Callable[..., Any], factor: float, formats: set[torch.dtype]) -> Callable[..., step.Compute]:
    """The learner's `eager`, with a loss scale that grows by `factor` before every step, as it may in fp16.

    Notes in which formats losses come, and makes float64 of them.
    """
    def build(model: Any, progress: step.Progress, config: Config, layout: Layout) -> step.Compute:
        compute = return_values.function(eager(model, progress, config, layout), "eager", "compute")
        return_values.takes(compute, "compute", "one argument, the batch", 1)

        def scaled(batch: Batch) -> Tensor:
            progress.loss_scale.mul_(factor)
            loss: Tensor = compute(batch)
            if not isinstance(loss, Tensor) or not loss.is_floating_point():
                return loss                          # which `tiny_training.train` refuses
            formats.add(loss.dtype)
            return loss.double()

        return scaled

    return build


HOLDS = "its requires_grad is True"
WRITES = "it changes some numbers"
LOSSES = ("whole_losses", "micro_losses", "scaled_losses")

EXERCISES = [
    Exercise("relative-l2", "01", ("course.models.vit.RelativeL2",), draw_fields, run_relative_l2, {
        "each": "weight is 1 for each real sample and 0 for padding",
        "sum": "the sum of the samples' losses is right, even with padding",
        "weight": "the weight that forward returns is the number of real samples",
        "gradient": "the gradient of the sum is right, and finite for padding too",
        "kept": "it does not change the batch",
        "losses": "the library trains with it: the losses of two steps are right",
        "weights": "the weights of the model after these two steps are right"}, flags={"kept": WRITES}, points=2),
    Exercise("training-step", "01", (f"{__name__}.training_step",), draw_fields, run_training_step, {
        "losses": "the mean loss of each of four steps is right",
        "weights": "the weights of the model after four steps are right",
        "free": "the returned loss is detached from the autograd graph",
        "kept": "it does not change the batch"}, flags={"free": HOLDS, "kept": WRITES}, points=2),
    Exercise("accumulate", "01", ("course.training.step.eager",), draw_fields, run_accumulate, {
        "format": "the returned loss has the dtype of your inputs, here float64",
        "whole_losses": "the losses of two global batches, each in one piece, are right",
        "whole_seen": "without micro-batches the model sees each batch in one piece",
        "whole_weights": "the library trains with it: the weights of the model after these two steps are right",
        "micro_losses": "in micro-batches of 4 samples, the last one smaller, the losses are the same",
        "micro_weights": "in micro-batches of 4 samples the weights of the model are the same",
        "micro_seen": "the model sees one micro-batch after another: the samples of each forward pass are right",
        "micro_turns": "each micro-batch's backward pass comes before the next one's forward pass",
        "micro_free": "the returned loss is detached from the autograd graph",
        "scaled_seen": "in micro-batches of 2 samples too, the samples of each forward pass are right",
        "scaled_losses": "a loss scale does not change the returned loss",
        "scaled_weights": "a loss scale that changes between steps reaches the gradients, which the step divides by it",
        "scaled_cast": "the forward pass runs inside autocast, as bf16 needs it"},
        flags={"micro_turns": "it came later, so all of them are in memory at once, which micro-batches should avoid",
               "micro_free": HOLDS, "scaled_cast": "autocast was off: the model would compute in full precision",
               "format": "it has another dtype"},
        untried=dict.fromkeys(LOSSES, "not compared, because the dtype differs"),
        sizes=(1, 2), points=3),
]
