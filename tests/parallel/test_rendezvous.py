"""Ranks that wait for others say for whom, where, and what to do; they end with whoever started them."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
import torch.distributed as dist

from course.parallel import mesh, rendezvous
from course.utils.errors import CourseError

JOIN = "from course.parallel.mesh import join; join('cpu'); print('joined')"
STEP = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "n1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def joining(**variables: str) -> "subprocess.Popen[str]":
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))}
    return subprocess.Popen([sys.executable, "-c", JOIN], env=mine | variables, stderr=subprocess.PIPE, stdout=subprocess.PIPE,
                            text=True)


def told(process: "subprocess.Popen[str]") -> str:
    """The first sentence of a process that waits; it is ended."""
    try:
        return next((line for line in process.stderr if line.startswith("rank ")), "")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("pty", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_task_of_slurm_that_is_alone_says_so(pty):
    port = 20000 + os.getpid() % 12000
    more = {"SLURM_PTY_PORT": "40000"} if pty else {}
    sentence = told(joining(**STEP, **more))
    assert sentence.startswith(f"rank 0 waits at 127.0.0.1:{port} for rank 1 of 2. They are tasks of the same Slurm step")
    assert "env -u SLURM_STEP_NUM_TASKS course" in sentence and ("srun --pty" in sentence) == pty


@pytest.mark.slow
def test_who_is_there_is_not_named_and_only_the_lowest_tells():
    common = {"WORLD_SIZE": "5", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [joining(**common, RANK=rank) for rank in ("0", "2", "3")]
    try:
        line = next(line for line in processes[0].stderr if line.startswith("rank 0 waits"))
        assert "for ranks 1 and 4 of 5" in line and "env -u RANK -u WORLD_SIZE" in line
        time.sleep(1.0)
    finally:
        for process in processes:
            process.kill()
    assert all(" waits " not in process.communicate()[1] for process in processes[1:])


@pytest.mark.parametrize("address, why", [
    ("127.0.0.1", "nobody listens there"), pytest.param("no-such-node.invalid", "is not known on", marks=pytest.mark.slow)])
def test_rank_0_that_is_not_there_is_named_with_the_reason(address, why):
    sentence = told(joining(RANK="1", WORLD_SIZE="2", MASTER_ADDR=address, MASTER_PORT=str(free_port())))
    assert f"rank 1 waits at {address}:" in sentence and "for rank 0 of 2" in sentence and why in sentence


def test_who_meets_in_time_says_nothing():
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [joining(**common, RANK=str(rank)) for rank in range(2)]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and out == "joined\n" and "course: " not in err


@pytest.mark.parametrize("given, missing", [("MASTER_PORT", "MASTER_ADDR"), ("MASTER_ADDR", "MASTER_PORT")])
def test_variables_that_are_missing_are_a_sentence(monkeypatch, given, missing):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", given: "29999"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CourseError, match=missing):
        mesh.join("cpu")


def test_what_pytorch_gives_up_with_is_a_sentence(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(CourseError, match=r"rank 1 waits at 127.* for rank 0 of 2 .*PyTorch says: Timed out"), \
            rendezvous.telling(1, 2, ""):
        raise dist.DistStoreError("Timed out after 1801 seconds\nand a stack")


LOOP = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from course.parallel.mesh import join
world = join("cpu")
os.write(1, f"pid {{os.getpid()}}\\n".encode())        # in one call: print takes several, and ranks share the pipe
if world.rank == world.size - 1 and {stop}:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(100)
"""


@pytest.mark.parametrize("size, stop", [(2, True), *(pytest.param(1, stop, marks=pytest.mark.slow) for stop in (False, True))])
def test_ranks_end_with_a_torchrun_that_is_killed(tmp_path, size, stop):
    program = tmp_path / "rank.py"
    program.write_text(LOOP.format(root=os.getcwd(), stop=stop))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", program]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
    pids: list[int] = []
    try:
        while len(pids) < size:
            line = launcher.stdout.readline()
            assert line, "torchrun has ended"
            pids += [int(line.split()[1])] if line.startswith("pid ") else []
        launcher.kill()
        end = time.monotonic() + 10
        while any(map(alive, pids)) and time.monotonic() < end:
            time.sleep(0.1)
        assert not any(map(alive, pids))
    finally:
        launcher.kill()
        launcher.communicate()
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


MEETS = """
import os, psutil, torch
from torch.distributed import all_gather_object, barrier
from course.parallel import mesh
world = mesh.join("cpu")
got = [None] * world.size
all_gather_object(got, world.rank)
heard = sorted({c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"})
os.write(1, f"found {got} {heard} {mesh.abandoned()}\\n".encode())     # in one call, as above
barrier()
mesh.leave()
"""


def test_ranks_of_one_node_meet_at_a_file_and_on_loopback(tmp_path):
    program, folder = tmp_path / "rank.py", tmp_path / "tmp"
    program.write_text(MEETS)
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-conf=store_type=file",
               "--local-addr=127.0.0.1", "--nproc-per-node=2", program]                # as submit/common.sh has it
    done = subprocess.run(command, text=True, capture_output=True, timeout=200,
                          env=os.environ | {"TMPDIR": str(folder), "PYTHONPATH": os.getcwd()})
    assert done.stdout.count("found [0, 1] ['127.0.0.1'] False") == 2, done.stdout + done.stderr
    assert not list(folder.glob("course-ranks-*"))


def test_a_rank_believes_only_in_a_closed_folder_of_its_own_user(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    good = tmp_path / "course-ranks-abc"
    good.mkdir(mode=0o700)
    assert mesh.own_variables(good)
    (tmp_path / "course-ranks-link").symlink_to(good)
    (tmp_path / "course-ranks-file").touch(mode=0o600)
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "course-ranks-open").mkdir(mode=0o700)
    (tmp_path / "course-ranks-open").chmod(0o770)
    (tmp_path / "home/course-ranks-abc").mkdir(mode=0o700)
    for name in ("course-ranks-link", "course-ranks-file", "home", "course-ranks-open", "home/course-ranks-abc", "absent",
                 "course-ranks-abc/.."):
        assert not mesh.own_variables(tmp_path / name), name
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not mesh.own_variables(good)


def test_a_place_that_somebody_else_has_planted_is_refused(tmp_path, monkeypatch):
    store = dist.HashStore()
    store.set("course/file/0", str(tmp_path))
    monkeypatch.setattr(mesh, "rendezvous", lambda *_: iter([(store, 1, 2)]))
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(CourseError, match=r"closed to others.*somebody else"):
        mesh.shared_store(1, 2)


@pytest.mark.parametrize(("variables", "one"), [
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, True),
    ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, False),
    ({"RANK": "0", "WORLD_SIZE": "2"}, False), ({"SLURM_STEP_NUM_NODES": "1"}, True), ({"SLURM_STEP_NUM_NODES": "2"}, False)])
def test_one_node_is_what_the_launcher_says(monkeypatch, variables, one):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert mesh.on_one_node() == one
