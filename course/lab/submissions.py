"""Whose notebook is which: the folders that learning platforms hand to an instructor, and what is in a notebook."""

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

from course.errors import CourseError
from course.lab import cells, lessons, own, present, reader, reading
from course.lab import exercise as exercises
from course.lab.check import Verdict, examine, unread
from course.lab.exercise import Exercise
from course.lab.platforms import GRADESCOPE, METADATA, Platform, blackboard, likeness, normal, normal_path
from course.lab.reading import Reading

NAMED = re.compile(r"(?P<owner>.*?)[_ -]?(?P<lesson>\d\d)_[A-Za-z][\w -]*?(?:-Copy\d+| \(\d+\)|-\d+)?$")     # LEARNER_01_baseline
COUNTER = re.compile(r"(?:-| ?\()(\d+)\)?$")        # of Canvas and of browsers: name-1, name (1)
COPY = re.compile(r"-Copy\d+$| - \w+(?: \(\d+\))?$")                               # of JupyterLab and desktops: no counters
DEEPEST = 20                                         # folders in one another, below a learner's
MOST_ENTRIES = 10_000                                # files and folders of one learner
MOST_NOTEBOOKS = 1000                                # of one learner
# what to do about an answer that cannot be run: for whoever checks a file, and for whoever is graded; by whether a cell is broken
LEARNER = {True: "mend that line, run the cell again, save, and check again",
           False: "write the exercise's cell, run it, save, and check again"}
GRADED = {True: "mend that line, run the cell again, save the notebook, and hand it in again",
          False: "run the exercise's cell, save the notebook, and hand it in again"}
AGAIN = {False: "save the notebook, and check again", True: "save the notebook, and hand it in again"}        # by whether graded


@dataclass(frozen=True)
class Submission:
    """One learner's notebook of one lesson."""

    learner: str
    lesson: str                                      # "01"; empty if neither its name nor its metadata say
    path: Path
    date: float = field(default=0.0, compare=False)  # when it was handed in, as its name says; 0: as the file does
    reading: Reading | None = field(default=None, compare=False, repr=False)     # None: not read yet, nor looked at


def check_file(path: Path, names: Sequence[str], seed: int | None, tell: Callable[[Verdict], None]) -> list[Verdict]:
    """Check the exercises of a notebook or script, or those named; `tell` hears of each verdict as it comes.

    Another's notebook is read in the sandbox, a user's own in this process.
    """
    import secrets

    named = parts_of(path.stem)[1]
    found = read_file(path, [exercises.find(name, named) for name in names])
    wanted = [exercises.find(name, found.lesson) for name in names] or of_lesson(found.lesson)
    if not wanted:
        raise CourseError(f"{path}: neither its name (such as 01_baseline.ipynb) nor its metadata say which lesson this is: "
                          "name the exercises with --exercise")
    verdicts = []
    for exercise in wanted:
        verdicts.append(judge(exercise, found, secrets.randbits(31) if seed is None else seed, hidden=False))
        tell(verdicts[-1])
    return verdicts


def read_file(path: Path, wanted: Sequence[Exercise] = ()) -> Reading:
    """What counts of a notebook or script; `CourseError` if it cannot be read."""
    named = parts_of(path.stem)[1]
    if path.suffix == ".py" and path.resolve().parent == (lessons.ROOT / "solutions").resolve():
        return reading.of_contents(path, cells.contents_of(lessons.instructors(path)), named, wanted)    # it imports its answers
    if own.holds(path) or not path.is_file() or path.suffix.lower() not in (".ipynb", ".py"):
        return reading.here(path, named, wanted)
    found = reading.one(reading.File(path, path.name, named), wanted)
    if found.failure:
        raise CourseError(f"{path} cannot be read: {found.failure}")
    if found.problem:
        raise CourseError(f"{path} {found.problem}")
    return found


def judge(exercise: Exercise, found: Reading, seed: int, hidden: bool, **how: Any) -> Verdict:
    """The verdict on one exercise of a notebook."""
    answer = found.answers[exercise.name]
    if answer.problem:
        hint = f"write it in the exercise's cell, {AGAIN[hidden]}" if answer.imported else (
            (GRADED if hidden else LEARNER)[answer.broken])
        return unread(exercise, answer.problem, hint, seed)
    return examine(exercise, answer.pieces, seed, hidden, again=AGAIN[hidden], **how)


