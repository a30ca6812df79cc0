"""`course bench loaders`: measure the speed of each loader, and the limits set by reading and copying.

The limits ("floors"): threads that read states from the page cache straight into (pinned) memory, and the copy from pinned memory
to the GPU. A loader as fast as the slower limit cannot be improved, and one faster than the model need not be.
"""

import importlib.metadata
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import h5py
import numpy as np
import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from course.bench import timing
from course.config import Config, Data, load
from course.data import Pairs, open_pairs, order, to_device
from course.data import load as load_batches
from course.data.loaders import numpy_files
from course.data.loaders.hdf5_extents import StateReader
from course.data.loaders.threads import Buffer
from course.data.weather import layout
from course.models import ViTConfig
from course.utils.atomic_files import atomic
from course.utils.errors import CourseError
from course.utils.machine import cores

STATES = 64                                          # in a generated data set: 1.3 GB of 20 x 360 x 720
LAPS, WARM = 5, 3                                    # laps, warmup batches
KINDS: tuple[str, ...] = get_args(get_type_hints(Data)["loader"])


def main(settings: Sequence[str], small: bool, kinds: Sequence[str], workers: Sequence[int], seconds: float,
         device: torch.device) -> dict[str, Any]:
    """Measure the loaders, print a table and return the results, in pairs (input and target) per second."""
    configs = {kind: configure([*settings, f"data.loader={kind}"], small) for kind in kinds or KINDS}
    config = next(iter(configs.values()))
    pairs, batch = open_pairs(config, "train"), config.train.global_batch
    floors = {str(n): read_floor(pairs, n, seconds, device) for n in workers}
    copied = copy_floor(pairs, batch, device)
    measured: dict[str, dict[str, float]] = {}
    skipped: dict[str, str] = {}
    for kind, config in configs.items():
        try:
            counts = [0, *workers] if kind == "native" else workers
            measured[kind] = {str(n): loader_speed(config, pairs, n, seconds, device) for n in counts}
        except CourseError as error:
            skipped[kind] = str(error)
    found = {**timing.machine(device), "cores": cores(), **versions(),
             "command": " ".join(["course bench loaders", *settings, *(["--small"] if small else [])]),
             "unit": "pairs/s", "batch": batch, "pair_mb": 2 * 4 * float(np.prod(pairs.shape)) / 1e6,
             "page cache to memory": floors, "pinned to GPU": copied, "loaders": measured, "skipped": skipped}
    show(found, workers)
    return found


def configure(settings: Sequence[str], small: bool) -> Config:
    """vit-short's configuration (vit-demo's if `small`) with the given settings. Generates data if none sets `data.path`."""
    preset = "vit-demo" if small else "vit-short"
    config = load(preset, settings)
    if any(setting.startswith("data.path=") for setting in settings):
        return config
    assert isinstance(config.model, ViTConfig)                # true for both presets
    path = Path("data") / "bench-{}x{}".format(*config.model.grid)
    make_data(path, config.model.channels, config.model.grid)
    return load(preset, [*settings, f"data.path={path}"])


def doubling() -> list[int]:
    """1, 2, 4 ... up to the number of cores that this process may use."""
    return [2**i for i in range(cores().bit_length())]


def make_data(path: Path, channels: int, grid: tuple[int, int], states: int = STATES) -> None:
    """Generate a weather data set of noise, unless it exists: a contiguous year, three validation states, and .npy files."""
    noise = np.random.default_rng(0).standard_normal((channels, *grid), np.float32)
    for split, count in {"train": states, "valid": 3}.items():
        file = path / split / "0001.h5"
        if file.is_file():
            continue
        with atomic(file) as temporary, h5py.File(temporary, "w") as opened:
            names = [f"channel{i}" for i in range(channels)]
            fields = layout.create_year(opened, count, names, layout.latitudes(grid[0]), layout.longitudes(grid[1]))
            for i in range(count):
                fields[i] = np.roll(noise, i, 2)
    for name, value in {"means": 0, "stds": 1}.items():
        with atomic(path / "stats" / f"global_{name}.npy") as temporary, open(temporary, "wb") as out:
            np.save(out, np.full((1, channels, 1, 1), value, np.float32))
    numpy_files.convert(path, lambda text: None)


