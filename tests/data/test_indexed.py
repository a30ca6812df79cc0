import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from course.data.text import indexed_files
from course.data.text.indexed_files import Documents
from course.utils.errors import CourseError

DOCUMENTS = [[5, 6, 7], [], [65000], list(range(100))]


def write(prefix, documents=DOCUMENTS, vocab=65499):
    with indexed_files.document_writer(prefix, vocab) as writer:
        for tokens in documents:
            writer.add(np.array(tokens, np.int64))
    return Path(prefix)


def test_the_bytes_are_those_of_the_format(tmp_path):
    write(tmp_path / "two.words", [[1, 2, 3], [4]])
    assert (tmp_path / "two.words.bin").read_bytes() == bytes([1, 0, 2, 0, 3, 0, 4, 0])
    assert (tmp_path / "two.words.idx").read_bytes() == (
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3) + struct.pack("<ii", 3, 1) + struct.pack("<qq", 0, 6)
        + struct.pack("<qqq", 0, 1, 2))


@pytest.mark.parametrize(("vocab", "dtype"), [(65499, "uint16"), (65500, "int32"), (300, "uint16")])
def test_what_is_written_is_read(tmp_path, vocab, dtype):
    documents = [[5, 6, 7], [], [299], list(range(100))]
    data = Documents(write(tmp_path / "a", documents, vocab))
    assert data.tokens.dtype == dtype and len(data) == 4
    assert [found.tolist() for found in map(data.__getitem__, range(4))] == documents and data[-1][-1] == 99
    assert data.tokens.tolist() == [token for document in documents for token in document]
    with pytest.raises(IndexError):
        data[4]


def test_it_is_mapped_and_travels_as_a_name(tmp_path):
    data = Documents(write(tmp_path / "a"))
    assert isinstance(data.tokens, np.memmap) and not data.tokens.flags.writeable
    pickled = pickle.dumps(data)
    assert len(pickled) < 300
    assert pickle.loads(pickled)[3].tolist() == list(range(100))


@pytest.mark.parametrize("documents", [[], [[]]])
def test_no_tokens_at_all(tmp_path, documents):
    data = Documents(write(tmp_path / "a", documents))
    assert len(data) == len(documents) and len(data.tokens) == 0 and [list(d) for d in data] == documents


def test_a_token_too_large_is_not_cut(tmp_path):
    with pytest.raises(AssertionError, match="does not fit"):
        write(tmp_path / "a", [[65536]])
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_pair(tmp_path):
    write(tmp_path / "a")
    with pytest.raises(KeyboardInterrupt), indexed_files.document_writer(tmp_path / "a", 100) as writer:
        writer.add(np.array([1]))
        raise KeyboardInterrupt
    assert len(Documents(tmp_path / "a")) == 4


def test_files_are_joined(tmp_path):
    with indexed_files.document_writer(tmp_path / "both", 65499) as writer:
        writer.extend(Documents(write(tmp_path / "a")))
        writer.extend(Documents(write(tmp_path / "b", [])))
        writer.extend(Documents(write(tmp_path / "c", [[9, 9]])))
    for end in ("bin", "idx"):
        write(tmp_path / "once", [*DOCUMENTS, [9, 9]])
        assert (tmp_path / f"both.{end}").read_bytes() == (tmp_path / f"once.{end}").read_bytes()


def cut(file, size):
    with open(file, "r+b") as opened:
        opened.truncate(size)


def patch(file, offset, data):
    with open(file, "r+b") as opened:
        opened.seek(offset)
        opened.write(data)