def of_lesson(lesson: str) -> list[Exercise]:
    """The exercises of a lesson."""
    return [exercise for exercise in exercises.all_exercises().values() if exercise.lesson == lesson]


def lesson_of(path: Path, notebook: Any = None) -> str:
    """The number of the lesson, from the file's name or else from the notebook's metadata; "" if neither says.

    The metadata also win where nothing in the notebook is of the lesson that its name says: somebody misnamed it.
    """
    _, named = parts_of(path.stem)
    return named if notebook is None else reader.settle(named, cells.contents_of(notebook), reading.table())


def collect(folder: Path, tell: Callable[[str], object] = lambda learner: None,
            known: Mapping[str, Mapping[str, str]] = MappingProxyType({}), jobs: int = 1) -> tuple[list[Submission], list[str]]:
    """All submissions below a folder, one for each learner and lesson, and a note on everything left out and everyone without.

    `tell` hears of each learner before anything of theirs is read, so many learners at a time. What goes wrong with one file is a
    note; the rest is read. known: of each learner the notebooks that need no reading, by their digests, with their lessons.
    """
    if not folder.is_dir():
        raise CourseError(f"{folder} is not a folder: give the one that holds the submissions")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise CourseError(f"{folder} may not be read by you: change its permissions, or grade as its owner")
    notes: list[str] = []
    platform = Platform.of(folder, lesson_of)
    notes += [f"{METADATA} cannot be used: {platform.problem}"] if platform.problem else []
    dated: list[tuple[Any, Path]] = []
    for path in notebooks(folder, notes):
        with noted(str(path.relative_to(folder)), notes):
            dated.append((order(path, folder, platform), path))
    paths = [path for _, path in sorted(dated)]
    whose = owners(folder, paths, platform, notes)

    def read(learner: str) -> tuple[list[Submission], list[str]]:
        tell(learner)
        return collect_one(learner, whose[learner], folder, platform, known.get(learner, {}))

    found: list[Submission] = []
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        for submissions, said in pool.map(read, whose):
            found += submissions
            notes += said
    notes += alike(folder, found, platform)
    notes += crowded(folder, paths)
    came = {one.learner for one in found}
    folders = (path.name for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith((".", "__MACOSX")))
    learners = list(dict.fromkeys(owner(Path(name, "any"), platform) for name in folders))
    notes += [f"{learner}: no notebook of a lesson" for learner in learners if learner not in came]
    return sorted(found, key=lambda s: (s.learner, s.lesson)), notes


def owners(folder: Path, paths: Iterable[Path], platform: Platform, notes: list[str]) -> dict[str, list[Path]]:
    """The files of each learner, in the same order, with a note on what may be another's: that is left out.

    A name that can be read in two ways never counts beside one that cannot.
    """
    whose: dict[str, list[tuple[int, Path]]] = {}
    spelled: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        name = path.relative_to(folder)
        with noted(str(name), notes):
            learner, told = owner(name, platform), platform.attempt(normal_path(name))
            whose.setdefault(learner, []).append((told.doubt, path))
            spelled[learner].add(written(name, platform))
            if len(name.parts) == 1 and not told.learner and owner(name) != learner:
                notes.append(f"{name} looks like a learning platform's file, but most others do not: it counts as {learner}'s")
    for learner, names in spelled.items():
        if len(names) > 1:
            notes.append(f"{' and '.join(sorted(map(ascii, names)))} are the name {learner} in different encodings, and count as "
                         "one learner: if they are two, rename one")
    for learner, files in whose.items():
        least = min(doubt for doubt, _ in files)
        notes += [f"{path.relative_to(folder)} is left out: its name does not settle whether it is {learner}'s, who has another; "
                  "if it is, rename it like that one" for doubt, path in files if doubt > least]
        whose[learner] = [(doubt, path) for doubt, path in files if doubt == least]
    return {learner: [path for _, path in files] for learner, files in whose.items()}


