"""Text is UTF-8 in every locale; a byte-order mark and UTF-16, as Windows' tools write them, are read."""

import ast
import codecs
import json
import subprocess
import sys
from pathlib import Path

import pytest

import course
from course import config
from course.data.text import bpe, documents, jsonl, python_corpus
from course.utils.atomic_files import read_text
from course.utils.errors import CourseError

SOURCES = sorted(Path(course.__file__).parent.rglob("*.py"))
OTHERS = {"open", "read_text", "write_text"}


def unsaid(tree: ast.AST) -> list[int]:
    """The lines of calls that read or write text in whatever encoding the locale has."""
    found = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        given = {keyword.arg for keyword in call.keywords}
        mode = call.args[1].value if len(call.args) > 1 and isinstance(call.args[1], ast.Constant) else "r"
        is_text = (name in ("read_text", "write_text") and isinstance(call.func, ast.Attribute)) or (
            name == "open" and isinstance(call.func, ast.Name) and "b" not in str(mode)) or "text" in given & {"text"}
        if is_text and "encoding" not in given and name in {*OTHERS, "run", "Popen", "check_output"}:
            found.append(call.lineno)
    return found


@pytest.mark.parametrize("file", [file for file in SOURCES if "lab" not in file.parts and not file.name.startswith("cli")],
                         ids=lambda file: file.name)
def test_whoever_reads_or_writes_text_says_in_which_encoding(file):
    assert unsaid(ast.parse(file.read_bytes())) == []


ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le-bom", "utf-16-be-bom"]


def encoded(text: str, encoding: str) -> bytes:
    if encoding.endswith("-bom"):
        kind = encoding.removesuffix("-bom")
        return (codecs.BOM_UTF16_LE if "le" in kind else codecs.BOM_UTF16_BE) + text.encode(kind)
    return text.encode(encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_text_is_read_without_its_mark(tmp_path, encoding):
    (tmp_path / "a").write_bytes(encoded("größer → 李\n", encoding))
    assert read_text(tmp_path / "a") == "größer → 李\n"


def test_a_preset_is_read_in_each_encoding_and_in_a_latin_1_locale(tmp_path):
    files = [tmp_path / f"{encoding}.yaml" for encoding in ENCODINGS]
    for encoding, file in zip(ENCODINGS, files, strict=True):
        file.write_bytes(encoded("base: vit-demo\ndata: {path: größe/李}\n", encoding))
        assert config.load(str(file)).data.path == "größe/李"
    code = f"from course import config; print([ascii(config.load(file).data.path) for file in {[*map(str, files)]!r}])"
    done = subprocess.run([sys.executable, "-X", "utf8=0", "-c", code], capture_output=True, encoding="ascii",
                          env={"LC_ALL": "C", "PATH": "/usr/bin:/bin", "PYTHONCOERCECLOCALE": "0"})
    assert done.stdout.strip() == str([ascii("größe/李")] * len(files)), done.stderr


def test_a_preset_that_is_not_utf_8_is_a_sentence(tmp_path):
    (tmp_path / "mine.yaml").write_bytes("data: {path: größe}\n".encode("latin-1"))
    with pytest.raises(CourseError, match=r"mine\.yaml is not readable YAML \(not UTF-8 at byte 15\): save it as UTF-8"):
        config.load(str(tmp_path / "mine.yaml"))


LINES = ['{"text": "größer → 李"}', "", '{"text": "zweite"}']


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_json_lines_are_read_in_each_encoding(tmp_path, encoding):
    (tmp_path / "a.jsonl").write_bytes(encoded("\r\n".join(LINES) + "\r\n", encoding))
    found = [text for item in documents.items(tmp_path / "a.jsonl") for text in documents.read(item, "text")]
    assert [(text.text, text.bad) for text in found] == [("größer → 李", ""), ("zweite", "")]
    assert found[0].data == "größer → 李".encode()


def test_lines_in_latin_1_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_bytes('{"text": "größer"}\n{"text": "b"}\n'.encode("latin-1"))
    bad, good = [text for item in documents.items(tmp_path / "a.jsonl") for text in documents.read(item, "text")]
    assert bad.bad == "not UTF-8 at byte 12" and good.text == "b"
    said: list[str] = []
    jsonl.make(jsonl.Jsonl((str(tmp_path / "a.jsonl"),), str(tmp_path / "out"), vocab=260, valid=0, test=0, jobs=1), said.append)
    assert "1 of 2 documents were bad" in "\n".join(said)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_tokenizer_files_with_a_mark_are_read(tmp_path, encoding):
    plain = bpe.train(iter(["eins zwei eins zwei größer"] * 20), 280)
    (tmp_path / "tokenizer.json").write_bytes(encoded(plain.to_str(), encoding))
    assert bpe.load(tmp_path / "tokenizer.json").to_str() == plain.to_str()
    model = json.loads(plain.to_str())["model"]
    pairs = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    (tmp_path / "vocab.json").write_bytes(encoded(json.dumps(model["vocab"]), encoding))
    (tmp_path / "merges.txt").write_bytes(encoded("#version: 0.2\r\n" + "\r\n".join(pairs) + "\r\n", encoding))
    made = bpe.gpt2(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert made.encode("zwei größer").ids == plain.encode("zwei größer").ids


def test_a_source_file_with_a_mark_is_text_without_it(tmp_path):
    (tmp_path / "a.py").write_bytes(codecs.BOM_UTF8 + b"x = 1\n")
    assert dict(python_corpus.library_files(tmp_path)) == {"a.py": "x = 1\n"}


@pytest.mark.parametrize("path", ["[raw] ERA5", "a #1/b", "my: share", "1979", "{x}", "no", "*", "a=b", "~"])
def test_a_path_is_no_yaml(path):
    assert config.load("vit-demo", [f"data.path={path}"]).data.path == path
    assert config.load("vit-demo", [f'data.path="{path}"']).data.path == path