BAD = {                                              # .idx: header 34, lengths 16, pointers 32, documents 40 bytes
    "no index": (lambda idx, bin: idx.unlink(), "a.idx cannot be read .*without its ending"),
    "no tokens": (lambda idx, bin: bin.unlink(), "a.bin does not exist, but .*a.idx does"),
    "another file": (lambda idx, bin: idx.write_text("a poem, long enough for a header"), "does not begin with MMIDIDX"),
    "empty": (lambda idx, bin: cut(idx, 0), "does not begin with MMIDIDX"),
    "cut in its header": (lambda idx, bin: cut(idx, 33), "truncated within its header"),
    "cut in its lengths": (lambda idx, bin: cut(idx, 40), "4 sequences and 4 documents take 122 bytes, it has 40"),
    "cut by a byte": (lambda idx, bin: cut(idx, 121), "take 122 bytes, it has 121"),
    "longer": (lambda idx, bin: patch(idx, 122, b"xx"), "it has 124"),
    "another version": (lambda idx, bin: patch(idx, 9, b"\2"), "of version 2"),
    "fractions": (lambda idx, bin: patch(idx, 17, b"\7"), "numbers of kind 7"),
    "no documents": (lambda idx, bin: patch(idx, 26, b"\0"), "truncated or damaged"),
    "a negative length": (lambda idx, bin: patch(idx, 34, b"\xff\xff\xff\xff"), "a.idx is damaged"),
    "a wrong pointer": (lambda idx, bin: patch(idx, 58, b"\7"), "a.idx is damaged"),
    "a wrong document": (lambda idx, bin: patch(idx, 90, b"\7"), "a.idx is damaged"),
    "a wrong last document": (lambda idx, bin: patch(idx, 114, b"\3"), "a.idx is damaged"),
    "tokens cut": (lambda idx, bin: cut(bin, 207), "a.bin is truncated: .*a.idx describes 208 bytes, it has 207"),
    "tokens of another": (lambda idx, bin: patch(bin, 208, b"xx"), "a.bin is not of this index"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_sentences(tmp_path, case):
    write(tmp_path / "a")
    spoil, sentence = BAD[case]
    spoil(tmp_path / "a.idx", tmp_path / "a.bin")
    with pytest.raises(CourseError, match=sentence):
        Documents(tmp_path / "a")


# ---- megatron-core: in a process of its own, which needs seconds to import it ----

MEGATRON = """
import sys, numpy, torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
for mmap in (True, False):
    data = IndexedDataset("ours", mmap=mmap)
    assert data.index.dtype == numpy.uint16, data.index.dtype
    assert [list(data[i]) for i in range(len(data))] == [[5, 6, 7], [], [65000], list(range(100))]
    assert data.document_indices.tolist() == [0, 1, 2, 3, 4]
for dtype in (numpy.uint16, numpy.int32, numpy.uint8, numpy.int64):
    builder = IndexedDatasetBuilder(f"{dtype.__name__}.bin", dtype=dtype)
    builder.add_item(torch.tensor([1, 2]))                                   # a document of two sequences
    builder.add_item(torch.tensor([3]))
    builder.end_document()
    builder.end_document()                                                   # and one of none
    builder.add_document(torch.tensor([7, 200]), [2])
    builder.finalize(f"{dtype.__name__}.idx")
builder = IndexedDatasetBuilder("modes.bin", multimodal=True)
builder.add_item(torch.tensor([1, 2]), 1)
builder.end_document()
builder.finalize("modes.idx")
builder = IndexedDatasetBuilder("joined.bin", dtype=numpy.uint16)
builder.add_index("ours")
builder.add_index("ours")
builder.finalize("joined.idx")
"""


@pytest.mark.slow
def test_megatron_core_reads_ours_and_we_read_its(tmp_path):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    write(tmp_path / "ours")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", MEGATRON], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for dtype in ("uint16", "int32", "uint8", "int64"):
        data = Documents(tmp_path / dtype)
        assert data.tokens.dtype == dtype and [list(document) for document in data] == [[1, 2, 3], [], [7, 200]]
    assert [list(document) for document in Documents(tmp_path / "modes")] == [[1, 2]]
    assert [list(document) for document in Documents(tmp_path / "joined")] == 2 * DOCUMENTS
