"""`course grade`: a class's notebooks, hidden variants of the checks, a gradebook.

Every answer runs isolated (`sandbox`), on inputs of a seed and of sizes that learners have not seen; what
they printed, wrote or claim counts for nothing. Results are kept one by one, so that a run that was
interrupted goes on where it stopped, one with new submissions grades only those, and the gradebook of
one lesson grows into that of the course.
"""

import csv
import hashlib
import json
import math
import re
import secrets
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

from course.errors import CourseError
from course.files import atomic, sha256
from course.lab import cells, present, reading, sandbox, scale, shut
from course.lab.check import Fact, Verdict, no_verdict, reference
from course.lab.exercise import Exercise, all_exercises, find
from course.lab.reading import short_of_room
from course.lab.submissions import Submission, collect, judge, of_lesson
from course.machine import cores

DIGITS = 32                                          # hexadecimal ones that tell names apart: nobody can make two that share them
MOST_AGAIN = 300.0                                   # seconds for what of a learner's could not be checked, at the run's end
FORMULA = re.compile(r"""(^|[,;\t|])([\s"']*)(?=[=+\-@＝＋－＠])""")   # where a spreadsheet begins a cell, and a formula in it
REOPEN = "open the notebook in JupyterLab, run it, save it, and hand it in again"
Kept = tuple[dict[str, Any], tuple[Verdict, ...]]    # a result as it lies in results/, and its verdicts


@dataclass(frozen=True)
class Graded:
    """One submission with its verdicts, in the order of the lesson's exercises."""

    submission: Submission
    verdicts: tuple[Verdict, ...]

    @property
    def unchecked(self) -> bool:
        """Whether something in it could not be checked, so that it is no mark yet."""
        return any(verdict.unchecked for verdict in self.verdicts)

    @property
    def points(self) -> int:
        """The points of the exercises that passed, as the exercises are worth today."""
        return sum(find(verdict.exercise).points for verdict in self.verdicts if verdict.passed)


