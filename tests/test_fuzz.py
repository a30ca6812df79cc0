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
import shutil
import signal
import string
import tarfile
import warnings
import zipfile
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
import zstandard

from course import config
from course.checkpoint import checkpoint
from course.checkpoint import index as checkpoint_index
from course.config import schema
from course.convert import command, huggingface
from course.data import Latents
from course.data.text import bpe, documents, indexed_files
from course.data.text.sequences import Sequences
from course.data.weather import layout
from course.data.weather.pairs import Pairs
from course.lab.checks import notebook_cells
from course.lab.checks.check import Fact, Verdict
from course.lab.grading import on_cluster
from course.lab.grading.submissions import exercises_of_lesson
from course.lab.slurm import lint, script_parser
from course.models import DiTConfig, ViTConfig, build_model
from course.parallel import World, initialize_serial, serial_layout
from course.planner import collectives, hardware, host_overhead, kernel_efficiency
from course.training import run_log
from course.utils.atomic_files import sha256
from course.utils.errors import CourseError
from tests.convert.test_convert_dit import to_theirs
from tests.convert.test_huggingface import write

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

EXAMPLES = int(os.environ.get("FUZZ", "40"))
PATIENCE = 10                                        # seconds of the processor for one file; it takes milliseconds
SUBMIT = Path(__file__).parents[1] / "submit"
ROOT = Path(config.__file__).parents[1]


def fuzz(**drawn):
    """Call a test with EXAMPLES drawn arguments, each within PATIENCE seconds of the processor."""
    def around(test):
        @functools.wraps(test)
        def watched(*arguments, **values):
            def hangs(*_):
                pytest.fail(f"a file takes more than {PATIENCE} s")     # no Exception, which a reader may catch
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

PRESET = yaml.safe_load((ROOT / "config" / "presets" / "gpt-python.yaml").read_text()) | {"base": "vit-demo"}


@nasty
@fuzz(raw=damaged((ROOT / "config" / "presets" / "gpt-python.yaml").read_bytes()) | replaced(PRESET).map(as_yaml)
      | VALUES.map(as_yaml)
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
    with pytest.raises(CourseError, match="leads back to it"):
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
           "norms": {which: {"axes": [[1e6, 1e8], SIDES], "seconds": SECONDS[:4]} for which in kernel_efficiency.NORMS},
           "all_reduce": {"2": [[1e6, 1e-4], [1e8, 1e-3]]}}
HOST = {"plain_step": 2e-3, "host": {"gpt": [0.5, 0.8, 0.6], "gpt, full": [0.5, 0.7, 1.3], "vit": "not measured"}}


@fuzz(raw=damaged(json.dumps(KERNELS).encode()) | replaced(KERNELS).map(as_json) | st.binary(max_size=64))
def test_tables_of_kernels(place, raw):
    (place / "kernels.json").write_bytes(raw)
    h200 = hardware.load("h200")
    with suppress(CourseError):
        found = kernel_efficiency.read(place / "kernels.json", h200, h200)
        taken = (found.matmul(100, 1e3, 70, "bf16"), found.attention(16, 100, 100, 64, False, "bf16"), found.memory("copy", 1e7),
                 found.norm([1e7, 1e6], 100, True, True),
                 collectives.all_reduce(1e7, collectives.group_of([(1, 2)], h200, found.curves)))
        assert all(0 < seconds < math.inf for seconds in taken)


@fuzz(raw=damaged(json.dumps(HOST).encode()) | replaced(HOST).map(as_json) | st.binary(max_size=64))
def test_tables_of_the_host(place, raw):
    (place / "host.json").write_bytes(raw)
    with suppress(CourseError):
        found = host_overhead.read(place / "host.json")
        assert found.plain_step > 0 and all(math.isfinite(cost.of(2, 2)) for cost in found.rows.values())


# ---- data

def token_files(folder: Path) -> tuple[bytes, bytes]:
    """The bytes of a .idx and its .bin, of three documents."""
    with indexed_files.document_writer(folder / "right", 1000) as writer:
        for length in (5, 0, 9):
            writer.add(np.arange(length))
    return (folder / "right.idx").read_bytes(), (folder / "right.bin").read_bytes()


