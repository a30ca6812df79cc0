"""nbgrader itself assigns, collects and grades our notebooks."""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbgrader.api import Gradebook
from nbgrader.apps import NbGraderAPI
from traitlets.config import Config

from course.lab.authoring import lessons, stubs
from tests.lab import classroom
from tests.lab.test_lessons import MASTER

STUDENTS = {"ann": classroom.answer("roofline"), "bob": "", "eve": classroom.mistaken("roofline", 0)}


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """An nbgrader course whose assignment is the instructor's notebook of a small lesson."""
    root = tmp_path_factory.mktemp("nbgrader")
    (root / "42_answer.py").write_text(MASTER)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"     # it calls alembic by its name
    config = Config()
    config.CourseDirectory.root = str(root)
    config.CourseDirectory.db_assignments = [{"name": "lesson"}]
    config.ClearSolutions.code_stub = {"python": stubs.STUB}                      # as docs/instructors.md says
    api = NbGraderAPI(config=config)
    classroom.hand_in(root / "source/lesson/42_answer.ipynb", lessons.instructor_notebook(root / "42_answer.py"))
    outcome = api.generate_assignment("lesson")
    assert outcome["success"], outcome["log"]
    return root, api


def test_what_nbgrader_assigns_is_our_blank_notebook(course):
    root, _ = course
    released = nbformat.read(root / "release/lesson/42_answer.ipynb", as_version=4)
    ours = lessons.learner_notebook(root / "42_answer.py")
    assert [cell.source for cell in released.cells] == [cell.source for cell in ours.cells]
    for theirs, mine in zip(released.cells, ours.cells, strict=True):
        wanted = mine.metadata.get("nbgrader", {})
        assert {key: theirs.metadata.get("nbgrader", {}).get(key) for key in wanted} == wanted


@pytest.mark.parametrize("lesson", ["00", "01"])
def test_our_lessons_pass_nbgraders_validation_of_metadata(lesson):
    from nbgrader.nbgraderformat import MetadataValidator

    master, = lessons.masters([lesson])
    for make in (lessons.learner_notebook, lessons.instructor_notebook):
        for cell in make(master).cells:
            MetadataValidator().validate_cell(cell)


@pytest.mark.slow
def test_nbgrader_collects_and_grades(course):
    root, api = course
    for student, source in STUDENTS.items():
        notebook = nbformat.read(root / "release/lesson/42_answer.ipynb", as_version=4)
        cell, = [c for c in notebook.cells if c.metadata.get("nbgrader", {}).get("grade_id") == "roofline"]
        cell.source = source or cell.source
        classroom.hand_in(root / f"submitted/{student}/lesson/42_answer.ipynb", notebook)
        outcome = api.autograde("lesson", student)
        assert outcome["success"], outcome["log"]
    with Gradebook(f"sqlite:///{root}/gradebook.db") as gradebook:
        scores = {s.student.id: (s.score, s.max_score) for s in gradebook.assignment_submissions("lesson")}
    assert scores == {"ann": (1.0, 1.0), "bob": (0.0, 1.0), "eve": (0.0, 1.0)}
