"""Files that are either whole or absent: written under a temporary name, flushed, renamed."""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from course.errors import CourseError


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; when the block succeeds the file or folder there becomes `path`.

    The bytes reach the disk before the rename, so a power cut leaves the old file or the new one. When
    the block fails the temporary file is removed and whatever stood at `path` is untouched.

    Raises `CourseError` where the disk is full or not writable.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove(temporary)
        yield temporary
        for file in [p for p in temporary.rglob("*") if p.is_file()] if temporary.is_dir() else [temporary]:
            flush(file)
        if temporary.is_dir():
            flush(temporary)
        os.replace(temporary, path)
        flush(path.parent)
    except OSError as error:
        remove(temporary)
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):   # HDF5 sets no errno
            raise CourseError(f"the disk is full while writing {path}: free some space there and run again; "
                              "what was written before is intact") from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise CourseError(f"cannot write {path}: {error.strerror}; choose a folder that you may write to") from error
        raise
    except BaseException:
        remove(temporary)
        raise


def flush(path: Path) -> None:
    """Force a file's bytes, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
