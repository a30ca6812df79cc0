"""Lesson 01: the loss, the training step by hand, and the loop's forward and backward."""

import torch
from torch import Tensor, nn

from course.data import Batch
from course.lab import tiny
from course.lab.exercise import Exercise, Tensors
from course.models import vit


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
    scale = 1 + 9 * torch.rand((), generator=torch.Generator().manual_seed(seed))
    return tiny.drawn(seed, samples=10 if hidden else 6, padding=1) | {"scale": scale}


def unchanged(inputs: Tensors, before: Tensors) -> Tensor:
    """1.0 if no input was written to, else 0.0."""
    return torch.tensor(float(all(torch.equal(inputs[name], before[name]) for name in before)))


def copies(inputs: Tensors) -> Tensors:
    """The inputs, copied."""
    return {name: tensor.clone() for name, tensor in inputs.items()}


def measure_loss(inputs: Tensors) -> Tensors:
    """The loss of drawn fields, its gradient, and a model trained with it."""
    before, batch = copies(inputs), tiny.batches_of(inputs)[0]
    output = (batch["input"] * 3 + 1).requires_grad_()       # not zero on padding, whose input and target are
    total, weight = vit.RelativeL2()(output, batch)
    gradient, = torch.autograd.grad(total, output)
    kept = unchanged(inputs, before)
    trained = tiny.train(tiny.batches_of(inputs), int(inputs["seed"]))
    return {"sum": total.detach(), "weight": weight.detach(), "gradient": gradient, "kept": kept, **trained}


def step_by_hand(inputs: Tensors) -> Tensors:
    """Four steps with the learner's training step, on a model of the library."""
    c = tiny.settings()
    model = tiny.model(c, tiny.mesh(c), int(inputs["seed"]))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before, losses = copies(inputs), []
    for batch in tiny.batches_of(inputs) * 2:
        losses.append(training_step(model, optimizer, batch))
    return {"losses": torch.stack([loss.detach() for loss in losses]), "weights": tiny.flat(model),
            "free": torch.tensor(float(not any(loss.requires_grad for loss in losses))), "kept": unchanged(inputs, before)}


def accumulate(inputs: Tensors) -> Tensors:
    """The library's training step around the learner's compute: without and with micro-batches, and with loss scaling."""
    batches, seed = tiny.batches_of(inputs), int(inputs["seed"])
    found: Tensors = {}
    for name, micro, scale in (("whole", 0, 1.0), ("micro", 4, 1.0), ("scaled", 2, float(inputs["scale"]))):
        trained = tiny.train(batches, seed, f"train.micro_batch={micro}", loss_scale=scale)
        found |= {f"{name}_{key}": value for key, value in trained.items()}
    return found


EXERCISES = [
    Exercise("relative-l2", "01", ("course.models.vit.RelativeL2",), draw_fields, measure_loss, {
        "sum": "the loss of drawn fields, padding among them, is right",
        "weight": "it returns how many samples are real",
        "gradient": "its gradient is right, and finite for padding too",
        "kept": "it leaves its inputs as they are",
        "losses": "the library trains with it: the losses of two steps are right",
        "weights": "and so are the weights after them"}, points=2),
    Exercise("training-step", "01", (f"{__name__}.training_step",), draw_fields, step_by_hand, {
        "losses": "the mean loss of each of four steps is right",
        "weights": "the weights after four steps are right",
        "free": "the returned loss does not hold on to the graph",
        "kept": "it leaves the batch as it is"}, points=2),
    Exercise("accumulate", "01", ("course.step.eager",), draw_fields, accumulate, {
        "whole_losses": "the loss of a global batch in one piece is right",
        "whole_weights": "the library trains with it: the weights after two steps are right",
        "micro_losses": "the loss is the same in micro-batches of 4 samples, the last one smaller",
        "micro_weights": "and so are the weights",
        "micro_seen": "the model sees one micro-batch after another",
        "micro_free": "the returned loss does not hold on to the graph",
        "scaled_losses": "a loss scale leaves the reported loss alone",
        "scaled_weights": "and reaches the gradients, which the step divides by it"}, sizes=(1, 2), points=3),
]
