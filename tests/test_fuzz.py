"""Files that users bring, damaged in all ways: what reads them says a sentence (a `CourseError`, or what it promises instead),
never crashes or hangs, and never runs what is in them.

Each file begins as a right one, of which bytes are changed, cut out or repeated, or values replaced; or it is arbitrary. CI draws
the same examples each time; FUZZ=1000 pytest tests/test_fuzz.py draws a thousand others of each.
"""

import functools
import gzip
import io
import json
import lzma
import math
import os
import signal
import string
import tarfile
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import pytest
import yaml
import zstandard

from course import config, schema
from course.data import Latents, indexed, layout, texts
from course.data.pairs import Pairs
from course.errors import CourseError
from course.files import sha256
from course.lab import cells, sbatch, scale
from course.lab.check import Fact, Verdict
from course.lab.submissions import of_lesson
from course.perf import comms, hardware, host, kernels

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

EXAMPLES = int(os.environ.get("FUZZ", "40"))
PATIENCE = 10                                        # seconds of the processor for one file; it takes milliseconds
SUBMIT = Path(__file__).parents[1] / "submit"
ROOT = Path(config.__file__).parent


def fuzz(**drawn):
    """Call a test with EXAMPLES drawn arguments, each within PATIENCE seconds of the processor."""
    def around(test):
        @functools.wraps(test)
        def watched(*arguments, **values):
            def hangs(*_):
                raise AssertionError(f"a file takes more than {PATIENCE} s")
            before = signal.signal(signal.SIGVTALRM, hangs)
            signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE)
            try:
                test(*arguments, **values)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                signal.signal(signal.SIGVTALRM, before)
        checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
        return settings(max_examples=EXAMPLES, derandomize="FUZZ" not in os.environ, deadline=None, database=None,
                        suppress_health_check=checks)(given(**drawn)(watched))
    return around


# ---- what is drawn

@st.composite
def damaged(draw, whole: bytes):
    """A file of which a few pieces are other bytes, are gone, or are there twice."""
    found = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(found) - 1)))
        end = min(len(found), at + draw(st.sampled_from([1, 1, 1, 4, 8, 64, 4096])))
        match draw(st.sampled_from(["flip", "replace", "cut", "cut", "repeat", "truncate"])):
            case "flip" if found:
                found[at] ^= 1 << draw(st.integers(0, 7))
            case "replace":
                found[at:end] = draw(st.binary(max_size=16) | st.sampled_from([b"\0" * 8, b"\xff" * 8]))
            case "cut":
                del found[at:end]
            case "repeat":
                found[at:at] = found[at:end]
            case "truncate":
                del found[at:]
    return bytes(found)


WORDS = st.text(string.printable, max_size=12) | st.text(max_size=8)
LEAVES = (st.none() | st.booleans() | st.integers(-2**70, 2**70) | st.floats() | WORDS
          | st.sampled_from(["", "nan", "1e999", "../x", "a.yaml", "\0", "𝔘", "9" * 30, "-1", "0"]))
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6)


def replaced(whole):
    """A right value of dicts and lists with some of its parts replaced, renamed or gone."""
    @st.composite
    def drawn(draw):
        found = json.loads(json.dumps(whole))
        for _ in range(draw(st.integers(1, 3))):
            node = found
            while True:
                keys = list(node) if isinstance(node, dict) else list(range(len(node)))
                if not keys:
                    break
                key = draw(st.sampled_from(keys))
                if isinstance(node[key], dict | list) and node[key] and draw(st.booleans()):
                    node = node[key]
                    continue
                match draw(st.sampled_from(["replace", "replace", "remove", "rename"])):
                    case "replace":
                        node[key] = draw(VALUES)
                    case "remove":
                        del node[key]
                    case "rename" if isinstance(node, dict):
                        node[draw(WORDS)] = node.pop(key)
                break
        return found
    return drawn()


def as_json(value) -> bytes:
    return json.dumps(value).encode()


def as_yaml(value) -> bytes:
    return yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")


