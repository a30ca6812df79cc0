"""Whose notebook is it? Where nothing isolates code, `course check` runs a user's own notebooks, and others' only with --trust.

Neither a notebook nor the folders around it can answer that: who hands in a notebook can hand in folders with it. So this user's
home folder keeps a list of the courses that the user works in: where lessons were begun (`lab.begin`) or put (`course lessons
copy`). The clone that this program belongs to is one without being listed.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from course.lab.authoring import stubs
from course.utils.errors import CourseError


def list_path() -> Path:
    """The file with the list, one folder a line, as JSON."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "course" / "folders"


def remember_course(course: Path) -> None:
    """Note that this user works in a course's folder; without a word where no home folder can be written to."""
    with suppress(OSError, RuntimeError):
        folder, path = course.resolve(), list_path()
        if folder not in known_courses():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(str(folder)) + "\n")


def known_courses() -> list[Path]:
    """The folders of courses that this user works in."""
    courses = [stubs.PACKAGE.parent.resolve()]
    with suppress(OSError, RuntimeError, ValueError):
        courses += [Path(json.loads(line)) for line in list_path().read_text(encoding="utf-8").splitlines()]
    return courses


def is_own(path: Path) -> bool:
    """Whether a file is this user's and lies, itself and not as a link, in `notebooks` or `solutions` of one of these
    folders."""
    with suppress(OSError, RuntimeError):            # a link that leads in a circle, or a file that is not there
        path = path.resolve()
        return (path.parent.name in ("notebooks", "solutions") and path.parent.parent in known_courses()
                and path.stat().st_uid == os.geteuid())
    return False


def describe_protection(path: Path, trust: bool, on_ranks: bool = False) -> str:
    """What keeps another's notebook from harm while it is checked, as a sentence; "" if it is this user's own.

    on_ranks: as a job's steps run it, which isolate nothing. Raises `CourseError` where nothing isolates and nobody said that
    this is fine.
    """
    from course.lab.grading import grade

    if is_own(path) or not path.exists():             # who reads it says that it is not there
        return ""
    if on_ranks and trust:
        return "every answer runs on the ranks as you: nothing keeps it from your files and the network, as --trust allows"
    try:
        if on_ranks:
            raise CourseError("on the ranks of a job nothing isolates its code from your files: if you trust it, --trust")
        return grade.describe_protection(trust)
    except CourseError as error:
        raise CourseError(f"{path} may be somebody else's, since it is not in the notebooks folder of a course that you work in; "
                          f"{error}") from error
