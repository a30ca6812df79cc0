"""Documents of tokens in two files, as Megatron lays them out: NAME.bin, the tokens, and NAME.idx, where they lie.

    .bin    the tokens of all sequences, one after another, each in the bytes of one number
    .idx    magic   9 bytes         MMIDIDX\\0\\0
            version uint64          1
            code    uint8           the kind of number in the .bin: `DTYPES`
            S       uint64          how many sequences there are
            D       uint64          how many documents, plus one
            lengths   (S,) int32    tokens of each sequence
            pointers  (S,) int64    the byte of the .bin where each begins
            documents (D,) int64    the sequence with which each document begins, and S at the end

All little-endian (megatron-core 0.16, core/datasets/indexed_dataset.py; multimodal data ends with S bytes more, which are
not read). Our makers write one sequence a document. Nothing is read before it is needed: both files are memory-mapped.
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

HEADER = struct.Struct("<9sQBQQ")                    # magic, version, code, S, D: 34 bytes, nothing between them
MAGIC, VERSION = b"MMIDIDX\0\0", 1
PAGE, PLACES = 4096, 64                              # bytes of a look at a .bin, and how many looks there are
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}       # 6 and 7 are fractions: no tokens


class Index(NamedTuple):
    """What a .idx says; the arrays lie in the file."""

    dtype: np.dtype[Any]
    lengths: np.ndarray                              # (S,) int32
    pointers: np.ndarray                             # (S,) int64
    documents: np.ndarray                            # (D,) int64


def read_index(path: Path) -> Index:
    """The parts of a .idx file, memory-mapped. Raises `CourseError` for a file that is not one, or not all of one."""
    check_header(path)
    raw = np.memmap(path, np.uint8, "r")
    _, _, code, S, D = HEADER.unpack_from(raw.data)
    lengths = np.frombuffer(raw, "<i4", S, HEADER.size)
    pointers = np.frombuffer(raw, "<i8", S, HEADER.size + lengths.nbytes)
    documents = np.frombuffer(raw, "<i8", D, HEADER.size + lengths.nbytes + pointers.nbytes)
    return Index(np.dtype(DTYPES[code]).newbyteorder("<"), lengths, pointers, documents)


class Documents:
    """The documents of NAME.bin and NAME.idx: `documents[i]` are the tokens of one, in the dtype of the file.

    `tokens` are those of all, end to end. Raises `CourseError` where the files are missing, damaged or not a pair. Another
    process that gets it maps the files itself.
    """

    def __init__(self, prefix: Path | str):
        self.prefix, self.bin = prefix, Path(f"{prefix}.bin")
        self.index = read_index(Path(f"{prefix}.idx"))
        check_pair(self.index, Path(f"{prefix}.idx"), self.bin)
        empty = not self.index.lengths.any()         # nothing cannot be mapped
        self.tokens = np.empty(0, self.index.dtype) if empty else np.memmap(self.bin, self.index.dtype, "r")
        self._handle: int | None = None              # of the .bin, once `read` has opened it

    def __len__(self) -> int:
        return len(self.index.documents) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        first, last = self.index.documents[range(len(self))[i]:][:2]    # its sequences; no document i: IndexError
        begin = self.index.pointers[first] // self.index.dtype.itemsize if first < last else 0
        return self.tokens[begin:begin + self.index.lengths[first:last].sum(dtype=np.int64)]

    def read(self, begin: int, count: int) -> np.ndarray:
        """So many tokens from the given one on, as `tokens[begin:begin + count]`, of a file that may change meanwhile.

        Raises `CourseError` where the file has become shorter: of a mapped one, the system would end the process, or give zeros.
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
        """Raise `CourseError` for parts that were never written: nothing but 0 where one looks."""
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
    """Raise `CourseError` unless the file at `path` is a .idx, and as long as its header says."""
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
    sizes = index.lengths.astype(np.int64) * index.dtype.itemsize       # one sequence may have more than 2 GiB
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
    """The kind of number that Megatron takes for a vocabulary of this size."""
    return np.dtype("<u2" if vocab < 65500 else "<i4")


class Writer:
    """Takes one document after another; what it remembers of each is its length."""

    def __init__(self, file: BinaryIO, dtype: np.dtype[Any]):
        self.file, self.dtype = file, dtype
        self.lengths = array("i")

    def add(self, tokens: np.ndarray) -> None:
        """A document: (length,) of any whole numbers that `dtype` holds."""
        written = tokens.astype(self.dtype)
        assert np.array_equal(written, tokens), f"a token does not fit into {self.dtype}"
        self.file.write(written.tobytes())
        self.lengths.append(len(tokens))

    def extend(self, other: Documents) -> None:
        """All documents of other files, which have one sequence each."""
        assert other.index.dtype == self.dtype and len(other) == len(other.index.lengths)
        self.lengths.frombytes(other.index.lengths.tobytes())
        with open(other.bin, "rb") as file:
            shutil.copyfileobj(file, self.file, 1 << 20)


@contextmanager
def document_writer(prefix: Path | str, vocab: int) -> Iterator[Writer]:
    """A writer whose documents become NAME.bin and NAME.idx when the block succeeds; else neither changes."""
    with atomic(Path(f"{prefix}.bin")) as temporary:
        with open(temporary, "wb") as file:
            yield (writer := Writer(file, smallest_dtype(vocab)))
        Path(f"{prefix}.idx").unlink(missing_ok=True)                   # one that is there describes the old .bin
    write_index(Path(f"{prefix}.idx"), np.asarray(writer.lengths, "<i4"), writer.dtype)


def write_index(path: Path, lengths: np.ndarray, dtype: np.dtype[Any]) -> None:
    """Write the .idx of documents that are one sequence each, `lengths` (S,) tokens long and end to end."""
    code = next(code for code, name in DTYPES.items() if dtype == np.dtype(name))
    ends = np.cumsum(lengths, dtype=np.int64)
    with atomic(path) as temporary, open(temporary, "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write(((ends - lengths) * dtype.itemsize).astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