# YAML that does more than hold values, or means to
LAUGHS = "a: &a [x]\n" + "".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in pairwise("abcdefghijk")) + "model: *k"
NASTY = ["!!python/object/apply:os.system ['touch RAN']", "a: !!python/name:os.system", "!!python/object/new:os.system [ls]",
         "!!int x", "!!int ''", "!!bool x", "!!timestamp x", "!!float x", "!!binary x", "2001-99-99", "{? [1]: 2}", "*nobody",
         "? {a: 1}\n: 2", "&a [*a]", "a: &a {b: *a}", "[" * 2000, "{a: " * 2000, "- a\n-b: [", "\t", "%YAML 9.9\n---\na",
         "--- a\n--- b", "9" * 5000, LAUGHS]


def nasty(test):
    """Run a test on all of `NASTY`, too."""
    for text in NASTY:
        test = example(raw=text.encode())(test)
    return test


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder that is the current one, in which nothing may appear that a file's code makes."""
    folder, before = tmp_path_factory.mktemp("fuzz"), os.getcwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)
    assert not (folder / "RAN").exists()


# ---- settings and hardware

PRESET = yaml.safe_load((ROOT / "configs" / "gpt-python.yaml").read_text()) | {"base": "vit-demo"}


@nasty
@fuzz(raw=damaged((ROOT / "configs" / "gpt-python.yaml").read_bytes()) | replaced(PRESET).map(as_yaml) | VALUES.map(as_yaml)
      | st.binary(max_size=64))
def test_a_preset(place, raw):
    (place / "mine.yaml").write_bytes(raw)
    with suppress(CourseError):
        found = config.load(str(place / "mine.yaml"))
        assert isinstance(found, config.Config)
        config.save(found, place / "saved.yaml")
        assert str(config.load(str(place / "saved.yaml"))) == str(found)       # as text: nan is not nan


def test_presets_whose_bases_go_in_a_circle(place):
    for name, base in (("a", "b"), ("b", "c"), ("c", "a")):
        (place / f"{name}.yaml").write_text(f"base: {place}/{base}.yaml")
    with pytest.raises(CourseError, match="which leads back to it"):
        config.load(str(place / "a.yaml"))


KEYS = st.sampled_from([*schema.flat_keys(config.Config), "model.grid", "a.b", ".", "train.", "train.steps.x", ""])


@fuzz(words=st.lists(st.builds("{}={}".format, KEYS | WORDS, st.sampled_from(NASTY[:-1]) | VALUES.map(str) | WORDS) | WORDS,
                     min_size=1, max_size=3))
def test_settings(place, words):
    with suppress(CourseError):
        assert isinstance(config.load("gpt-demo", words), config.Config)


LINKS = [{"name": "NVLink", "span": 8, "latency": 2e-6, "bandwidth": 4e11},
         {"name": "network", "span": 0, "latency": 5e-6, "bandwidth": 5e10}]
OF_H100 = {"base": "h100-80", "memory": 40e9, "peaks": {"bf16": 1e15}, "links": LINKS}


@nasty
@fuzz(raw=damaged(as_yaml(OF_H100)) | replaced(OF_H100).map(as_yaml) | VALUES.map(as_yaml) | st.binary(max_size=64))
def test_hardware(place, raw):
    (place / "gpu.yaml").write_bytes(raw)
    with suppress(CourseError):
        found = hardware.load(str(place / "gpu.yaml"))
        assert found.memory > 0 and all(link.bandwidth > 0 and link.latency >= 0 for link in found.links)


SIDES, SECONDS = [64, 256], [1e-5 * n for n in range(1, 9)]
KERNELS = {"matmul": {"bf16": {"axes": [SIDES] * 3, "seconds": SECONDS}},
           "attention": {"forward": {"axes": [SIDES] * 3, "seconds": SECONDS}},
           "memory": {"copy": {"axes": [[1e6, 1e8]], "seconds": [1e-5, 1e-4]}},
           "norms": {which: {"axes": [[1e6, 1e8], SIDES], "seconds": SECONDS[:4]} for which in kernels.NORMS},
           "all_reduce": {"2": [[1e6, 1e-4], [1e8, 1e-3]]}}
HOST = {"plain_step": 2e-3, "host": {"gpt": [0.5, 0.8, 0.6], "gpt, full": [0.5, 0.7, 1.3], "vit": "not measured"}}


