"""`course data weather`: a simulated atmosphere with the twenty channels of the ERA5 course data, on any grid.

`atmosphere.py` computes the flow: two layers on the sphere, at a spectral truncation, evaluated on the grid of
`layout.py`. It has jets, traveling storms, tropical easterlies, continents and mountains. It has no seasons, no day
and night, no stratosphere, and rain does not heat the air. One state of the twenty channels determines the next.
All channels follow from the eight prognostic fields (1 above, 2 below, at pressures ps/4 and 3 ps/4):

    sp                     ps (prognostic)
    t850, t500             the prognostic temperatures T1 and T2, linear in the logarithm of pressure
    u850, v850             the wind of the lower layer (from vorticity and divergence)
    u500, v500             the mean wind of both layers
    u1000, v1000, u10, v10 the wind at 850 hPa, slowed and turned towards low pressure, more so over land
    t2m                    T2 extrapolated to the ground; over sea, averaged with the fixed sea temperature
    msl                    ps reduced to sea level with the extrapolated T2 and the height of the ground
    z1000, z850, z500      geopotential of these levels: hydrostatic, from ps, T1, T2 and the ground
    z50                    likewise, with T1 all the way up
    tcwv                   the column's water (prognostic)
    r850, r500             that water relative to saturation at T2, and at t500; at most 100 %
"""

import json
import math
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import Tensor

from course.data.hdf5_storage import open_hdf5
from course.data.weather import layout
from course.data.weather.atmosphere import GAS, GRAVITY, Atmosphere, land, saturation
from course.data.weather.sphere import Sphere
from course.resilience.folder_lock import make_once
from course.utils.atomic_files import atomic, free_bytes, remove, temporary_path
from course.utils.errors import CourseError

FIRST_YEAR = 1979
SPIN_UP_DAYS = 25                                # until storms have forgotten the initial state
YEARS_AT_ONCE = 16                                    # years run as one batch: bounds memory and open files
HEAD = 100_000                                   # most bytes of a file besides its states
MOST_VAPOR = 200.0                               # kg/m²: more, which winds may pile up for hours, counts as rain on its way
VERSION = 1                                      # of the physics: files of other versions are refused


@dataclass(frozen=True)
class Weather:
    """The settings of `course data weather`."""

    path: str = "data/weather-32x64"     # folder to fill
    grid: tuple[int, int] = (32, 64)     # latitudes, longitudes
    train: int = 4                       # yearly files for training
    valid: int = 1                       # yearly files for validation
    test: int = 1                        # yearly files for the final test
    times: int = 360                     # six-hourly entries per file: 90 days (ERA5 has 1460)
    seed: int = 0                        # another seed is another planet's weather
    truncation: int = 0                  # largest wave number of the flow; 0: what the grid resolves, 15 to 42
    device: str = "auto"                 # auto, cpu or cuda; the same seed gives the same bytes only on a CPU


def make(config: Weather, say: Callable[[str], None] = print) -> None:
    """Write the files and statistics of `layout.py` under `config.path`; complete files of the same settings are kept.

    Raises `CourseError` for invalid settings, or if the folder holds files made with other settings.
    """
    device = check(config)
    count = len(years_of(config))
    if not make_once(Path(config.path), lambda: is_whole(config), lambda: fill(config, device, say)):
        say(f"{count} of {count} files are there already")
    say(f"{config.path}: {count} files, one a year, of {config.times} states of {len(layout.CHANNELS)} channels "
        f"on {config.grid[0]} x {config.grid[1]} points, and their statistics")


