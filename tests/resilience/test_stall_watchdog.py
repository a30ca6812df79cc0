"""A run in which a rank stalls or dies ends by itself, and says who it was."""

import json
import signal
import subprocess
import threading
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from course import config
from course.parallel import World
from course.ranks.notebook_ranks import close, ranks
from course.resilience import stall_watchdog
from course.resilience.stall_watchdog import Record, Watchdog
from course.training import assemble, trainer
from course.utils.errors import CourseError
from tests.conftest import tiny_settings
from tests.faults import finish, start


class Ended(BaseException):
    """Instead of the end of this process."""


@pytest.fixture
def ends(monkeypatch):
    def end(status):
        raise Ended(status)

    monkeypatch.setattr(stall_watchdog.os, "_exit", end)
    monkeypatch.setattr(stall_watchdog, "GRACE", 0.0)


def others(run, *records):
    for record in records:
        path = stall_watchdog.record_path(run, record.rank)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(asdict(record)))


WAITS = "all_reduce of (3,) (gloo, number 9 of group dp)"


def rank(number, **more):
    return Record(number, "n2", 4000 + number, **{"beat": 7, "time": 1e9, "step": 5, "doing": "in its step", "since": 1e9} | more)


def stuck_one(run, size, me=0):
    """The watchdog of a rank that waits in a collective, with no thread: the test takes its part."""
    dog = Watchdog(run, World(me, size), stall_s=0.1)
    dog._main = threading.get_ident()
    (run / ".ranks").mkdir(exist_ok=True)
    dog.at(5, "in its step")
    dog._write(stuck=True, place="line 1 of step.py: `all_reduce()`", waits=WAITS)
    return dog


def test_who_is_still_within_its_time_excuses_all_who_wait_for_it(tmp_path, ends):
    dog = stuck_one(tmp_path, 3)
    others(tmp_path, rank(1, stuck=True, waits="all_reduce"), rank(2, doing="saving"))
    dog._decide()                                    # rank 2 saves: nothing happens
    others(tmp_path, rank(2, doing="saving", stuck=True, beat=8))
    with pytest.raises(Ended):
        dog._decide()


def test_the_one_that_comes_to_no_collective_is_named_with_its_stack_and_who_waits_where(tmp_path, ends, capsys):
    dog = stuck_one(tmp_path, 3)
    others(tmp_path, rank(1, stuck=True, waits=WAITS, place=dog.record.place),
           rank(2, stuck=True, doing="waiting for data", place="line 9 of native.py: `sleep()`", stack="  File native.py"))
    with pytest.raises(Ended):
        dog._decide()
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("course: this run has stalled: rank 2 (process 4002 of n2) is at step 5, waiting for data since ")
    assert told[0].endswith("in line 9 of native.py: `sleep()`")
    assert told[1] == f"  ranks 0 and 1 wait at step 5 in {WAITS}, line 1 of step.py: `all_reduce()`"
    assert "train.stall_s" in told[2] and told[3:] == ["the stack of rank 2:", "  File native.py"]


def test_one_that_writes_no_more_is_named_once_it_has_missed_three_records(tmp_path, ends, capsys):
    dog = stuck_one(tmp_path, 2)
    others(tmp_path, rank(1, step=4, doing="waiting for data"))
    dog._decide()                                    # it may be about to write
    time.sleep(stall_watchdog.MISSED * dog.period)
    with pytest.raises(Ended):
        dog._decide()
    assert "rank 1 (process 4001 of n2) does not answer: it is stopped, or its node is gone" in capsys.readouterr().err


def test_only_the_lowest_that_answers_tells_and_the_others_follow(tmp_path, ends, capsys):
    dog = stuck_one(tmp_path, 3, me=1)
    others(tmp_path, rank(0, stuck=True, waits="x"), rank(2, stuck=True))
    dog._decide()
    assert not capsys.readouterr().err               # rank 0 will tell
    others(tmp_path, rank(0, stuck=True, waits="x", end="told that the run cannot go on", beat=8))
    with pytest.raises(Ended):
        dog._decide()
    assert not capsys.readouterr().err


