"""`course release`: what learners get."""

import shutil
from pathlib import Path

from course.errors import CourseError
from course.files import atomic
from course.lab import lessons

TOP = ("README.md", "LICENSE", "Makefile", "pyproject.toml", "constraints.txt", "environment.yml", "docs", "course", "notebooks",
       "data/README.md", "submit", "tests")
NOT = ("__pycache__", ".*", "*.pyc", "*.egg-info", "lab")        # of docs and tests: what tests the lessons shows answers


def main(out: Path, root: Path = lessons.ROOT) -> None:
    """Write the course without its solutions, with blank notebooks, to a new folder.

    Raises `CourseError` if the folder exists, or if a notebook is stale or gives an answer away.
    """
    if out.exists():
        raise CourseError(f"{out} exists: name a folder that does not, or remove it first")
    if found := lessons.verify([], root):
        raise CourseError("\n".join(["not released:", *found]))
    with atomic(out) as temporary:
        for name in TOP:
            source, target = root / name, temporary / name
            if source.is_dir():
                skip = shutil.ignore_patterns("__pycache__", "*.pyc", ".*") if name == "course" else shutil.ignore_patterns(*NOT)
                shutil.copytree(source, target, ignore=skip)
            elif source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
    count = len(list((out / "notebooks").glob("*.ipynb")))
    print(f"wrote {out}: {count} blank notebooks and the library. The library is public: it holds the answers to those "
          "exercises that are objects of it, and the checks compare with them")