@fuzz(data=st.data())
def test_token_files(place, data):
    index, tokens = token_files(place)
    (place / "mine.idx").write_bytes(data.draw(damaged(index) | st.binary(max_size=80)))
    (place / "mine.bin").write_bytes(data.draw(st.just(tokens) | damaged(tokens)))
    with suppress(CourseError):
        documents = indexed_files.Documents(place / "mine")
        assert sum(len(documents[i]) for i in range(len(documents))) == len(documents.tokens)


def year_file() -> bytes:
    """A small HDF5 file as the course's data has them."""
    held = io.BytesIO()
    with h5py.File(held, "w") as file:
        fields = layout.create_year(file, 3, ["u10", "v10"], layout.latitudes(4), layout.longitudes(8))
        fields[:] = 2 + np.arange(8) % 2 / 2         # about 1, once it is normalized by the statistics below: so they match
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

    Attributes of texts of any length are not among it: these lie in a heap, and where that is damaged (an object of 0 bytes),
    HDF5 2.0.0 looks for the next without an end, in C, where neither Python nor Ctrl-C is heard. The names of channels in files
    that the course makes are of one length, and have no heap. Those of others' files are read as they are: only another process
    could be ended, and the course starts none to look at every file, on every rank, at every start.
    """
    return damaged(whole) | damaged(whole[:2048]).map(lambda head: head + whole[2048:]) | st.binary(max_size=64)


def read_year(place, raw):
    for name in ("train", "stats"):
        (place / name).mkdir(exist_ok=True)
    (place / "train" / "1979.h5").write_bytes(raw)
    for name in ("global_means", "global_stds"):
        (place / "stats" / f"{name}.npy").write_bytes(STATISTICS)
    return Pairs(str(place), "train", 2, (4, 8)).__getitems__([0, 1])["input"]


def read_shard(place, raw, summary=None):
    (place / "latents" / "train").mkdir(exist_ok=True, parents=True)
    (place / "latents" / "latents.json").write_bytes(as_json(SUMMARY) if summary is None else summary)
    (place / "latents" / "train" / "00000.h5").write_bytes(raw)
    return Latents(str(place / "latents"), "train", (2, 4, 4), 3).__getitems__([0, 2])["latent"]


@pytest.mark.parametrize(("read", "whole"), [(read_year, YEAR), (read_shard, SHARD)], ids=["year", "shard"])
def test_what_is_damaged_below_is_read_when_it_is_whole(place, read, whole):
    assert ((read(place, whole) == 1) | (read(place, whole) == 1.5)).all()


@fuzz(raw=hdf5(YEAR))
def test_weather_files(place, raw):
    with suppress(CourseError):
        assert read_year(place, raw).shape == (2, 2, 4, 8)
    with suppress(CourseError):
        assert [len(layout.channel_names(year)) for year in layout.find_years(place, "train")] == [2]
    with suppress(CourseError):
        assert [len(layout.grid_latitudes(year)) for year in layout.find_years(place, "train")] == [4]


@fuzz(raw=hdf5(SHARD))
def test_latent_files(place, raw):
    with suppress(CourseError):
        assert read_shard(place, raw).shape == (2, 2, 4, 4)


@pytest.mark.parametrize("names", [["u10", "v10"], [b"u10", b"v10"]])
def test_names_of_channels_are_read_whatever_their_kind(place, names):
    (place / "train").mkdir(exist_ok=True)
    (place / "train" / "1979.h5").write_bytes(YEAR)
    with h5py.File(place / "train" / "1979.h5", "a") as file:
        file.attrs["channels"] = names
    assert layout.channel_names(*layout.find_years(place, "train")) == ["u10", "v10"]


def test_names_of_channels_lie_in_no_heap():
    assert b"GCOL" not in YEAR


PICKLE = b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(127) + b"\n\x80\x04."


@example(raw=PICKLE)
@example(raw=b"PK\x03\x04" + bytes(60))
@example(raw=STATISTICS.replace(b"(1, 2, 1, 1)", b"(2**40, 1, )"))
@example(raw=STATISTICS.replace(b"(1, 2, 1, 1)", b"(9" + b"9" * 9 + b",)"))
@fuzz(raw=damaged(STATISTICS) | damaged(STATISTICS[:128]).map(lambda head: head + STATISTICS[128:]) | st.binary(max_size=64))
def test_arrays(place, raw):
    (place / "values.npy").write_bytes(raw)
    with suppress(CourseError):
        assert np.issubdtype(layout.load_npy(place / "values.npy").dtype, np.number)


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
    for item in documents.items(place / "texts"):
        for text in documents.read(item, "text"):
            assert text.bad or text.text.encode() == text.data != b""


META = {"vocab": 1000, "end": 0, "splits": {"train": {"documents": 3, "tokens": 14}}}


@example(raw=b'{"vocab": Infinity}')
@example(raw=b"[" * 9000)
@fuzz(raw=damaged(as_json(META)) | replaced(META).map(as_json) | VALUES.map(as_json) | st.binary(max_size=64))
def test_what_is_said_of_tokens(place, raw):
    (place / "tokens").mkdir(exist_ok=True)
    with indexed_files.document_writer(place / "tokens" / "train", 1000) as writer:
        writer.add(np.arange(14))
    (place / "tokens" / "meta.json").write_bytes(raw)
    with suppress(CourseError):
        assert Sequences(str(place / "tokens"), "train", 4, 1000).__getitems__([0])["tokens"].shape == (1, 5)


@example(raw=as_json(SUMMARY | {"scale": math.inf}))
@fuzz(raw=damaged(as_json(SUMMARY)) | replaced(SUMMARY).map(as_json) | VALUES.map(as_json) | st.binary(max_size=64))
def test_what_is_said_of_latents(place, raw):
    with suppress(CourseError):
        assert read_shard(place, SHARD, raw).shape == (2, 2, 4, 4)


# ---- checkpoints, and what `course convert` and `course sample` read

def saved_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small ViT and its optimizer, after a step."""
    small = build_model(ViTConfig(grid=(4, 4), channels=1, patch=2, dim=4, depth=1, heads=2))
    model = initialize_serial(small, 0, torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def saved(place):
    """A checkpoint, and what it was of."""
    model, optimizer = saved_model()
    saved = checkpoint.save(place / "whole", optimizer, {"step": 7, "samples": 28}, {"a": 1}, serial_layout(model))
    return saved, model, optimizer


def header_of(whole: bytes) -> int:
    """Bytes of a safetensors file before its numbers."""
    return 8 + int.from_bytes(whole[:8], "little")


def tensor_file(whole: bytes):
    """A damaged safetensors file, every other time in its header."""
    size = header_of(whole)
    return damaged(whole) | damaged(whole[:size]).map(lambda head: head + whole[size:]) | st.binary(max_size=64)


@fuzz(data=st.data())
def test_checkpoints(saved, data):
    """What has a checksum is found by it, so it is taken away: older ones have none. What is seen late is a sentence, too."""
    path, model, optimizer = saved
    index = json.loads((path / "index.json").read_bytes())
    del index["sha256"]

    def of_tensors(found: Any) -> bytes:
        return as_json(index | {"tensors": found})

    numbers = (path / "rank00000.safetensors").read_bytes()
    folder = path.parents[1] / "mine" / path.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.json").write_bytes(data.draw(st.just(as_json(index)) | damaged(as_json(index)) | replaced(index).map(as_json)
                                                  | replaced(index["tensors"]).map(of_tensors) | VALUES.map(as_json)))
    (folder / "rank00000.safetensors").write_bytes(data.draw(st.just(numbers) | tensor_file(numbers)))
    with suppress(CourseError), mock.patch.object(checkpoint_index, "check_file", lambda *_: None):
        found, read = checkpoint.newest(folder.parent, lambda text: None)
        assert found == folder
        checkpoint.load(folder, read, model, serial_layout(model), optimizer)
        checkpoint.read_named(folder, read, list(read["tensors"]))


