"""submit/train.sh as it is, on two nodes of two ranks: what it trains, what it passes on, how it ends."""

import json
import time
from pathlib import Path

from course import config
from course.lab.slurm.local_cluster import wait_until
from course.training import trainer as training
from tests.faults import python_path
from tests.slurm.conftest import ROOT

FOUR = ("--nodes=2", "--ntasks-per-node=2")


def records(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run)]


def test_ranks_on_two_nodes_train_as_one_process_does_and_arguments_arrive_as_they_are(cluster, submit, tiny_run, tmp_path):
    """At once: a job submitted from another folder, where Slurm's copy of the script has to find the course."""
    odd = """log.name=a b 'c' "d" $HOME *"""
    here = submit(*FOUR, "submit/train.sh", "vit-demo", *tiny_run("x"), "precision=fp32", odd)
    away = cluster.submit([*FOUR, f"--output={tmp_path}/jobs/away.log", ROOT / "submit" / "train.sh", "vit-demo",
                           *tiny_run("away")], cwd=tmp_path, COURSE_PYTHON=str(ROOT / ".venv/bin/python"), OMP_NUM_THREADS="1")
    alone = training.main(config.load("vit-demo", tiny_run("alone")))
    assert cluster.wait(here) == "COMPLETED", cluster.log(here)
    assert cluster.wait(away) == "COMPLETED", cluster.log(away)
    runs = tmp_path / "runs" / "vit-demo"
    for name in (odd.removeprefix("log.name="), "away"):
        close = [abs(a - b) <= 1e-5 * b for a, b in zip(losses(runs / name), losses(alone), strict=True)]
        assert len(close) == 12 and all(close)
    assert "4 x CPU" in cluster.log(here) and cluster.log(here).startswith(f"job {here}: nodes n[1-2], tasks on each: 2\n")


def test_a_preempted_run_saves_goes_back_into_the_queue_and_resumes_to_the_same_losses(cluster, submit, tiny_run, tmp_path):
    """The signal comes as Slurm sends it before the limit: to the script alone. The log of the first part stays."""
    settings = ["train.steps=60", "checkpoint.every=1000", "train.global_batch=16", "model.depth=6"]
    job = submit(*FOUR, "submit/train.sh", "vit-demo", *tiny_run("stopped"), *settings)
    whole = submit(*FOUR, "submit/train.sh", "vit-demo", *tiny_run("whole"), *settings)
    run = tmp_path / "runs" / "vit-demo" / "stopped"
    assert wait_until(lambda: len(records(run)) >= 3, 90), cluster.log(job)
    cluster.run("scancel", "--batch", "--signal=USR1", str(job))
    assert cluster.wait(job) == "COMPLETED", cluster.log(job)
    assert cluster.wait(whole) == "COMPLETED", cluster.log(whole)
    log = cluster.log(job)
    assert cluster.describe(job)["Restarts"] == "1"
    stopped, again, resumed = (log.index(text) for text in ("stopped by SIGUSR1", "goes back into the queue", "resuming"))
    assert stopped < again < resumed and not any(text in log for text in ("Traceback", "first failed"))
    assert losses(run) == losses(run.with_name("whole")) and len(losses(run)) == 60


BROKEN = """
import os
if os.environ.get("SLURM_PROCID") == "2" and os.environ.get("BREAK"):
    import course.training.trainer, signal
    def measure(number, *rest):
        if number == 3:
            if os.environ["BREAK"] == "raise":
                raise ValueError("the cause itself")
            os.kill(os.getpid(), signal.SIGKILL)
        return kept(number, *rest)
    kept, course.training.trainer.step_record = course.training.trainer.step_record, measure
"""


def test_when_a_rank_fails_the_job_ends_at_once_and_the_log_has_the_cause_first(cluster, submit, tiny_run, tmp_path):
    """One job whose rank 2 raises, and one whose rank 2 is killed, at the third step of a thousand."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(BROKEN)
    begin = time.monotonic()
    jobs = {how: submit(*FOUR, "submit/train.sh", "vit-demo", *tiny_run(how), "train.steps=1000", BREAK=how,
                        PYTHONPATH=python_path(hook, ROOT)) for how in ("raise", "kill")}
    assert [cluster.wait(job) for job in jobs.values()] == ["FAILED", "FAILED"]
    assert time.monotonic() - begin < 90
    raised, killed = (cluster.log(job) for job in jobs.values())
    told = raised[raised.index("== first failed rank"):].splitlines()
    assert told[0] == "== first failed rank 2:" and told[1].endswith("Traceback (most recent call last):")
    assert next(line for line in told if "Error: " in line).endswith("ValueError: the cause itself")
    assert sum("Traceback" in line for line in told) == 1
    # the others: at most a line each, from whichever they notice first; the lowest rank left tells of the one that is gone
    others = [line[0] for line in told if "another rank has failed" in line or "onnection" in line or "is gone" in line]
    assert "0" in others and sorted(others) == sorted(set(others) & {"0", "1", "3"}), told
    first = min(killed.index(text) for text in ("Traceback", "== first failed", "another rank") if text in killed)
    assert killed[first:].startswith("== first failed rank 2 on n2: Killed")


def test_a_job_that_cannot_run_says_so_before_any_rank_starts(place):
    from course.lab.slurm import local_cluster as starter

    own = starter.start(place, nodes=1, cpus=4, gpus=2)
    settings = {"COURSE_PYTHON": str(ROOT / ".venv/bin/python"), "OMP_NUM_THREADS": "1"}

    def said(*words: str, **environment: str) -> str:
        job = own.submit([*words, f"--output={place}/%j.log", "submit/train.sh", "vit-demo", "data.source=mock", "train.steps=2",
                          "train.device=cpu", f"log.dir={place}"], cwd=ROOT, **settings, **environment)
        return f"{own.wait(job)}: {own.log(job)}"

    assert "each GPU needs one: sbatch --gpus-per-node=2 --ntasks-per-node=2" in said("--gpus-per-node=2", "--ntasks-per-node=1")
    assert "1 CPUs for 2 tasks" in said("--gpus-per-node=2")
    assert "there is no site nowhere: COURSE_SITE names one of generic perlmutter workstation" in said(COURSE_SITE="nowhere")
    told = said("--gpus-per-node=2", "--ntasks-per-node=2")
    assert told.startswith("COMPLETED") and "2 x CPU" in told
