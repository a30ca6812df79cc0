"""Tokenized documents in Megatron's two-file format: NAME.bin holds the tokens, NAME.idx says where they are.

    .bin    the tokens of all sequences, one after another, each stored as one number
    .idx    magic   9 bytes         MMIDIDX\\0\\0
            version uint64          1
            code    uint8           the dtype of the .bin: `DTYPES`
            S       uint64          number of sequences
            D       uint64          number of documents, plus one
            lengths   (S,) int32    tokens of each sequence
            pointers  (S,) int64    byte offset of each sequence in the .bin
            documents (D,) int64    the first sequence of each document, and S at the end

All numbers are little-endian (megatron-core 0.16, core/datasets/indexed_dataset.py). Multimodal data has S more bytes at the
end, which are not read. `course data` writes one sequence per document. Both files are memory-mapped, so nothing is read early.
"""

import os
import shutil
import struct
import weakref
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from course.utils.atomic_files import atomic, os_error_cure
from course.utils.errors import CourseError

HEADER = struct.Struct("<9sQBQQ")                    # magic, version, code, S, D: 34 bytes, no padding
MAGIC, VERSION = b"MMIDIDX\0\0", 1
PAGE, PLACES = 4096, 64                              # `check_written` reads PAGE bytes of a .bin at PLACES offsets
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}       # 6 and 7 are floats: no tokens


class Index(NamedTuple):
    """The content of a .idx; the arrays are views of the memory-mapped file."""

    dtype: np.dtype[Any]
    lengths: np.ndarray                              # (S,) int32
    pointers: np.ndarray                             # (S,) int64
    documents: np.ndarray                            # (D,) int64


def read_index(path: Path) -> Index:
    """The parts of a .idx file, memory-mapped. Raises `CourseError` for a file that is not a complete index."""
    check_header(path)
    raw = np.memmap(path, np.uint8, "r")
    _, _, code, S, D = HEADER.unpack_from(raw.data)
    lengths = np.frombuffer(raw, "<i4", S, HEADER.size)
    pointers = np.frombuffer(raw, "<i8", S, HEADER.size + lengths.nbytes)
    documents = np.frombuffer(raw, "<i8", D, HEADER.size + lengths.nbytes + pointers.nbytes)
    return Index(np.dtype(DTYPES[code]).newbyteorder("<"), lengths, pointers, documents)


class Documents:
    """The documents of NAME.bin and NAME.idx: `documents[i]` is the tokens of document i, in the file's dtype.

    `tokens` has the tokens of all documents, end to end. Raises `CourseError` if the files are missing, damaged or not a pair.
    When pickled to another process, it maps the files there.
    """

    def __init__(self, prefix: Path | str):
        self.prefix, self.bin = prefix, Path(f"{prefix}.bin")
        self.index = read_index(Path(f"{prefix}.idx"))
        check_pair(self.index, Path(f"{prefix}.idx"), self.bin)
        empty = not self.index.lengths.any()         # an empty file cannot be mapped
        self.tokens = np.empty(0, self.index.dtype) if empty else np.memmap(self.bin, self.index.dtype, "r")
        self._handle: int | None = None              # of the .bin, once `read` has opened it

    def __len__(self) -> int:
        return len(self.index.documents) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        first, last = self.index.documents[range(len(self))[i]:][:2]    # its sequences; IndexError if there is no document i
        begin = self.index.pointers[first] // self.index.dtype.itemsize if first < last else 0
        return self.tokens[begin:begin + self.index.lengths[first:last].sum(dtype=np.int64)]

    def read(self, begin: int, count: int) -> np.ndarray:
        """Read `tokens[begin:begin + count]` safely from a file that may change during training.

        Raises `CourseError` if the file has shrunk; with a memory-mapped file, the system would kill the process or return zeros.
        """
        try:
            if self._handle is None:
                self._handle = os.open(self.bin, os.O_RDONLY)
                weakref.finalize(self, os.close, self._handle)
            size = self.index.dtype.itemsize
            found, now = os.pread(self._handle, count * size, begin * size), os.fstat(self._handle).st_size
        except OSError as error:
            cure = os_error_cure(error, "restore it and run again")
            raise CourseError(f"{self.bin} cannot be read ({error.strerror}): {cure}") from error
        if now < self.tokens.nbytes or len(found) < count * size:
            raise CourseError(f"{self.bin} is truncated: it had {self.tokens.nbytes} bytes when it was opened and has {now}; "
                              "restore it and run again")
        return np.frombuffer(found, self.index.dtype)

    def check_written(self) -> None:
        """Raise `CourseError` if part of the .bin was never written: it looks for pages of zeros at evenly spaced offsets."""
        with open(self.bin, "rb") as file:
            size = self.tokens.nbytes
            for place in range(PLACES if size >= 2 * PAGE else 0):
                begin = (size - PAGE) * place // (PLACES - 1)
                if not any(os.pread(file.fileno(), PAGE, begin)):
                    raise CourseError(f"{self.bin} was never written from byte {begin} to {begin + PAGE}, where it reads as "
                                      "token 0: copy or make it again")

    def __reduce__(self) -> tuple[Any, ...]:
        return Documents, (self.prefix,)


