"""The other scripts of submit/ as they are: a sweep, a profile, a laboratory."""

import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from course.lab.slurm.local_cluster import wait_until
from tests.slurm.test_train import losses


def test_a_sweep_trains_each_line_and_a_profile_looks_at_two_nodes_meanwhile(cluster, submit, tiny_run, tmp_path):
    lines = tmp_path / "lines.txt"
    lines.write_text("# two runs\n\noptim.lr=1e-3 'log.name=with a space'\n  # not this\ntrain.steps=5\n")
    settings = [setting for setting in tiny_run("") if not setting.startswith("log.name")]
    array = submit("--array=1-3", "submit/sweep.sh", lines, "vit-demo", *settings)
    profile = submit("--nodes=2", "submit/profile.sh", "vit-demo", *tiny_run("look"), "data.source=mock", "profile.after=2",
                     "profile.steps=1")
    assert cluster.wait(profile) == "COMPLETED", cluster.log(profile)
    assert "nsys is not installed here" in cluster.log(profile) and "forward" in cluster.log(profile)
    ended = {}
    for line in cluster.run("scontrol", "--oneliner", "show", "job", str(array)).splitlines():
        job, task = (int(re.search(rf"\b{key}=(\d+)", line)[1]) for key in ("JobId", "ArrayTaskId"))
        ended[task] = cluster.wait(job), cluster.log(job)
    assert {task: state for task, (state, _) in ended.items()} == {1: "COMPLETED", 2: "COMPLETED", 3: "FAILED"}, ended
    assert "has 2 runs and no number 3: sbatch --array=1-2" in ended[3][1]
    runs = tmp_path / "runs" / "vit-demo"
    assert len(losses(runs / "with a space")) == 12 and len(losses(runs / "sweep-2")) == 5


def answer(address: str) -> int:
    try:
        with urllib.request.urlopen(address, timeout=10) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return int(error.code)
    except OSError:
        return 0


def test_the_lab_answers_on_its_node_to_who_has_the_token(cluster, submit, tmp_path):
    job = submit("submit/lab.sh", tmp_path, HOME=str(tmp_path), XDG_STATE_HOME=str(tmp_path / "state"), USER="me")
    assert wait_until(lambda: "scancel" in cluster.log(job), 60), cluster.log(job)
    log = cluster.log(job)
    tunnel = re.search(r"ssh -N -J me@\S+ -L 8888:127\.0\.0\.1:(\d+) -L 6006:127\.0\.0\.1:(\d+) me@\S+", log)
    lab, board = tunnel.groups()
    secret = tmp_path / "state" / "course" / "lab-token"
    token = secret.read_text()
    assert len(token) == 48 and secret.stat().st_mode & 0o077 == 0 and token not in log
    assert wait_until(lambda: answer(f"http://127.0.0.1:{lab}/api/kernels?token={token}") == 200, 90), cluster.log(job)
    assert answer(f"http://127.0.0.1:{lab}/api/kernels") == 403
    assert wait_until(lambda: answer(f"http://127.0.0.1:{board}") == 200, 60), cluster.log(job)
    assert token not in cluster.log(job) and token.encode() not in b"".join(map(command_line, Path("/proc").glob("[0-9]*")))
    cluster.run("scancel", str(job))
    assert cluster.wait(job) == "CANCELLED"
    assert wait_until(lambda: not answer(f"http://127.0.0.1:{lab}") and not answer(f"http://127.0.0.1:{board}"), 20)


def command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("script", ["train", "profile", "sweep"])
def test_a_script_says_what_it_wants(cluster, submit, script):
    job = submit(f"submit/{script}.sh")
    assert cluster.wait(job) == "FAILED" and "which" in cluster.log(job) and f"submit/{script}.sh" in cluster.log(job)
