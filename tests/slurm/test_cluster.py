"""The Slurm that tests and lessons start for themselves."""

import os
import signal
import subprocess
import sys
import time

import pytest

from course.lab.slurm import local_cluster as starter
from course.utils.errors import CourseError
from tests.slurm.conftest import kill_node


def test_a_job_runs_on_both_nodes_and_a_requeued_one_starts_again_soon(cluster, tmp_path):
    script = tmp_path / "again.sh"
    script.write_text('#!/bin/bash\nsrun bash -c \'echo "$SLURMD_NODENAME $SLURM_PROCID"\'\n'
                      'echo "restarts ${SLURM_RESTART_COUNT:-0}"\n'
                      '[ -n "${SLURM_RESTART_COUNT:-}" ] || { scontrol requeue "$SLURM_JOB_ID"; sleep 60; }\n')
    begin = time.monotonic()
    job = cluster.submit(["--nodes=2", "--ntasks-per-node=2", "--open-mode=append", f"--output={tmp_path}/%j.log", script])
    assert cluster.wait(job) == "COMPLETED"
    assert time.monotonic() - begin < 45             # plain Slurm lets a requeued job wait two minutes
    lines = cluster.log(job).splitlines()
    assert [line for line in lines if line.startswith("restarts")] == ["restarts 0", "restarts 1"]
    assert sorted(line for line in lines if line.startswith("n"))[::2] == ["n1 0", "n1 1", "n2 2", "n2 3"]
    told = cluster.describe(job)
    assert told["NodeList"] == "n[1-2]" and told["Restarts"] == "1" and told["ExitCode"] == "0:0"


def test_one_runs_beside_another_and_leaves_it_alone(cluster, place):
    other = starter.start(place, nodes=1, cpus=2, gpus=2)
    assert other.nodes() == {"n1": "idle"} and cluster.nodes()["n2"] != "down"
    job = other.submit(["--gpus-per-node=2", f"--output={place}/%j.log", "--wrap", 'echo "$SLURM_GPUS_ON_NODE"; sleep 300'])
    other.wait(job, ["RUNNING"])
    assert starter.wait_until(lambda: other.log(job) == "2\n", 10)
    with pytest.raises(CourseError, match="has a Slurm already"):
        starter.start(place)
    configuration = str(other.configuration)
    assert {p.name() for p in starter.find_processes(configuration)} >= {"munged", "slurmctld", "slurmd", "slurmstepd", "sleep"}
    with pytest.raises(CourseError, match=rf"1 job is not over: {job} wrap \(running\); .*--force"):
        starter.stop_command(place)
    assert other.state(job) == "RUNNING"
    starter.stop_command(place, force=True)
    assert not starter.find_processes(configuration) and not place.exists()
    assert "2" not in cluster.nodes() and len(cluster.nodes()) == 2


def test_nothing_is_left_after_a_crash_of_whoever_started_it(place):
    code = ("import sys, time; from pathlib import Path; from course.lab.slurm import local_cluster as cluster; "
            "folder = Path(sys.argv[1]); "
            "kept = cluster.start_guard(folder); c = cluster.start(folder, nodes=1); "
            "c.submit(['--output=/dev/null', '--wrap', 'srun sleep 300']); print('up', flush=True); time.sleep(300)")
    starting = subprocess.Popen([sys.executable, "-c", code, str(place)], stdout=subprocess.PIPE, text=True)
    assert starting.stdout.readline() == "up\n"
    configuration = str(place / "slurm.conf")
    assert starter.find_processes(configuration)
    os.kill(starting.pid, signal.SIGKILL)
    starting.wait()
    assert starter.wait_until(lambda: not place.exists() and not starter.find_processes(configuration), 30)


def test_a_node_whose_slurmd_dies_is_lost_and_comes_back(place):
    own = starter.start(place, timeout=4)
    job = own.submit(["--nodes=2", "--no-requeue", f"--output={place}/%j.log", "--wrap", "srun sleep 300"])
    own.wait(job, ["RUNNING"])
    kill_node(own, "n2")
    assert own.wait(job, seconds=60) in ("NODE_FAIL", "FAILED")      # who is first: Slurm, or srun that lost its tasks
    assert own.nodes()["n2"].startswith("down")
    own.start_node("n2")
    assert starter.wait_until(lambda: own.nodes()["n2"] == "idle", 30)


def test_the_command_starts_one_for_a_shell(place):
    command = f"{sys.executable} -m course.cli cluster"
    shell = f'eval "$({command} start --folder {place} --nodes 1)" && sinfo --noheader --format=%T'
    done = subprocess.run(["bash", "-c", f"{shell} && {command} stop --folder {place}"], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["idle", f"stopped the Slurm in {place}"], done.stderr
    assert not place.exists()
    done = subprocess.run([*command.split(), "stop", "--folder", str(place)], capture_output=True, text=True)
    assert done.returncode == 1 and "there is no Slurm of the course" in done.stderr
