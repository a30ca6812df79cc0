"""Find a state's byte offsets in its HDF5 file, so that several threads can read at once: the HDF5 library serializes reads.

Contiguous and chunked data is read by offset. HDF5 itself reads filtered, virtual, external and unallocated data. Nothing is
cropped: `layout` requires files with exactly the model's grid.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path

import h5py
import numpy as np

from course.data.hdf5_storage import check_size, first_line
from course.data.weather.pairs import RESTORE, Pairs, entry_errors, open_fields, unreadable_entry
from course.utils.atomic_files import os_error_cure

Read = Callable[[], None]                        # does one part of the reading, in the calling thread
BYTES = 4                                        # of a float32


class StateReader:
    """Reads a data set's states, not normalized, into memory that the caller provides."""

    def __init__(self, pairs: Pairs):
        self.pairs = pairs
        self._open: dict[int, StateFile] = {}

    def reads(self, sample: int, ahead: int, into: np.ndarray, piece: int) -> Iterator[Read]:
        """Yield reads that together fill `into`, (C, H, W) float32, with one state; each reads about `piece` bytes at most.

        One thread at a time may call this; any threads may run the reads, in any order. They raise `CourseError` if the file
        cannot be read or has been truncated.
        """
        number, entry = self.pairs.place(sample, ahead)
        if number not in self._open:
            self._open[number] = StateFile(self.pairs.years[number].path)
        return self._open[number].reads(entry, into, piece)

    def read(self, sample: int, ahead: int = 0) -> np.ndarray:
        """Read one state into new memory, (C, H, W) float32."""
        into = np.empty(self.pairs.shape, np.float32)
        for read in self.reads(sample, ahead, into, into.nbytes):
            read()
        self.pairs.check_states([(sample, ahead)], into[None])
        return into

    def close(self) -> None:
        """Close the files; no read may be in progress."""
        while self._open:
            self._open.popitem()[1].close()


class StateFile:
    """One open data file."""

    def __init__(self, path: Path):
        self.path = path
        self.fields = open_fields(path)
        self.chunk, self.offsets = chunk_offsets(self.fields)
        self.fill = self.fields.fillvalue
        self.handle = os.open(path, os.O_RDONLY)

    def close(self) -> None:
        """Close both file handles; no read may be in progress."""
        self.fields.file.close()
        os.close(self.handle)

    def reads(self, entry: int, into: np.ndarray, piece: int) -> Iterator[Read]:
        """Like `StateReader.reads`, for one entry of this file."""
        if self.offsets is None:
            yield partial(self._ask_hdf5, entry, into)
            return
        times, *block = self.chunk                       # each time in a chunk is a block (channel, latitude, longitude)
        for place in np.ndindex(self.offsets.shape[1:]):
            offset = int(self.offsets[(entry // times, *place)])
            region = into[tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, block, strict=True))]     # smaller at edges
            if offset < 0:
                yield partial(region.fill, self.fill)
                continue
            offset += entry % times * prod(block) * BYTES
            if region.flags.c_contiguous and region.shape[1:] == tuple(block[1:]):
                view = region.reshape(-1).view(np.uint8).data
                for begin in range(0, len(view), piece):
                    yield partial(self._fill, view[begin:begin + piece], offset + begin, entry)
            else:
                yield partial(self._scatter, region, block, offset, entry)

    def _fill(self, view: memoryview, offset: int, entry: int) -> None:
        """Read from `offset` until `view` is full; `preadv` releases the GIL."""
        while len(view):
            try:
                count = os.preadv(self.handle, [view], offset)
            except OSError as error:
                raise unreadable_entry(self.path, entry, first_line(error), os_error_cure(error, RESTORE)) from error
            if not count:
                raise unreadable_entry(self.path, entry, "the file ends before it: it is truncated")
            view, offset = view[count:], offset + count

    def _scatter(self, region: np.ndarray, block: list[int], offset: int, entry: int) -> None:
        """Read a block whose rows are not contiguous in the state, or that extends beyond the state's edge."""
        whole = np.empty(block, np.float32)
        self._fill(whole.reshape(-1).view(np.uint8).data, offset, entry)
        region[:] = whole[tuple(slice(0, n) for n in region.shape)]

    def _ask_hdf5(self, entry: int, into: np.ndarray) -> None:
        with entry_errors(self.path, entry):
            self.fields.read_direct(into, np.s_[entry])
            check_size(self.fields)


def chunk_offsets(fields: h5py.Dataset) -> tuple[tuple[int, ...], np.ndarray | None]:
    """(chunk shape, file offset of each chunk in bytes as a grid of chunks, -1 for a chunk that was never written).

    Contiguous data is one chunk. The offsets are None where only HDF5 can read the data.
    """
    shape, chunk = fields.shape, fields.chunks or fields.shape
    if fields.is_virtual or fields.external or fields.id.get_create_plist().get_nfilters():
        return chunk, None
    if fields.chunks is None:
        offset = fields.id.get_offset()                  # None: never written, or stored in the header
        return chunk, None if offset is None else np.full((1, 1, 1, 1), offset)
    if not hasattr(fields.id, "chunk_iter"):             # HDF5 < 1.12.3: a second per thousand chunks
        return chunk, None
    offsets = np.full([-(-n // c) for n, c in zip(shape, chunk, strict=True)], -1)

    def note(found: h5py.h5d.StoreInfo) -> None:
        offsets[tuple(at // c for at, c in zip(found.chunk_offset, chunk, strict=True))] = found.byte_offset

    fields.id.chunk_iter(note)
    return chunk, offsets
