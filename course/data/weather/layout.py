"""The layout of a weather data set on disk, the same for the simulated atmosphere and for ERA5.

    PATH/train/1979.h5 ...    dataset `fields`, float32, (time, channel, latitude, longitude), 6-hourly
    PATH/valid/2016.h5        the same for validation
    PATH/test/2018.h5         the same for the final test
    PATH/stats/global_means.npy, global_stds.npy      float32 (1, channel, 1, 1), of the training years
    PATH/stats/time_means.npy                         float32 (channel, latitude, longitude): the climatology

Latitudes run from north to south, longitudes eastwards from 0. A file may have the attributes
`channels` (names) and `latitude`, `longitude` (degrees). Without them, readers assume the twenty
channels below on an equally spaced grid.
"""

import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from course.data.hdf5_storage import MAKE_AGAIN, first_line, hdf5_errors, open_hdf5
from course.data.weather.plausibility import HUGE, PlausibleRanges
from course.resilience.folder_lock import only_maker
from course.utils.atomic_files import atomic, os_error_cure
from course.utils.errors import CourseError, does_not_exist

HOURS = 6                                        # between two entries of a file
SPLITS = ("train", "valid", "test")

# Name and unit of each channel, in file order, as in the ERA5 course data (FourCastNet's twenty).
CHANNELS = {
    "u10": "m/s", "v10": "m/s", "t2m": "K", "sp": "Pa", "msl": "Pa", "t850": "K",
    "u1000": "m/s", "v1000": "m/s", "z1000": "m²/s²",
    "u850": "m/s", "v850": "m/s", "z850": "m²/s²",
    "u500": "m/s", "v500": "m/s", "z500": "m²/s²", "t500": "K",
    "z50": "m²/s²", "r500": "%", "r850": "%", "tcwv": "kg/m²",
}


@dataclass(frozen=True)
class Year:
    """A checked data file: its path and the shape of its `fields`."""

    path: Path
    shape: tuple[int, int, int, int]             # (time, channel, latitude, longitude)


def latitudes(rows: int) -> np.ndarray:
    """Centers of `rows` equal bands from north to south, in degrees: 90 - 90/rows ... -90 + 90/rows."""
    return 90 - (np.arange(rows) + 0.5) * 180 / rows


def longitudes(columns: int) -> np.ndarray:
    """`columns` equally spaced longitudes eastwards from 0, in degrees."""
    return np.arange(columns) * 360 / columns


def create_year(file: h5py.File, times: int, channels: Iterable[str], lat: np.ndarray, lon: np.ndarray) -> h5py.Dataset:
    """Add an empty `fields` and the attributes of its axes to an open file.

    `fields` is contiguous and uncompressed, so a loader can compute the offset of a sample and read only that.
    """
    names = list(channels)
    fields = file.create_dataset("fields", (times, len(names), len(lat), len(lon)), "float32")
    # fixed-length strings: variable-length ones are in the file's heap, and HDF5 2.0 loops forever in C on a damaged heap
    file.attrs["channels"] = np.array([name.encode() for name in names])
    file.attrs["latitude"] = np.asarray(lat, "float64")
    file.attrs["longitude"] = np.asarray(lon, "float64")
    file.attrs["hours"] = HOURS
    return fields


def find_years(path: Path, split: str, grid: tuple[int, int] | None = None) -> list[Year]:
    """The files of one split, sorted by name, each opened once and checked.

    Raises `CourseError` for a missing or empty folder, a file that is truncated, not HDF5 or without `fields`, or files
    that differ in channels or grid. If there are no files, the error suggests a command that makes data with `grid`.
    """
    folder = path / split
    files = sorted(folder.glob("*.h5"))
    if not files:
        what = f"{folder} holds no .h5 file:" if folder.is_dir() else does_not_exist(folder)
        mock = ", or, to be quick, data.source=mock: random data" if grid and split == "train" else ""
        raise CourseError(f"{what} make data with {make_command(path, grid)}, or set data.path to a folder laid out as "
                          f"data/README.md says{mock}")
    years = [inspect_year(file) for file in files]
    for year in years:
        if year.shape[1:] != years[0].shape[1:]:
            raise CourseError(f"{year.path} has (channel, lat, lon) {year.shape[1:]} but {years[0].path} has "
                              f"{years[0].shape[1:]}: all files of a data set must agree; move one away or remake it")
    return years


