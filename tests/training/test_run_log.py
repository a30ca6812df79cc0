"""What a run writes stays whole, whoever removes, renames or replaces it meanwhile."""

import errno
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from course import config
from course.training import trainer
from course.training.run_log import Lines, read_metrics, time_left
from course.utils.errors import CourseError
from tests.faults import assert_same_losses, finish, start


def run(settings: list[str]) -> Path:
    return trainer.main(config.load("vit-demo", settings))


def befall(monkeypatch: pytest.MonkeyPatch, step: int, action) -> None:
    """Do something when a step of a run is measured."""
    real = trainer.step_record

    def measure(number, *rest):
        if number == step:
            action()
        return real(number, *rest)

    monkeypatch.setattr(trainer, "step_record", measure)


@pytest.fixture(scope="module")
def whole(small_data, tmp_path_factory):
    from tests.conftest import tiny_settings

    return run([*tiny_settings(small_data, tmp_path_factory.mktemp("whole") / "runs"), "log.name=whole"])


@pytest.mark.parametrize("step", [3, 12])
@pytest.mark.parametrize("lost", ["", "config.yaml", "metrics.jsonl", "tensorboard", "checkpoints"])
@pytest.mark.parametrize("how", ["remove", pytest.param("rename", marks=pytest.mark.slow)])
def test_what_is_removed_while_training_is_written_again(tiny, monkeypatch, capsys, whole, lost, how, step):
    """The steps before are in metrics.jsonl, too; step 12 is the last."""
    settings = [*tiny, "log.tensorboard=true", "checkpoint.every=2"]
    folder = trainer.run_folder(config.load("vit-demo", settings))
    victim, aside = folder / lost, folder.parent / "aside"

    def action():
        if how == "rename":
            victim.rename(aside)
        elif victim.is_dir():
            shutil.rmtree(victim)
        else:
            victim.unlink()

    befall(monkeypatch, step, action)
    assert run(settings) == folder
    assert_same_losses(folder, whole)
    assert config.load(str(folder / "config.yaml")) == config.load("vit-demo", settings)
    assert list((folder / "tensorboard").glob("events*")) and (folder / "checkpoints/step_000012/index.json").is_file()
    told = capsys.readouterr().out
    assert "removed or renamed while training" in told and (lost in told or lost == "checkpoints")
    assert not (folder / ".writer").exists() and not (folder / ".ranks").exists()


def test_a_run_whose_folder_cannot_be_written_again_fails(tiny, monkeypatch):
    folder = trainer.run_folder(config.load("vit-demo", tiny))

    def action():
        shutil.rmtree(folder.parent)
        folder.parent.write_text("")                 # in the way

    befall(monkeypatch, 12, action)
    with pytest.raises(CourseError, match=r"was removed or renamed|was not written"):
        run(tiny)


def test_the_newest_checkpoint_is_missed(tiny, monkeypatch, capsys):
    folder = trainer.run_folder(config.load("vit-demo", tiny))
    befall(monkeypatch, 7, lambda: shutil.rmtree(folder / "checkpoints"))
    run(tiny)
    assert "checkpoints/step_000005 was removed or renamed while training, and is the newest" in capsys.readouterr().out


@pytest.mark.slow
def test_two_ranks_go_on_when_their_folder_is_renamed(small_data, tmp_path, whole):
    """The next start finds all in the folder of that name, and meanwhile a writer."""
    from tests.conftest import tiny_settings

    settings = [*tiny_settings(small_data, tmp_path / "runs"), "log.name=two", "train.steps=60"]
    folder = trainer.run_folder(config.load("vit-demo", settings))
    processes = start(["tests.faults", "pause", "0", "6", *settings], 2)
    try:
        until(lambda: len(read_metrics(folder / "metrics.jsonl")) >= 6)
        folder.rename(folder.with_name("aside"))
        until(lambda: (folder / ".writer").is_file() and (folder / ".ranks/00001").is_file())
        ended = finish(processes)
    finally:
        for process in processes:
            process.kill()
    assert [code for code, _ in ended] == [0, 0], ended
    assert [record["step"] for record in read_metrics(folder / "metrics.jsonl")] == list(range(1, 61))
    assert (folder / "config.yaml").is_file() and (folder / "checkpoints/step_000060/index.json").is_file()


