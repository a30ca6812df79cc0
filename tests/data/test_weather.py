"""The made atmosphere: exact transforms, conservation, balance, bytes that repeat, weather that is hard but not noise."""

import dataclasses
import math
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from course.data.weather import layout, simulation
from course.data.weather.atmosphere import FIELDS, GAS, MEAN_PRESSURE, OMEGA, Atmosphere, Physics, saturation
from course.data.weather.plausibility import PlausibleRanges
from course.data.weather.simulation import MOST_VAPOR, ChannelView, Weather, make, truncation_of
from course.data.weather.sphere import RADIUS, Sphere, gaussian, smooth
from course.data.weather.time_step import apply_matrices, exponentials
from course.utils.errors import CourseError

STILL = Physics(forced=False, mountains=0, smooth_hours=0, calm_hours=0)
SMALL = Weather(grid=(16, 32), train=2, valid=1, test=1, times=3, device="cpu")


@pytest.fixture(autouse=True)
def one_thread():
    """The transforms are small; on a shared machine more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sphere(truncation: int = 21) -> Sphere:
    mu, weights, columns = gaussian(truncation)
    return Sphere(truncation, mu, columns, weights)


def spectrum(truncation: int, *shape: int) -> torch.Tensor:
    """Random coefficients of real fields: triangular, real at m = 0."""
    size = truncation + 1
    value = torch.randn(*shape, size, size, dtype=torch.complex128, generator=torch.Generator().manual_seed(0)).tril()
    value[..., 0] = value[..., 0].real.to(value.dtype)
    return value


def quiet(*_: object) -> None:
    """Say nothing."""


# ---------------------------------------------------------------- the sphere

@pytest.mark.parametrize("truncation", [10, 21, 42])
def test_transforms_there_and_back(truncation):
    """Analysis undoes synthesis to rounding: quadrature is exact, and the functions are orthonormal."""
    ball, value = sphere(truncation), spectrum(truncation, 3)
    assert torch.allclose(ball.analyze(ball.synthesize(value)), value, atol=1e-12, rtol=0)


def test_the_mean_square_is_that_of_the_coefficients():
    """Parseval: m > 0 stands for itself and -m."""
    ball, value = sphere(), spectrum(21)
    twice = torch.full((22,), 2.0)
    twice[0] = 1
    assert ball.mean(ball.synthesize(value) ** 2).item() == pytest.approx((value.abs() ** 2 * twice).sum().item())


def test_wind_and_back_to_vorticity_and_divergence():
    ball = sphere()
    vorticity, divergence = spectrum(21, 2)
    vorticity[0, 0] = divergence[0, 0] = 0       # no wind has a mean curl or divergence
    u, v = ball.wind(vorticity, divergence)
    assert torch.allclose(ball.curl(u, v), vorticity, atol=1e-12)
    assert torch.allclose(ball.divergence(u, v), divergence, atol=1e-12)
    assert ball.divergence(u, v)[0, 0] == 0


def test_solid_body_rotation_has_the_vorticity_of_theory():
    """u = U cos(latitude): vorticity 2 U sin(latitude) / a, no divergence (Williamson et al. 1992, case 2)."""
    ball = sphere()
    u = (40 * (1 - ball.mu**2).sqrt()).expand(-1, ball.columns)
    vorticity = ball.synthesize(ball.curl(u, 0 * u))
    assert torch.allclose(vorticity, (80 / RADIUS * ball.mu).expand_as(vorticity), atol=1e-18)
    assert ball.divergence(u, 0 * u).abs().max() < 1e-18


def test_gradient_of_a_known_field():
    """x = a cos(latitude) cos(longitude): its eastward slope is -sin(longitude), northward -sin(lat) cos(lon)."""
    ball = sphere()
    lon = torch.arange(ball.columns, dtype=torch.float64) * 2 * math.pi / ball.columns
    east, north = ball.gradient(ball.analyze(RADIUS * (1 - ball.mu**2).sqrt() * lon.cos()))
    assert torch.allclose(east, (-lon.sin()).expand_as(east), atol=1e-12)
    assert torch.allclose(north, -ball.mu * lon.cos(), atol=1e-12)


def test_laplacian_is_the_divergence_of_the_gradient():
    ball, value = sphere(), spectrum(21)
    assert torch.allclose(ball.divergence(*ball.gradient(value)), value * ball.laplacian, atol=1e-22, rtol=1e-10)


def test_another_grid_shows_the_same_field():
    """On the grid of the files, a spherical harmonic known in closed form: sin(latitude), scaled by sqrt(3)."""
    view = Sphere(21, np.sin(np.deg2rad(layout.latitudes(9))), 14)
    value = torch.zeros(22, 22, dtype=torch.complex128)
    value[1, 0] = 1
    want = torch.as_tensor(math.sqrt(3) * np.sin(np.deg2rad(layout.latitudes(9))))[:, None]
    assert torch.allclose(view.synthesize(value), want.expand(9, 14))


def test_gaussian_grids():
    assert [len(gaussian(t)[0]) for t in (21, 42)] == [32, 64] and [gaussian(t)[2] for t in (21, 42)] == [64, 128]
    assert smooth(90) and not smooth(14)


# ---------------------------------------------------------------- the flow

def test_a_balanced_zonal_flow_stays_steady():
    """Solid-body rotation of an isothermal gas over ps = p0 exp(-(a Omega U + U²/2) sin²(latitude) / (R T)).

    An exact solution (gradient wind balance): after a day nothing has moved but by the error of one short
    exponential series cut at the truncation. A pressure not in balance changes the wind by metres per second.
    """
    def drift(balance: float) -> float:
        air, speed, warm = Atmosphere(21, STILL, torch.float64), 20.0, 250.0
        ball = air.sphere
        u = (speed * (1 - ball.mu**2).sqrt()).expand(-1, ball.columns)
        state = torch.zeros(1, 8, 22, 22, dtype=torch.complex128)
        state[:, 0:2] = ball.curl(u, 0 * u)
        state[:, 4:6, 0, 0] = warm
        fall = (RADIUS * OMEGA * speed + speed**2 / 2) * balance * ball.mu**2 / (GAS * warm)
        state[:, 6] = ball.analyze((MEAN_PRESSURE * torch.exp(-fall)).expand(-1, ball.columns).contiguous())
        later = air.advance(state, 24)
        return (air.winds_and_slopes(later)[0] - air.winds_and_slopes(state)[0]).abs().max().item()

    assert drift(1) < 1e-8                       # m/s
    assert drift(0.5) > 1


def test_the_linear_part_is_the_slope_of_the_whole():
    """The waves that the exponentials follow are those of the equations, for small motions in still air."""
    air = Atmosphere(21, STILL, torch.float64)
    rest = torch.zeros(1, 8, 22, 22, dtype=torch.complex128)
    rest[:, 4, 0, 0], rest[:, 5, 0, 0], rest[:, 6, 0, 0] = 215, 270, MEAN_PRESSURE
    push = torch.zeros_like(rest)
    scale = torch.tensor([1e-9, 1e-9, 1e-4, 1e-4, 5e-2], dtype=torch.float64)[:, None]
    push[:, 2:7, 1:, 0] = torch.randn(1, 5, 21, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * scale
    whole, linear = air.tendency(rest + push) - air.tendency(rest), apply_matrices(push, air.waves, others=0)
    for field in range(2, 7):
        assert torch.allclose(whole[:, field], linear[:, field], rtol=0, atol=2e-4 * linear[:, field].abs().max().item())


def test_without_waves_the_step_is_the_classical_runge_kutta():
    half, whole, push, first, middle, last = exponentials(torch.zeros(1, 5, 5, dtype=torch.float64), 6.0, torch.zeros(1).double())
    for matrix, number in ((half, 1), (whole, 1), (push, 3), (first, 1), (middle, 2), (last, 1)):
        assert torch.allclose(matrix[0], torch.eye(5, dtype=torch.float64) * number)


def changes(air: Atmosphere, state: torch.Tensor, days: float, hours: float) -> tuple[float, float, float]:
    """Relative change of mass; of energy, as a part of all and of what was kinetic, over some days in calls of `hours`."""
    mass, energy, kinetic = air.budget(state)
    for _ in range(round(days * 24 / hours)):
        state = air.advance(state, hours)
    change = air.budget(state)[1] - energy
    return (air.budget(state)[0] / mass - 1).abs().item(), (change / energy).item(), (change / kinetic).item()


@pytest.mark.slow
def test_unforced_mass_is_kept_to_rounding_and_energy_nearly():
    """Ten days, nothing forced or smoothed, mountains included, in steps of half an hour.

    Mass to rounding; energy to 1 in 2000, a tenth of the kinetic energy at the start (measured: 0.04), which
    meanwhile trebles. What is lost is lost where products of three fields pass the truncation.
    """
    air = Atmosphere(21, dataclasses.replace(STILL, mountains=1), torch.float64)
    mass, energy, kinetic = changes(air, air.start(0, [1979]), 10, 0.5)
    assert mass < 1e-13 and abs(energy) < 5e-4 and abs(kinetic) < 0.1


@pytest.mark.slow
def test_long_steps_lose_no_more_energy_than_short_ones():
    """With smoothing, as the weather is made, steps of 72 and of 30 minutes differ by under 2% of the kinetic energy."""
    air = Atmosphere(21, Physics(forced=False), torch.float64)
    state = air.start(0, [1979])
    assert abs(changes(air, state, 4, 6)[2] - changes(air, state, 4, 0.5)[2]) < 0.02


@pytest.mark.slow
def test_forced_energy_is_steady_and_the_fields_are_weather():
    """Thirty days after spin-up: kinetic energy keeps its level; jets aloft, easterlies in the tropics, cold poles."""
    air = Atmosphere(21)
    state = air.advance(air.start(0, [1979, 1980]), 20 * 24)
    kinetic, winds, mass = [], [], air.budget(state)[0]
    for _ in range(30):
        state = air.advance(state, 24)
        kinetic.append(air.budget(state)[2].mean().item())
        winds.append(air.winds_and_slopes(state)[0][0].mean((0, 3)))                     # (layer, lat), of u
    assert (air.budget(state)[0] / mass - 1).abs().max() < 1e-6                          # float32
    assert 0.75 < np.mean(kinetic[15:]) / np.mean(kinetic[:15]) < 1.33
    upper, lower = torch.stack(winds).mean(0)
    assert upper[4:12].max() > 20 and upper[20:28].max() > 20                            # m/s, a jet on each side
    assert lower[13:19].mean() < 0 < min(lower[4:12].max(), lower[20:28].max())
    temperature = air.sphere.synthesize(state[:, 5]).mean((0, 2))
    assert temperature[14:18].mean() - temperature[[0, 1, -2, -1]].mean() > 30


def test_saturation_grows_as_clausius_and_clapeyron_say():
    """6 to 7 per cent a kelvin."""
    ratio = (saturation(torch.tensor(281.0)) / saturation(torch.tensor(280.0))).item()
    assert 1.06 < ratio < 1.07


def test_years_do_not_depend_on_those_made_with_them():
    """Bit for bit: each year is its own rows of every product. (Not so at truncation 10, hence at least 15.)"""
    for truncation in (15, 21):
        air = Atmosphere(truncation)
        together = air.advance(air.start(5, [1979, 1980, 1981]), 12)
        alone = air.advance(air.start(5, [1980]), 12)
        assert torch.equal(together[1], alone[0])
        assert not torch.equal(together[0], together[1])


# ---------------------------------------------------------------- the files

def skill(fields: np.ndarray) -> float:
    """Anomaly correlation of persistence over one entry: fields (time, lat, lon), anomalies from each point's mean."""
    weight = np.cos(np.deg2rad(layout.latitudes(fields.shape[1])))[:, None]
    a = fields - fields.mean(0)
    return (a[1:] * a[:-1] * weight).sum() / math.sqrt((a[1:]**2 * weight).sum() * (a[:-1]**2 * weight).sum())


