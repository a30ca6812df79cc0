"""Library objects as exercises: answers, blanks, built copies."""

import ast
import subprocess
import sys

import pytest

from course.lab.authoring import stubs
from course.lab.checks.exercise import all_exercises, right
from course.utils.errors import CourseError
from tests.lab import classroom

OBJECTS = sorted({dotted for exercise in all_exercises().values() for dotted in exercise.objects})


def test_answer_is_the_source_with_its_imports():
    text = stubs.answer_source("course.training.step.eager")
    assert "from course.training.step import Compute, Progress, global_weight, split_microbatches" in text
    assert "    return compute\n" in text and "type: ignore" not in text


def test_blank_keeps_signature_docstring_and_shapes_and_nothing_of_the_body():
    text = classroom.blank_source("course.models.vit.RelativeL2")
    assert "def forward(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:           # (B, T, P)" in text
    assert '"""1 for each real sample, 0 for padding, (B,)."""' in text
    assert text.count(stubs.STUB) == 2
    assert "self.norm(output" not in text and "where" not in text and "self.norm = SampleNorm()" in text


def test_marked_answer_without_its_markers_is_the_answer():
    for dotted in OBJECTS:
        marked = stubs.answer_source(dotted, marked=True)
        lines = [line for line in marked.splitlines() if stubs.BEGIN not in line and stubs.END not in line]
        assert "\n".join(lines) + "\n" == stubs.answer_source(dotted)


@pytest.mark.parametrize("dotted", OBJECTS)
def test_answers_and_blanks_run_on_their_own(dotted):
    for source in (stubs.answer_source(dotted), classroom.blank_source(dotted)):
        space = {"__name__": "answer"}
        exec(compile(source, dotted, "exec"), space)
        assert dotted.rpartition(".")[2] in space


@pytest.mark.parametrize("name", [name for name, exercise in all_exercises().items() if len(exercise.objects) > 1])
def test_objects_of_one_cell_are_below_one_set_of_imports(name):
    exercise = all_exercises()[name]
    tree = ast.parse(right(exercise))
    there = [isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body]
    assert there == sorted(there, reverse=True)
    imported = [alias.asname or alias.name for node in tree.body[:sum(there)] for alias in node.names]
    assert len(set(imported)) == len(imported) and not set(imported) & set(exercise.names)
    for source in (right(exercise), classroom.blank_source(*exercise.objects)):
        space = {"__name__": "answer"}
        exec(compile(source, name, "exec"), space)
        assert set(exercise.names) < set(space)


@pytest.mark.slow
def test_whatever_an_exercise_needs_can_be_imported_from_a_copy(tmp_path):
    stubs.build_blanked_package((), tmp_path)
    modules = [f"course.lab.{part}.{path.stem}" for part in ("exercises", "instruments", "figures")
               for path in sorted((stubs.PACKAGE / "lab" / part).glob("*.py"))]
    program = f"import course, importlib\nfor name in {modules}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", program],
                          env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_built_copy_is_blank_there_and_only_there(tmp_path):
    stubs.build_blanked_package(["course.training.step.eager"], tmp_path)
    program = ("import course.training.step\ntry:\n    course.training.step.eager(1, 2, 3, 4)\n"
               "except NotImplementedError as error:\n    print(error, course.training.step.__file__)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path,
                          env={"PYTHONPATH": str(tmp_path)}, check=True)
    assert done.stdout.strip() == f"not implemented yet {tmp_path}/course/training/step.py"
    original = (stubs.PACKAGE / "training" / "step.py").read_text().splitlines()
    copy = (tmp_path / "course/training/step.py").read_text().splitlines()
    first, last = stubs.find_object("course.training.step.eager").lines
    assert copy[:first] == original[:first] and copy[-(len(original) - last):] == original[last:]
    assert not (tmp_path / "course/lab/mistakes").exists()


@pytest.mark.parametrize("name", ["course.nowhere.thing", "course.training.step.nothing", "torch.nn.Linear", "eager"])
def test_an_unknown_object_is_a_sentence(name):
    with pytest.raises(CourseError, match=name.replace(".", r"\.")):
        stubs.find_object(name)


def test_a_body_without_docstring_is_blank_from_its_first_line(monkeypatch, tmp_path):
    module = tmp_path / "course_sample.py"
    module.write_text("def f(\n    a: int = 3,\n) -> int:\n    # a comment that tells all\n    return a\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = classroom.blank_source("course_sample.f")
    assert "tells all" not in text and "return a" not in text and text.count(stubs.STUB) == 1
