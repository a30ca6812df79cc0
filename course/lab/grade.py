"""`course grade`: a class's notebooks, hidden variants of the checks, a gradebook.

Every answer runs isolated (`sandbox`), on inputs of a seed and of sizes that learners have not seen; what
they printed, wrote or claim counts for nothing. Results are kept one by one, so that a run that was
interrupted goes on where it stopped, and one with new submissions grades only those.
"""

import csv
import hashlib
import json
import os
import re
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from course.errors import CourseError
from course.files import atomic, sha256
from course.lab import cells, present, sandbox
from course.lab.check import Fact, Verdict, reference
from course.lab.exercise import Exercise, find
from course.lab.submissions import Submission, collect, judge, of_lesson


@dataclass(frozen=True)
class Graded:
    """One submission with its verdicts, in the order of the lesson's exercises."""

    submission: Submission
    verdicts: tuple[Verdict, ...]

    @property
    def points(self) -> int:
        return sum(find(verdict.exercise).points for verdict in self.verdicts if verdict.passed)


def main(folder: Path, out: Path, only: Sequence[str] = (), jobs: int = 0, seed: int | None = None,
         trust: bool = False) -> list[Graded]:
    """Grade all submissions below `folder`; write gradebook.csv, junit.xml and feedback/ to `out`."""
    layers = sandbox.layers()
    if not (layers.isolates or trust):
        raise CourseError(f"nothing here isolates other people's code from your files ({'; '.join(layers.why.values())}): "
                          "install bubblewrap, or run this as root in a container, or, if you trust every submission, --trust")
    submissions, notes = collect(folder)
    submissions = [s for s in submissions if not only or s.lesson in only]
    if not submissions:
        raise CourseError("\n".join([f"{folder} holds no notebook of a lesson that has exercises", *notes]))
    seed = settle_seed(out, seed)
    lessons = sorted({s.lesson for s in submissions})
    exercises = [exercise for lesson in lessons for exercise in of_lesson(lesson)]
    print(f"{len(submissions)} notebooks of {len({s.learner for s in submissions})} learners, lessons {', '.join(lessons)}, "
          f"seed {seed}\n  " + "\n  ".join([*layers.report(), *notes]), flush=True)
    graded = []
    with ThreadPoolExecutor(jobs or max(1, (os.cpu_count() or 2) // 2)) as pool:
        list(pool.map(lambda job: reference(*job), [(e.name, seed, True, size) for e in exercises for size in e.sizes]))
        tasks = [pool.submit(grade, submission, out, seed) for submission in submissions]
        for task in as_completed(tasks):
            graded.append(task.result())
            last = graded[-1]
            print(f"{len(graded)}/{len(tasks)} {present.printable(last.submission.learner)}, lesson {last.submission.lesson}: "
                  f"{last.points} of {sum(e.points for e in of_lesson(last.submission.lesson))} points", flush=True)
    graded.sort(key=lambda g: (g.submission.learner, g.submission.lesson))
    gradebook(graded, exercises, out / "gradebook.csv")
    junit(graded, out / "junit.xml")
    for learner in dict.fromkeys(g.submission.learner for g in graded):
        feedback(learner, [g for g in graded if g.submission.learner == learner], out / "feedback" / f"{slug(learner)}.html")
    print(f"wrote {out}/gradebook.csv, {out}/junit.xml and {out}/feedback/")
    return graded


def settle_seed(out: Path, seed: int | None) -> int:
    """The seed of the hidden inputs: as given, or that of the run which this one goes on with, or a new one; kept in `out`."""
    path = out / "seed"
    if seed is None and path.is_file() and path.read_text().strip().isdigit():
        return int(path.read_text())
    seed = secrets.randbits(31) if seed is None else seed
    with atomic(path) as temporary:
        temporary.write_text(f"{seed}\n")
    return seed


def grade(submission: Submission, out: Path, seed: int) -> Graded:
    """Grade one submission, or take its kept result if neither it nor the checks have changed."""
    exercises = of_lesson(submission.lesson)
    kept = out / "results" / f"{slug(submission.learner)}-{submission.lesson}.json"
    key = {"notebook": sha256(submission.path), "seed": seed, "versions": {e.name: e.version for e in exercises}}
    if known := recall(kept, key):
        return Graded(submission, known)
    verdicts = tuple(safely(exercise, submission, seed) for exercise in exercises)
    with atomic(kept) as temporary:
        temporary.write_text(json.dumps({**key, "verdicts": [asdict(verdict) for verdict in verdicts]}, indent=1))
    return Graded(submission, verdicts)


def recall(path: Path, key: dict[str, Any]) -> tuple[Verdict, ...] | None:
    """The kept verdicts, if they are on this notebook by these checks and this seed."""
    try:
        kept = json.loads(path.read_text())
        if {name: kept[name] for name in key} != key:
            return None
        return tuple(Verdict(**{**v, "facts": tuple(Fact(**fact) for fact in v["facts"])}) for v in kept["verdicts"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def safely(exercise: Exercise, submission: Submission, seed: int) -> Verdict:
    """The verdict on one exercise; a notebook that cannot be read, or whatever else goes wrong with it, is one too."""
    try:
        return judge(exercise, cells.load(submission.path), seed, hidden=True)
    except CourseError as error:
        text = str(error).replace(str(submission.path), submission.path.name)
    except Exception as error:                       # one submission must not end the class's run
        text = f"the check could not be run on it ({type(error).__name__}: {error})"
    return Verdict(exercise.name, (Fact(False, text),), "open the notebook in JupyterLab, run it, save it, and hand it in again",
                   seed=seed, version=exercise.version)


def gradebook(graded: Sequence[Graded], exercises: Sequence[Exercise], path: Path) -> None:
    """A row for each learner: points of every exercise, their sum, and what there was to gain."""
    rows: dict[str, dict[str, Any]] = {}
    for one in graded:
        row = rows.setdefault(one.submission.learner, {"learner": harmless(one.submission.learner), "points": 0})
        row["points"] += one.points
        row |= {column(find(v.exercise)): find(v.exercise).points * v.passed for v in one.verdicts}
    heads = ["learner", "points", "out_of", *map(column, exercises)]
    with atomic(path) as temporary, open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, heads, restval="")
        writer.writeheader()
        writer.writerows(row | {"out_of": sum(e.points for e in exercises)} for row in rows.values())


def column(exercise: Exercise) -> str:
    """The gradebook's column of an exercise."""
    return f"{exercise.lesson} {exercise.name} ({exercise.points})"


def junit(graded: Sequence[Graded], path: Path) -> None:
    """The verdicts as JUnit XML, which CI systems show: a suite for each notebook, a case for each exercise."""
    root = ElementTree.Element("testsuites")
    for one in graded:
        failed = sum(not verdict.passed for verdict in one.verdicts)
        suite = ElementTree.SubElement(root, "testsuite", tests=str(len(one.verdicts)), failures=str(failed),
                                       name=f"{present.printable(one.submission.learner)}, lesson {one.submission.lesson}")
        for verdict in one.verdicts:
            case = ElementTree.SubElement(suite, "testcase", name=verdict.exercise, classname=f"lesson {one.submission.lesson}",
                                          time=f"{verdict.seconds:.2f}")
            if not verdict.passed:
                failure = ElementTree.SubElement(case, "failure", message=present.headline(verdict))
                failure.text = present.text(verdict, colour=False)
    with atomic(path) as temporary:
        ElementTree.ElementTree(root).write(temporary, encoding="utf-8", xml_declaration=True)


PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Feedback</title>
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem}}</style></head>
<body><h1>{learner}</h1>
{body}
<p><small>Each answer was run in the library's place on inputs that are not those of the notebook's own checks.
What is listed is what was found; nothing else counted.</small></p></body></html>
"""


def feedback(learner: str, graded: Sequence[Graded], path: Path) -> None:
    """A page for one learner: what held, what did not, and a hint, for each exercise."""
    from html import escape

    parts = []
    for one in graded:
        most = sum(exercise.points for exercise in of_lesson(one.submission.lesson))
        parts.append(f"<h2>Lesson {escape(one.submission.lesson)}: {one.points} of {most} points</h2>")
        parts += [present.html(verdict) for verdict in one.verdicts]
    with atomic(path) as temporary:
        temporary.write_text(PAGE.format(learner=escape(present.printable(learner)), body="\n".join(parts)), encoding="utf-8")


def slug(name: str) -> str:
    """A name as a safe file name, different for different names."""
    readable = re.sub(r"[^A-Za-z0-9.-]+", "_", name).strip("._")[:60] or "learner"
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def harmless(text: str) -> str:
    """A cell of a table that no spreadsheet takes for a formula."""
    text = present.printable(text).replace("\n", " ").replace("\t", " ")
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