def test_ranks_that_all_wait_but_not_for_the_same_are_shown(tmp_path):
    records = {0: rank(0, waits="send", place="a", stack="A"), 1: rank(1, waits="all_gather", place="b", stack="B")}
    lines = stall_watchdog.stall_report(tmp_path, records, set(), 5)
    assert "not in the same collective" in lines[0] and "rank 0 waits at step 5 in send, a" in lines[1]
    assert "rank 1 waits at step 5 in all_gather, b" in lines[2] and lines[-1] == "B"


def test_who_is_behind_is_named_though_the_recorder_takes_all_for_waiting(tmp_path):
    """As in CUDA graphs, where no collective is ever marked as done."""
    records = {0: rank(0, waits="all_reduce"), 1: rank(1, waits="all_reduce", doing="waiting for data"), 2: rank(2, waits="x")}
    lines = stall_watchdog.stall_report(tmp_path, records, set(), 5)
    assert "stalled: rank 1 (process 4001 of n2) is at step 5, waiting for data" in lines[0] and "rank 0 waits" in lines[1]


def test_a_half_written_record_is_none_and_a_full_disk_keeps_the_old_size(tmp_path):
    dog = stuck_one(tmp_path, 1)
    path = stall_watchdog.record_path(tmp_path, 0)
    assert path.stat().st_size == stall_watchdog.SIZE and stall_watchdog.read_record(tmp_path, 0) == dog.record
    dog._write()                                     # no longer stuck: the long one is blanked, then a short one is enough
    dog._write()
    assert path.stat().st_size == stall_watchdog.SIZE and stall_watchdog.read_record(tmp_path,
                                                                                     0) == dog.record and not dog.record.place
    path.write_bytes(path.read_bytes()[:50])
    assert stall_watchdog.read_record(tmp_path, 0) is None


def test_a_stack_of_letters_that_are_not_ascii_leaves_room_and_nothing_behind(tmp_path):
    """A record that is longer than its place would leave its end behind the next one, and that rank would count as silent."""
    dog = stuck_one(tmp_path, 1)
    dog._write(stuck=True, place="Ж" * 9000, waits=WAITS, stack="".join(f"  Файл модель.py, строка {n}\n" for n in range(360)))
    assert stall_watchdog.record_path(tmp_path, 0).stat().st_size == stall_watchdog.SIZE
    found = stall_watchdog.read_record(tmp_path, 0)
    assert found.waits == WAITS and len(found.stack) > 1000 and found.stack.endswith("строка 359\n")
    for _ in range(2):
        dog._write()
        assert stall_watchdog.read_record(tmp_path, 0) == dog.record


def test_a_file_system_that_does_not_answer_ends_no_watch(tmp_path):
    dog = stuck_one(tmp_path, 1)

    class Stale:
        def truncate(self, size):
            raise OSError(116, "Stale file handle")

    dog._dump = Stale()
    dog._over = SimpleNamespace(wait=lambda seconds: dog.record.beat > 3)        # the thread's life, three beats of it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stall_watchdog.faulthandler, "dump_traceback_later", lambda *_, **__: None)
        patch.setattr(Watchdog, "_decide", lambda self: None)
        dog._watch()
    assert dog.record.beat == 4


def test_records_of_an_earlier_larger_world_are_forgotten_and_a_clean_end_leaves_none(tmp_path):
    run = tmp_path / "preset" / "run"
    others_run = run / ".ranks"
    others_run.mkdir(parents=True)
    others(run, rank(3))
    (run / "metrics.jsonl").touch()
    with Watchdog(run, World(), 5.0):
        assert [path.name for path in sorted(others_run.iterdir())] == ["00000", "00000.stack"]
    assert [path.name for path in run.iterdir()] == ["metrics.jsonl"]


