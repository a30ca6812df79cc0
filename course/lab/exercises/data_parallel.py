"""Lesson 07: gradients averaged over the data-parallel ranks."""

from course.lab import tiny
from course.lab.exercise import Exercise, Tensors


def draw(seed: int, hidden: bool) -> Tensors:
    """Two global batches."""
    return tiny.drawn(seed, samples=12 if hidden else 8)


def train(inputs: Tensors) -> Tensors:
    """The library's training step with the learner's averaging."""
    return tiny.train(tiny.batches_of(inputs), int(inputs["seed"]))


EXERCISES = [
    Exercise("average-gradients", "07", ("course.parallel.data.average_gradients",), draw, train, {
        "losses": "the loss of each of two steps is that of the serial run",
        "weights": "after two steps every rank has the weights of the serial run"}, sizes=(2, 4), points=2),
]
