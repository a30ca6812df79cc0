"""Read submissions in the sandbox (`notebook_reader`). This process parses no submission itself, only the reader's JSON.

One start of the sandbox reads all files of a learner. If a file ends the reader, by a limit or a crash, it is reported as
unreadable and a new reader continues with the next file.
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

from course.lab.checks import notebook_cells, render
from course.lab.checks.check import blanked_package, temporary_folder
from course.lab.checks.exercise import Exercise, all_exercises
from course.lab.checks.notebook_cells import Answer, Piece
from course.lab.sandbox import notebook_reader, sandbox
from course.lab.sandbox.limits import Limits
from course.lab.sandbox.scratch_folder import read_untrusted
from course.utils.errors import CourseError

BASE_SECONDS = 20.0                                  # CPU seconds to read a learner's files,
SECONDS_PER_FILE = 2.0                               # plus this for each file,
MAX_SECONDS = 120.0                                  # but at most this
MAX_BYTES = 500_000_000                              # of all of a learner's notebooks, copied for the sandbox
MAX_RESULT_BYTES = 10_000_000                        # bytes of the reader's result for one file
RESERVED_BYTES = 100_000_000                         # bytes of disk to leave free
TOO_BUSY = "reading it did not end: this machine is too busy"
_first = threading.Lock()                            # only one thread builds the package and probes the layers


class SubmittedFile(NamedTuple):
    """A submitted notebook or script."""

    path: Path
    name: str                                        # for messages
    lesson: str                                      # in its name; "" if none


@dataclass(frozen=True)
class Reading:
    """The parsed contents of one file, as plain values."""

    name: str                                        # of the file, for messages
    digest: str = ""                                 # SHA-256 of its bytes, or its size if it is too large
    lesson: str = ""                                 # "" if neither its name nor its metadata name one
    answers: Mapping[str, Answer] = field(default_factory=dict)          # to the wanted exercises, or all of the lesson, by name
    problem: str = ""                                # why it cannot be read; continues its name
    failure: str = ""                                # why this machine cannot read it; not the learner's fault


def read_from_contents(path: Path, contents: notebook_cells.Contents, lesson: str, wanted: Sequence[Exercise] = ()) -> Reading:
    """The reading of a notebook in memory. Raises `CourseError` if it has too many statements."""
    try:
        extracted = notebook_reader.extract_answers(contents, lesson, lesson_table(), exercise_table(wanted))
    except CourseError as error:
        raise CourseError(f"{path} {error}") from error
    return Reading(path.name, "", extracted["lesson"], extracted["answers"])


def read_one(file: SubmittedFile, wanted: Sequence[Exercise] = ()) -> Reading:
    """Read one submitted file in the sandbox."""
    return read_all([file], wanted=wanted)[0]


def read_all(files: Sequence[SubmittedFile], known: Mapping[str, str] | None = None, wanted: Sequence[Exercise] = (),
            last: bool = False) -> list[Reading]:
    """Read the files of one learner in the sandbox.

    known: digest -> lesson of files that need no reading. It reads the last files first, so that earlier ones are left out if
    all together are too large or take too long. last: keep answers only for the last file of each lesson.
    """
    readings: dict[int, Reading] = {}
    copied, size = list[int](), 0
    with temporary_folder() as folder:
        for number in reversed(range(len(files))):
            content, readings[number] = load_bytes(files[number], known or {}, MAX_BYTES - size)
            if content is not None:
                (folder / f"{number}{files[number].path.suffix.lower()}").write_bytes(content)
                copied.append(number)
                size += len(content)
        read_copies(folder, files, copied, readings, size, wanted, last)
    return [readings[number] for number in range(len(files))]


def load_bytes(file: SubmittedFile, known: Mapping[str, str], max_bytes: int) -> tuple[bytes | None, Reading]:
    """The bytes of a file, or None if it will not be read, and its provisional reading."""
    try:
        with open(file.path, "rb", opener=open_regular_file) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size > notebook_cells.MAX_BYTES:
                problem = f"has more than {notebook_cells.MAX_BYTES // 1_000_000} MB: clear its outputs and save it again"
                return None, Reading(file.name, f"{size} bytes", file.lesson, problem=problem)
            if size > max_bytes:
                problem = f"is not read: a learner's notebooks may have {MAX_BYTES // 1_000_000} MB together"
                return None, Reading(file.name, f"{size} bytes", file.lesson, problem=problem)
            content = opened.read(notebook_cells.MAX_BYTES + 1)
        digest = hashlib.sha256(content).hexdigest()
        lesson = known.get(digest, "")
        if lesson and file.lesson in ("", lesson):
            return None, Reading(file.name, digest, lesson)
        shortage = disk_shortage(len(content))
        return None if shortage else content, Reading(file.name, digest, file.lesson, failure=shortage)
    except (OSError, MemoryError, CourseError) as error:
        return None, Reading(file.name, "", file.lesson, failure=render.failure_reason(error))


def open_regular_file(path: str, flags: int) -> int:
    """Open a regular file without blocking; raises OSError for a link, which may lead anywhere, `CourseError` for others."""
    number = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise CourseError("it is not an ordinary file")
    return number


def disk_shortage(needed: float) -> str:
    """Why there is too little disk space for temporary files, including the reserve; "" if there is enough."""
    free = shutil.disk_usage(tempfile.gettempdir()).free
    return "" if free >= needed + RESERVED_BYTES else (f"the folder for temporary files has only {free // 1_000_000} MB left, "
                                                       f"and {(needed + RESERVED_BYTES) // 1_000_000:.0f} MB are needed")


def read_copies(folder: Path, files: Sequence[SubmittedFile], numbers: Sequence[int], readings: dict[int, Reading], size: int,
                wanted: Sequence[Exercise], last: bool) -> None:
    """Read the copied files of a folder, `size` bytes in all, into `readings`."""
    remaining, spent = list(numbers), 0.0            # CPU seconds
    limit = min(MAX_SECONDS, BASE_SECONDS + SECONDS_PER_FILE * len(files))
    while remaining and spent < limit:
        job = {"files": [(n, files[n].path.suffix.lower(), files[n].lesson) for n in remaining], "lessons": lesson_table(),
               "wanted": exercise_table(wanted), "seconds": limit - spent}
        (folder / "job.json").unlink(missing_ok=True)                # the reader may have replaced it
        with open(folder / "job.json", "x", encoding="utf-8") as file:
            json.dump(job, file)
        limits = Limits(seconds=60 + 4 * (limit - spent), gigabytes=2.0, processes=8, output=20_000, disk=1 + 2 * size / 1e9)
        try:
            outcome = start_reader(folder, limits)
        except (CourseError, OSError) as error:
            failed = render.failure_reason(error)
        else:
            failed = TOO_BUSY if outcome.late else ""
        used = 0.0
        while remaining and os.path.lexists(folder / f"{remaining[0]}.json"):
            used = accept_result(folder, remaining[0], readings, used)
            lesson = readings[remaining[0]].lesson
            if last and lesson and any(number > remaining[0] and other.lesson == lesson for number, other in readings.items()):
                readings[remaining[0]] = replace(readings[remaining[0]], answers={})        # frees memory
            remaining.pop(0)
        spent += used
        if not remaining:
            break
        if not failed and (outcome.ok or not os.path.lexists(folder / "began")):
            failed = f"the program that reads it did not start ({render.printable(outcome.ended)[:100]})"
        if failed:
            readings |= {n: Reading(files[n].name, readings[n].digest, files[n].lesson, failure=failed) for n in remaining}
            return
        first = remaining.pop(0)
        problem, failure = explain_end(outcome)
        readings[first] = Reading(files[first].name, readings[first].digest, files[first].lesson, problem=problem,
                                  failure=failure)
        spent += notebook_reader.MAX_SECONDS
        (folder / "began").unlink(missing_ok=True)
    too_slow = f"is not read: this learner's notebooks take more than {limit:.0f} seconds to read"
    readings |= {n: Reading(files[n].name, readings[n].digest, files[n].lesson, problem=too_slow) for n in remaining}


def start_reader(folder: Path, limits: Limits) -> sandbox.Outcome:
    """Run the reader on a folder in the sandbox."""
    with _first:
        package, layers = blanked_package(()), sandbox.layers()
    command = [sys.executable, "-m", "course.lab.sandbox.notebook_reader", str(folder)]
    return sandbox.run(command, folder, [package], {"PYTHONPATH": str(package)}, limits, layers)


def explain_end(outcome: sandbox.Outcome) -> tuple[str, str]:
    """Why the reader ended at a file: (problem, failure). It is the file's fault unless the reader was killed."""
    if f"(signal {int(signal.SIGKILL)})" in outcome.ended:
        return "", "reading it was stopped: perhaps this machine ran out of memory"
    clock = (signal.SIGPROF, signal.SIGXCPU)
    if any(f"(signal {int(number)})" in outcome.ended for number in clock):
        return (f"takes more than {notebook_reader.MAX_SECONDS:g} seconds to read: leave out code that is no part of the lesson",
                "")
    return "makes Python stop when it is read: leave out code that is no part of the lesson", ""


