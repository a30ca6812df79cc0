"""Data sets: making them, opening them, and loading batches onto a rank's device."""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from course.data import order
from course.data.latents.shards import Latents, read_summary
from course.data.loaders import native, threads
from course.data.text.indexed_files import Documents
from course.data.text.sequences import Sequences
from course.data.weather.pairs import Batch, Pairs
from course.models import DiTConfig, GPTConfig, ViTConfig
from course.ops.number_formats import parameter_dtype

if TYPE_CHECKING:
    from course.config import Config
    from course.parallel import Axis

__all__ = ["Batch", "Latents", "Pairs", "Sequences", "data_files", "eval_loader", "has_validation", "open_data", "open_pairs",
           "to_device", "train_loader"]
Ids = Callable[[], Iterator[list[int]]]              # starts an iterator over each batch's sample ids; picklable


def open_data(config: "Config", split: str) -> Any:
    """Open and check one split for the configured model. `__getitems__(sample ids)` of the data set returns a batch."""
    path, limit = config.data.path, {"train": config.data.train_samples, "valid": config.data.valid_samples}.get(split, 0)
    if isinstance(config.model, DiTConfig):
        return Latents(path, split, config.model.latent, config.model.classes, limit)
    if isinstance(config.model, GPTConfig):
        c = config.model                             # rows beyond `words` are padding: no token has these ids
        return Sequences(path, split, c.context, c.words, limit, "model.vocab_used" if c.vocab_used else "model.vocab")
    return open_pairs(config, split)


def has_validation(config: "Config") -> bool:
    """Whether the data has validation samples.

    Tokens and latents can be made with valid=0, and Megatron's tools write only one .bin and .idx pair.
    """
    if config.data.source == "mock":
        return False
    if isinstance(config.model, DiTConfig):
        return any(name.startswith("valid/") for name in read_summary(Path(config.data.path))["shards"])
    if not isinstance(config.model, GPTConfig):
        return True
    valid = Path(config.data.path) / "valid"
    there = any(valid.with_name(f"valid.{ending}").exists() for ending in ("bin", "idx"))
    return there and len(Documents(valid).tokens) > 0


def data_files(config: "Config", split: str = "train") -> dict[str, int]:
    """The files of a split: path relative to data.path -> size in bytes. Empty for random data (data.source=mock)."""
    path, kinds = Path(config.data.path), (".h5", ".bin", ".idx")
    found = [*path.glob(f"{split}/*"), *path.glob(f"{split}.*")] if config.data.source == "files" else []
    return {str(file.relative_to(path)): file.stat().st_size for file in sorted(found) if file.suffix in kinds}


def open_pairs(config: "Config", split: str) -> Pairs:
    """Open and check one split of weather data: `train`, `valid` or `test`."""
    assert isinstance(config.model, ViTConfig)       # course/config/validation.py refuses the others
    limit = {"train": config.data.train_samples, "valid": config.data.valid_samples}.get(split, 0)
    return Pairs(config.data.path, split, config.model.channels, config.model.grid, config.data.lead, limit,
                 config.data.pairs == "reference")


def train_loader(config: "Config", dp: "Axis", device: torch.device, consumed: int,
                 example: Callable[[int, torch.device, int], Batch]) -> Generator[Batch, None, None]:
    """Yield this rank's slice of every global batch, on its device, without end, starting after `consumed` samples."""
    t = config.train
    if config.data.source == "mock":
        mine = order.my_slice(t.global_batch, dp.size, dp.rank)
        made = example(mine.stop - mine.start, device, mine.start)
        return to_device((made for _ in repeat(0)), device, config)
    pairs = open_data(config, "train")
    ids = partial(order.train_batches, t.seed, len(pairs), t.global_batch, dp.size, dp.rank, consumed)
    return to_device(load(config, pairs, ids, config.data.workers, device), device, config)


def eval_loader(config: "Config", dp: "Axis", device: torch.device, pairs: Any) -> Generator[Batch, None, None]:
    """Yield this rank's slice of one ordered pass over `pairs`; padding has sample id -1."""
    ids = partial(order.eval_batches, len(pairs), config.train.global_batch, dp.size, dp.rank)
    processes = config.data.loader in ("native", "dali")         # each pass starts new ones: two are enough
    workers = min(config.data.workers, 2) if processes else config.data.workers
    return to_device(load(config, pairs, ids, workers, device), device, config)


def load(config: "Config", pairs: Any, ids: Ids, workers: int, device: torch.device) -> Generator[Batch, None, None]:
    """Yield the batches of `ids` from the configured loader. All loaders return the same bits."""
    kind, ahead = config.data.loader, config.data.ahead
    if kind == "native":
        return native.loader(pairs, ids(), workers, pin=device.type == "cuda")
    workers = max(workers, 1)                        # only the native loader can read in the training process
    if kind == "threads":
        return threads.loader(pairs, ids(), workers, ahead, device)
    from course.data.loaders import dali  # DALI is an optional dependency

    return (dali.numpy_loader if kind == "dali_numpy" else dali.loader)(pairs, ids, workers, ahead, device)


def to_device(batches: Generator[Batch, None, None], device: torch.device, config: "Config") -> Generator[Batch, None, None]:
    """Copy each batch to the device and cast its fields to the parameters' dtype; asynchronous from pinned memory."""
    dtype = parameter_dtype(config.precision)
    with closing(batches):                           # close it now: an error's traceback would keep it alive
        for batch in batches:
            yield {name: tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)
                   for name, tensor in batch.items()}