def main(folder: Path, out: Path, only: Sequence[str] = (), jobs: int = 0, seed: int | None = None,
         trust: bool = False) -> list[Graded]:
    """Grade all submissions below `folder`; write gradebook.csv, junit.xml and feedback/ to `out`.

    All three hold whatever was ever graded into `out`: other lessons and other folders, too.
    """
    seed = settle_seed(out, seed)
    rename(out)
    submissions, notes = collect(folder, lambda learner: print(f"reading {present.line(learner)}", flush=True),
                                 graded_before(out, seed), jobs or max(1, cores() // 2))
    only = [lesson.zfill(2) for lesson in only]
    submissions = [s for s in submissions if not only or s.lesson in only]
    if not submissions:
        which = f"lesson {' or '.join(only)}" if only else "a lesson that has exercises"
        raise CourseError("\n".join([f"{folder} holds no notebook of {which}", *map(present.line, notes)]))
    late = {submission: why for submission in submissions if (why := outdated(submission, out))}
    submissions, notes = [s for s in submissions if s not in late], [*notes, *late.values()]
    known = [one for one in (recall(submission, out, seed) for submission in submissions) if one]
    new = [s for s in submissions if s not in {one.submission for one in known}]
    learners, lessons = {s.learner for s in submissions}, sorted({s.lesson for s in submissions})
    print("\n  ".join([f"{len(submissions)} notebooks of {len(learners)} learners, lessons {', '.join(lessons)}: "
                       f"{len(new)} to grade, {len(known)} graded already", *map(present.line, notes)]), flush=True)
    if new:
        print("\n".join([protection(trust), *shut.to_others([folder, shut.SOLUTIONS])]), flush=True)
    try:
        shut.private(out)
    except OSError as error:
        raise CourseError(f"{out} cannot be made a folder to grade into ({error.strerror}): name another one") from error
    others = earlier(out, submissions)
    apart({one.submission.learner for one in others} | {s.learner for s in submissions})
    graded = known + (grade_all(new, out, jobs, seed) if new else []) + others
    graded.sort(key=lambda g: (g.submission.learner, g.submission.lesson))
    claims = take_in(folder, [one for one in graded if one.submission in submissions], out)
    gradebook(graded, out / "gradebook.csv")
    junit(graded, out / "junit.xml")
    for learner in dict.fromkeys(g.submission.learner for g in graded):
        with told_of(f"the feedback page of {learner}"):
            own = [g for g in graded if g.submission.learner == learner]
            feedback(learner, own, out / "feedback" / f"{slug(learner)}.html", claims)
    kept = f"; in them are also {len(others)} notebooks that earlier runs graded and this one did not look at" if others else ""
    if again := [f"{g.submission.learner}, lesson {g.submission.lesson}" for g in graded if g.unchecked]:
        print("\n  ".join(["could not be checked, so that it is no mark; the next run tries again:",
                           *map(present.line, again)]))
    print(present.printable(f"wrote {out}/gradebook.csv, {out}/junit.xml and {out}/feedback/{kept}"))
    return graded


def apart(learners: set[str]) -> None:
    """Raise `CourseError` if two learners would share files: one of them would be dropped."""
    owners: dict[str, str] = {}
    for learner in sorted(learners):
        if (other := owners.setdefault(slug(learner), learner)) != learner:
            raise CourseError(f"{other!a} and {learner!a} would share the file {slug(learner)}: rename one of the two folders")


def rename(out: Path) -> None:
    """Give what earlier versions of the course kept the names that this one looks for: theirs had fewer digits."""
    for folder in ("results", "claims"):
        for path in sorted((out / folder).glob("*.json")):
            try:
                told = json.loads(path.read_text(encoding="utf-8"))
                learner, lesson = str(told["learner"]), str(told["lesson"])
                old, new = (path.with_name(f"{name}-{lesson}.json") for name in (slug(learner, 60, 6), slug(learner)))
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                continue                             # damaged: it counts for nothing anyway
            if path == old and not new.exists():
                path.rename(new)


@contextmanager
def told_of(what: str) -> Iterator[None]:
    """Print what went wrong with one learner's files, and go on: it must not end a class's run."""
    try:
        yield
    except Exception as error:
        print(present.line(f"{what} is left out: {present.reason(error)}"), flush=True)


def protection(trust: bool) -> str:
    """What keeps answers from harm here, in a sentence; a `CourseError` where nothing does and nobody said that this is fine."""
    layers = sandbox.layers()
    limits = "within limits on time, memory, processes, output and disk"
    if layers.namespaces:
        return f"every answer runs with files, processes and a network of its own (bubblewrap), {limits}"
    if layers.user:
        return (f"every answer runs as a user of its own that cannot change your files or read those closed to others, {limits}; "
                f"the network stays open to it (bubblewrap would close it: {layers.why['namespaces']})")
    if trust:
        return f"every answer runs as you, {limits}: nothing else keeps it from your files and the network, as --trust allows"
    raise CourseError(f"nothing here isolates other people's code from your files ({'; '.join(layers.why.values())}): "
                      "install bubblewrap, or run this as root in a container, or, if you trust every submission, --trust")


def grade_all(submissions: Sequence[Submission], out: Path, jobs: int, seed: int) -> list[Graded]:
    """Grade some submissions at a time, telling of each as it is done."""
    keep_seed(out, seed)
    graded, before = [], {submission: result(kept_at(submission, out)) for submission in submissions}
    exercises = [exercise for lesson in sorted({s.lesson for s in submissions}) for exercise in of_lesson(lesson)]
    with ThreadPoolExecutor(jobs or max(1, cores() // 2)) as pool:
        try:
            list(pool.map(prepare, [(e.name, seed_of(e, seed), True, size) for e in exercises for size in e.sizes]))
            tasks = [pool.submit(grade, submission, out, seed) for submission in submissions]
            for task in as_completed(tasks):
                graded.append(task.result())
                tell(graded[-1], f"{len(graded)}/{len(tasks)}", before)
            for one in again(list(graded), out, seed):
                graded = [one if other.submission == one.submission else other for other in graded]
                tell(one, "again", before)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)              # leaving the block waits for those in hand
            print(f"stopped: what is graded is kept in {out / 'results'}, and the same command goes on", flush=True)
            raise
    return graded


def tell(graded: Graded, which: str, before: Mapping[Submission, Kept | None]) -> None:
    """Print what became of a submission."""
    who, lesson = present.line(graded.submission.learner), graded.submission.lesson
    print(f"{which} {who}, lesson {lesson}: {graded.points} of {sum(e.points for e in of_lesson(lesson))} points"
          f"{', some could not be checked' * graded.unchecked}{replaced(graded, before[graded.submission])}", flush=True)


def prepare(job: tuple[str, int, bool, int]) -> None:
    """Run the right answer and the known mistakes; where that fails, grading meets it again and says for whom."""
    with suppress(Exception):
        reference(*job)


def replaced(new: Graded, kept: Kept | None) -> str:
    """What becomes of the mark that an earlier run gave, as the end of a sentence; nothing if there is none or it stays."""
    if not kept:
        return ""
    old = Graded(new.submission, tuple(v for v in kept[1] if v.exercise in all_exercises())).points
    if kept[0]["notebook"] != digest(new.submission):
        return f" (replaces the notebook of {day(kept[0]['date'])}: {old} -> {new.points})"
    return f" (the checks or their inputs are others now: {old} -> {new.points})" if old != new.points else ""


def outdated(submission: Submission, out: Path) -> str:
    """Why a notebook does not count: an earlier run graded a newer one; "" if it counts."""
    kept, date = result(kept_at(submission, out)), dated(submission)
    if not kept or date >= kept[0]["date"] or kept[0]["notebook"] == digest(submission):
        return ""
    return (f"{submission.learner}, lesson {submission.lesson}: {submission.path.name} of {day(date)} is left out, since an "
            f"earlier run graded one of {day(kept[0]['date'])}; to let it count, delete {kept_at(submission, out)}")


def dated(submission: Submission) -> float:
    """When it was handed in: as the platform's name for it says, else as the file does."""
    try:
        return submission.date or submission.path.stat().st_mtime
    except OSError:
        return 0.0


def digest(submission: Submission) -> str:
    """The notebook's SHA-256, or its size where it is too large to be one; "" if it cannot be read."""
    if submission.reading:
        return submission.reading.digest
    try:
        size = submission.path.stat().st_size
        return sha256(submission.path) if size <= cells.LARGEST else f"{size} bytes"
    except OSError:
        return ""


def day(date: float) -> str:
    """A file's date in words; of marks that were kept without one, that."""
    try:
        return datetime.fromtimestamp(date).strftime("%Y-%m-%d %H:%M") if date else "an unknown date"
    except (OverflowError, ValueError, OSError):     # some file systems take any number
        return "an unknown date"


def take_in(folder: Path, graded: Sequence[Graded], out: Path) -> list[scale.Claim]:
    """Judge the result files (submit/check.sh) that came with notebooks, and list those of all runs into `out` in claims.csv.

    They change no mark: correctness is what grading found itself. One that came with an earlier notebook, and not with the
    learner's new one, is forgotten.
    """
    with told_of("every result file"):
        came = scale.result_files(folder)
        for one in graded:
            with told_of(f"the result file of {one.submission.learner}, lesson {one.submission.lesson},"):
                take_in_one(came.get((one.submission.learner, one.submission.lesson), []), one, out)
    claims = list(filter(None, map(claimed, sorted((out / "claims").glob("*.json")))))
    (out / "claims.csv").unlink(missing_ok=True)     # written below, if there are any
    if claims:
        heads = ["learner", "lesson", "file", "taken", "job", "speed", "hardware", "numbers", "note", "runs"]
        with atomic(out / "claims.csv") as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
            writer.writerow(heads)
            for claim in claims:
                also = sorted({other.learner for other in claims if claim.job and other.learner != claim.learner
                               and (other.job, other.place) == (claim.job, claim.place)})
                said = "; ".join([note(claim), *(["its job is also claimed by " + ", ".join(also)] if also else [])])
                row = [claim.learner, claim.lesson, claim.file, "refused" if claim.refused else "taken", claim.job,
                       "" if claim.refused else "claimed", "" if claim.refused else hardware(claim), claim.numbers, said,
                       claim.runs]
                writer.writerow(list(map(harmless, row)))
        print(f"{len(claims)} result files of jobs, {sum(bool(claim.refused) for claim in claims)} refused, "
              f"{sum(claim.confirmed for claim in claims)} confirmed by Slurm: {out}/claims.csv", flush=True)
    return claims


def take_in_one(found: Sequence[Path], one: Graded, out: Path) -> None:
    """Judge the newest of the result files that came with a notebook, and keep what became of it."""
    s = one.submission
    kept = out / "claims" / kept_at(s, out).name
    if not found:
        kept.unlink(missing_ok=True)
        return
    judged = scale.judge(found[-1], s.learner, s.lesson, s.path, one.verdicts, accounts=accounts(out))
    claim = scale.lasting(judged, claimed(kept))
    with atomic(kept) as temporary:
        temporary.write_text(json.dumps(asdict(claim), indent=1), encoding="utf-8")


def accounts(out: Path) -> dict[str, set[str]]:
    """Learners' accounts on the cluster, from accounts.csv (learner,account), which whoever grades may write."""
    found = defaultdict[str, set[str]](set)
    with suppress(FileNotFoundError), open(out / "accounts.csv", newline="", encoding="utf-8-sig") as file:
        for row in csv.reader(file):
            if len(row) >= 2:
                found[row[0].strip()].add(row[1].strip())
    return found


def claimed(path: Path) -> scale.Claim | None:
    """A kept claim; None if it is damaged, or of another version of the course."""
    try:
        return scale.Claim(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def hardware(claim: scale.Claim) -> str:
    """What Slurm says of the learner's job, and beside it what their file says of its devices, which nobody confirms."""
    said = [f"confirmed: {claim.slurm or 'the job, not its devices'}"] if claim.confirmed else []
    devices = "; ".join(map(present.foreign, claim.devices.split("; ")))
    return "; ".join([*said, f"claimed: {devices}"] if claim.devices or not said else said).removesuffix(": ")


def note(claim: scale.Claim) -> str:
    """What there is to say of a result file."""
    if claim.refused:
        return claim.refused
    said = [f"it calls passed what is not: {', '.join(claim.contradicted)}"] if claim.contradicted else []
    return "; ".join([*said, claim.why])


def graded_before(out: Path, seed: int) -> dict[str, dict[str, str]]:
    """Of each learner the lessons of notebooks that were graded by these checks and this seed, by their digests."""
    found = defaultdict[str, dict[str, str]](dict)
    for kept in filter(None, map(result, sorted((out / "results").glob("*.json")))):
        about = kept[0]
        if about.get("seed") == seed and about.get("versions") == versions(about["lesson"]):
            found[about["learner"]][about["notebook"]] = about["lesson"]
    return found


def settle_seed(out: Path, seed: int | None) -> int:
    """The seed of the hidden inputs: as given, or that of the run which this one goes on with, or a new one."""
    if seed is not None:
        return seed
    try:
        text = (out / "seed").read_bytes()[:100].strip()
    except FileNotFoundError:
        return secrets.randbits(128)
    except OSError as error:
        raise CourseError(f"{out}/seed cannot be read ({error.strerror}): all that was graded here was graded with it") from error
    if not text.isdigit() or len(text) > 50:         # of bytes: the digits of ASCII alone
        raise CourseError(f"{out}/seed holds no number: bring it back from a copy, or remove it, and all is graded anew")
    return int(text)


def seed_of(exercise: Exercise, seed: int) -> int:
    """An exercise's own seed, from which neither another's nor `seed` can be found: 128 bits, all of which draws depend on."""
    return int.from_bytes(hashlib.sha256(f"{seed} {exercise.name}".encode()).digest()[:16])


def keep_seed(out: Path, seed: int) -> None:
    """Write the seed down for the runs that go on with this one."""
    with atomic(out / "seed") as temporary:
        temporary.write_text(f"{seed}\n", encoding="utf-8")


def grade(submission: Submission, out: Path, seed: int, before: Graded | None = None, seconds: float = math.inf) -> Graded:
    """Grade one submission and keep the result, unless something in it could not be checked.

    before: what an earlier try found. Only what it could not check is then tried, as long as these seconds are not over.
    """
    who = f"{submission.learner}, lesson {submission.lesson}"
    print(present.line(f"grading {who}{' again, alone' * bool(before)}"), flush=True)
    exercises, until = of_lesson(submission.lesson), time.monotonic() + seconds
    try:
        submission = with_reading(submission)
        about = {**key(submission, seed), "date": dated(submission)}
        verdicts = []
        for number, exercise in enumerate(exercises):
            done = before and before.verdicts[number]
            if done and (not done.unchecked or time.monotonic() > until):
                verdicts.append(done)
            else:
                verdicts.append(safely(exercise, submission, seed_of(exercise, seed), last=bool(before)))
        graded = Graded(submission, tuple(verdicts))
        if not graded.unchecked:
            with atomic(kept_at(submission, out)) as temporary:
                record = about | {"verdicts": [asdict(verdict) for verdict in graded.verdicts]}
                temporary.write_text(json.dumps(record, indent=1), encoding="utf-8")
        return graded
    except Exception as error:                       # such as a full disk: it is no learner's fault
        return Graded(submission, tuple(unchecked(exercise, error, seed_of(exercise, seed)) for exercise in exercises))


def again(graded: Sequence[Graded], out: Path, seed: int) -> Iterator[Graded]:
    """Try once more what could not be checked, while nothing else runs: `MOST_AGAIN` seconds and an answer's for each learner."""
    spent = defaultdict[str, float](float)
    for one in graded:
        submission, begin = one.submission, time.monotonic()
        if not one.unchecked or spent[submission.learner] > MOST_AGAIN:
            continue
        if submission.reading and submission.reading.failure:
            submission = replace(submission, reading=None)
        yield grade(submission, out, seed, one, MOST_AGAIN - spent[submission.learner])
        spent[submission.learner] += time.monotonic() - begin


def with_reading(submission: Submission) -> Submission:
    """A submission that has been read, or looked at and found unreadable."""
    if submission.reading and (submission.reading.answers or submission.reading.problem or submission.reading.failure):
        return submission
    return replace(submission, reading=reading.one(reading.File(submission.path, submission.path.name, submission.lesson)))


def unchecked(exercise: Exercise, error: BaseException | str, seed: int) -> Verdict:
    """The verdict where this machine failed with an error, or as a sentence says."""
    why = error if isinstance(error, str) else present.reason(error)
    return no_verdict(exercise, why, seed, hidden=True)


def kept_at(submission: Submission, out: Path) -> Path:
    """Where the result of a submission is kept."""
    return out / "results" / f"{slug(submission.learner)}-{submission.lesson}.json"


def key(submission: Submission, seed: int) -> dict[str, Any]:
    """All that a result depends on: whose it is, the notebook, the checks and their inputs."""
    return {"learner": submission.learner, "lesson": submission.lesson, "notebook": digest(submission), "seed": seed,
            "versions": versions(submission.lesson)}


def versions(lesson: str) -> dict[str, str]:
    """Those of a lesson's checks."""
    return {exercise.name: exercise.version for exercise in of_lesson(lesson)}


def recall(submission: Submission, out: Path, seed: int) -> Graded | None:
    """The kept result, if it is on this very notebook by these checks and this seed."""
    found = result(kept_at(submission, out))
    if not found or any(found[0].get(name) != value for name, value in key(submission, seed).items()):
        return None
    whole = {verdict.exercise for verdict in found[1]} == {exercise.name for exercise in of_lesson(submission.lesson)}
    return Graded(submission, found[1]) if whole else None


def earlier(out: Path, submissions: Sequence[Submission]) -> list[Graded]:
    """What is kept in `out` of other notebooks than these, without exercises that there are no longer."""
    looked_at = {kept_at(submission, out) for submission in submissions}
    found = []
    for path in sorted(set((out / "results").glob("*.json")) - looked_at):
        if kept := result(path):
            there = {exercise.name for exercise in of_lesson(kept[0]["lesson"])}             # one may have moved to another
            verdicts = tuple(verdict for verdict in kept[1] if verdict.exercise in there)
            found.append(Graded(Submission(kept[0]["learner"], kept[0]["lesson"], path), verdicts))
    return [one for one in found if one.verdicts]


def result(path: Path) -> Kept | None:
    """A kept result, whole, with its verdicts; None if it is missing or damaged."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        verdicts = tuple(Verdict(**{**v, "facts": tuple(Fact(**fact) for fact in v["facts"])}) for v in kept["verdicts"])
        told = {"learner": str(kept["learner"]), "lesson": str(kept["lesson"]), "notebook": str(kept.get("notebook", "")),
                "date": float(kept.get("date", 0))}
        if not all(isinstance(verdict.exercise, str) for verdict in verdicts):
            return None
        return kept | told, verdicts
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def safely(exercise: Exercise, submission: Submission, seed: int, last: bool = False) -> Verdict:
    """The verdict on one exercise; a notebook that cannot be read, or whatever else goes wrong with it, is one too.

    last: nothing else runs, and this is not tried again. Before, what only the answer says of the machine is believed.
    """
    try:
        found = with_reading(submission).reading
        assert found
        if found.failure:
            return unchecked(exercise, found.failure, seed)
        if found.problem:
            fact = Fact(False, f"{submission.path.name} {found.problem}")
            return Verdict(exercise.name, (fact,), REOPEN, seed=seed, version=exercise.version)
        if full := short_of_room(exercise.limits.disk * 1e9):
            return unchecked(exercise, full, seed)
        verdict = judge(exercise, found, seed, hidden=True, believing=not last)
        if verdict.late:                             # the machine may have been busy
            verdict = judge(exercise, found, seed, hidden=True, believing=not last)
        if not verdict.passed and (full := short_of_room(0)):
            return unchecked(exercise, full, seed)
        return verdict
    except Exception as error:                       # one submission must not end the class's run
        return unchecked(exercise, error, seed)


def gradebook(graded: Sequence[Graded], path: Path) -> None:
    """A row for each learner: points of every exercise of every lesson graded, their sum, and what there was to gain."""
    lessons = sorted({one.submission.lesson for one in graded})
    exercises = [exercise for lesson in lessons for exercise in of_lesson(lesson)]
    rows: dict[str, dict[str, Any]] = {}
    for one in graded:
        row = rows.setdefault(one.submission.learner, {"learner": harmless(one.submission.learner), "points": 0})
        row["points"] += one.points
        row |= {column(find(v.exercise)): "could not be checked" if v.unchecked else find(v.exercise).points * v.passed
                for v in one.verdicts}
    heads = ["learner", "points", "out_of", *map(column, exercises)]
    with atomic(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, heads, restval="", quoting=csv.QUOTE_NONNUMERIC)
        writer.writeheader()
        writer.writerows(row | {"out_of": sum(e.points for e in exercises)} for row in rows.values())


def column(exercise: Exercise) -> str:
    """The gradebook's column of an exercise."""
    return f"{exercise.lesson} {exercise.name} ({exercise.points})"


def junit(graded: Sequence[Graded], path: Path) -> None:
    """The verdicts as JUnit XML, which CI systems show: a suite for each notebook, a case for each exercise."""
    root = ElementTree.Element("testsuites")
    for one in graded:
        failed, errors = (sum(not v.passed and v.unchecked is machine for v in one.verdicts) for machine in (False, True))
        suite = ElementTree.SubElement(root, "testsuite", tests=str(len(one.verdicts)), failures=str(failed), errors=str(errors),
                                       name=f"{present.line(one.submission.learner)}, lesson {one.submission.lesson}")
        for verdict in one.verdicts:
            case = ElementTree.SubElement(suite, "testcase", name=verdict.exercise, classname=f"lesson {one.submission.lesson}")
            if not verdict.passed:
                kind = "error" if verdict.unchecked else "failure"
                failure = ElementTree.SubElement(case, kind, message=present.headline(verdict))
                failure.text = present.text(verdict, colour=False, graded=True)
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


def feedback(learner: str, graded: Sequence[Graded], path: Path, claims: Sequence[scale.Claim] = ()) -> None:
    """A page for one learner: what held, what did not, and a hint, for each exercise; what became of a job's result file."""
    from html import escape

    parts = []
    for one in graded:
        most = sum(exercise.points for exercise in of_lesson(one.submission.lesson))
        parts.append(f"<h2>Lesson {escape(one.submission.lesson)}: {one.points} of {most} points</h2>")
        parts += [present.html(verdict, graded=True) for verdict in one.verdicts]
        for claim in claims:
            if (claim.learner, claim.lesson) == (learner, one.submission.lesson):
                state = "not taken in" if claim.refused else f"taken in; {hardware(claim)}"
                parts.append(f"<p>Result file {escape(present.printable(claim.file))}: {escape(present.printable(state))}. "
                             f"{escape(present.printable(note(claim)))}. {escape(present.printable(claim.numbers))}</p>")
                parts += [f"<p>{escape(present.printable(claim.runs))}</p>"] if claim.runs else []
    with atomic(path) as temporary:
        temporary.write_text(PAGE.format(learner=escape(present.printable(learner)), body="\n".join(parts)), encoding="utf-8")


def slug(name: str, readable: int = 40, digits: int = DIGITS) -> str:
    """A name as a safe file name, different for different names."""
    letters = re.sub(r"[^A-Za-z0-9.-]+", "_", name).strip("._")[:readable] or "learner"
    return f"{letters}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:digits]}"


def harmless(text: str) -> str:
    """A cell of a table that no spreadsheet takes for a formula, whether commas or semicolons separate its cells."""
    return FORMULA.sub(r"\1\2'", " ".join(present.printable(text).split()))