def test_what_is_left_of_a_killed_start_says_nothing_of_this_one(tmp_path, ends, capsys):
    """Its ranks are dead; the new rank 1 has not written yet, or a slow file system still shows what was there before."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    dog = stuck_one(tmp_path, 2)
    old = replace(rank(1), host=dog.record.host, pid=gone.pid, space=dog.record.space)
    others(tmp_path, replace(old, start="the one before"))
    dog._check_neighbor()
    assert dog._check_rank(1) == (None, True) and not capsys.readouterr().err
    others(tmp_path, old)                            # of this start: it is dead
    with pytest.raises(Ended):
        dog._check_neighbor()
    assert f"rank 1 (process {gone.pid} of {old.host}) is gone" in capsys.readouterr().err


@pytest.fixture
def reads(monkeypatch):
    """The ranks whose records are read, in order."""
    real, found = stall_watchdog.read_record, []
    monkeypatch.setattr(stall_watchdog, "read_record", lambda run, rank: [found.append(rank), real(run, rank)][1])
    return found


LOST = RuntimeError("Connection closed by peer")


def test_of_those_left_the_lowest_reads_all_records_and_the_others_its_own(tmp_path, reads, capsys):
    """Of 100 ranks the first is killed. Were all records read by all, these would be 10,000 reads five times a second."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    dogs = [stuck_one(tmp_path, 100, me) for me in (1, 99)]
    for dog in dogs:
        dog.period = 2.0
    dead = replace(rank(0), host=dogs[0].record.host, pid=gone.pid, space=dogs[0].record.space)
    others(tmp_path, dead, rank(1, end="lost another rank"), *[rank(number) for number in range(2, 99)])
    with pytest.raises(SystemExit):
        dogs[1]._report_lost_rank(LOST)
    assert len(reads) <= 4 and max(reads) <= 2 and not capsys.readouterr().err
    reads.clear()
    with pytest.raises(CourseError, match=rf"rank 0 \(process {gone.pid} of .*\) is gone: it was killed"):
        dogs[0]._report_lost_rank(LOST)
    assert set(reads) == {0, *range(2, 100)}


def test_whoever_loses_a_rank_that_has_told_why_gives_way(tmp_path, capsys):
    dog = stuck_one(tmp_path, 3, me=2)
    others(tmp_path, rank(0, end="failed: ValueError: no"), rank(1))
    with pytest.raises(SystemExit):
        dog._report_lost_rank(LOST)
    assert capsys.readouterr().err == "another rank has failed: this one ends, too\n"


def test_a_note_of_what_begins_costs_next_to_nothing(tmp_path):
    dog = Watchdog(tmp_path, World(), 600.0)
    begin = time.thread_time()                       # of the processor: others use it, too
    for number in range(10_000):
        dog.at(number, "in its step")
    assert (time.thread_time() - begin) / 10_000 < 20e-6       # seconds; a step takes thousands of times that


