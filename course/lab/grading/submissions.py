"""Collect submissions from a learning platform's folder: match notebooks to learners and lessons, and check them."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from course.lab.authoring import lessons
from course.lab.checks import exercise as exercises
from course.lab.checks import notebook_cells, own_notebooks, render
from course.lab.checks.check import Verdict, check_answer, unreadable_verdict
from course.lab.checks.exercise import Exercise
from course.lab.grading import sandboxed_reading
from course.lab.grading.platforms import GRADESCOPE, METADATA, Platform, blackboard, normalize, normalize_path
from course.lab.grading.sandboxed_reading import Reading
from course.lab.sandbox import notebook_reader
from course.utils.errors import CourseError

# LEARNER_01_baseline
LEARNER_AND_LESSON = re.compile(r"(?P<owner>.*?)[_ -]?(?P<lesson>\d\d)_[A-Za-z][\w -]*?(?:-Copy\d+| \(\d+\)|-\d+)?$")
COPY_NUMBER = re.compile(r"(?:-| ?\()(\d+)\)?$")     # added by Canvas and browsers: name-1, name (1)
LOCAL_COPY = re.compile(r"-Copy\d+$| - \w+(?: \(\d+\))?$")  # added by JupyterLab and desktops: no counters
MAX_DEPTH = 20                                       # levels of folders below a learner's
MAX_ENTRIES = 10_000                                 # files and folders per learner
MAX_NOTEBOOKS = 1000                                 # per learner
# hints for an answer that cannot run, when checking a file and when grading; the key says whether a cell is broken
CHECK_HINTS = {True: "fix that line, run the cell again, save, and check again",
           False: "write the exercise's cell, run it, save, and check again"}
GRADE_HINTS = {True: "fix that line, run the cell again, save the notebook, and hand it in again",
          False: "run the exercise's cell, save the notebook, and hand it in again"}
TRY_AGAIN = {False: "save the notebook, and check again",
             True: "save the notebook, and hand it in again"}        # the key says whether it is graded


@dataclass(frozen=True)
class Submission:
    """One learner's notebook of one lesson."""

    learner: str
    lesson: str                                      # "01"; "" if neither its name nor its metadata name one
    path: Path
    date: float = field(default=0.0, compare=False)  # timestamp from its name; 0: use the file's
    reading: Reading | None = field(default=None, compare=False, repr=False)     # None: not read yet


def check_file(path: Path, names: Sequence[str], seed: int | None, report: Callable[[Verdict], None]) -> list[Verdict]:
    """Check all or the named exercises of a notebook or script; it calls `report` with each verdict as it comes.

    The user's own notebook is read in this process, others in the sandbox. Raises `CourseError` if the lesson is unknown.
    """
    import secrets

    name_lesson = split_name(path.stem)[1]
    reading = read_file(path, [exercises.find(name, name_lesson) for name in names])
    wanted = [exercises.find(name, reading.lesson) for name in names] or exercises_of_lesson(reading.lesson)
    if not wanted:
        raise CourseError(f"{path}: neither its name (such as 01_baseline.ipynb) nor its metadata say which lesson this is: "
                          "name the exercises with --exercise")
    verdicts = []
    for exercise in wanted:
        verdicts.append(judge_exercise(exercise, reading, secrets.randbits(31) if seed is None else seed, hidden=False))
        report(verdicts[-1])
    return verdicts


def read_file(path: Path, wanted: Sequence[Exercise] = ()) -> Reading:
    """The reading of a notebook or script. Raises `CourseError` if it cannot be read."""
    name_lesson = split_name(path.stem)[1]
    if path.suffix == ".py" and path.resolve().parent == (lessons.ROOT / "solutions").resolve():
        # a master imports its answers: expand them first
        return sandboxed_reading.read_from_contents(path, notebook_cells.notebook_contents(lessons.instructor_notebook(path)),
                                                    name_lesson, wanted)
    if own_notebooks.is_own(path) or not path.is_file() or path.suffix.lower() not in (".ipynb", ".py"):
        contents = notebook_cells.read_contents(path)
        return sandboxed_reading.read_from_contents(path, contents, lesson_of(path, contents), wanted)
    reading = sandboxed_reading.read_one(sandboxed_reading.SubmittedFile(path, path.name, name_lesson), wanted)
    if reading.failure:
        raise CourseError(f"{path} cannot be read: {reading.failure}")
    if reading.problem:
        raise CourseError(f"{path} {reading.problem}")
    return reading