@fuzz(data=st.data())
def test_checkpoints_that_have_their_checksums(saved, data):
    """They are what was written, or a sentence."""
    path, *_ = saved
    good = checkpoint.read_index(path)
    folder = path.parents[1] / "mine" / path.name
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: (path / name).read_bytes() for name in ("index.json", "rank00000.safetensors")}
    which = data.draw(st.sampled_from(sorted(whole)))
    for name, content in whole.items():
        (folder / name).write_bytes(data.draw(damaged(content)) if name == which else content)
    with suppress(CourseError):
        assert {**checkpoint.read_index(folder), "sha256": ""} == {**good, "sha256": ""}


def converted(place, path, *given):
    """Make a run of weights; what there is of it then."""
    shutil.rmtree(place / "runs", ignore_errors=True)
    with suppress(CourseError), mock.patch("builtins.print"):
        command.convert(World(), path, place / "runs" / "mine" / "run", given)
        assert (place / "runs/mine/run/config.yaml").is_file()
    assert not list((place / "runs").glob("*/.*"))   # of one that failed nothing stays
    return (place / "runs/mine/run").is_dir()


GPT2 = {"model_type": "gpt2", "vocab_size": 16, "n_positions": 4, "n_embd": 8, "n_layer": 1, "n_head": 2,
        "layer_norm_epsilon": 1e-5}
