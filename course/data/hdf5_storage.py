"""HDF5 files: opened on any file system, and read only where somebody has written.

HDF5 gives numbers for what is not there: the fill value, mostly 0, for chunks that were never written and for parts of a virtual
dataset whose file is missing; zeros for what lies beyond the end of a file that was cut off since it was opened. Here such
storage is found and refused.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

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
        raise CourseError(f"{what} ({first_line(error)}): {os_error_cure(error, damage_cure(error, cure))}") from error


def damage_cure(error: Exception, cure: str) -> str:
    """The cure for a file that can be reached, and not read: removal only of one that HDF5 knows to be cut off."""
    if cure:
        return cure
    if "truncated file" in str(error):
        return "it is truncated; remove it and make or copy it again"
    if "file signature not found" in str(error):
        return "it is not HDF5, or truncated to nothing; move it away and make or copy it again"
    return "it is damaged, or another program's; make or copy it again"


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, short enough for one sentence."""
    return str(error).splitlines()[0][:160] if str(error) else type(error).__name__


def check_size(dataset: h5py.Dataset) -> None:
    """Raise `ValueError` if the file has become shorter since it was opened: HDF5 reads zeros beyond its end."""
    file = dataset.file.id
    now, before = os.fstat(file.get_vfd_handle()).st_size, file.get_filesize()
    if now < before:
        raise ValueError(f"it is truncated: it had {before} bytes when it was opened and has {now}")


def check_written(dataset: h5py.Dataset) -> None:
    """Raise `CourseError` if a part of a dataset was never written, or is in a file that is missing: it would read as numbers."""
    name, file = dataset.name.lstrip("/"), Path(dataset.file.filename)
    if not dataset.size:
        return
    if dataset.is_virtual:
        check_sources(dataset, file)
    elif dataset.external:
        check_external(dataset, file)
    elif dataset.chunks is not None:
        place = first_missing_chunk(dataset)
        if place is not None:
            raise CourseError(f"{file}: `{name}` was never written {describe_position(place)}, and would read as "
                              f"{fill_value_text(dataset)} there: {MAKE_AGAIN}")
    elif dataset.id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS:
        offset = dataset.id.get_offset()
        if offset is None:
            raise CourseError(f"{file}: `{name}` was never written, and would read as {fill_value_text(dataset)}: {MAKE_AGAIN}")
        hole = first_hole(dataset, offset)
        if hole is not None:
            raise CourseError(f"{file}: `{name}` was never written {describe_position(hole)}: the file has a hole there, which "
                              f"reads as 0; {MAKE_AGAIN}")


def describe_position(place: tuple[int, ...]) -> str:
    """Where in a dataset, whose first axis is time or the sample."""
    more = f" (index {list(place)})" if any(place[1:]) else ""
    return f"at entry {place[0]}{more}"


def fill_value_text(dataset: h5py.Dataset) -> str:
    """The number that HDF5 gives for what was never written."""
    return f"{dataset.fillvalue:g}" if np.ndim(dataset.fillvalue) == 0 and dataset.dtype.kind in "fiu" else "its fill value"


def first_missing_chunk(dataset: h5py.Dataset) -> tuple[int, ...] | None:
    """Where the first chunk begins that does not exist; None if all do, or if this HDF5 cannot say."""
    identifier, chunk = dataset.id, dataset.chunks
    if not hasattr(identifier, "get_num_chunks"):
        return None
    counts = [-(-n // c) for n, c in zip(dataset.shape, chunk, strict=True)]
    if identifier.get_num_chunks() >= math.prod(counts):
        return None
    if not hasattr(identifier, "chunk_iter"):            # HDF5 before 1.12.3
        return (0,) * dataset.ndim
    there = np.zeros(counts, bool)

    def note(found: Any) -> None:
        there[tuple(start // c for start, c in zip(found.chunk_offset, chunk, strict=True))] = True

    identifier.chunk_iter(note)
    missing = np.argwhere(~there)
    return tuple(int(i) * c for i, c in zip(missing[0], chunk, strict=True)) if len(missing) else None


def first_hole(dataset: h5py.Dataset, offset: int) -> tuple[int, ...] | None:
    """Where a hole of the file spans a whole entry of contiguous data; None if there is no such hole, or no telling.

    Smaller ones may be zeros that a disk or a copying program has left out.
    """
    item = dataset.dtype.itemsize
    entry = item * math.prod(dataset.shape[1:])
    for start, end in holes(dataset.file.id.get_vfd_handle(), offset, offset + entry * dataset.shape[0]):
        first = -(-(start - offset) // entry)            # the first entry that begins within the hole
        if offset + (first + 1) * entry <= end:
            return (first, *(0,) * (dataset.ndim - 1))
    return None


def holes(handle: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of a file's bytes from `begin` to `end` that its file system keeps no room for: they read as zeros."""
    try:
        while begin < end:
            start = os.lseek(handle, begin, os.SEEK_HOLE)
            if start >= end:
                return
            try:
                begin = os.lseek(handle, start, os.SEEK_DATA)
            except OSError:                              # no data follows
                begin = end
            yield start, min(begin, end)
    except (OSError, AttributeError):                    # a file system, or a system, that cannot tell
        return


def check_sources(dataset: h5py.Dataset, file: Path) -> None:
    """The files of a virtual dataset: HDF5 reads the fill value where one is missing."""
    for source in dataset.virtual_sources():
        if source.file_name != "." and "%" not in source.file_name and not find_beside(file, source.file_name):
            raise CourseError(f"{file} has values in {source.file_name}, which is not there, and they would read as "
                              f"{fill_value_text(dataset)}: restore that file")


def check_external(dataset: h5py.Dataset, file: Path) -> None:
    """The files that hold a dataset's bytes: HDF5 reads zeros beyond the end of one."""
    for name, offset, size in dataset.external:
        there = find_beside(file, name)
        if there is None or (size != h5py.h5f.UNLIMITED and there.stat().st_size < offset + size):
            raise CourseError(f"{file} has values in {name}, which is missing or too short, and they would read as 0: restore "
                              "that file")


def find_beside(file: Path, name: str) -> Path | None:
    """A file that another one names, beside it or from the current folder: HDF5 looks in both."""
    return next((place for place in (file.parent / name, Path(name)) if place.is_file()), None)
