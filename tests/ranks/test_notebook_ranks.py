"""The launcher on real ranks; almost all share one pool of two, which every failure replaces."""

import linecache
import os
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.nn import functional as differentiable

from course.config import Parallel
from course.parallel import build_mesh, join, leave
from course.ranks.fork_server import FORKS
from course.ranks.notebook_ranks import RankError, close, ranks

CELL = '''\
import torch
import torch.distributed as dist

scale = 10

class Point:
    def __init__(self, x):
        self.x = x

def helper(rank):
    if rank == scale:
        raise LookupError("no such rank")            # the line to blame
    return Point(rank * scale)

def cell(offset=0):
    return helper(dist.get_rank() + offset)
'''


@pytest.fixture(scope="module", autouse=True)
def no_ranks_left():
    yield
    pids = ranks(2)(os.getpid)
    close()
    assert not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def failure(function, *args, timeout: float = 30.0, within: float = 12.0, size: int = 2) -> RankError:
    """What the launcher says of a function that goes wrong on two ranks; all of them are gone, and the next call works."""
    before = ranks(size)(os.getpid)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(size, timeout=timeout)(function, *args)
    assert time.monotonic() - start < within
    assert not any(map(alive, before))
    assert ranks(size)(dist.get_rank) == list(range(size))
    return caught.value


def notebook() -> dict:
    """The names that a notebook's cell defined: its source is in no file, only in linecache."""
    file = "/tmp/ipykernel_1/2345.py"
    linecache.cache[file] = (len(CELL), None, CELL.splitlines(keepends=True), file)
    names = {"__name__": "__main__"}
    exec(compile(CELL, file, "exec"), names)
    return names


def times_rank(x, more=0):
    return x * dist.get_rank() + more


def test_results_come_in_the_order_of_the_ranks():
    assert ranks(2)(times_rank, 10) == [0, 10]
    assert ranks(2)(times_rank, 10, more=1) == [1, 11]


def test_as_a_decorator_the_name_is_the_results():
    @ranks(2)
    def totals():
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        return total

    assert totals == [torch.tensor([3.0])] * 2


def test_four_ranks_with_a_mesh_and_subgroups():
    def layout():
        world = join("cpu")
        mesh = build_mesh(Parallel(dp=2, tp=2), world)
        sums = []
        for axis in (mesh.tp, mesh.dp, mesh.all):
            value = torch.tensor(float(world.rank))
            dist.all_reduce(value, group=axis.group)
            sums.append(int(value))
        even = dist.new_group([0, 2])
        if world.rank % 2 == 0:
            dist.barrier(group=even)                 # not the others' business
        return world.rank, mesh.tp.ranks, sums

    try:
        assert ranks(4)(layout) == [(0, (0, 1), [1, 2, 6]), (1, (0, 1), [1, 4, 6]),
                                    (2, (2, 3), [5, 2, 6]), (3, (2, 3), [5, 4, 6])]
    finally:
        close(4)


def test_a_function_of_a_cell_brings_its_globals_and_classes():
    names = notebook()
    points = ranks(2)(names["cell"])
    assert [point.x for point in points] == [0, 10]
    assert all(isinstance(point, names["Point"]) for point in points)
    names["scale"] = 7                               # as if the cell had been edited and executed again
    assert [point.x for point in ranks(2)(names["cell"])] == [0, 7]


def test_the_pool_stays_warm():
    pids = ranks(2)(os.getpid)
    start = time.monotonic()
    assert ranks(2)(os.getpid) == pids and os.getpid() not in pids
    assert time.monotonic() - start < 1.0            # a cold one takes seconds


@pytest.mark.slow
def test_new_ranks_come_of_the_same_seed_unless_pytorch_would_find_other_variables(monkeypatch):
    """They have the environment and the path of now, and as many pipes as need several messages."""
    def found():
        return os.environ.get("COURSE_NOW"), "/now" in sys.path, psutil.Process(os.getppid()).ppid()

    def anew():
        close()
        return ranks(2)(found)

    seed = anew()[0][2]
    monkeypatch.setenv("COURSE_NOW", "now")
    monkeypatch.syspath_prepend("/now")
    monkeypatch.setattr("course.ranks.fork_server.MOST", 3)
    assert anew() == [("now", True, seed)] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    other = anew()[0][2]
    assert other != seed and not alive(seed)
    psutil.Process(other).kill()
    psutil.Process(other).wait(10)
    assert anew()[0][2] not in (seed, other)


