"""What learners handed in, read in the sandbox (`reader`): this process takes plain values from there and parses nothing else.

One start of the sandbox reads all files of a learner. A file that ends the reader, by its limits or by a crash, is said to be
unreadable, and the reader goes on with the next one.
"""

import hashlib
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from course.errors import CourseError
from course.lab import cells, present, reader, sandbox
from course.lab.cells import Answer, Piece
from course.lab.check import blanked, workspace
from course.lab.exercise import Exercise, all_exercises
from course.lab.scratch import read
from course.lab.watchdog import Limits

STARTING = 20.0                                      # seconds of computing that a learner's files may take to read,
EACH = 2.0                                           # and so many more for each of them,
MOST_SECONDS = 120.0                                 # but not more than these
MOST_BYTES = 2_000_000_000                           # of all of a learner's notebooks
BATCH = 200_000_000                                  # bytes that are copied for one start of the sandbox
TOLD = 10_000_000                                    # bytes of what the reader says of one file
RESERVE = 100_000_000                                # bytes that stay free, for whatever else needs the disk
BUSY = "reading it did not end: this machine is too busy"
_first = threading.Lock()                            # of several threads one makes the package, and finds out what isolates


class File(NamedTuple):
    """A notebook or script that was handed in."""

    path: Path
    name: str                                        # for people
    lesson: str                                      # that its name says


@dataclass(frozen=True)
class Reading:
    """What counts of one file: a plain value, of which nothing is parsed again."""

    name: str                                        # of the file, for people
    digest: str = ""                                 # SHA-256 of its bytes, or its size where it is too large to be a notebook
    lesson: str = ""                                 # "" if neither its name nor its metadata say
    answers: Mapping[str, Answer] = field(default_factory=dict)          # of the lesson's exercises, or of those wanted, by name
    problem: str = ""                                # why it cannot be read, to follow its name
    failure: str = ""                                # why this machine cannot read it, which is nobody's fault


def here(path: Path, lesson: str, wanted: Sequence[Exercise] = ()) -> Reading:
    """A user's own notebook, read in this process."""
    found = cells.contents(path)
    return of_contents(path, found, reader.settle(lesson, found, table()), wanted)


def of_contents(path: Path, found: cells.Contents, lesson: str, wanted: Sequence[Exercise] = ()) -> Reading:
    """What counts of a notebook that is in memory."""
    try:
        told = reader.answers(found, lesson, table(), asked(wanted))
    except CourseError as error:
        raise CourseError(f"{path} {error}") from error
    return Reading(path.name, "", told["lesson"], told["answers"])


def one(file: File, wanted: Sequence[Exercise] = ()) -> Reading:
    """A file that somebody handed in, read in the sandbox."""
    return several([file], wanted=wanted)[0]


def several(files: Sequence[File], known: Mapping[str, str] | None = None, wanted: Sequence[Exercise] = (),
            last: bool = False) -> list[Reading]:
    """The files of one learner, read in the sandbox.

    known: the lessons of files that need no reading, by their digests. Those that come last are read first: where all together
    take too long or are too large, earlier ones are left out. last: keep the code of the last one of each lesson alone.
    """
    found: dict[int, Reading] = {}
    left, spent, total = list(range(len(files)))[::-1], 0.0, 0
    most = min(MOST_SECONDS, STARTING + EACH * len(files))
    while left:
        with workspace() as folder:
            here: list[int] = []
            size = 0
            while left and size < BATCH:
                number = left.pop(0)
                content, found[number] = taken(files[number], known or {}, MOST_BYTES - total)
                if content is not None:
                    (folder / f"{number}{files[number].path.suffix.lower()}").write_bytes(content)
                    here.append(number)
                    size, total = size + len(content), total + len(content)
            if here:
                spent = batch(folder, files, here, found, size, (spent, most), wanted, last)
    return [found[number] for number in range(len(files))]


def taken(file: File, known: Mapping[str, str], most: int) -> tuple[bytes | None, Reading]:
    """The bytes of a file that is still to be read, and what can be said of it without."""
    try:
        with open(file.path, "rb", opener=plain) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size > cells.LARGEST:
                about = f"has more than {cells.LARGEST // 1_000_000} MB: clear its outputs and save it again"
                return None, Reading(file.name, f"{size} bytes", file.lesson, problem=about)
            if size > most:
                about = f"is not read: a learner's notebooks may have {MOST_BYTES // 1_000_000_000} GB together"
                return None, Reading(file.name, f"{size} bytes", file.lesson, problem=about)
            content = opened.read(cells.LARGEST + 1)
        digest = hashlib.sha256(content).hexdigest()
        lesson = known.get(digest, "")
        if lesson and file.lesson in ("", lesson):
            return None, Reading(file.name, digest, lesson)
        full = short_of_room(len(content))
        return None if full else content, Reading(file.name, digest, file.lesson, failure=full)
    except (OSError, MemoryError, CourseError) as error:
        return None, Reading(file.name, "", file.lesson, failure=present.reason(error))


def plain(path: str, flags: int) -> int:
    """Open a plain file: not a link, which may lead anywhere, and without waiting, as a pipe would."""
    number = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise CourseError("it is no ordinary file")
    return number


def short_of_room(need: float) -> str:
    """Why there is too little room for temporary files, if there is, with what stays free; "" if there is enough."""
    left = shutil.disk_usage(tempfile.gettempdir()).free
    return "" if left >= need + RESERVE else (f"the folder for temporary files has only {left // 1_000_000} MB left, and "
                                              f"{(need + RESERVE) // 1_000_000:.0f} MB are needed")


