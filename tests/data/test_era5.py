"""course.data.weather.era5 on small files whose every value is a known function of variable, level, time and place."""

import re
import sys
from dataclasses import replace

import h5py
import numpy as np
import pytest

from course.data.weather import era5
from course.data.weather.era5 import NAMES, Era5, convert, relative_humidity
from course.data.weather.layout import CHANNELS, find_years, grid_latitudes, read_statistics
from course.utils.errors import CourseError

xr = pytest.importorskip("xarray")
pytest.importorskip("netCDF4")

LAT, LON = np.linspace(90, -90, 9), np.arange(16) * 22.5        # 9x16 -> 8x16 -> 4x8
LEVELS = [10, 50, 500, 850, 925, 1000]                          # u at 10 hPa must not be taken for u10
SURFACE = ["u10", "v10", "t2m", "sp", "msl", "tcwv"]
SMALL = Era5(grid=(4, 8), train="2015", valid="2016", test="", chunk=3)


# of each variable, and of z at each level, a value that nature allows, and how far apart neighbors are
BASE = {"u10": (-60, 1), "v10": (-40, 1), "t2m": (280, 1), "sp": (90_000, 1024), "msl": (98_000, 1024), "tcwv": (30, 1),
        "u": (-20, 1), "v": (10, 1), "t": (240, 1)}
HEIGHT = {10: (300_000, 1024), 50: (200_000, 1024), 500: (55_000, 256), 850: (14_000, 256), 925: (7_000, 256), 1000: (1_000, 256)}


def truth(stem, level, hours, lat, lon):
    """Exact in float32 (at most 24 bits), other wherever any argument is, and within what nature allows."""
    n = (hours - np.datetime64("2015-01-01", "h")).astype(int)[:, None, None] % 512
    place = 16 * ((90 - lat) / 22.5)[:, None] + (lon % 360 / 22.5)[None, :]
    rank = LEVELS.index(level) if level else 7
    if stem in "rq":
        return ((1 + rank + place / 256 + n / 4096) * {"r": 8, "q": 2**-14}[stem]).astype("float32")
    base, step = HEIGHT[level] if stem == "z" else BASE[stem]
    return (base + (rank + place / 256 + n / 4096) * step).astype("float32")


def expected(times, derived=False):
    """What `fields` must hold at the given times, of the grid 4x8."""
    lat, lon = LAT[:8:2], LON[::2]
    fields = []
    for name in CHANNELS:
        stem, level = (name, None) if name in SURFACE else (name[0], int(name[1:]))
        if stem == "r" and derived:
            q, t = (truth(part, level, times, lat, lon) for part in "qt")
            fields.append(relative_humidity(q, t, level))
        else:
            fields.append(truth(stem, level, times, lat, lon))
    return np.stack(fields, 1)


def hours(start, end, step=6):
    return np.arange(np.datetime64(start, "h"), np.datetime64(end, "h"), np.timedelta64(step, "h"))


def cds(stems, times, lat=LAT, lon=LON, time="valid_time", level="pressure_level"):
    """A file as the Climate Data Store makes it: short names, north to south."""
    data = {}
    for stem in stems:
        if stem in SURFACE:
            data[stem] = ((time, "latitude", "longitude"), truth(stem, None, times, lat, lon))
        else:
            values = np.stack([truth(stem, p, times, lat, lon) for p in LEVELS], 1)
            data[stem] = ((time, level, "latitude", "longitude"), values)
    coords = {time: times.astype("datetime64[ns]"), level: np.array(LEVELS, float), "latitude": lat, "longitude": lon}
    used = {dim for dims, _ in data.values() for dim in dims}
    return xr.Dataset(data, {dim: values for dim, values in coords.items() if dim in used})


def weatherbench(stems, times):
    """A store as WeatherBench2 has it: long names, south to north, longitude before latitude."""
    data = cds(stems, times, LAT[::-1], LON, "time", "level")
    return data.rename({stem: NAMES[stem][0] for stem in stems}).transpose("time", ..., "longitude", "latitude")


