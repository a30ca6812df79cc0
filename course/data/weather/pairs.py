"""The (input, target) pairs of a data set: how samples are numbered, and the simple way to read one.

A batch is a dict of tensors with the sample as dim 0: `input` and `target` (B, C, H, W), normalized, float32,
and `sample` (B,) int64, the index of the pair in the data set (-1 for padding, which is zeros). All loaders
return the same bits: they subtract the mean, then divide by the standard deviation, in float32.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from course.data.hdf5_storage import check_size, hdf5_errors, open_hdf5
from course.data.weather import layout
from course.data.weather.plausibility import PlausibleRanges
from course.utils.errors import CourseError

Batch = dict[str, Tensor]
RESTORE = "restore the file and run again"           # the cure for a file that was good when training began


class Pairs(Dataset[Batch]):
    """All pairs (state, state `lead` entries later) of one split, numbered through its years in order.

    A pair never crosses the end of a file. The worker that reads opens a file on first use.

    reference: number pairs as NERSC's course does, n pairs for a file of n entries. Pair i begins at entry i mod (n - lead),
    or `lead` entries later if that is one of the first `lead` entries.
    """

    def __init__(self, path: str, split: str, channels: int, grid: tuple[int, int], lead: int = 1, limit: int = 0,
                 reference: bool = False):
        self.years = layout.find_years(Path(path), split, grid)
        self.lead = lead
        self.shape = self.years[0].shape[1:]                            # (C, H, W)
        self._check(channels, grid)
        self.mean, self.std = layout.read_statistics(Path(path), self.shape)
        self.reference = reference
        fewest = 3 * lead - 1 if reference else lead     # a file with this many entries has no pair
        pairs = [0 if year.shape[0] <= fewest else year.shape[0] - (0 if reference else lead) for year in self.years]
        self.first = np.concatenate([[0], np.cumsum(pairs)])            # index of each year's first pair
        self.size = min(limit or self.first[-1], self.first[-1])
        if not self.size:
            raise CourseError(f"{self.years[0].path.parent} holds no pair {lead} entries apart: use a smaller data.lead")
        self._open: dict[int, h5py.Dataset] = {}
        self.plausible = PlausibleRanges.of(layout.channel_names(self.years[0]), self.mean[:, 0, 0])
        self._check_scale(Path(path))

    def _check(self, channels: int, grid: tuple[int, int]) -> None:
        file, (C, H, W) = self.years[0].path, self.shape
        if channels != C:
            raise CourseError(f"{file} has {C} channels but model.channels={channels}: set model.channels={C} or use other data")
        if tuple(grid) != (H, W):
            raise CourseError(f"{file} has a grid of {H}x{W} but model.grid={list(grid)}: "
                              f"set model.grid=[{H},{W}] or use other data")

    def _check_scale(self, path: Path) -> None:
        """Raise `CourseError` unless normalized values are about 1: otherwise the statistics are of other data or channels."""
        rms = np.sqrt((self.state(0) ** 2).mean((1, 2)))                # (C,)
        self._open.clear()                                              # a worker must not share this process's handle
        worst = int(np.argmax(np.abs(np.log(np.where(np.isfinite(rms), rms, 1.0) + 1e-30))))
        if rms[worst] < 1e-2 or rms[worst] > 1e2:
            raise CourseError(f"{path}/stats does not match the data: normalized with it, channel {worst} of "
                              f"{self.years[0].path} has a root mean square of {rms[worst]:.3g}, not about 1; "
                              f"remake it with `course data stats {path}`")

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without open files: a worker process opens them itself."""
        return vars(self) | {"_open": {}}

    def __len__(self) -> int:
        return int(self.size)

    def place(self, sample: int, ahead: int = 0) -> tuple[int, int]:
        """(file number, entry) of the state `ahead` entries after the start of pair `sample`."""
        number = int(np.searchsorted(self.first, sample, side="right")) - 1
        entry = int(sample - self.first[number])
        if self.reference:
            entry %= self.years[number].shape[0] - self.lead
            entry += self.lead if entry < self.lead else 0
        return number, entry + ahead

    def state(self, sample: int, ahead: int = 0) -> np.ndarray:
        """Read the normalized state `ahead` entries after the start of pair `sample`, (C, H, W) float32."""
        state = self._read(sample, ahead)
        self.check_states([(sample, ahead)], state[None])
        state -= self.mean
        state /= self.std
        return state

    def _read(self, sample: int, ahead: int) -> np.ndarray:
        """Read a state without normalizing or checking it."""
        number, entry = self.place(sample, ahead)
        fields = self._fields(number)
        with entry_errors(self.years[number].path, entry):
            state: np.ndarray = fields[entry]
            check_size(fields)
        return state

    def check_states(self, places: list[tuple[int, int]], states: np.ndarray) -> None:
        """Raise `CourseError` if raw states (N, C, H, W), read from the given (sample, ahead), hold values nobody wrote."""
        if found := self.plausible.few(states):
            number, entry = self.place(*places[found[0]])
            raise layout.implausible_state(self.years[number].path, entry, found[1])

    def _fields(self, number: int) -> h5py.Dataset:
        if number not in self._open:
            self._open[number] = open_fields(self.years[number].path)
        return self._open[number]

    def __getitems__(self, samples: list[int]) -> Batch:
        """Read a whole batch: PyTorch's DataLoader calls this once per batch, not once per sample."""
        input, target = (np.zeros((len(samples), *self.shape), np.float32) for _ in range(2))
        real = [i for i, sample in enumerate(samples) if sample >= 0]
        for states, ahead in ((input, 0), (target, self.lead)):
            for i in real:
                states[i] = self._read(samples[i], ahead)
            self.check_states([(samples[i], ahead) for i in real], states if len(real) == len(samples) else states[real])
            for i in real:
                states[i] -= self.mean
                states[i] /= self.std
        return {"input": torch.from_numpy(input), "target": torch.from_numpy(target), "sample": torch.tensor(samples)}


def sample_ids(samples: list[int], device: torch.device) -> Tensor:
    """Copy a batch's sample ids to the device, without waiting for the device's queued work."""
    return torch.tensor(samples, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def open_fields(path: Path) -> h5py.Dataset:
    """Open the `fields` of one file for reading during training. Raises `CourseError` if that fails."""
    with hdf5_errors(f"{path} cannot be opened", RESTORE):
        return open_hdf5(path)["fields"]


def entry_errors(path: Path, entry: int) -> AbstractContextManager[None]:
    """Turn errors in reading an entry of an HDF5 file into `CourseError`; the file was good when training began."""
    return hdf5_errors(f"{path} could not be read at entry {entry}", RESTORE)


def unreadable_entry(path: Path, entry: int, why: str, cure: str = RESTORE) -> CourseError:
    """The error for an unreadable entry of a file that was good when training began."""
    return CourseError(f"{path} could not be read at entry {entry} ({why}): {cure}")
