"""`python -m course.bench.NAME` and `experiments.NAME`, with words that make no sense."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import course.bench
from course.bench.cheap_layers import cheap_layer
from course.bench.command_line import command
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
