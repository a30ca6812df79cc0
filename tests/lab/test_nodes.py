"""Two nodes that are pretended: a batch script is started, warned, requeued, loses a node; and what is kept of its job."""

import json
import os
import shutil

import pytest

from course.lab.exercises.lesson18_cluster import batch_script
from course.lab.slurm import job_backend as places
from course.lab.slurm.local_cluster import wait_until
from course.utils.errors import CourseError
from tests.conftest import tiny_settings

COUNTS = """#!/usr/bin/env bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=1
echo "start ${SLURM_RESTART_COUNT:-0}"
srun --kill-on-bad-exit=1 bash -c "$1" &
ranks=$!
trap 'kill -USR1 $ranks' USR1
wait $ranks || wait $ranks
status=$?
if [ $status = 75 ]; then scontrol requeue $SLURM_JOB_ID; sleep 60; fi
exit $status
"""
# also at TERM, as `course train`: srun sends it to who has not heard USR1 yet when another has ended
ONCE = "if [ -n \"$SLURM_RESTART_COUNT\" ]; then exit 0; fi; trap 'exit 75' USR1 TERM; echo up; while :; do sleep 0.05; done"


@pytest.fixture
def nodes(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    found = places.EmulatedSlurm("nothing is installed")
    yield found
    found.close()
    assert not found.folder.exists()


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "mine.sh"
    path.write_text(COUNTS)
    return path


def test_a_warned_job_ends_with_75_goes_back_and_is_done(nodes, script):
    job = nodes.submit(script, [ONCE])
    assert wait_until(lambda: nodes.status(job).log.count("up") == 2, 120)
    nodes.send_warning(job)
    told = nodes.wait(job)
    assert (told.state, told.restarts, told.by) == ("COMPLETED", 1, "") and "requeued once" in str(told)
    assert [line for line in told.log.splitlines() if "start" in line] == ["start 0", "start 1"]


def test_a_lost_node_fails_the_job_which_is_not_put_back(nodes, script):
    job = nodes.submit(script, [ONCE])
    assert wait_until(lambda: nodes.status(job).log.count("up") == 2, 120)
    nodes.kill_second_node(job)
    assert (nodes.wait(job).state, nodes.wait(job).restarts) == ("FAILED", 0)


def test_a_run_that_never_comes_so_far_is_told_with_its_log(nodes, script, tmp_path):
    job = nodes.submit(script, ["echo the cause; exit 1"])
    with pytest.raises(CourseError, match="step 5 was not reached") as caught:
        places.wait_for_step(tmp_path / "run", 5, nodes, job)
    assert "the cause" in str(caught.value)


def test_what_is_kept_of_a_job_is_plain_and_has_no_log(tmp_path):
    places.record_job(tmp_path, places.Job(12, "COMPLETED", 1, "n[1-2]", "ann", "Slurm", "much"))
    assert json.loads((tmp_path / "job.json").read_text()) == {"id": 12, "state": "COMPLETED", "restarts": 1, "nodes": "n[1-2]",
                                                              "user": "ann", "by": "Slurm"}


def test_without_slurm_nodes_are_pretended_and_it_says_so(monkeypatch):
    monkeypatch.setattr(places.local_cluster, "why_unavailable", lambda: "Slurm is not installed here")
    found = places.find()
    found.close()
    assert "not installed" in found.description and "pretended" in found.description
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(CourseError, match="no sbatch here"):
        places.find(mine=True)


@pytest.mark.slow
def test_four_ranks_train_through_a_warning_and_a_lost_node_to_the_same_losses(nodes, small_data, tmp_path):
    """Real ranks, without Slurm: what lesson 18 does on a laptop. (Its master does it with Slurm, where that is installed.)"""
    path = tmp_path / "mine.sh"
    path.write_text(batch_script(2, 2, 1, 0))
    settings = ["vit-demo", *tiny_settings(small_data, tmp_path / "runs"), "data.workers=0", "train.steps=60", "model.depth=6"]
    runs = {name: tmp_path / "runs" / "vit-demo" / name for name in ("whole", "warned", "lost")}

    def submit(name: str) -> int:
        return nodes.submit(path, [*settings, f"log.name={name}"])

    whole, warned = submit("whole"), submit("warned")
    places.wait_for_step(runs["warned"], 10, nodes, warned)
    nodes.send_warning(warned)
    lost = submit("lost")
    places.wait_for_step(runs["lost"], 10, nodes, lost)
    nodes.kill_second_node(lost)
    assert "is gone" in (told := nodes.wait(lost)).log and told.state == "FAILED"
    lost = submit("lost")
    assert [nodes.wait(job).state for job in (whole, warned, lost)] == ["COMPLETED"] * 3, nodes.status(warned).log
    assert nodes.status(warned).restarts == 1
    assert places.losses(runs["whole"]) == places.losses(runs["warned"]) == places.losses(runs["lost"])
