"""What runs in DALI's worker processes, its arithmetic, and the .npy files of a data set."""

import pickle
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import h5py
import numpy as np
import psutil
import pytest
import torch

from course.data import order
from course.data.loaders import numpy_files
from course.data.weather.pairs import Pairs
from course.utils.errors import CourseError
from tests.conftest import GRID

CPU = torch.device("cpu")


def quiet(text: str) -> None:
    pass


# ---- the source of a worker ----

def ask(source, iteration, place):
    return source(SimpleNamespace(iteration=iteration, idx_in_batch=place))


@pytest.fixture
def source(small_data, monkeypatch):
    """As it arrives in a worker, less what ends the worker."""
    from course.data.loaders import dali

    monkeypatch.setattr(dali, "exit_with_trainer", lambda trainer: None)
    pairs = Pairs(str(small_data), "train", 20, GRID, lead=2)
    return pickle.loads(pickle.dumps(dali.Source(pairs, partial(order.eval_batches, len(pairs), 8, 2, 1))))


def test_a_worker_finds_its_states_by_number(source):
    """36 pairs, batches of 8, the second of two ranks: 4 pairs of each batch, inputs before targets; the last is half padding."""
    for iteration, place, sample, ahead in [(0, 0, 4, 0), (0, 5, 5, 2), (2, 3, 23, 0), (2, 4, 20, 2), (3, 7, 31, 2)]:
        state = (ask(source, iteration, place) - source.pairs.mean) / source.pairs.std
        np.testing.assert_array_equal(state, source.pairs.state(sample, ahead))
    assert ask(source, 4, 7).shape == (20, *GRID)                        # padding: any state
    for _ in range(2):                                                   # DALI asks on when there is no more
        with pytest.raises(StopIteration):
            ask(source, 5, 0)


HELD = """
import os, subprocess, sys
from course.data.loaders.dali import signals_blocked
with signals_blocked():
    code = ("import os; from course.data.loaders.dali import exit_with_trainer; print('up', flush=True); "
            "exit_with_trainer(os.getppid())")
    worker = subprocess.Popen([sys.executable, "-c", code])
print(worker.pid, flush=True)
sys.stdin.readline()
worker.terminate()
print(worker.wait(), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def trainer():
    """A process that started a worker, which is up; and the worker."""
    process = subprocess.Popen([sys.executable, "-c", HELD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    lines = sorted(process.stdout.readline().strip() for _ in range(2))
    worker = psutil.Process(int(lines[0]))
    yield process, worker
    for each in (process, worker):
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.communicate()


@pytest.mark.slow
def test_a_worker_ends_when_its_trainer_says_so_and_for_nobody_else(trainer):
    process, worker = trainer
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        worker.send_signal(number)
        time.sleep(0.2)
        assert worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "0\n"


@pytest.mark.slow
def test_a_worker_does_not_survive_its_trainer(trainer):
    process, worker = trainer
    process.kill()
    worker.wait(5)


# ---- pipelines ----

def test_pipelines_normalize_as_numpy_does_to_the_bit():
    pytest.importorskip("nvidia.dali")
    assert_normalized_to_the_bit(CPU)


def assert_normalized_to_the_bit(device):
    """Values, means and deviations of every size, where a product with the reciprocal would round otherwise."""
    from nvidia.dali import fn

    from course.data.loaders import dali

    rng = np.random.default_rng(0)
    mean, std = (np.exp(rng.uniform(-6, 12, (20, 1, 1))).astype("float32") for _ in range(2))
    x = (mean + std * rng.standard_normal((4, 20, 8, 16))).astype("float32")
    pipe = dali.pipeline(2, 1, 1, device)
    with pipe:
        pipe.set_outputs(dali.normalized(fn.external_source(lambda: x, batch=True), SimpleNamespace(mean=mean, std=std), device))
    assert not np.array_equal((x - mean) * (1 / std), (x - mean) / std)
    assert torch.equal(dali.states_of(pipe, device).cpu(), torch.from_numpy((x - mean) / std))


def test_errors_of_workers_and_of_the_reader_become_sentences():
    from course.data.loaders.dali import error_message

    worker = Exception("received from worker thread:\nTraceback ...\n"
                       "course.utils.errors.CourseError: 1980.h5 is gone: restore it\n")
    assert error_message(worker) == "1980.h5 is gone: restore it"
    for reader in ('Assert on "p" failed: Failed to read file: a b/4.npy', "Failed to read file: a b/4.npy"):
        told = error_message(RuntimeError(f"Critical error:\n  in run\n\nencountered:\n\n{reader}\nC++ context: x\n"))
        assert told == "DALI: Failed to read file: a b/4.npy: restore the file and run again"
    assert "data.workers" in error_message(RuntimeError("Worker data receiving interrupted"))
    assert not error_message(ValueError("a mistake in the program"))


# ---- .npy files ----

def test_every_state_has_its_file_and_an_interrupted_conversion_goes_on(own_data, monkeypatch):
    save, saved = np.save, []

    def fail(file, values):
        saved.append(1)
        if len(saved) == 25:
            raise KeyboardInterrupt
        save(file, values)

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        numpy_files.convert(own_data, quiet)
    assert (own_data / "train" / "1979").is_dir() and not (own_data / "train" / "1980").exists()
    numpy_files.convert(own_data, quiet)
    assert len(saved) == 20 + 20 + 11 + 24 + 1
    for file in own_data.glob("*/*.h5"):
        with h5py.File(file) as opened:
            found = [np.load(path) for path in sorted(file.with_suffix("").iterdir())]
            np.testing.assert_array_equal(found, opened["fields"])
    numpy_files.convert(own_data, quiet)
    assert len(saved) == 76 and not list(own_data.rglob(".*"))


def test_half_a_conversion_of_other_data_is_begun_anew_and_a_whole_one_kept(own_data):
    part = own_data / "train" / ".1979.part"
    part.mkdir()
    np.save(part / "00003.npy", np.zeros((20, *GRID), "float32"))
    numpy_files.convert(own_data, quiet)
    with h5py.File(own_data / "train" / "1979.h5") as file:
        np.testing.assert_array_equal(np.load(own_data / "train" / "1979" / "00003.npy"), file["fields"][3])
    with h5py.File(own_data / "train" / "1979.h5", "r+") as file:
        file["fields"][-1] = 0
    with pytest.raises(CourseError, match=r"1979 does not hold the states of .*1979\.h5: move it away and run again"):
        numpy_files.convert(own_data, quiet)


def test_a_data_set_that_is_not_or_not_wholly_converted_is_refused_with_the_command(own_data):
    pairs = Pairs(str(own_data), "train", 20, GRID)
    with pytest.raises(CourseError, match=f"20 files in .*1979, not 0: make them with `course data numpy {own_data}`"):
        numpy_files.check(pairs)
    numpy_files.convert(own_data, quiet)
    numpy_files.check(pairs)
    (own_data / "train" / "1980" / "00019.npy").unlink()
    with pytest.raises(CourseError, match="1980, not 19"):
        numpy_files.check(pairs)


def test_nothing_to_convert_is_said(tmp_path):
    with pytest.raises(CourseError, match="holds no data set"):
        numpy_files.convert(tmp_path, quiet)