def judge_exercise(exercise: Exercise, reading: Reading, seed: int, hidden: bool, **options: Any) -> Verdict:
    """The verdict on one exercise of a notebook."""
    answer = reading.answers[exercise.name]
    if answer.problem:
        hint = f"write it in the exercise's cell, {TRY_AGAIN[hidden]}" if answer.imported else (
            (GRADE_HINTS if hidden else CHECK_HINTS)[answer.broken])
        return unreadable_verdict(exercise, answer.problem, hint, seed)
    return check_answer(exercise, answer.pieces, seed, hidden, again=TRY_AGAIN[hidden], **options)


def exercises_of_lesson(lesson: str) -> list[Exercise]:
    """The exercises of a lesson."""
    return [exercise for exercise in exercises.all_exercises().values() if exercise.lesson == lesson]


def lesson_of(path: Path, contents: notebook_cells.Contents | None = None) -> str:
    """The lesson's number, from the file's name or else the notebook's metadata; "" if neither has one.

    The metadata also win if the notebook has no exercise of the lesson in its name: somebody misnamed it.
    """
    named = split_name(path.stem)[1]
    return named if contents is None else notebook_reader.choose_lesson(named, contents, sandboxed_reading.lesson_table())


def collect_submissions(folder: Path, report: Callable[[str], object] = lambda learner: None,
            known: Mapping[str, Mapping[str, str]] = MappingProxyType({}), jobs: int = 1) -> tuple[list[Submission], list[str]]:
    """All submissions below a folder, one per learner and lesson, and notes on what is left out and who submitted nothing.

    It reads `jobs` learners at a time, and calls `report` before reading each one. An error with one file becomes a note; the
    rest is read. known: learner -> digest -> lesson of notebooks that need no reading. Raises `CourseError` if the folder cannot
    be read.
    """
    if not folder.is_dir():
        raise CourseError(f"{folder} is not a folder: give the one that holds the submissions")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise CourseError(f"{folder} is not readable for you: change its permissions, or grade as its owner")
    notes: list[str] = []
    platform = Platform.of(folder, lesson_of)
    notes += [f"{METADATA} cannot be used: {platform.problem}"] if platform.problem else []
    dated: list[tuple[Any, Path]] = []
    for path in find_notebooks(folder, notes):
        with errors_noted(str(path.relative_to(folder)), notes):
            dated.append((submission_order(path, folder, platform), path))
    paths = [path for _, path in sorted(dated)]
    files_of = files_by_learner(folder, paths, platform, notes)

    def read(learner: str) -> tuple[list[Submission], list[str]]:
        report(learner)
        return collect_learner(learner, files_of[learner], folder, platform, known.get(learner, {}))

    submissions: list[Submission] = []
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        for of_learner, notes_on_learner in pool.map(read, files_of):
            submissions += of_learner
            notes += notes_on_learner
    learners_with_work = {one.learner for one in submissions}
    folders = (path.name for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith((".", "__MACOSX")))
    learners = list(dict.fromkeys(find_learner(Path(name, "any"), platform) for name in folders))
    notes += [f"{learner}: no notebook of a lesson" for learner in learners if learner not in learners_with_work]
    return sorted(submissions, key=lambda s: (s.learner, s.lesson)), notes


def files_by_learner(folder: Path, paths: Iterable[Path], platform: Platform, notes: list[str]) -> dict[str, list[Path]]:
    """The files of each learner, in the same order. Files that may be somebody else's are left out with a note.

    A file with an ambiguous name never counts if the learner has one with an unambiguous name.
    """
    files_of: dict[str, list[tuple[int, Path]]] = {}
    spellings: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        name = path.relative_to(folder)
        with errors_noted(str(name), notes):
            learner, attempt = find_learner(name, platform), platform.attempt(normalize_path(name))
            files_of.setdefault(learner, []).append((attempt.ambiguity, path))
            spellings[learner].add(learner_as_written(name, platform))
            if len(name.parts) == 1 and not attempt.learner and find_learner(name) != learner:
                notes.append(f"{name} looks like a learning platform's file, but most others do not: it counts as {learner}'s")
    for learner, names in spellings.items():
        if len(names) > 1:
            notes.append(f"{' and '.join(sorted(map(ascii, names)))} are the name {learner} in different encodings, and count as "
                         "one learner: if they are two, rename one")
    for learner, files in files_of.items():
        least_doubt = min(doubt for doubt, _ in files)
        notes += [f"{path.relative_to(folder)} is left out: its name does not settle whether it is {learner}'s, who has another; "
                  "if it is, rename it like that one" for doubt, path in files if doubt > least_doubt]
        files_of[learner] = [(doubt, path) for doubt, path in files if doubt == least_doubt]
    return {learner: [path for _, path in files] for learner, files in files_of.items()}


