"""What runs in a process of its own to read what learners handed in: load each file, slice its exercises' code, write that down.

    python -m course.lab.reader FOLDER

`job.json` in the folder: {"files": [[number, suffix, lesson], ...], "lessons": {lesson: {exercise: [names, objects]}},
"wanted": {exercise: [names, objects]}, "seconds"}. The files are `NUMBER.ipynb` or `NUMBER.py`; `lesson` is what the file's own
name says. When it has begun there is `began`. Of each file in turn, `NUMBER.json` has what `read` returns, and the seconds of
computing so far. A file that takes too long ends the process: whoever started it goes on with the next one.
"""

import gc
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from course.errors import CourseError
from course.lab import cells

SECONDS = 10.0                                       # of computing, that one file may take
MEMORY = 1_000_000_000                               # bytes, for all that it makes of one
LARGE = f"takes more than {MEMORY // 10**9} GB of memory to read: clear its outputs and save it again"
Exercises = Mapping[str, Sequence[Sequence[str]]]    # the names that each defines, and the library's objects that they replace


def read(path: Path, named: str, lessons: Mapping[str, Exercises], wanted: Exercises) -> dict[str, Any]:
    """The lesson of a notebook or script and, for its exercises or those wanted, their answers; `problem`: why it has none.

    named: the lesson that the file's name says.
    """
    try:
        found = cells.contents(path)
        return answers(found, settle(named, found, lessons), lessons, wanted)
    except CourseError as error:
        text = str(error)
        large = isinstance(error.__cause__, MemoryError)
        return {"problem": LARGE if large else text.removeprefix(str(path)).lstrip(": ") if text.startswith(str(path)) else text}
    except MemoryError:
        return {"problem": LARGE}
    except RecursionError:
        return {"problem": "cannot be read: its code is nested too deeply"}


def answers(found: cells.Contents, lesson: str, lessons: Mapping[str, Exercises], wanted: Exercises) -> dict[str, Any]:
    """The answers to a lesson's exercises, or to those wanted, in what counts of a notebook."""
    program = cells.Program(found.code, cells.MOST_STATEMENTS)
    exercises = wanted or lessons.get(lesson, {})
    return {"lesson": lesson, "answers": {name: cells.answered(program, *about) for name, about in exercises.items()}}


def settle(named: str, found: cells.Contents, lessons: Mapping[str, Exercises]) -> str:
    """The lesson of a notebook: of its file's name, or of its metadata where the name says none or somebody misnamed the file.

    It is misnamed if nothing in it is of the lesson that its name says, and its metadata say another.
    """
    def there(lesson: str) -> bool:
        return any(cells.defined(cell, names) for names, _ in lessons.get(lesson, {}).values() for cell in found.code)

    return found.lesson if not named or (found.lesson in lessons and not there(named)) else named


def main(folder: Path) -> None:
    """Read every file of the job."""
    warnings.simplefilter("ignore")                  # of the learner's code, about which it says nothing here
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    (folder / "began").touch()
    bounded(job["seconds"])
    gc.disable()                                     # it would look through millions of lists again and again
    for number, suffix, named in job["files"]:
        if hasattr(signal, "setitimer"):             # of computing, not of waiting; its signal ends the process
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
        told = read(folder / f"{number}{suffix}", named, job["lessons"], job["wanted"])
        told |= {"answers": {name: asdict(answer) for name, answer in told.get("answers", {}).items()},
                 "seconds": time.process_time()}
        unfinished = folder / f"{number}.part"
        unfinished.write_text(json.dumps(told), encoding="utf-8")
        os.replace(unfinished, folder / f"{number}.json")


def bounded(seconds: float) -> None:
    """Limit what this process may compute and allocate: what goes beyond ends one file's reading, not the class's."""
    try:
        import resource
    except ImportError:                              # Windows has none; the watchdog's limits stay
        return
    for what, most in ((resource.RLIMIT_AS, MEMORY + 300_000_000), (resource.RLIMIT_CPU, int(seconds) + 1)):
        hard = resource.getrlimit(what)[1]
        with suppress(ValueError, OSError):          # macOS takes no limit on addresses
            resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
