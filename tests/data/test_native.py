import multiprocessing
import multiprocessing.reduction
import os
import pickle
import signal
import tempfile
import time
from multiprocessing import process, resource_sharer

import h5py
import numpy as np
import pytest
import torch

from course import config
from course.data import open_pairs, train_loader
from course.data.loaders import native
from course.data.weather.pairs import Pairs
from course.parallel import Axis
from course.utils.errors import CourseError
from tests.conftest import GRID, fields, tiny_settings

CPU = torch.device("cpu")


def test_a_pair_is_a_state_and_the_next_one_normalized(small_data):
    pairs = Pairs(str(small_data), "train", 20, GRID)
    assert len(pairs) == 19 + 19                                        # a pair never crosses the end of a file
    raw = [fields(20, 0), fields(20, 1)]
    for sample, (year, at) in {0: (0, 0), 18: (0, 18), 19: (1, 0), 37: (1, 18)}.items():
        batch = pairs.__getitems__([sample])
        for name, offset in (("input", 0), ("target", 1)):
            expected = (raw[year][at + offset] - pairs.mean) / pairs.std
            np.testing.assert_allclose(batch[name][0], expected, rtol=1e-5, atol=1e-5)


def test_statistics_normalize_the_training_years(small_data):
    pairs = Pairs(str(small_data), "train", 20, GRID)
    states = np.stack([pairs.state(19 * year, time) for year in range(2) for time in range(20)])
    np.testing.assert_allclose(states.mean((0, 2, 3)), 0, atol=1e-4)
    np.testing.assert_allclose(states.std((0, 2, 3)), 1, atol=1e-4)


def test_lead_limit_and_padding(small_data):
    assert len(Pairs(str(small_data), "train", 20, GRID, lead=4)) == 16 + 16
    assert len(Pairs(str(small_data), "train", 20, GRID, limit=7)) == 7
    batch = Pairs(str(small_data), "train", 20, GRID).__getitems__([3, -1])
    assert batch["sample"].tolist() == [3, -1] and (batch["input"][1] == 0).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_gives_the_same_batches_whatever_the_workers(small_data, tmp_path, workers):
    settings = config.load("vit-demo", [*tiny_settings(small_data, tmp_path), f"data.workers={workers}"])
    batches = train_loader(settings, Axis("dp"), CPU, 8, lambda n, device: {})
    pairs = open_pairs(settings, "train")
    for _, ids in zip(range(12), native_ids(settings, len(pairs)), strict=False):
        batch, expected = next(batches), pairs.__getitems__(ids)
        assert all(torch.equal(batch[name], expected[name]) for name in expected)


def native_ids(settings, n):
    from course.data import order

    return order.train_batches(settings.train.seed, n, settings.train.global_batch, 1, 0, 8)


def test_a_file_that_breaks_while_training_is_named(own_data):
    pairs = Pairs(str(own_data), "train", 20, GRID)
    (own_data / "train" / "1979.h5").unlink()
    with pytest.raises(CourseError, match=r"1979\.h5.*restore"):
        list(native.loader(pairs, [[0]], workers=0, pin=False))
    with pytest.raises(CourseError, match=r"1979\.h5"):
        list(native.loader(pairs, [[0]], workers=1, pin=False))


class Calling:
    """Samples that call something when they are read."""

    def __init__(self, call):
        self.call = call

    def __getitem__(self, ids):
        self.call()


def fault():
    raise RuntimeError("a fault of the worker's own")


def test_a_worker_that_is_killed_is_a_sentence():
    with pytest.raises(CourseError, match=r"a worker process of the loader ended \(DataLoader worker .*fewer data\.workers"):
        list(native.loader(Calling(lambda: os.kill(os.getpid(), signal.SIGKILL)), [[0], [1]], workers=1, pin=False))
    with pytest.raises(RuntimeError, match="a fault of the worker's own"):
        list(native.loader(Calling(fault), [[0], [1]], workers=1, pin=False))


def test_pairs_travel_to_other_processes_without_their_open_files(small_data):
    pairs = Pairs(str(small_data), "train", 20, GRID)
    state = pairs.state(3)
    assert np.array_equal(pickle.loads(pickle.dumps(pairs)).state(3), state)


def test_chunked_and_compressed_files_read_the_same(own_data):
    file = own_data / "train" / "1979.h5"
    data = h5py.File(file)["fields"][:]
    before = Pairs(str(own_data), "train", 20, GRID).state(3)
    file.unlink()
    with h5py.File(file, "w") as opened:
        opened.create_dataset("fields", data=data, chunks=(1, 20, 8, 16), compression="gzip")
    assert np.array_equal(Pairs(str(own_data), "train", 20, GRID).state(3), before)


# ---- the hand-over of batches ----

class Ones(torch.utils.data.Dataset):
    def __getitems__(self, samples):
        return {"x": torch.ones(len(samples), 100_000), "sample": torch.tensor(samples)}


def handed_over():
    return list(native.loader(Ones(), [[i, i + 1] for i in range(0, 12, 2)], 2, False))


def test_a_long_folder_for_temporary_files_is_no_hindrance(tmp_path, monkeypatch):
    """Slurm's job folders: with more than 107 bytes UNIX's sockets in them have no name."""
    long = tmp_path / ("job" * 60)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delitem(process.current_process()._config, "tempdir", raising=False)
    monkeypatch.setattr(resource_sharer, "_resource_sharer", resource_sharer._ResourceSharer())
    try:
        assert len(handed_over()) == 6
        made = process.current_process()._config["tempdir"]
        assert len(made) < 40 and not made.startswith(str(long))
    finally:
        process.current_process()._config.pop("tempdir", None)


@pytest.mark.parametrize(("error", "cure"), [
    (OSError("AF_UNIX path too long"), "set TMPDIR to a folder of a shorter name"),
    (OSError(28, "No space left on device"), "see to what the system says"), (OSError(24, "Too many open files"), "ulimit -n")])
def test_a_hand_over_that_fails_in_a_thread_is_told_at_once(monkeypatch, error, cure):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(multiprocessing.reduction, "DupFd", fail)        # in the thread of a worker's queue
    began = time.monotonic()
    with pytest.raises(CourseError, match=f"could not hand over a batch .*{cure}"):
        handed_over()
    assert time.monotonic() - began < 20


def test_shared_memory_that_is_full_is_told_at_once(monkeypatch):
    def full(tensor):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2>: No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    with pytest.raises(CourseError, match=r"has no shared memory for a batch .*No space left.*make room there .*--shm-size"):
        handed_over()
