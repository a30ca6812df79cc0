"""What can break while two nodes of two ranks train, by submit/train.sh as it is, on real Slurm; submit/FAULTS.md is the table.

The jobs of the first part run side by side, each with a fault of its own; then the same commands again, also side by side.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from course.checkpoint import checkpoint
from course.lab.slurm import local_cluster as starter
from course.lab.slurm.local_cluster import Cluster, wait_until
from tests.conftest import tiny_settings
from tests.faults import assert_same_losses, python_path, sequence
from tests.slurm.conftest import ROOT, kill_node

FOUR = ("--nodes=2", "--ntasks-per-node=2")
PLENTY = 400.0                                       # seconds: on two cores that others use, too
# in each rank before the course's command begins; in a job that Slurm has requeued no more
HOOK = """
import os, sys
fault, ranks, step = (os.environ.get("FAULT") or "none 9 0").split()
rank, started = os.environ.get("SLURM_PROCID"), not os.environ.get("SLURM_RESTART_COUNT")
mine = rank in ranks.split(",")
if started and (mine or fault == "lose" and rank) and sys.prefix == PREFIX:        # srun's helpers have another Python
    from tests.faults import afflict
    afflict(fault, int(step), mine)
"""
FAULTS = {"whole": "", "one": "kill 2 7", "node": "kill 2,3 7", "stall": "stop 2 7", "disk": "fill 2 3", "data": "lose 2 1"}


@dataclass
class Runs:
    """A folder with jobs and their runs."""

    folder: Path
    data: Path
    cluster: Cluster

    def run(self, name: str) -> Path:
        return self.folder / name / "vit-demo" / name

    def settings(self, name: str) -> list[str]:
        data = self.folder / "data" if name == "data" else self.data
        return [*tiny_settings(data, self.folder / name), f"log.name={name}", "checkpoint.every=2", "model.depth=1",
                "data.workers=0", "train.stall_s=6"]

    def submit(self, name: str, *more: str, fault: str = "", nodes: tuple[str, ...] = FOUR) -> int:
        """The job of a run; its log is of this start alone."""
        own = {"COURSE_PYTHON": sys.executable, "PYTHONPATH": python_path(f"{self.folder}/hook", ROOT), "OMP_NUM_THREADS": "1",
               "FAULT": fault, "LOSE": f"{self.folder}/data/train/1980.h5", "FILL": f"{self.folder}/disk/filler"}
        job = [*nodes, f"--output={self.folder}/%x-%j.log", f"--job-name={name}", "submit/train.sh", "vit-demo"]
        return self.cluster.submit([*job, *self.settings(name), *more], cwd=ROOT, **own)

    def end(self, job: int) -> tuple[str, str]:
        """(how a job ended, what it printed)."""
        return self.cluster.wait(job, seconds=PLENTY), self.cluster.log(job)


def prepare(folder: Path, data: Path, cluster: Cluster) -> Runs:
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(f"PREFIX = {sys.prefix!r}{HOOK}")
    shutil.copytree(data, folder / "data")
    return Runs(folder, data, cluster)


@pytest.fixture(scope="module")
def runs(cluster, small_data, tmp_path_factory):
    found = prepare(tmp_path_factory.mktemp("faults"), small_data, cluster)
    disk = found.folder / "disk"
    disk.mkdir()
    mounted = not subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)], capture_output=True).returncode
    yield found
    if mounted:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture(scope="module")
def first(runs):
    """Name of each job to how it ended and what it printed, when its fault had befallen it; `second` wrote the run of `long`."""
    jobs = {name: runs.submit(name, fault=fault) for name, fault in FAULTS.items()}
    jobs["long"] = runs.submit("long", "train.steps=100000", "checkpoint.every=100000")
    assert wait_until(lambda: len(sequence(runs.run("long"))) > 2, PLENTY), runs.cluster.log(jobs["long"])
    jobs["second"] = runs.submit("long", "train.steps=100000")
    ends = {name: runs.end(job) for name, job in jobs.items() if name != "long"}
    runs.cluster.run("scancel", str(jobs["long"]))
    ends["long"] = runs.end(jobs["long"])
    return ends


@pytest.fixture(scope="module")
def again(runs, first):
    """The same commands once more, with no fault; the newest checkpoint of one run has been damaged meanwhile."""
    newest = checkpoint.steps(runs.run("one") / "checkpoints")[-1]
    assert newest.name == "step_000006"
    piece = newest / "rank00000.safetensors"
    piece.write_bytes(piece.read_bytes()[:-1] + b"?")
    shutil.copy(runs.data / "train" / "1980.h5", runs.folder / "data" / "train")
    jobs = {name: runs.submit(name) for name in ("one", "node", "stall", "data")}
    return {name: runs.end(job) for name, job in jobs.items()}


def cause(log: str) -> list[str]:
    """A job's lines from the first that says what is wrong, without the rank that srun puts before them."""
    lines = [line.split(": ", 1)[-1] if line[:1].isdigit() else line for line in log.splitlines()]
    return [line for line in lines if not line.startswith(("job ", "step ", "vit-demo: ", "srun: cluster configuration"))]


