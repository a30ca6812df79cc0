import json
import time

import psutil
import pytest
import torch

from course.bench import gpu_pool
from course.lab.slurm.local_cluster import wait_until
from course.utils.errors import CourseError


def test_jobs_share_the_gpus_and_none_has_one_that_is_taken():
    taken, seen = set(), []

    def run(job, gpu):
        assert gpu not in taken
        taken.add(gpu)
        time.sleep(0.01)
        taken.remove(gpu)
        return {"job": job, "gpu": gpu}

    gpu_pool.side_by_side(map(str, range(12)), run, ["0", "1", "2"], seen.append)
    assert sorted(int(row["job"]) for row in seen) == [*range(12)] and {row["gpu"] for row in seen} == {"0", "1", "2"}


def test_a_program_gives_its_last_line_or_what_it_failed_with():
    program = "import os; print('loading'); print('{\"gpus\": \"' + os.environ['CUDA_VISIBLE_DEVICES'] + '\"}')"
    assert gpu_pool.start(["-c", program], "3,4") == {"gpus": "3,4"}
    assert gpu_pool.start(["-c", "raise ValueError('no such name')"], "") == {"error": "ValueError: no such name"}
    assert "not done after" in gpu_pool.start(["-c", "import time; time.sleep(9)"], "", timeout=0.2)["error"]


def test_a_last_line_that_is_no_row_is_an_error():
    for printed, told in (("done in 3 s", "done in 3 s"), ("[1, 2]", "[1, 2]"), ("", "exit status 0")):
        assert gpu_pool.start(["-c", f"print({printed!r})"], "") == {"error": told}


def test_out_of_time_ends_what_the_program_started_in_sessions_of_their_own(tmp_path):
    rank = f"import os, time; open({str(tmp_path / 'rank')!r}, 'w').write(str(os.getpid())); time.sleep(99)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}], start_new_session=True)"
    assert "not done after" in gpu_pool.start(["-c", program], "", timeout=3)["error"]
    rank = int((tmp_path / "rank").read_text())
    assert wait_until(lambda: not alive(rank), 5)


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_rows_are_in_the_file_as_they_come_in_order(tmp_path):
    rows = gpu_pool.Rows(tmp_path / "rows.json", {"hardware": "none"}, ["a", "b"], "configuration")
    for name in ("b", "a"):
        rows.add({"configuration": name})
    assert json.loads((tmp_path / "rows.json").read_text()) == {
        "hardware": "none", "rows": [{"configuration": "a"}, {"configuration": "b"}]}


def test_gpus_are_those_that_the_environment_shows(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert gpu_pool.gpus_of("course bench gpt", False) == ["2", "5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpu_pool.gpus_of("course bench gpt", False) == ["0", "1"] and gpu_pool.gpus_of("course bench gpt", True) == [""]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(CourseError, match=r"course bench gpt needs a GPU.*--small"):
        gpu_pool.gpus_of("course bench gpt", False)