@pytest.mark.slow
def test_a_seed_that_was_interrupted_or_is_gone_is_not_asked_again(monkeypatch):
    """Its answer to what was given up would be taken for that to the next question."""
    ranks(2)(os.getpid)
    for name, error, seen in (("read", KeyboardInterrupt, KeyboardInterrupt), ("ask", EOFError, RankError)):
        close()
        with monkeypatch.context() as patch, pytest.raises(seen):
            patch.setattr(f"course.ranks.fork_server.{name}", mock.Mock(side_effect=error))
            ranks(2)(os.getpid)
        assert [rank for rank, _ in ranks(2)(lambda: (dist.get_rank(), os.getpid()))] == [0, 1]


def test_tensors_travel_both_ways():
    weight = torch.arange(6.0).view(2, 3).requires_grad_()
    for rank, (same, rows) in enumerate(ranks(2)(lambda w: (w, {"row": w[dist.get_rank()].detach()}), weight)):
        assert torch.equal(same, weight) and same.requires_grad
        assert torch.equal(rows["row"], weight[rank])


def test_each_call_starts_afresh(tmp_path, monkeypatch):
    def draw():
        dist.new_group([0, 1])
        return torch.rand(2), dist.group.WORLD.group_name, len(dist.distributed_c10d._world.pg_map)

    ranks(2)(os.getcwd)                              # there
    (tmp_path / "here").touch()
    monkeypatch.chdir(tmp_path)
    assert ranks(2)(os.listdir) == [["here"]] * 2
    first, second = ranks(2)(draw)[0], ranks(2)(draw)[1]
    assert torch.equal(first[0], second[0]) and second[1:] == ("0", 2)


def test_leaving_and_joining_again():
    def restless():
        for _ in range(3):
            leave()
            world = join("cpu")
            dist.barrier()
        leave()
        return world.size

    def total():
        return differentiable.all_reduce(torch.tensor(2)).item()     # whose default group is that of its import

    assert ranks(2)(total) == [4, 4]
    assert ranks(2)(restless) == [2, 2]
    assert ranks(2)(total) == [4, 4]