@fuzz(raw=damaged(json.dumps(KERNELS).encode()) | replaced(KERNELS).map(as_json) | st.binary(max_size=64))
def test_tables_of_kernels(place, raw):
    (place / "kernels.json").write_bytes(raw)
    h200 = hardware.load("h200")
    with suppress(CourseError):
        found = kernels.read(place / "kernels.json", h200, h200)
        taken = (found.matmul(100, 1e3, 70, "bf16"), found.attention(16, 100, 100, 64, False, "bf16"), found.memory("copy", 1e7),
                 found.norm([1e7, 1e6], 100, True, True),
                 comms.all_reduce(1e7, comms.group_of([(1, 2)], h200, found.curves)))
        assert all(0 < seconds < math.inf for seconds in taken)


@fuzz(raw=damaged(json.dumps(HOST).encode()) | replaced(HOST).map(as_json) | st.binary(max_size=64))
def test_tables_of_the_host(place, raw):
    (place / "host.json").write_bytes(raw)
    with suppress(CourseError):
        found = host.read(place / "host.json")
        assert found.plain_step > 0 and all(math.isfinite(cost.of(2, 2)) for cost in found.rows.values())


# ---- data

def token_files(folder: Path) -> tuple[bytes, bytes]:
    """The bytes of a .idx and its .bin, of three documents."""
    with indexed.writing(folder / "right", 1000) as writer:
        for length in (5, 0, 9):
            writer.add(np.arange(length))
    return (folder / "right.idx").read_bytes(), (folder / "right.bin").read_bytes()


@fuzz(data=st.data())
def test_token_files(place, data):
    index, tokens = token_files(place)
    (place / "mine.idx").write_bytes(data.draw(damaged(index) | st.binary(max_size=80)))
    (place / "mine.bin").write_bytes(data.draw(st.just(tokens) | damaged(tokens)))
    with suppress(CourseError):
        documents = indexed.Documents(place / "mine")
        assert sum(len(documents[i]) for i in range(len(documents))) == len(documents.tokens)


def year_file() -> bytes:
    """A small HDF5 file as the course's data has them."""
    held = io.BytesIO()
    with h5py.File(held, "w") as file:
        fields = layout.create_year(file, 3, ["u10", "v10"], layout.latitudes(4), layout.longitudes(8))
        fields[:] = np.full((3, 2, 4, 8), 2)         # 1, once it is normalised by the statistics below: so they match
    return held.getvalue()


def statistics_file() -> bytes:
    held = io.BytesIO()
    np.save(held, np.ones((1, 2, 1, 1), "float32"))
    return held.getvalue()


def shard_file() -> bytes:
    """A small HDF5 file as a DiT's data has them."""
    held = io.BytesIO()
    with h5py.File(held, "w") as file:
        file["latents"], file["labels"] = np.ones((3, 2, 4, 4), "float32"), np.arange(3)
    return held.getvalue()


YEAR, STATISTICS, SHARD = year_file(), statistics_file(), shard_file()
SUMMARY = {"latent": [2, 4, 4], "classes": 3, "scale": 1.0, "shards": {"train/00000.h5": 3}}


def hdf5(whole):
    """A damaged HDF5 file, every other time in its first 2 kB, where all is that is not numbers.

    Attributes of texts are not read here: in one such file of 2,000 HDF5 2.0.0 looks for theirs without an end, in C, where
    neither Python nor Ctrl-C is heard. Only another process could be ended. The course starts none to look at every file, on
    every rank, at every start: these are a few bytes of a file of gigabytes, and what is damaged elsewhere is a sentence.
    """
    return damaged(whole) | damaged(whole[:2048]).map(lambda head: head + whole[2048:]) | st.binary(max_size=64)


def read_year(place, raw):
    for name in ("train", "stats"):
        (place / name).mkdir(exist_ok=True)
    (place / "train" / "1979.h5").write_bytes(raw)
    for name in ("global_means", "global_stds"):
        (place / "stats" / f"{name}.npy").write_bytes(STATISTICS)
    return Pairs(str(place), "train", 2, (4, 8)).__getitems__([0, 1])["input"]


