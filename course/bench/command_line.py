"""Usage and error messages for modules run as `python -m course.bench.NAME` or `experiments.NAME`."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from course.utils.errors import CourseError

# what pip calls packages that are imported by another name
INSTALLED_AS = {"megatron": "megatron-core", "transformer_engine": "'course[cuda]'", "nvidia": "'course[dali]'"}


def missing_package(error: Exception) -> str:
    """The package that is not installed, or "" for other errors, also for a module of the course itself: that is a mistake."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return "" if package == "course" else package


def reason(error: Exception) -> str:
    """What stopped a measurement: for a missing package a sentence that names it, else the error's kind and text."""
    package = missing_package(error)
    if not package:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return (f"this measurement needs the package {package}, which is not installed: pip install "
            f"{INSTALLED_AS.get(package, package)}, or leave this measurement out")


@contextmanager
def command(usage: str, least: int = 1) -> Iterator[list[str]]:
    """Yield the command line's words without flags. Exit with `usage` if they are too few, or for a flag that it does not name.

    A `CourseError` inside the block is printed as a sentence, with exit status 1, and so is a missing package.
    """
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    flags = {word for word in sys.argv[1:] if word.startswith("--")}
    if len(words) < least or not flags <= set(re.findall(r"--\w+", usage)):
        path = Path(sys.argv[0])
        package = "experiments" if path.parent.name == "experiments" else "course.bench"
        name = path.parent.name if path.stem == "__main__" else path.stem
        sys.exit(f"usage: python -m {package}.{name} {usage}")
    try:
        yield words
    except CourseError as error:
        sys.exit(f"course: {error}")
    except ModuleNotFoundError as error:
        if not missing_package(error):
            raise
        sys.exit(f"course: {reason(error)}")
