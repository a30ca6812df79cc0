"""The wheel alone is a working course: its command, presets and blank lessons; the source distribution is the repository."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import nbformat
import pytest

from course.lab.authoring import lessons
from course.lab.checks import notebook_cells
from course.lab.grading import shipped_files
from course.utils.errors import CourseError

ROOT = Path(__file__).parent.parent
MADE = ("PKG-INFO", "setup.cfg", "course.egg-info/")              # by setuptools, in a source distribution
TINY = ["data.source=mock", "model.grid=[8,16]", "model.dim=16", "model.depth=2", "model.heads=2", "train.steps=2",
        "train.global_batch=2", "train.device=cpu", "log.tensorboard=false"]
ANSWER = "def roofline_seconds(flops, moved, peak_flops, peak_bytes):\n    return max(flops / peak_flops, moved / peak_bytes)\n"
WRONG = "def roofline_seconds(flops, moved, peak_flops, peak_bytes):\n    return flops / peak_flops + moved / peak_bytes\n"
in_a_clone = pytest.mark.skipif(not (shutil.which("git") and (ROOT / ".git").exists() and (ROOT / "solutions").is_dir()),
                                reason="needs a clone of the course's repository, and git")


def run(*words: str | Path, cwd: Path, **environment: str) -> tuple[int, str]:
    """Exit status and everything that was printed."""
    done = subprocess.run([*map(str, words)], cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={**os.environ, **environment})
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    """The files of the repository, as git knows them."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    return {name for name in listed if name and (ROOT / name).exists()}


def learners(tracked: set[str]) -> set[str]:
    return {name for name in tracked if name.startswith(("notebooks/", "submit/"))}


@pytest.fixture(scope="module")
def built(tracked, tmp_path_factory) -> tuple[Path, Path]:
    """The source distribution, made where somebody works, and the wheel that is made of it."""
    clone, out = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("built")
    for name in tracked:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    for name in ("notebooks/00_start_here_mine.ipynb", "notebooks/00_start_here-Copy1.ipynb", "submit/site", "tests/x.pyc"):
        (clone / name).write_text("of somebody's own")
    hook = "import sys; from setuptools import build_meta; getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2])"
    status, said = run(sys.executable, "-c", hook, "sdist", out, cwd=clone)
    assert status == 0, said
    with tarfile.open(sdist := next(out.glob("*.tar.gz"))) as packed:
        packed.extractall(out, filter="data")
    unpacked = out / sdist.name.removesuffix(".tar.gz")
    for name in ("notebooks/00_solved.ipynb", "build/lib/course/given/notebooks/98_removed.ipynb", "build/lib/course/removed.py"):
        (unpacked / name).parent.mkdir(parents=True, exist_ok=True)
        (unpacked / name).write_text("of somebody's own, or of an earlier build")
    status, said = run(sys.executable, "-c", hook, "wheel", out, cwd=unpacked)
    assert status == 0, said
    return sdist, next(out.glob("*.whl"))


@in_a_clone
@pytest.mark.slow
def test_source_distribution_is_the_repository(built, tracked):
    with tarfile.open(built[0]) as packed:
        found = {member.name.partition("/")[2] for member in packed.getmembers() if member.isfile()}
    assert {name for name in found if not name.startswith(MADE)} == tracked


@in_a_clone
@pytest.mark.slow
def test_wheel_has_the_library_and_what_learners_get_and_nothing_else(built, tracked):
    with zipfile.ZipFile(built[1]) as packed:
        found = {name for name in packed.namelist() if ".dist-info/" not in name}
        notebooks = {name: packed.read(name).decode() for name in found if name.endswith(".ipynb")}
    library = {name for name in tracked if name.startswith("course/")}
    assert found == library | {f"course/given/{name}" for name in learners(tracked)}
    assert not [name for name in found if "solutions" in name or "tests" in name or "test" in Path(name).stem.split("_")]
    assert len(notebooks) == len(lessons.masters([]))
    for name, text in notebooks.items():
        master = ROOT / "solutions" / f"{Path(name).stem}.py"
        assert list(lessons.find_leaks(nbformat.reads(text, 4), lessons.instructor_notebook(master))) == [], name