def until(so, seconds=60.0):
    end = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_lines_that_somebody_took_out_come_back_and_those_of_others_stay(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = Lines(file)
    for number in range(4):
        lines.add(f"{number}\n")
    assert not lines.restore()
    os.truncate(file, 4)
    assert lines.restore() and file.read_text() == "0\n1\n2\n3\n"
    editor = tmp_path / "new"
    editor.write_text("0\nmine")                     # as an editor saves: another file of that name
    editor.rename(file)
    assert lines.restore() and file.read_text() == "0\nmine\n1\n2\n3\n"
    lines.add("4\n")
    assert not lines.restore() and file.read_text().endswith("3\n4\n")
    lines.close()


@pytest.mark.parametrize("left", [None, b"", b'{"step": 1, "loss": 1.0}\n'])
def test_steps_without_a_record_are_told_when_a_run_goes_on(tiny, capsys, left):
    folder = run([*tiny, "train.steps=6"])
    assert "has no record" not in capsys.readouterr().out
    file = folder / "metrics.jsonl"
    file.unlink() if left is None else file.write_bytes(left)
    run([*tiny, "train.steps=8"])
    first = 2 if left else 1
    assert f"{file} has no record of the steps {first} to 6, which are done" in capsys.readouterr().out
    run([*tiny, "train.steps=9", "log.every=5"])
    assert "has no record" not in capsys.readouterr().out


PLACES = {"config.yaml": "file", "metrics.jsonl": "file", ".writer": "file", ".ranks/00000": "file", ".ranks/00000.stack": "file",
          "checkpoints": "folder", "tensorboard": "folder", "profile": "folder"}


@pytest.mark.parametrize("kind", ["pipe", "socket", "link", "folder"])
@pytest.mark.parametrize("name", PLACES)
def test_what_is_no_file_where_one_belongs_is_a_sentence(tiny, tmp_path, name, kind, interrupted):
    if PLACES[name] == kind:
        kind = "file"
    path = trainer.run_folder(config.load("vit-demo", tiny)) / name
    path.parent.mkdir(parents=True)
    if kind == "socket":
        before = os.getcwd()
        os.chdir(path.parent)                        # a socket's path has at most 107 letters
        socket.socket(socket.AF_UNIX).bind(path.name)
        os.chdir(before)
    {"pipe": os.mkfifo, "folder": Path.mkdir, "link": lambda path: path.symlink_to("nowhere"), "file": Path.touch,
     "socket": lambda path: None}[kind](path)
    with pytest.raises(CourseError, match=f"{path} is a .*: move it away"):
        run(tiny)


def test_a_pipe_in_a_checkpoint_does_not_hold_the_run(tiny, capsys, interrupted):
    folder = run([*tiny, "train.steps=6", "checkpoint.every=3"])
    index = folder / "checkpoints/step_000006/index.json"
    index.unlink()
    os.mkfifo(index)
    run(tiny)
    assert "passing over a checkpoint" in capsys.readouterr().out and (folder / "checkpoints/step_000012").is_dir()


@pytest.fixture
def interrupted():
    """A test that hangs fails."""
    def late(*_):
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("add", ["add_scalar", "add_figure"])
def test_a_board_that_cannot_be_written_ends_no_training(tiny, monkeypatch, capsys, add):
    from torch.utils.tensorboard import SummaryWriter

    def full(*_args, **_more):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SummaryWriter, add, full)
    folder = run([*tiny, "train.steps=6", "log.tensorboard=true", "train.eval_every=3"])
    assert "tensorboard cannot be written (No space left on device)" in capsys.readouterr().out
    assert [record["step"] for record in read_metrics(folder / "metrics.jsonl")] == list(range(1, 7))


@pytest.mark.parametrize(("step", "ms", "said"), [
    (900, 100.0, ""), (100, 100.0, "about 2 minutes left"), (100, 1000.0, "about 15 minutes left"),
    (100, 10_000.0, "about 2.5 hours left"), (1000, 1e6, "")])
def test_how_long_it_takes_is_said_if_it_is_a_minute_or_more(step, ms, said):
    assert time_left({"step": step, "step_ms": ms}, 1000) == said
