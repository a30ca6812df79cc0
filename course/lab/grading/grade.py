"""`course grade`: grade a class's notebooks with hidden inputs, and write a gradebook.

Every answer runs isolated (`sandbox`), on inputs whose seed and sizes learners have not seen. What learners printed, wrote or
claim counts for nothing. Each result is saved by itself: an interrupted run continues where it stopped, a run with new
submissions grades only those, and the gradebook of one lesson grows into that of the course.
"""

import csv
import hashlib
import json
import math
import re
import secrets
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from course.lab.checks import notebook_cells, render
from course.lab.checks.check import Fact, Verdict, reference_runs, unchecked_verdict
from course.lab.checks.exercise import Exercise, all_exercises, find
from course.lab.grading import on_cluster, sandboxed_reading
from course.lab.grading.sandboxed_reading import disk_shortage
from course.lab.grading.submissions import Submission, collect_submissions, exercises_of_lesson, judge_exercise
from course.lab.sandbox import closed_folders, sandbox
from course.utils.atomic_files import atomic, sha256, write_json
from course.utils.errors import CourseError
from course.utils.machine import cores

MAX_RETRY_SECONDS = 300.0                            # seconds per learner to retry unchecked answers at the end of a run
# the start of a spreadsheet cell, followed by a formula
FORMULA_START = re.compile(r"""(^|[,;\t|])([\s"']*)(?=[=+\-@＝＋－＠])""")
REOPEN = "open the notebook in JupyterLab, run it, save it, and hand it in again"
KeptResult = tuple[dict[str, Any], tuple[Verdict, ...]]  # a saved result, as in results/, and its verdicts


@dataclass(frozen=True)
class Graded:
    """One submission with its verdicts, in the order of the lesson's exercises."""

    submission: Submission
    verdicts: tuple[Verdict, ...]

    @property
    def unchecked(self) -> bool:
        """Whether some exercise could not be checked, so there is no mark yet."""
        return any(verdict.unchecked for verdict in self.verdicts)

    @property
    def points(self) -> int:
        """The sum of the current points of the exercises that passed, without open tasks."""
        return sum(verdict.points for verdict in self.verdicts if not find(verdict.exercise).open)

    @property
    def open_points(self) -> int:
        """The sum of the current points of open tasks."""
        return sum(verdict.points for verdict in self.verdicts if find(verdict.exercise).open)

    @property
    def open_words(self) -> str:
        """The points of open tasks, to continue a sentence; "" if there are none."""
        return f" and {self.open_points} of open tasks" if self.open_points else ""