def read_shard(place, raw):
    (place / "latents" / "train").mkdir(exist_ok=True, parents=True)
    (place / "latents" / "latents.json").write_text(json.dumps(SUMMARY))
    (place / "latents" / "train" / "00000.h5").write_bytes(raw)
    return Latents(str(place / "latents"), "train", (2, 4, 4), 3).__getitems__([0, 2])["latent"]


@pytest.mark.parametrize(("read", "whole"), [(read_year, YEAR), (read_shard, SHARD)])
def test_what_is_damaged_below_is_read_when_it_is_whole(place, read, whole):
    assert (read(place, whole) == 1).all()


@fuzz(raw=hdf5(YEAR))
def test_weather_files(place, raw):
    with suppress(CourseError):
        assert read_year(place, raw).shape == (2, 2, 4, 8)


@fuzz(raw=hdf5(SHARD))
def test_latent_files(place, raw):
    with suppress(CourseError):
        assert read_shard(place, raw).shape == (2, 2, 4, 4)


PICKLE = b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(127) + b"\n\x80\x04."


@example(raw=PICKLE)
@example(raw=b"PK\x03\x04" + bytes(60))
@example(raw=STATISTICS.replace(b"(1, 2, 1, 1)", b"(2**40, 1, )"))
@example(raw=STATISTICS.replace(b"(1, 2, 1, 1)", b"(9" + b"9" * 9 + b",)"))
@fuzz(raw=damaged(STATISTICS) | damaged(STATISTICS[:128]).map(lambda head: head + STATISTICS[128:]) | st.binary(max_size=64))
def test_arrays(place, raw):
    (place / "values.npy").write_bytes(raw)
    with suppress(CourseError):
        assert np.issubdtype(layout.load_array(place / "values.npy").dtype, np.number)


LINES = b'\xef\xbb\xbf{"text": "a", "n": 1}\n\n{"text": "\\ud83d\\ude00 b"}\nnot json\n{"text": "\\ud800"}\n{"text": 3}\n[1]\n'


