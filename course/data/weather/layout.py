"""The layout of a weather data set on disk, the same for the made atmosphere and for ERA5.

    PATH/train/1979.h5 ...    dataset `fields`, float32, (time, channel, latitude, longitude), 6-hourly
    PATH/valid/2016.h5        the same, to watch while training
    PATH/test/2018.h5         the same, never looked at until the end
    PATH/stats/global_means.npy, global_stds.npy      float32 (1, channel, 1, 1), of the training years
    PATH/stats/time_means.npy                         float32 (channel, latitude, longitude): the climatology

Latitudes run from north to south, longitudes eastwards from 0. A file may carry the attributes
`channels` (names) and `latitude`, `longitude` (degrees); where they are absent, the twenty channels
below on an equally spaced grid are meant.
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

# Name and unit of each channel, in file order: that of the ERA5 course data (FourCastNet's twenty).
CHANNELS = {
    "u10": "m/s", "v10": "m/s", "t2m": "K", "sp": "Pa", "msl": "Pa", "t850": "K",
    "u1000": "m/s", "v1000": "m/s", "z1000": "m²/s²",
    "u850": "m/s", "v850": "m/s", "z850": "m²/s²",
    "u500": "m/s", "v500": "m/s", "z500": "m²/s²", "t500": "K",
    "z50": "m²/s²", "r500": "%", "r850": "%", "tcwv": "kg/m²",
}


@dataclass(frozen=True)
class Year:
    """One opened-and-checked data file: where it is and the shape of its `fields`."""

    path: Path
    shape: tuple[int, int, int, int]             # (time, channel, latitude, longitude)


def latitudes(rows: int) -> np.ndarray:
    """Centres of `rows` equal bands from north to south, in degrees: 90 - 90/rows ... -90 + 90/rows."""
    return 90 - (np.arange(rows) + 0.5) * 180 / rows


def longitudes(columns: int) -> np.ndarray:
    """`columns` equally spaced longitudes eastwards from 0, in degrees."""
    return np.arange(columns) * 360 / columns


def create_year(file: h5py.File, times: int, channels: Iterable[str], lat: np.ndarray, lon: np.ndarray) -> h5py.Dataset:
    """Add an empty `fields` to an open file, contiguous on disk, with the names of its axes.

    Contiguous, uncompressed: a loader can then compute where a sample lies and read just that.
    """
    names = list(channels)
    fields = file.create_dataset("fields", (times, len(names), len(lat), len(lon)), "float32")
    # of one length each: texts of any length lie in the file's heap, and HDF5 2.0 reads a damaged heap without an end, in C
    file.attrs["channels"] = np.array([name.encode() for name in names])
    file.attrs["latitude"] = np.asarray(lat, "float64")
    file.attrs["longitude"] = np.asarray(lon, "float64")
    file.attrs["hours"] = HOURS
    return fields


def find_years(path: Path, split: str, grid: tuple[int, int] | None = None) -> list[Year]:
    """The files of one split in the order of their names, each opened once and checked.

    Where there are none, the error's cure names the `grid` that the caller needs.

    Raises `CourseError` for a missing folder, a file that is truncated or not HDF5, one without
    `fields`, or files that differ in channels or grid.
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
    """The command that makes data, as a shell takes it."""
    words = [f"path={path}"] + ([f"grid=[{grid[0]},{grid[1]}]"] if grid else [])
    return f"`course data weather {shlex.join(words)}`"


def inspect_year(file: Path) -> Year:
    """Open one data file, check that its `fields` can be read, and return its shape."""
    with open_data_file(file) as year:
        if "fields" not in year or not isinstance(year["fields"], h5py.Dataset):
            raise CourseError(f"{file} has no dataset `fields` (it has {sorted(year)}): convert it as data/README.md says")
        fields = year["fields"]
        if fields.ndim != 4 or fields.shape[0] < 2 or fields.dtype != np.float32:
            raise CourseError(f"{file}: `fields` is {fields.dtype} {fields.shape}, but float32 "
                              "(time, channel, latitude, longitude) with at least 2 times is needed")
        fields[-1, -1, -1, -1]                   # the last bytes are there
        return Year(file, fields.shape)