def fill(config: Weather, device: torch.device, say: Callable[[str], None]) -> None:
    """Write the missing files and statistics."""
    plan, absent = years_of(config), missing(config)
    if len(absent) < len(plan):
        say(f"{len(plan) - len(absent)} of {len(plan)} files are there already")
    for file in statistics_of(config) if absent else []:     # outdated: an interrupted run must not leave them
        file.unlink(missing_ok=True)
    if absent:
        say(f"writing {len(absent)} files to {config.path}, {gigabytes(len(absent), config):.3g} GB")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)                     # small transforms: as fast, and the same bytes on any number of cores
    try:
        for start in range(0, len(absent), YEARS_AT_ONCE):
            write_years({year: plan[year] for year in absent[start:start + YEARS_AT_ONCE]}, config, device, say)
    finally:
        torch.set_num_threads(threads)
    if not all(file.is_file() for file in statistics_of(config)):
        layout.write_statistics(Path(config.path), layout.find_years(Path(config.path), "train"))


def gigabytes(files: int, config: Weather) -> float:
    """The size of `files` yearly files in GB."""
    return files * config.times * len(layout.CHANNELS) * math.prod(config.grid) * 4 / 1e9


def check(config: Weather) -> torch.device:
    """Validate the settings and return the device to compute on. Raises `CourseError` for invalid settings."""
    rows, columns = config.grid
    counts = {name: getattr(config, name) for name in ("train", "valid", "test")}
    if rows < 8 or columns < 8:
        raise CourseError(f"grid {rows} x {columns} is too coarse for weather: use at least 8 x 8, such as 32 x 64")
    if columns % 2:
        raise CourseError(f"grid {rows} x {columns} has an odd number of longitudes: use an even one")
    if min(counts.values()) < 0 or config.train < 1:
        raise CourseError(f"{counts} are not numbers of yearly files: use train of at least 1, valid and test of 0 or more")
    if config.times < 2:
        raise CourseError(f"times={config.times} leaves nothing to predict: use at least 2 entries per file")
    if config.seed < 0:
        raise CourseError(f"seed={config.seed} is negative: use 0 or more")
    if config.truncation and not 15 <= config.truncation <= 170:
        raise CourseError(f"truncation={config.truncation} is out of range: use 15 to 170, or 0 to let the grid decide")
    if config.device not in ("auto", "cpu", "cuda"):
        raise CourseError(f"device={config.device} is unknown: use auto, cpu or cuda")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise CourseError("device=cuda, but PyTorch sees no GPU here: use device=cpu or device=auto")
    return torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")


def years_of(config: Weather) -> dict[int, Path]:
    """The file of each year: training, then validation, then test. Raises `CourseError` if the folder has other files."""
    splits = [split for split in layout.SPLITS for _ in range(getattr(config, split))]
    plan = {FIRST_YEAR + i: Path(config.path) / split / f"{FIRST_YEAR + i}.h5" for i, split in enumerate(splits)}
    for file in sorted(Path(config.path).glob("*/*.h5")):
        if file not in plan.values():
            raise CourseError(f"{file} is not one of the {len(plan)} files asked for and would mix with them: "
                              "move it away, choose another path, or restore train, valid and test")
    return plan


def missing(config: Weather) -> list[int]:
    """The years whose files do not exist."""
    return [year for year, file in years_of(config).items() if not is_made(file, year, config)]


def is_whole(config: Weather) -> bool:
    """Whether every year and the statistics exist."""
    return not missing(config) and all(file.is_file() for file in statistics_of(config))


def statistics_of(config: Weather) -> list[Path]:
    """The files of the training years' statistics."""
    return [Path(config.path) / "stats" / f"{name}.npy" for name in ("global_means", "global_stds", "time_means")]


def settings(year: int, config: Weather) -> str:
    """Everything that determines a file's content, as JSON."""
    return json.dumps({"version": VERSION, "year": year, "seed": config.seed, "grid": list(config.grid),
                       "times": config.times, "truncation": truncation_of(config)})