def archive() -> bytes:
    """A tar with a text, lines of JSON and a packed text."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for name, content in (("a.txt", b"text"), ("b.jsonl", LINES), ("c.xz", lzma.compress(b"packed"))):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return held.getvalue()


PACKED = [LINES, archive(), gzip.compress(LINES, mtime=0), gzip.compress(archive(), mtime=0), lzma.compress(archive()),
          zstandard.compress(archive())]


@fuzz(raw=st.sampled_from(PACKED).flatmap(damaged) | damaged(archive()).map(gzip.compress) | st.binary(max_size=64)
      | st.lists(VALUES.map(json.dumps)).map(lambda lines: "\n".join(lines).encode()))
def test_texts(place, raw):
    """Bad documents are counted, with a reason, and the others read."""
    (place / "texts").write_bytes(raw)
    for item in texts.items(place / "texts"):
        for text in texts.read(item, "text"):
            assert text.bad or text.text.encode() == text.data != b""


# ---- what learners and instructors bring

CELLS = ["import os\nopen('RAN', 'w')", "%matplotlib inline\n!touch RAN", "def training_step(x):\n    return helper(x)",
         "@property\ndef helper(x):\n    global y\n    y = [x async for x in z]", "%%time\nhelper = lambda: (yield)",
         "class A:\n  b = 1"]
NOTEBOOK = {"cells": [{"cell_type": "code", "execution_count": None, "id": f"c{i}", "metadata": {}, "outputs": [], "source": cell}
                      for i, cell in enumerate(CELLS)],
            "metadata": {"course": {"lesson": "01"}}, "nbformat": 4, "nbformat_minor": 5}


@example(raw=json.dumps(NOTEBOOK | {"cells": [NOTEBOOK["cells"][0] | {"source": "(" * 9000}]}).encode())
@example(raw=json.dumps(NOTEBOOK | {"cells": [NOTEBOOK["cells"][0] | {"source": "training_step = \ud800"}]}).encode())
@fuzz(raw=damaged(json.dumps(NOTEBOOK).encode()) | replaced(NOTEBOOK).map(lambda value: json.dumps(value).encode())
      | st.binary(max_size=64))
def test_notebooks(place, raw):
    (place / "01_mine.ipynb").write_bytes(raw)
    with suppress(CourseError):
        answer = cells.definitions(cells.code(cells.load(place / "01_mine.ipynb")), ["training_step"])
        assert answer.problem or "training_step" in answer.source


@example(cell="%%")
@example(cell="%%time")
@example(cell="training_step = f'{x!z}'")
@fuzz(cell=st.sampled_from(CELLS).flatmap(lambda cell: damaged(cell.encode())).map(lambda raw: raw.decode("utf-8", "replace"))
      | st.text(string.printable, max_size=40).map("training_step = {}".format))
def test_cells(place, cell):
    answer = cells.definitions([cell, "training_step = 1"], ["training_step"])
    assert answer.problem or answer.source


EXERCISES = of_lesson("10")
RESULT = {"schema": scale.SCHEMA, "lesson": "10", "notebook": "", "file": "10_mine.ipynb", "checked": "2026-11-22T10:00:00",
          "exercises": {e.name: {"version": e.version, "passed": True, "seed": 1, "ranks": 2, "seconds": 0.1,
                                 "reference_seconds": 0.1, "facts": [{"held": True, "text": "x"}]} for e in EXERCISES},
          "measured": {"ms": 3.5}, "job": {"id": 7, "cluster": "c", "user": "ann", "nodes": "n1", "tasks": 2},
          "hardware": {"devices": ["H100"], "torch": "2", "python": "3"}}


@fuzz(raw=damaged(json.dumps(RESULT).encode()) | replaced(RESULT).map(lambda value: json.dumps(value).encode())
      | VALUES.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=64))
def test_result_files(place, raw):
    """One that is damaged counts for nothing, in words; grading goes on."""
    (place / "10_mine.ipynb").write_text("{}")
    digest = json.dumps(sha256(place / "10_mine.ipynb")).encode()
    (place / "10_mine.result.json").write_bytes(raw.replace(b'"notebook": ""', b'"notebook": ' + digest))
    verdicts = [Verdict(e.name, (Fact(True, "x"),), version=e.version) for e in EXERCISES]
    with mock.patch.object(scale, "described", lambda number: {"StartTime": "2026-11-22T09:00:00", "UserId": "ann(1)"}):
        claim = scale.judge(place / "10_mine.result.json", "ann", "10", place / "10_mine.ipynb", verdicts)
    assert claim.refused or (claim.lesson, claim.learner, claim.contradicted) == ("10", "ann", ())


SCRIPT = (SUBMIT / "train.sh").read_bytes()
PIECES = ["#!/bin/bash", "#SBATCH", "-N", "--nodes=two", "--time=2d", "--output=/", "--output=" + "x" * 300 + "/%j", "--mem=64",
          "srun", "torchrun", "--nnodes=2", "$(", ")", "`", "'", '"', "<<END", "END", "\\", "\n", "\r\n", "\n#SBATCH ", "((",
          "))", "|", "&&", "{", "}", "x=(", "export A=", "source common.sh", "source " + "y" * 300, "\0", "#", "$@", "trap", ";",
          "--signal=B:USR1@60", "course_on_ranks train", "--gpus-per-node=" + "9" * 5000, "--nodes=0", "--gpu-bind=", "-", "--",
          "-n", "\x0c", "\u2028"]


@example(raw=b"#!/bin/bash\n" + b"$(" * 5000)
@example(raw=b"#!/bin/bash\n" + b"<(a " * 200)
@example(raw=b"#!/bin/bash\n#SBATCH --output=/\n#SBATCH --error=..\n")
@fuzz(raw=damaged(SCRIPT) | st.lists(st.sampled_from(PIECES) | WORDS, max_size=20).map(
    lambda words: " ".join(words).encode("utf-8", "replace")) | st.binary(max_size=64))
def test_batch_scripts(place, raw):
    (place / "job.sh").write_bytes(raw)
    with suppress(CourseError):
        for finding in sbatch.lint(sbatch.read(place / "job.sh", ["--nodes=2", "--gpus-per-node=4"])):
            assert finding.text and 0 <= finding.line <= raw.count(b"\n") + 1
