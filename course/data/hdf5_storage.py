"""HDF5 files: opened on any file system, with sentences for what goes wrong.

HDF5 gives numbers for what is not there: zeros for what was never written, and beyond the end of a file that was cut off since it
was opened. The latter is noticed here; numbers that nobody wrote, those who know what the numbers are (`plausibility.py`).
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
    """An HDF5 file, as `h5py.File`; where the file system keeps no locks, without one.

    What the course writes, its own lock guards (`course.resilience.folder_lock`), and under a temporary name.
    """
    try:
        return h5py.File(path, mode)
    except OSError as error:
        if os_error_number(error) not in NO_LOCKS and "file locking flag" not in str(error):  # the latter: open here without one
            raise
        return h5py.File(path, mode, locking=False)


@contextmanager
def hdf5_errors(what: str, cure: str) -> Iterator[None]:
    """Around reading HDF5: what goes wrong is a `CourseError`: `what`, the first line of the reason, and the cure.

    The cure follows the reason (`os_error_cure`); `cure` is for damage. h5py has no one kind for a damaged file: OSError,
    KeyError, RuntimeError, ValueError, TypeError and IndexError were seen.
    """
    try:
        yield
    except CourseError:
        raise
    except Exception as error:
        raise CourseError(f"{what} ({first_line(error)}): {os_error_cure(error, cure)}") from error


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, short enough for one sentence."""
    return str(error).splitlines()[0][:160] if str(error) else type(error).__name__


def check_size(dataset: h5py.Dataset) -> None:
    """Raise `ValueError` if the file has become shorter since it was opened: HDF5 reads zeros beyond its end."""
    file = dataset.file.id
    now, before = os.fstat(file.get_vfd_handle()).st_size, file.get_filesize()
    if now < before:
        raise ValueError(f"it is truncated: it had {before} bytes when it was opened and has {now}")