LLAMA = {"model_type": "llama", "vocab_size": 16, "max_position_embeddings": 4, "hidden_size": 8, "intermediate_size": 8,
         "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "hidden_act": "silu",
         "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 64}}
WORDS_FILE = bpe.train(iter(["one two three"]), 260).to_str().encode()
OF_WORDS = json.loads(WORDS_FILE)


@pytest.fixture(scope="module")
def hugging_face(place):
    """A GPT-2 as transformers writes it: the bytes of its weights and its config.json."""
    c = huggingface.config_of(GPT2)
    model = initialize_serial(build_model(c), 0, torch.device("cpu"))
    write(place / "gpt2", model)
    return {name: (place / "gpt2" / name).read_bytes() for name in ("model.safetensors", "config.json")}


def test_what_is_converted_below_is_converted_when_it_is_whole(place, hugging_face):
    assert converted(place, place / "gpt2")
    (place / "dit.pt").write_bytes(DIT_FILE)
    assert converted(place, place / "dit.pt", "model.heads=2")


def odd_tensors() -> list[torch.Tensor]:
    """What nobody expects where a weight should be."""
    return [torch.zeros(shape) for shape in [(), 0, (1, 0, 3), 8, (2, 8), (1, 2, 3, 4), (8, 1, 2, 2)]] + [
        torch.full((8,), math.nan),
        *(torch.zeros(8, 8).to(kind) for kind in (torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn))]


def odder() -> list[Any]:
    """What a pickle can hold besides, in part no tensors as we know them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")              # some are in beta, or on their way out
        return [*odd_tensors(), torch.eye(8).to_sparse(), torch.eye(8).to_sparse_csr(), torch.zeros(8, device="meta"),
                torch.zeros(1).expand(2**40), torch.zeros(1).expand(8, 1, 2, 2),
                torch.quantize_per_tensor(torch.zeros(8), 1.0, 0, torch.qint8),
                torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]), 3, None, "x", [1], {}]


CHANGES = st.lists(st.tuples(st.integers(0, 99), st.sampled_from(["replace", "replace", "remove", "rename"]), st.integers(0, 99),
                             WORDS), min_size=1, max_size=3)


def changed(state, changes, odd):
    """Tensors by name, some of them others, gone, or under other names."""
    state = dict(state)
    for which, what, other, word in changes:
        name = sorted(state, key=str)[which % len(state)]
        if what == "replace":
            state[name] = odd[other % len(odd)]
        elif what == "rename":
            state[word or other] = state.pop(name)
        elif len(state) > 1:
            del state[name]
    return state


@fuzz(data=st.data())
def test_weights_of_hugging_face(place, hugging_face, data):
    weights, said = (hugging_face[name] for name in ("model.safetensors", "config.json"))
    folder = place / "theirs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_bytes(said)
    state = safetensors.torch.load(weights)
    where = {"metadata": {}, "weight_map": dict.fromkeys(state, "a.safetensors")}
    index = damaged(as_json(where)) | replaced(where).map(as_json) | VALUES.map(as_json)
    for name, content in data.draw(st.sampled_from([
            {"model.safetensors": tensor_file(weights)},
            {"model.safetensors": CHANGES.map(lambda changes: safetensors.torch.save(
                {str(name): x.clone().contiguous() for name, x in changed(state, changes, odd_tensors()).items()}))},
            {"model.safetensors": st.just(weights), "tokenizer.json": damaged(WORDS_FILE)},
            {"model.safetensors.index.json": index, "a.safetensors": st.just(weights)}])).items():
        (folder / name).write_bytes(data.draw(content))
    converted(place, folder)


def test_a_tokenizer_that_is_no_text_is_a_sentence(place, hugging_face):
    (place / "gpt2" / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(CourseError, match=r"tokenizer.json cannot be read as text"):
        command.convert(World(), place / "gpt2", place / "runs" / "mine" / "other")
    (place / "gpt2" / "tokenizer.json").unlink()


@fuzz(raw=damaged(as_json(GPT2)) | replaced(GPT2).map(as_json) | replaced(LLAMA).map(as_json) | st.binary(max_size=64))
def test_configurations_of_hugging_face(place, hugging_face, raw):
    folder = place / "theirs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_bytes(raw)
    (folder / "model.safetensors").write_bytes(hugging_face["model.safetensors"])
    converted(place, folder)


def dit_state() -> dict[str, torch.Tensor]:
    """A small DiT by facebookresearch/DiT's names."""
    c = DiTConfig(latent=(1, 4, 4), patch=2, dim=8, depth=1, heads=2, mlp_ratio=2.0, classes=3)
    model = initialize_serial(build_model(c), 0, torch.device("cpu"))
    return to_theirs({name: p.detach() for name, p in model.named_parameters()}, c)


def pickle_file(state) -> bytes:
    """A file of PyTorch's."""
    held = io.BytesIO()
    torch.save(state, held)
    return held.getvalue()


def repacked(whole: bytes, instructions: bytes) -> bytes:
    """A file of PyTorch's with other instructions for making what is in it."""
    held = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(held, "w") as new:
        for name in old.namelist():
            new.writestr(name, instructions if name.endswith("data.pkl") else old.read(name))
    return held.getvalue()


DIT = dit_state()
DIT_FILE = pickle_file({"ema": DIT})
with zipfile.ZipFile(io.BytesIO(DIT_FILE)) as opened:
    INSTRUCTIONS = opened.read(next(name for name in opened.namelist() if name.endswith("data.pkl")))
BOMB = b"\x80\x02cposix\nsystem\nX\x09\0\0\0touch RAN\x85R."


ODD_PICKLES = CHANGES.map(lambda changes: pickle_file(changed(DIT, changes, odder())))


@example(raw=pickle_file(DIT | {3: torch.zeros(1)}))
@example(raw=pickle_file(DIT | {"blocks.0.mlp.fc1.weight": DIT["blocks.0.mlp.fc1.weight"].to_sparse()}))
@example(raw=pickle_file(DIT | {"blocks.0.mlp.fc1.weight": torch.zeros(16, 1)}))
@example(raw=pickle_file(DIT | {"pos_embed": torch.zeros(())}))
@example(raw=BOMB)
@example(raw=repacked(DIT_FILE, BOMB))
@fuzz(raw=damaged(DIT_FILE) | damaged(INSTRUCTIONS).map(functools.partial(repacked, DIT_FILE))
      | ODD_PICKLES | ODD_PICKLES | st.binary(max_size=64))
def test_weights_of_dit(place, raw):
    (place / "dit.pt").write_bytes(raw)
    converted(place, place / "dit.pt", "model.heads=2")


# files that the package's Rust panics over, in reading and in use, and tokenizers that do not know every text
PANICS = [{"model": OF_WORDS["model"] | {"continuing_subword_prefix": "#" * 9}},
          {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}},
          {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
          {"decoder": {"type": "Strip", "content": "n", "start": 1, "stop": 1}},
          {"added_tokens": [], "model": {"type": "WordLevel", "vocab": {}, "unk_token": "?"}},
          {"added_tokens": [], "model": {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}}]


def panics(test):
    """Run a test on all of `PANICS`, too."""
    for change in PANICS:
        test = example(raw=as_json(OF_WORDS | change))(test)
    return test


@panics
@fuzz(raw=damaged(WORDS_FILE) | replaced(OF_WORDS).map(as_json) | st.binary(max_size=64))
def test_tokenizers(place, raw):
    (place / "tokenizer.json").write_bytes(raw)
    with suppress(CourseError):
        words = bpe.load(place / "tokenizer.json")
        assert isinstance(bpe.text(words, bpe.ids(words, "one two")), str)
        end = bpe.end_token(words)
        assert 0 <= end < bpe.size(words)
        known = bpe.encode(words, ["one two"], end)[0]
        assert known.max() < bpe.size(words)



RECORDS = [{"step": step, "loss": 3.5, "lr": 1e-3, "valid_loss": "nan"} for step in (5, 10, 15)]
NEXT = {"step": 11, "loss": 3.0, "lr": 1e-3, "grad_norm": 1.0, "step_ms": 9.0, "samples_per_s": 9.0, "skipped_steps": 0}


def in_lines(values) -> bytes:
    return b"".join(as_json(value) + b"\n" for value in values)


@fuzz(raw=damaged(in_lines(RECORDS)) | replaced(RECORDS).map(in_lines) | st.lists(VALUES, max_size=3).map(in_lines)
      | st.binary(max_size=64))
def test_records_of_a_run(place, raw):
    """What is no record of a step stays in its file, left out of what is read; a run that goes on at step 10 adds its own."""
    file = place / "metrics.jsonl"
    file.write_bytes(raw)
    before = run_log.read_metrics(file)
    with mock.patch("builtins.print"), run_log.RunLog(place, 20, 10, True, False) as told:
        told.log(NEXT)
    kept = [record for record in before if record["step"] <= 10]
    assert str(run_log.read_metrics(file)) == str([*kept, NEXT])             # as text: nan is not nan


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
        answer = notebook_cells.definitions(notebook_cells.read_contents(place / "01_mine.ipynb").code, ["training_step"])
        assert answer.problem or "training_step" in answer.source


@example(cell="%%")
@example(cell="%%time")
@example(cell="training_step = f'{x!z}'")
@fuzz(cell=st.sampled_from(CELLS).flatmap(lambda cell: damaged(cell.encode())).map(lambda raw: raw.decode("utf-8", "replace"))
      | st.text(string.printable, max_size=40).map("training_step = {}".format))
def test_cells(place, cell):
    answer = notebook_cells.definitions([cell, "training_step = 1"], ["training_step"])
    assert answer.problem or answer.source


EXERCISES = exercises_of_lesson("10")
RESULT = {"schema": on_cluster.SCHEMA, "lesson": "10", "notebook": "", "file": "10_mine.ipynb", "checked": "2026-11-22T10:00:00",
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
    with mock.patch.object(on_cluster, "describe_job", lambda number: {"StartTime": "2026-11-22T09:00:00", "UserId": "ann(1)"}):
        claim = on_cluster.judge_result(place / "10_mine.result.json", "ann", "10", place / "10_mine.ipynb", verdicts)
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
        for finding in lint.lint(script_parser.read_script(place / "job.sh", ["--nodes=2", "--gpus-per-node=4"])):
            assert finding.text and 0 <= finding.line <= raw.count(b"\n") + 1
