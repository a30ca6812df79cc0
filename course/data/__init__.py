"""Data sets, their makers, and the loaders that feed them to a rank."""

from collections.abc import Callable, Generator, Iterable
from itertools import repeat
from typing import TYPE_CHECKING

import torch

from course.data import native, order
from course.data.native import Batch, Pairs
from course.precision import parameter_dtype

if TYPE_CHECKING:
    from course.config import Config
    from course.parallel import Axis

__all__ = ["Batch", "Pairs", "eval_loader", "open_pairs", "to_device", "train_loader"]


def open_pairs(config: "Config", split: str) -> Pairs:
    """The checked data set of one split: `train`, `valid` or `test`."""
    assert config.model.kind == "vit"                # `config.check` refuses the others
    limit = {"train": config.data.train_samples, "valid": config.data.valid_samples}.get(split, 0)
    return Pairs(config.data.path, split, config.model.channels, config.model.grid, config.data.lead, limit)


def train_loader(config: "Config", dp: "Axis", device: torch.device, consumed: int,
                 example: Callable[[int, torch.device, int], Batch]) -> Generator[Batch, None, None]:
    """This rank's part of one global batch after another, on its device, without end, after `consumed` samples."""
    t = config.train
    if config.data.source == "mock":
        mine = order.my_slice(t.global_batch, dp.size, dp.rank)
        return to_device(repeat(example(mine.stop - mine.start, device, mine.start)), device, config)
    pairs = open_pairs(config, "train")
    ids = order.train_batches(t.seed, len(pairs), t.global_batch, dp.size, dp.rank, consumed)
    return to_device(native.loader(pairs, ids, config.data.workers, pin=device.type == "cuda"), device, config)


def eval_loader(config: "Config", dp: "Axis", device: torch.device, pairs: Pairs) -> Generator[Batch, None, None]:
    """This rank's part of one pass over `pairs` in order; padding has sample id -1."""
    ids = order.eval_batches(len(pairs), config.train.global_batch, dp.size, dp.rank)
    return to_device(native.loader(pairs, ids, min(config.data.workers, 2), pin=device.type == "cuda"), device, config)


def to_device(batches: Iterable[Batch], device: torch.device, config: "Config") -> Generator[Batch, None, None]:
    """Copy each batch to the device, its fields in the parameters' format; from pinned memory the host need not wait."""
    dtype = parameter_dtype(config.precision)
    iterator = iter(batches)
    try:
        for batch in iterator:
            yield {name: tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)
                   for name, tensor in batch.items()}
    finally:                                         # end the workers now, not when an error's traceback lets go of them
        getattr(iterator, "_shutdown_workers", lambda: None)()