def collect_one(learner: str, paths: Sequence[Path], folder: Path, platform: Platform,
                known: Mapping[str, str]) -> tuple[list[Submission], list[str]]:
    """One learner's submissions, the last of each lesson, and notes; paths: of all notebooks, the last one last."""
    newest: dict[tuple[str, str], Submission] = {}   # by the lesson and Blackboard's name, in which the user's is not certain
    notes: list[str] = []
    if len(paths) > MOST_NOTEBOOKS:
        notes.append(f"{learner} has more than {MOST_NOTEBOOKS} notebooks: earlier ones are left out")
        paths = paths[-MOST_NOTEBOOKS:]
    names = [path.relative_to(folder) for path in paths]
    handed = [reading.File(path, str(name), parts_of(path.stem)[1]) for path, name in zip(paths, names, strict=True)]
    try:
        readings = reading.several(handed, known, last=True)
    except Exception as error:                       # such as a full disk: this learner's alone, and no mark
        readings = [Reading(file.name, "", file.lesson, failure=present.reason(error)) for file in handed]
    for path, name, found in zip(paths, names, readings, strict=True):
        with noted(str(name), notes):
            if not (lesson := settle_lesson(found, name, notes)):
                continue
            told = platform.attempt(normal_path(name))
            if earlier := newest.get((lesson, told.head)):
                notes.append(f"{earlier.path.relative_to(folder)} is replaced by the later {name}")
            if len(name.parts) == 1 and learner == normal(path.stem) and parts_of(path.stem)[1]:
                notes.append(f"{name} names no learner, and counts as one of that name: call it LEARNER_{name}, or give the "
                             "folder above")
            if GRADESCOPE.fullmatch(name.parts[0]) and learner == name.parts[0]:
                notes.append(f"{learner} names no learner, and counts as one of that name: put Gradescope's {METADATA} beside it")
            newest[lesson, told.head] = Submission(learner, lesson, path, told.moment, found)
    heads = Counter(lesson for lesson, _ in newest)
    return [replace(one, learner=head or learner) if heads[lesson] > 1 else one for (lesson, head), one in newest.items()], notes


@contextmanager
def noted(name: str, notes: list[str]) -> Iterator[None]:
    """Whatever goes wrong with one file becomes a note that names it: one submission must not end a class's run."""
    try:
        yield
    except Exception as error:
        notes.append(f"{name} is left out: {present.reason(error)}")


def settle_lesson(found: Reading, name: Path, notes: list[str]) -> str:
    """The lesson that a notebook counts for, with a note where its name does not settle that; "" if it counts for none."""
    named = parts_of(name.stem)[1]
    if found.failure or found.problem:
        why, then = found.problem, "none of its exercises can pass"
        if found.failure:
            why, then = f"cannot be read ({found.failure}): see whether you may read it", "the next run tries again"
        notes.append(f"{name} {why}; {then if named else 'its name says no lesson: left out'}")
        return named if of_lesson(named) else ""
    if named and found.lesson != named:
        notes.append(f"{name} is of lesson {found.lesson}, as its metadata say, and has no exercise of lesson {named}")
    if not of_lesson(found.lesson):
        notes.append(f"{name} is of no lesson that has exercises: left out")
        return ""
    return found.lesson


def alike(folder: Path, submissions: Iterable[Submission], platform: Platform) -> list[str]:
    """A note on learners of one lesson whose names differ as those of two attempts do. They may be two, and stay two."""
    same: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for one in submissions:
        told = platform.attempt(normal_path(one.path.relative_to(folder)))
        if words := likeness(told.name or one.learner):
            same[one.lesson, words].append(one.learner)
    return [f"{' and '.join(sorted(learners))} have all handed in lesson {lesson} and look like attempts of one learner: if they "
            "are, leave out the earlier ones" for (lesson, _), learners in same.items() if len(learners) > 1]


def crowded(folder: Path, files: Sequence[Path]) -> list[str]:
    """A note where one folder holds everything, and folders in it the same lesson: whole classes come so, a level too high."""
    paths = [path.relative_to(folder).parts for path in files]
    places: dict[str, set[str]] = {}                 # of each lesson the folders in the folder
    for parts in paths:
        if len(parts) > 2 and (lesson := lesson_of(Path(parts[-1]))):
            places.setdefault(lesson, set()).add(parts[1])
    most = max(map(len, places.values()), default=0)
    if len({parts[0] for parts in paths}) == 1 and most > 1:
        return [f"all notebooks lie in {paths[0][0]} and count as one learner's, though {most} folders in it have one of the "
                f"same lesson: if these are learners, grade {folder / paths[0][0]}"]
    return []


