"""Reading what learners handed in: in the sandbox, within limits, one file's fault no other's."""

import json
import os
import time

import pytest

from course.lab.checks import notebook_cells, own_notebooks
from course.lab.grading import grade, sandboxed_reading, submissions
from course.lab.grading.sandboxed_reading import SubmittedFile
from course.lab.sandbox import notebook_reader, sandbox
from course.utils.errors import CourseError
from tests.lab import classroom
from tests.lab.test_grade import marks, passing

RIGHT = "def roofline_seconds(flops, moved, peak_flops, peak_bytes):\n    return max(flops / peak_flops, moved / peak_bytes)\n"


def notebook(*sources: str, **metadata) -> str:
    blank = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    made = [blank | {"source": source} for source in sources]
    return json.dumps({"nbformat": 4, "nbformat_minor": 4, "metadata": metadata, "cells": made})


def aliases() -> str:
    """400 bytes of a script's header that mean nine gigabytes."""
    lines = ["a: &a [x,x,x,x,x,x,x,x,x]"]
    lines += [f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
    return "# ---\n# jupyter:\n" + "".join(f"#   {line}\n" for line in lines) + "# ---\n# %%\n" + RIGHT


def finallies(depth: int) -> str:
    """A cell whose compiled form doubles with each line."""
    lines = [line for k in range(depth) for line in (" " * k + "try: pass", " " * k + "finally:")]
    return "\n".join([*lines, " " * depth + "pass"])


HOSTILE = {                                          # a file, and what is said of it or of its answer
    "aliases.py": (aliases(), "takes more than"),
    "finally.ipynb": (notebook(RIGHT, finallies(25)), ""),
    "finally in the answer.ipynb": (notebook(f"{RIGHT}\n{finallies(25)}"), "nested too deeply"),
    "short lines.ipynb": (notebook("a\n" * 16_000 + RIGHT), ""),
    "many lines.ipynb": (notebook("a\n" * 30_000 + RIGHT), "more than 20000 statements"),
    "parentheses.ipynb": (notebook("(" * 100_000, RIGHT), ""),
    "parentheses in the answer.ipynb": (notebook(RIGHT + "(" * 100_000), "not valid Python"),
    "f-strings.ipynb": (notebook("x = " + "f'{" * 50 + "1" + "}'" * 50, "x = " + "-" * 100_000 + "1", RIGHT), ""),
    "brackets.ipynb": ("[" * 49_000_000, "cannot be read as a notebook"),
    "lists.ipynb": (notebook(RIGHT)[:-1] + ', "x": [' + "[]," * 16_000_000 + "[]]}", "takes more than"),
    "keys.ipynb": (notebook(RIGHT)[:-1] + ', "cells": []}', "not defined"),
    "number.ipynb": (notebook(RIGHT)[:-1] + f', "x": {"9" * 5000}}}', "cannot be read as a notebook"),
    "nul.ipynb": (notebook("x = '\0'", RIGHT), ""),
    "half a pair.ipynb": (notebook("x = '\ud800'\n" + RIGHT), "half of a surrogate pair"),
    "cells.ipynb": (notebook(*["x = 1"] * 200_000), "more than 5000 cells"),
    "cells.py": ("# %%\n# text\n" * 100_000, "more than 5000 cells"),
    "lesson.ipynb": (notebook(RIGHT, course={"lesson": ["0" * 200_000]}), ""),
    "returns.ipynb": (notebook("x = 1\ry = 2\r" + RIGHT.replace("\n", "\r")), ""),
    "pictures.ipynb": (notebook(RIGHT)[:-1] + f', "x": "{"A" * 20_000_000}"}}', ""),
}


@pytest.mark.slow
def test_hostile_files_are_read_within_limits_and_the_others_as_ever(tmp_path, monkeypatch):
    """All of one learner in one start of the sandbox, none of them in this process."""
    for inside in ("read_contents", "load_notebook", "Program"):
        monkeypatch.setattr(notebook_cells, inside, lambda *_, **how: pytest.fail("this is foreign"))
    files = [tmp_path / f"00_{name}" for name in (*HOSTILE, "right.ipynb")]
    for path, (content, _) in zip(files, [*HOSTILE.values(), (notebook(RIGHT), "")], strict=True):
        path.write_text(content)
    begin = time.monotonic()
    found = sandboxed_reading.read_all([SubmittedFile(path, path.name, "00") for path in files])
    assert time.monotonic() - begin < 120
    for one, (name, (_, says)) in zip(found, HOSTILE.items(), strict=False):
        problem = one.problem or one.answers["roofline"].problem
        assert not one.failure and (says in problem if says else not problem) and bool(says) == bool(problem), (name, one)
        assert says or "def roofline_seconds" in one.answers["roofline"].source, name
        assert len(problem) < 400, name
    assert found[-1].lesson == "00" and found[-1].answers["roofline"].source == RIGHT.rstrip("\n") + "\n"


@pytest.mark.slow
def test_a_file_that_takes_too_long_is_named_and_the_next_ones_are_read(tmp_path):
    for name, content in (("1", notebook(RIGHT)), ("2", notebook("%time x\n" * 19_000, RIGHT)), ("3", notebook(RIGHT))):
        (tmp_path / f"{name}.ipynb").write_text(content)
    found = sandboxed_reading.read_all([SubmittedFile(tmp_path / f"{name}.ipynb", name, "00") for name in "123"])
    assert [bool(one.answers) for one in found] == [True, False, True]
    assert found[1].problem.startswith("takes more than 10 seconds to read") and not found[1].failure


def fake(*ends: sandbox.Outcome, seconds: float = 1.0):
    """A reader that writes down one file each time, and ends so."""
    left = list(ends)

    def started(folder, limits):
        (folder / "began").touch()
        number = json.loads((folder / "job.json").read_text())["files"][0][0]
        (folder / f"{number}.json").write_text(json.dumps({"lesson": "00", "answers": {}, "seconds": seconds}))
        return left.pop(0) if left else sandbox.Outcome(True, "", "", 1.0)

    return started


def ended(text: str, late: bool = False) -> sandbox.Outcome:
    return sandbox.Outcome(False, text, "", 1.0, late)


@pytest.mark.parametrize(("how", "problem", "failure"), [
    (ended("it crashed: segmentation fault (signal 11)"), "makes Python stop", ""),
    (ended("it crashed: profiling timer expired (signal 27)"), "takes more than 10 seconds", ""),
    (ended("it crashed: killed (signal 9); perhaps this machine ran out of memory"), "", "ran out of memory"),
    (ended("it ran for more than 60 seconds and was stopped", late=True), "", "too busy")])
def test_what_ends_the_reader_is_the_files_fault_or_the_machines(tmp_path, monkeypatch, how, problem, failure):
    monkeypatch.setattr(sandboxed_reading, "start_reader", fake(how))
    for name in "12":
        (tmp_path / f"{name}.ipynb").write_text("{}")
    first, last = sandboxed_reading.read_all([SubmittedFile(tmp_path / f"{name}.ipynb", name, "00") for name in "12"])
    assert not last.problem and not last.failure                     # the newest is read first
    assert problem in first.problem and failure in first.failure and bool(first.problem) != bool(first.failure)


def test_a_learners_files_take_so_long_and_no_longer(tmp_path, monkeypatch):
    crash = ended("it crashed: segmentation fault (signal 11)")
    monkeypatch.setattr(sandboxed_reading, "start_reader", fake(*[crash] * 99, seconds=9.0))
    monkeypatch.setattr(sandboxed_reading, "MAX_SECONDS", 50.0)
    for number in range(40):
        (tmp_path / f"{number}.ipynb").write_text("{}")
    found = sandboxed_reading.read_all([SubmittedFile(tmp_path / f"{number}.ipynb", str(number), "00") for number in range(40)])
    late = [one for one in found if "take more than 50 seconds to read" in one.problem]
    assert len(late) >= 34 and not found[-1].problem
    monkeypatch.setattr(sandboxed_reading, "start_reader", fake())
    monkeypatch.setattr(sandboxed_reading, "MAX_BYTES", 7)
    found = sandboxed_reading.read_all([SubmittedFile(tmp_path / f"{number}.ipynb", str(number), "00") for number in range(4)])
    assert [bool(one.problem) for one in found] == [True, False, False, False] and "may have" in found[0].problem


def test_what_is_no_plain_file_is_not_opened(tmp_path):
    (tmp_path / "file").write_text("{}")
    (tmp_path / "link.ipynb").symlink_to("file")
    os.mkfifo(tmp_path / "pipe.ipynb")
    (tmp_path / "folder.ipynb").mkdir()
    for name in ("link", "pipe", "folder"):
        assert sandboxed_reading.read_one(SubmittedFile(tmp_path / f"{name}.ipynb", name, "00")).failure


@pytest.mark.parametrize("told", [
    "[" * 10_000, "[]", "{}", '{"lesson": 3, "answers": {}, "seconds": 1.0}', '{"answers": {"none": {}}, "seconds": 1.0}',
    '{"answers": [], "seconds": 1.0}', '{"answers": {}, "seconds": "1"}', '{"answers": {"roofline": {}}, "seconds": 1.0}',
    '{"answers": {"roofline": {"pieces": [{"cell": "a", "line": 0, "text": "b"}], "problem": "", "broken": false, '
    '"imported": false}}, "seconds": 1.0}', '{"problem": [], "answers": {}, "seconds": 1.0}'])
def test_what_the_reader_says_is_not_believed_either(tmp_path, told):
    (tmp_path / "0.json").write_text(told)
    found = {0: sandboxed_reading.Reading("a.ipynb", "d", "00")}
    assert sandboxed_reading.accept_result(tmp_path, 0, found,
                                           0.0) == 0.0 and "damaged" in found[0].problem and not found[0].answers


def test_somebody_elses_notebook_is_read_in_the_sandbox_and_ones_own_here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    mine, theirs = (classroom.hand_in(tmp_path / name / "00_start_here.ipynb", classroom.notebook("00", roofline=RIGHT))
                    for name in ("notebooks", "in"))
    own_notebooks.remember_course(tmp_path)
    read, contents = [], notebook_cells.read_contents
    monkeypatch.setattr(notebook_cells, "read_contents", lambda path: read.append(path) or contents(path))
    assert submissions.read_file(mine).answers == submissions.read_file(theirs).answers and read == [mine]
    theirs.write_text("{")
    with pytest.raises(CourseError, match=rf"^{theirs} cannot be read as a notebook \(JSONDecodeError\): open it in JupyterLab"):
        submissions.read_file(theirs)


@pytest.mark.slow
def test_a_class_is_graded_without_parsing_anything_of_it_here(tmp_path, monkeypatch, capsys):
    passing(monkeypatch)
    for number, name in enumerate(("aliases.py", "many lines.ipynb", "brackets.ipynb", "right.ipynb")):
        (tmp_path / "in" / f"learner {number}").mkdir(parents=True)
        content = notebook(RIGHT) if name == "right.ipynb" else HOSTILE[name][0]
        (tmp_path / "in" / f"learner {number}" / f"00_{name}").write_text(content)
    for inside in ("read_contents", "load_notebook", "Program"):
        monkeypatch.setattr(notebook_cells, inside, lambda *_, **how: pytest.fail("this is foreign"))
    grade.main(tmp_path / "in", tmp_path / "out")
    assert {name: row["points"] for name, row in marks(tmp_path / "out").items()} == {
        "learner 0": "0", "learner 1": "0", "learner 2": "0", "learner 3": "2"}
    told = capsys.readouterr().out
    for number, says in enumerate(("takes more than", "more than 20000 statements", "cannot be read as a notebook")):
        assert says in told and told.index(f"reading learner {number}") < told.index(says), told
    monkeypatch.setattr(sandboxed_reading, "start_reader", lambda *_: pytest.fail("all of it was graded before"))
    grade.main(tmp_path / "in", tmp_path / "out")
    monkeypatch.setattr(grade, "check_versions", lambda lesson: {"roofline": "another"})
    with pytest.raises(pytest.fail.Exception):
        grade.main(tmp_path / "in", tmp_path / "out")


def test_the_reader_knows_a_lesson_by_name_or_else_by_the_metadata():
    lessons = {"00": {"roofline": [("roofline_seconds",), ("x.roofline_seconds",)]}, "01": {"other": [("g",), ("x.g",)]}}
    for named, told, code, lesson in (("00", "", "x", "00"), ("", "01", "x", "01"), ("00", "01", "def g(): 0", "01"),
                                      ("00", "01", RIGHT, "00"), ("00", "99", "x", "00"), ("", "", RIGHT, "")):
        assert notebook_reader.choose_lesson(named, notebook_cells.Contents((code,), told), lessons) == lesson


def test_no_room_to_read_a_notebook_is_nobodys_fault_and_tried_again(tmp_path, monkeypatch, capsys):
    passing(monkeypatch)
    works, failed = sandboxed_reading.read_all, []

    def several(files, *more, **how):
        if files[0].name.startswith("bob") and not failed:
            failed.append(files)
            raise OSError(28, "No space left on device")
        return works(files, *more, **how)

    monkeypatch.setattr(sandboxed_reading, "read_all", several)
    for name in ("ann", "bob"):
        classroom.hand_in(tmp_path / "in" / name / "00_start_here.ipynb", classroom.notebook("00"))
    grade.main(tmp_path / "in", tmp_path / "out")
    assert {name: row["points"] for name, row in marks(tmp_path / "out").items()} == {"ann": "2", "bob": "2"} and failed
    told = capsys.readouterr().out
    assert "No space left on device" in told and "grading bob, lesson 00 again, alone" in told


def test_only_the_last_notebook_of_a_lesson_keeps_its_code(tmp_path):
    """Else a learner's notebooks, each with a megabyte of code, would fill the memory of who grades."""
    for number in range(3):
        (tmp_path / f"{number}.ipynb").write_text(notebook(RIGHT, course={"lesson": "00"}))
    found = sandboxed_reading.read_all([SubmittedFile(tmp_path / f"{number}.ipynb", str(number), "") for number in range(3)],
                                       last=True)
    assert [each.lesson for each in found] == ["00"] * 3
    assert [bool(each.answers) for each in found] == [False, False, True]
