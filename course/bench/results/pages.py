"""Pages with numbers of recorded measurements: docs/results.md, written whole, and README and docs, filled in between comments.

    <!-- result: value("gpt_h200", "124M: bf16", "mfu") | .0% -->48%<!-- -->

is a number in a sentence; a line `<!-- table: NAME -->` has that table of `tables.py` below it, up to `<!-- end of table -->`.
"""

import re
from pathlib import Path

from course.bench.results import formatted, tables
from course.utils.atomic_files import atomic
from course.utils.errors import CourseError

NUMBER = re.compile(r"(<!-- result:\s*([^|]+?)\s*\|\s*([^|]*?)\s*-->).*?<!-- -->", re.DOTALL)
TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def filled(text: str) -> str:
    """A page with its numbers and tables as they are recorded now. Raises `CourseError`."""
    def table(found: re.Match[str]) -> str:
        if found[2] not in tables.TABLES:
            raise CourseError(f"there is no table {found[2]}; there are {', '.join(tables.TABLES)}")
        return f"{found[1]}\n{tables.markdown(tables.TABLES[found[2]])}\n\n{found[3]}"

    text = NUMBER.sub(lambda found: f"{found[1]}{formatted(found[2], found[3], vars(tables))}<!-- -->", text)
    return TABLE.sub(table, text)


def pages(root: Path) -> dict[Path, str]:
    """The text that each page should have, by path: of all Markdown that people read, and docs/results.md."""
    found = {path: filled(path.read_text(encoding="utf-8"))
             for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))) if path.name != "results.md"}
    return found | {root / "docs/results.md": tables.page()}


def stale(root: Path) -> list[Path]:
    """The pages whose numbers are not those that are recorded."""
    return [path for path, text in pages(root).items() if not path.is_file() or path.read_text(encoding="utf-8") != text]


def write(root: Path) -> list[Path]:
    """Write the pages that are stale; returns them."""
    changed = stale(root)
    texts = pages(root)
    for path in changed:
        with atomic(path) as temporary:
            temporary.write_text(texts[path], encoding="utf-8")
    return changed
