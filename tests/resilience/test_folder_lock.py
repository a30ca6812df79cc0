"""One job writes a run; a dead one bars nobody for long."""

import json
import os
import subprocess
import threading
import time
from dataclasses import asdict, replace

import pytest

from course import config
from course.parallel import Axis
from course.resilience import folder_lock
from course.resilience.folder_lock import Lock, this_writer
from course.training import trainer
from course.utils.errors import CourseError


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in (("BEAT", 0.05), ("SILENT", 0.6), ("SETTLE", 0.2)):
        monkeypatch.setattr(folder_lock, name, seconds)


def held_by(run, **changes):
    run.mkdir(parents=True, exist_ok=True)
    (run / ".writer").write_text(json.dumps(asdict(replace(this_writer(), token="another", **changes))))


def seconds_to_take(run):
    begin, mine = time.monotonic(), Lock(run)
    mine.take()
    taken = time.monotonic() - begin
    assert mine.held()
    mine.release()
    assert not (run / ".writer").exists()
    return taken


def test_a_second_job_is_refused_and_told_who_writes(tmp_path):
    first = Lock(tmp_path / "runs" / "x")
    first.take()
    try:
        with pytest.raises(CourseError) as caught:
            Lock(first.folder).take()
    finally:
        first.release()
    since = time.strftime("%Y-%m-%d", time.localtime())
    assert f"is being written by process {os.getpid()} on {first.me.host}, since {since}" in str(caught.value)
    assert "another log.name" in str(caught.value) and not first.folder.exists()
    assert seconds_to_take(first.folder) < 0.5


def test_a_training_run_is_refused_before_it_changes_anything(tiny):
    settings = config.load("vit-demo", tiny)
    run = trainer.run_folder(settings)
    first = Lock(run)
    first.take()
    with pytest.raises(CourseError, match="is being written by process"):
        trainer.main(settings)
    assert [path.name for path in run.iterdir()] == [".writer"]
    first.release()


def test_a_place_that_takes_no_run_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CourseError, match=r"cannot write .*file.*; choose a folder that you may write to"):
        Lock(tmp_path / "file" / "run").take()


def test_a_silent_holder_elsewhere_is_replaced_after_a_while(tmp_path, capsys):
    held_by(tmp_path, host="elsewhere", job="12")
    assert 0.6 <= seconds_to_take(tmp_path) < 5
    assert "was being written by process" in (told := capsys.readouterr().out) and "(Slurm job 12)" in told


def test_a_dead_process_of_this_host_and_an_older_one_of_the_same_number_bar_nobody(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    held_by(tmp_path, pid=gone.pid)
    assert seconds_to_take(tmp_path) < 0.5
    held_by(tmp_path, began=1.0)                     # this process has the number now
    assert seconds_to_take(tmp_path) < 0.5
    held_by(tmp_path, pid=gone.pid, space="pid:[1]")             # of a container, where numbers mean something else
    assert seconds_to_take(tmp_path) >= 0.6


@pytest.mark.parametrize(("before", "now", "at_once"), [("", "1", True), ("1", "2", True), ("1", "1", False)])
def test_a_requeued_job_takes_over_at_once(tmp_path, monkeypatch, before, now, at_once):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", now)
    held_by(tmp_path, host="elsewhere", job="77", restart=before)
    assert (seconds_to_take(tmp_path) < 0.5) == at_once


def test_of_two_who_take_over_at_the_same_time_one_is_refused(tmp_path):
    held_by(tmp_path, host="elsewhere")
    mine, refused = [Lock(tmp_path), Lock(tmp_path)], []

    def attempt(one):
        try:
            one.take()
        except CourseError as error:
            refused.append(error)

    threads = [threading.Thread(target=attempt, args=(one,)) for one in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.held() for one in mine].count(True) == 1 and len(refused) == 1
    for one in mine:
        one.release()


def test_who_slept_too_long_and_lost_its_run_ends(tmp_path, monkeypatch, capsys):
    ended = threading.Event()
    monkeypatch.setattr(folder_lock.os, "_exit", lambda status: ended.set())
    sleeper = Lock(tmp_path)
    sleeper.take()
    held_by(tmp_path, pid=4711, host="n9")
    assert ended.wait(30)
    sleeper.release()
    assert (tmp_path / ".writer").exists()           # it is not its own any more
    assert "has been taken over by process 4711 on n9" in capsys.readouterr().err


def test_nothing_is_left_of_a_run_that_fails_at_once_and_of_a_half_written_lock(tmp_path):
    run = tmp_path / "preset" / "name"
    with pytest.raises(ZeroDivisionError), folder_lock.only_writer(run, Axis("all")):
        _ = 1 / 0
    assert not run.parent.exists()
    run.mkdir(parents=True)
    (run / ".writer").touch()
    assert 0.6 <= seconds_to_take(run) < 5


@pytest.mark.parametrize("before", ["nobody", "a dead process"])
def test_a_lock_that_a_full_disk_does_not_take_is_a_sentence_and_leaves_nothing(tmp_path, monkeypatch, before):
    gone = subprocess.Popen(["true"])
    gone.wait()
    if before != "nobody":
        held_by(tmp_path, pid=gone.pid)
    there = sorted(tmp_path.iterdir())

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folder_lock.json, "dumps", full)      # when its file is there, and empty
        with pytest.raises(CourseError, match=r"cannot write .*writer.* \(No space left on device\)"):
            Lock(tmp_path).take()
    assert sorted(tmp_path.iterdir()) == there
    assert seconds_to_take(tmp_path) < 0.5


def test_who_wants_the_same_data_waits_until_it_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(folder_lock, "SILENT", 1.5)         # a busy machine may be late with a sign of life
    began, order = threading.Event(), []

    def make(name, seconds):
        with folder_lock.only_maker(tmp_path / "data"):
            began.set()
            order.append(f"{name} begins")
            time.sleep(seconds)
            order.append(f"{name} ends")

    first = threading.Thread(target=make, args=("first", 2 * folder_lock.SILENT))   # longer than without a sign of life
    first.start()
    assert began.wait(10)
    make("second", 0)
    first.join()
    assert order == ["first begins", "first ends", "second begins", "second ends"]
    assert capsys.readouterr().out.count(f"data is being made by process {os.getpid()} on ") == 1
    assert not (tmp_path / "data").exists()


def test_a_maker_that_was_killed_bars_nobody(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    held_by(tmp_path, pid=gone.pid)
    begin = time.monotonic()
    with folder_lock.only_maker(tmp_path):
        assert time.monotonic() - begin < 0.5
