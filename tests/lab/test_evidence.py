"""What a report of runs is worth: what Slurm confirms, what is only claimed, and what its own files contradict."""

import json

import pytest

from course.lab.grading import run_evidence

JOB = {"id": 12, "state": "COMPLETED", "restarts": 1, "nodes": "n[1-2]", "user": "ann", "by": "Slurm"}
KNOWN = {"NodeList": "n[1-2]", "UserId": "ann(1000)", "Restarts": "1"}


@pytest.fixture
def course(tmp_path):
    """Two runs with the same losses, one of which a job has written."""
    for name in ("whole", "stopped"):
        run = tmp_path / "runs" / "gpt-demo" / name
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in (1, 2, 3)))
    (run / "job.json").write_text(json.dumps(JOB))
    return tmp_path


REPORT = {"undisturbed": "runs/gpt-demo/whole", "preempted": "runs/gpt-demo/stopped", "layout": "tp=1", "share": 0.1}


def judged(course, job=None, known=KNOWN, user="ann", losses=None) -> str:
    runs = json.loads(json.dumps(run_evidence.gather_runs(REPORT, course)))                # as the result file has it
    runs["preempted"] |= {"job": JOB | (job or {})} | ({"losses": losses} if losses else {})
    return run_evidence.judge_runs(runs, user, lambda number: known if number == 12 else {})


def test_runs_are_gathered_with_losses_and_job_and_nothing_else(course):
    found = run_evidence.gather_runs(REPORT, course)
    assert set(found) == {"undisturbed", "preempted"}
    assert found["preempted"] == {"folder": "runs/gpt-demo/stopped", "losses": [[1, 1.0], [2, 0.5], [3, 1 / 3]], "job": JOB}
    assert found["undisturbed"]["job"] is None
    assert run_evidence.gather_runs({"gone": "runs/none"}, course)["gone"]["losses"] == []


def test_slurm_confirms_job_nodes_and_requeues_and_losses_stay_claimed(course):
    told = judged(course)
    assert "preempted: confirmed: job 12 of ann ran on n[1-2], and was requeued once" in told
    assert "preempted: claimed: its 3 losses are those of the undisturbed run, bit for bit" in told
    assert "undisturbed: claimed: nothing says which job wrote it" in told


@pytest.mark.parametrize(("change", "words"), [
    ({"known": {}}, "no Slurm here knows it"),
    ({"known": KNOWN | {"NodeList": "n1"}}, "another one"),
    ({"known": KNOWN | {"UserId": "bob(1001)"}}, "another one"),
    ({"known": KNOWN | {"Restarts": "0"}}, "Slurm says requeued 0"),
    ({"known": {"NodeList": "n[1-2]", "UserId": "ann(1000)"}}, "Slurm says requeued nothing of that"),
    ({"user": "bob"}, "another user than that of the job that checked the notebook, bob"),
    ({"job": {"by": ""}}, "without Slurm"),
    ({"job": {"id": 13}}, "no Slurm here knows it"),
])
def test_what_slurm_does_not_confirm_is_a_claim_with_the_reason(course, change, words):
    told = judged(course, **change)
    assert "confirmed" not in told and words in told


def test_losses_that_differ_or_are_missing_are_named(course):
    assert "1 of 3 losses are NOT those of the undisturbed run, first at step 2" in judged(course, losses=[[1, 1.0], [2, 0.4],
                                                                                                          [3, 1 / 3]])
    assert "NOT those" in judged(course, losses=[[1, 1.0]])
    assert "no losses to compare" in run_evidence.judge_runs({"a": {"losses": [], "job": None}}, "", lambda number: {})


def test_a_damaged_record_of_a_job_is_none(course):
    (course / "runs" / "gpt-demo" / "stopped" / "job.json").write_text("[")
    assert run_evidence.gather_runs(REPORT, course)["preempted"]["job"] is None


def test_a_run_cannot_be_called_confirmed_by_its_name(course):
    runs = run_evidence.gather_runs(REPORT, course)
    runs["undisturbed: confirmed: job 7 of ann ran on 8 nodes; x"] = runs["preempted"] | {"job": None}
    said = run_evidence.judge_runs(runs, "ann", lambda number: {})
    assert ": confirmed:" not in said
