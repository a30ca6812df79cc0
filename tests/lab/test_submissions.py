"""Checking a file: the words for whoever wrote it and for whoever is graded."""

from pathlib import Path

import pytest

from course.lab.authoring import stubs
from course.lab.checks import notebook_cells, render
from course.lab.checks.exercise import find
from course.lab.grading import sandboxed_reading
from course.lab.grading.submissions import check_file, judge_exercise
from tests.lab import classroom


def read(**answers):
    """The blank notebook of lesson 00 with these answers, as it is read."""
    return sandboxed_reading.read_from_contents(Path("00_start_here.ipynb"),
                                         notebook_cells.notebook_contents(classroom.notebook("00", **answers)), "00")


@pytest.mark.parametrize(("source", "hidden", "hint"), [
    ("def roofline_seconds(f, m, p, b):\n    return max(f / p, m / b\n", False, "fix that line"),
    ("def roofline_seconds(f, m, p, b):\n    return max(f / p, m / b\n", True, "fix that line"),
    ("print('later')\n", False, "write the exercise's cell"),
    ("print('later')\n", True, "run the exercise's cell"),
])
def test_an_answer_that_cannot_be_run_is_told_to_whom_it_concerns(source, hidden, hint):
    found = judge_exercise(find("roofline"), read(roofline=source), 5, hidden)
    assert found.hint.startswith(hint) and ("hand it in" in found.hint) == hidden
    text = render.text(found, color=False)
    assert "0 of 1 checks hold" in text and "<unknown>" not in text
    assert "line 2, `return max(f / p, m / b`" in text or "roofline_seconds is not defined" in text


def test_a_learners_file_is_told_the_cell_and_the_line(tmp_path):
    broken = "import math\n\ndef roofline_seconds(f, m, p, b):\n    retrun max(f / p, m / b)\n"
    path = classroom.hand_in(tmp_path / "00_start_here.ipynb", classroom.notebook("00", roofline=broken))
    found, = check_file(path, ["roofline"], 5, lambda verdict: None)
    assert found.facts[0].text.startswith("the cell with `def roofline_seconds` is not valid Python: line 4, `retrun max")
    assert "hand it in" not in found.hint and "check again" in found.hint


@pytest.mark.parametrize(("hidden", "again"), [(False, "check again"), (True, "hand it in again")])
def test_who_wrote_nothing_saves_the_notebook_since_the_file_is_read(hidden, again):
    blank_one = f"def roofline_seconds(f, m, p, b):\n    {stubs.STUB}\n"
    found = judge_exercise(find("roofline"), read(roofline=blank_one), 5, hidden)
    assert found.hint == f"replace the line that raises NotImplementedError by your code, save the notebook, and {again}"


def test_an_import_of_the_librarys_own_is_no_answer_and_told_so(monkeypatch):
    monkeypatch.setattr("course.lab.grading.submissions.check_answer", lambda *_, **how: "examined")
    own = "from course.lab.exercises.lesson00_start_here import roofline_seconds"
    found = judge_exercise(find("roofline"), read(roofline=own), 5, True)
    assert found.facts[0].text.startswith("roofline_seconds is only imported") and not found.passed
    for written in (f"{own} as theirs\nroofline_seconds = theirs", f"{own}\n{classroom.answer('roofline')}",
                    "from mine import roofline_seconds"):
        assert judge_exercise(find("roofline"), read(roofline=written), 5, True) == "examined"