@in_a_clone
@pytest.mark.slow
def test_wheel_alone_shows_presets_trains_gives_lessons_and_checks_them(built, tracked, tmp_path):
    """Installed in a folder of its own, from which everything of the course comes, and used in another."""
    target, work = tmp_path / "target", tmp_path / "work"
    work.mkdir()
    status, said = run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--target", target,
                       built[1], cwd=work)
    assert status == 0, said

    def course(*words: str | Path) -> tuple[int, str]:
        return run(sys.executable, target / "bin/course", *words, cwd=work, PYTHONPATH=str(target))

    where = run(sys.executable, "-c", "import course; print(course.__file__)", cwd=work, PYTHONPATH=str(target))
    assert where == (0, f"{target}/course/__init__.py\n")
    status, said = course("presets")
    assert status == 0 and "vit-demo" in said and "gpt-7b" in said, said
    status, said = course("train", "vit-demo", *TINY)
    assert status == 0 and (work / "runs/vit-demo/default/checkpoints").is_dir(), said
    status, said = course("lessons", "build")
    assert status == 1 and "use the `course` of a clone" in said and "Traceback" not in said, said

    status, said = course("lessons", "copy", "mine")
    assert status == 0 and "jupyter lab mine/notebooks/00_start_here.ipynb" in said, said
    copied = {str(path.relative_to(work / "mine")) for path in (work / "mine").rglob("*") if path.is_file()}
    assert copied == learners(tracked) and os.access(work / "mine/submit/train.sh", os.X_OK)
    path = work / "mine/notebooks/00_start_here.ipynb"
    notebook = notebook_cells.load_notebook(path)
    blank = next(cell for cell in notebook.cells if cell.source.startswith("def roofline_seconds"))
    blank.source = ANSWER
    nbformat.write(notebook, path)
    status, said = course("check", path, "--seed", "1")
    assert status == 1 and "roofline: passed" in said and said.count("it is not written yet") == 1, said     # the other exercise
    blank.source = WRONG
    nbformat.write(notebook, path)
    status, said = course("check", path, "--exercise", "roofline")
    assert status == 1 and "the longer of the two times counts" in said, said        # a hint of course/lab/mistakes


@pytest.fixture
def home(tmp_path) -> Path:
    for name in ("notebooks/00_x.ipynb", "notebooks/00_x_mine.ipynb", "notebooks/01_y.ipynb", "notebooks/notes.txt",
                 "solutions/00_x.py", "solutions/01_y.py", "submit/train.sh", "submit/site", "submit/sites/generic.sh"):
        (tmp_path / "home" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "home" / name).write_text(name)
    return tmp_path / "home"


def test_copies_blank_lessons_and_scripts_and_goes_on_where_it_was_interrupted(home, tmp_path, capsys):
    for _ in range(2):
        lessons.copy(tmp_path / "out", home)
        assert sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()) == [
            "notebooks/00_x.ipynb", "notebooks/01_y.ipynb", "submit/sites/generic.sh", "submit/train.sh"]
        (tmp_path / "out/notebooks/01_y.ipynb").unlink()
    assert "begin with: jupyter lab" in capsys.readouterr().out


def test_copies_nothing_where_something_would_be_lost(home, tmp_path):
    (tmp_path / "out/notebooks").mkdir(parents=True)
    mine = tmp_path / "out/notebooks/01_y.ipynb"
    mine.write_text("my answers")
    with pytest.raises(CourseError, match=r"has notebooks/01_y.ipynb, which was changed"):
        lessons.copy(tmp_path / "out", home)
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == [mine] and mine.read_text() == "my answers"
    with pytest.raises(CourseError, match="is a file, but a folder is needed there"):
        lessons.copy(mine, home)
    with pytest.raises(CourseError, match="holds no lessons"):
        lessons.copy(tmp_path / "new", tmp_path / "empty")


def test_a_lesson_runs_where_it_was_copied_to(home, tmp_path, monkeypatch, capsys):
    from course.lab import notebook

    lessons.copy(tmp_path / "out", home)
    monkeypatch.chdir(tmp_path / "out/notebooks")
    notebook.begin("00")
    assert Path.cwd() == tmp_path / "out" and "was not found" not in capsys.readouterr().out


@in_a_clone
def test_all_notebooks_and_scripts_that_git_knows_are_for_learners(tracked):
    assert {str(name) for name in shipped_files.list_files(ROOT)} == learners(tracked)
