"""What learners get: everything they need, and no solutions."""

import os
import shutil
import subprocess
import sys

import pytest

from course.data.order import train_batches
from course.lab.authoring import lessons, release, stubs
from course.lab.checks import notebook_cells
from course.lab.checks.exercise import all_exercises, find, known_mistakes, right, wrong
from course.utils.errors import CourseError


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("release") / "course"
    release.main(folder)
    return folder


def test_has_what_learners_need_and_no_solutions(out):
    for name in (".gitignore", "README.md", "Makefile", "pyproject.toml", "constraints.txt",
                 "course/config/presets/vit-demo.yaml",
                 "course/bench/results/ceilings_h200.json", "data/README.md", "tests/training/test_step.py"):
        assert (out / name).is_file(), name
    assert not (out / "solutions").exists() and not (out / "tests/lab").exists() and not list(out.rglob("__pycache__"))
    assert sorted(path.stem for path in (out / "notebooks").iterdir()) == [path.stem for path in lessons.masters([])]


def test_a_notebook_that_somebody_worked_in_stays_here(tmp_path, monkeypatch):
    for name in ("notebooks/00_x.ipynb", "notebooks/my_00_x.ipynb", "solutions/00_x.py", ".gitignore", "docs/lab/page.md"):
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name).write_text("")
    monkeypatch.setattr(lessons, "verify", lambda *_: [])
    release.main(tmp_path / "out", tmp_path / "here")
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {"notebooks/00_x.ipynb", ".gitignore", "docs/lab/page.md"}


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A small course in git, and beside it what an instructor's folder gathers."""
    here = tmp_path / "here"
    for name in ("notebooks/00_x.ipynb", "solutions/00_x.py", ".gitignore", "docs/page.md", "course/gone.py", "course/tool.py",
                 "tests/lab/test_x.py", "submit/check.sh"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("")
    (here / ".gitignore").write_text("submit/site\n*.log\n")
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=here, check=True)
    for name in ("docs/solved.ipynb", "course/seed", "submit/mine.sh", "tests/seed", "docs/a.log",
                 "course/M\u00fcller.py"):
        (here / name).write_text("a secret")
    (here / "course/gone.py").unlink()
    (here / "course/tool.py").write_text("changed = 1")
    monkeypatch.setattr(lessons, "verify", lambda *_: [])
    return here


def test_what_git_does_not_track_stays_here_and_is_named(clone, tmp_path, capsys):
    release.main(tmp_path / "out", clone)
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {"notebooks/00_x.ipynb", ".gitignore", "docs/page.md", "course/tool.py", "submit/check.sh"}
    left, changed = capsys.readouterr().out.splitlines()[:2]
    assert all(name in left
               for name in ("docs/solved.ipynb", "course/seed", "submit/mine.sh", "tests/seed", "ller.py"))
    assert "course/tool.py" in changed and "check.sh" not in left + changed


def test_a_new_script_of_the_site_is_released(clone, tmp_path):
    (clone / "submit/sites").mkdir()
    (clone / "submit/sites/ours.sh").write_text("# ours")
    (clone / "submit/site").symlink_to("sites/ours.sh")
    release.main(tmp_path / "out", clone)
    assert (tmp_path / "out/submit/site").read_text() == "# ours" and (tmp_path / "out/submit/site").is_symlink()


def test_where_git_does_not_work_nothing_is_released(clone, tmp_path, monkeypatch):
    (clone / ".git/HEAD").write_text("")
    with pytest.raises(CourseError, match="git does not say which files"):
        release.main(tmp_path / "out", clone)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CourseError, match="install git"):
        release.main(tmp_path / "out", clone)
    assert not (tmp_path / "out").exists()


def test_what_names_a_lesson_that_is_left_out_is_said(tmp_path, monkeypatch):
    for name, text in (("notebooks/00_x.ipynb", ""), ("solutions/00_x.py", "# as in\n# [lesson 17](17_y.ipynb)"),
                       ("README.md", "| [00](notebooks/00_x.ipynb) |\n| [17](notebooks/17_y.ipynb) |"),
                       ("docs/learners.md", "[17](../notebooks/17_y.ipynb)")):
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name).write_text(text)
    monkeypatch.setattr(lessons, "verify", lambda *_: [])
    with pytest.raises(CourseError) as refused:
        release.main(tmp_path / "out", tmp_path / "here")
    assert [line.partition(":")[0] for line in str(refused.value).splitlines()[1:]] == [
        "README.md, line 2", "docs/learners.md, line 1", "solutions/00_x.py, line 2"]
    assert "there is no lesson 17_y" in str(refused.value) and not (tmp_path / "out").exists()


def test_the_site_of_a_clone_is_that_of_what_learners_get(tmp_path, monkeypatch):
    """As a link, which leads to the script; in a file of its own submit/common.sh would look for the site's name."""
    here = tmp_path / "here"
    shutil.copytree(lessons.ROOT / "submit", here / "submit", symlinks=True)
    for name in ("notebooks/00_x.ipynb", "solutions/00_x.py"):
        (here / name).parent.mkdir()
        (here / name).write_text("")
    (here / "submit" / "site").unlink(missing_ok=True)
    (here / "submit" / "sites" / "ours.sh").write_text("# of our cluster\nsite_settings=(log.dir=/ours)\n")
    (here / "submit" / "site").symlink_to("sites/ours.sh")
    monkeypatch.setattr(lessons, "verify", lambda *_: [])
    release.main(tmp_path / "out", here)
    told = subprocess.run(["bash", "-c", '. submit/common.sh && echo "${site_settings[@]}"'], cwd=tmp_path / "out", text=True,
                          capture_output=True, env=os.environ | {"COURSE_SITE": "", "COURSE_PYTHON": sys.executable})
    assert told.stdout == "log.dir=/ours\n", told.stderr
    assert os.readlink(tmp_path / "out" / "submit" / "site") == "sites/ours.sh"