def test_prints_appear_with_the_rank_while_it_runs(monkeypatch):
    def talk():
        print("first line\nsecond line")
        time.sleep(0.6)
        os.write(2, b"from below\n")
        print("no end of line", end="")

    class Screen:
        def __init__(self):
            self.text, self.first = "", 0.0

        def write(self, text):
            self.first = self.first or time.monotonic()
            self.text += text

        def flush(self):
            pass

    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    close(2)
    ranks(2)(os.getpid)
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    ranks(2)(talk)
    assert time.monotonic() - screen.first > 0.5
    for rank in (0, 1):
        lines = [line.removeprefix(f"[rank {rank}] ") for line in screen.text.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert lines == ["first line", "second line", "from below", "no end of line"]
    assert len(screen.text.splitlines()) == 8


def test_much_output_is_complete(capsys):
    ranks(2)(lambda: print("x" * 99 + "\n" * dist.get_rank(), sep="\n" * 2, end="y" * 300_000))
    assert capsys.readouterr().out.count("y") == 600_000


def test_collectives_in_backward():
    def gradient():
        x = torch.ones(2, requires_grad=True)
        (differentiable.all_reduce(x * 3).sum() * (dist.get_rank() + 1)).backward()
        return x.grad.tolist()

    assert ranks(2)(gradient) == [[9.0, 9.0]] * 2


def test_two_threads_take_turns():
    results = {}

    def call(number):
        results[number] = ranks(2)(times_rank, number)

    threads = [threading.Thread(target=call, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {1: [0, 1], 2: [0, 2], 3: [0, 3]}


def test_what_cannot_be_sent_is_refused_before_the_ranks_notice():
    pids = ranks(2)(os.getpid)
    with pytest.raises(TypeError, match="pickle"):
        ranks(2)(times_rank, threading.Lock())
    assert ranks(2)(os.getpid) == pids


def test_ranks_that_are_ahead_or_silent_are_no_deadlock():
    def unequal():
        if dist.get_rank():
            time.sleep(1.2)                          # longer than the launcher's looks
        dist.barrier()
        if not dist.get_rank():
            time.sleep(1.2)

    assert ranks(2)(unequal) == [None, None]


def test_an_exception_names_the_rank_and_the_line_of_the_cell():
    error = failure(notebook()["cell"], 9)           # rank 1 asks for rank 10
    assert error.rank == 1 and isinstance(error.__cause__, LookupError)
    assert "Rank 1 raised" in error.text and "LookupError: no such rank" in error.text and "Rank 0" not in error.text
    assert "line 12, in helper" in error.text and "# the line to blame" in error.text
    assert str(error) == error.text and "launch.py" not in error.text


def test_lines_of_pytorch_are_left_out():
    error = failure(lambda: torch.nn.Linear(2, 3)(torch.ones(5 + dist.get_rank(), 7)))
    assert "RuntimeError: mat1 and mat2" in error.text and "test_notebook_ranks.py" in error.text
    assert "torch/nn" not in error.text and "worker.py" not in error.text and error.unmet == ""


def test_the_first_of_several_exceptions_comes_first():
    def broken():
        class Odd(Exception):
            def __reduce__(self):
                raise TypeError("cannot be sent")

        time.sleep(0.4 * (1 - dist.get_rank()))
        raise Odd(f"of rank {dist.get_rank()}")

    error = failure(broken)
    assert error.rank == 1 and error.__cause__ is None
    assert 0 < error.text.index("Odd: of rank 1") < error.text.index("Odd: of rank 0")


def test_an_exception_that_another_waits_for_is_not_hidden():
    def boom():
        if dist.get_rank() == 1:
            raise ValueError("boom")
        dist.barrier()

    error = failure(boom)
    assert error.rank == 1 and "ValueError: boom" in error.text and error.unmet == ""
    assert "Rank 0 waits at collective 1 of ranks 0 and 1, barrier in line" in error.text
    assert error.text.endswith("for rank 1. Rank 1 raised an exception before it.")


@pytest.mark.parametrize(("end", "words"), [
    (lambda: sys.exit(3), "Rank 1 exited with code 3."),
    (lambda: os.kill(os.getpid(), signal.SIGKILL), "Rank 1 died of SIGKILL."),
])
def test_a_rank_that_ends_is_named(end, words):
    def leave_alone():
        if dist.get_rank() == 1:
            end()
        dist.barrier()

    error = failure(leave_alone)
    assert error.rank == 1 and error.text.startswith(words) and error.unmet == ""
    assert "the connection to another." not in error.text
    assert error.text.index(words) < error.text.index("Rank 0")


def test_one_rank_alone_lives_from_call_to_call_and_its_end_is_noticed():
    first = ranks(1)(os.getpid)
    assert ranks(1)(os.getpid) == first and ranks(1)(dist.get_world_size) == [1]
    assert failure(lambda: os._exit(3), size=1).text == "Rank 0 exited with code 3."
    again = ranks(1)(os.getpid)
    close(1)
    assert not any(map(alive, [*first, *again]))


def test_a_skipped_collective_is_explained_at_once():
    def skip():
        x = torch.ones(4, 8)
        dist.all_reduce(x)
        if dist.get_rank() == 0:
            dist.all_reduce(x)  # alone

    error = failure(skip, within=10)
    assert error.rank is None and error.unmet == error.text
    assert "Rank 0 waits at collective 2 of ranks 0 and 1, all-reduce of (4, 8) float32" in error.text
    assert "test_notebook_ranks.py: `dist.all_reduce(x)  # alone`, for rank 1. Rank 1 returned before it." in error.text


def test_a_skipped_backward_is_explained():
    def skip():
        x = torch.ones(3, requires_grad=True)
        loss = differentiable.all_reduce(x).sum()
        if dist.get_rank() == 0:
            loss.backward()

    text = failure(skip, within=10).text
    assert "Rank 0 waits at collective 2 of ranks 0 and 1, all-reduce of (3,) float32" in text and "`loss.backward()`" in text


def test_shapes_that_disagree():
    def shapes():
        dist.all_reduce(torch.ones(4, 8 + dist.get_rank()))

    error = failure(shapes)
    text = error.text
    assert error.unmet.startswith("The ranks disagree") and error.unmet in text
    assert "The ranks disagree at collective 1 of ranks 0 and 1: rank 0 all-reduce of (4, 8) float32 in line" in text
    assert "; rank 1 all-reduce of (4, 9) float32" in text


def test_shapes_that_disagree_where_gloo_does_not_notice():
    def shapes():
        dist.all_reduce(torch.ones(4) if dist.get_rank() else torch.ones(2, 2))

    assert "rank 0 all-reduce of (2, 2) float32" in failure(shapes).text


def test_operators_that_disagree():
    def operators():
        x = torch.ones(4)
        if dist.get_rank() == 0:
            dist.all_reduce(x)
        else:
            dist.all_gather([torch.empty(4), torch.empty(4)], x)

    text = failure(operators).text
    assert "rank 0 all-reduce of (4,) float32" in text and "rank 1 all-gather of (4,) float32" in text


def test_ranks_that_wait_for_each_other():
    def polite():
        x = torch.ones(2)
        dist.recv(x, 1 - dist.get_rank())
        dist.send(x, 1 - dist.get_rank())

    text = failure(polite).text
    assert "Rank 1 waits at message 1 from rank 0 to rank 1, recv from 0 of (2,) float32" in text
    assert text.endswith("Ranks 0 and 1 wait for each other: a deadlock.")


def test_an_endless_loop_ends_at_the_timeout():
    def loop():
        while dist.get_rank() == 0:
            pass
        dist.barrier()

    error = failure(loop, timeout=2, within=7)
    assert error.rank is None and error.text.startswith("Not done after 2 s.") and error.unmet == ""
    assert "Rank 0 is at line" in error.text and ("`while dist.get_rank() == 0:`" in error.text or "`pass`" in error.text)
    assert "Rank 1 waits at collective 1 of ranks 0 and 1, barrier" in error.text


def test_a_result_that_cannot_be_sent():
    error = failure(lambda: threading.Lock() if dist.get_rank() else None)
    assert error.rank == 1 and error.text.startswith("Rank 1 returned what cannot be sent to another process: TypeError")


def test_an_interrupt_stops_the_ranks(interruptible):
    pids = ranks(2)(os.getpid)
    timer = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ranks(2)(time.sleep, 20)
    timer.join()
    assert not any(map(alive, pids))


@pytest.mark.slow
def test_groups_of_a_call_that_is_over_leave_no_threads():
    """Gloo's threads wake up a hundred times a second, so many idle ranks would keep a core busy."""
    def work():
        for _ in range(5):
            dist.new_group([0, 1])
        return os.getpid(), len(psutil.Process().threads())

    end = time.monotonic() + 10
    for pid, many in ranks(2)(work):
        while (few := len(psutil.Process(pid).threads())) > many - 10 and time.monotonic() < end:
            time.sleep(0.1)
        assert few <= many - 10


@pytest.mark.parametrize("doing", ["os.kill(os.getpid(), signal.SIGSTOP)", *(
    pytest.param(one, marks=pytest.mark.slow) for one in ("child.wait()", "re.match('(a+)+$', 'a' * 60 + 'b')"))])
def test_ranks_and_their_children_end_with_their_caller(tmp_path, doing):
    """Also those that are stopped, or hold Python's lock, and so cannot see that it is gone."""
    program = tmp_path / "caller.py"
    program.write_text(f'''\
import os, re, signal, subprocess, sys
sys.path.insert(0, {os.getcwd()!r})
from course.ranks.notebook_ranks import ranks

def work():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    print(os.getpid(), child.pid)
    {doing}

ranks(2, timeout=100)(work)
''')
    caller = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True,
                              env=os.environ | {"TMPDIR": str(tmp_path)})
    pids = [int(pid) for _ in range(2) for pid in caller.stdout.readline().split()[2:]]
    assert len(pids) == 4 and all(map(alive, pids))
    caller.kill()
    caller.wait()
    caller.stdout.close()
    end = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(alive, pids))
    assert doing != "child.wait()" or not list(tmp_path.glob("ranks-*"))


def test_ranks_that_do_not_start_say_why_and_what_to_do(monkeypatch, capsys):
    """A machine with too much to do; a process that cannot be asked for forks."""
    close()
    monkeypatch.setattr("course.ranks.notebook_ranks.START", 0.0)
    monkeypatch.setattr("course.ranks.notebook_ranks.LONG", 0.0)
    with pytest.raises(RankError, match=r"did not start: after 0 s ranks 0 and 1 had not .*; this machine has a load of \d+\.\d "
                                        r"on \d+ cores, and .* GB of memory are free.* call again, or ask for fewer ranks"):
        ranks(2)(int)
    assert "starting 2 ranks takes more than 0 s: this machine has a load of" in capsys.readouterr().err
    monkeypatch.setattr("course.ranks.notebook_ranks.START", 60.0)
    monkeypatch.setattr("course.ranks.fork_server.ask", lambda *_: (_ for _ in ()).throw(TimeoutError()))
    if FORKS:
        with pytest.raises(RankError, match=r"forked from did not answer within 60 s, or was killed; this machine"):
            ranks(2)(int)
