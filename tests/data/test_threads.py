"""Reading by offsets, and the ring of buffers."""

import os
import threading

import h5py
import numpy as np
import pytest
import torch

from course.data.loaders import hdf5_extents, threads
from course.data.loaders.hdf5_extents import StateFile, StateReader
from course.data.weather.pairs import Pairs
from course.utils.errors import CourseError
from tests.conftest import GRID

CPU = torch.device("cpu")
SHAPE = (9, 5, 8, 16)
VALUES = np.random.default_rng(0).standard_normal(SHAPE, np.float32)


def stored(path, values=VALUES, userblock=0, **options):
    with h5py.File(path, "w", userblock_size=userblock) as file:
        file.create_dataset("fields", data=values, **options)
    return StateFile(path)


def read(file, entry, piece=1000):
    into = np.full(SHAPE[1:], np.nan, np.float32)
    for part in file.reads(entry, into, piece):
        part()
    return into


@pytest.mark.parametrize("options", [
    {}, {"userblock": 512}, {"chunks": (1, 5, 8, 16)}, {"chunks": (4, 2, 8, 16)}, {"chunks": (2, 3, 3, 16)},
    {"chunks": (4, 5, 3, 7), "userblock": 1024}, {"chunks": (1, 1, 8, 5)}, {"chunks": (2, 2, 3, 6), "maxshape": (None, 5, 8, 16)},
    {"chunks": (2, 3, 11, 20), "maxshape": (None,) * 4},        # a chunk larger than the grid
], ids=str)
def test_by_offsets_all_that_is_not_compressed(tmp_path, options):
    file = stored(tmp_path / "x.h5", **options)
    assert file.offsets is not None
    for entry in range(len(VALUES)):
        np.testing.assert_array_equal(read(file, entry), VALUES[entry])


@pytest.mark.parametrize("options", [{"compression": "gzip"}, {"shuffle": True}, {"fletcher32": True}], ids=str)
def test_filtered_data_by_hdf5(tmp_path, options):
    file = stored(tmp_path / "x.h5", chunks=(2, 5, 8, 16), **options)
    assert file.offsets is None
    np.testing.assert_array_equal(read(file, 7), file.fields[7])


def test_virtual_external_and_unwritten_data_by_hdf5(tmp_path):
    stored(tmp_path / "x.h5")
    layout = h5py.VirtualLayout(SHAPE, "f4")
    layout[:] = h5py.VirtualSource(tmp_path / "x.h5", "fields", SHAPE)
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_virtual_dataset("fields", layout)
    with h5py.File(tmp_path / "external.h5", "w") as file:
        file.create_dataset("fields", SHAPE, "f4", external=[(str(tmp_path / "raw"), 0, VALUES.nbytes)])[:] = VALUES
    with h5py.File(tmp_path / "unwritten.h5", "w") as file:
        file.create_dataset("fields", SHAPE, "f4", fillvalue=3)
    for name, wanted in {"virtual": VALUES[4], "external": VALUES[4], "unwritten": np.full(SHAPE[1:], 3)}.items():
        file = StateFile(tmp_path / f"{name}.h5")
        assert file.offsets is None
        np.testing.assert_array_equal(read(file, 4), wanted)


