"""Close folders that answers must not read to other users. Only needed where answers run as another user, not with bubblewrap."""

import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from course.lab.authoring import stubs
from course.lab.sandbox import sandbox

SOLUTIONS = stubs.PACKAGE.parent / "solutions"


def make_private(folder: Path) -> None:
    """Create a folder if it is missing, and close it to everyone but its owner."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def close_to_others(folders: Sequence[Path]) -> list[str]:
    """If answers run as another user, close folders to others; returns a line for each that changed or has to stay open."""
    layers = sandbox.layers()
    if layers.namespaces or not layers.user:
        return []
    messages = []
    for folder in folders:
        if not folder.is_dir() or not (mode := stat.S_IMODE(folder.stat().st_mode)) & 0o007:
            continue
        if any(place.resolve().is_relative_to(folder.resolve()) for place in required_folders()):
            messages.append(f"{folder} stays open to answers, which can read what is in it: Python or temporary files lie below "
                            "it")
            continue
        folder.chmod(mode & ~0o007)
        messages.append(f"{folder} is closed to other users from now on, so that answers cannot read what is in it")
    return messages


def required_folders() -> list[Path]:
    """The folders that the user who runs answers has to reach."""
    return [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable), Path(tempfile.gettempdir())]
