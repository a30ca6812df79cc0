"""The starter of Slurm, where there is none."""

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from course.cli.main import app
from course.lab.slurm import local_cluster
from course.utils.errors import CourseError


def test_without_slurm_one_sentence_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(local_cluster, "SYSTEM_PATH", str(tmp_path))
    with pytest.raises(CourseError, match=r"no munged, slurmctld, slurmd, .*apt-get install slurm-wlm munge"):
        local_cluster.start(tmp_path / "slurm")
    assert not (tmp_path / "slurm").exists()


def test_a_description_is_read_with_spaces_and_what_a_user_wrote_last():
    line = "JobId=7 JobName=a b UserId=me(1) JobState=RUNNING ExitCode=0:0 NtasksPerN:B:S:C=2:0:*:* Comment= StdOut=/x/y z.log"
    told = local_cluster.parse_fields(line + " Comment=JobState=FAILED")
    assert told["JobName"] == "a b" and told["JobState"] == "RUNNING" and told["StdOut"] == "/x/y z.log"
    assert told["NtasksPerN:B:S:C"] == "2:0:*:*" and told["Comment"] == ""


def test_ports_are_neighbors_and_free():
    first = local_cluster.free_ports(3)
    with socket.socket() as taken:
        taken.bind(("", first + 1))
        again = local_cluster.free_ports(3)
        assert not first <= again <= first + 1 and again + 2 != first + 1


def test_its_partition_is_that_of_the_site_that_is_rehearsed(monkeypatch, tmp_path):
    monkeypatch.setattr(local_cluster, "newer_than_22", lambda: False)
    monkeypatch.setattr(local_cluster, "all_idle", lambda *_: True)
    monkeypatch.setattr(local_cluster, "why_unavailable", lambda: "")
    monkeypatch.setattr(local_cluster.Cluster, "run", lambda *_, **more: "")
    monkeypatch.setenv("SBATCH_PARTITION", "a100")
    done = CliRunner().invoke(app, ["cluster", "start", "--folder", str(tmp_path / "slurm")])
    assert done.exit_code == 0 and "partition a100" in done.stdout
    assert "PartitionName=a100 Nodes=ALL" in (tmp_path / "slurm/slurm.conf").read_text()
    with pytest.raises(CourseError, match="cannot be a partition"):
        local_cluster.start(tmp_path / "other", partition="a b")


def test_a_command_that_hangs_is_told_in_a_sentence(tmp_path):
    with pytest.raises(CourseError, match=r"sleep did not answer in 0\.2 s: .*daemons' logs"):
        local_cluster.Cluster(tmp_path).run("sleep", "9", seconds=0.2)


def test_a_command_that_dies_says_of_what(tmp_path):
    with pytest.raises(CourseError, match=r"^sh died of SIGTERM: it said nothing; .*daemons' logs"):
        local_cluster.Cluster(tmp_path).run("sh", "-c", "kill -TERM $$")
    with pytest.raises(CourseError, match=r"^sh exited with code 3: no such job; "):
        local_cluster.Cluster(tmp_path).run("sh", "-c", "echo no such job >&2; exit 3")


def test_a_hang_up_of_munged_is_an_error_to_ask_again_after_not_a_silent_death(tmp_path):
    """SIGPIPE is what a command gets that writes to munged after its two seconds."""
    assert local_cluster.Cluster(tmp_path).run("sh", "-c", "kill -PIPE $$; echo asked again") == "asked again"


def test_stopping_what_is_not_there_does_nothing(tmp_path: Path):
    local_cluster.stop(tmp_path / "none")


def test_stopping_removes_the_folder_of_a_slurm_and_no_other(tmp_path):
    with pytest.raises(CourseError, match="no Slurm of the course"):
        local_cluster.stop_command(tmp_path)
    (tmp_path / "slurm.conf").touch()
    local_cluster.stop_command(tmp_path)
    assert not tmp_path.exists()
