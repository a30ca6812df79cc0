"""The contract of all loaders: the samples of `order`, the same bits, clear errors, and nothing left behind."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import h5py
import psutil
import pytest
import torch

from course import config
from course.config import Config
from course.data import Batch, eval_loader, open_pairs, order, train_loader
from course.data.loaders import numpy_files
from course.data.weather.pairs import Pairs
from course.parallel import Axis
from course.training import trainer
from course.utils.errors import CourseError
from tests.conftest import tiny_settings
from tests.training.test_trainer import assert_same_run, losses, start, wait_for_step

CPU, ALONE = torch.device("cpu"), Axis("dp")
needs_dali = pytest.mark.skipif(importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None,
                                reason="needs DALI")
QUICK = ["native", "threads", pytest.param("dali_numpy", marks=needs_dali)]
DALI = pytest.param("dali", marks=[needs_dali, pytest.mark.slow])        # its processes take seconds to start
LOADERS = [*QUICK, DALI]
STORED = {"contiguous": {}, "chunked": {"chunks": (3, 7, 5, 6)}, "rows": {"chunks": (2, 3, 8, 16)},
          "compressed": {"chunks": (1, 20, 8, 16), "compression": "gzip"}}


@pytest.fixture(scope="module")
def converted(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small data set, with its .npy files."""
    data = shutil.copytree(small_data, tmp_path_factory.mktemp("numpy") / "data")
    numpy_files.convert(data, lambda text: None)
    return data


@pytest.fixture
def own_data(converted: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(converted, tmp_path / "data"))


def settings(data: Path, loader: str, *more: str) -> Config:
    return config.load("vit-demo", [*tiny_settings(data, data / "runs"), f"data.loader={loader}", "data.workers=2", *more])


def rewrite(data: Path, **stored: object) -> None:
    """The same fields, laid out in another way inside the files."""
    for file in data.glob("*/*.h5"):
        with h5py.File(file) as opened:
            values = opened["fields"][:]
        with h5py.File(file, "w") as opened:
            opened.create_dataset("fields", data=values, **stored)


def ranked(rank: int, ranks: int) -> Axis:
    return Axis("dp", ranks, rank, tuple(range(ranks)))


def first(count: int, settings: Config, dp: Axis = ALONE, consumed: int = 0, device: torch.device = CPU) -> list[Batch]:
    """All held until the last is there: a batch must not change when the next is made."""
    batches = train_loader(settings, dp, device, consumed, lambda n, device, start: {})
    found = [next(batches) for _ in range(count)]
    batches.close()
    return found


def expected(settings: Config, batches: list[list[int]]) -> list[Batch]:
    pairs = open_pairs(settings, "train")
    return [pairs.__getitems__(samples) for samples in batches]


def stream(settings: Config, rank: int, ranks: int, consumed: int, count: int) -> list[list[int]]:
    ids = order.train_batches(settings.train.seed, len(open_pairs(settings, "train")), settings.train.global_batch, ranks, rank,
                              consumed)
    return [next(ids) for _ in range(count)]