def test_a_chunk_that_was_never_written_has_the_fill_value(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        fields = file.create_dataset("fields", SHAPE, "f4", chunks=(2, 3, 4, 16), fillvalue=-7)
        fields[3, 1] = 1
    wanted = np.full(SHAPE[1:], -7, np.float32)
    np.testing.assert_array_equal(read(StateFile(tmp_path / "x.h5"), 0), wanted)
    wanted[1] = 1
    np.testing.assert_array_equal(read(StateFile(tmp_path / "x.h5"), 3), wanted)


def test_reads_are_of_a_piece_at_most_and_may_come_short(tmp_path, monkeypatch):
    """The kernel may give less than was asked for."""
    file, asked = stored(tmp_path / "x.h5"), []
    preadv = os.preadv

    def short(handle, buffers, offset):
        asked.append(len(buffers[0]))
        return preadv(handle, [buffers[0][:400]], offset)

    monkeypatch.setattr(hdf5_extents.os, "preadv", short)
    np.testing.assert_array_equal(read(file, 2), VALUES[2])
    assert max(asked) == 1000 and sum(min(n, 400) for n in asked) == VALUES[0].nbytes


@pytest.mark.parametrize("options", [{}, {"chunks": (1, 2, 8, 5)}, {"chunks": (1, 5, 8, 16), "compression": "gzip"}], ids=str)
def test_a_file_cut_while_it_is_open_is_named_with_its_entry(tmp_path, options):
    file = stored(tmp_path / "x.h5", **options)
    os.truncate(tmp_path / "x.h5", os.path.getsize(tmp_path / "x.h5") // 2)
    with pytest.raises(CourseError, match=r"x\.h5 could not be read at entry 8 \(.*restore the file and run again"):
        read(file, 8)


def test_closing_closes_the_files(small_data):
    states = StateReader(Pairs(str(small_data), "train", 20, GRID))
    before = len(os.listdir("/proc/self/fd"))
    states.read(0)
    states.read(30)
    assert len(os.listdir("/proc/self/fd")) > before
    states.close()
    assert len(os.listdir("/proc/self/fd")) == before


def batches(count, size=4):
    return [[(size * k + i) % 38 for i in range(size)] for k in range(count)]


@pytest.mark.parametrize(("workers", "ahead"), [(1, 1), (1, 3), (8, 2)])
def test_batches_that_are_held_do_not_change_when_buffers_are_used_again(small_data, workers, ahead):
    pairs = Pairs(str(small_data), "train", 20, GRID)
    held = list(threads.loader(pairs, batches(12), workers, ahead, CPU))
    for found, samples in zip(held, batches(12), strict=True):
        wanted = pairs.__getitems__(samples)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_batches_of_other_sizes_and_none_at_all(small_data):
    pairs = Pairs(str(small_data), "train", 20, GRID)
    mixed = [[1, 2, 3], [4], [5, 6], [-1, -1]]
    for found, samples in zip(threads.loader(pairs, mixed, 2, 2, CPU), mixed, strict=True):
        assert found["sample"].tolist() == samples
        assert torch.equal(found["target"], pairs.__getitems__(samples)["target"])
    assert not list(threads.loader(pairs, [], 2, 2, CPU))


def test_what_cannot_be_read_is_said_when_its_turn_comes_and_the_threads_end(own_data):
    """The second year is gone: the batches before it are whole, though reading is ahead of them."""
    pairs = Pairs(str(own_data), "train", 20, GRID)
    (own_data / "train" / "1980.h5").unlink()
    before, got = threading.active_count(), []
    with pytest.raises(CourseError, match=r"1980\.h5 cannot be opened .*restore"):
        for batch in threads.loader(pairs, batches(12), 2, 3, CPU):
            got.append(batch["sample"].tolist())
    assert got == batches(4)                                             # samples 0 to 15; the second year begins at 19
    assert threading.active_count() == before


def test_reading_is_ahead_but_no_further_than_asked(small_data):
    pairs, taken = Pairs(str(small_data), "train", 20, GRID), []

    def watched():
        for samples in batches(20):
            taken.append(samples)
            yield samples

    running = threads.loader(pairs, watched(), 2, 3, CPU)
    for k in range(1, 6):
        next(running)
        assert k < len(taken) <= k + 4
    running.close()


def test_leaving_early_ends_the_threads(small_data):
    before = threading.active_count()
    running = threads.loader(Pairs(str(small_data), "train", 20, GRID), iter(batches(1000)), 4, 2, CPU)
    next(running)
    assert threading.active_count() > before
    running.close()
    assert threading.active_count() == before
