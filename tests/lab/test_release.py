"""What learners get: everything they need, and no solutions."""

import os
import subprocess
import sys

import pytest

from course.errors import CourseError
from course.lab import blank, cells, lessons, release


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("release") / "course"
    release.main(folder)
    return folder


def test_has_what_learners_need_and_no_solutions(out):
    for name in ("README.md", "Makefile", "pyproject.toml", "constraints.txt", "course/configs/vit-demo.yaml",
                 "course/perf/results/ceilings_h200.json", "data/README.md", "tests/test_step.py"):
        assert (out / name).is_file(), name
    assert not (out / "solutions").exists() and not (out / "tests/lab").exists() and not list(out.rglob("__pycache__"))
    assert sorted(path.stem for path in (out / "notebooks").iterdir()) == [path.stem for path in lessons.masters([])]


def test_notebooks_are_blank(out):
    for path in (out / "notebooks").glob("*.ipynb"):
        notebook = cells.load(path)
        assert not any(cell.get("outputs") for cell in notebook.cells)
        assert blank.BEGIN not in path.read_text() and blank.STUB in "\n".join(cells.code(notebook))


def test_a_learner_can_check_there(out):
    """The released package alone, from the released folder."""
    done = subprocess.run([sys.executable, "-m", "course.cli", "check", "notebooks/00_start_here.ipynb"], cwd=out, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(out)})
    assert done.returncode == 1 and done.stdout.count("it is not written yet") == 2, done.stdout + done.stderr


def test_refuses_to_overwrite_and_to_release_what_is_stale(out, tmp_path, monkeypatch):
    with pytest.raises(CourseError, match="exists"):
        release.main(out)
    monkeypatch.setattr(lessons, "verify", lambda *_: ["notebooks/01.ipynb is stale"])
    with pytest.raises(CourseError, match="stale"):
        release.main(tmp_path / "new")
    assert not (tmp_path / "new").exists()