@contextmanager
def open_data_file(file: Path) -> Iterator[h5py.File]:
    """A data file to read from in the block, which does no more than that: what it raises is a `CourseError` whose cure follows
    the reason."""
    cure = "it is truncated, or not HDF5: move it away, and make or copy it again"
    with hdf5_errors(f"{file} cannot be read", cure), open_hdf5(file) as found:
        yield found


def implausible_state(file: Path, entry: int, what: str) -> CourseError:
    """What to say of a state with numbers that no atmosphere has."""
    return CourseError(f"{file}: entry {entry} holds what no atmosphere has: {what}; it was never written there, or holds a fill "
                       f"value: {MAKE_AGAIN}")


def channel_names(year: Year) -> list[str]:
    """The file's channel names, or those of the standard twenty where it names none. `CourseError` for more or fewer than it has.

    They are texts of one length, or, in files that others made or this course made before, of any.
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
    """The file's latitudes in degrees, north to south; equal bands where it states none."""
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
    """Means and standard deviations per channel, and the time mean per grid point, of the given years.

    Every point of the grid counts alike, as in the ERA5 course data. One pass, a few samples in memory. It looks at every entry:
    raises `CourseError` for one with numbers that no atmosphere has, or missing ones.
    """
    count = 0
    total = np.zeros(years[0].shape[1:])
    squares = np.zeros(years[0].shape[1])
    shift: np.ndarray | None = None              # subtract a first guess: z50 is 200,000 ± 1,000
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
    """Write the statistics of a data set's training years anew, and look at every entry of its other years as well."""
    years = find_years(path, "train")
    with only_maker(path):
        write_statistics(path, years)
    for file in (file for split in SPLITS if split != "train" for file in sorted((path / split).glob("*.h5"))):
        for _ in checked_blocks(inspect_year(file)):
            pass


def checked_blocks(year: Year) -> Iterator[np.ndarray]:
    """Some states of a file at a time, in order, float64 (at most 8, channel, lat, lon). Raises as `check_entries`."""
    plausible: PlausibleRanges | None = None
    with open_data_file(year.path) as file:
        for start in range(0, year.shape[0], 8):
            block = file["fields"][start:start + 8].astype("float64")
            plausible = plausible or PlausibleRanges.of(channel_names(year), np.nanmedian(block, (0, 2, 3)))
            check_entries(year.path, start, block, plausible)
            yield block


def check_entries(file: Path, first: int, states: np.ndarray, plausible: PlausibleRanges) -> None:
    """Raise `CourseError` for numbers that no atmosphere has in states (N, C, H, W), a file's entries from the `first` on."""
    for entry, state in enumerate(states, first):
        if what := plausible.whole(state):
            raise implausible_state(file, entry, what)
        if not (finite := np.isfinite(state).all((1, 2))).all():
            name = plausible.names[int(np.argmin(finite))]
            raise CourseError(f"{file}: entry {entry} has missing values (NaN) in {name}: {MAKE_AGAIN}")


def read_statistics(path: Path, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations, each float32 (channel, 1, 1), for data of (channel, lat, lon) `shape`.

    Raises `CourseError` where they are missing, damaged, or belong to other data.
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
    """The mean over the training years at each grid point, float32 (channel, latitude, longitude)."""
    file = path / "stats" / "time_means.npy"
    value = load_npy(file)
    value = value[0] if value.ndim == 4 else value           # the ERA5 course data has a leading 1
    if value.shape != tuple(shape):
        raise CourseError(f"{file} has shape {value.shape} but the data has {tuple(shape)}; "
                          f"remake it with `course data stats {path}`")
    return value.astype("float32")


def load_npy(file: Path, command: str = "stats", folder: Path | None = None) -> np.ndarray:
    """The numbers of a .npy file, never unpickled; `course data COMMAND FOLDER` makes it."""
    make = f"`course data {command} {folder or file.parents[1]}`"
    try:
        with open(file, "rb") as opened:
            found = np.lib.format.read_array(opened, allow_pickle=False)
        if not np.issubdtype(found.dtype, np.number):
            raise ValueError(f"it holds {found.dtype}, not numbers")
        return found
    except FileNotFoundError as error:
        raise CourseError(f"{file} is missing: make it with {make}") from error
    except Exception as error:                   # a damaged header meets Python's own parser
        cure = os_error_cure(error, f"remake it with {make}")
        raise CourseError(f"{file} is not a readable .npy file ({first_line(error)}): {cure}") from error