def check_header(path: Path) -> None:
    """Raise `CourseError` unless the file at `path` is a .idx with the length that its header implies."""
    try:
        with open(path, "rb") as file:
            start, size = file.read(HEADER.size), path.stat().st_size
    except OSError as error:
        cure = ("give the name of a .bin and .idx without its ending, or make them with `course data tokens` or "
                "`course data jsonl`")
        absent = isinstance(error, FileNotFoundError)
        raise CourseError(f"{path} cannot be read ({error.strerror}): "
                          f"{cure if absent else os_error_cure(error, cure)}") from error
    if not start.startswith(MAGIC):
        raise CourseError(f"{path} is not an index of tokens: it does not begin with MMIDIDX; give one that Megatron's tools, "
                          "`course data tokens` or `course data jsonl` made")
    if len(start) < HEADER.size:
        raise CourseError(f"{path} is truncated within its header: copy or make it again")
    _, version, code, S, D = HEADER.unpack(start)
    if version != VERSION or code not in DTYPES:
        raise CourseError(f"{path} is of version {version} with numbers of kind {code}: this reads version {VERSION} with "
                          f"whole numbers, kinds {', '.join(map(str, DTYPES))}; make it again from the text")
    expected = HEADER.size + 12 * S + 8 * D
    if D < 1 or size not in (expected, expected + S):
        raise CourseError(f"{path} is truncated or damaged: {S} sequences and {D - 1} documents take {expected} bytes, "
                          f"it has {size}; copy or make it again")


def check_pair(index: Index, path: Path, tokens: Path) -> None:
    """Raise `CourseError` if the numbers of a .idx contradict each other or the .bin."""
    sizes = index.lengths.astype(np.int64) * index.dtype.itemsize       # a sequence may exceed 2 GiB
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0        # bytes
    documents = index.documents
    good = (index.lengths >= 0).all() and np.array_equal(index.pointers, ends - sizes)
    if not good or documents[0] != 0 or documents[-1] != len(ends) or (np.diff(documents) < 0).any():
        raise CourseError(f"{path} is damaged: its sequences do not follow each other; copy or make it again")
    if not tokens.is_file():
        raise CourseError(f"{tokens} does not exist, but {path} does: they belong together; copy or make both")
    if (size := tokens.stat().st_size) != total:
        what = "truncated" if size < total else "not of this index"
        raise CourseError(f"{tokens} is {what}: {path} describes {total} bytes, it has {size}; copy or make both again")


def smallest_dtype(vocab: int) -> np.dtype[Any]:
    """The dtype that Megatron uses for a vocabulary of this size."""
    return np.dtype("<u2" if vocab < 65500 else "<i4")


class Writer:
    """Appends documents to a .bin; keeps only their lengths in memory."""

    def __init__(self, file: BinaryIO, dtype: np.dtype[Any]):
        self.file, self.dtype = file, dtype
        self.lengths = array("i")

    def add(self, tokens: np.ndarray) -> None:
        """Append a document: (length,) integers that fit into `dtype`."""
        written = tokens.astype(self.dtype)
        assert np.array_equal(written, tokens), f"a token does not fit into {self.dtype}"
        self.file.write(written.tobytes())
        self.lengths.append(len(tokens))

    def extend(self, other: Documents) -> None:
        """Append all documents of other files, which must have one sequence each."""
        assert other.index.dtype == self.dtype and len(other) == len(other.index.lengths)
        self.lengths.frombytes(other.index.lengths.tobytes())
        with open(other.bin, "rb") as file:
            shutil.copyfileobj(file, self.file, 1 << 20)


@contextmanager
def document_writer(prefix: Path | str, vocab: int) -> Iterator[Writer]:
    """Write NAME.bin and NAME.idx: yield a `Writer`, and replace the files only if the block succeeds."""
    with atomic(Path(f"{prefix}.bin")) as temporary:
        with open(temporary, "wb") as file:
            yield (writer := Writer(file, smallest_dtype(vocab)))
        Path(f"{prefix}.idx").unlink(missing_ok=True)                   # an existing one describes the old .bin
    write_index(Path(f"{prefix}.idx"), np.asarray(writer.lengths, "<i4"), writer.dtype)


def write_index(path: Path, lengths: np.ndarray, dtype: np.dtype[Any]) -> None:
    """Write the .idx of documents with one sequence each; `lengths`: (S,) tokens, stored end to end."""
    code = next(code for code, name in DTYPES.items() if dtype == np.dtype(name))
    ends = np.cumsum(lengths, dtype=np.int64)
    with atomic(path) as temporary, open(temporary, "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write(((ends - lengths) * dtype.itemsize).astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
