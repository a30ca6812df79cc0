"""Files that are either whole or absent: written under a temporary name, flushed, renamed."""

import codecs
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from course.utils.errors import CourseError


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; when the block succeeds, the file or folder there becomes `path`.

    The bytes reach the disk before the rename, so a power cut leaves the old file or the new one. When the block fails, the
    temporary file is removed and `path` is untouched. Only one process may write at a time: lock what several may write, such as
    data (`course.resilience.folder_lock`).

    Raises `CourseError` if the disk is full or not writable, or a parent of the path is a file.
    """
    temporary = temporary_path(path)
    make_parent(path)
    try:
        remove(temporary)
        yield temporary
        for file in [p for p in temporary.rglob("*") if p.is_file()] if temporary.is_dir() else [temporary]:
            flush(file)
        if temporary.is_dir():
            flush(temporary)
        os.replace(temporary, path)
        flush(path.parent)
    except (OSError, RuntimeError) as error:
        remove(temporary)
        number = getattr(error, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):        # HDF5 raises either type, no errno
            raise CourseError(f"the disk is full while writing {path}: free some space there and run again; "
                              "what was written before is intact") from error
        if not isinstance(error, OSError):
            raise
        missing = error.errno == errno.ENOENT and error.filename == str(temporary)      # /proc is a folder that takes no files
        if missing or error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise cannot_write(path, error) from error
        raise
    except BaseException:
        remove(temporary)
        raise


def temporary_path(path: Path) -> Path:
    """The temporary path that `atomic` writes to for `path`."""
    return path.with_name(f".{path.name}.tmp")


def free_bytes(path: Path) -> int:
    """The free bytes on the disk where `path` is to be; 0 if there is no such disk."""
    there = next((place for place in path.absolute().parents if place.is_dir()), None)
    return shutil.disk_usage(there).free if there else 0


def make_parent(path: Path) -> None:
    """Make the folder of `path`. Raises `CourseError` if that is impossible, whatever the reason."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> CourseError:
    """The error for a place that takes no files. If a file is in a folder's place, systems say that it exists."""
    why = "a part of that path is a file" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
    return CourseError(f"cannot write {path}: {why}; choose a folder that you may write to")


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
        with suppress(FileNotFoundError, NotADirectoryError):           # the latter: the path leads through a file
            path.unlink()


class NotAnOrdinaryFile(OSError):
    """Something other than an ordinary file, such as a named pipe, is where one belongs."""


def read_file(path: Path) -> bytes:
    """The bytes of an ordinary file. Raises `NotAnOrdinaryFile` for anything else: opening a named pipe would wait forever."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise NotAnOrdinaryFile(errno.EINVAL, "it is not an ordinary file", str(path))
        return file.read()


def check_kind(path: Path, folder: bool = False) -> None:
    """Raise `CourseError` if `path` exists but is not a file (not a folder): a named pipe, a socket, a dangling link."""
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        if not path.is_symlink():
            return                                   # there is nothing
        kind = 0
    except OSError:
        return                                       # opening it will say why
    if not (stat.S_ISDIR(kind) if folder else stat.S_ISREG(kind)):
        what = KINDS.get(stat.S_IFMT(kind), "a link to nothing")
        raise CourseError(f"{path} is {what}, and {'a folder' if folder else 'an ordinary file'} is to be there: move it away")


KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder", stat.S_IFREG: "a file",
         stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, whatever the locale, or in UTF-16 if marked so; a byte-order mark is not part of it.

    Windows editors write such marks, and PowerShell writes UTF-16. Raises `UnicodeDecodeError`, a ValueError, for other bytes.
    """
    raw = path.read_bytes()
    return raw.decode("utf-16" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig")


NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)       # from file systems without locks: NFS, Lustre without flock


def os_error_number(error: BaseException) -> int:
    """The operating system's error number; 0 if there is none. HDF5 and NetCDF may give it only in their text."""
    named = re.search(r"\berrno(?: =)? (\d+)", str(error), re.IGNORECASE)
    return getattr(error, "errno", None) or (int(named[1]) if named else 0)


def os_error_cure(error: BaseException, otherwise: str) -> str:
    """What to do about a file that cannot be opened, read or written, if the system gives a reason; else `otherwise`.

    It never says to remove the file: an unreachable file is as good as ever. NetCDF's own numbers are below 0, and concern the
    file.
    """
    number = os_error_number(error)
    if number in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files (ulimit -n 65536), or use fewer data.workers"
    if number in (errno.ENOENT, errno.ENOTDIR):
        return "it is not there: mind its name, or restore the file and run again"
    return "the file itself may be good: see to what the system says, and run again" if number > 0 else otherwise


def write_json(path: Path, value: object) -> None:
    """Write a value as indented JSON, whole or not at all."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
