"""Under torchrun, an error of all ranks is said once, and torchrun prints no traceback after it."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from course.cli import torchrun

ROOT = Path(__file__).parents[2]
HANDLERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torchrun.handlers"]


def test_a_sentence_is_new_once_an_attempt(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    asked = ["one", "one", "another"]
    assert [torchrun.is_first(sentence) for sentence in asked] == [True, False, True]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert torchrun.is_first("one")
    del store
    monkeypatch.delenv("MASTER_PORT")
    assert torchrun.is_first("one")                  # better twice than never


class ChildFailedError(Exception):
    def __init__(self, *codes):
        self.failures = {rank: SimpleNamespace(exitcode=code) for rank, code in enumerate(codes)}


@pytest.mark.parametrize(("error", "shown"), [(ChildFailedError(78, 78), False), (ChildFailedError(78, 1), True),
                                              (ChildFailedError(-11), True), (ValueError("x"), True)])
def test_only_what_was_said_has_no_traceback(monkeypatch, error, shown):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *all_of_it: seen.append(all_of_it))
    EntryPoint("course", HANDLERS["course"], "torchrun.handlers").load()()
    sys.excepthook(type(error), error, None)
    assert bool(seen) == shown


@pytest.mark.slow
def test_two_ranks_say_one_sentence(tmp_path):
    """With the entry point of an installed package, whatever is installed here."""
    about = tmp_path / "course_handlers-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: course-handlers\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[torchrun.handlers]\n" + "".join(f"{a} = {b}\n" for a, b in HANDLERS.items()))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m",
                           "course.cli", "train", "gpt-python", "parallel.tp=3"], capture_output=True, text=True, timeout=300,
                          check=False, env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("course: parallel.tp=3 does not divide") == 1, done.stderr
