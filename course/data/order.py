"""Which samples a step sees: a pure function of (seed, position), so a checkpoint only stores a sample count."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from course.utils import random
from course.utils.errors import CourseError


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, n: int) -> np.ndarray:
    """The shuffled order of the n samples in one epoch, (n,) int64."""
    return random.permutation(random.key(seed, "epoch", epoch), n)


def samples_at(seed: int, n: int, start: int, stop: int) -> np.ndarray:
    """Samples `start` to `stop - 1` of the endless sequence of shuffled epochs, (stop - start,) int64."""
    parts = []
    while start < stop:
        epoch, offset = divmod(start, n)
        part = epoch_order(seed, epoch, n)[offset:offset + stop - start]
        parts.append(part)
        start += len(part)
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def my_slice(size: int, ranks: int, rank: int) -> slice:
    """The contiguous slice of a global batch that data-parallel rank `rank` of `ranks` takes.

    Raises `CourseError` if `size` is not divisible by `ranks`.
    """
    if size % ranks:
        raise CourseError(f"train.global_batch={size} is not divisible by the {ranks} data-parallel ranks: "
                          f"use a multiple of {ranks}")
    return slice(rank * size // ranks, (rank + 1) * size // ranks)


def train_batches(seed: int, n: int, global_batch: int, ranks: int, rank: int, consumed: int) -> Iterator[list[int]]:
    """This rank's sample ids of each global batch, without end, after `consumed` samples."""
    mine = my_slice(global_batch, ranks, rank)
    while True:
        yield samples_at(seed, n, consumed, consumed + global_batch)[mine].tolist()
        consumed += global_batch


def eval_batches(n: int, global_batch: int, ranks: int, rank: int) -> Iterator[list[int]]:
    """Yield this rank's sample ids for each batch of one ordered pass; -1 pads the last batch."""
    mine = my_slice(global_batch, ranks, rank)
    padded = np.full(-(-n // global_batch) * global_batch, -1)
    padded[:n] = np.arange(n)
    for start in range(0, len(padded), global_batch):
        yield padded[start:start + global_batch][mine].tolist()
