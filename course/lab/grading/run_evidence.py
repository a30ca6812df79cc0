"""Runs that a learner reports: copy them from their folders into the result file, and judge them during grading.

A notebook's cell `report = {"undisturbed": "runs/...", ...}` names runs by their folders. `gather_runs` reads their losses and
the job that wrote them (`course.lab.slurm.job_backend.record_job`). For each run, `judge_runs` separates what the files show,
which the learner claims, from what Slurm confirms: the job's number, nodes, user and requeues. Nobody can confirm the losses.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from course.lab.checks.render import quote_untrusted
from course.lab.slurm.job_backend import JOB_FILE, losses

MAX_STEPS = 5000                                     # steps of a run in a result file
MAX_CHARACTERS = 1000                                # characters of a node list or user name
UNDISTURBED = "undisturbed"                          # the run to compare the others with


def gather_runs(report: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Losses and job of each run that a report names by a folder below `base`; it skips entries that name no run."""
    runs = {}
    for name, value in report.items():
        if isinstance(value, str) and value.startswith("runs/"):
            steps = losses(base / value)
            runs[str(name)] = {"folder": value, "losses": [[step, steps[step]] for step in sorted(steps)][:MAX_STEPS],
                                "job": recorded_job(base / value)}
    return runs


def recorded_job(run: Path) -> dict[str, Any] | None:
    """The job that wrote a run; None if there is no record."""
    try:
        job = json.loads((run / JOB_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return job if isinstance(job, dict) else None


def judge_runs(runs: Mapping[str, Any], user: str, ask: Callable[[int], dict[str, str]]) -> str:
    """The findings on reported runs in one line, each marked "confirmed" or "claimed".

    user: the learner's account; ask: job number -> Slurm's fields. Raises KeyError, TypeError or ValueError if the report is
    damaged.
    """
    findings = []
    undisturbed = dict(map(tuple, runs[UNDISTURBED]["losses"])) if UNDISTURBED in runs else {}
    for name, run in runs.items():
        job = run["job"]
        confirmed, text = judge_job(job, user, ask) if job else (False, "nothing says which job wrote it")
        label = quote_untrusted(name)
        findings.append(f"{label}: {'confirmed' if confirmed else 'claimed'}: {text}")
        if name != UNDISTURBED:
            findings.append(f"{label}: claimed: {compare_losses(dict(map(tuple, run['losses'])), undisturbed)}")
    return "; ".join(findings)


def compare_losses(losses: Mapping[int, float], undisturbed: Mapping[int, float]) -> str:
    """Describe how the losses of a run differ from those of the undisturbed run."""
    if not losses or not undisturbed:
        return "no losses to compare"
    differing = sorted(step for step in losses.keys() | undisturbed.keys() if losses.get(step) != undisturbed.get(step))
    if not differing:
        return f"its {len(undisturbed)} losses are those of the undisturbed run, bit for bit"
    first = int(differing[0])
    return f"{len(differing)} of {len(undisturbed)} losses are NOT those of the undisturbed run, first at step {first}"


def judge_job(job: Mapping[str, Any], user: str, ask: Callable[[int], dict[str, str]]) -> tuple[bool, str]:
    """Whether Slurm confirms a run's record of its job, and a description."""
    number, requeued = int(job["id"]), int(job["restarts"])
    nodes, owner = str(job["nodes"])[:MAX_CHARACTERS], str(job["user"])[:MAX_CHARACTERS]
    if not 0 < number < 10**12 or not 0 <= requeued < 10**6:
        raise ValueError("no job has such a number, or was requeued so often")
    claim = f"job {number} of {quote_untrusted(owner)} on {quote_untrusted(nodes)}, requeued {count_in_words(requeued)}"
    if not job["by"]:
        return False, f"{claim}, without Slurm"
    if owner != user:
        return False, f"{claim}: another user than that of the job that checked the notebook, {user or 'unknown'}"
    record = ask(number)
    if not record:
        return False, f"{claim}: no Slurm here knows it"
    if record.get("NodeList") != nodes or record.get("UserId", "").split("(")[0] != owner:
        return False, f"{claim}: Slurm's job {number} is another one, nodes or user differ"
    if record.get("Restarts") != str(requeued):
        return False, f"{claim}: Slurm says requeued {record.get('Restarts', 'nothing of that')}"
    return True, f"job {number} of {owner} ran on {nodes}, and was requeued {count_in_words(requeued)}"


def count_in_words(count: int) -> str:
    """A count in words: never, once, 2 times."""
    return {0: "never", 1: "once"}.get(count, f"{count} times")
