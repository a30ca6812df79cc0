"""Decide whether a notebook is the user's own. Without isolation, `course check` runs other notebooks only with --trust.

Neither a notebook nor the folders around it can show that: a submission may bring folders along. So a list in the user's home
folder names the course folders that the user works in: those where `lab.begin` ran or `course lessons copy` wrote. The clone
that this program belongs to always counts.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from course.lab.authoring import stubs
from course.utils.errors import CourseError


def list_path() -> Path:
    """The file with the list: one folder per line, as JSON."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "course" / "folders"


def remember_course(course: Path) -> None:
    """Add a course folder to this user's list. If the home folder is not writable, do nothing."""
    with suppress(OSError, RuntimeError):
        folder, path = course.resolve(), list_path()
        if folder not in known_courses():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(str(folder)) + "\n")


def known_courses() -> list[Path]:
    """The course folders that this user works in."""
    courses = [stubs.PACKAGE.parent.resolve()]
    with suppress(OSError, RuntimeError, ValueError):
        courses += [Path(json.loads(line)) for line in list_path().read_text(encoding="utf-8").splitlines()]
    return courses


def is_own(path: Path) -> bool:
    """Whether this user owns a file and its resolved path is in `notebooks` or `solutions` of one of these folders."""
    with suppress(OSError, RuntimeError):            # a circular link, or no such file
        path = path.resolve()
        return (path.parent.name in ("notebooks", "solutions") and path.parent.parent in known_courses()
                and path.stat().st_uid == os.geteuid())
    return False


def describe_protection(path: Path, trust: bool, on_ranks: bool = False) -> str:
    """How somebody else's notebook is isolated while it is checked, as a sentence; "" for the user's own notebook.

    on_ranks: it runs in a job's steps, which isolate nothing. Raises `CourseError` if nothing isolates it and `trust` is not
    set.
    """
    from course.lab.grading import grade

    if is_own(path) or not path.exists():             # reading it reports that it is missing
        return ""
    if on_ranks and trust:
        return "every answer runs on the ranks as you: nothing keeps it from your files and the network, as --trust allows"
    try:
        if on_ranks:
            raise CourseError("on the ranks of a job, its code is not isolated from your files: if you trust it, use --trust")
        return grade.describe_protection(trust)
    except CourseError as error:
        raise CourseError(f"{path} may be another person's, because it is not in the notebooks folder of your course; "
                          f"{error}") from error
