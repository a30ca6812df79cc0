"""A run whose data changes while it trains stops at its next checkpoint, and saves nothing of what it learned since."""

import os
import shutil

import h5py
import pytest

from course import config
from course.checkpoint.checkpoint import steps
from course.data.file_watch import DataFileWatch
from course.data.latents.digits import make_digits
from course.training import trainer
from course.utils.errors import CourseError
from tests.conftest import tiny_settings


def truncate(file):
    os.truncate(file, file.stat().st_size - 4000)


def grow(file):
    with open(file, "ab") as out:
        out.write(b"more")


def replace(file):
    """By another of as many bytes, as one that makes its data anew does."""
    shutil.copy(file, other := file.with_suffix(".new"))
    with h5py.File(other, "r+") as opened:
        opened["fields"][:] = opened["fields"][:][::-1]
    os.replace(other, file)


def overwrite(file):
    raw = bytearray(file.read_bytes())
    raw[-4000:] = bytes(4000)
    file.write_bytes(raw)


CHANGES = [(truncate, "has become shorter"), (grow, "has become longer"), (replace, "has been replaced or written over"),
           (overwrite, "has been replaced or written over"), (os.unlink, "has been removed")]


@pytest.mark.parametrize("name", ["train/1980.h5", "valid/1981.h5"])
@pytest.mark.parametrize(("change", "sentence"), CHANGES)
def test_a_file_that_changes_is_named(own_data, tmp_path, change, sentence, name):
    watched = DataFileWatch(config.load("vit-demo", tiny_settings(own_data, tmp_path / "runs")))
    watched.check()
    change(own_data / name)
    with pytest.raises(CourseError, match=rf"{name[-7:]} {sentence}.* since this run.*resumes from the previous checkpoint"):
        watched.check()


def touch(file):
    os.utime(file, (1, 1))


def move_on_the_disk(file):
    shutil.copy(file, file.with_suffix(".new"))
    os.replace(file.with_suffix(".new"), file)


@pytest.mark.parametrize("change", [touch, move_on_the_disk])
def test_a_file_that_only_looks_new_is_the_same(own_data, tmp_path, change):
    """Some people touch all files, lest they be purged; tiered disks bring files back under other numbers."""
    watched = DataFileWatch(config.load("vit-demo", tiny_settings(own_data, tmp_path / "runs")))
    change(own_data / "train/1980.h5")
    watched.check()


@pytest.mark.parametrize("loader", ["native", "threads"])
@pytest.mark.parametrize(("change", "sentence"), [CHANGES[2], CHANGES[4]])
def test_a_run_stops_at_the_next_checkpoint(own_data, tmp_path, monkeypatch, loader, change, sentence):
    settings = config.load("vit-demo", [*tiny_settings(own_data, tmp_path / "runs"), f"data.loader={loader}"])
    saved = trainer.save

    def change_after(*arguments):
        found = saved(*arguments)
        change(own_data / "train/1980.h5")
        return found

    monkeypatch.setattr(trainer, "save", change_after)
    with pytest.raises(CourseError, match=sentence):
        trainer.main(settings)
    assert [path.name for path in steps(trainer.run_folder(settings) / "checkpoints")] == ["step_000005"]


def test_shards_are_watched_as_well(tmp_path):
    make_digits(tmp_path / "digits")
    watched = DataFileWatch(config.load("dit-digits", [f"data.path={tmp_path / 'digits'}"]))
    truncate(tmp_path / "digits/valid/00000.h5")
    with pytest.raises(CourseError, match=r"00000\.h5 has become shorter"):
        watched.check()
