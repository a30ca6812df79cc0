"""Open HDF5 files on any file system, with a clear error for each failure.

HDF5 returns zeros for data that was never written, and beyond the end of a file that was truncated after it was opened.
`check_size` detects truncation; `plausibility.py` detects values that nobody wrote.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py

from course.utils.atomic_files import NO_LOCKS, os_error_cure, os_error_number
from course.utils.errors import CourseError

MAKE_AGAIN = "copy or make that file again"


def open_hdf5(path: Path | str, mode: str = "r") -> h5py.File:
    """Open an HDF5 file as `h5py.File`, without HDF5's lock where the file system does not support locks.

    Files that the course writes have a temporary name until they are complete, and `course.resilience.folder_lock` guards them.
    """
    try:
        return h5py.File(path, mode)
    except OSError as error:
        if os_error_number(error) not in NO_LOCKS and "file locking flag" not in str(error):  # text: open here unlocked
            raise
        return h5py.File(path, mode, locking=False)


@contextmanager
def hdf5_errors(what: str, cure: str) -> Iterator[None]:
    """Turn any error while reading HDF5 into a `CourseError`: `what`, the first line of the reason, and the cure.

    `os_error_cure` chooses the cure from the reason; `cure` is the one for a damaged file. For damaged files h5py may raise
    OSError, KeyError, RuntimeError, ValueError, TypeError or IndexError.
    """
    try:
        yield
    except CourseError:
        raise
    except Exception as error:
        raise CourseError(f"{what} ({first_line(error)}): {os_error_cure(error, cure)}") from error


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, at most 160 characters."""
    return str(error).splitlines()[0][:160] if str(error) else type(error).__name__


def check_size(dataset: h5py.Dataset) -> None:
    """Raise `ValueError` if the file has shrunk since it was opened: HDF5 reads zeros beyond its end."""
    file = dataset.file.id
    now, before = os.fstat(file.get_vfd_handle()).st_size, file.get_filesize()
    if now < before:
        raise ValueError(f"it is truncated: it had {before} bytes when it was opened and has {now}")