def test_without_a_fault_the_run_ends_well(first, runs):
    assert first["whole"][0] == "COMPLETED", first["whole"][1]
    assert list(sequence(runs.run("whole"))) == list(range(1, 13))


@pytest.mark.parametrize("name", ["one", "node"])
def test_when_ranks_are_killed_the_job_ends_and_says_which(first, name):
    state, log = first[name]
    assert state == "FAILED" and "Traceback" not in log, log
    told = cause(log)[:3]
    assert any("first failed rank 2" in line for line in told), log
    gone = r"course: rank 2 \(process \d+ of n2\) is gone: it was killed .*step_000006"
    assert any(re.search(gone, line) for line in told), log


def test_a_rank_that_stalls_is_named_with_who_waits_for_it(first):
    state, log = first["stall"]
    told = "\n".join(cause(log)[:4])
    assert state == "FAILED" and re.search(r"stalled: rank 2 \(process \d+ of n2\) does not answer: it is stopped", told), log
    assert "ranks 0, 1 and 3 wait at step 7 in all_reduce" in told


def test_a_full_disk_costs_checkpoints_and_nothing_else(first, runs):
    if not os.path.ismount(runs.folder / "disk"):
        pytest.skip("mounting a small disk takes root")
    state, log = first["disk"]
    assert state == "COMPLETED", log
    assert log.count("was not written. It takes") == 2 and "step_000004 was not written" in log and "WARNING" in log
    assert "the disk is full while writing" in log
    assert_same_losses(runs.run("disk"), runs.run("whole"))


def test_a_data_file_that_is_gone_is_named_with_the_cure(first):
    state, log = first["data"]
    told = "\n".join(cause(log)[:3])
    assert state == "FAILED" and re.search(r"1980\.h5 cannot be opened .* restore the file", told), log


def test_a_second_job_is_refused_and_told_who_writes_the_run(first, runs):
    state, log = first["second"]
    long = runs.run("long")
    assert state == "FAILED" and any(f"{long} is being written by process " in line for line in cause(log)[:3]), log
    assert "Slurm job" in log
    assert first["long"][0] == "CANCELLED" and list(sequence(long)) == list(range(1, len(sequence(long)) + 1))


@pytest.mark.parametrize("name", ["one", "node", "stall", "data"])
def test_the_same_command_goes_on_to_the_same_losses(again, runs, name):
    state, log = again[name]
    assert state == "COMPLETED", log
    step = {"one": 4, "data": None}.get(name, 6)     # of `one` the newest is damaged, `data` never got so far
    assert step is None or f"at step {step}" in log
    assert name != "one" or ("passing over a checkpoint" in log and "rank00000.safetensors is damaged" in log)
    assert_same_losses(runs.run(name), runs.run("whole"))


def test_on_one_node_it_goes_on_through_the_reshardable_checkpoint(again, runs):
    """Two ranks go on from what four have saved."""
    run = runs.run("whole")
    fewer = Path(shutil.copytree(run, runs.run("fewer")))
    for newer in checkpoint.steps(fewer / "checkpoints"):
        if newer.name > "step_000006":
            shutil.rmtree(newer)
    state, log = runs.end(runs.submit("fewer", nodes=("--nodes=1", "--ntasks-per-node=2")))
    assert state == "COMPLETED" and "2 x CPU" in log, log
    assert_same_losses(fewer, run,
                       rel=2e-6)         # float32: tests/resilience/test_faults_of_runs.py has the bound, and 1e-12 in float64


def test_a_lost_slurmd_ends_the_job_which_goes_on_when_the_node_is_back(place, small_data, tmp_path):
    """Its ranks live on when slurmd is killed; Slurm gives the node up after SlurmdTimeout, and requeues the job."""
    own = prepare(tmp_path, small_data, starter.start(place, timeout=8))     # not less: n1's, alive, may be late, too
    settings = ["train.steps=300", "checkpoint.every=10", "log.every=10"]
    job = own.submit("slurmd", *settings, fault="pause 1 1")     # a minute at least, unless Slurm ends it
    assert wait_until(lambda: checkpoint.steps(own.run("slurmd") / "checkpoints") != [], PLENTY), own.cluster.log(job)
    kill_node(own.cluster, "n2")
    assert wait_until(lambda: own.cluster.nodes()["n2"].startswith("down"), PLENTY)
    time.sleep(1)
    before = max(sequence(own.run("slurmd")))
    own.cluster.start_node("n2")
    state, log = own.end(job)
    # srun was first, and had lost its tasks; or Slurm killed the requeued step with what the node still had of the one before,
    # which has the same name
    if state == "FAILED":
        state, log = own.end(own.submit("slurmd", *settings))
    assert state == "COMPLETED" and "resuming" in log, log
    steps = list(sequence(own.run("slurmd")))        # that of the stop may be among them
    assert before < 300 and [step for step in steps if step % 10 == 0] == list(range(10, 301, 10)) and steps == sorted(steps)