def batch(folder: Path, files: Sequence[File], numbers: Sequence[int], found: dict[int, Reading], size: int,
          seconds: tuple[float, float], wanted: Sequence[Exercise], last: bool) -> float:
    """Read the files of a folder; seconds: of computing, spent so far and those that there are. Returns what is spent then."""
    left, (spent, most) = list(numbers), seconds
    while left and spent < most:
        job = {"files": [(n, files[n].path.suffix.lower(), files[n].lesson) for n in left], "lessons": table(),
               "wanted": asked(wanted), "seconds": most - spent}
        (folder / "job.json").unlink(missing_ok=True)                # whatever the reader has made of it
        with open(folder / "job.json", "x", encoding="utf-8") as file:
            json.dump(job, file)
        limits = Limits(seconds=60 + 4 * (most - spent), gigabytes=2.0, processes=8, output=20_000, disk=1 + 2 * size / 1e9)
        try:
            ended = started(folder, limits)
        except (CourseError, OSError) as error:
            failed = present.reason(error)
        else:
            failed = BUSY if ended.late else ""
        took = 0.0
        while left and os.path.lexists(folder / f"{left[0]}.json"):
            took = accept(folder, left[0], found, took)
            lesson = found[left[0]].lesson
            if last and lesson and any(number > left[0] and other.lesson == lesson for number, other in found.items()):
                found[left[0]] = replace(found[left[0]], answers={})        # which takes memory
            left.pop(0)
        spent += took
        if not left:
            break
        if not failed and (ended.ok or not os.path.lexists(folder / "began")):
            failed = f"the program that reads it did not start ({present.printable(ended.ended)[:100]})"
        if failed:
            found |= {n: Reading(files[n].name, found[n].digest, files[n].lesson, failure=failed) for n in left}
            return spent
        first = left.pop(0)
        problem, failure = blamed(ended)
        found[first] = Reading(files[first].name, found[first].digest, files[first].lesson, problem=problem, failure=failure)
        spent += reader.SECONDS
        (folder / "began").unlink(missing_ok=True)
    late = f"is not read: this learner's notebooks take more than {most:.0f} seconds to read"
    found |= {n: Reading(files[n].name, found[n].digest, files[n].lesson, problem=late) for n in left}
    return spent


def started(folder: Path, limits: Limits) -> sandbox.Outcome:
    """Run the reader on a folder."""
    with _first:
        package, layers = blanked(()), sandbox.layers()
    command = [sys.executable, "-m", "course.lab.reader", str(folder)]
    return sandbox.run(command, folder, [package], {"PYTHONPATH": str(package)}, limits, layers)


def blamed(ended: sandbox.Outcome) -> tuple[str, str]:
    """Why the reader ended at a file: (problem, failure). The fault is the file's unless the kernel ran out of memory."""
    if f"(signal {int(signal.SIGKILL)})" in ended.ended:
        return "", "reading it was stopped: perhaps this machine ran out of memory"
    clock = (signal.SIGPROF, signal.SIGXCPU)
    if any(f"(signal {int(number)})" in ended.ended for number in clock):
        return f"takes more than {reader.SECONDS:g} seconds to read: leave out code that is no part of the lesson", ""
    return "makes Python stop when it is read: leave out code that is no part of the lesson", ""


def accept(folder: Path, number: int, found: dict[int, Reading], took: float) -> float:
    """Take what the reader says of a file, trusting none of it; returns the seconds that all took so far."""
    known = found[number]
    try:
        told = json.loads(read(folder, f"{number}.json", TOLD))
        lesson, problem, seconds = told.get("lesson", ""), told.get("problem", ""), told["seconds"]
        exact(isinstance(lesson, str) and len(lesson) <= 20 and isinstance(problem, str) and isinstance(seconds, float))
        exact(isinstance(told["answers"], dict) and told["answers"].keys() <= all_exercises().keys())
        answers = {name: answer(each) for name, each in told["answers"].items()}
    except (CourseError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        long = "has more code for its exercises than anybody needs, or what was read of it is damaged"
        found[number] = Reading(known.name, known.digest, known.lesson, problem=long)
        return took
    found[number] = Reading(known.name, known.digest, known.lesson if problem else lesson, answers, problem[:1000])
    return max(took, seconds)


def answer(told: Any) -> Answer:
    """An answer from the reader's JSON; ValueError or the like if it is none."""
    exact(isinstance(told["pieces"], list) and isinstance(told["problem"], str))
    exact(isinstance(told["broken"], bool) and isinstance(told["imported"], bool))
    return Answer(tuple(map(piece, told["pieces"])), told["problem"][:1000], told["broken"], told["imported"])


def piece(told: Any) -> Piece:
    """A piece from the reader's JSON."""
    exact(isinstance(told["cell"], str) and isinstance(told["text"], str) and type(told["line"]) is int and told["line"] > 0)
    return Piece(told["cell"], told["line"], told["text"])


def exact(holds: bool) -> None:
    """Raise ValueError unless something holds."""
    if not holds:
        raise ValueError("this is not what the reader writes")


def table() -> dict[str, dict[str, list[Sequence[str]]]]:
    """What the reader must know of each lesson's exercises: the names that they define and what these stand for."""
    found: dict[str, dict[str, list[Sequence[str]]]] = {}
    for exercise in all_exercises().values():
        found.setdefault(exercise.lesson, {}).update(asked([exercise]))
    return found


def asked(exercises: Sequence[Exercise]) -> dict[str, list[Sequence[str]]]:
    """The same of some exercises."""
    return {exercise.name: [exercise.names, exercise.objects] for exercise in exercises}