def notebooks(folder: Path, notes: list[str]) -> Iterator[Path]:
    """Notebooks and scripts below a folder; symbolic links, which may lead anywhere, and JupyterLab's checkpoints stay out."""
    for path in files(folder, notes):
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


def files(folder: Path, notes: list[str]) -> list[Path]:
    """What lies below a folder and is no folder, in order; symbolic links are not followed, hidden files stay out.

    What cannot be opened, lies deeper than `DEEPEST` or comes after a learner's first `MOST_ENTRIES` is left out with a note.
    """
    found: list[Path] = []
    for top in sorted(folder.iterdir()):
        if top.is_symlink() or not top.is_dir():
            found += [top] if visible(top.name) else []
            continue
        folders, seen, deep = [top] if visible(top.name) else [], 0, False
        while folders and seen <= MOST_ENTRIES:
            here = folders.pop()
            try:
                with os.scandir(here) as scan:
                    entries = [entry for entry in islice(scan, MOST_ENTRIES + 1) if visible(entry.name)]
                inside = {Path(entry.path): entry.is_dir(follow_symlinks=False) for entry in entries}
            except OSError as error:
                notes.append(f"{here.relative_to(folder)} cannot be opened ({error.strerror}): what is in it is left out")
                continue
            seen += len(inside)
            found += [path for path, is_folder in inside.items() if not is_folder]
            below = [path for path, is_folder in inside.items() if is_folder]
            folders += below if (shallow := len(here.relative_to(top).parts) < DEEPEST) else []
            deep = deep or (bool(below) and not shallow)
        if deep:
            notes.append(f"{top.name} has more than {DEEPEST} folders in one another: what lies deeper is left out")
        if seen > MOST_ENTRIES:
            notes.append(f"{top.name} has more than {MOST_ENTRIES} files and folders: what comes after them is left out")
    return sorted(found)


def visible(name: str) -> bool:
    """Whether a file or folder is somebody's work: JupyterLab's checkpoints and what macOS adds are not."""
    return not name.startswith(".") and name != "__MACOSX"


def order(path: Path, folder: Path, platform: Platform) -> tuple[float, int, int, float, str]:
    """Later submissions come later: by the platform's date, its number, counters (name-1, name (1)), then the file's date."""
    counted = COUNTER.search(path.stem) if not COPY.search(path.stem) else None
    told = platform.attempt(normal_path(path.relative_to(folder)))
    return told.moment, told.number, int(counted[1]) if counted else 0, path.stat().st_mtime, str(path)


def owner(path: Path, platform: Platform | None = None) -> str:
    """Whose a file is, from its path below the folder of submissions.

    As the platform says; nbgrader: `student/assignment/file`; else the first folder, or the file's name without the lesson's. An
    umlaut is the same however it is encoded: macOS takes it apart.
    """
    return written(normal_path(path), platform)


def written(path: Path, platform: Platform | None = None) -> str:
    """The same as the file's name is encoded."""
    return (platform or Platform()).attempt(path).learner or parts_of(path.stem)[0] or path.stem


def parts_of(stem: str) -> tuple[str, str]:
    """(learner, lesson) that a file's name says: what comes before the last name of a lesson, or before what looks like one."""
    low = stem.lower()
    found = [(at, name) for name in names() if (at := low.rfind(name)) >= 0 and not low[at - 1:at].isdigit()]
    if found:
        at, name = max(found)
        return stem[:at].rstrip("_ -"), name[:2]
    like = NAMED.match(stem)
    return (like["owner"], like["lesson"]) if like else ("", "")


@cache
def names() -> list[str]:
    """Of the lessons that are there, as notebooks or as masters: 01_baseline."""
    files = (path for folder in ("notebooks", "solutions") for path in (lessons.ROOT / folder).glob("[0-9][0-9]_*"))
    return sorted({path.stem.lower() for path in files if path.suffix in (".ipynb", ".py")})
