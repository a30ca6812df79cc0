"""Watch a run's data files during training: a truncated, replaced or removed file would feed the model zeros.

A file with a new date or inode counts as unchanged if a few of its bytes match. Some users touch files to save them from purging.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from course.utils.errors import CourseError

if TYPE_CHECKING:
    from course.config import Config

PLACES, BYTES = 4, 4096                              # how many parts of a file are compared, and their length


class FileState(NamedTuple):
    """A snapshot of a file."""

    size: int
    stamp: tuple[int, int, int]                      # device, inode, modification time in ns
    some: tuple[bytes, ...]                          # evenly spaced parts of the content


def file_state(file: Path) -> FileState:
    """Take a snapshot of a file."""
    handle = os.open(file, os.O_RDONLY)
    try:
        now = os.fstat(handle)
        starts = [max(0, now.st_size - BYTES) * i // (PLACES - 1) for i in range(PLACES)]
        return FileState(now.st_size, stamp_of(now), tuple(os.pread(handle, BYTES, start) for start in starts))
    finally:
        os.close(handle)


def stamp_of(status: os.stat_result) -> tuple[int, int, int]:
    """(device, inode, mtime): a file with the same stamp has not changed."""
    return status.st_dev, status.st_ino, status.st_mtime_ns


class DataFileWatch:
    """Snapshots of a configuration's training and validation files, taken when this object is created."""

    def __init__(self, config: "Config"):
        from course.data import data_files

        folder = Path(config.data.path)
        names = [*data_files(config), *data_files(config, "valid")]
        self.seen = {folder / name: file_state(folder / name) for name in names}

    def check(self) -> None:
        """Raise `CourseError` if a file has changed: the model may have trained on zeros since."""
        for file, before in self.seen.items():
            if what := describe_change(file, before):
                raise CourseError(f"{file} {what} since this run began, so it may have learned from zeros, and none of that "
                                  "is saved: restore the file; the same command resumes from the previous checkpoint")


def describe_change(file: Path, before: FileState) -> str:
    """How a file differs from its snapshot, in words; "" if it does not, or if an unrelated error prevents the check."""
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
