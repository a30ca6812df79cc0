"""What breaks around a run, which then loses nothing: the disk, the data, signals at bad moments, other layouts, crashes."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from course import config
from course.checkpoint import checkpoint, shards
from course.parallel import Axis, serial_layout
from course.ranks.notebook_ranks import close, ranks
from course.training import trainer
from course.training.run_log import read_metrics
from course.utils.errors import CourseError
from tests.conftest import tiny_settings
from tests.faults import ROOT, assert_same_losses, sequence


def run(settings: list[str]) -> Path:
    return trainer.main(config.load("vit-demo", settings))


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def full(*_):
    raise OSError(28, "No space left on device")


# --- the disk

def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tiny, monkeypatch, capsys):
    """It is full when step 5 is saved, and has room again at step 10."""
    whole = run([*tiny, "log.name=whole"])
    real, calls = shards.stream, []

    def stream(*arguments):
        calls.append(1)
        return full() if len(calls) == 1 else real(*arguments)

    monkeypatch.setattr(shards, "stream", stream)
    folder = run([*tiny, "log.name=full"])
    told = capsys.readouterr().out
    assert "WARNING: " in told and "step_000005 was not written. It takes 0." in told and "tries again in 5 steps" in told
    assert "the disk is full while writing" in told and f"MB are free in {folder}/checkpoints" in told
    assert names(folder) == ["step_000010", "step_000012"]
    assert_same_losses(folder, whole)


def test_the_last_checkpoint_has_to_be_written(tiny, monkeypatch):
    real, calls = shards.stream, []

    def stream(*arguments):
        calls.append(1)
        return full() if len(calls) == 3 else real(*arguments)

    monkeypatch.setattr(shards, "stream", stream)
    with pytest.raises(checkpoint.NotSaved, match="step_000012 was not written"):
        run(tiny)
    folder = trainer.run_folder(config.load("vit-demo", tiny))
    assert names(folder) == ["step_000005", "step_000010"] and not (folder / ".writer").exists()
    monkeypatch.undo()
    run([*tiny, "log.name=whole"])
    assert_same_losses(run(tiny), folder.with_name("whole"))


def save_on_a_full_disk(folder):
    """What each of two ranks hears when the disk of the second is full; rank 0 writes its piece."""
    import torch
    import torch.distributed as dist

    from course.checkpoint import checkpoint, shards
    from tests.checkpoint.test_checkpoint import STATE, make

    axis = Axis("all", 2, dist.get_rank(), (0, 1), dist.group.WORLD)
    model, optimizer = make()
    serial = serial_layout(model)
    if axis.rank == 1:
        shards.stream = full
    told = ""
    try:
        checkpoint.save(folder, optimizer, STATE, {}, replace(serial, mesh=replace(serial.mesh, all=axis)))
    except checkpoint.NotSaved as error:
        told = str(error)
    dist.all_reduce(torch.ones(1))                   # the ranks are together
    return told


def test_all_ranks_hear_of_one_full_disk_and_nothing_of_the_checkpoint_stays(tmp_path):
    first, second = ranks(2)(save_on_a_full_disk, tmp_path)
    close(2)
    assert first == second and "rank 1: the disk is full while writing" in first and "rank00001.safetensors" in first
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 4 MB, if this user may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(place)], capture_output=True).returncode:
        pytest.skip("mounting a small disk takes root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_is_really_full_loses_no_line_and_no_checkpoint(tiny, small_disk, monkeypatch, capsys):
    """Something else fills the disk to the last byte after step 6 and goes away after step 21."""
    settings = [*tiny, "train.steps=24", "data.workers=0"]
    filler, real = small_disk / "filler", trainer.step_record

    def measure(number, *rest):
        if number == 6:
            with pytest.raises(OSError, match="No space"), open(filler, "wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        if number == 21:
            filler.unlink()
        return real(number, *rest)

    monkeypatch.setattr(trainer, "step_record", measure)
    folder = run([*settings, f"log.dir={small_disk}"])
    told = capsys.readouterr().out
    assert "metrics.jsonl cannot be written (No space left on device)" in told and "step_000010 was not written" in told
    assert names(folder) == ["step_000005", "step_000024"]
    assert_same_losses(folder, run([*settings, "log.name=whole"]))


# --- damaged checkpoints

def test_the_only_whole_checkpoint_is_never_removed_for_damaged_newer_ones(tiny):
    settings = [*tiny, "checkpoint.every=2", "checkpoint.keep=1"]
    folder = run([*settings, "checkpoint.keep=9"])
    for newer in checkpoint.steps(folder / "checkpoints")[2:]:           # 6, 8, 10 and 12
        (newer / "index.json").write_text("damaged")
    kept = []
    real = checkpoint.prune

    def prune(place, keep, saved=None):
        real(place, keep, saved)
        for one in checkpoint.steps(place):
            try:
                checkpoint.read_index(one)
                kept.append(one.name)
            except checkpoint.Damaged:
                pass
        kept.append("")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.checkpoint, "prune", prune)
        run([*settings])
    assert kept == ["step_000006", "", "step_000008", "", "step_000010", "", "step_000012", ""]


# --- the data

def test_a_data_file_that_is_gone_is_named_with_the_cure_also_on_resume(tiny, own_data):
    settings = [*tiny, f"data.path={own_data}", "data.workers=0", "optim.schedule=constant"]
    folder = run(settings)
    before = (folder / "metrics.jsonl").read_bytes()
    (own_data / "train" / "1980.h5").rename(own_data / "elsewhere")
    with pytest.raises(CourseError, match=r"train/1980\.h5 was there when this run began and is missing now: restore it"):
        run([*settings, "train.steps=14"])
    assert (folder / "metrics.jsonl").read_bytes() == before
    run([*settings, "train.steps=14", "checkpoint.same_data=false"])
    assert list(sequence(folder)) == list(range(1, 15))


@pytest.mark.parametrize(("change", "says"), [
    (lambda train: (train / "1980.h5").unlink(), r"1980\.h5 was there .* missing now: restore it"),
    (lambda train: (train / "1980.h5").write_bytes(b"another"), r"1980\.h5 has been written again .* another size: restore it"),
    (lambda train: shutil.copy(train / "1980.h5", train / "1978.h5"), r"1978\.h5 was not there .*: move it away")])
def test_other_data_files_are_refused_also_when_another_loader_goes_on(tiny, own_data, change, says):
    """Who reads, and how far ahead, changes nothing of the order; which files there are does."""
    settings = [*tiny, f"data.path={own_data}", "data.workers=0"]
    run(settings)
    change(own_data / "train")
    with pytest.raises(CourseError, match=f"{says}, or set checkpoint.same_data=false"):
        run([*settings, "train.steps=14", "data.workers=1", "data.ahead=3"])


def test_a_checkpoint_names_the_files_that_its_run_began_with(tiny, own_data, monkeypatch):
    """What is written over a file while it is open is of another training: who goes on would count samples of other data."""
    settings = [*tiny, f"data.path={own_data}", "data.workers=0"]
    real, changed = trainer.save, own_data / "train" / "1980.h5"

    def late(*arguments):
        bytes_ = changed.read_bytes()
        changed.unlink()                             # the run has it open still
        changed.write_bytes(bytes_ + b"more")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "save", late)
        run([*settings, "train.steps=6", "checkpoint.every=6"])
    with pytest.raises(CourseError, match=r"1980\.h5 has been written again"):
        run([*settings, "train.steps=12"])


def test_a_data_file_that_goes_while_training_is_named_with_the_cure(tiny, own_data, monkeypatch):
    """Each file is opened when a sample of it is due; one that is open can still be read."""
    real = trainer.train_loader

    def loader(*arguments):
        batches = real(*arguments)
        (own_data / "train" / "1980.h5").unlink()
        return batches

    monkeypatch.setattr(trainer, "train_loader", loader)
    with pytest.raises(CourseError, match=r"1980\.h5 cannot be opened .* restore the file and run again"):
        run([*tiny, f"data.path={own_data}", "data.workers=0"])


# --- signals at bad moments

MOMENTS = {"the first step": ("measure", 1), "validation": ("validate", 6), "saving": ("save", 5)}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_at_a_bad_moment_is_answered_after_it(tiny, monkeypatch, moment, number):
    if number == signal.SIGTERM and moment != "saving":
        pytest.skip("the same code as for SIGUSR1")
    settings = [*tiny, "train.eval_every=6", "data.workers=0"]
    whole = run([*settings, "log.name=whole"])
    name, _ = MOMENTS[moment]
    target, name = {"measure": (trainer, "step_record"), "validate": (trainer.Validation, "run"),
                    "save": (checkpoint, "publish")}[name]
    real, calls = getattr(target, name), []

    def interrupted(*arguments):
        if not calls:
            calls.append(1)
            for _ in range(2):                       # the second changes nothing
                os.kill(os.getpid(), number)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(target, name, interrupted)
        folder, stopped = trainer.train(config.load("vit-demo", settings))
    assert stopped and 1 <= len(sequence(folder)) < 12
    assert trainer.train(config.load("vit-demo", settings)) == (folder, False)
    assert_same_losses(folder, whole)
    valid = [[record.get("valid_loss") for record in read_metrics(one / "metrics.jsonl")] for one in (folder, whole)]
    assert valid[0] == valid[1]


# --- fewer ranks

def train_here(settings):
    """On each rank."""
    return trainer.main(config.load("vit-demo", settings))


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "rel"), [("fp64", 1e-12), ("fp32", 2e-6)])
def test_half_the_ranks_go_on_to_the_same_losses(small_data, tmp_path, precision, rel):
    """Four ranks lose two after step 5: another order of sums. The bound in float32 is 16 roundings of 2^-23 over 7 steps."""
    settings = [*tiny_settings(small_data, tmp_path), f"precision={precision}", "optim.name=sgd", "optim.lr=0.1",
                "data.workers=0"]
    whole = ranks(4, timeout=180)(train_here, [*settings, "log.name=whole"])[0]
    half = Path(shutil.copytree(whole, whole.with_name("half")))
    for newer in checkpoint.steps(half / "checkpoints")[1:]:
        shutil.rmtree(newer)
    assert ranks(2, timeout=180)(train_here, [*settings, "log.name=half"])[0] == half
    assert_same_losses(half, whole, rel)
    same = Path(shutil.copytree(whole, whole.with_name("same")))
    for newer in checkpoint.steps(same / "checkpoints")[1:]:
        shutil.rmtree(newer)
    ranks(4, timeout=180)(train_here, [*settings, "log.name=same"])
    close()
    assert_same_losses(same, whole)                  # in the same layout bit for bit


# --- all of it, many times

@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_has_the_losses_of_one_that_is_not(tmp_path):
    """Two ranks, killed, preempted and damaged at random moments (tests/soak.py). COURSE_SOAK=2000 for so many steps."""
    command = [sys.executable, "-m", "tests.soak", os.environ.get("COURSE_SOAK", "60"), "1", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