@pytest.mark.slow
def test_hints_work_without_solutions(out, tmp_path):
    """What checks draw their hints from is released: a known mistake is named to the learner who makes it."""
    wrong = tmp_path / "00_start_here.py"
    wrong.write_text('# %%\ndef roofline_seconds(flops, moved, peak_flops, peak_bytes):\n'
                     "    return flops / peak_flops + moved / peak_bytes\n")
    done = subprocess.run([sys.executable, "-m", "course.cli", "check", str(wrong), "--exercise", "roofline", "--trust"], cwd=out,
                          text=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(out)})
    assert done.returncode == 1 and "the longer of the two times counts" in done.stdout, done.stdout + done.stderr


def test_notebooks_are_blank(out):
    for path in (out / "notebooks").glob("*.ipynb"):
        notebook = notebook_cells.load_notebook(path)
        assert not any(cell.get("outputs") for cell in notebook.cells)
        assert stubs.BEGIN not in path.read_text() and stubs.STUB in "\n".join(notebook_cells.code_cells(notebook))


@pytest.mark.slow
def test_a_learner_can_check_there(out):
    """The released package alone, from the released folder."""
    done = subprocess.run([sys.executable, "-m", "course.cli", "check", "notebooks/00_start_here.ipynb"], cwd=out, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(out)})
    assert done.returncode == 1 and done.stdout.count("it is not written yet") == 2, done.stdout + done.stderr


@pytest.fixture(scope="module")
def hiding(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hiding") / "course"
    release.main(folder, hide_answers=True)
    return folder


def python(folder, *words):
    return subprocess.run([sys.executable, *words], cwd=folder, text=True, capture_output=True,
                          env={**os.environ, "PYTHONPATH": str(folder)})


@pytest.mark.slow
def test_a_copy_that_hides_its_answers_shows_none(hiding):
    """No body of an answer of two lines or more, and no known mistake, is in any file of it."""
    texts = {path: path.read_text(errors="replace") for path in hiding.rglob("*") if path.is_file()}
    for dotted in {dotted for exercise in all_exercises().values() for dotted in exercise.objects}:
        found = stubs.find_object(dotted)
        lines = found.text.splitlines()
        shown = texts[hiding / found.file.relative_to(stubs.PACKAGE.parent)]
        assert len(shown.splitlines()) == len(lines)
        for start, end, _ in stubs.answer_bodies(found.node):
            body = "\n".join(lines[start - 1:end])
            if end > start:
                assert [path for path, text in texts.items() if body in text] == [], dotted
            assert stubs.STUB in shown.splitlines()[start - 1]
    assert [path.name for path in (hiding / "course/lab/mistakes").glob("*.py")] == ["__init__.py"]


def test_a_copy_that_hides_its_answers_computes_with_them(hiding):
    told = python(hiding, "-c", "import inspect; from course.data.order import train_batches as f\n"
                                "print('not implemented yet' in inspect.getsource(f), next(f(1, 50, 6, 2, 1, 0)))")
    assert told.stdout == f"True {next(train_batches(1, 50, 6, 2, 1, 0))}\n", told.stdout + told.stderr
    assert not list((hiding / "course/data").rglob("order*.pyc"))


@pytest.mark.slow
@pytest.mark.parametrize("exercise", ["training-step", "column-row"])
def test_a_copy_that_hides_its_answers_checks_answers(hiding, tmp_path, exercise):
    mistake = known_mistakes(find(exercise))[0]
    for source, status, said in ((right(find(exercise)), 0, ""), (wrong(find(exercise), mistake), 1, mistake.hint[:40])):
        (tmp_path / "answer.py").write_text(f"# %%\n{source}")
        done = python(hiding, "-m", "course.cli", "check", str(tmp_path / "answer.py"), "--exercise", exercise, "--trust")
        assert done.returncode == status and said in " ".join(done.stdout.split()), done.stdout + done.stderr


@pytest.mark.slow
def test_the_checks_of_a_copy_that_hides_its_answers_are_those_of_the_clone(hiding):
    program = "from course.lab.checks.exercise import all_exercises\n" \
              "for one in all_exercises().values(): print(one.name, one.version)"
    told = python(hiding, "-c", program)
    assert told.stdout.splitlines() == [f"{one.name} {one.version}" for one in all_exercises().values()], told.stderr


def test_refuses_to_overwrite_and_to_release_what_is_stale(out, tmp_path, monkeypatch):
    with pytest.raises(CourseError, match="exists"):
        release.main(out)
    monkeypatch.setattr(lessons, "verify", lambda *_: ["notebooks/01.ipynb is stale"])
    with pytest.raises(CourseError, match="stale"):
        release.main(tmp_path / "new")
    assert not (tmp_path / "new").exists()