def u10(grid: tuple[int, int], days: int, spin_up: int) -> np.ndarray:
    air = Atmosphere(truncation_of(Weather(grid=grid)))
    view, state, out = ChannelView(air, grid), air.advance(air.start(0, [1979]), 24 * spin_up), []
    for _ in range(days * 4):
        out.append(view.channels(state)[0, 0].numpy())
        state = air.advance(state, 6)
    return np.stack(out)


@pytest.mark.slow
def test_six_hours_are_neither_trivial_nor_chaos():
    """Persistence's anomaly correlation of u10 on the default grid."""
    assert 0.85 < skill(u10((32, 64), 30, 20)) < 0.97


@pytest.mark.slow
def test_six_hours_are_neither_trivial_nor_chaos_on_a_larger_grid():
    assert 0.85 < skill(u10((90, 180), 20, 20)) < 0.97


def test_water_that_winds_pile_up_stays_plausible():
    """On 360 x 720 points a storm once held 252 kg/m², which the readers refuse as no weather."""
    air = Atmosphere(truncation_of(SMALL))
    state = air.start(0, [1979])
    state[:, FIELDS.index("water")] *= 20
    seen = ChannelView(air, (32, 64)).channels(state).numpy()
    ranges = PlausibleRanges.of(layout.CHANNELS)
    assert ((seen.min((0, 2, 3)) >= ranges.low) & (seen.max((0, 2, 3)) <= ranges.high)).all()
    assert seen[:, list(layout.CHANNELS).index("tcwv")].max() == MOST_VAPOR


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    config = dataclasses.replace(SMALL, path=str(tmp_path_factory.mktemp("weather") / "w"))
    said: list[str] = []
    make(config, said.append)
    return config, said