def collect_learner(learner: str, paths: Sequence[Path], folder: Path, platform: Platform,
                known: Mapping[str, str]) -> tuple[list[Submission], list[str]]:
    """One learner's submissions, the last of each lesson, and notes; paths: all the learner's notebooks, the last one last."""
    newest: dict[tuple[str, str], Submission] = {}   # by (lesson, Blackboard's head, whose user may be ambiguous)
    notes: list[str] = []
    if len(paths) > MAX_NOTEBOOKS:
        notes.append(f"{learner} has more than {MAX_NOTEBOOKS} notebooks: earlier ones are left out")
        paths = paths[-MAX_NOTEBOOKS:]
    names = [path.relative_to(folder) for path in paths]
    files = [sandboxed_reading.SubmittedFile(path, str(name), split_name(path.stem)[1]) for path,
              name in zip(paths, names, strict=True)]
    try:
        readings = sandboxed_reading.read_all(files, known, last=True)
    except Exception as error:                       # such as a full disk: affects this learner only, and gives no mark
        readings = [Reading(file.name, "", file.lesson, failure=render.failure_reason(error)) for file in files]
    for path, name, reading in zip(paths, names, readings, strict=True):
        with errors_noted(str(name), notes):
            if not (lesson := settle_lesson(reading, name, notes)):
                continue
            attempt = platform.attempt(normalize_path(name))
            if earlier := newest.get((lesson, attempt.head)):
                notes.append(f"{earlier.path.relative_to(folder)} is replaced by the later {name}")
            if len(name.parts) == 1 and learner == normalize(path.stem) and split_name(path.stem)[1]:
                notes.append(f"{name} names no learner, and counts as one of that name: call it LEARNER_{name}, or give the "
                             "folder above")
            if GRADESCOPE.fullmatch(name.parts[0]) and learner == name.parts[0]:
                notes.append(f"{learner} names no learner, and counts as one of that name: put Gradescope's {METADATA} beside it")
            newest[lesson, attempt.head] = Submission(learner, lesson, path, attempt.submitted_at, reading)
    counts = Counter(lesson for lesson, _ in newest)
    return [replace(one, learner=head or learner) if counts[lesson] > 1 else one for (lesson, head), one in newest.items()], notes


@contextmanager
def errors_noted(name: str, notes: list[str]) -> Iterator[None]:
    """Turn an error with one file into a note that names it: one submission must not end the class's run."""
    try:
        yield
    except Exception as error:
        notes.append(f"{name} is left out: {render.failure_reason(error)}")


def settle_lesson(reading: Reading, name: Path, notes: list[str]) -> str:
    """The lesson that a notebook counts for, "" if none; adds a note if its name alone does not decide that."""
    name_lesson = split_name(name.stem)[1]
    if reading.failure or reading.problem:
        reason, consequence = reading.problem, "none of its exercises can pass"
        if reading.failure:
            reason, consequence = f"cannot be read ({reading.failure}): see whether you may read it", "the next run tries again"
        notes.append(f"{name} {reason}; {consequence if name_lesson else 'its name says no lesson: left out'}")
        return name_lesson if exercises_of_lesson(name_lesson) else ""
    if name_lesson and reading.lesson != name_lesson:
        notes.append(f"{name} is of lesson {reading.lesson}, as its metadata say, and has no exercise of lesson {name_lesson}")
    if not exercises_of_lesson(reading.lesson):
        notes.append(f"{name} is of no lesson that has exercises: left out")
        return ""
    return reading.lesson