def read_floor(pairs: Pairs, threads: int, seconds: float, device: torch.device) -> float:
    """Pairs per second that threads read into preallocated memory, without any other work."""
    def read(first: int, states: StateReader, memory: np.ndarray, until: float) -> int:
        """Read states in order from `first` until the time is over. Returns their number."""
        count = 0
        while count == 0 or time.perf_counter() < until:
            into = memory[count % len(memory)]
            for part in states.reads((first + count) % len(pairs), 0, into, into.nbytes):
                part()
            count += 1
        return count

    memories = [Buffer(device).take((8, *pairs.shape)).numpy() for _ in range(threads)]        # eight, to exceed the caches
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        files = [stack.enter_context(closing(StateReader(pairs))) for _ in range(threads)]

        def lap() -> float:
            begin = time.perf_counter()
            counts = pool.map(lambda i: read(i * len(pairs) // threads, files[i], memories[i], begin + seconds), range(threads))
            return sum(counts) / 2 / (time.perf_counter() - begin)

        return statistics.median([lap() for _ in range(1 + LAPS)][1:])


def copy_floor(pairs: Pairs, batch: int, device: torch.device) -> float | None:
    """Pairs per second from pinned memory to the GPU; None without a GPU."""
    if device.type != "cuda":
        return None
    pinned = Buffer(device).take((2, batch, *pairs.shape))
    there = torch.empty_like(pinned, device=device)
    return batch / timing.seconds(lambda: there.copy_(pinned, non_blocking=True), device)


def loader_speed(config: Config, pairs: Pairs, workers: int, seconds: float, device: torch.device) -> float:
    """Pairs per second of the configured loader, for a caller that does nothing with them."""
    batch = config.train.global_batch
    ids = partial(order.train_batches, config.train.seed, len(pairs), batch, 1, 0, 0)
    with closing(to_device(load_batches(config, pairs, ids, workers, device), device, config)) as batches:

        def lap() -> float:
            count, begin = 0, time.perf_counter()
            while count == 0 or time.perf_counter() < begin + seconds:
                next(batches)
                count += batch
            timing.wait(device)
            return count / (time.perf_counter() - begin)

        for _ in range(WARM):
            next(batches)
        return statistics.median(lap() for _ in range(LAPS))


def versions() -> dict[str, str]:
    """Versions of the libraries that read."""
    found = {"h5py": h5py.__version__}
    with suppress(importlib.metadata.PackageNotFoundError):
        found["dali"] = importlib.metadata.version("nvidia-dali-cuda130")
    return found


def show(found: dict[str, Any], workers: Sequence[int]) -> None:
    """Print the table, and why loaders are missing from it."""
    table = Table(title=f"pairs of {found['pair_mb']:.3g} MB per second, in batches of {found['batch']}: {found['hardware']}, "
                        f"{found['cores']} cores", box=SIMPLE)
    table.add_column("workers", no_wrap=True)
    for n in (0, *workers):
        table.add_column(str(n), justify="right", no_wrap=True)
    for name, speeds in {"floor: page cache to memory": found["page cache to memory"], **found["loaders"]}.items():
        table.add_row(name, *(f"{speeds[str(n)]:.3g}" if str(n) in speeds else "" for n in (0, *workers)))
    Console().print(table)
    copied = found["pinned to GPU"]
    print("floor: pinned memory to GPU: " + (f"{copied:.4g} pairs/s" if copied else "left out, there is no GPU here"))
    for kind, why in found["skipped"].items():
        print(f"{kind} left out: {why}")
