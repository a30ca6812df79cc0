"""Data sets, their makers, and the loaders that feed them to a rank."""

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
Ids = Callable[[], Iterator[list[int]]]              # begins the sample ids of one batch after another; can be pickled


def open_data(config: "Config", split: str) -> Any:
    """The checked data set of one split, of a model's kind: `__len__`, and `__getitems__(sample ids)`, a batch."""
    path, limit = config.data.path, {"train": config.data.train_samples, "valid": config.data.valid_samples}.get(split, 0)
    if isinstance(config.model, DiTConfig):
        return Latents(path, split, config.model.latent, config.model.classes, limit)
    if isinstance(config.model, GPTConfig):
        c = config.model                             # rows beyond `words` are padding, which no token is
        return Sequences(path, split, c.context, c.words, limit, "model.vocab_used" if c.vocab_used else "model.vocab")
    return open_pairs(config, split)


def has_validation(config: "Config") -> bool:
    """Whether there is anything to watch while training: tokens and latents can be made with valid=0, and Megatron's are a pair
    alone."""
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
    """The files of the training data, or another split's, by name under data.path, and their bytes; of random data none."""
    path, kinds = Path(config.data.path), (".h5", ".bin", ".idx")
    found = [*path.glob(f"{split}/*"), *path.glob(f"{split}.*")] if config.data.source == "files" else []
    return {str(file.relative_to(path)): file.stat().st_size for file in sorted(found) if file.suffix in kinds}


def open_pairs(config: "Config", split: str) -> Pairs:
    """The checked data set of one split: `train`, `valid` or `test`."""
    assert isinstance(config.model, ViTConfig)       # course/config/validation.py refuses the others
    limit = {"train": config.data.train_samples, "valid": config.data.valid_samples}.get(split, 0)
    return Pairs(config.data.path, split, config.model.channels, config.model.grid, config.data.lead, limit,
                 config.data.pairs == "reference")


def train_loader(config: "Config", dp: "Axis", device: torch.device, consumed: int,
                 example: Callable[[int, torch.device, int], Batch]) -> Generator[Batch, None, None]:
    """This rank's part of one global batch after another, on its device, without end, after `consumed` samples."""
    t = config.train
    if config.data.source == "mock":
        mine = order.my_slice(t.global_batch, dp.size, dp.rank)
        made = example(mine.stop - mine.start, device, mine.start)
        return to_device((made for _ in repeat(0)), device, config)
    pairs = open_data(config, "train")
    ids = partial(order.train_batches, t.seed, len(pairs), t.global_batch, dp.size, dp.rank, consumed)
    return to_device(load(config, pairs, ids, config.data.workers, device), device, config)


def eval_loader(config: "Config", dp: "Axis", device: torch.device, pairs: Any) -> Generator[Batch, None, None]:
    """This rank's part of one pass over `pairs` in order; padding has sample id -1."""
    ids = partial(order.eval_batches, len(pairs), config.train.global_batch, dp.size, dp.rank)
    processes = config.data.loader in ("native", "dali")         # started anew for each pass: two are enough
    workers = min(config.data.workers, 2) if processes else config.data.workers
    return to_device(load(config, pairs, ids, workers, device), device, config)


def load(config: "Config", pairs: Any, ids: Ids, workers: int, device: torch.device) -> Generator[Batch, None, None]:
    """The batches of `ids` from the loader that the configuration names: the same bits from each."""
    kind, ahead = config.data.loader, config.data.ahead
    if kind == "native":
        return native.loader(pairs, ids(), workers, pin=device.type == "cuda")
    workers = max(workers, 1)                        # the others have no way to read in the training process
    if kind == "threads":
        return threads.loader(pairs, ids(), workers, ahead, device)
    from course.data.loaders import dali  # needs a package that not everybody has

    return (dali.numpy_loader if kind == "dali_numpy" else dali.loader)(pairs, ids, workers, ahead, device)


def to_device(batches: Generator[Batch, None, None], device: torch.device, config: "Config") -> Generator[Batch, None, None]:
    """Copy each batch to the device, its fields in the parameters' format; from pinned memory the host need not wait."""
    dtype = parameter_dtype(config.precision)
    with closing(batches):                           # now, not when an error's traceback lets go of it
        for batch in batches:
            yield {name: tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)
                   for name, tensor in batch.items()}