def truncation_of(config: Weather) -> int:
    """The largest wave number of the flow: the configured one, or what the grid resolves, 15 to 42."""
    rows, columns = config.grid
    return config.truncation or max(15, min(2 * rows // 3, columns // 3, 42))


def is_made(file: Path, year: int, config: Weather) -> bool:
    """Whether this year's complete file exists. Raises `CourseError` if it was made with other settings."""
    if not file.exists():
        return False
    layout.inspect_year(file)
    with layout.open_data_file(file) as made:
        found = made.attrs.get("settings", "none")
    if found != settings(year, config):
        raise CourseError(f"{file} was made with other settings ({found}, not {settings(year, config)}): "
                          "move it away or choose another path")
    return True


def check_disk_space(files: Collection[Path], size: int) -> None:
    """Raise `CourseError` if the disk lacks space for files of `size` bytes each: HDF5 may crash on a full disk.

    Removes the partial files of an interrupted run first.
    """
    first, needed = next(iter(files)), len(files) * (size + HEAD)
    for file in files:
        remove(temporary_path(file))
    if (free := free_bytes(first)) < needed:
        raise CourseError(f"{needed / 1e6:.1f} MB are needed in {first.parent}, and {free / 1e6:.1f} MB are free there: free "
                          "some space, or choose another path, or fewer times")


def write_years(files: dict[int, Path], config: Weather, device: torch.device, say: Callable[[str], None]) -> None:
    """Simulate some years as one batch and write each entry as it is computed; the files appear when all are complete."""
    check_disk_space(files.values(), 4 * config.times * len(layout.CHANNELS) * math.prod(config.grid))
    years = list(files)
    air = Atmosphere(truncation_of(config), device=device)
    view = ChannelView(air, config.grid)
    named = f"the year {years[0]}" if len(years) == 1 else f"{len(years)} years at once, {years[0]} to {years[-1]},"
    say(f"simulating {named} on {device}, with waves down to 1/{air.sphere.truncation} of the globe's circumference; "
        f"the first {SPIN_UP_DAYS} days, until there are storms, are not written")
    state = air.start(config.seed, years)
    for _ in range(SPIN_UP_DAYS):
        state = air.advance(state, 24)
    latitudes, longitudes = layout.latitudes(config.grid[0]), layout.longitudes(config.grid[1])
    budgets = []
    with ExitStack() as stack:
        made = [stack.enter_context(open_hdf5(stack.enter_context(atomic(file)), "w")) for file in files.values()]
        fields = [layout.create_year(file, config.times, layout.CHANNELS, latitudes, longitudes) for file in made]
        for time in range(config.times):
            if time:
                state = air.advance(state, layout.HOURS)
            entries = [entry for part in state.split(view.at_once) for entry in view.channels(part).cpu().numpy()]
            for field, entry in zip(fields, entries, strict=True):
                field[time] = entry
            budgets.append(torch.stack(air.budget(state)).cpu())                         # (3, years)
            if (time + 1) % math.ceil(config.times / 4) == 0:
                say(f"  {time + 1} of {config.times} states, {(time + 1) * layout.HOURS / 24:.0f} days")
        say("a check: how far what should stay as it is has moved (mass: end against start; energy: second half against first)")
        for i, file in enumerate(made):
            file.attrs["settings"] = settings(years[i], config)
            record_drift(file, torch.stack(budgets)[:, :, i].numpy(), say, years[i])


def record_drift(file: h5py.File, budget: np.ndarray, say: Callable[[str], None], year: int) -> None:
    """Store and report how mass, energy and kinetic energy (time, 3) drifted over a year."""
    mass, energy, kinetic = budget.T
    if not np.isfinite(budget).all():
        raise CourseError(f"the winds of {year} grew too strong for the time step: use another seed or truncation")
    half = len(mass) // 2
    drift = {"mass_drift": mass[-1] / mass[0] - 1,
             "energy_drift": energy[half:].mean() / energy[:half].mean() - 1,
             "kinetic_energy_drift": kinetic[half:].mean() / kinetic[:half].mean() - 1}
    for name, value in drift.items():
        file.attrs[name] = value
    file.attrs["kinetic_energy"] = kinetic.mean()                                        # J/m²
    say(f"  {year}: mass of the air {drift['mass_drift']:+.6%}, energy {drift['energy_drift']:+.2%}, "
        f"energy of the winds, which come and go, {drift['kinetic_energy_drift']:+.0%}")


class ChannelView:
    """Computes the twenty channels of a state on the grid of the files."""

    def __init__(self, air: Atmosphere, grid: tuple[int, int]):
        like = air.ground.real
        lat = torch.as_tensor(layout.latitudes(grid[0])[:, None]).to(like)
        lon = torch.as_tensor(layout.longitudes(grid[1])).to(like)
        mu = np.sin(np.deg2rad(layout.latitudes(grid[0])))
        self.sphere = Sphere(air.sphere.truncation, mu, grid[1], dtype=like.dtype, device=like.device)
        self.at_once = max(1, 200_000 // (grid[0] * grid[1]))                            # years: bounds memory
        self.ground = self.sphere.synthesize(air.ground)                                 # (lat, lon), m²/s²
        self.land = land(lat, lon)                                                       # (lat, lon)
        self.sea = 271 + 30 * torch.deg2rad(lat).cos() ** 3                              # (lat, 1), K
        self.turn = torch.tanh(5 * torch.deg2rad(lat).sin()) * (0.2 + 0.25 * self.land)  # turn of the 10 m wind, radians

    def channels(self, state: Tensor) -> Tensor:
        """A state (years, 8, l, m) to float32 (years, 20, lat, lon), in the order and units of `layout.CHANNELS`."""
        winds = self.sphere.wind(state[:, 0:2], state[:, 2:4])                           # (2, years, 2, lat, lon)
        t1, t2, ps, water = self.sphere.synthesize(state[:, 4:]).unbind(1)               # (years, lat, lon)
        lapse = (t2 - t1) / math.log(3)                                                  # K per unit of ln(pressure)
        heights = Atmosphere.geopotential(torch.stack([t1, t2], 1), self.ground)         # (years, 2, lat, lon)

        def above(pressure: float) -> Tensor:                                            # ln(lower layer's pressure / pressure)
            return torch.log(0.75 * ps / (100 * pressure))

        def temperature(pressure: float) -> Tensor:
            return t2 - lapse * above(pressure)

        def height(pressure: float) -> Tensor:
            x = above(pressure)
            return heights[:, 1] + GAS * (t2 * x - lapse * x**2 / 2)

        low = winds[:, :, 1]                                                              # (2, years, lat, lon)
        surface = t2 - lapse * math.log(0.75)                                            # air at the ground
        out = {"sp": ps, "t850": temperature(850), "t500": temperature(500), "tcwv": water.clamp(0, MOST_VAPOR),
               "z1000": height(1000), "z850": height(850), "z500": height(500),
               "z50": heights[:, 0] + GAS * t1 * torch.log(0.25 * ps / 5000),
               "t2m": surface + 0.5 * (1 - self.land) * (self.sea - surface),
               "msl": ps * torch.exp(self.ground / (GAS * (surface + 0.00325 * self.ground / GRAVITY)))}
        out["u850"], out["v850"] = low
        out["u500"], out["v500"] = winds.mean(2)
        out["u1000"], out["v1000"] = rotate_wind(low * (0.9 - 0.15 * self.land), self.turn / 2)
        out["u10"], out["v10"] = rotate_wind(low * (0.75 - 0.25 * self.land), self.turn)
        out["r850"] = (100 * water / saturation(t2)).clamp(0, 100)
        out["r500"] = (75 * water / saturation(out["t500"] + 18)).clamp(0, 100)
        return torch.stack([out[name] for name in layout.CHANNELS], 1).float()


def rotate_wind(wind: Tensor, angle: Tensor) -> Tensor:
    """Rotate wind (2, ...) to the left by `angle` in radians."""
    u, v = wind
    return torch.stack([u * angle.cos() - v * angle.sin(), u * angle.sin() + v * angle.cos()])
