"""What a learner reports of runs: taken from their folders into the result file, and judged where work is graded.

A notebook's cell `report = {"undisturbed": "runs/...", ...}` names runs by their folders. `gather` reads their losses, and which
job wrote them (`course.lab.nodes.keep`). `judge` says of each what its files show, which is the learner's claim, and what Slurm
itself confirms: that a job of this number ran on so many nodes, whose it was, how often it was requeued. Of losses Slurm knows
nothing, and neither does whoever grades.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from course.lab.nodes import RECORD, losses
from course.lab.present import foreign

MOST = 5000                                          # steps of a run that a result file has room for
LONGEST = 1000                                       # characters of a list of nodes, and of a user's name
WHOLE = "undisturbed"                                # the run that the others are compared with
Known = tuple[dict[str, str], int | None]            # what Slurm says of a job, and how often it was requeued, if it says so


def gather(report: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Losses and job of each run that a report names by a folder below `base`; what names no run is left out."""
    found = {}
    for name, value in report.items():
        if isinstance(value, str) and value.startswith("runs/"):
            steps = losses(base / value)
            found[str(name)] = {"folder": value, "losses": [[step, steps[step]] for step in sorted(steps)][:MOST],
                                "job": recorded(base / value)}
    return found


def recorded(run: Path) -> dict[str, Any] | None:
    """Which job wrote a run; None if nothing says so."""
    try:
        found = json.loads((run / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def judge(runs: Mapping[str, Any], user: str, ask: Callable[[int], Known]) -> str:
    """What becomes of reported runs, in a line that begins each finding with "confirmed" or "claimed".

    user: the learner's account; ask: what Slurm says of a job's number. Raises whatever a damaged report
    leads to (KeyError, TypeError, ValueError).
    """
    said = []
    whole = dict(map(tuple, runs[WHOLE]["losses"])) if WHOLE in runs else {}
    for name, run in runs.items():
        told = run["job"]
        confirmed, text = of_job(told, user, ask) if told else (False, "nothing says which job wrote it")
        who = foreign(name)
        said.append(f"{who}: {'confirmed' if confirmed else 'claimed'}: {text}")
        if name != WHOLE:
            said.append(f"{who}: claimed: {compared(dict(map(tuple, run['losses'])), whole)}")
    return "; ".join(said)


def compared(mine: Mapping[int, float], whole: Mapping[int, float]) -> str:
    """How the losses of a run differ from those of the undisturbed one."""
    if not mine or not whole:
        return "no losses to compare"
    wrong = sorted(step for step in mine.keys() | whole.keys() if mine.get(step) != whole.get(step))
    if not wrong:
        return f"its {len(whole)} losses are those of the undisturbed run, bit for bit"
    return f"{len(wrong)} of {len(whole)} losses are NOT those of the undisturbed run, first at step {int(wrong[0])}"


def of_job(told: Mapping[str, Any], user: str, ask: Callable[[int], Known]) -> tuple[bool, str]:
    """Whether Slurm confirms what a run's record says of its job, and what there is to say."""
    number, again = int(told["id"]), int(told["restarts"])
    nodes, owner = str(told["nodes"])[:LONGEST], str(told["user"])[:LONGEST]
    if not 0 < number < 10**12 or not 0 <= again < 10**6:
        raise ValueError("no job has such a number, or was requeued so often")
    claim = f"job {number} of {foreign(owner)} on {foreign(nodes)}, requeued {times(again)}"
    if not told["by"]:
        return False, f"{claim}, without Slurm"
    if owner != user:
        return False, f"{claim}: another user than that of the job that checked the notebook, {user or 'unknown'}"
    known, restarts = ask(number)
    if not known:
        return False, f"{claim}: no Slurm here knows it"
    if known.get("NodeList") != nodes or known.get("UserId", "").split("(")[0] != owner:
        return False, f"{claim}: Slurm's job {number} is another one, nodes or user differ"
    if restarts is not None and restarts != again:
        return False, f"{claim}: Slurm says requeued {times(restarts)}"
    count = node_count(nodes)
    where = f"job {number} of {owner} ran on {count} node{'s' * (count > 1)}, {nodes}"
    return True, where + (f", and was requeued {times(again)}" if restarts is not None else
                          "; how often it was requeued Slurm does not say")


def times(count: int) -> str:
    """never, once, 2 times."""
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def node_count(nodes: str) -> int:
    """How many nodes a list such as gpu[003-005,017],login1 has."""
    def inside(brackets: str) -> int:
        return sum(int(last or first) - int(first) + 1 for first, _, last in (r.partition("-") for r in brackets.split(",")))

    parts = re.findall(r"(?:\[[^\]]*\]|[^,\[])+", nodes)
    return sum(math.prod(map(inside, re.findall(r"\[([^\]]*)\]", part))) for part in parts)
