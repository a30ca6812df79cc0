"""Convert ERA5 in NetCDF or Zarr to the layout of `course.data.weather.layout`.

It reads the names of WeatherBench2 (`10m_u_component_of_wind`, `level`) and of the Climate Data Store (`u10`,
`valid_time`, `pressure_level`), in one file or in many, split by time, variable or level. Values are copied, not
interpolated: the grid is cropped and strided, and only the hours 00, 06, 12 and 18 UTC are kept.
"""

import glob
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import numpy as np

from course.data.hdf5_storage import first_line, open_hdf5
from course.data.weather import layout
from course.data.weather.layout import CHANNELS, HOURS, SPLITS
from course.data.weather.plausibility import PlausibleRanges
from course.resilience.folder_lock import make_once, only_maker
from course.utils.atomic_files import atomic, flush, os_error_cure
from course.utils.errors import CourseError

if TYPE_CHECKING:
    from xarray import DataArray, Dataset

# Each variable's names in WeatherBench2 and the Climate Data Store. The first six are surface variables.
NAMES = {
    "u10": ("10m_u_component_of_wind", "u10"), "v10": ("10m_v_component_of_wind", "v10"),
    "t2m": ("2m_temperature", "t2m"), "sp": ("surface_pressure", "sp"), "msl": ("mean_sea_level_pressure", "msl"),
    "tcwv": ("total_column_water_vapour", "tcwv"),
    "u": ("u_component_of_wind", "u"), "v": ("v_component_of_wind", "v"), "t": ("temperature", "t"),
    "z": ("geopotential", "z"), "r": ("relative_humidity", "r"), "q": ("specific_humidity", "q"),
}
DIMS = {"time": ("time", "valid_time"), "level": ("level", "pressure_level"),
        "latitude": ("latitude", "lat"), "longitude": ("longitude", "lon")}
INDEX = {name: i for i, name in enumerate(CHANNELS)}
STEP = np.timedelta64(HOURS, "h")
ERA5 = PlausibleRanges.of(list(CHANNELS))
DAMAGED = ("truncated file", "signature not found")             # HDF5's errors for a file whose writer was killed in the header


@dataclass(frozen=True)
class Era5:
    """The settings of the ERA5 conversion."""

    source: str = ""                        # a .nc file, a glob or folder of them, or a .zarr store
    path: str = "data/era5"                 # folder to fill
    grid: tuple[int, int] = (360, 720)      # (lat, lon) of the ERA5 course data: every second point of the 0.25° grid
    train: str = "1979-2015"                # the usual split: training years from 1979 on ...
    valid: str = "2016-2017"                # ... two validation years ...
    test: str = "2018"                      # ... and one test year; "" for none
    chunk: int = 8                          # times in memory at once: 0.9 GB with 0.25° fields, 0.4 GB with chunk=1


@dataclass(frozen=True)
class Piece:
    """One variable of one file, not yet read, and the channels that it fills."""

    file: str
    stem: str                               # a key of NAMES
    array: "DataArray"                      # time, perhaps level, latitude, longitude, in any order
    hours: np.ndarray                       # its times, datetime64[h]
    channels: list[int]                     # in the order of its levels

    def read(self, places: np.ndarray) -> np.ndarray:
        """Read the values at the given time indices: (time, channel, latitude, longitude)."""
        try:
            values = self.array.isel(time=places).transpose("time", ..., "latitude", "longitude").to_numpy()
        except Exception as error:          # each backend raises its own
            cure = os_error_cure(error, "it is damaged; copy it again")
            raise CourseError(f"{self.file} cannot be read ({first_line(error)}): {cure} and run again, the conversion goes on "
                              "where it stopped") from error
        # WeatherBench2 derives relative humidity as a fraction and states no units; the Data Store's is in percent
        units = self.array.attrs.get("units", "%" if self.array.name == "r" else "1")
        factor = 100 if self.stem == "r" and units != "%" else 1
        return factor * values.reshape(len(places), len(self.channels), *values.shape[-2:])


