"""Whose notebook `course check` runs where nothing isolates it."""

import os

import pytest

from course.cli.main import main
from course.lab import notebook
from course.lab.authoring import lessons, stubs
from course.lab.checks import own_notebooks
from course.lab.sandbox import sandbox
from tests.lab import classroom

RUNS = "def roofline_seconds(flops, moved, peak_flops, peak_bytes):\n    open('{}', 'w')\n    return 1.0\n"


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine where nothing isolates, and a user who works in no course yet."""
    monkeypatch.setattr(sandbox, "layers", lambda: sandbox.Layers(False, False, {"namespaces": "no bubblewrap here"}))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def check(monkeypatch, capsys, tmp_path):
    """Call `course check` on a notebook; returns (whether its code ran, what was said)."""
    def called(path, *words):
        ran = tmp_path / "ran"
        ran.unlink(missing_ok=True)
        if not path.exists():
            classroom.hand_in(path, classroom.notebook("00", roofline=RUNS.format(ran)))
        monkeypatch.setattr("sys.argv", ["course", "check", str(path), "--exercise", "roofline", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return ran.exists(), "".join([*capsys.readouterr(), str(ended.value)])

    return called


@pytest.mark.slow
def test_anothers_notebook_is_refused_where_nothing_isolates(bare, check, tmp_path):
    theirs = tmp_path / "submissions/bob/00_start_here.ipynb"
    ran, said = check(theirs)
    assert not ran and "no bubblewrap here" in said and "--trust" in said and "another person's" in said
    assert "Traceback" not in said
    ran, said = check(theirs, "--trust")
    assert ran and "every answer runs as you" in said


def test_folders_that_come_with_a_notebook_do_not_make_it_ones_own(bare, check, tmp_path, monkeypatch):
    theirs = tmp_path / "bob/notebooks/00_start_here.ipynb"
    for name in ("submit", "course", "solutions"):
        (tmp_path / "bob" / name).mkdir(parents=True)
    check(theirs)
    monkeypatch.chdir(tmp_path / "bob")
    assert not check(theirs.relative_to(tmp_path / "bob"))[0]


def test_a_link_from_ones_own_folder_is_another_file(bare, check, tmp_path):
    theirs, mine = tmp_path / "bob/00_start_here.ipynb", tmp_path / "mine/notebooks/00_start_here.ipynb"
    own_notebooks.remember_course(tmp_path / "mine")
    assert not check(theirs)[0]
    mine.parent.mkdir(parents=True)
    mine.symlink_to(theirs)
    assert not check(mine)[0]
    assert not check(tmp_path / "mine/notebooks/submissions/bob/00_start_here.ipynb")[0]      # handed in, and put there


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_what_another_user_put_into_ones_folder_is_not_ones_own(bare, check, tmp_path):
    own_notebooks.remember_course(tmp_path / "mine")
    theirs = tmp_path / "mine/notebooks/00_start_here.ipynb"
    assert check(theirs)[0]
    os.chown(theirs, 60000, 60000)
    assert not check(theirs)[0]


def test_learners_check_their_own_without_a_question(bare, check, tmp_path, monkeypatch):
    begun = tmp_path / "begun"
    for name in ("notebooks", "submit"):
        (begun / name).mkdir(parents=True)
    monkeypatch.chdir(begun / "notebooks")
    notebook.begin("00")
    notebook.begin("01")
    assert own_notebooks.list_path().read_text().count("begun") == 1
    lessons.copy(tmp_path / "copied", stubs.PACKAGE.parent)
    for course in ("begun", "copied"):
        ran, said = check(tmp_path / course / "notebooks/00_start_here_mine.ipynb")
        assert ran and "--trust" not in said and "your files" not in said
    assert own_notebooks.is_own(stubs.PACKAGE.parent / "notebooks/00_start_here.ipynb")


def test_on_ranks_only_ones_own_or_with_trust(check, tmp_path, monkeypatch):
    """Whatever isolates elsewhere: ranks of a job run answers as who started it."""
    monkeypatch.setattr(sandbox, "layers", lambda: sandbox.Layers(True, True))
    theirs = tmp_path / "bob/00_start_here.ipynb"
    check(theirs, "--list-ranks", "--trust")
    for words in (["--list-ranks"], ["--on-ranks", str(tmp_path)]):
        ran, said = check(theirs, *words)
        assert not ran and "on the ranks of a job, its code is not isolated" in said and "--trust" in said


def test_a_list_that_is_damaged_or_cannot_be_written_stops_nobody(bare, tmp_path):
    (tmp_path / "state/course/folders").mkdir(parents=True)
    own_notebooks.remember_course(tmp_path)
    assert own_notebooks.known_courses() == [stubs.PACKAGE.parent.resolve()]
    (tmp_path / "state/course/folders").rmdir()
    (tmp_path / "state/course/folders").write_text("no json\n")
    assert not own_notebooks.is_own(tmp_path / "notebooks/00_start_here.ipynb")