def make_command(path: Path, grid: tuple[int, int] | None) -> str:
    """The shell command that makes simulated data."""
    words = [f"path={path}"] + ([f"grid=[{grid[0]},{grid[1]}]"] if grid else [])
    return f"`course data weather {shlex.join(words)}`"


def inspect_year(file: Path) -> Year:
    """Open one data file, check that its `fields` can be read, and return its path and shape."""
    with open_data_file(file) as year:
        if "fields" not in year or not isinstance(year["fields"], h5py.Dataset):
            raise CourseError(f"{file} has no dataset `fields` (it has {sorted(year)}): convert it as data/README.md says")
        fields = year["fields"]
        if fields.ndim != 4 or fields.shape[0] < 2 or fields.dtype != np.float32:
            raise CourseError(f"{file}: `fields` is {fields.dtype} {fields.shape}, but float32 "
                              "(time, channel, latitude, longitude) with at least 2 times is needed")
        fields[-1, -1, -1, -1]                   # fails if truncated
        return Year(file, fields.shape)


@contextmanager
def open_data_file(file: Path) -> Iterator[h5py.File]:
    """Open a data file for a block that only reads from it: any error in the block becomes a `CourseError` with a cure."""
    cure = "it is truncated, or not HDF5: move it away, and make or copy it again"
    with hdf5_errors(f"{file} cannot be read", cure), open_hdf5(file) as found:
        yield found


def implausible_state(file: Path, entry: int, what: str) -> CourseError:
    """The error for a state with implausible values."""
    return CourseError(f"{file}: entry {entry} holds what no atmosphere has: {what}; it was never written there, or holds a fill "
                       f"value: {MAKE_AGAIN}")


def channel_names(year: Year) -> list[str]:
    """The file's channel names; if it has none, the standard twenty, or channel0, channel1 ... for other numbers of channels.

    Names may be fixed-length or variable-length strings. Raises `CourseError` if their number is not the number of channels.
    """
    with open_data_file(year.path) as file:
        if "channels" in file.attrs:
            names = [name.decode() if isinstance(name, bytes) else str(name) for name in file.attrs["channels"]]
            if len(names) != year.shape[1]:
                raise CourseError(f"{year.path} names {len(names)} channels and has {year.shape[1]}: make or copy it again, or "
                                  "remove its attribute `channels`")
            return names
    if year.shape[1] == len(CHANNELS):
        return list(CHANNELS)
    return [f"channel{i}" for i in range(year.shape[1])]


def grid_latitudes(year: Year) -> np.ndarray:
    """The file's latitudes in degrees, north to south; equal bands if it states none. Raises `CourseError` for invalid ones."""
    with open_data_file(year.path) as file:
        stated = file.attrs.get("latitude")
        if stated is None:
            return latitudes(year.shape[2])
        found = np.asarray(stated)
        if found.shape != (year.shape[2],) or found.dtype.kind not in "fiu" or not (np.abs(found) <= 90).all():
            raise CourseError(f"{year.path} states latitudes that are not one of -90 to 90 degrees for each of its "
                              f"{year.shape[2]} rows: make or copy it again, or remove its attribute `latitude`")
        return found


def write_statistics(path: Path, years: list[Year]) -> None:
    """Write each channel's mean and standard deviation, and each grid point's time mean, over the given years.

    All grid points have equal weight, as in the ERA5 course data. One pass, with a few states in memory. Checks every entry:
    raises `CourseError` for missing or implausible values.
    """
    count = 0
    total = np.zeros(years[0].shape[1:])
    squares = np.zeros(years[0].shape[1])
    shift: np.ndarray | None = None              # subtract a first guess for accuracy: z50 is 200,000 ± 1,000
    for year in years:
        for block in checked_blocks(year):
            if shift is None:
                shift = block.mean((0, 2, 3))
            block -= shift[:, None, None]
            total += block.sum(0)
            squares += (block**2).sum((0, 2, 3))
            count += len(block)
    assert shift is not None
    time_means = total / count
    means = time_means.mean((1, 2))
    points = total.shape[1] * total.shape[2]
    stds = np.sqrt(np.maximum(squares / (count * points) - means**2, 1e-12))
    for name, value in {"global_means": (means + shift).reshape(1, -1, 1, 1),
                        "global_stds": stds.reshape(1, -1, 1, 1),
                        "time_means": time_means + shift[:, None, None]}.items():
        with atomic(path / "stats" / f"{name}.npy") as temporary, open(temporary, "wb") as file:
            np.save(file, value.astype("float32"))