def convert(config: Era5, say: Callable[[str], None] = print) -> None:
    """Write the years of `config` that the source has, one file per year, and the statistics of the training years.

    Only `config.chunk` times are in memory at once. Run it again after an interruption: it resumes where it stopped.
    Raises `CourseError` for a bad request, an incomplete source, gaps in time, and missing or implausible values.
    """
    splits = parse_splits(config)
    if config.chunk < 1:
        raise CourseError(f"chunk={config.chunk} is the number of times in memory at once: set chunk=1 or more")
    with ExitStack() as stack:
        files = {name: stack.enter_context(data) for name, data in open_source(config.source).items()}
        # keep one file open at a time: each caches up to 33 MB per variable
        stack.enter_context(import_module("xarray").set_options(file_cache_maxsize=1))
        pieces = find_pieces(files, config)
        plan = plan_years(pieces, splits, config.source, say)
        for year, times in plan.items():
            write_year(Path(config.path) / splits[year] / f"{year}.h5", times, pieces, config, say)
    if all(splits[year] != "train" for year in plan):
        say(f"no training years ({config.train or 'none'}) in {config.source}, hence no statistics: convert training "
            f"years too, or copy to {config.path} the stats of the data that the model was trained on")
        return
    years = layout.find_years(Path(config.path), "train")
    say(f"statistics of {len(years)} training years")
    with only_maker(Path(config.path)):
        layout.write_statistics(Path(config.path), years)


def parse_splits(config: Era5) -> dict[int, str]:
    """The split of each requested year; a split is "1979-2015", "2018", or "" for none."""
    splits: dict[int, str] = {}
    for split in SPLITS:
        text = str(getattr(config, split)).strip()
        found = re.fullmatch(r"(\d{4})(?:-(\d{4}))?", text)
        years = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
        if text and not years:
            raise CourseError(f"{split}={text!r} is not a range of years: write {split}=2018 or {split}=1979-2015")
        for year in years:
            if year in splits:
                raise CourseError(f"{year} is in both {splits[year]} and {split}: give each year to one of them")
            splits[year] = split
    return splits


def open_source(source: str) -> dict[str, "Dataset"]:
    """Open the source's files without reading the data: name -> data set."""
    path = Path(source).expanduser()
    if "://" in source or path.suffix == ".zarr" or any((path / name).exists() for name in ("zarr.json", ".zgroup")):
        return {source: open_file(source if "://" in source else str(path), "zarr")}
    if path.is_file():
        files = [str(path)]
    else:
        found = path.glob("*.nc") if source and path.is_dir() else map(Path, glob.glob(pattern(path)))
        files = sorted(str(file) for file in found if file.is_file())
    if not files:
        raise CourseError(f"source={source!r} matches no .nc file: give a .nc file, a folder or a quoted glob of .nc "
                          "files, or a .zarr store")
    return {file: open_file(file, "netcdf4") for file in files}


def pattern(path: Path) -> str:
    """Escape the existing folders of a glob, so that their names may contain glob characters: `[raw] ERA5/*.nc`."""
    folder = next((above for above in path.parents if above.is_dir()), Path())
    return os.path.join(glob.escape(str(folder)), *path.parts[len(folder.parts):])


def open_file(name: str, engine: str) -> "Dataset":
    """Open one NetCDF file or Zarr store without reading the data; rename its dimensions to the keys of `DIMS`."""
    try:
        for package in ("xarray", "zarr" if engine == "zarr" else "netCDF4"):
            import_module(package)
    except ImportError as error:
        raise CourseError(f'{error.name}, which reads ERA5, is not installed: pip install "course[era5]"') from error
    xr = import_module("xarray")
    try:                                    # chunks=None: no dask; cache=False: each value is read once
        if engine == "zarr":                # do not mask fill values: many stores state 0, a valid wind
            store = xr.backends.ZarrStore.open_group(name, mode="r", use_zarr_fill_value_as_mask=False)
            data = xr.open_dataset(store, chunks=None, cache=False)
        else:
            data = xr.open_dataset(name, engine=engine, chunks=None, cache=False)
    except Exception as error:              # each backend raises its own
        cure = os_error_cure(error, "give .nc files or a .zarr store; convert GRIB to NetCDF and unpack archives first")
        raise CourseError(f"{name} is missing, or damaged, or not {engine} ({first_line(error)}): {cure}") from error
    for standard, names in DIMS.items():
        found = next((dim for dim in names if dim in data.dims and dim in data.coords), None)
        if found is None and standard != "level":
            raise CourseError(f"{name} has no coordinate {' or '.join(names)}, only {sorted(map(str, data.coords))}: "
                              "give files of ERA5 fields on a latitude-longitude grid")
        if found not in (None, standard):
            data = data.drop_vars(standard, errors="ignore").rename({found: standard})
    return data.squeeze([dim for dim in data.dims if dim not in DIMS and data.sizes[dim] == 1])


