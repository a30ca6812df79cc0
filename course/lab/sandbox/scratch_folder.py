"""The folder that untrusted code writes to: measure it, read from it, remove it; and find what the code wrote elsewhere."""

import math
import os
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from course.utils.errors import CourseError

SHARED_FOLDERS = ("/dev/shm", "/tmp", "/var/tmp", "/run/lock")  # writable by every user


def walk(*folders: Path) -> Iterator[tuple[str, os.stat_result]]:
    """All entries below folders, without following symlinks. It keeps a list instead of recursing, so any depth is safe."""
    todo = list(map(str, folders))
    while todo:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(todo.pop()) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):    # gone in the meantime
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        todo.append(entry.path)
                    yield entry.path, status


def folder_size(folder: Path, most: float, elsewhere: Iterable[Path] = ()) -> float:
    """Bytes below a folder, plus a block per name, counted until they exceed `most`; infinite if that takes too long or fails.

    elsewhere: files and folders outside it that also count.
    """
    total, until = 0, time.monotonic() + 2           # seconds; only hostile folders take so long
    try:
        others = [(path, status) for path in elsewhere if (status := _lstat(path))]
        total += sum(_disk_usage(status) for _, status in others)
        for _, status in walk(folder, *(path for path, status in others if stat.S_ISDIR(status.st_mode))):
            total += _disk_usage(status)
            if time.monotonic() > until:
                return math.inf
            if total > most:
                break
    except OSError:
        return math.inf
    return total


def _disk_usage(status: os.stat_result) -> int:
    """Bytes of a directory entry and its file."""
    return 4096 + max(status.st_size, 512 * status.st_blocks)


def _lstat(path: Path) -> os.stat_result | None:
    with suppress(FileNotFoundError):                # gone in the meantime
        return path.lstat()
    return None


def files_elsewhere(user: int, scratch: Path | None = None) -> list[Path]:
    """A user's files in folders that every user may write to, except the scratch folder."""
    paths, scratch_path = list[Path](), scratch and os.path.realpath(scratch)
    todo = list({os.path.realpath(place) for place in (*SHARED_FOLDERS, tempfile.gettempdir())})
    while todo:
        with suppress(OSError), os.scandir(todo.pop()) as entries:
            for entry in entries:
                with suppress(OSError):              # gone in the meantime
                    status = entry.stat(follow_symlinks=False)
                    if status.st_uid == user and entry.path != scratch_path:
                        paths.append(Path(entry.path))
                    elif status.st_uid == 0 and stat.S_ISDIR(status.st_mode) and status.st_mode & 0o1002 == 0o1002:
                        todo.append(entry.path)      # sticky: only owners can replace its entries
    return paths


def remove(*paths: Path) -> None:
    """Remove what untrusted code wrote, with folders of any depth (shutil.rmtree recurses)."""
    for first in range(0, len(paths), 1000):         # the length of a command is limited
        subprocess.run(["rm", "-rf", "--", *map(str, paths[first:first + 1000])], check=False, stderr=subprocess.DEVNULL)


def read_untrusted(scratch: Path, name: str, most: int) -> bytes:
    """Read a file of at most `most` bytes that untrusted code wrote directly into the scratch folder.

    Raises `CourseError` if it is absent, too large, or not a plain file (a symlink, a pipe, a hard link).
    """
    if Path(name).name != name:
        raise CourseError(f"{name}: only files right in the scratch folder are read")
    try:
        # without O_NONBLOCK, opening a pipe would wait for its writer
        opened = os.open(scratch / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CourseError(f"{name}: there is no such file, or it is not a plain one ({error.strerror})") from error
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise CourseError(f"{name}: this is not a plain file of its own")
        with open(opened, "rb", closefd=False) as file:
            content = file.read(most + 1)
    finally:
        os.close(opened)
    if len(content) > most:
        raise CourseError(f"{name}: the file has more than {most} bytes")
    return content
