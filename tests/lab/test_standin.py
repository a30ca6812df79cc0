"""srun and scontrol where there is no Slurm: who is started, what is passed on, how it ends."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from course.lab.slurm import fake_slurm, script_parser
from course.lab.slurm.local_cluster import wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = """#!/usr/bin/env bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=3
#SBATCH --time=1
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "mine.sh"
    path.write_text(SCRIPT)
    return script_parser.read_script(path)


def srun(tmp_path, script, *words: str, **more: str) -> subprocess.Popen:
    environ = os.environ | fake_slurm.job_environment(script, 7, ["a1", "a2"]) | {
        "STANDIN": str(tmp_path), "PYTHONPATH": str(ROOT), **more}
    return subprocess.Popen([sys.executable, "-S", "-m", "course.lab.slurm.fake_slurm", "srun", *words], env=environ,
                            stdout=subprocess.PIPE, text=True)


def test_slurms_variables_follow_from_the_directives(script):
    found = fake_slurm.job_environment(script, 7, ["gpu009", "gpu010"])
    assert found["SLURM_JOB_NODELIST"] == "gpu[009-010]" and found["SLURMD_NODENAME"] == "gpu009"
    assert (found["SLURM_NTASKS"], found["SLURM_NTASKS_PER_NODE"], found["SLURM_CPUS_PER_TASK"]) == ("4", "2", "3")
    assert "SLURM_GPUS_ON_NODE" not in found


@pytest.mark.parametrize("names", [["a"], ["n1", "n2", "n3"], ["gpu009", "gpu010"], ["127.0.0.1", "127.0.0.2"]])
def test_node_lists_are_folded_and_unfolded(names):
    assert fake_slurm.expand_names(fake_slurm.compress_names(names)) == names


def test_options_of_srun_win_over_the_scripts(script):
    environ = fake_slurm.job_environment(script, 7, ["n1", "n2"])
    assert [rank["SLURM_NODEID"] for rank in fake_slurm.rank_environments({}, environ)] == ["0", "0", "1", "1"]
    assert [rank["SLURMD_NODENAME"] for rank in fake_slurm.rank_environments({"ntasks-per-node": "1"}, environ)] == ["n1", "n2"]
    assert [rank["SLURM_LOCALID"] for rank in fake_slurm.rank_environments({"nodes": "1", "ntasks": "3"}, environ)] == ["0", "1",
                                                                                                                        "2"]


def test_each_task_is_started_once_and_knows_who_it_is(tmp_path, script):
    told, _ = srun(tmp_path, script, "--label", "bash", "-c", "echo $SLURM_PROCID $SLURM_LOCALID $SLURMD_NODENAME").communicate()
    assert sorted(told.splitlines()) == ["0 0 a1", "1 1 a1", "2 0 a2", "3 1 a2"]


@pytest.mark.parametrize(("end", "status"), [("exit 3", 3), ("kill -9 $$", 137)])
def test_one_that_fails_ends_the_others(tmp_path, script, end, status):
    begin = time.monotonic()
    step = srun(tmp_path, script, "--kill-on-bad-exit=1", "bash", "-c", f"[ $SLURM_PROCID = 2 ] && {end}; exec sleep 600")
    assert step.wait() >= status and time.monotonic() - begin < 300


def test_a_warning_reaches_all_ranks_and_their_status_comes_back(tmp_path, script):
    step = srun(tmp_path, script, "--kill-on-bad-exit=1", "bash", "-c",
                f"trap 'exit 75' USR1 TERM; touch {tmp_path}/up$SLURM_PROCID; while :; do sleep 0.05; done")
    assert wait_until(lambda: len(list(tmp_path.glob("up*"))) == 4, 120)
    step.send_signal(fake_slurm.signal.SIGUSR1)
    assert step.wait() == 75
    assert [node for _, node in json.loads((tmp_path / "ranks.json").read_text())] == ["a1", "a1", "a2", "a2"]


def test_a_part_is_played_without_starting_anything(tmp_path, script):
    assert srun(tmp_path, script, "--ntasks=1", "nobody", "has this", STANDIN_ACT="end 137").wait() == 137
    step = json.loads((tmp_path / "step.json").read_text())
    assert step["words"] == ["nobody", "has this"] and len(step["ranks"]) == 1 and "PATH" not in step["environ"]


def test_requeuing_notes_whether_the_ranks_had_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert fake_slurm.scontrol(tmp_path, ["show", "hostnames"]) == 0 and capsys.readouterr().out == "n1\nn2\n"
    fake_slurm.scontrol(tmp_path, ["requeue", "7"])
    (tmp_path / "ended").touch()
    fake_slurm.scontrol(tmp_path, ["requeue", "7"])
    assert (tmp_path / "requeued").read_text() == "7 running\n7 ended\n"
