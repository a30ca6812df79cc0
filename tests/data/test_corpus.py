import json
import sysconfig

import pytest

from course.data.text import bpe, python_corpus
from course.data.text.indexed_files import Documents
from course.data.text.python_corpus import PythonCorpus, choose_split, library_files, make
from course.data.text.sequences import Sequences
from course.utils.errors import CourseError

SOURCES = {f"module_{i:02d}.py": f"def function_{i}(x):\n    return x + {i}  # ± <|endoftext|>\n" * 5 for i in range(40)}


@pytest.fixture
def stdlib(tmp_path, monkeypatch):
    """A small library, with what is to be left out."""
    folder = tmp_path / "lib"
    others = {"json/encoder.py": "class Encoder: pass\n", "test/test_x.py": "no", "json/tests/a.py": "no", "idlelib/a.py": "no",
              "site-packages/torch/a.py": "no", "_sysconfigdata_x.py": "no", "empty.py": "", "note.txt": "no"}
    for name, text in {**SOURCES, **others}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "latin.py").write_bytes("# é".encode("latin-1"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    return folder


def test_the_library_is_sorted_and_without_tests(stdlib):
    assert dict(library_files(stdlib)) == {"json/encoder.py": "class Encoder: pass\n", **SOURCES}
    assert [name for name, _ in library_files(stdlib)] == ["json/encoder.py", *SOURCES]


def test_each_file_is_a_document_of_one_split(stdlib, tmp_path):
    make(PythonCorpus(str(tmp_path / "out"), vocab=300, valid=0.2, test=0.2), lambda line: None)
    tokenizer, meta = bpe.load(tmp_path / "out" / "tokenizer.json"), json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["vocab"] == tokenizer.get_vocab_size() == 300 and meta["end"] == 0 == tokenizer.token_to_id(bpe.END)
    for split in ("train", "valid", "test"):
        expected = [text for name, text in library_files(stdlib) if choose_split(name.encode(), 0.2, 0.2) == split]
        documents = Documents(tmp_path / "out" / split)
        assert [tokenizer.decode(document[:-1].tolist()) for document in documents] == expected != []
        assert all(list(document).count(0) == 1 and document[-1] == 0 for document in documents)      # the end, not its name
        assert meta["splits"][split] == {"documents": len(expected), "tokens": len(documents.tokens),
                                         "bytes": sum(len(text.encode()) for text in expected)}
    assert len(Sequences(str(tmp_path / "out"), "train", 16, 300)) > 20


def test_the_same_bytes_again_and_a_cheap_second_call(stdlib, tmp_path):
    said = []
    for name in ("a", "b", "a"):
        make(PythonCorpus(str(tmp_path / name), vocab=300), said.append)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == ["meta.json", "test.bin", "test.idx", "tokenizer.json", "train.bin", "train.idx", "valid.bin", "valid.idx"]
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
    assert said[0].startswith("41 files of Python 3.") and said[-1] == f"{tmp_path / 'a'} is there already"


def test_splits_are_evenly_hashed():
    found = [choose_split(str(i).encode(), 0.1, 0.2) for i in range(10_000)]
    assert abs(found.count("valid") - 1000) < 100 and abs(found.count("test") - 2000) < 130
    assert {choose_split(b"x", 0, 0), choose_split(b"y", 0, 0)} == {"train"}


@pytest.mark.parametrize(("change", "sentence"), [
    ({"vocab": 256}, "vocab=256 is too small: 256 bytes and .* are 257 tokens"),
    ({"valid": 0.5, "test": 0.5}, "valid=0.5 and test=0.5 are parts"),
    ({"valid": -0.1}, "valid=-0.1 and test"), ({"test": float("nan")}, "valid=0.05 and test=nan"),
])
def test_bad_requests(stdlib, tmp_path, change, sentence):
    with pytest.raises(CourseError, match=sentence):
        make(PythonCorpus(str(tmp_path / "out"), **change), lambda line: None)
    assert not (tmp_path / "out").exists()


def test_another_data_set_is_not_overwritten(stdlib, tmp_path):
    make(PythonCorpus(str(tmp_path / "out"), vocab=300), lambda line: None)
    with pytest.raises(CourseError, match=r"holds a data set made with other settings \(vocab\): give another path"):
        make(PythonCorpus(str(tmp_path / "out"), vocab=301), lambda line: None)


@pytest.mark.parametrize(("text", "sentence"), [
    ("", "damaged: give another path"), ("{\"request\": {", "damaged"), ("[]", "damaged"), ("{\"request\": 1}", "damaged"),
    ("{\"vocab\": 9}", r"holds a data set made with other settings \(made by, ")])
def test_a_damaged_data_set_is_not_overwritten_either(stdlib, tmp_path, text, sentence):
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(CourseError, match=sentence):
        make(PythonCorpus(str(tmp_path), vocab=300), lambda line: None)


def test_gpt2_files_give_the_tokens_that_they_say(tmp_path):
    """Merges apply by rank, within words; the end of text is no merge."""
    alphabet = sorted(bpe.pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "th", "the", "Ġthe", bpe.END]
    (tmp_path / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e\nĠ the\n")
    tokenizer = bpe.gpt2(tmp_path / "vocab.json", tmp_path / "merges.txt")
    found = bpe.encode(tokenizer, ["the the thé"], bpe.end_token(tokenizer))[0]
    assert [words[i] for i in found] == ["the", "Ġthe", "Ġ", "th", "Ã", "©", bpe.END]
    (tmp_path / "merges.txt").write_text("#version: 0.2\nx yz\n")
    with pytest.raises(CourseError, match=r"merges.txt cannot be read as GPT-2's vocabulary and merges"):
        bpe.gpt2(tmp_path / "vocab.json", tmp_path / "merges.txt")


def test_what_is_no_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CourseError, match=r"tokenizer.json cannot be read as a tokenizer"):
        bpe.load(tmp_path / "tokenizer.json")
    with pytest.raises(CourseError, match="has no token </s>, which closes each document: set end=TOKEN"):
        bpe.end_token(bpe.train(iter(["a"]), 257), "</s>")


@pytest.mark.slow
def test_the_library_of_this_python(tmp_path):
    python_corpus.make(PythonCorpus(str(tmp_path)), lambda line: None)
    meta, tokenizer = json.loads((tmp_path / "meta.json").read_text()), bpe.load(tmp_path / "tokenizer.json")
    train = meta["splits"]["train"]
    assert meta["vocab"] == 4096 and train["tokens"] > 1_000_000 and 3 < train["bytes"] / train["tokens"] < 4.5
    assert "def " in tokenizer.decode(Sequences(str(tmp_path), "valid", 512, 4096).__getitems__([0])["tokens"][0].tolist())
