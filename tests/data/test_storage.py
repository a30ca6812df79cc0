"""Numbers that nobody wrote are refused; files open where there are no locks; a file cut off while it is read is noticed."""

import errno
import os

import h5py
import numpy as np
import pytest

from course import config
from course.cli.data import stats
from course.data import Latents, hdf5_storage, open_pairs, train_loader
from course.data.loaders import numpy_files
from course.data.weather import layout
from course.data.weather.layout import inspect_year
from course.inference import forecast_scores
from course.parallel import Axis
from course.training import trainer
from course.utils.errors import CourseError
from tests.conftest import tiny_settings
from tests.data.test_loaders import CPU, QUICK, first, settings

SHAPE = (6, 20, 8, 16)


def values():
    return np.random.default_rng(0).standard_normal(SHAPE).astype("float32")


def test_all_that_was_written_is_read_however_it_is_stored(tmp_path):
    for number, options in enumerate([{}, {"chunks": (4, 7, 5, 6)}, {"chunks": (1, 20, 8, 16), "compression": "gzip"}]):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("fields", data=values(), **options)
        assert inspect_year(tmp_path / f"{number}.h5").shape == SHAPE


# ---- numbers that no atmosphere has, in entries that were written ----

def spoil(data, entry, value, name="train/1980.h5", channel=slice(None)):
    with h5py.File(data / name, "r+") as file:
        file["fields"][entry, channel] = value


@pytest.mark.parametrize("value", [0, 9.96921e36, -32767])
@pytest.mark.parametrize("loader", QUICK[:2])
def test_training_refuses_an_entry_of_fill_values_in_mid_file(own_data, loader, value):
    spoil(own_data, 7, value, channel=2)
    with pytest.raises(CourseError, match=r"1980\.h5: entry 7 holds what no atmosphere has: t2m is .* at 128 of 128 points"):
        first(12, settings(own_data, loader))


def test_evaluation_refuses_an_entry_of_zeros(own_data, tmp_path):
    run = trainer.main(config.load("vit-demo", [*tiny_settings(own_data, tmp_path / "runs"), "train.steps=2"]))
    spoil(own_data, 5, 0, "test/1982.h5")
    with pytest.raises(CourseError, match=r"1982\.h5: entry 5 holds what no atmosphere has"):
        forecast_scores.score_run(run)


@pytest.mark.parametrize("name", ["train/1980.h5", "valid/1981.h5", "test/1982.h5"])
@pytest.mark.parametrize(("value", "sentence"), [(0, "u10 is 0 at 128"), (1e20, "u10 is 1e[+]20"),
                                                 (np.nan, r"missing values \(NaN\) in u10")])
def test_making_statistics_looks_at_every_entry_of_all_years(own_data, name, value, sentence):
    spoil(own_data, 3, value, name)
    with pytest.raises(CourseError, match=rf"{name[-7:]}: entry 3 .*{sentence}"):
        stats(own_data)


def test_statistics_of_fill_values_are_refused(own_data):
    file = own_data / "stats" / "global_means.npy"
    means = np.load(file)
    means[0, 4] = 9e34
    np.save(file, means)
    with pytest.raises(CourseError, match=r"global_means\.npy holds 9e\+34: the data had fill values .*course data stats"):
        open_pairs(settings(own_data, "native"), "train")


def test_numpy_files_are_not_made_of_entries_that_were_never_written(own_data):
    for folder in own_data.glob("train/19??"):
        if folder.is_dir():
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    spoil(own_data, 4, 0, "train/1979.h5")
    with pytest.raises(CourseError, match=r"1979\.h5: entry 4 holds what no atmosphere has"):
        numpy_files.convert(own_data, lambda text: None)


# ---- a file that is cut off while it is read ----

@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_file_cut_off_while_training_ends_the_run(own_data, workers, split):
    """HDF5 would read zeros beyond its end."""
    made = settings(own_data, "native", f"data.workers={workers}", "train.global_batch=2")
    data = open_pairs(made, split)
    data.__getitems__(list(range(len(data))))
    file = own_data / ("train/1980.h5" if split == "train" else "valid/1981.h5")
    os.truncate(file, file.stat().st_size - 8000)
    with pytest.raises(CourseError, match=r"not be read at entry .*it is truncated: it had .*restore the file and run again"):
        data.__getitems__(list(range(len(data))))


def test_a_loader_stops_where_a_file_is_cut_off_after_it_was_opened(own_data):
    batches = train_loader(settings(own_data, "threads"), Axis("dp"), CPU, 0, lambda n, device, start: {})
    for _ in range(20):
        next(batches)
    for file in own_data.glob("train/*.h5"):
        os.truncate(file, file.stat().st_size // 3)
    with pytest.raises(CourseError, match=r"it is truncated.*restore the file and run again"):
        for _ in range(20):
            next(batches)


def test_a_shard_cut_off_while_training_ends_the_run(tmp_path):
    from course.data.latents.digits import make_digits

    make_digits(tmp_path / "digits")
    data = Latents(str(tmp_path / "digits"), "train", (1, 8, 8), 10)
    data.__getitems__([0])
    os.truncate(tmp_path / "digits/train/00000.h5", 100_000)
    with pytest.raises(CourseError, match=r"00000\.h5 could not be read at entry 900 .*it is truncated"):
        data.__getitems__([900])


# ---- locks, and other reasons ----

@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_files_are_written_and_read_where_there_are_no_locks(tmp_path, monkeypatch, number):
    real = h5py.File

    def without_locks(name, mode="r", **options):
        if options.get("locking") is not False:
            raise OSError(number, f"Unable to open file (unable to lock file, errno = {number}, error message = '...')")
        return real(name, mode, **options)

    monkeypatch.setattr(hdf5_storage.h5py, "File", without_locks)
    with hdf5_storage.open_hdf5(tmp_path / "1979.h5", "w") as file:
        file["fields"] = values()
    assert inspect_year(tmp_path / "1979.h5").shape == SHAPE


def test_a_file_that_is_open_without_a_lock_is_opened_again(tmp_path):
    with h5py.File(tmp_path / "1979.h5", "w") as file:
        file["fields"] = values()
    with h5py.File(tmp_path / "1979.h5", "r", locking=False), hdf5_storage.open_hdf5(tmp_path / "1979.h5") as file:
        assert file["fields"].shape == SHAPE


@pytest.mark.parametrize(("number", "text", "cure"), [
    (errno.EACCES, "Permission denied", "see to what the system says"), (errno.EMFILE, "Too many open files", "ulimit -n"),
    (errno.EIO, "Input/output error", "see to what the system says"),
    (None, f"unable to open file: errno = {errno.EMFILE}, error message = 'Too many open files'", "ulimit -n"),
    (None, "truncated file: eof = 96", "it is truncated, or not HDF5: move it away, and make or copy it again"),
    (None, "wrong B-tree signature", "make or copy it again"),
])
def test_the_cure_follows_the_reason(tmp_path, monkeypatch, number, text, cure):
    def fail(*arguments, **options):
        raise OSError(number, text) if number else OSError(text)

    monkeypatch.setattr(hdf5_storage.h5py, "File", fail)
    with pytest.raises(CourseError, match=cure), layout.open_data_file(tmp_path / "1979.h5"):
        pass
