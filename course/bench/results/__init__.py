"""Recorded measurements: a JSON file each, with the hardware, versions, date and command; and what reads them.

Text takes numbers from here when it is built: `{result: EXPRESSION | FORMAT}` in a lesson's master (`fill`), comments in README
and docs (`pages.py`). `python -m course.bench.results` writes docs/results.md and fills the pages; `--check` finds what is stale.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from course.utils.errors import CourseError

FOLDER = Path(__file__).parent
LABELS = ("case", "rung", "name")                    # the field that tells the rows of a file apart
DIRECTIVE = re.compile(r"\{result:\s*([^{}|]+?)\s*\|\s*([^{}|]*?)\s*\}")


@cache
def load(name: str) -> dict[str, Any]:
    """A recorded measurement, NAME.json. All readers share it: do not change it. Raises `CourseError` if there is none."""
    path = FOLDER / f"{name}.json"
    if not path.is_file():
        available = ", ".join(sorted(file.stem for file in FOLDER.glob("*.json")))
        raise CourseError(f"there is no recorded result {name}; there are {available}")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def value(name: str, label: str, field: str = "ms", part: str = "rows", **where: Any) -> Any:
    """A field of the one row of NAME.json with this label and these other fields.

    part: where the rows are, if not below "rows"; "again/rows" is the list "rows" of "again". Raises `CourseError` unless exactly
    one row matches and has the field.
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
    """What a directive stands for: a Python expression over these names, in a format such as .1f. Raises `CourseError`."""
    try:
        return format(eval(expression, dict(names)), form)
    except Exception as error:
        raise CourseError(f"{{result: {expression} | {form}}} cannot be filled in: {error}") from error


def fill(text: str, names: Mapping[str, Any]) -> str:
    """A text with each `{result: EXPRESSION | FORMAT}` replaced by its number. Raises `CourseError`."""
    return DIRECTIVE.sub(lambda found: formatted(" ".join(found[1].split()), found[2], names), text)