def read(path, split="train"):
    return [h5py.File(year.path)["fields"][:] for year in layout.find_years(path, split)]


def test_the_layout_is_written(made, tmp_path):
    config, said = made
    path = Path(config.path)
    years = {split: [year.path.name for year in layout.find_years(path, split)] for split in layout.SPLITS}
    assert years == {"train": ["1979.h5", "1980.h5"], "valid": ["1981.h5"], "test": ["1982.h5"]}
    year = layout.find_years(path, "train")[0]
    assert year.shape == (3, 20, 16, 32) and layout.channel_names(year) == list(layout.CHANNELS)
    means, _ = layout.read_statistics(path, year.shape[1:])
    climate = layout.read_climatology(path, year.shape[1:])
    assert np.isfinite(means).all() and np.allclose(climate.mean((1, 2)), means[:, 0, 0], rtol=1e-3, atol=1e-2)
    with h5py.File(year.path) as file:
        assert abs(file.attrs["mass_drift"]) < 1e-6 and abs(file.attrs["energy_drift"]) < 1e-2
    assert said[0] == f"writing 4 files to {path}, 0.000492 GB"
    assert any(line.startswith("simulating 4 years at once, 1979 to 1982, on cpu") for line in said)
    assert [line.split(":")[0].strip() for line in said if "mass of the air" in line] == ["1979", "1980", "1981", "1982"]


