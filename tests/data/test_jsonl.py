import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from course.cli import main
from course.data.text import bpe, documents, jsonl
from course.data.text.indexed_files import Documents
from course.data.text.jsonl import Jsonl, make
from course.data.text.python_corpus import choose_split
from course.data.text.sequences import Sequences
from course.utils.errors import CourseError

SPLITS = ("train", "valid", "test")
NAMES = ["meta.json", "test.bin", "test.idx", "tokenizer.json", "train.bin", "train.idx", "valid.bin", "valid.idx"]


def text(i):
    """A document of 0 to 400 characters, always the same for i."""
    dice = random.Random(i)
    return f"Document {i}: " + " ".join(dice.choices(["one", "two", "três", "<|endoftext|>", "four\n"], k=dice.randrange(80)))


def write(folder, files=3, documents=40):
    """Files a0.jsonl.gz, a1.jsonl.gz ..., and their documents."""
    folder.mkdir(exist_ok=True)
    everything = [text(i) for i in range(files * documents)]
    for number in range(files):
        some = everything[number * documents:(number + 1) * documents]
        lines = "".join(json.dumps({"text": document}) + "\n" for document in some)
        (folder / f"a{number}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    return everything


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Three files in parts of about 4,000 bytes and chunks of 1,000, in this process."""
    monkeypatch.setattr(jsonl, "CHUNK", 1000)
    monkeypatch.setattr(jsonl, "PART", 4000)
    monkeypatch.setattr("course.utils.atomic_files.flush", lambda path: None)  # so many small files: the disk need not have them
    write(tmp_path / "in")
    return Jsonl(tuple(str(tmp_path / "in" / f"a{i}.jsonl.gz") for i in range(3)), str(tmp_path / "out"), vocab=300, valid=0.1,
                 test=0.2, jobs=1)


def made(path):
    """The bytes of a data set by name; nothing else lies there."""
    files = {file.name: file.read_bytes() for file in sorted(Path(path).iterdir())}
    assert list(files) == NAMES
    return files


def silent(line):
    pass


def test_each_document_is_there_once_in_its_split_and_in_order(config, tmp_path):
    make(config, silent)
    everything = [text(i) for i in range(120)]
    tokenizer, meta = bpe.load(tmp_path / "out" / "tokenizer.json"), json.loads((tmp_path / "out" / "meta.json").read_text())
    for split in SPLITS:
        expected = [document for document in everything if choose_split(document.encode(), 0.1, 0.2) == split]
        documents = Documents(tmp_path / "out" / split)
        assert [tokenizer.decode(document[:-1].tolist()) for document in documents] == expected != []
        assert all(list(document).count(0) == 1 and document[-1] == 0 for document in documents)     # END in the text is text
        assert meta["splits"][split] == {"documents": len(expected), "tokens": len(documents.tokens),
                                         "bytes": sum(len(document.encode()) for document in expected)}
    assert meta["vocab"] == 300 and meta["bad"] == 0 and made(tmp_path / "out")
    assert len(Sequences(str(tmp_path / "out"), "train", 64, 300)) > 50


@pytest.mark.parametrize(("chunk", "part"), [(1, 1), (1, 10**9), (10**9, 10**9), (3000, 3000)])
def test_the_size_of_chunks_and_parts_does_not_matter(config, tmp_path, monkeypatch, chunk, part):
    make(config, silent)
    monkeypatch.setattr(jsonl, "CHUNK", chunk)
    monkeypatch.setattr(jsonl, "PART", part)
    make(replace(config, path=str(tmp_path / "other")), silent)
    assert made(tmp_path / "other") == made(tmp_path / "out")


@pytest.mark.parametrize("after", [0, 1, 5, 20, 25])
def test_an_interrupted_run_goes_on(config, tmp_path, monkeypatch, after):
    """The same bytes as in one go, and nothing that was finished is encoded twice."""
    make(config, silent)
    again, calls, original = replace(config, path=str(tmp_path / "again")), [], jsonl.encode

    def counted(*arguments):
        if len(calls) == after and not (tmp_path / "again" / "stopped").exists():
            (tmp_path / "again" / "stopped").touch()
            raise KeyboardInterrupt
        calls.append(arguments[-1])
        return original(*arguments)

    monkeypatch.setattr(jsonl, "encode", counted)
    with pytest.raises(KeyboardInterrupt):
        make(again, silent)
    done = {(int(folder.parent.name), int(folder.name)) for folder in (tmp_path / "again" / "parts").glob("[0-9]*/[0-9]*")}
    assert not (tmp_path / "again" / "train.idx").exists() and (len(done) > 0) == (after >= 5)
    before = len(calls)
    make(again, silent)
    assert done.isdisjoint({(chunk.file, chunk.part) for chunk in calls[before:]})
    (tmp_path / "again" / "stopped").unlink()
    assert made(tmp_path / "again") == made(tmp_path / "out")


def interrupt(monkeypatch, config, name):
    """Stop a run where it calls `jsonl.NAME`."""
    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(jsonl, name, stop)
        make(config, silent)


def test_a_finished_file_is_not_read_again(config, tmp_path, monkeypatch):
    interrupt(monkeypatch, config, "join")
    monkeypatch.setattr(documents, "items", None)
    make(config, silent)
    assert made(tmp_path / "out")


def test_a_file_that_changed_meanwhile_is_done_again(config, tmp_path, monkeypatch):
    interrupt(monkeypatch, config, "join")
    file = tmp_path / "in" / "a1.jsonl.gz"
    file.write_bytes(file.read_bytes())              # the same content, a new date
    stale = tmp_path / "out" / "parts" / "00001" / "00099"
    stale.mkdir()
    make(config, silent)
    make(replace(config, path=str(tmp_path / "other")), silent)
    assert made(tmp_path / "other") == made(tmp_path / "out")


def test_other_settings_do_not_mix(config, tmp_path, monkeypatch):
    interrupt(monkeypatch, config, "join")
    with pytest.raises(CourseError, match=r"parts holds what was finished with other settings \(valid\): run again with"):
        make(replace(config, valid=0.3), silent)
    with pytest.raises(CourseError, match=r"other settings \(part\)"), monkeypatch.context() as patch:
        patch.setattr(jsonl, "PART", 5000)           # parts of another version of the course, cut elsewhere
        make(config, silent)
    make(config, silent)
    with pytest.raises(CourseError, match=r"out holds a data set made with other settings \(files, vocab\): give another path"):
        make(replace(config, files=config.files[:2], vocab=299), silent)
    said = []
    make(replace(config, jobs=2), said.append)
    assert said == [f"{tmp_path / 'out'} is there already"]


def test_parts_are_in_order_beyond_five_digits(tmp_path):
    names = [f"{file:05d}/{part:05d}" for file in (2, 99_999, 100_000) for part in (0, 99_999, 100_000, 100_001)]
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "counts.json").write_text("{}")
    assert [folder.relative_to(tmp_path).as_posix() for folder in jsonl.finished(tmp_path)] == names


def test_a_typo_is_not_in_the_way(config, tmp_path):
    """With a tokenizer that is given parts were written, of nothing."""
    make(config, silent)
    given = replace(config, path=str(tmp_path / "again"), tokenizer=str(tmp_path / "out" / "tokenizer.json"), vocab=0)
    with pytest.raises(CourseError, match="no text under the key 'txt'"):
        make(replace(given, text="txt"), silent)
    assert jsonl.finished(tmp_path / "again" / "parts")
    make(given, silent)
    assert (tmp_path / "again" / "train.bin").read_bytes() == (tmp_path / "out" / "train.bin").read_bytes()


def test_an_interrupt_says_what_to_do_next(config, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    said = []
    monkeypatch.setattr(jsonl, "encode", stop)
    with pytest.raises(KeyboardInterrupt):
        make(config, said.append)
    assert said[-1] == "interrupted; the same command goes on where it stopped"


def test_of_two_runs_at_once_one_makes_it_and_the_other_waits(config, tmp_path):
    said = []
    with ThreadPoolExecutor(2) as pool:
        for run in [pool.submit(make, config, said.append) for _ in range(2)]:
            run.result()
    assert sum(line.startswith("wrote ") for line in said) == 1
    made(tmp_path / "out")


# ---- bad documents ----

def test_bad_lines_are_named_and_counted(config, tmp_path):
    good = json.dumps({"text": "good"}).encode()
    lines = [good, b"{", good, b'{"text": "\xff"}', b'{"t": 1}', b"", good, *[b"["] * 9]
    (tmp_path / "in" / "b.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "in" / "c.jsonl").write_bytes(b"")
    packed = (tmp_path / "in" / "a0.jsonl.gz").read_bytes()
    (tmp_path / "in" / "d.jsonl.gz").write_bytes(packed[:-20])
    said = []
    make(replace(config, files=tuple(str(tmp_path / "in" / name) for name in ("b.jsonl", "c.jsonl", "d.jsonl.gz"))), said.append)
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    found = sum(split["documents"] for split in meta["splits"].values())
    assert meta["bad"] == 13 and 3 < found < 43
    assert said[1].startswith(f"13 of {13 + found} documents were bad and are left out: {tmp_path}/in/b.jsonl:2 (not JSON (Exp")
    assert "b.jsonl:4 (not UTF-8 at byte 10); " in said[1] and "b.jsonl:5 (no text under the key 'text'); " in said[1]
    assert said[1].endswith(" ...") and said[1].count("b.jsonl:") == jsonl.SHOWN == 5


def test_a_truncated_file_is_named(config, tmp_path):
    file = tmp_path / "in" / "a2.jsonl.gz"
    file.write_bytes(file.read_bytes()[:-20])
    said = []
    make(config, said.append)
    assert "1 of " in said[1] and "a2.jsonl.gz:" in said[1] and "what follows is unreadable" in said[1]


@pytest.mark.parametrize("tokenizer", ["", "given"])
@pytest.mark.parametrize(("content", "sentence"), [
    (b"", "the files hold no documents to train on; give .jsonl files"),
    (b"<html>\n<p>\n", r"no documents to train on; what is there is bad: .*b.jsonl:1 \(not JSON .*; .*b.jsonl:2 \(not JSON"),
    (b'{"content": "a"}\n', "b.jsonl:1 .no text under the key 'text'.; give .* and text=KEY if their key is not 'text'"),
])
def test_nothing_good_is_an_error(config, tmp_path, content, sentence, tokenizer):
    (tmp_path / "in" / "b.jsonl").write_bytes(content)
    if tokenizer:
        bpe.train(iter(["a"]), 257).save(str(tmp_path / "given"))
        tokenizer = str(tmp_path / "given")
    wrong = replace(config, files=(str(tmp_path / "in" / "b.jsonl"),), tokenizer=tokenizer, vocab=0 if tokenizer else 300)
    with pytest.raises(CourseError, match=sentence):
        make(wrong, silent)
    assert not (tmp_path / "out" / "meta.json").exists()
    make(config, silent)                             # with other files: nothing was finished, so nothing is in the way
    make(replace(config, path=str(tmp_path / "other")), silent)
    assert made(tmp_path / "other") == made(tmp_path / "out")


@pytest.mark.parametrize(("change", "sentence"), [
    ({"files": ()}, "no files are named"),
    ({"valid": 1 - 1e-9, "test": 0.0}, r"no document is left for training with valid=0\.999999999 and test=0\.0: choose smaller"),
    ({"files": ("{tmp}/in/a0.jsonl.gz", "{tmp}/in/../in/a0.jsonl.gz")}, "a file is named twice"),
    ({"files": ("{tmp}/in",)}, "/in is a folder: give files .a shell expands"),
    ({"files": ("{tmp}/nowhere.jsonl",)}, "the input file .*nowhere.jsonl does not exist: check its name and folder$"),
    ({"tokenizer": "{tmp}/nowhere.json"}, "^tokenizer=.*nowhere.json does not exist: give a file$"),
    ({"vocabulary": "{tmp}/in", "merges": "{tmp}/in/a1.jsonl.gz"}, "^vocabulary=.*/in is a folder, not a file$"),
    ({"tokenizer": "{tmp}/in/a0.jsonl.gz", "vocab": 0}, "a0.jsonl.gz cannot be read as a tokenizer"),
    ({"tokenizer": "{tmp}/in/a0.jsonl.gz"}, "vocab=300 sets the size of a vocabulary to learn, but you give one: leave out"),
    ({"vocabulary": "{tmp}/in/a0.jsonl.gz", "merges": "{tmp}/in/a1.jsonl.gz"}, "vocab=300 sets the size of a vocabulary"),
    ({"merges": "{tmp}/in/a0.jsonl.gz"}, "give tokenizer=tokenizer.json, or vocabulary=vocab.json with merges=merges.txt"),
    ({"vocabulary": "{tmp}/in/a0.jsonl.gz", "merges": "{tmp}/in/a1.jsonl.gz", "vocab": 0}, "cannot be read as GPT-2's voc"),
    ({"end": "</s>"}, "the tokenizer has no token </s>"),
    ({"vocab": 100}, "vocab=100 is too small"),
    ({"valid": 1.0}, "valid=1 and test=0.2 are parts"),
    ({"jobs": -1}, "jobs=-1"), ({"sample": 0}, "sample=0"),
])
def test_bad_requests(config, tmp_path, change, sentence):
    def fill(value):
        if isinstance(value, tuple):
            return tuple(map(fill, value))
        return value.format(tmp=tmp_path) if isinstance(value, str) else value

    with pytest.raises(CourseError, match=sentence):
        make(replace(config, **{key: fill(value) for key, value in change.items()}), silent)


# ---- the rest ----

def test_a_given_tokenizer_is_used(config, tmp_path):
    tokenizer = bpe.train(iter(["one two three"]), 260)
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "given.json"))
    config = replace(config, tokenizer=str(tmp_path / "given.json"), end="</s>", vocab=0)
    make(config, silent)
    found, meta = Documents(tmp_path / "out" / "train"), json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["end"] == tokenizer.token_to_id("</s>") == found[0][-1] and meta["vocab"] == tokenizer.get_vocab_size()
    first = next(text(i) for i in range(99) if choose_split(text(i).encode(), 0.1, 0.2) == "train")
    assert tokenizer.decode(found[0][:-1].tolist()) == first
    tokenizer.save(str(tmp_path / "given.json"), pretty=False)
    with pytest.raises(CourseError, match=r"other settings \(tokenizer\)"):
        make(config, silent)


def test_a_tokenizer_that_cuts_or_fills_up_changes_no_document(config, tmp_path):
    """Files that other libraries saved may say that a text is cut to 512 tokens, or filled up to the longest."""
    tokenizer = bpe.train(iter(["one two three"]), 260)
    tokenizer.save(str(tmp_path / "plain.json"))
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=32)
    tokenizer.save(str(tmp_path / "cuts.json"))
    for name in ("plain", "cuts"):
        make(replace(config, tokenizer=str(tmp_path / f"{name}.json"), vocab=0, path=str(tmp_path / name)), silent)
    for split in SPLITS:
        assert (tmp_path / "plain" / f"{split}.bin").read_bytes() == (tmp_path / "cuts" / f"{split}.bin").read_bytes()


def test_archives_and_the_command(config, tmp_path, monkeypatch):
    """`course data jsonl FILE... KEY=VALUE...`, with a name that looks like a setting."""
    with tarfile.open(tmp_path / "in" / "lang=en.tar.xz", "w:xz") as archive:
        for i in range(30):
            info = tarfile.TarInfo(f"{i}.txt")
            info.size = len(text(i).encode())
            archive.addfile(info, io.BytesIO(text(i).encode()))
    monkeypatch.chdir(tmp_path / "in")
    monkeypatch.setattr(sys, "argv", ["course", "data", "jsonl", "lang=en.tar.xz", "path=../out", "vocab=300", "jobs=1"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert not ended.value.code and sum(len(Documents(tmp_path / "out" / split)) for split in SPLITS) == 30
    monkeypatch.setattr(sys, "argv", ["course", "data", "jsonl", "lang=en.tar.xz", "path=../out", "vocabs=300"])
    with pytest.raises(SystemExit, match=r"course data jsonl: there is no key 'vocabs'.*vocab"):
        main.main()


def test_few_chunks_wait_however_slow_the_processes_are():
    class Pool:
        def submit(self, work, chunk):
            future = Future()
            future.set_result(work(chunk))
            return future

    taken = []
    found = jsonl.map_bounded(Pool(), lambda chunk: 2 * chunk, (taken.append(i) or i for i in range(100)), 6)
    for i in range(100):
        assert next(found) == 2 * i and len(taken) == min(6 + i, 100)


CHILD = """
import signal, sys
from course.utils import atomic_files as files
from course.data.text import jsonl
signal.signal(signal.SIGINT, signal.default_int_handler)       # which a shell's background has turned off
jsonl.CHUNK, jsonl.PART, files.flush = 1000, 4000, lambda path: None
original = jsonl.write_part
def write_part(*arguments):
    original(*arguments)
    print("part", flush=True)
if __name__ == "__main__":
    jsonl.write_part = write_part
    jsonl.make(jsonl.Jsonl(tuple(sys.argv[2:]), sys.argv[1], vocab=300, valid=0.1, test=0.2, jobs=2), print)
"""


@pytest.mark.slow
def test_many_processes_write_what_one_writes(config, tmp_path):
    make(config, silent)
    for jobs in (2, 3):
        make(replace(config, path=str(tmp_path / f"out{jobs}"), jobs=jobs), silent)
        assert made(tmp_path / f"out{jobs}") == made(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_and_run_again(tmp_path, how):
    """In the middle of the work: no process stays behind, and a second run makes the rest of what one run makes."""
    write(tmp_path / "in", documents=400)
    (tmp_path / "child.py").write_text(CHILD)
    command = [sys.executable, "child.py", "out", *(f"in/a{i}.jsonl.gz" for i in range(3))]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        while child.stdout.readline() != "part\n":
            assert child.poll() is None
        family = psutil.Process(child.pid).children(recursive=True)
        os.kill(child.pid, how)
        assert ("interrupted; the same command goes on" in child.stdout.read()) == (how == signal.SIGINT)
    assert len(family) >= 3 and not psutil.wait_procs(family, timeout=20)[1]
    kept = len(list((tmp_path / "out" / "parts").glob("[0-9]*/[0-9]*")))
    assert kept and not (tmp_path / "out" / "meta.json").exists()
    written = {}
    for command[2] in ("out", "once"):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        written[command[2]] = done.stdout.splitlines().count("part")
    assert 0 < written["out"] == written["once"] - kept
    assert made(tmp_path / "out") == made(tmp_path / "once")


@pytest.mark.slow
def test_a_process_that_dies_is_a_sentence(config, tmp_path, monkeypatch):
    original = jsonl.map_bounded

    def murder(pool, *arguments):
        for number, encoded in enumerate(original(pool, *arguments)):
            if number == 5:
                os.kill(next(iter(pool._processes)), signal.SIGKILL)
                time.sleep(0.5)
            yield encoded

    with monkeypatch.context() as patch, pytest.raises(CourseError, match=r"a process that encodes was killed.*smaller jobs="):
        patch.setattr(jsonl, "map_bounded", murder)
        make(replace(config, jobs=2), silent)
    make(config, silent)
    make(replace(config, path=str(tmp_path / "other")), silent)
    assert made(tmp_path / "other") == made(tmp_path / "out")


MEMORY = """
import re, sys
from pathlib import Path
from course.data.text import jsonl
if __name__ == "__main__":
    for name in ("small", "large"):
        Path("/proc/self/clear_refs").write_text("5")                           # forget the peak
        jsonl.make(jsonl.Jsonl((name + ".jsonl.gz",), name, tokenizer="tokenizer.json", jobs=int(sys.argv[1])), lambda line: None)
        print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_memory_does_not_grow_with_the_input(tmp_path, jobs):
    """40 MB of text in one file take less than 10 MB beyond what 8 MB take: what waits is bounded."""
    line = json.dumps({"text": "abc def\n" * 500}).encode() + b"\n"
    for name, size in (("small", 8), ("large", 40)):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(line * (size * 1_000_000 // len(line)), 1))
    bpe.train(iter(["abc def"]), 300).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "child.py").write_text(MEMORY)
    done = subprocess.run([sys.executable, "child.py", str(jobs)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    small, large = map(int, done.stdout.split())     # KiB
    assert large - small < 10_000 and (tmp_path / "large" / "train.bin").stat().st_size > 10_000_000