def main(folder: Path, out: Path, only: Sequence[str] = (), jobs: int = 0, seed: int | None = None,
         trust: bool = False) -> list[Graded]:
    """Grade all submissions below `folder`; write gradebook.csv, junit.xml and feedback/ to `out`.

    All three include every earlier result in `out`, also from other lessons and folders.
    """
    seed = choose_seed(out, seed)
    submissions, notes = collect_submissions(folder,
                                             lambda learner: print_line(f"reading {render.printable_line(learner)}"),
                                 graded_before(out, seed), jobs or max(1, cores() // 2))
    only = [lesson.zfill(2) for lesson in only]
    submissions = [s for s in submissions if not only or s.lesson in only]
    if not submissions:
        which = f"lesson {' or '.join(only)}" if only else "a lesson that has exercises"
        raise CourseError("\n".join([f"{folder} holds no notebook of {which}", *map(render.printable_line, notes)]))
    late = {submission: why for submission in submissions if (why := why_outdated(submission, out))}
    submissions, notes = [s for s in submissions if s not in late], [*notes, *late.values()]
    recalled = [one for one in (load_graded(submission, out, seed) for submission in submissions) if one]
    new = [s for s in submissions if s not in {one.submission for one in recalled}]
    learners, lessons = {s.learner for s in submissions}, sorted({s.lesson for s in submissions})
    print("\n  ".join([f"{len(submissions)} notebooks of {len(learners)} learners, lessons {', '.join(lessons)}: {len(new)} to "
                       f"grade, {len(recalled)} graded already", *map(render.printable_line, notes)]), flush=True)
    if new:
        print("\n".join([describe_protection(trust), *closed_folders.close_to_others([folder, closed_folders.SOLUTIONS])]),
              flush=True)
    try:
        closed_folders.make_private(out)
    except OSError as error:
        raise CourseError(f"{out} cannot be created as the output folder ({error.strerror}): name another one") from error
    others = load_other_results(out, submissions)
    graded = recalled + (grade_all(new, out, jobs, seed) if new else []) + others
    graded.sort(key=lambda g: (g.submission.learner, g.submission.lesson))
    claims = take_in_result_files(folder, [one for one in graded if one.submission in submissions], out)
    write_gradebook(graded, out / "gradebook.csv")
    write_junit(graded, out / "junit.xml")
    for learner in dict.fromkeys(g.submission.learner for g in graded):
        with errors_printed(f"the feedback page of {learner}"):
            own = [g for g in graded if g.submission.learner == learner]
            write_feedback(learner, own, out / "feedback" / f"{slug(learner)}.html", claims)
    more = f"; in them are also {len(others)} notebooks that earlier runs graded and this one did not look at" if others else ""
    if again := [f"{g.submission.learner}, lesson {g.submission.lesson}" for g in graded if g.unchecked]:
        print("\n  ".join(["could not be checked, so that it is no mark; the next run tries again:",
                           *map(render.printable_line, again)]))
    print(render.printable(f"wrote {out}/gradebook.csv, {out}/junit.xml and {out}/feedback/{more}"))
    return graded


@contextmanager
def errors_printed(what: str) -> Iterator[None]:
    """Print an error with one learner's files and continue: it must not end the class's run."""
    try:
        yield
    except Exception as error:
        print(render.printable_line(f"{what} is left out: {render.failure_reason(error)}"), flush=True)


def describe_protection(trust: bool) -> str:
    """Describe how answers are isolated here, in a sentence. Raises `CourseError` if nothing isolates them, unless `trust`."""
    layers = sandbox.layers()
    limits = "within limits on time, memory, processes, output and disk"
    if layers.namespaces:
        return f"every answer runs with files, processes and a network of its own (bubblewrap), {limits}"
    if layers.user:
        return (f"every answer runs as a user of its own that cannot change your files or read those closed to others, {limits}; "
                f"the network stays open to it (bubblewrap would close it: {layers.why['namespaces']})")
    if trust:
        return f"every answer runs as you, {limits}: nothing else keeps it from your files and the network, as --trust allows"
    raise CourseError(f"this machine cannot isolate other people's code from your files ({'; '.join(layers.why.values())}): "
                      "install bubblewrap, or run this as root in a container, or use --trust if you trust every submission")


def grade_all(submissions: Sequence[Submission], out: Path, jobs: int, seed: int) -> list[Graded]:
    """Grade submissions, `jobs` at a time, and print each result as it is done."""
    save_seed(out, seed)
    graded, before = [], {submission: load_result(result_path(submission, out)) for submission in submissions}
    exercises = [exercise for lesson in sorted({s.lesson for s in submissions}) for exercise in exercises_of_lesson(lesson)]
    with ThreadPoolExecutor(jobs or max(1, cores() // 2)) as pool:
        try:
            list(pool.map(run_reference, [(e.name, exercise_seed(e, seed), True, size) for e in exercises for size in e.sizes]))
            tasks = [pool.submit(grade, submission, out, seed) for submission in submissions]
            for task in as_completed(tasks):
                graded.append(task.result())
                print_progress(graded[-1], f"{len(graded)}/{len(tasks)}", before)
            for one in retry_unchecked(list(graded), out, seed):
                graded = [one if other.submission == one.submission else other for other in graded]
                print_progress(one, "again", before)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)              # leaving the block waits for running tasks
            print(f"stopped: what is graded is kept in {out / 'results'}, and the same command goes on", flush=True)
            raise
    return graded


def print_progress(graded: Graded, which: str, before: Mapping[Submission, KeptResult | None]) -> None:
    """Print the result of a submission."""
    who, lesson = render.printable_line(graded.submission.learner), graded.submission.lesson
    print_line(f"{which} {who}, lesson {lesson}: {graded.points} of {points_of_lesson(lesson)} points"
               f"{graded.open_words}{', some could not be checked' * graded.unchecked}"
               f"{describe_replacement(graded, before[graded.submission])}")


def print_line(line: str) -> None:
    """Print a line in one write. `print` writes the line and its end apart, and another thread's line may come between."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def points_of_lesson(lesson: str) -> int:
    """The points of a lesson's exercises, without open tasks."""
    return sum(exercise.points for exercise in exercises_of_lesson(lesson) if not exercise.open)


def run_reference(job: tuple[str, int, bool, int]) -> None:
    """Run the right answer and the known mistakes, to cache them. It ignores errors: grading meets and reports them again."""
    with suppress(Exception):
        reference_runs(*job)


def describe_replacement(new: Graded, earlier: KeptResult | None) -> str:
    """How the mark of an earlier run changes, as the end of a sentence; "" if there is none or it stays."""
    if not earlier:
        return ""
    old_points = Graded(new.submission, tuple(v for v in earlier[1] if v.exercise in all_exercises())).points
    if earlier[0]["notebook"] != notebook_digest(new.submission):
        return f" (replaces the notebook of {format_date(earlier[0]['date'])}: {old_points} -> {new.points})"
    return f" (the checks or their inputs are others now: {old_points} -> {new.points})" if old_points != new.points else ""


def why_outdated(submission: Submission, out: Path) -> str:
    """Why a notebook does not count, because an earlier run graded a newer one; "" if it counts."""
    earlier, date = load_result(result_path(submission, out)), submission_date(submission)
    if not earlier or date >= earlier[0]["date"] or earlier[0]["notebook"] == notebook_digest(submission):
        return ""
    return (f"{submission.learner}, lesson {submission.lesson}: {submission.path.name} of {format_date(date)} is left out, since "
            f"an earlier run graded one of {format_date(earlier[0]['date'])}; to let it count, delete "
            f"{result_path(submission, out)}")


def submission_date(submission: Submission) -> float:
    """When it was handed in, as timestamp: from the platform's file name, else the file's modification time."""
    try:
        return submission.date or submission.path.stat().st_mtime
    except OSError:
        return 0.0


def notebook_digest(submission: Submission) -> str:
    """The notebook's SHA-256, or its size if it is too large; "" if it cannot be read."""
    if submission.reading:
        return submission.reading.digest
    try:
        size = submission.path.stat().st_size
        return sha256(submission.path) if size <= notebook_cells.MAX_BYTES else f"{size} bytes"
    except OSError:
        return ""


def format_date(date: float) -> str:
    """Format a timestamp; 0 is "an unknown date"."""
    try:
        return datetime.fromtimestamp(date).strftime("%Y-%m-%d %H:%M") if date else "an unknown date"
    except (OverflowError, ValueError, OSError):     # some file systems accept any number
        return "an unknown date"


def take_in_result_files(folder: Path, graded: Sequence[Graded], out: Path) -> list[on_cluster.Claim]:
    """Judge the result files (submit/check.sh) that came with notebooks; write those of all runs into `out` to claims.csv.

    They change no mark: only grading itself decides correctness. If a learner's new notebook comes without a result file, it
    drops the earlier one.
    """
    with errors_printed("every result file"):
        came = on_cluster.result_files(folder)
        for one in graded:
            with errors_printed(f"the result file of {one.submission.learner}, lesson {one.submission.lesson},"):
                take_in_result_file(came.get((one.submission.learner, one.submission.lesson), []), one, out)
    claims = list(filter(None, map(load_claim, sorted((out / "claims").glob("*.json")))))
    (out / "claims.csv").unlink(missing_ok=True)     # written below, if there are any
    if claims:
        heads = ["learner", "lesson", "file", "taken", "job", "speed", "hardware", "numbers", "note", "runs"]
        with atomic(out / "claims.csv") as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
            writer.writerow(heads)
            for claim in claims:
                also = sorted({other.learner for other in claims if claim.job and other.learner != claim.learner
                               and (other.job, other.place) == (claim.job, claim.place)})
                said = "; ".join([describe_claim(claim), *(["its job is also claimed by " + ", ".join(also)] if also else [])])
                row = [claim.learner, claim.lesson, claim.file, "refused" if claim.refused else "taken", claim.job,
                       "" if claim.refused else "claimed", "" if claim.refused else describe_hardware(claim), claim.numbers, said,
                       claim.runs]
                writer.writerow(list(map(escape_formula, row)))
        print(f"{len(claims)} result files of jobs, {sum(bool(claim.refused) for claim in claims)} refused, "
              f"{sum(claim.confirmed for claim in claims)} confirmed by Slurm: {out}/claims.csv", flush=True)
    return claims


def take_in_result_file(result_files: Sequence[Path], graded: Graded, out: Path) -> None:
    """Judge the newest result file that came with a notebook, and save the claim."""
    submission = graded.submission
    claim_path = out / "claims" / result_path(submission, out).name
    if not result_files:
        claim_path.unlink(missing_ok=True)
        return
    claim = on_cluster.judge_result(result_files[-1], submission.learner, submission.lesson, submission.path, graded.verdicts,
                                    accounts=accounts(out))
    write_json(claim_path, asdict(claim))


def accounts(out: Path) -> dict[str, set[str]]:
    """Learners' accounts on the cluster, from accounts.csv (learner,account), which the grader may provide."""
    accounts_of = defaultdict[str, set[str]](set)
    with suppress(FileNotFoundError), open(out / "accounts.csv", newline="", encoding="utf-8-sig") as file:
        for row in csv.reader(file):
            if len(row) >= 2:
                accounts_of[row[0].strip()].add(row[1].strip())
    return accounts_of


def load_claim(path: Path) -> on_cluster.Claim | None:
    """Load a saved claim; None if it is damaged or from another version of the course."""
    try:
        return on_cluster.Claim(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def describe_hardware(claim: on_cluster.Claim) -> str:
    """The hardware of the job as Slurm confirms it, then the devices as the result file claims them."""
    parts = [f"confirmed: {claim.slurm or 'the job, not its devices'}"] if claim.confirmed else []
    devices = "; ".join(map(render.quote_untrusted, claim.devices.split("; ")))
    return "; ".join([*parts, f"claimed: {devices}"] if claim.devices or not parts else parts).removesuffix(": ")


def describe_claim(claim: on_cluster.Claim) -> str:
    """Describe a result file: why it is refused, or what it contradicts and whether Slurm confirms it."""
    if claim.refused:
        return claim.refused
    parts = [f"it calls passed what is not: {', '.join(claim.contradicted)}"] if claim.contradicted else []
    return "; ".join([*parts, claim.why])


def graded_before(out: Path, seed: int) -> dict[str, dict[str, str]]:
    """Learner -> notebook digest -> lesson, for notebooks already graded with the current checks and this seed."""
    lessons_of = defaultdict[str, dict[str, str]](dict)
    for results in filter(None, map(load_result, sorted((out / "results").glob("*.json")))):
        about = results[0]
        if about.get("seed") == seed and about.get("versions") == check_versions(about["lesson"]):
            lessons_of[about["learner"]][about["notebook"]] = about["lesson"]
    return lessons_of


def choose_seed(out: Path, seed: int | None) -> int:
    """The seed of the hidden inputs: the given one, that of earlier runs into `out`, or a new one."""
    if seed is not None:
        return seed
    try:
        text = (out / "seed").read_bytes()[:100].strip()
    except FileNotFoundError:
        return secrets.randbits(128)
    except OSError as error:
        raise CourseError(f"{out}/seed cannot be read ({error.strerror}): all that was graded here was graded with it") from error
    if not text.isdigit() or len(text) > 50:         # for bytes, isdigit accepts ASCII digits only
        raise CourseError(f"{out}/seed holds no number: restore it from a copy, or remove it to grade everything again")
    return int(text)


def exercise_seed(exercise: Exercise, seed: int) -> int:
    """An exercise's own 128-bit seed; it reveals neither `seed` nor another exercise's. Draws depend on all its bits."""
    return int.from_bytes(hashlib.sha256(f"{seed} {exercise.name}".encode()).digest()[:16])


def save_seed(out: Path, seed: int) -> None:
    """Save the seed for later runs into `out`."""
    with atomic(out / "seed") as temporary:
        temporary.write_text(f"{seed}\n", encoding="utf-8")


def grade(submission: Submission, out: Path, seed: int, before: Graded | None = None, seconds: float = math.inf) -> Graded:
    """Grade one submission and save the result, unless something in it could not be checked.

    before: the result of an earlier attempt. It then retries only unchecked exercises, and starts none after `seconds`.
    """
    who = f"{submission.learner}, lesson {submission.lesson}"
    print_line(render.printable_line(f"grading {who}{' again, alone' * bool(before)}"))
    exercises, until = exercises_of_lesson(submission.lesson), time.monotonic() + seconds
    try:
        submission = ensure_reading(submission)
        key = {**result_key(submission, seed), "date": submission_date(submission)}
        verdicts = []
        for number, exercise in enumerate(exercises):
            earlier_verdict = before and before.verdicts[number]
            if earlier_verdict and (not earlier_verdict.unchecked or time.monotonic() > until):
                verdicts.append(earlier_verdict)
            else:
                verdicts.append(judge_safely(exercise, submission, exercise_seed(exercise, seed), last=bool(before)))
        graded = Graded(submission, tuple(verdicts))
        if not graded.unchecked:
            write_json(result_path(submission, out), key | {"verdicts": [asdict(verdict) for verdict in graded.verdicts]})
        return graded
    except Exception as error:                       # such as a full disk: not the learner's fault
        return Graded(submission, tuple(machine_failed(exercise, error, exercise_seed(exercise, seed)) for exercise in exercises))


def retry_unchecked(graded: Sequence[Graded], out: Path, seed: int) -> Iterator[Graded]:
    """Retry what could not be checked, while nothing else runs. Per learner, it starts no check after `MAX_RETRY_SECONDS`."""
    spent = defaultdict[str, float](float)
    for one in graded:
        submission, begin = one.submission, time.monotonic()
        if not one.unchecked or spent[submission.learner] > MAX_RETRY_SECONDS:
            continue
        if submission.reading and submission.reading.failure:
            submission = replace(submission, reading=None)
        yield grade(submission, out, seed, one, MAX_RETRY_SECONDS - spent[submission.learner])
        spent[submission.learner] += time.monotonic() - begin


def ensure_reading(submission: Submission) -> Submission:
    """The submission with its reading, which may say that it is unreadable."""
    if submission.reading and (submission.reading.answers or submission.reading.problem or submission.reading.failure):
        return submission
    return replace(submission,
                   reading=sandboxed_reading.read_one(sandboxed_reading.SubmittedFile(submission.path, submission.path.name,
                                                                                    submission.lesson)))


def machine_failed(exercise: Exercise, error: BaseException | str, seed: int) -> Verdict:
    """The verdict when this machine failed; `error` is the exception or a sentence."""
    why = error if isinstance(error, str) else render.failure_reason(error)
    return unchecked_verdict(exercise, why, seed, hidden=True)


def result_path(submission: Submission, out: Path) -> Path:
    """The file with a submission's result."""
    return out / "results" / f"{slug(submission.learner)}-{submission.lesson}.json"


def result_key(submission: Submission, seed: int) -> dict[str, Any]:
    """Everything that a result depends on: learner, lesson, notebook, seed and checks."""
    return {"learner": submission.learner, "lesson": submission.lesson, "notebook": notebook_digest(submission), "seed": seed,
            "versions": check_versions(submission.lesson)}


def check_versions(lesson: str) -> dict[str, str]:
    """The versions of a lesson's checks, by exercise name."""
    return {exercise.name: exercise.version for exercise in exercises_of_lesson(lesson)}


def load_graded(submission: Submission, out: Path, seed: int) -> Graded | None:
    """The saved result if it is for this same notebook, these checks and this seed, and complete; else None."""
    earlier = load_result(result_path(submission, out))
    if not earlier or any(earlier[0].get(name) != value for name, value in result_key(submission, seed).items()):
        return None
    complete = {verdict.exercise for verdict in earlier[1]} == {exercise.name
                                                                for exercise in exercises_of_lesson(submission.lesson)}
    return Graded(submission, earlier[1]) if complete else None


def load_other_results(out: Path, submissions: Sequence[Submission]) -> list[Graded]:
    """Saved results in `out` for other notebooks, without exercises that no longer exist."""
    graded_now = {result_path(submission, out) for submission in submissions}
    others = []
    for path in sorted(set((out / "results").glob("*.json")) - graded_now):
        if earlier := load_result(path):
            exercises = {exercise.name
                     for exercise in exercises_of_lesson(earlier[0]["lesson"])}             # an exercise may have moved
            verdicts = tuple(verdict for verdict in earlier[1] if verdict.exercise in exercises)
            others.append(Graded(Submission(earlier[0]["learner"], earlier[0]["lesson"], path), verdicts))
    return [one for one in others if one.verdicts]


def load_result(path: Path) -> KeptResult | None:
    """Load a saved result and its verdicts; None if it is missing or damaged."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        verdicts = tuple(Verdict(**{**v, "facts": tuple(Fact(**fact) for fact in v["facts"])}) for v in record["verdicts"])
        normalized = {"learner": str(record["learner"]), "lesson": str(record["lesson"]),
                      "notebook": str(record.get("notebook", "")),
                "date": float(record.get("date", 0))}
        if not all(isinstance(verdict.exercise, str) for verdict in verdicts):
            return None
        return record | normalized, verdicts
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def judge_safely(exercise: Exercise, submission: Submission, seed: int, last: bool = False) -> Verdict:
    """The verdict on one exercise. An unreadable notebook or any other error becomes a verdict, too.

    last: nothing else runs and there is no further retry. Until then it believes an answer that reports a machine failure.
    """
    try:
        reading = ensure_reading(submission).reading
        assert reading
        if reading.failure:
            return machine_failed(exercise, reading.failure, seed)
        if reading.problem:
            fact = Fact(False, f"{submission.path.name} {reading.problem}")
            return Verdict(exercise.name, (fact,), REOPEN, seed=seed, version=exercise.version)
        if shortage := disk_shortage(exercise.limits.disk * 1e9):
            return machine_failed(exercise, shortage, seed)
        verdict = judge_exercise(exercise, reading, seed, hidden=True, believing=not last)
        if verdict.late:                             # the machine may have been busy
            verdict = judge_exercise(exercise, reading, seed, hidden=True, believing=not last)
        if not verdict.passed and (shortage := disk_shortage(0)):
            return machine_failed(exercise, shortage, seed)
        return verdict
    except Exception as error:                       # one submission must not end the class's run
        return machine_failed(exercise, error, seed)


def write_gradebook(graded: Sequence[Graded], path: Path) -> None:
    """Write a row per learner: the sum of points, the maximum, and the points of every exercise in the graded lessons.

    Open tasks are optional: their points have a sum of their own, and the maximum leaves them out.
    """
    lessons = sorted({one.submission.lesson for one in graded})
    exercises = [exercise for lesson in lessons for exercise in exercises_of_lesson(lesson)]
    rows: dict[str, dict[str, Any]] = {}
    for one in graded:
        row = rows.setdefault(one.submission.learner, {"learner": escape_formula(one.submission.learner),
                                                         "points": 0, "open_points": 0})
        row["points"] += one.points
        row["open_points"] += one.open_points
        row |= {column(find(v.exercise)): "could not be checked" if v.unchecked else v.points
                for v in one.verdicts}
    opens = ["open_points"] if any(exercise.open for exercise in exercises) else []
    heads = ["learner", "points", "out_of", *opens, *map(column, exercises)]
    with atomic(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, heads, restval="", extrasaction="ignore", quoting=csv.QUOTE_NONNUMERIC)
        writer.writeheader()
        writer.writerows(row | {"out_of": sum(map(points_of_lesson, lessons))} for row in rows.values())


def column(exercise: Exercise) -> str:
    """The gradebook's column name for an exercise."""
    points = f"open, {exercise.points * len(exercise.level_names)}" if exercise.open else exercise.points
    return f"{exercise.lesson} {exercise.name} ({points})"


def write_junit(graded: Sequence[Graded], path: Path) -> None:
    """Write the verdicts as JUnit XML for CI systems: a suite per notebook, a case per exercise."""
    root = ElementTree.Element("testsuites")
    for one in graded:
        verdicts = [v for v in one.verdicts if v.passed or not find(v.exercise).open]         # an open task is no failure
        failed, errors = (sum(not v.passed and v.unchecked is machine for v in verdicts) for machine in (False, True))
        suite = ElementTree.SubElement(root, "testsuite", tests=str(len(verdicts)), failures=str(failed), errors=str(errors),
                                       name=f"{render.printable_line(one.submission.learner)}, lesson {one.submission.lesson}")
        for verdict in verdicts:
            case = ElementTree.SubElement(suite, "testcase", name=verdict.exercise, classname=f"lesson {one.submission.lesson}")
            if not verdict.passed:
                kind = "error" if verdict.unchecked else "failure"
                failure = ElementTree.SubElement(case, kind, message=render.headline(verdict))
                failure.text = render.text(verdict, color=False, graded=True)
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


def write_feedback(learner: str, graded: Sequence[Graded], path: Path, claims: Sequence[on_cluster.Claim] = ()) -> None:
    """Write a learner's page: for each exercise what held, what did not, and a hint; and the outcome of result files."""
    from html import escape

    parts = []
    for one in graded:
        most = points_of_lesson(one.submission.lesson)
        parts.append(f"<h2>Lesson {escape(one.submission.lesson)}: {one.points} of {most} points{one.open_words}</h2>")
        parts += [render.html(verdict, graded=True) for verdict in one.verdicts]
        for claim in claims:
            if (claim.learner, claim.lesson) == (learner, one.submission.lesson):
                state = "not taken in" if claim.refused else f"taken in; {describe_hardware(claim)}"
                parts.append(f"<p>Result file {escape(render.printable(claim.file))}: {escape(render.printable(state))}. "
                             f"{escape(render.printable(describe_claim(claim)))}. {escape(render.printable(claim.numbers))}</p>")
                parts += [f"<p>{escape(render.printable(claim.runs))}</p>"] if claim.runs else []
    with atomic(path) as temporary:
        temporary.write_text(PAGE.format(learner=escape(render.printable(learner)), body="\n".join(parts)), encoding="utf-8")


def slug(name: str) -> str:
    """Turn a name into a safe file name; a 128-bit hash in it prevents collisions."""
    letters = re.sub(r"[^A-Za-z0-9.-]+", "_", name).strip("._")[:40] or "learner"
    return f"{letters}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


def escape_formula(text: str) -> str:
    """Escape a CSV cell so that no spreadsheet takes it for a formula, with commas or semicolons as separators."""
    return FORMULA_START.sub(r"\1\2'", " ".join(render.printable(text).split()))
