from pathlib import Path

import h5py
import numpy as np
import pytest

from course.data import Pairs
from course.data.weather import layout
from course.utils.errors import CourseError
from tests.conftest import TIMES, fields


def test_twenty_channels_with_units():
    assert len(layout.CHANNELS) == 20 and next(iter(layout.CHANNELS)) == "u10"


def test_grid_goes_south_and_east():
    assert layout.latitudes(4).tolist() == [67.5, 22.5, -22.5, -67.5]
    assert layout.longitudes(4).tolist() == [0, 90, 180, 270]


def test_years_are_found_in_order(small_data):
    years = layout.find_years(small_data, "train")
    assert [year.path.name for year in years] == ["1979.h5", "1980.h5"]
    assert years[0].shape == (TIMES["train/1979"], 20, 8, 16)
    assert layout.channel_names(years[0]) == list(layout.CHANNELS)
    np.testing.assert_array_equal(layout.grid_latitudes(years[0]), layout.latitudes(8))


def test_statistics_equal_numpys_over_all_years(small_data):
    data = np.concatenate([fields(20, 0), fields(20, 1)]).astype("float64")
    stats = {name: np.load(small_data / "stats" / f"{name}.npy") for name in ("global_means", "global_stds", "time_means")}
    np.testing.assert_allclose(stats["global_means"][0, :, 0, 0], data.mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(stats["global_stds"][0, :, 0, 0], data.std((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(stats["time_means"], data.mean(0), rtol=1e-5)


def test_statistics_of_a_large_offset_keep_their_digits(tmp_path):
    data = (2e5 + np.random.default_rng(0).standard_normal((30, 1, 8, 8))).astype("float32")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        layout.create_year(file, 30, ["z50"], layout.latitudes(8), layout.longitudes(8))[:] = data
    layout.write_statistics(tmp_path, [layout.inspect_year(tmp_path / "a.h5")])
    assert np.load(tmp_path / "stats" / "global_stds.npy").item() == pytest.approx(data.astype("float64").std(), rel=1e-4)


def test_the_reference_files_without_attributes_are_understood(tmp_path):
    with h5py.File(tmp_path / "1979.h5", "w") as file:
        file["fields"] = np.zeros((3, 20, 8, 16), "float32")
    year = layout.inspect_year(tmp_path / "1979.h5")
    assert layout.channel_names(year)[:2] == ["u10", "v10"] and len(layout.grid_latitudes(year)) == 8


def test_fields_lie_contiguous_on_disk(small_data):
    with h5py.File(small_data / "train" / "1979.h5") as file:
        assert file["fields"].chunks is None and file["fields"].id.get_offset() is not None


def damage_statistics(path, value):
    np.save(path / "stats" / "global_stds.npy", value)


@pytest.mark.parametrize(("break_it", "words"), [
    (lambda p: (p / "stats" / "global_means.npy").unlink(), ["global_means.npy is missing", "course data stats"]),
    (lambda p: (p / "stats" / "global_means.npy").write_bytes(b"junk"), ["not a readable .npy"]),
    (lambda p: damage_statistics(p, np.ones((1, 19, 1, 1))), ["does not match", "(1, 20, 1, 1)"]),
    (lambda p: damage_statistics(p, np.zeros((1, 20, 1, 1))), ["positive"]),
    (lambda p: damage_statistics(p, np.full((1, 20, 1, 1), np.nan)), ["finite"]),
])
def test_statistics_that_do_not_match_are_refused(own_data, break_it, words):
    break_it(own_data)
    with pytest.raises(CourseError) as caught:
        layout.read_statistics(own_data, (20, 8, 16))
    assert all(word in str(caught.value) for word in words)


def truncate(file):
    with open(file, "r+b") as opened:
        opened.truncate(file.stat().st_size - 5000)


def other_channels(file):
    file.unlink()
    with h5py.File(file, "w") as opened:
        opened["fields"] = np.zeros((3, 19, 8, 16), "float32")


def no_fields(file):
    file.unlink()
    with h5py.File(file, "w") as opened:
        opened["other"] = np.zeros(3)


@pytest.mark.parametrize(("break_it", "words"), [
    (truncate, ["1980.h5 cannot be read", "truncated"]),
    (lambda file: file.write_bytes(b"junk"), ["1980.h5 cannot be read", "not HDF5"]),
    (other_channels, ["1980.h5", "must agree"]),
    (no_fields, ["no dataset `fields`", "other"]),
])
def test_bad_files_are_named(own_data, break_it, words):
    break_it(own_data / "train" / "1980.h5")
    with pytest.raises(CourseError) as caught:
        layout.find_years(own_data, "train")
    assert all(word in str(caught.value) for word in words)


def test_a_file_that_cannot_be_read_to_its_end_has_no_statistics(own_data, monkeypatch):
    """What h5py raises in the middle of it, RuntimeError here, is a sentence; so is a name of a channel that is none."""
    years = layout.find_years(own_data, "train")

    def damaged(*_):
        raise RuntimeError("bad heap")

    monkeypatch.setattr(h5py.Dataset, "__getitem__", damaged)
    with pytest.raises(CourseError, match=r"1979\.h5 cannot be read \(bad heap\): .* make or copy it again"):
        layout.write_statistics(own_data, years)
    with h5py.File(years[0].path, "r+") as file:
        file.attrs["channels"] = 3
    with pytest.raises(CourseError, match=r"1979\.h5 cannot be read \(.*not iterable"):
        layout.channel_names(years[0])


def test_a_missing_folder_says_how_to_make_data(tmp_path):
    with pytest.raises(CourseError, match="course data weather"):
        layout.find_years(tmp_path, "train")


@pytest.mark.parametrize(("grid", "command"), [((32, 64), "'grid=[32,64]'`"), ((360, 720), "'grid=[360,720]'`")])
def test_how_to_make_data_can_be_pasted(grid, command):
    with pytest.raises(CourseError) as error:
        layout.find_years(Path("no where"), "train", grid)
    assert f"`course data weather 'path=no where' {command}" in str(error.value) and "data.source=mock" in str(error.value)
    with pytest.raises(CourseError) as error:        # to be evaluated: random data are none
        layout.find_years(Path("nowhere"), "test", grid)
    assert f"path=nowhere {command}" in str(error.value) and "mock" not in str(error.value)


@pytest.mark.parametrize(("lead", "expected"), [
    (1, {0: 1, 1: 1, 2: 2, 18: 18, 19: 1}), (2, {0: 2, 1: 3, 2: 2, 17: 17, 18: 2, 19: 3})])
def test_the_references_pairs_are_as_many_as_the_entries(lead, expected, small_data):
    """None begins at one of the first entries, and the last ones begin again at the first."""
    pairs = Pairs(str(small_data), "train", 20, (8, 16), lead, reference=True)
    assert len(pairs) == 40 and {i: pairs.place(i)[1] for i in expected} == expected
    assert {i: pairs.place(20 + i, lead) for i in expected} == {i: (1, entry + lead) for i, entry in expected.items()}
    assert all(pairs.place(i, lead)[1] < 20 for i in range(40))
    assert len(Pairs(str(small_data), "train", 20, (8, 16), lead)) == 2 * (20 - lead)
    assert (pairs.state(19) == pairs.state(lead - 1)).all()
