"""`python -m course.bench.NAME` and `experiments.NAME`, with words that make no sense."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import course.bench
from course.bench.cheap_layers import cheap_layer
from course.bench.command_line import command, reason
from course.lab.authoring.lessons import ROOT
from course.utils.errors import CourseError

PLACES = {"course.bench": Path(course.bench.__file__).parent, "experiments": ROOT / "experiments"}
STARTED = {f"{package}.{file.stem}": file for package, place in PLACES.items() for file in sorted(place.glob("*.py"))
           if '__name__ == "__main__"' in file.read_text()}


def test_there_are_some():
    assert {"experiments.loss_alignment", "experiments.loss_curves", "experiments.convergence", "experiments.fp8_speed",
            "experiments.fused_kernels", "experiments.heldout", "experiments.recorded_profiles"} <= set(STARTED)


@pytest.mark.parametrize("name", STARTED)
@pytest.mark.parametrize("words", [[], ["--smal"], ["--help"]])
def test_a_module_says_how_it_is_started(monkeypatch, name, words):
    file = STARTED[name]
    if file.stem == "convergence" and not words:
        return                                       # needs none
    monkeypatch.setattr(sys, "argv", [str(file), *words])
    with pytest.raises(SystemExit, match=f"^usage: python -m {re.escape(name)} "):
        runpy.run_path(str(file), run_name="__main__")


def test_what_is_started_makes_no_operator_again(monkeypatch):
    """Whoever has the first would compute with memory that is gone."""
    monkeypatch.setattr(sys, "argv", ["kernel_table.py"])
    with pytest.raises(SystemExit, match="usage"):
        runpy.run_path(str(Path(course.bench.__file__).parent / "kernel_table.py"), run_name="__main__")
    assert torch.ops.course.cheap_layer.default is cheap_layer._opoverload


def test_words_and_flags_and_sentences(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x/curves.py", "--small", "a.json", "b=1"])
    with command("FILE [KEY=VALUE] [--small]", least=2) as words:
        assert words == ["a.json", "b=1"]
    with pytest.raises(SystemExit, match=r"^course: no GPU$"), command("FILE [--small]"):
        raise CourseError("no GPU")
    with pytest.raises(SystemExit, match="usage"), command("FILE MORE STILL [--small]", least=3):
        raise AssertionError


def test_a_missing_package_is_named_with_its_cure(monkeypatch):
    """Not one of the course's own modules: that would be a mistake, whose traceback says where."""
    monkeypatch.setattr(sys, "argv", ["x/layouts.py", "grid"])
    absent = ModuleNotFoundError("No module named 'megatron'", name="megatron.core")
    wanted = ("this measurement needs the package megatron, which is not installed: pip install megatron-core, or leave this "
              "measurement out")
    with pytest.raises(SystemExit, match=f"^course: {wanted}$"), command("KIND"):
        raise absent
    assert reason(absent) == wanted and "pip install transformers," in reason(ModuleNotFoundError("no", name="transformers"))
    assert reason(ValueError("a" * 400)) == "ValueError: " + "a" * 300
    with pytest.raises(ModuleNotFoundError), command("KIND"):
        raise ModuleNotFoundError("No module named 'course.gone'", name="course.gone")


SMI = """#!/bin/sh
printf '0\\n1\\n2\\n3\\n4\\n5\\n'
"""
TORCHRUN = """#!/bin/sh
echo "$CUDA_VISIBLE_DEVICES $2 $7 $8" >> "$TOLD"
"""


@pytest.mark.skipif(not (shutil.which("bash") and shutil.which("timeout")), reason="needs bash and timeout")
@pytest.mark.parametrize(("visible", "on"), [
    ("", {"0 1", "1 1", "0,1 2", "2,3 2", "0,1,2,3 4"}), ("3", {"3 1"}), ("5,1,2", {"5 1", "1 1", "5,1 2"})])
def test_parallel_benchmarks_use_all_gpus_that_there_are(visible, on, tmp_path):
    """Of two kinds: two jobs of one GPU side by side, and so many of two and four as there is room for."""
    for name, text in (("nvidia-smi", SMI), ("torchrun", TORCHRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "TOLD": str(tmp_path / "told"),
                   "CUDA_VISIBLE_DEVICES": visible}
    subprocess.run(["bash", ROOT / "submit/bench_parallel.sh", tmp_path / "out", "tp", "cp"], env=environment, check=True,
                   timeout=60)
    jobs = [line.split() for line in (tmp_path / "told").read_text().splitlines()]
    assert {f"{gpus} {count}" for gpus, count, *_ in jobs} == on
    assert sorted((kind, count, Path(file).name) for _, count, kind, file in jobs) == sorted(
        (kind, count, f"{kind}_{count}.json") for kind in ("tp", "cp") for count in {one.split()[1] for one in on})
