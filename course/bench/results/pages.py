"""Write recorded numbers into pages: docs/results.md as a whole, README and docs between comments.

    <!-- result: value("gpt_h200", "124M: bf16", "mfu") | .0% -->48%<!-- -->

is a number in a sentence. A table of `tables.py` stands between `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

import re
from pathlib import Path

from course.bench.results import formatted, tables
from course.utils.atomic_files import atomic

NUMBER = re.compile(r"(<!-- result:\s*([^|]+?)\s*\|\s*([^|]*?)\s*-->).*?<!-- -->", re.DOTALL)
TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def filled(text: str) -> str:
    """Fill in a page's numbers and tables. Raises `CourseError` for an unknown table or a wrong expression."""
    text = NUMBER.sub(lambda found: f"{found[1]}{formatted(found[2], found[3], vars(tables))}<!-- -->", text)
    return TABLE.sub(lambda found: f"{found[1]}\n{tables.markdown(tables.table(found[2]))}\n\n{found[3]}", text)


def pages(root: Path) -> dict[Path, str]:
    """Path -> text that it should have, for README, the Markdown files in docs/, and docs/results.md."""
    found = {path: filled(path.read_text(encoding="utf-8"))
             for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))) if path.name != "results.md"}
    return found | {root / "docs/results.md": tables.page()}


def outdated(root: Path) -> dict[Path, str]:
    """Path -> text that it should have, for the pages that differ from the recorded numbers or do not exist."""
    return {path: text for path, text in pages(root).items() if not path.is_file() or path.read_text(encoding="utf-8") != text}


def stale(root: Path) -> list[Path]:
    """The pages that differ from the recorded numbers, or do not exist."""
    return [*outdated(root)]


def write(root: Path) -> list[Path]:
    """Write the stale pages, and return them."""
    changed = outdated(root)
    for path, text in changed.items():
        with atomic(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return [*changed]
