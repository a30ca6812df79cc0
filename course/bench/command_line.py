"""Usage and error messages for modules run as `python -m course.bench.NAME` or `experiments.NAME`."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from course.utils.errors import CourseError


@contextmanager
def command(usage: str, least: int = 1) -> Iterator[list[str]]:
    """Yield the command line's words without flags. Exit with `usage` if they are too few, or for a flag that it does not name.

    A `CourseError` inside the block is printed as a sentence, with exit status 1.
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
