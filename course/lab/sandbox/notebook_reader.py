"""The process inside the sandbox that reads submissions: load each file, slice out its exercises' code, write the result.

    python -m course.lab.sandbox.notebook_reader FOLDER

`job.json` in the folder: {"files": [[number, suffix, lesson], ...], "lessons": {lesson: {exercise: [names, objects]}},
"wanted": {exercise: [names, objects]}, "seconds"}. The files are `NUMBER.ipynb` or `NUMBER.py`; `lesson` is the one in the file's
original name. It creates `began` when it starts. For each file in turn it writes `NUMBER.json`: the result of `read_file` and
the CPU seconds so far. A file that takes too long ends the process; the caller then starts it again with the next file.
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

MAX_SECONDS = 10.0                                   # CPU seconds for one file
MAX_MEMORY = 1_000_000_000                           # bytes of memory for one file
TOO_LARGE = f"takes more than {MAX_MEMORY // 10**9} GB of memory to read: clear its outputs and save it again"
Exercises = Mapping[str, Sequence[Sequence[str]]]    # exercise -> [names that it defines, library objects that they replace]


def read_file(path: Path, named: str, lessons: Mapping[str, Exercises], wanted: Exercises) -> dict[str, Any]:
    """Read a notebook or script: its `lesson` and the `answers` to its or the wanted exercises; or the `problem` with it.

    named: the lesson in the file's name.
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
    """Extract the answers to the wanted exercises, or else to all of the lesson, from a notebook's contents."""
    program = notebook_cells.Program(contents.code, notebook_cells.MAX_STATEMENTS)
    exercises = wanted or lessons.get(lesson, {})
    return {"lesson": lesson, "answers": {name: notebook_cells.find_answer(program, *about) for name, about in exercises.items()}}


def choose_lesson(named: str, contents: notebook_cells.Contents, lessons: Mapping[str, Exercises]) -> str:
    """The lesson of a notebook: from the file's name, or from the metadata if the name has none or is wrong.

    The name is wrong if the notebook has no definition of that lesson's exercises, and the metadata name a known lesson.
    """
    def there(lesson: str) -> bool:
        return any(notebook_cells.first_definition(cell, names) for names,
                   _ in lessons.get(lesson, {}).values() for cell in contents.code)

    return contents.lesson if not named or (contents.lesson in lessons and not there(named)) else named


def main(folder: Path) -> None:
    """Read every file of the job."""
    warnings.simplefilter("ignore")                  # warnings about the learner's code
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    (folder / "began").touch()
    limit_resources(job["seconds"])
    gc.disable()                                     # it would scan millions of lists repeatedly
    for number, suffix, named in job["files"]:
        if hasattr(signal, "setitimer"):             # CPU time; its signal ends the process
            signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        result = read_file(folder / f"{number}{suffix}", named, job["lessons"], job["wanted"])
        result |= {"answers": {name: asdict(answer) for name, answer in result.get("answers", {}).items()},
                 "seconds": time.process_time()}
        unfinished = folder / f"{number}.part"
        unfinished.write_text(json.dumps(result), encoding="utf-8")
        os.replace(unfinished, folder / f"{number}.json")


def limit_resources(seconds: float) -> None:
    """Limit this process's CPU time and memory. Exceeding them ends the reading of one file, not of the class."""
    try:
        import resource
    except ImportError:                              # Windows has none; the watchdog's limits remain
        return
    for resource_type, limit in ((resource.RLIMIT_AS, MAX_MEMORY + 300_000_000), (resource.RLIMIT_CPU, int(seconds) + 1)):
        hard = resource.getrlimit(resource_type)[1]
        with suppress(ValueError, OSError):          # macOS refuses a limit on address space
            resource.setrlimit(resource_type, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
