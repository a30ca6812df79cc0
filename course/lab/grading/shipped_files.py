"""Files that learners get besides the library: the blank notebooks, and the cluster scripts of lesson 18.

They are at the top of a clone; `setup.py` copies them into wheels, to `course/given`. It runs this file before the course's
dependencies are installed, so this file imports only the standard library.
"""

from pathlib import Path

NOTEBOOKS, MASTERS = "notebooks/[0-9][0-9]_*.ipynb", "solutions/[0-9][0-9]_*.py"
SUBMIT = ("submit/*.sh", "submit/*.py", "submit/*.md", "submit/*.txt", "submit/sites/*.sh")  # submit/site is the user's own


def list_files(home: Path) -> list[Path]:
    """These files, relative to `home`. If there are masters, it lists only their notebooks: others may hold answers."""
    masters = {path.stem for path in home.glob(MASTERS)}
    notebooks = [path for path in home.glob(NOTEBOOKS) if path.stem in masters or not masters]
    return sorted(path.relative_to(home) for path in [*notebooks, *(path for pattern in SUBMIT for path in home.glob(pattern))])
