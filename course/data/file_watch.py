"""The files of a run's data, watched while it trains: whoever cuts one off, replaces or removes it would feed the model zeros.

A file that only has another date (some people touch all files, lest they be purged) or lies elsewhere on the disk is the same if
a few of its bytes are.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from course.utils.errors import CourseError

if TYPE_CHECKING:
    from course.config import Config

PLACES, BYTES = 4, 4096                              # how many parts of a file are compared, and of what length


class FileState(NamedTuple):
    """A file as it is at some time."""

    size: int
    stamp: tuple[int, int, int]                      # its device and number there, and when it was changed
    some: tuple[bytes, ...]                          # parts of it, evenly spread


def file_state(file: Path) -> FileState:
    """A file as it is now."""
    handle = os.open(file, os.O_RDONLY)
    try:
        now = os.fstat(handle)
        starts = [max(0, now.st_size - BYTES) * i // (PLACES - 1) for i in range(PLACES)]
        return FileState(now.st_size, stamp_of(now), tuple(os.pread(handle, BYTES, start) for start in starts))
    finally:
        os.close(handle)


def stamp_of(status: os.stat_result) -> tuple[int, int, int]:
    """What is another if a file may be another."""
    return status.st_dev, status.st_ino, status.st_mtime_ns


class DataFileWatch:
    """The data files of a configuration, those for training and for validation, as they were when this was made."""

    def __init__(self, config: "Config"):
        from course.data import data_files

        folder = Path(config.data.path)
        names = [*data_files(config), *data_files(config, "valid")]
        self.seen = {folder / name: file_state(folder / name) for name in names}

    def check(self) -> None:
        """Raise `CourseError` for a file that is not what it was: what was learned since may be of zeros."""
        for file, before in self.seen.items():
            if what := describe_change(file, before):
                raise CourseError(f"{file} {what} since this run began, so it may have learned from zeros, and nothing of that "
                                  "is saved: restore the file; the same command goes on from the checkpoint before")


def describe_change(file: Path, before: FileState) -> str:
    """How a file differs from what it was; "" if it does not, or cannot be seen for reasons that have nothing to do with it."""
    try:
        now = file.stat()
        if now.st_size != before.size:
            return f"has become {'shorter' if now.st_size < before.size else 'longer'} ({before.size} bytes, now {now.st_size})"
        same = stamp_of(now) == before.stamp or file_state(file).some == before.some
    except FileNotFoundError:
        return "has been removed"
    except OSError:
        return ""
    return "" if same else "has been replaced or written over"