def find_notebooks(folder: Path, notes: list[str]) -> Iterator[Path]:
    """Notebooks and scripts below a folder, without JupyterLab's checkpoints and symbolic links, which may lead anywhere."""
    for path in find_files(folder, notes):
        parts = path.relative_to(folder).parts
        if path.suffix.lower() not in (".ipynb", ".py"):
            platforms = path.name in (METADATA, "index.html") or (path.suffix == ".txt" and blackboard(path.name))
            if len(parts) == 1 and path.is_file() and not path.name.endswith(".result.json") and not platforms:
                notes.append(f"{path.name} is no notebook: left out")
            continue
        if path.is_symlink():
            notes.append(f"{path.relative_to(folder)} is a symbolic link: left out")
        elif path.is_file():
            yield path


def find_files(folder: Path, notes: list[str]) -> list[Path]:
    """All files below a folder, in order, without hidden ones; it does not follow symbolic links.

    It leaves out, with a note, what it cannot open, what is deeper than `MAX_DEPTH`, and a learner's entries after `MAX_ENTRIES`.
    """
    paths: list[Path] = []
    for top in sorted(folder.iterdir()):
        if top.is_symlink() or not top.is_dir():
            paths += [top] if is_visible(top.name) else []
            continue
        folders, entries_seen, too_deep = [top] if is_visible(top.name) else [], 0, False
        while folders and entries_seen <= MAX_ENTRIES:
            folder_path = folders.pop()
            try:
                with os.scandir(folder_path) as scan:
                    entries = [entry for entry in islice(scan, MAX_ENTRIES + 1) if is_visible(entry.name)]
                inside = {Path(entry.path): entry.is_dir(follow_symlinks=False) for entry in entries}
            except OSError as error:
                notes.append(f"{folder_path.relative_to(folder)} cannot be opened ({error.strerror}): what is in it is left out")
                continue
            entries_seen += len(inside)
            paths += [path for path, is_folder in inside.items() if not is_folder]
            subfolders = [path for path, is_folder in inside.items() if is_folder]
            folders += subfolders if (shallow := len(folder_path.relative_to(top).parts) < MAX_DEPTH) else []
            too_deep = too_deep or (bool(subfolders) and not shallow)
        if too_deep:
            notes.append(f"{top.name} has more than {MAX_DEPTH} folders in one another: what lies deeper is left out")
        if entries_seen > MAX_ENTRIES:
            notes.append(f"{top.name} has more than {MAX_ENTRIES} files and folders: what comes after them is left out")
    return sorted(paths)


def is_visible(name: str) -> bool:
    """Whether a file or folder may be a learner's work: it is not hidden (as JupyterLab's checkpoints are) or macOS's own."""
    return not name.startswith(".") and name != "__MACOSX"


def submission_order(path: Path, folder: Path, platform: Platform) -> tuple[float, int, int, float, str]:
    """Sort key, later submissions last: the platform's date and number, counters (name-1, name (1)), the file's date."""
    counter = COPY_NUMBER.search(path.stem) if not LOCAL_COPY.search(path.stem) else None
    attempt = platform.attempt(normalize_path(path.relative_to(folder)))
    return attempt.submitted_at, attempt.number, int(counter[1]) if counter else 0, path.stat().st_mtime, str(path)


def find_learner(path: Path, platform: Platform | None = None) -> str:
    """The learner of a file, from its path below the folder of submissions.

    The platform's name decides; else the first folder (nbgrader: `student/assignment/file`), or the file's name without the
    lesson. Names are normalized first, because macOS encodes umlauts as two characters.
    """
    return learner_as_written(normalize_path(path), platform)


def learner_as_written(path: Path, platform: Platform | None = None) -> str:
    """Like `find_learner`, without normalizing the name."""
    return (platform or Platform()).attempt(path).learner or split_name(path.stem)[0] or path.stem


def split_name(stem: str) -> tuple[str, str]:
    """(learner, lesson) from a file's name: the learner comes before the last lesson name, or what looks like one."""
    low = stem.lower()
    matches = [(at, name) for name in lesson_names() if (at := low.rfind(name)) >= 0 and not low[at - 1:at].isdigit()]
    if matches:
        at, name = max(matches)
        return stem[:at].rstrip("_ -"), name[:2]
    match = LEARNER_AND_LESSON.match(stem)
    return (match["owner"], match["lesson"]) if match else ("", "")


@cache
def lesson_names() -> list[str]:
    """The names of existing lessons, from notebooks or masters, such as 01_baseline."""
    files = (path for folder in ("notebooks", "solutions") for path in (lessons.ROOT / folder).glob("[0-9][0-9]_*"))
    return sorted({path.stem.lower() for path in files if path.suffix in (".ipynb", ".py")})
