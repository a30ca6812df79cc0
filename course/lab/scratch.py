"""A folder that other people's code writes to: how much is in it, reading from it, removing it."""

import math
import os
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from course.errors import CourseError


def below(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below a folder, without following symlinks. Unlike os.walk it does not recurse, so that depth is no trap."""
    todo = [str(folder)]
    while todo:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(todo.pop()) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):    # gone meanwhile
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(found.st_mode):
                        todo.append(entry.path)
                    yield entry.path, found


def size(folder: Path, most: float) -> float:
    """Bytes below a folder, a block for each name, counted until they exceed `most`; infinite if that takes too long."""
    total, until = 0, time.monotonic() + 2           # seconds; only folders made to keep us busy take so long
    try:
        for _, found in below(folder):
            total += 4096 + max(found.st_size, 512 * found.st_blocks)
            if time.monotonic() > until:
                return math.inf
            if total > most:
                break
    except OSError:
        return math.inf
    return total


def remove(folder: Path) -> None:
    """Remove a folder that other people's code wrote to, however deep it made it (shutil.rmtree recurses)."""
    subprocess.run(["rm", "-rf", "--", str(folder)], check=False, stderr=subprocess.DEVNULL)


def read(scratch: Path, name: str, most: int) -> bytes:
    """The content of a file right in the scratch folder, of at most `most` bytes, that other people's code wrote.

    `CourseError` if it is absent, too large, or anything but a plain file of its own (a symlink, a pipe, a hard link).
    """
    if Path(name).name != name:
        raise CourseError(f"{name}: only files right in the scratch folder are read")
    try:
        # without O_NONBLOCK opening a pipe would wait for its writer
        opened = os.open(scratch / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CourseError(f"{name}: there is no such file, or it is not a plain one ({error.strerror})") from error
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise CourseError(f"{name}: this is not a plain file of its own")
        with open(opened, "rb", closefd=False) as file:
            content = file.read(most + 1)
    finally:
        os.close(opened)
    if len(content) > most:
        raise CourseError(f"{name}: the file has more than {most} bytes")
    return content