def write_cds(folder, times, stems=tuple(NAMES)[:-1], **options):
    """Two files, single levels and pressure levels apart; all variables but q."""
    folder.mkdir(exist_ok=True)
    cds([s for s in stems if s in SURFACE], times, **options).to_netcdf(folder / "single.nc", engine="netcdf4")
    cds([s for s in stems if s not in SURFACE], times, **options).to_netcdf(folder / "pressure.nc", engine="netcdf4")
    return folder


def fields(path, split, year):
    with h5py.File(path / split / f"{year}.h5") as file:
        return file["fields"][:]


def check(path, derived=False, exact=True):
    """2015's last and 2016's first two days, converted as `SMALL` says."""
    for split, year, times in [("train", 2015, hours("2015-12-30", "2016-01-01")),
                               ("valid", 2016, hours("2016-01-01", "2016-01-03"))]:
        got, want = fields(path, split, year), expected(times, derived)
        assert got.dtype == np.float32 and got.shape == (8, 20, 4, 8)
        np.testing.assert_allclose(got, want, rtol=0 if exact else 1e-6)
    year = find_years(path, "train")[0]
    np.testing.assert_array_equal(grid_latitudes(year), [90, 45, 0, -45])
    with h5py.File(year.path) as file:
        np.testing.assert_array_equal(file.attrs["longitude"], LON[::2])
        assert [name.decode() for name in file.attrs["channels"]] == list(CHANNELS)
    means, stds = read_statistics(path, year.shape[1:])
    want = fields(path, "train", 2015).astype("float64")
    np.testing.assert_allclose(means.ravel(), want.mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(stds.ravel(), want.std((0, 2, 3)), rtol=1e-5)


TIMES = hours("2015-12-30", "2016-01-03")


# ---- the two ways of naming ----

@pytest.mark.parametrize("options", [
    {}, {"time": "time", "level": "level"}, {"lon": LON - 180}, {"lat": LAT[::-1]}, {"lon": np.roll(LON, 5)},
])
def test_cds_two_files(tmp_path, options):
    source = write_cds(tmp_path / "in", TIMES, **options)
    convert(replace(SMALL, source=str(source), path=str(tmp_path / "out")))
    check(tmp_path / "out")


def test_cds_by_month_hourly_and_packed_with_size_one_dimension(tmp_path):
    """Hourly files cut at the year and in mid-day, times descending in one, `z` on the surface too, and expver."""
    stems = tuple(NAMES)[:-1]
    for i, (start, end) in enumerate([("2015-12-30", "2015-12-31T15"), ("2015-12-31T15", "2016-01-03")]):
        times = hours(start, end, 1)
        single = cds(SURFACE, times, time="time").assign(z=cds(["u10"], times, time="time")["u10"] * 0)
        single.expand_dims(expver=[1]).to_netcdf(tmp_path / f"single{i}.nc")
        cds([s for s in stems if s not in SURFACE], times[::-1]).to_netcdf(tmp_path / f"pressure{i}.nc")
    convert(replace(SMALL, source=str(tmp_path / "*.nc"), path=str(tmp_path / "out")))
    check(tmp_path / "out")


def test_variables_and_levels_in_files_of_their_own(tmp_path):
    for stem in tuple(NAMES)[:-1]:
        data = cds([stem], TIMES)
        parts = [data] if stem in SURFACE else [data.isel(pressure_level=levels) for levels in ([3, 0, 5], [2, 1])]
        for i, part in enumerate(parts):
            part.to_netcdf(tmp_path / f"{stem}{i}.nc")
    convert(replace(SMALL, source=str(tmp_path), path=str(tmp_path / "out")))
    check(tmp_path / "out")


@pytest.mark.filterwarnings("ignore::UserWarning")              # zarr 3: consolidated metadata is not specified yet
@pytest.mark.parametrize("version", [2, 3])
def test_weatherbench_with_only_specific_humidity(tmp_path, version):
    pytest.importorskip("zarr")
    stems = [stem for stem in NAMES if stem != "r"]
    data = weatherbench(stems, TIMES)
    data.to_zarr(tmp_path / "wb.zarr", zarr_format=version, encoding={"temperature": {"chunks": (1, 6, 16, 9)}})
    convert(replace(SMALL, source=str(tmp_path / "wb.zarr"), path=str(tmp_path / "out")))
    check(tmp_path / "out", derived=True)


@pytest.mark.parametrize(("units", "exact"), [(None, False), ("%", True)])
def test_weatherbench_relative_humidity_is_a_fraction_unless_stated(tmp_path, units, exact):
    data = weatherbench(list(NAMES), TIMES)
    if units:
        data["relative_humidity"].attrs["units"] = units
    else:
        data["relative_humidity"] = data["relative_humidity"] / 100
    data.to_netcdf(tmp_path / "wb.nc")
    convert(replace(SMALL, source=str(tmp_path / "wb.nc"), path=str(tmp_path / "out")))
    check(tmp_path / "out", exact=exact)


def test_remote_store(tmp_path):
    """A URL goes to fsspec; its memory file system stands for a bucket."""
    pytest.importorskip("zarr")
    pytest.importorskip("fsspec")
    weatherbench([stem for stem in NAMES if stem != "r"], TIMES).to_zarr("memory://wb.zarr", zarr_format=2)
    convert(replace(SMALL, source="memory://wb.zarr", path=str(tmp_path / "out")))
    check(tmp_path / "out", derived=True)


@pytest.mark.parametrize(("grid", "stride"), [((8, 16), 1), ((4, 8), 2), ((2, 4), 4)])
def test_grids(tmp_path, grid, stride):
    source = write_cds(tmp_path / "in", TIMES)
    convert(replace(SMALL, source=str(source), path=str(tmp_path / "out"), grid=grid))
    want = truth("msl", None, hours("2015-12-30", "2016-01-01"), LAT[:8:stride], LON[::stride])
    np.testing.assert_array_equal(fields(tmp_path / "out", "train", 2015)[:, list(CHANNELS).index("msl")], want)


def test_an_even_number_of_rows_is_not_cropped(tmp_path):
    lat = 90 - (np.arange(8) + 0.5) * 22.5
    source = write_cds(tmp_path / "in", TIMES, lat=lat)
    convert(replace(SMALL, source=str(source), path=str(tmp_path / "out"), grid=(8, 16)))
    np.testing.assert_array_equal(grid_latitudes(find_years(tmp_path / "out", "train")[0]), lat)


def test_relative_humidity():
    """Against the saturation pressures over water of the Smithsonian tables (Goff and Gratch), in hPa."""
    for celsius, hpa in [(0, 6.11), (20, 23.37), (-20, 1.254)]:
        q = 0.622 * hpa / (850 - 0.378 * hpa)
        assert relative_humidity(np.array(q), np.array(273.15 + celsius), 850) == pytest.approx(100, rel=5e-3)
        assert relative_humidity(np.array(q / 2), np.array(273.15 + celsius), 850) == pytest.approx(50, rel=1e-2)


# ---- years ----

def test_absent_years_are_named_and_without_training_years_there_are_no_statistics(tmp_path):
    said = []
    source = write_cds(tmp_path / "in", TIMES)
    convert(replace(SMALL, source=str(source), path=str(tmp_path / "out"), train="2010-2011", valid="2014-2015"),
            said.append)
    assert any("left out: 2010-2011, 2014" in line for line in said) and any("no statistics" in line for line in said)
    assert fields(tmp_path / "out", "valid", 2015).shape[0] == 8 and not (tmp_path / "out" / "stats").exists()


def test_only_the_times_that_all_files_share(tmp_path):
    source = write_cds(tmp_path / "in", TIMES)
    cds(SURFACE, TIMES[2:-3]).to_netcdf(source / "single.nc", engine="netcdf4")
    convert(replace(SMALL, source=str(source), path=str(tmp_path / "out")))
    np.testing.assert_array_equal(fields(tmp_path / "out", "train", 2015), expected(TIMES[2:8]))
    np.testing.assert_array_equal(fields(tmp_path / "out", "valid", 2016), expected(TIMES[8:-3]))


def test_a_whole_year_and_a_lone_time_after_it(tmp_path):
    times = hours("2015-01-01", "2016-01-01T06")
    source = write_cds(tmp_path / "in", times)
    convert(replace(SMALL, source=str(source), path=str(tmp_path / "out"), chunk=500))
    np.testing.assert_array_equal(fields(tmp_path / "out", "train", 2015), expected(times[:-1]))
    assert not (tmp_path / "out" / "valid").exists()


# ---- interruption and memory ----

def interrupted(monkeypatch, config, after):
    """Convert until `after` blocks have been read, then fail as Ctrl-C does."""
    read, calls = era5.read_block, []

    def fail(*arguments):
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return read(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(era5, "read_block", fail)
        with pytest.raises(KeyboardInterrupt):
            convert(config)


def count_reads(monkeypatch):
    read, times = era5.read_block, []
    monkeypatch.setattr(era5, "read_block", lambda p, t, s: times.extend(t) or read(p, t, s))
    return times


@pytest.mark.parametrize("after", [0, 2, 4])                    # 8 times a year, 3 at once: 3 blocks each
def test_resume(tmp_path, monkeypatch, after):
    config = replace(SMALL, source=str(write_cds(tmp_path / "in", TIMES)), path=str(tmp_path / "out"))
    interrupted(monkeypatch, config, after)
    out = tmp_path / "out"
    assert (out / "train" / "2015.h5").exists() == (after > 3) and not (out / "valid" / "2016.h5").exists()
    times = count_reads(monkeypatch)
    convert(config)
    assert times == list(TIMES[{0: 0, 2: 6, 4: 11}[after]:])
    check(out)
    assert not list(out.rglob(".*"))
    times.clear()
    convert(config)
    assert not times


@pytest.mark.parametrize("damage", ["garbage", "source", "grid", "empty"])
def test_a_partial_file_of_something_else_is_begun_anew(tmp_path, monkeypatch, damage):
    config = replace(SMALL, source=str(write_cds(tmp_path / "in", TIMES)), path=str(tmp_path / "out"))
    interrupted(monkeypatch, config, 2)
    part = tmp_path / "out" / "train" / ".2015.h5.part"
    assert part.exists()
    if damage in ("garbage", "empty"):
        part.write_bytes(b"not HDF5" * (damage == "garbage"))
    elif damage == "grid":
        interrupted(monkeypatch, replace(config, grid=(2, 4)), 2)
    else:
        with h5py.File(part, "r+") as file:
            file.attrs["source"] = "elsewhere"
            file["fields"][:] = -1
    convert(config)
    check(tmp_path / "out")


def test_a_year_of_another_shape_is_not_overwritten(tmp_path):
    config = replace(SMALL, source=str(write_cds(tmp_path / "in", TIMES)), path=str(tmp_path / "out"))
    convert(config)
    with pytest.raises(CourseError, match=r"2015.h5 is there with another shape.*move it away"):
        convert(replace(config, grid=(2, 4)))
    check(tmp_path / "out")


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_memory_is_bounded(tmp_path, monkeypatch, chunk):
    """No variable is asked of NetCDF for more than `chunk` times, nor for more than the grid."""
    from xarray.backends.file_manager import FILE_CACHE
    from xarray.backends.netCDF4_ import NetCDF4ArrayWrapper as Wrapper
    config = replace(SMALL, source=str(write_cds(tmp_path / "in", TIMES)), path=str(tmp_path / "out"), chunk=chunk)
    original, shapes = Wrapper._getitem, []

    def spy(self, key):
        values = original(self, key)
        assert not list((tmp_path / "out").rglob("*.part")) or len(FILE_CACHE) == 1      # HDF5 caches 33 MB a variable
        shapes.append(values.shape)
        return values

    monkeypatch.setattr(Wrapper, "_getitem", spy)
    convert(config)
    shapes = [shape for shape in shapes if len(shape) > 1]
    assert max(shape[0] for shape in shapes) == min(chunk, 8) and all(shape[-2:] == (4, 8) for shape in shapes)
    assert sum(np.prod(shape) for shape in shapes) == 16 * 20 * 4 * 8        # each value once


# ---- bad input ----

def test_missing_variables_and_levels_are_listed_together(tmp_path):
    stems = [stem for stem in NAMES if stem not in ("tcwv", "r", "q")]
    source = write_cds(tmp_path / "in", TIMES, stems)
    with xr.open_dataset(source / "pressure.nc") as data:
        data = data.load()
    data.sel(pressure_level=[10, 500, 850, 1000]).to_netcdf(source / "pressure.nc")
    with pytest.raises(CourseError) as error:
        convert(replace(SMALL, source=str(source), path=str(tmp_path / "out")))
    for part in ("lacks 4 of 20", "z50 (geopotential or z at 50 hPa)", "tcwv (total_column_water_vapour or tcwv)",
                 "r500 (relative_humidity or r or specific_humidity or q at 500 hPa)", "r850"):
        assert part in str(error.value)


def overlap(folder):
    cds(SURFACE, TIMES[3:5]).to_netcdf(folder / "again.nc")


def gap(folder):
    cds(SURFACE, np.delete(TIMES, 5)).to_netcdf(folder / "single.nc", engine="netcdf4")


def gap_after_new_year(folder):
    write_cds(folder, np.delete(TIMES, [8, 9]))


def gap_before_new_year(folder):
    write_cds(folder, np.delete(TIMES, [6, 7]))


def lacking_year(folder):
    cds(SURFACE, TIMES[:8]).to_netcdf(folder / "single.nc", engine="netcdf4")


def nan(folder):
    data = cds([s for s in tuple(NAMES)[:-1] if s not in SURFACE], TIMES)
    data["z"][{"valid_time": 9, "pressure_level": LEVELS.index(500), "latitude": 2, "longitude": 4}] = np.nan
    data.to_netcdf(folder / "pressure.nc", engine="netcdf4")


def northern(folder):
    write_cds(folder, TIMES, lat=LAT[:5])


def western(folder):
    write_cds(folder, TIMES, lon=LON[:8])


def other_grid(folder):
    cds(SURFACE, TIMES, lat=90 - (np.arange(8) + 0.5) * 22.5).to_netcdf(folder / "single.nc", engine="netcdf4")


def two_expver(folder):
    data = cds(SURFACE, TIMES)
    both = xr.concat([data, data], xr.DataArray([1, 5], dims="expver", name="expver"))
    both.to_netcdf(folder / "single.nc", engine="netcdf4")


def unnamed_units(folder):
    data = cds([s for s in tuple(NAMES)[:-1] if s not in SURFACE], TIMES)
    data["r"] = data["r"] / 100
    data.to_netcdf(folder / "pressure.nc", engine="netcdf4")


def no_dates(folder):
    data = cds(SURFACE, TIMES).assign_coords(valid_time=np.arange(len(TIMES)))
    data.to_netcdf(folder / "single.nc", engine="netcdf4")


def no_latitude(folder):
    xr.Dataset({"x": ("y", np.zeros(3))}).to_netcdf(folder / "other.nc")


def not_netcdf(folder):
    (folder / "single.nc").write_text("GRIB")


def truncated(folder):
    file = folder / "pressure.nc"
    file.write_bytes(file.read_bytes()[:-20000])


def damaged_values(folder):
    data = cds([s for s in tuple(NAMES)[:-1] if s not in SURFACE], TIMES)
    encoding = {"u": {"zlib": True, "chunksizes": (1, 6, 9, 16)}}
    data.to_netcdf(folder / "pressure.nc", engine="netcdf4", encoding=encoding)
    with h5py.File(folder / "pressure.nc") as file:
        chunks = [file["u"].id.get_chunk_info(i) for i in range(file["u"].id.get_num_chunks())]
    with open(folder / "pressure.nc", "r+b") as raw:
        for chunk in chunks:
            raw.seek(chunk.byte_offset)
            raw.write(b"\xff" * chunk.size)


@pytest.mark.parametrize(("spoil", "change", "sentence"), [
    (None, {"source": ""}, "source='' matches no .nc file"),
    (None, {"source": "{tmp}/nowhere"}, "nowhere' matches no .nc file: give a .nc file, a folder"),
    (None, {"source": "{tmp}/nowhere.zarr"}, "nowhere.zarr is missing, or damaged, or not zarr"),
    (None, {"source": "{tmp}/in/x*.nc"}, "matches no .nc file"),
    (None, {"source": "{tmp}"}, "matches no .nc file"),
    (None, {"grid": (3, 8)}, "grid 3x8 cannot be reached from the 9x16.*choose one of 8x16, 4x8, 2x4, 1x2"),
    (None, {"grid": (9, 16)}, "grid 9x16 cannot be reached"),
    (None, {"grid": (0, 0)}, "grid 0x0 cannot be reached"),
    (None, {"chunk": 0}, "chunk=0.*set chunk=1"),
    (None, {"train": "2015-2014"}, "train='2015-2014' is not a range of years: write train=2018"),
    (None, {"valid": "lately"}, "valid='lately' is not a range of years"),
    (None, {"test": "2015-2017"}, "2015 is in both train and test"),
    (None, {"train": "1999", "valid": ""}, r"none of the years asked for, but \[2015, 2016\]: set train"),
    (overlap, {}, "u10 at 2015-12-30T18 UTC more than once"),
    (gap, {}, r"no u10 at 2015-12-31T06 UTC \(1 times missing in 2015\): add the file"),
    (gap_after_new_year, {}, r"no u10 at 2016-01-01T00 UTC \(2 times missing"),
    (gap_before_new_year, {}, r"no u10 at 2015-12-31T12 UTC \(2 times missing"),
    (lacking_year, {}, "no u10 at 2016-01-01T00 UTC"),
    (nan, {}, "z500 at 2016-01-01T06 UTC has missing values"),
    (northern, {}, "does not cover the globe evenly"),
    (western, {}, "does not cover the globe evenly"),
    (other_grid, {}, "lie on different grids"),
    (two_expver, {}, "lacks 6 of 20 channels, or has them with dimensions other than.*: u10 "),
    (unnamed_units, {}, r"r500 has a mean of 0\.257.* units"),
    (no_dates, {}, "time is int64, not dates"),
    (no_latitude, {}, "other.nc has no coordinate time or valid_time"),
    (not_netcdf, {}, "single.nc is missing, or damaged, or not netcdf4"),
    (truncated, {}, "pressure.nc (is missing, or damaged|cannot be read)"),
    (damaged_values, {}, "pressure.nc cannot be read .*it is damaged"),
])
def test_bad_input(tmp_path, spoil, change, sentence):
    source = write_cds(tmp_path / "in", TIMES)
    if spoil:
        spoil(source)
    change = {key: value.format(tmp=tmp_path) if key == "source" else value for key, value in change.items()}
    with pytest.raises(CourseError, match=f"(?s){sentence}"):
        convert(replace(SMALL, **{"source": str(source), "path": str(tmp_path / "out"), **change}), lambda line: None)
    assert not list((tmp_path / "out").rglob("2016.h5"))


def test_a_conversion_that_another_process_writes_is_left_alone(tmp_path, monkeypatch):
    config = replace(SMALL, source=str(write_cds(tmp_path / "in", TIMES)), path=str(tmp_path / "out"))
    original = h5py.File

    def locked(name, mode="r", **options):
        if mode == "r+":
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return original(name, mode, **options)

    monkeypatch.setattr(era5.h5py, "File", locked)
    with pytest.raises(CourseError, match=r"Resource temporarily unavailable.*end the process that writes it"):
        convert(config)


def test_a_full_disk(tmp_path, monkeypatch):
    config = replace(SMALL, source=str(write_cds(tmp_path / "in", TIMES)), path=str(tmp_path / "out"))

    def full(path):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(era5, "flush", full)
        with pytest.raises(CourseError, match=r"cannot write .*2015.h5.part.*No space left.*free space"):
            convert(config)
    convert(config)
    check(tmp_path / "out")


@pytest.mark.parametrize("package", ["xarray", "netCDF4"])
def test_a_package_that_is_not_installed(tmp_path, monkeypatch, package):
    source = write_cds(tmp_path / "in", TIMES)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CourseError, match=rf'{package}.*is not installed: pip install "course\[era5\]"'):
        convert(replace(SMALL, source=str(source), path=str(tmp_path / "out")))


# ---- what was never written ----

DTYPES = {"f4": {}, "f8": {}, "i2": {"scale_factor": 0.5, "add_offset": 90_000.0}, "i4": {"scale_factor": 0.01}}


@pytest.mark.parametrize("attribute", [None, "_FillValue", "missing_value"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_netcdf_that_a_writer_left_unfinished_is_refused(tmp_path, dtype, attribute):
    """NetCDF reads its default fill value for what was never written, or the variable's own."""
    import netCDF4

    source = write_cds(tmp_path / "in", TIMES)
    data = cds(SURFACE, TIMES)
    with netCDF4.Dataset(source / "single.nc", "w") as file:
        for name in ("valid_time", "latitude", "longitude"):
            values = TIMES.astype("i8") if name == "valid_time" else data[name].values
            file.createDimension(name, len(values))
            file.createVariable(name, "f8", (name,))[:] = values
        file["valid_time"].units = "hours since 1970-01-01"
        for name in SURFACE:
            kind, packing = (dtype, DTYPES[dtype]) if name == "msl" else ("f4", {})
            fill = netCDF4.default_fillvals[kind] if attribute == "_FillValue" else None
            variable = file.createVariable(name, kind, data[name].dims, fill_value=fill)
            variable.setncatts(packing | ({"missing_value": np.dtype(kind).type(-9999)} if attribute == "missing_value" else {}))
            until = 5 if name == "msl" else len(TIMES)
            variable[:until] = data[name].values[:until]
    refused = r"msl (at 2015-12-31T06 UTC has missing values|is .* at 2015-12-31T06 UTC, which is no weather)"
    with pytest.raises(CourseError, match=refused):
        convert(replace(SMALL, source=str(source), path=str(tmp_path / "out")))


@pytest.mark.filterwarnings("ignore")                           # zarr 3: consolidated metadata is not specified yet
@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize(("version", "fill"), [(2, None), (2, 0), (3, 0), (3, 250)])
@pytest.mark.parametrize(("name", "shards"), [("2m_temperature", 0), ("10m_u_component_of_wind", 0), ("2m_temperature", 4)])
def test_a_zarr_chunk_that_was_not_copied_is_refused(tmp_path, name, shards, version, fill, consolidated):
    """Zarr reads the fill value for it, which may be any number, also one that the atmosphere has. A shard is like a chunk."""
    zarr = pytest.importorskip("zarr")
    if shards and version == 2:
        pytest.skip("shards are of format 3")
    data = weatherbench([stem for stem in NAMES if stem != "r"], TIMES)
    store = tmp_path / "wb.zarr"
    data.drop_vars(name).to_zarr(store, zarr_format=version, consolidated=False)
    array = data[name]
    sizes = {"chunks": (2, *array.shape[1:])} | ({"shards": (shards, *array.shape[1:])} if shards else {})
    names = {"dimension_names": array.dims} if version == 3 else {}
    made = zarr.open_group(store, mode="r+").create_array(name, shape=array.shape, dtype="float32", fill_value=fill,
                                                          **sizes, **names)
    made[:] = array.values
    if version == 2:
        made.attrs["_ARRAY_DIMENSIONS"] = list(array.dims)
    if consolidated:
        zarr.consolidate_metadata(store)
    (store / name / {2: "2.0.0", 3: "c/1/0/0" if shards else "c/2/0/0"}[version]).unlink()
    channel = "u10" if name[0] == "1" else "t2m"
    with pytest.raises(CourseError, match=rf"{channel} is .* at 2015-12-31T00 UTC, which is no weather"):
        convert(replace(SMALL, source=str(store), path=str(tmp_path / "out")))


@pytest.mark.filterwarnings("ignore")
def test_a_zarr_store_without_gaps_is_read_whatever_its_fill_value(tmp_path):
    """A number that is the fill value, such as a wind of exactly 0, is no gap."""
    zarr = pytest.importorskip("zarr")
    data = weatherbench([stem for stem in NAMES if stem != "r"], TIMES)
    data["10m_u_component_of_wind"][0, 0, 8] = 0               # of time, longitude and latitude, south to north
    data.to_zarr(tmp_path / "wb.zarr", zarr_format=2, consolidated=False)
    group, name = zarr.open_group(tmp_path / "wb.zarr", mode="r+"), "10m_u_component_of_wind"
    values = group[name][:]
    array = group.create_array(name, shape=values.shape, dtype="float32", fill_value=0, overwrite=True)
    array[:] = values
    array.attrs["_ARRAY_DIMENSIONS"] = ["time", "longitude", "latitude"]
    convert(replace(SMALL, source=str(tmp_path / "wb.zarr"), path=str(tmp_path / "out"), grid=(8, 16)))
    assert (fields(tmp_path / "out", "train", 2015)[0, 0] == 0).sum() == 1


@pytest.mark.parametrize(("stem", "value", "name"), [
    ("t2m", 0.0, "t2m"), ("u10", 0.0, "u10"), ("msl", 1013.0, "msl"), ("tcwv", -9999.0, "tcwv"), ("z", 1e20, "z1000"),
    ("v", np.inf, "v1000")])
def test_numbers_that_no_atmosphere_has_are_refused_with_channel_and_time(tmp_path, stem, value, name):
    source = write_cds(tmp_path / "in", TIMES)
    file = source / ("single.nc" if stem in SURFACE else "pressure.nc")
    data = cds([s for s in tuple(NAMES)[:-1] if (s in SURFACE) == (stem in SURFACE)], TIMES)
    data[stem][{"valid_time": 3}] = value
    data.to_netcdf(file, engine="netcdf4")
    sentence = re.escape(f"{name} is {np.float32(value):g} at 32 of 32 points")
    with pytest.raises(CourseError, match=rf"^{sentence}.* at 2015-12-30T18 UTC"):
        convert(replace(SMALL, source=str(source), path=str(tmp_path / "out")))


# ---- characters of a path ----

@pytest.mark.parametrize("name", ["[raw] ERA5 2015", "era5*", "my.share"])
@pytest.mark.parametrize("given", ["", "all.nc", "*.nc", "[as]*.nc"])
def test_a_path_is_no_pattern_where_it_exists(tmp_path, name, given):
    folder = tmp_path / name
    folder.mkdir()
    cds(tuple(NAMES)[:-1], TIMES).to_netcdf(folder / "all.nc", engine="netcdf4")
    convert(replace(SMALL, source=str(folder / given) if given else str(folder), path=str(tmp_path / "out [1]")))
    check(tmp_path / "out [1]")


def test_a_part_that_cannot_be_opened_is_not_begun_anew(tmp_path, monkeypatch):
    config = replace(SMALL, source=str(write_cds(tmp_path / "in", TIMES)), path=str(tmp_path / "out"))
    interrupted(monkeypatch, config, 2)
    part = tmp_path / "out" / "train" / ".2015.h5.part"
    before, original = part.read_bytes(), h5py.File

    def fails(name, mode="r", **options):
        if mode == "r+":
            raise OSError(24, "Too many open files")
        return original(name, mode, **options)

    with monkeypatch.context() as patch:
        patch.setattr(era5.h5py, "File", fails)
        with pytest.raises(CourseError, match=r"Too many open files.*run again"):
            convert(config)
    assert part.read_bytes() == before