def remake_statistics(path: Path) -> None:
    """Recompute the statistics of a data set's training years, and check every entry of the other years too."""
    years = find_years(path, "train")
    with only_maker(path):
        write_statistics(path, years)
    for file in (file for split in SPLITS if split != "train" for file in sorted((path / split).glob("*.h5"))):
        for _ in checked_blocks(inspect_year(file)):
            pass


def checked_blocks(year: Year) -> Iterator[np.ndarray]:
    """Yield a file's states in order, in blocks (at most 8, channel, lat, lon) of float64. Raises like `check_entries`."""
    plausible: PlausibleRanges | None = None
    with open_data_file(year.path) as file:
        for start in range(0, year.shape[0], 8):
            block = file["fields"][start:start + 8].astype("float64")
            plausible = plausible or PlausibleRanges.of(channel_names(year), np.nanmedian(block, (0, 2, 3)))
            check_entries(year.path, start, block, plausible)
            yield block


def check_entries(file: Path, first: int, states: np.ndarray, plausible: PlausibleRanges) -> None:
    """Raise `CourseError` for implausible or missing values in states (N, C, H, W), a file's entries from `first` on."""
    for entry, state in enumerate(states, first):
        if what := plausible.whole(state):
            raise implausible_state(file, entry, what)
        if not (finite := np.isfinite(state).all((1, 2))).all():
            name = plausible.names[int(np.argmin(finite))]
            raise CourseError(f"{file}: entry {entry} has missing values (NaN) in {name}: {MAKE_AGAIN}")


def read_statistics(path: Path, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Read means and standard deviations, each float32 (channel, 1, 1), for data of `shape` (channel, lat, lon).

    Raises `CourseError` if they are missing, damaged, or belong to other data.
    """
    found = []
    for name in ("global_means", "global_stds"):
        file = path / "stats" / f"{name}.npy"
        value = load_npy(file)
        wrong = ""
        if value.shape != (1, shape[0], 1, 1):
            wrong = f"does not match the data: its shape is {value.shape}, not {(1, shape[0], 1, 1)}"
        elif not np.isfinite(value).all() or (name == "global_stds" and (value <= 0).any()):
            wrong = f"holds values that are not finite{' and positive' if name == 'global_stds' else ''}"
        elif (np.abs(value) > HUGE).any():
            wrong = f"holds {value.flat[np.abs(value).argmax()]:g}: the data had fill values when it was made"
        if wrong:
            raise CourseError(f"{file} {wrong}; remake it with `course data stats {path}`")
        found.append(value[0].astype("float32"))
    return found[0], found[1]


def read_climatology(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read the mean over the training years at each grid point, float32 (channel, latitude, longitude).

    Raises `CourseError` if it is missing, damaged, or has another shape than `shape`.
    """
    file = path / "stats" / "time_means.npy"
    value = load_npy(file)
    value = value[0] if value.ndim == 4 else value           # the ERA5 course data has a leading 1
    if value.shape != tuple(shape):
        raise CourseError(f"{file} has shape {value.shape} but the data has {tuple(shape)}; "
                          f"remake it with `course data stats {path}`")
    return value.astype("float32")


def load_npy(file: Path, command: str = "stats", folder: Path | None = None) -> np.ndarray:
    """Read the numbers of a .npy file, never unpickling. Errors suggest `course data COMMAND FOLDER`, which makes the file."""
    make = f"`course data {command} {folder or file.parents[1]}`"
    try:
        with open(file, "rb") as opened:
            found = np.lib.format.read_array(opened, allow_pickle=False)
        if not np.issubdtype(found.dtype, np.number):
            raise ValueError(f"it holds {found.dtype}, not numbers")
        return found
    except FileNotFoundError as error:
        raise CourseError(f"{file} is missing: make it with {make}") from error
    except Exception as error:                   # a damaged header may raise anything in Python's parser
        cure = os_error_cure(error, f"remake it with {make}")
        raise CourseError(f"{file} is not a readable .npy file ({first_line(error)}): {cure}") from error
