"""Lesson 07: gradients averaged over the data-parallel ranks."""

import torch

from course.lab import tiny
from course.lab.exercise import Exercise, Tensors


def draw(seed: int, hidden: bool) -> Tensors:
    """Two global batches."""
    generator = torch.Generator().manual_seed(seed)
    samples = 12 if hidden else 8
    drawn = {f"{name}{i}": tensor for i in (0, 1)
             for name, tensor in tiny.fields(generator, tiny.settings(), samples).items()}
    return drawn | {"seed": torch.tensor(seed % 2**31)}


def train(inputs: Tensors) -> Tensors:
    """The library's training step with the learner's averaging."""
    batches = [{name: inputs[f"{name}{i}"] for name in ("input", "target", "sample")} for i in (0, 1)]
    return tiny.train(tiny.settings(f"train.global_batch={len(batches[0]['sample'])}"), batches, int(inputs["seed"]))


EXERCISES = [
    Exercise("average-gradients", "07", ("course.parallel.data.average_gradients",), draw, train, {
        "losses": "the loss of each of two steps is that of the serial run",
        "weights": "after two steps every rank has the weights of the serial run"}, sizes=(2, 4), points=2),
]
