"""`course release`: write the course that learners get."""

import os
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

from course.lab.authoring import hidden_answers, lessons, stubs
from course.lab.checks.exercise import all_exercises
from course.utils.atomic_files import atomic
from course.utils.errors import CourseError

RELEASED = (".gitignore", "README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "Makefile", "pyproject.toml", "setup.py",
            "MANIFEST.in", "constraints.txt", "environment.yml", "docs", "course", "experiments", "examples", "data/README.md",
            "submit", "tests")
NOT_RELEASED = ("__pycache__", ".*", "*.pyc", "*.egg-info")
GENERATED_DOCS = ("api",)                            # in docs: written by `make docs`
LINK = re.compile(r"\]\([\w./]*?(\d\d_\w+)\.ipynb")
ANSWER_TESTS = ("lab",)                              # in tests: the tests of the lessons show answers


def main(out: Path, root: Path = lessons.ROOT, hide_answers: bool = False) -> None:
    """Write the course to a new folder, with blank notebooks and without its solutions.

    From a clone it copies the files that git tracks and the site's script, and it prints what it leaves out.
    hide_answers: also blank the exercises' objects in the released library, which still runs and checks.
    Raises `CourseError` if the folder exists, if a notebook is stale or reveals an answer, or if a page links to a missing
    lesson.
    """
    if out.exists():
        raise CourseError(f"{out} exists: name a new folder, or remove this one first")
    if found := lessons.verify([], root) + dangling_links(root):
        raise CourseError("\n".join(["not released:", *found]))
    notebooks = [f"notebooks/{master.stem}.ipynb" for master in lessons.masters([], root)]      # without stray copies
    with atomic(out) as temporary:
        for name in files_to_release(root, notebooks):
            source, target = root / name, temporary / name
            if source.is_symlink() or source.is_file():              # git also lists deleted files and submodules
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)             # as a plain file submit/site means something else
        ignored = temporary / ".gitignore"
        if (temporary / "submit" / "site").exists() and ignored.is_file():      # a repository made from this tracks it
            ignored.write_text(ignored.read_text(encoding="utf-8").replace("submit/site\n", ""))
        if hide_answers:
            hide_in_package(temporary / "course")
    print(f"wrote {out}: {len(notebooks)} blank notebooks and the library. " + (
        "Its files show no answers: they are packed in course/" + hidden_answers.ARCHIVE if hide_answers else
        "The library is public: it holds the answers to those exercises that are objects of it, and the known mistakes from "
        "which checks draw their hints"))


def hide_in_package(package: Path) -> None:
    """Blank the exercises' objects in a copy of this package, and pack the original modules and the known mistakes."""
    answers = {dotted for exercise in all_exercises().values() for dotted in exercise.objects}
    blank_texts = stubs.blanked_modules(sorted(answers))
    mistakes = [path for path in (stubs.PACKAGE / "lab" / "mistakes").glob("*.py") if path.name != "__init__.py"]
    names = {file: ".".join(("course", *file.relative_to(stubs.PACKAGE).with_suffix("").parts))
             for file in (*blank_texts, *mistakes)}
    packed = hidden_answers.pack({name: file.read_text(encoding="utf-8") for file, name in names.items()})
    (package / hidden_answers.ARCHIVE).write_bytes(packed)
    for file, text in blank_texts.items():
        (package / file.relative_to(stubs.PACKAGE)).write_text(text, encoding="utf-8")
    for file in mistakes:
        (package / file.relative_to(stubs.PACKAGE)).unlink()
    with open(package / "__init__.py", "a", encoding="utf-8") as init:
        init.write(hidden_answers.INSTALL)


def files_to_release(root: Path, notebooks: list[str]) -> list[str]:
    """The files to release, as paths below the root. Prints files that it leaves out or that may be released by mistake."""
    places = (*RELEASED, *notebooks)
    if not (root / ".git").exists():
        print(f"{root} is no git clone, so that nothing says which files belong to the course: look through what is released")
        found = [path for name in places for path in [root / name, *sorted((root / name).rglob("*"))]]
        return [name for path in found if not path.is_dir() or path.is_symlink()
                if is_released(name := str(path.relative_to(root)))]
    tracked = [name for name in list_git_files(root, "--cached", "--", *places) if is_released(name)]
    site = root / "submit" / "site"                  # never in git; the script it links to may be new
    scripts = {path.relative_to(root).as_posix() for path in (site, site.resolve())
               if site.exists() and path.is_relative_to(root / "submit")}
    for option, why in (("--others", "left out, since git does not track them"),
                        ("--modified", "released as they are here, which git has not yet")):
        if names := [name for name in list_git_files(root, option, "--exclude-standard", "--", *places)
                     if is_released(name) and name not in scripts]:
            more = f" and {len(names) - 20} more" if len(names) > 20 else ""
            print(f"warning: {why}: {', '.join(map(ascii, names[:20]))}{more}")
    return sorted({*tracked, *scripts})


def list_git_files(root: Path, *options: str) -> list[str]:
    """The files that `git ls-files` lists. Raises `CourseError` if git fails."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}       # a hook sets GIT_ variables
    command = ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", "ls-files", "-z", *options]
    try:
        done = subprocess.run(command, cwd=root, env=plain, capture_output=True)
    except OSError as error:
        raise CourseError(f"not released: {root} is a git clone, and git cannot be run here: install git") from error
    if done.returncode:
        message = (done.stderr.decode(errors="replace").strip().splitlines() or ["it says nothing"])[-1]
        raise CourseError(f"not released: git does not say which files of {root} it tracks ({message})")
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def is_released(name: str) -> bool:
    """Whether a file in a released folder is for learners."""
    parts = Path(name).parts
    left = {"tests": ANSWER_TESTS, "docs": GENERATED_DOCS}.get(parts[0], ())
    return name in RELEASED or not any(fnmatch(part, pattern) for part in parts for pattern in (*NOT_RELEASED, *left))


def dangling_links(root: Path) -> list[str]:
    """A sentence for each line of a page or lesson that links to the notebook of a lesson without a master."""
    there = {master.stem for master in lessons.masters([], root)}
    pages = [root / "README.md", *sorted(root.glob("docs/*.md")), *sorted(root.glob("submit/*.md")), *lessons.masters([], root)]
    return [f"{page.relative_to(root)}, line {number}: there is no lesson {name}: take the line out, or bring its master back"
            for page in pages if page.is_file()
            for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
            for name in LINK.findall(line) if name not in there]
