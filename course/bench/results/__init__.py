"""Recorded measurements, and functions that read them. Each JSON file has hardware, versions, date and command.

Lessons and pages take their numbers from here when they are built: through `{result: EXPRESSION | FORMAT}` in a lesson's master
(`fill`), and through comments in README and docs (`pages.py`). `python -m course.bench.results` writes docs/results.md and fills
the pages; `--check` lists stale ones.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from course.utils.errors import CourseError, did_you_mean

FOLDER = Path(__file__).parent
LABELS = ("case", "configuration", "name")           # fields that identify a row
DIRECTIVE = re.compile(r"\{result:\s*([^{}|]+?)\s*\|\s*([^{}|]*?)\s*\}")


@cache
def load(name: str) -> dict[str, Any]:
    """Load the recorded measurement NAME.json. The object is cached: do not modify it. Raises `CourseError` if there is none."""
    path = FOLDER / f"{name}.json"
    if not path.is_file():
        available = sorted(file.stem for file in FOLDER.glob("*.json"))
        raise CourseError(f"there is no recorded result {name}{did_you_mean(name, available)}; there are {', '.join(available)}")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def value(name: str, label: str, field: str = "ms", part: str = "rows", **where: Any) -> Any:
    """A field of the only row of NAME.json with this label and these other fields.

    part: the path of the rows; "again/rows" is the list "rows" in "again". Raises `CourseError` unless exactly one row matches
    and has the field.
    """
    rows: Any = load(name)
    for key in part.split("/"):
        rows = rows[key]
    found = [row for row in rows if label in [row.get(kind) for kind in LABELS]
             and all(row.get(key) == wanted for key, wanted in where.items())]
    if len(found) != 1:
        raise CourseError(f"{name}.json has {len(found)} rows {label!r} with {where or 'nothing else'}: one is needed")
    if field not in found[0]:
        raise CourseError(f"the row {label!r} of {name}.json has no {field}; it has {', '.join(found[0])}")
    return found[0][field]


def formatted(expression: str, form: str, names: Mapping[str, Any]) -> str:
    """Evaluate a Python expression over these names and format it, for example with .1f. Raises `CourseError` if that fails."""
    try:
        return format(eval(expression, dict(names)), form)
    except Exception as error:
        raise CourseError(f"{{result: {expression} | {form}}} cannot be filled in: {error}") from error


def fill(text: str, names: Mapping[str, Any]) -> str:
    """Replace each `{result: EXPRESSION | FORMAT}` in a text by its number. Raises `CourseError` if one fails."""
    return DIRECTIVE.sub(lambda found: formatted(" ".join(found[1].split()), found[2], names), text)