def assert_equal(found: list[Batch], wanted: list[Batch]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.keys() == b.keys()
        for name in b:
            assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("loader", ["native", "threads"])
def test_every_way_of_storing_gives_the_same_bits_over_two_epochs(own_data, loader, stored):
    """34 pairs in batches of 4: the ninth of them begins the second epoch, in another order."""
    settled = settings(own_data, loader, "data.lead=3")
    wanted = expected(settled, stream(settled, 0, 1, 0, 20))
    rewrite(own_data, **STORED[stored])
    assert_equal(first(20, settled), wanted)


@needs_dali
def test_numpy_files_give_the_same_bits_whatever_the_length_of_a_segment(own_data, monkeypatch):
    from course.data.loaders import dali

    settled = settings(own_data, "dali_numpy", "data.lead=3")
    monkeypatch.setattr(dali, "SEGMENT", 24)                             # of 8 files a batch
    assert_equal(first(20, settled), expected(settled, stream(settled, 0, 1, 0, 20)))


@needs_dali
@pytest.mark.slow
def test_dali_gives_the_same_bits_of_chunks_as_one_of_two_ranks_in_mid_epoch(own_data):
    """All at once, since its processes take seconds to start."""
    settled = settings(own_data, "dali", "precision=fp64", "data.lead=2")
    wanted = expected(settled, stream(settled, 1, 2, 28, 20))
    rewrite(own_data, **STORED["chunked"])
    found = first(20, settled, ranked(1, 2), 28)
    assert found[0]["input"].dtype == torch.float64
    assert_equal([{name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
                  for batch in found], wanted)


@pytest.mark.parametrize("loader", QUICK)
def test_ranks_share_each_batch_and_a_resumed_run_goes_on_in_mid_epoch(own_data, loader):
    settled = settings(own_data, loader)
    whole = first(14, settled)
    for rank in range(2):
        part = first(9, settled, ranked(rank, 2), consumed=5 * 4)
        half = slice(2 * rank, 2 * rank + 2)
        assert_equal(part, [{name: tensor[half] for name, tensor in batch.items()} for batch in whole[5:]])


@pytest.mark.parametrize("loader", LOADERS)
def test_evaluation_sees_each_sample_once_and_padding_is_zeros(own_data, loader):
    settled = settings(own_data, loader)
    pairs = open_pairs(settled, "valid")                                 # 10 pairs
    found = list(eval_loader(settled, ALONE, CPU, pairs))
    assert [batch["sample"].tolist() for batch in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, -1, -1]]
    assert_equal(found, [pairs.__getitems__(batch["sample"].tolist()) for batch in found])
    for half in ("input", "target"):
        assert not found[-1][half][2:].any()


def spoil(data: Path, loader: str, how: str) -> Path:
    """Remove, or cut in half, what holds the second year; of .npy files one, early in the stream."""
    file = data / "train" / "1980.h5" if loader != "dali_numpy" else data / "train" / "1980" / "00007.npy"
    if how == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    else:
        file.unlink()
    return file


@pytest.mark.parametrize("how", ["missing", "truncated"])
@pytest.mark.parametrize("loader", [*QUICK, DALI])
def test_a_file_that_goes_bad_is_named_with_the_cure(own_data, monkeypatch, loader, how):
    made, spoiled = Pairs.__init__, []

    def spoil_after(self, *arguments):
        """When the data set has been checked, and before anything reads it."""
        made(self, *arguments)
        spoiled.append(spoil(own_data, loader, how))

    monkeypatch.setattr(Pairs, "__init__", spoil_after)
    if loader == "dali_numpy":
        monkeypatch.setattr(numpy_files, "check", lambda pairs: None)
    before, others = threads(), workers()               # such as ranks that wait for the next test
    with pytest.raises(CourseError) as error:
        first(12, settings(own_data, loader, "data.workers=1"))
    assert spoiled[0].name in str(error.value) and "restore the file and run again" in str(error.value)
    assert threads() == before and workers() <= others


def threads() -> int:
    """But for those of Python's own queues between processes, which end when they are collected."""
    return sum(thread.name != "QueueFeederThread" for thread in threading.enumerate())


def workers() -> set[psutil.Process]:
    """Child processes; Python's own resource tracker stays for the next ones."""
    return {p for p in psutil.Process().children(recursive=True) if "resource_tracker" not in "".join(p.cmdline())}


@pytest.mark.parametrize("loader", ["threads", pytest.param("dali_numpy", marks=needs_dali), DALI])
def test_a_training_run_has_the_losses_of_native_bit_for_bit(own_data, tmp_path, loader):
    runs = []
    for kind in ("native", loader):
        overrides = [*tiny_settings(own_data, tmp_path / "runs"), f"data.loader={kind}", "data.workers=1", f"log.name={kind}"]
        runs.append(trainer.main(config.load("vit-demo", overrides)))
    assert len(losses(runs[0])) == 12
    assert_same_run(*runs)


@pytest.mark.slow
@pytest.mark.parametrize(("loader", "number"), [("threads", signal.SIGTERM), *(
    pytest.param("dali", number, marks=needs_dali) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL))])
def test_an_interrupted_run_leaves_no_process_and_no_shared_memory(own_data, tmp_path, loader, number):
    interrupt(own_data, tmp_path, loader, number)


def interrupt(own_data: Path, tmp_path: Path, loader: str, number: int, *more: str) -> None:
    """The stop signals go to the whole group, workers too, and the run is saved; the trainer alone is killed."""
    shared = set(os.listdir("/dev/shm"))
    process = start([*tiny_settings(own_data, tmp_path / "runs"), "train.steps=100000", "checkpoint.every=100000",
                     "model.depth=1", f"data.loader={loader}", "data.workers=1", *more])
    family = [psutil.Process(process.pid)]
    wait_for_step(process, tmp_path / "runs" / "vit-demo" / "default", 5)
    family += family[0].children(recursive=True)
    assert (len(family) > 1) == (loader == "dali")
    if number == signal.SIGKILL:
        process.kill()
    else:
        os.killpg(process.pid, number)
    out, _ = process.communicate(timeout=60)
    assert number == signal.SIGKILL or (process.returncode == 75 and f"stopped by {signal.Signals(number).name}" in out), out
    limit = time.time() + 20
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family):
        assert time.time() < limit, [p.cmdline() for p in family if p.is_running()]
        time.sleep(0.1)
    while left := abandoned(set(os.listdir("/dev/shm")) - shared):
        assert time.time() < limit, left
        time.sleep(0.1)


def abandoned(names: set[str]) -> set[str]:
    """Those of some files of shared memory that no process has mapped: other tests make and remove some meanwhile."""
    if names:
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with suppress(OSError):
                text = maps.read_text()
                names = {name for name in names if f"/dev/shm/{name}" not in text}
    return names


@pytest.mark.parametrize("kind", ["dali", pytest.param("dali_numpy", marks=pytest.mark.slow)])
def test_without_dali_one_sentence_says_how_to_get_it(own_data, kind):
    """In a process of its own: here DALI may be imported already."""
    code = ("import sys; sys.modules['nvidia.dali'] = None\n"
            "from course.cli import main as cli; sys.argv[1:1] = ['train', 'vit-demo']; cli.main()")
    done = subprocess.run([sys.executable, "-c", code, *tiny_settings(own_data, own_data / "runs"), f"data.loader={kind}"],
                          capture_output=True, text=True)
    assert done.returncode == 1 and 'needs nvidia-dali: pip install "course[dali]"' in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("change", "cure"), [("data.workers=-1", "0 or more"), ("data.ahead=0", "at least 1")])
def test_settings_that_make_no_sense_are_refused(own_data, change, cure):
    with pytest.raises(CourseError, match=cure):
        settings(own_data, "threads", change)