def accept_result(folder: Path, number: int, readings: dict[int, Reading], used: float) -> float:
    """Validate the reader's untrusted result for a file and store it; returns the CPU seconds of all files so far."""
    known = readings[number]
    try:
        result = json.loads(read_untrusted(folder, f"{number}.json", MAX_RESULT_BYTES))
        lesson, problem, seconds = result.get("lesson", ""), result.get("problem", ""), result["seconds"]
        require(isinstance(lesson, str) and len(lesson) <= 20 and isinstance(problem, str) and isinstance(seconds, float))
        require(isinstance(result["answers"], dict) and result["answers"].keys() <= all_exercises().keys())
        answers = {name: parse_answer(each) for name, each in result["answers"].items()}
    except (CourseError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        damaged = "has more code for its exercises than anybody needs, or what was read of it is damaged"
        readings[number] = Reading(known.name, known.digest, known.lesson, problem=damaged)
        return used
    readings[number] = Reading(known.name, known.digest, known.lesson if problem else lesson, answers, problem[:1000])
    return max(used, seconds)


def parse_answer(value: Any) -> Answer:
    """Parse an answer from the reader's JSON. Raises ValueError, TypeError or KeyError if it is invalid."""
    require(isinstance(value["pieces"], list) and isinstance(value["problem"], str))
    require(isinstance(value["broken"], bool) and isinstance(value["imported"], bool))
    return Answer(tuple(map(parse_piece, value["pieces"])), value["problem"][:1000], value["broken"], value["imported"])


def parse_piece(value: Any) -> Piece:
    """Parse a piece from the reader's JSON; raises like `parse_answer`."""
    require(isinstance(value["cell"], str) and isinstance(value["text"], str) and type(value["line"]) is int and value["line"]
            > 0)
    return Piece(value["cell"], value["line"], value["text"])


def require(holds: bool) -> None:
    """Raise ValueError unless a condition holds."""
    if not holds:
        raise ValueError("this is not what the reader writes")


def lesson_table() -> dict[str, dict[str, list[Sequence[str]]]]:
    """Lesson -> exercise -> [names that it defines, library objects that they replace], for the reader's job."""
    exercises: dict[str, dict[str, list[Sequence[str]]]] = {}
    for exercise in all_exercises().values():
        exercises.setdefault(exercise.lesson, {}).update(exercise_table([exercise]))
    return exercises


def exercise_table(exercises: Sequence[Exercise]) -> dict[str, list[Sequence[str]]]:
    """Exercise -> [names, objects], for one level of `lesson_table`."""
    return {exercise.name: [exercise.names, exercise.objects] for exercise in exercises}
