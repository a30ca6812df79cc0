"""What runs in a process of its own to read what learners handed in: load each file, slice its exercises' code, write that down.

    python -m course.lab.sandbox.notebook_reader FOLDER

`job.json` in the folder: {"files": [[number, suffix, lesson], ...], "lessons": {lesson: {exercise: [names, objects]}},
"wanted": {exercise: [names, objects]}, "seconds"}. The files are `NUMBER.ipynb` or `NUMBER.py`; `lesson` is what the file's own
name says. When it has begun there is `began`. Of each file in turn, `NUMBER.json` has what `read_file` returns, and the seconds
of computing so far. A file that takes too long ends the process: whoever started it goes on with the next one.
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

from course.lab.checks import notebook_cells
from course.utils.errors import CourseError

MAX_SECONDS = 10.0                                   # of computing, that one file may take
MAX_MEMORY = 1_000_000_000                           # bytes, for all that it makes of one
TOO_LARGE = f"takes more than {MAX_MEMORY // 10**9} GB of memory to read: clear its outputs and save it again"
Exercises = Mapping[str, Sequence[Sequence[str]]]    # the names that each defines, and the library's objects that they replace


def read_file(path: Path, named: str, lessons: Mapping[str, Exercises], wanted: Exercises) -> dict[str, Any]:
    """The lesson of a notebook or script and, for its exercises or those wanted, their answers; `problem`: why it has none.

    named: the lesson that the file's name says.
    """
    try:
        contents = notebook_cells.read_contents(path)
        return extract_answers(contents, choose_lesson(named, contents, lessons), lessons, wanted)
    except CourseError as error:
        text = str(error)
        large = isinstance(error.__cause__, MemoryError)
        return {"problem": TOO_LARGE if large else text.removeprefix(str(path)).lstrip(": ") if text.startswith(str(path))
                else text}
    except MemoryError:
        return {"problem": TOO_LARGE}
    except RecursionError:
        return {"problem": "cannot be read: its code is nested too deeply"}


def extract_answers(contents: notebook_cells.Contents, lesson: str, lessons: Mapping[str, Exercises],
                    wanted: Exercises) -> dict[str, Any]:
    """The answers to a lesson's exercises, or to those wanted, in what counts of a notebook."""
    program = notebook_cells.Program(contents.code, notebook_cells.MAX_STATEMENTS)
    exercises = wanted or lessons.get(lesson, {})
    return {"lesson": lesson, "answers": {name: notebook_cells.find_answer(program, *about) for name, about in exercises.items()}}


def choose_lesson(named: str, contents: notebook_cells.Contents, lessons: Mapping[str, Exercises]) -> str:
    """The lesson of a notebook: of its file's name, or of its metadata where the name says none or somebody misnamed the file.

    It is misnamed if nothing in it is of the lesson that its name says, and its metadata say another.
    """
    def there(lesson: str) -> bool:
        return any(notebook_cells.first_definition(cell, names) for names,
                   _ in lessons.get(lesson, {}).values() for cell in contents.code)

    return contents.lesson if not named or (contents.lesson in lessons and not there(named)) else named


def main(folder: Path) -> None:
    """Read every file of the job."""
    warnings.simplefilter("ignore")                  # of the learner's code, about which it says nothing here
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    (folder / "began").touch()
    limit_resources(job["seconds"])
    gc.disable()                                     # it would look through millions of lists again and again
    for number, suffix, named in job["files"]:
        if hasattr(signal, "setitimer"):             # of computing, not of waiting; its signal ends the process
            signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        result = read_file(folder / f"{number}{suffix}", named, job["lessons"], job["wanted"])
        result |= {"answers": {name: asdict(answer) for name, answer in result.get("answers", {}).items()},
                 "seconds": time.process_time()}
        unfinished = folder / f"{number}.part"
        unfinished.write_text(json.dumps(result), encoding="utf-8")
        os.replace(unfinished, folder / f"{number}.json")


def limit_resources(seconds: float) -> None:
    """Limit what this process may compute and allocate: what goes beyond ends one file's reading, not the class's."""
    try:
        import resource
    except ImportError:                              # Windows has none; the watchdog's limits stay
        return
    for resource_type, limit in ((resource.RLIMIT_AS, MAX_MEMORY + 300_000_000), (resource.RLIMIT_CPU, int(seconds) + 1)):
        hard = resource.getrlimit(resource_type)[1]
        with suppress(ValueError, OSError):          # macOS takes no limit on addresses
            resource.setrlimit(resource_type, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
