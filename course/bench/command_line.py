"""What modules share that are started as `python -m course.bench.NAME` or `experiments.NAME`: usage and errors in a sentence."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from course.utils.errors import CourseError


@contextmanager
def command(usage: str, least: int = 1) -> Iterator[list[str]]:
    """The words after the module's name but flags; too few, or a flag that `usage` does not name, end it with `usage`.

    A `CourseError` of the block becomes its sentence and exit status 1.
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