# Bounds of the mean and of the standard deviation, in the channel's unit: wide enough for a few days of weather.
PLAUSIBLE = {"u10": (-3, 3, 3, 9), "v10": (-3, 3, 3, 9), "t2m": (265, 290, 10, 25), "sp": (94e3, 100e3, 2e3, 9e3),
             "msl": (99e3, 103e3, 800, 4e3), "t850": (258, 282, 8, 24), "z1000": (0, 3e3, 500, 3500),
             "z500": (50e3, 57e3, 1e3, 4e3), "t500": (235, 260, 6, 20), "z50": (18e4, 21e4, 2e3, 12e3),
             "r500": (20, 80, 10, 40), "r850": (30, 90, 10, 40), "tcwv": (6, 35, 5, 35), "u500": (0, 12, 5, 15)}


@pytest.mark.parametrize("name", PLAUSIBLE)
def test_channels_are_plausible(made, name):
    fields = np.concatenate(read(Path(made[0].path)))[:, list(layout.CHANNELS).index(name)]
    low, high, least, most = PLAUSIBLE[name]
    assert low < fields.mean() < high and least < fields.std() < most
    if name[0] == "r" or name == "tcwv":
        assert fields.min() >= 0 and (name == "tcwv" or fields.max() <= 100)


@pytest.mark.slow
def test_the_same_seed_makes_the_same_bytes(made, tmp_path):
    again = dataclasses.replace(made[0], path=str(tmp_path / "again"))
    make(again, quiet)
    other = dataclasses.replace(again, path=str(tmp_path / "other"), seed=1, train=1, valid=0, test=0)
    make(other, quiet)
    first = read(Path(made[0].path))
    assert all(np.array_equal(a, b) for a, b in zip(first, read(Path(again.path)), strict=True))
    assert not np.array_equal(first[0], first[1])
    assert abs(first[0] - read(Path(other.path))[0])[:, 0].max() > 1                      # m/s of u10


