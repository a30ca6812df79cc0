"""What answers that run as another user cannot read, because it is closed to others."""

import stat
import tempfile
from pathlib import Path

import pytest

from course.lab.grading import grade
from course.lab.sandbox import closed_folders, sandbox
from tests.lab import classroom


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Submissions and solutions as they usually are, open to all; nothing that Python needs is near them."""
    for name in ("in", "solutions"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(closed_folders, "SOLUTIONS", tmp_path / "solutions")
    monkeypatch.setattr(sandbox, "layers", lambda: sandbox.Layers(False, True, {"namespaces": "no bubblewrap"}))
    return tmp_path


def test_grading_as_another_user_closes_what_answers_could_read(folders, capsys, monkeypatch):
    classroom.hand_in(folders / "in/ann/00_start_here.ipynb", classroom.notebook("00"))
    monkeypatch.setattr(grade, "grade_all", lambda new, *_: [grade.Graded(one, ()) for one in new])
    (folders / "out").mkdir(mode=0o755)
    grade.main(folders / "in", folders / "out")
    assert mode(folders / "in") == mode(folders / "solutions") == 0o750 and mode(folders / "out") == 0o700
    assert capsys.readouterr().out.count("is closed to other users from now on") == 2
    assert closed_folders.close_to_others([folders / "in", folders / "absent"]) == []             # closed already, or not there


def test_what_python_needs_is_not_closed_but_named(folders, monkeypatch):
    (folders / "in/tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folders / "in/tmp"))
    (line,) = closed_folders.close_to_others([folders / "in"])
    assert "stays open" in line and mode(folders / "in") == 0o755


@pytest.mark.parametrize("layers", [sandbox.Layers(True, True), sandbox.Layers(False, False)])
def test_other_layers_leave_modes_as_they_are(folders, monkeypatch, layers):
    monkeypatch.setattr(sandbox, "layers", lambda: layers)
    assert closed_folders.close_to_others([folders / "in"]) == [] and mode(folders / "in") == 0o755