@pytest.mark.slow
def test_the_flight_recorder_tells_which_collective_is_not_complete(monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")           # as `join` sets it
    close(2)

    def wait_for_the_last():
        import time

        import torch
        import torch.distributed as dist

        from course.resilience.stall_watchdog import pending_collective

        def settled():
            """The recorder learns of an end a moment after who waited for it."""
            end = time.monotonic() + 5
            while (told := pending_collective()) and time.monotonic() < end:
                time.sleep(0.02)
            return told

        x = torch.ones(2, 3)
        dist.all_reduce(x)
        before = settled()
        if dist.get_rank() == 1:
            time.sleep(1)
        work = dist.all_reduce(x, async_op=True)
        time.sleep(0.3)
        during = pending_collective()
        work.wait()
        return before, during, settled()

    first, second = ranks(2)(wait_for_the_last)
    close(2)
    assert first[0] == first[2] == "" and second == ("", "", "")
    assert first[1].startswith("all_reduce of (2, 3) (gloo, number 2 of group")


def wait_for_another_rank():
    """What rank 0 hears of the group of all and of another one when it has waited for 0.3 s. Rank 1 comes too late."""
    import time

    import torch
    import torch.distributed as dist

    from course.parallel.mesh import wait_at_most

    groups, told = [dist.group.WORLD, dist.new_group([0, 1])], []
    wait_at_most(0.3)
    if dist.get_rank() == 1:
        time.sleep(1)
    for group in groups:
        begin = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            told.append(f"{error}" if time.monotonic() - begin < 25 else "late")
    return told


@pytest.mark.slow
def test_pytorchs_own_limit_is_what_it_is_told_and_follows_stall_s(tiny, monkeypatch):
    told = ranks(2, timeout=90)(wait_for_another_rank)[0]
    close(2)                                         # their groups are broken
    assert len(told) == 2 and all("imed out" in text for text in told), told
    waits = []
    monkeypatch.setattr(trainer, "wait_at_most", waits.append)
    for seconds in (600, 2, 0):
        trainer.main(config.load("vit-demo", [*tiny, "train.steps=1", f"train.stall_s={seconds}", f"log.name=s{seconds}",
                                            "data.workers=0"]))
    assert waits == [7200.0, 1800.0]


@pytest.mark.slow
def test_compiling_validating_and_saving_are_no_stalls(tiny, monkeypatch, ends):
    """Each takes longer than a step may take."""
    real_step, real_save, real_validation = assemble.train_step, trainer.checkpoint.save, trainer.Validation.run
    done, judged = [], []

    def slowly(function):
        def call(*arguments):
            time.sleep(2.5)
            return function(*arguments)
        return call

    def first_slow(*arguments):
        step = real_step(*arguments)

        def one(batch):
            if not done:
                time.sleep(2.5)
            done.append(1)
            return step(batch)
        return one

    monkeypatch.setattr(assemble, "train_step", first_slow)
    monkeypatch.setattr(trainer.checkpoint, "save", slowly(real_save))
    monkeypatch.setattr(trainer.Validation, "run", slowly(real_validation))
    monkeypatch.setattr(stall_watchdog.Watchdog, "_decide", judged.append)
    folder = trainer.main(config.load("vit-demo", [*tiny, "train.steps=3", "train.stall_s=1.5", "data.workers=0"]))
    assert len(done) == 3 and not judged and not (folder / ".ranks").exists()


FIRST = {"loop": "is at step 4, waiting for data since", "stop": "does not answer: it is stopped, or its node is gone",
         "hold": "does not answer: its training thread holds Python's lock"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FIRST)
def test_a_rank_that_stalls_ends_the_run_which_names_it(small_data, tmp_path, fault):
    settings = [*tiny_settings(small_data, tmp_path), "train.steps=400", "data.workers=0", "checkpoint.every=3", "log.name=stall",
                "train.stall_s=2"]
    begin = time.monotonic()
    processes = start(["tests.faults", fault, "1", "4", *settings], 2)
    told = finish(processes, stopped=1 if fault != "loop" else None)
    assert time.monotonic() - begin < 120
    assert told[0][0] == 1 and (fault != "loop" or told[1][0] == 1)
    lines = told[0][1][told[0][1].index("course: "):].splitlines()
    assert lines[0].startswith(f"course: this run has stalled: rank 1 (process {processes[1].pid} of "), lines[0]
    assert FIRST[fault] in lines[0] and "`dist.all_reduce(weight, group=dp.group)`" in lines[1]
    assert lines[1].startswith("  rank 0 waits at step 4 in all_reduce of () (gloo, number ")
    assert "goes on from" in lines[2] and "step_000003" in lines[2]
    wanted = {"loop": "in suffer", "hold": "in suffer"}.get(fault)
    assert wanted is None or any(wanted in line for line in lines[3:])


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "stall_s", "ranks"), [("stop", 2, 2), ("hold", 2, 2), ("stop", 600, 3)])
def test_a_stopped_rank_ends_with_the_run_whoever_started_it(small_data, tmp_path, fault, stall_s, ranks):
    """With no launcher above them. Of three, one is killed while another one is stopped: nobody waits for it any more."""
    settings = [*tiny_settings(small_data, tmp_path), "train.steps=400", "data.workers=0", "train.global_batch=6",
                f"train.stall_s={stall_s}"]
    processes = start(["tests.faults", fault, "1", "4", *settings], ranks)
    try:
        if ranks == 3:
            end = time.monotonic() + 60
            while not stall_watchdog.is_stopped(processes[1].pid):
                assert time.monotonic() < end
                time.sleep(0.1)
            processes[2].kill()
        assert processes[1].wait(timeout=90) == -signal.SIGKILL
        assert processes[0].wait(timeout=30) == 1
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_by_one_of_the_others(small_data, tmp_path):
    settings = [*tiny_settings(small_data, tmp_path), "train.steps=400", "data.workers=0", "train.global_batch=6"]
    processes = start(["tests.faults", "kill", "1", "4", *settings], 3)
    told = finish(processes)
    assert [status for status, _ in told] == [1, -9, 1]
    lines = [line for line in told[0][1].splitlines() if not line.startswith(("step", "vit-demo"))]
    assert lines[0].startswith(f"course: rank 1 (process {processes[1].pid} of {stall_watchdog.node()}) is gone")
    assert len(lines) == 1 and "gone" not in told[2][1] and "Traceback" not in told[2][1]