def test_a_whole_data_set_is_left_alone_and_one_without_statistics_gets_them(made):
    """So that a folder that a class shares may be read-only."""
    path = Path(made[0].path)
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in path.rglob("*.*")}
    make(made[0], quiet)
    assert {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in path.rglob("*.*")} == before
    (path / "stats/time_means.npy").unlink()
    make(made[0], quiet)
    assert (path / "stats/time_means.npy").read_bytes() == before[path / "stats/time_means.npy"][1]


@pytest.mark.slow
def test_of_two_that_want_it_at_once_one_makes_it_and_the_other_waits(made, tmp_path):
    """As two notebooks do whose lessons begin with it."""
    command = ["data", "weather", f"path={tmp_path / 'w'}", "grid=[16,32]", "train=2", "times=3", "device=cpu"]
    both = [subprocess.Popen([sys.executable, "-m", "course.cli", *command], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("simulating" in text for text in said) == 1
    assert all(np.array_equal(a, b) for a, b in zip(read(Path(made[0].path)), read(tmp_path / "w"), strict=True))
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["stats", "test", "train", "valid"]


def test_a_disk_without_room_for_the_years_is_said_before_they_are_simulated(tmp_path, monkeypatch):
    left = tmp_path / "train" / ".1979.h5.tmp"       # of a run that was killed
    left.parent.mkdir()
    left.touch()
    monkeypatch.setattr(simulation, "free_bytes", lambda path: 200_000 if not left.exists() else 0)
    with pytest.raises(CourseError, match=r"0\.9 MB are needed in \S*/train, and 0\.2 MB are free there"):
        make(dataclasses.replace(SMALL, path=str(tmp_path)), quiet)
    assert not list(tmp_path.rglob("*.h5"))


def test_a_run_that_is_interrupted_leaves_no_statistics_of_other_years(made, tmp_path, monkeypatch):
    config = dataclasses.replace(made[0], path=str(shutil.copytree(made[0].path, tmp_path / "copy")))
    (Path(config.path) / "train/1980.h5").unlink()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("course.data.weather.simulation.write_years", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(config, quiet)
    assert not list(Path(config.path).glob("stats/*"))


def test_a_missing_year_is_made_again_and_the_others_are_left(made, tmp_path):
    config = dataclasses.replace(made[0], path=str(tmp_path / "w"))
    shutil.copytree(made[0].path, config.path)
    want = read(Path(config.path))
    kept, lost = (Path(config.path) / "train" / f"{year}.h5" for year in (1979, 1980))
    lost.unlink()
    before, said = kept.stat().st_mtime_ns, []
    make(config, said.append)
    assert kept.stat().st_mtime_ns == before and "3 of 4" in said[0]
    assert all(np.array_equal(a, b) for a, b in zip(want, read(Path(config.path)), strict=True))


@pytest.mark.parametrize("change", [{"seed": 1}, {"times": 4}, {"grid": (16, 34)}, {"truncation": 16}, {"train": 1}])
def test_other_settings_in_the_same_folder_are_refused(made, change):
    with pytest.raises(CourseError, match="move it away"):
        make(dataclasses.replace(made[0], **change), quiet)


@pytest.mark.parametrize(("change", "cure"), [
    ({"grid": (4, 64)}, "at least 8"), ({"grid": (32, 6)}, "at least 8"), ({"grid": (32, 63)}, "use an even one"),
    ({"train": -1}, "at least 1"), ({"train": 0}, "at least 1"), ({"valid": -1}, "0 or more"), ({"test": -2}, "0 or more"),
    ({"times": 1}, "at least 2"), ({"seed": -1}, "0 or more"), ({"truncation": 5}, "15 to 170"),
    ({"truncation": -3}, "15 to 170"), ({"device": "tpu"}, "auto, cpu or cuda"),
    pytest.param({"device": "cuda"}, "device=cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")),
])
def test_bad_settings_say_the_cure(tmp_path, change, cure):
    with pytest.raises(CourseError, match=cure) as error:
        make(dataclasses.replace(SMALL, path=str(tmp_path), **change), quiet)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_a_flow_that_breaks_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(Atmosphere, "step", lambda self, state, seconds, matrices: state * float("nan"))
    with pytest.raises(CourseError, match="another seed"):
        make(dataclasses.replace(SMALL, path=str(tmp_path / "w")), quiet)
    assert not list(tmp_path.rglob("*.h5")) and not list(tmp_path.rglob("*.tmp"))
