"""What learners get beside the library: the blank notebooks, and the scripts for clusters of which lesson 18 speaks.

They lie at the top of a clone. `setup.py` puts them into wheels, in `course/given`; it runs this file by itself, where none of
the course's dependencies is installed: nothing but the standard library is imported here.
"""

from pathlib import Path

NOTEBOOKS, MASTERS = "notebooks/[0-9][0-9]_*.ipynb", "solutions/[0-9][0-9]_*.py"
SUBMIT = ("submit/*.sh", "submit/*.py", "submit/*.md", "submit/*.txt", "submit/sites/*.sh")  # submit/site is somebody's own


def list_files(home: Path) -> list[Path]:
    """These files, relative to `home`. Where masters are, only their notebooks: others have somebody's answers in them."""
    masters = {path.stem for path in home.glob(MASTERS)}
    notebooks = [path for path in home.glob(NOTEBOOKS) if path.stem in masters or not masters]
    return sorted(path.relative_to(home) for path in [*notebooks, *(path for pattern in SUBMIT for path in home.glob(pattern))])
