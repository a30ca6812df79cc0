"""`course release`: what learners get."""

import re
import shutil
from pathlib import Path

from course.errors import CourseError
from course.files import atomic
from course.lab import lessons

TOP = (".gitignore", "README.md", "LICENSE", "Makefile", "pyproject.toml", "setup.py", "MANIFEST.in", "constraints.txt",
       "environment.yml", "docs", "course", "data/README.md", "submit", "tests")
NOT = ("__pycache__", ".*", "*.pyc", "*.egg-info")
MADE = ("api",)                                                  # of docs: what `make docs` writes there
LINK = re.compile(r"\]\([\w./]*?(\d\d_\w+)\.ipynb")
ANSWERS = ("lab",)                                               # of tests: what tests the lessons shows answers


def main(out: Path, root: Path = lessons.ROOT) -> None:
    """Write the course without its solutions, with blank notebooks, to a new folder.

    Raises `CourseError` if the folder exists, if a notebook is stale or gives an answer away, or if something names a lesson that
    is not there.
    """
    if out.exists():
        raise CourseError(f"{out} exists: name a folder that does not, or remove it first")
    if found := lessons.verify([], root) + dangling(root):
        raise CourseError("\n".join(["not released:", *found]))
    notebooks = [f"notebooks/{master.stem}.ipynb" for master in lessons.masters([], root)]      # no copies that lie beside them
    with atomic(out) as temporary:
        for name in (*TOP, *notebooks):
            source, target = root / name, temporary / name
            if source.is_dir():
                left = shutil.ignore_patterns(*NOT, *{"tests": ANSWERS, "docs": MADE}.get(name, ()))
                shutil.copytree(source, target, symlinks=True, ignore=left)     # submit/site as a file means something else
            elif source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        ignored = temporary / ".gitignore"
        if (temporary / "submit" / "site").exists() and ignored.is_file():      # it goes into whatever repository this becomes
            ignored.write_text(ignored.read_text(encoding="utf-8").replace("submit/site\n", ""))
    print(f"wrote {out}: {len(notebooks)} blank notebooks and the library. The library is public: it holds the answers to those "
          "exercises that are objects of it, and the known mistakes from which checks draw their hints")


def dangling(root: Path) -> list[str]:
    """The lines of pages and lessons that link to notebooks of lessons without a master, each in a sentence."""
    there = {master.stem for master in lessons.masters([], root)}
    pages = [root / "README.md", *sorted(root.glob("docs/*.md")), *sorted(root.glob("submit/*.md")), *lessons.masters([], root)]
    return [f"{page.relative_to(root)}, line {number}: there is no lesson {name}: take the line out, or bring its master back"
            for page in pages if page.is_file()
            for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
            for name in LINK.findall(line) if name not in there]
