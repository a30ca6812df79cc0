"""A variant of the layout for DALI's NumPy reader: next to each data file, a folder with one .npy file per state.

    PATH/train/1979.h5                 as in `data/weather/layout.py`; evaluation and the axis names need it
    PATH/train/1979/00000.npy ...      its entries in order, float32 (channel, latitude, longitude), not normalized
"""

import re
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

from course.data.weather import layout
from course.data.weather.layout import Year
from course.data.weather.pairs import Pairs
from course.data.weather.plausibility import PlausibleRanges
from course.resilience.folder_lock import only_maker
from course.utils.atomic_files import atomic, flush, remove
from course.utils.errors import CourseError


def folder_of(year: Year) -> Path:
    """The folder with the states of a data file."""
    return year.path.with_suffix("")


def name_of(entry: int) -> str:
    """The file name of an entry."""
    return f"{entry:05d}.npy"


def state_file(pairs: Pairs, sample: int, ahead: int) -> str:
    """The file of the state `ahead` entries after the start of pair `sample`."""
    number, entry = pairs.place(sample, ahead)
    return str(folder_of(pairs.years[number]) / name_of(entry))


def check(pairs: Pairs) -> None:
    """Raise `CourseError` for a data set that has not been converted completely."""
    for year in pairs.years:
        found = len(list(folder_of(year).glob("*.npy")))
        if found != year.shape[0]:
            raise CourseError(f"data.loader=dali_numpy wants {year.shape[0]} files in {folder_of(year)}, not {found}: "
                              f"make them with `course data numpy {year.path.parents[1]}`")
        file = folder_of(year) / name_of(0)
        state = layout.load_npy(file, "numpy", year.path.parents[1])
        if state.shape != year.shape[1:] or state.dtype != np.float32:
            raise CourseError(f"{file} holds {state.dtype} {state.shape}, not float32 {year.shape[1:]}: move {folder_of(year)} "
                              f"away and run `course data numpy {year.path.parents[1]}`")


def convert(path: Path, say: Callable[[str], None] = print) -> None:
    """Write the .npy files of every data file of a data set; an interrupted conversion resumes where it stopped.

    Raises `CourseError` if a folder holds other data, or if the disk is full.
    """
    years = [layout.inspect_year(file) for split in layout.SPLITS for file in sorted((path / split).glob("*.h5"))]
    if not years:
        raise CourseError(f"{path} holds no data set: make one first, as data/README.md says")
    for year in years:
        say(f"{folder_of(year)}: {convert_year(year)} of {year.shape[0]} states written")


def convert_year(year: Year) -> int:
    """Write the missing states of one data file; return how many were written."""
    with layout.open_data_file(year.path) as file:
        if is_made(year, file["fields"]):          # check before locking: a shared folder may be read-only
            return 0
        with only_maker(year.path.parents[1]):
            return 0 if is_made(year, file["fields"]) else write_states(folder_of(year), file["fields"], year)


def is_made(year: Year, fields: h5py.Dataset) -> bool:
    """Whether the folder with these states exists. Raises `CourseError` if it holds other states."""
    folder = folder_of(year)
    if folder.is_dir() and not (matches_data_file(folder, fields) and len(list(folder.glob("*.npy"))) == len(fields)):
        raise CourseError(f"{folder} does not hold the states of {year.path}: move it away and run again")
    return folder.is_dir()


def write_states(folder: Path, fields: h5py.Dataset, year: Year) -> int:
    """Write the missing states to a temporary folder, check each, and rename the folder; return how many were written."""
    part, written = folder.with_name(f".{folder.name}.part"), 0
    plausible = PlausibleRanges.of(layout.channel_names(year), np.nanmedian(fields[0], (1, 2)))
    if not matches_data_file(part, fields):
        remove(part)
    for entry in range(len(fields)):
        file = part / name_of(entry)
        if not file.exists():
            state = fields[entry]
            if what := plausible.whole(state):
                raise layout.implausible_state(year.path, entry, what)
            with atomic(file) as temporary, open(temporary, "wb") as out:
                np.save(out, state)
            written += 1
    part.rename(folder)
    flush(folder.parent)
    return written


def matches_data_file(folder: Path, fields: h5py.Dataset) -> bool:
    """Whether the first and the last state in a folder equal those of the data file; True for an empty folder."""
    files = sorted(folder.glob("*.npy"))
    return all(int(file.stem) < len(fields) and np.array_equal(layout.load_npy(file), fields[int(file.stem)], equal_nan=True)
               for file in files[:1] + files[-1:])


def error_message(text: str) -> str:
    """An error message that names the file on which DALI's reader failed; "" if it failed for another reason."""
    named = re.search(r"encountered:\s+(?:Assert on .* failed: )?(.*\.npy.*)", text)
    return f"DALI: {named[1]}: restore the file and run again" if named else ""
