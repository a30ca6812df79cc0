"""`python -m course.bench.results [--check]`: fill README and docs with recorded numbers, or say which are stale."""

import sys
from pathlib import Path

from course.bench.command_line import command
from course.bench.results import pages

ROOT = Path(__file__).parents[3]

if __name__ == "__main__":
    with command("[--check]", least=0) as words:
        if not (ROOT / "docs").is_dir():
            raise SystemExit("course: this needs a clone of the repository: an installed course has no docs/")
        check = "--check" in sys.argv
        changed = (pages.stale if check else pages.write)(ROOT)
        for path in changed:
            print(f"{path.relative_to(ROOT)} {'is stale: run python -m course.bench.results' if check else 'written'}")
        sys.exit(check and bool(changed))