def find_pieces(files: dict[str, "Dataset"], config: Era5) -> list[Piece]:
    """Find the variables that fill all twenty channels. Raises `CourseError` if channels are missing or the grids differ."""
    pieces: list[Piece] = []
    for name, whole in files.items():
        data = keep_six_hourly(name, keep_grid(name, whole, config.grid))
        hours = data["time"].to_numpy().astype("datetime64[h]")
        for stem, names in NAMES.items():
            array = next((data[variable] for variable in names if variable in data.data_vars), None)
            if array is None or set(array.dims) != set(DIMS) - ({"level"} if stem in CHANNELS else set()):
                continue                    # such as the surface geopotential, also called z
            channels, array = keep_levels(stem, array)
            pieces.append(Piece(name, stem, array, hours, channels))
            first = pieces[0].array
            if any(not np.allclose(array[dim].values, first[dim].values) for dim in ("latitude", "longitude")):
                raise CourseError(f"{name} and {pieces[0].file} lie on different grids: download both on the same")
    return complete(pieces, config.source)


def keep_grid(name: str, data: "Dataset", grid: tuple[int, int]) -> "Dataset":
    """Crop and stride a file to `grid`, north to south and eastwards from 0.

    An odd number of rows includes both poles; the southern one is dropped: 721 × 1440 → 720 × 1440 → 360 × 720.
    """
    data = data.assign_coords(longitude=np.round(data["longitude"].astype("float64"), 6) % 360)   # -1e-9 is 0
    lat, lon = data["latitude"].to_numpy(), data["longitude"].to_numpy()
    rows, columns = np.argsort(-lat), np.argsort(lon)
    gaps = np.diff(lon[columns], append=lon[columns[0]] + 360)
    edge = 90 - 1.01 * 180 / len(lat)                           # a pole may already be cropped
    if not (np.diff(lat[rows]) < 0).all() or min(lat.max(), -lat.min()) < edge or np.ptp(gaps) > 1e-3:
        raise CourseError(f"{name} does not cover the globe evenly (latitude {lat.min():g} to {lat.max():g}, "
                          f"{len(lat)} rows, {len(lon)} columns): download the whole globe")
    height, width = len(lat) - len(lat) % 2, len(lon)
    strides = {(height // s, width // s): s for s in range(1, height + 1) if height % s == width % s == 0}
    if tuple(grid) not in strides:
        raise CourseError(f"grid {grid[0]}x{grid[1]} cannot be reached from the {len(lat)}x{len(lon)} of {name} by "
                          f"cropping and striding: choose one of {', '.join(f'{h}x{w}' for h, w in strides)}")
    stride = strides[grid[0], grid[1]]
    return data.isel(latitude=rows[:height:stride], longitude=columns[::stride])


def keep_six_hourly(name: str, data: "Dataset") -> "Dataset":
    """Keep a file's times at 00, 06, 12 and 18 UTC."""
    stamps = data["time"].to_numpy()
    if not np.issubdtype(stamps.dtype, np.datetime64):
        raise CourseError(f"{name}: its time is {stamps.dtype}, not dates: give it CF units ('hours since 1900-01-01')")
    hours = stamps.astype("datetime64[h]")
    return data.isel(time=np.flatnonzero((hours == stamps) & (hours.astype("int64") % HOURS == 0)))


def keep_levels(stem: str, array: "DataArray") -> tuple[list[int], "DataArray"]:
    """(channels that a variable fills, the variable at their levels). q fills r's channels and is converted later."""
    if stem in CHANNELS:
        return [INDEX[stem]], array
    names = [f"{'r' if stem == 'q' else stem}{level:g}" for level in array["level"].to_numpy()]
    places = [i for i, name in enumerate(names) if name in CHANNELS and name not in NAMES]   # u at 10 hPa is not u10
    return [INDEX[names[i]] for i in places], array.isel(level=places)


def complete(pieces: list[Piece], source: str) -> list[Piece]:
    """Select the needed pieces; q replaces r if it fills more channels. Raises `CourseError` with all missing channels."""
    filled = {stem: {c for piece in pieces if piece.stem == stem for c in piece.channels} for stem in NAMES}
    unused = "r" if len(filled["q"]) > len(filled["r"]) else "q"
    have = set().union(*(filled[stem] for stem in NAMES if stem != unused))
    lacking = []
    for name in (name for name, i in INDEX.items() if i not in have):
        stems = [name] if name in NAMES else ["r", "q"] if name[0] == "r" else [name[0]]
        level = "" if name in NAMES else f" at {name[1:]} hPa"
        lacking.append(f"{name} ({' or '.join(variable for stem in stems for variable in NAMES[stem])}{level})")
    if lacking:
        raise CourseError(f"{source} lacks {len(lacking)} of {len(CHANNELS)} channels, or has them with dimensions "
                          f"other than {', '.join(DIMS)}: {', '.join(lacking)}; give the files that have them too")
    return [piece for piece in pieces if piece.stem != unused and piece.channels]


def plan_years(pieces: list[Piece], splits: dict[int, str], source: str,
               say: Callable[[str], None]) -> dict[int, np.ndarray]:
    """The times to write for each requested year that the source has."""
    hours = []                                                  # per channel
    for name, i in INDEX.items():
        found, counts = np.unique(np.concatenate([p.hours for p in pieces if i in p.channels]), return_counts=True)
        if (counts > 1).any():
            raise CourseError(f"{source} has {name} at {found[counts > 1][0]} UTC more than once: leave out the files "
                              "that repeat others")
        hours.append(found)
    present = set((np.unique(np.concatenate(hours).astype("datetime64[Y]")).astype(int) + 1970).tolist())
    times = {year: year_times(year, hours, present) for year in splits if year in present}
    times = {year: found for year, found in times.items() if len(found) > 1}    # a pair needs two times
    if not times:
        raise CourseError(f"{source} has none of the years asked for, but {sorted(present) or 'no 6-hourly times'}: "
                          "set train, valid and test to years that it has")
    absent = {year for year in splits if year not in times}
    if absent:
        runs = zip(sorted(y for y in absent if y - 1 not in absent), sorted(y for y in absent if y + 1 not in absent),
                   strict=True)
        say(f"not in {source}, left out: {', '.join(f'{a}-{b}' if a < b else f'{a}' for a, b in runs)}")
    return times


def year_times(year: int, hours: list[np.ndarray], present: set[int]) -> np.ndarray:
    """The times of one year, the same in all channels; incomplete only where the source begins or ends.

    Raises `CourseError` for gaps.
    """
    start, end = (np.datetime64(f"{y}-01-01T00", "h") for y in (year, year + 1))
    inside = [channel[(channel >= start) & (channel < end)] for channel in hours]
    first = start if year - 1 in present else max(channel[0] for channel in inside if len(channel))
    last = end - STEP if year + 1 in present else min(channel[-1] for channel in inside if len(channel))
    times = np.arange(first, last + STEP, STEP)
    for name, channel in zip(CHANNELS, inside, strict=True):
        missing = np.setdiff1d(times, channel)
        if len(missing):
            raise CourseError(f"the source has no {name} at {missing[0]} UTC ({len(missing)} times missing in {year}): "
                              f"add the file that has it, or leave {year} out of train, valid and test")
    return times


def write_year(path: Path, times: np.ndarray, pieces: list[Piece], config: Era5, say: Callable[[str], None]) -> None:
    """Convert one year, unless its file exists; the file has a temporary name until it is complete."""
    alone = path.with_name(f".{path.name}.making")              # locks this year only
    if not make_once(alone, lambda: is_made(path, times, config), lambda: fill_year(path, times, pieces, config, say)):
        say(f"{path} is there already")


def is_made(path: Path, times: np.ndarray, config: Era5) -> bool:
    """Whether a year's file exists. Raises `CourseError` if it has another shape than the source gives."""
    shape = (len(times), len(CHANNELS), *config.grid)
    if path.exists() and layout.inspect_year(path).shape != shape:
        raise CourseError(f"{path} is there with another shape than the source gives, {shape}: move it away, or "
                          "choose another path")
    return path.exists()


def fill_year(path: Path, times: np.ndarray, pieces: list[Piece], config: Era5, say: Callable[[str], None]) -> None:
    """Write the missing times of a year to its partial file, then rename it."""
    part = path.with_name(f".{path.name}.part")
    pieces = [piece for piece in pieces if np.isin(piece.hours, times).any()]
    try:
        with open_part(part, times, pieces[0].array, config.source) as file:
            done = int(file.attrs["done"])
            say(f"{path}: {len(times)} times" + (f", {done} of them done before" if done else ""))
            for start in range(done, len(times), config.chunk):
                block = read_block(pieces, times[start:start + config.chunk], (len(CHANNELS), *config.grid))
                file["fields"][start:start + len(block)] = block
                file.flush()
                flush(part)                 # values must be on disk before they count as done
                file.attrs.modify("done", start + len(block))
                file.flush()
    except (OSError, RuntimeError) as error:                    # HDF5 raises either if the disk is full
        raise CourseError(f"cannot write {part} ({first_line(error)}): free space, or end the process that writes it, or choose "
                          "another path, and run again; it continues where it stopped") from error
    with atomic(path) as temporary:
        os.replace(part, temporary)


def open_part(part: Path, times: np.ndarray, array: "DataArray", source: str) -> h5py.File:
    """Open the partial file of an interrupted conversion of the same source, or a new one; its attribute `done` counts times."""
    lat, lon = array["latitude"].to_numpy(), array["longitude"].to_numpy()
    marks = {"source": source, "times": f"{times[0]} to {times[-1]}", "grid": f"{len(lat)}x{len(lon)}"}
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = open_hdf5(part, "r+")
        if all(file.attrs.get(key) == value for key, value in marks.items()):
            return file
        file.close()
    except OSError as error:                # start anew only if it is missing or its header is incomplete
        if not isinstance(error, FileNotFoundError) and not any(text in str(error) for text in DAMAGED):
            raise
    file = open_hdf5(part, "w")
    layout.create_year(file, len(times), CHANNELS, lat, lon)
    file.attrs.update({"done": 0, **marks})
    return file


def read_block(pieces: list[Piece], times: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Read the given times: float32 (time, *shape), shape (channel, latitude, longitude).

    Raises `CourseError` for missing or implausible values.
    """
    block = np.full((len(times), *shape), np.nan, "float32")
    for piece in pieces:
        _, here, there = np.intersect1d(times, piece.hours, return_indices=True)
        if len(here):
            block[here[:, None], piece.channels] = piece.read(there)
    for level in (500, 850):
        humidity = block[:, INDEX[f"r{level}"]]
        if any(piece.stem == "q" for piece in pieces):
            humidity[:] = relative_humidity(humidity, block[:, INDEX[f"t{level}"]], level)
        if not np.isnan(mean := humidity.mean()) and not 1.5 < mean < 150:
            raise CourseError(f"r{level} has a mean of {mean:g} % at {times[0]} UTC: correct the units of the "
                              "source: q in kg/kg, r in '%' or '1' as its attribute `units` says")
    again = "download that time again, or leave its year out of train, valid and test"
    for time, channel in np.argwhere(np.isnan(block).any((2, 3))):
        raise CourseError(f"{list(CHANNELS)[channel]} at {times[time]} UTC has missing values (NaN): {again}")
    for time, state in zip(times, block, strict=True):
        if what := ERA5.whole(state):
            raise CourseError(f"{what} at {time} UTC, which is no weather: it was never written, or is a fill value, or in other "
                              f"units than {CHANNELS[what.split()[0]]}; {again}")
    return block


def relative_humidity(q: np.ndarray, t: np.ndarray, level: int) -> np.ndarray:
    """Relative humidity over water in %, from specific humidity q in kg/kg and temperature t in K at `level` hPa.

    The vapor pressure e = p q / (ε + (1 - ε) q), ε = 0.621981, divided by the saturation pressure: Tetens' formula with
    Buck's (1981) parameters for water, IFS documentation CY41R2 (ERA5's cycle), part IV, equations 7.4 and 7.5. ERA5's own
    r is over ice below -23 °C and mixed up to 0 °C, so it is larger than this in cold air.
    """
    vapour = 100 * level * q / (0.621981 + 0.378019 * q)
    return 100 * vapour / (611.21 * np.exp(17.502 * (t - 273.16) / (t - 32.19)))
