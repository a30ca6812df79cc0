"""One master, two notebooks: what is generated, what is stale, what leaks; and the lessons themselves run."""

import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest

from course.lab.authoring import lessons, stubs
from course.lab.checks import notebook_cells
from course.lab.checks.exercise import all_exercises, find, right
from course.utils.errors import CourseError
from tests.conftest import worked

MASTER = '''# %% [markdown]
# # A lesson
# Some words.

# %%
from course.lab.notebook import check
print("ran")

# %% exercise="roofline"
def roofline_seconds(flops: float, moved: float, peak_flops: float, peak_bytes: float) -> float:
    """The least seconds."""
    ### BEGIN SOLUTION
    computing_takes_so_long = flops / peak_flops
    return max(computing_takes_so_long, moved / peak_bytes)
    ### END SOLUTION

# %% exercise="relative-l2"
from course.models.vit import RelativeL2

# %%
check("roofline")
'''


@pytest.fixture
def root(tmp_path):
    """A course with one lesson."""
    for name in ("solutions", "notebooks", "course"):
        (tmp_path / name).mkdir()
    (tmp_path / "solutions/42_answer.py").write_text(MASTER)
    return tmp_path


def master(root: Path) -> Path:
    return root / "solutions/42_answer.py"


def put(root: Path) -> None:
    """Both notebooks, without executing."""
    lessons.write_notebook(lessons.learner_notebook(master(root)), root / "notebooks/42_answer.ipynb")
    lessons.write_notebook(lessons.instructor_notebook(master(root)), root / "solutions/42_answer.ipynb")


def test_learners_get_blanks_and_instructors_answers(root):
    blanks, answers = (notebook_cells.code_cells(make(master(root)))
                       for make in (lessons.learner_notebook, lessons.instructor_notebook))
    assert blanks[1].endswith(f'"""The least seconds."""\n    {stubs.STUB}')
    assert "class RelativeL2(Loss):" in blanks[2] and "self.norm(output" not in blanks[2]
    assert blanks[2].count(stubs.STUB) == 2
    assert "self.norm(output" in answers[2] and answers[2].count(stubs.BEGIN) == answers[2].count(stubs.END) == 2
    assert blanks[0] == answers[0] and blanks[3] == answers[3] == 'check("roofline")'
    for source in blanks + answers:
        compile(source, "cell", "exec")


def test_cells_carry_what_nbgrader_wants(root):
    found = {cell.metadata.nbgrader.grade_id: cell.metadata.nbgrader for cell in lessons.learner_notebook(master(root)).cells
             if "nbgrader" in cell.metadata}
    assert set(found) == {"roofline", "relative-l2", "check-roofline"}
    assert found["roofline"] == {"grade_id": "roofline", "solution": True, "grade": False, "locked": False, "task": False,
                                 "schema_version": 3}
    assert found["check-roofline"]["grade"] and found["check-roofline"]["locked"]
    assert found["check-roofline"]["points"] == all_exercises()["roofline"].points


def test_notebooks_are_valid_and_the_same_every_time(root):
    one, again = (nbformat.writes(lessons.learner_notebook(master(root))) for _ in range(2))
    assert one == again
    nbformat.validate(nbformat.reads(one, as_version=4))


def test_verify_finds_nothing_in_fresh_notebooks(root):
    put(root)
    assert lessons.verify([], root) == []


def test_a_changed_master_makes_both_stale(root):
    put(root)
    master(root).write_text(MASTER.replace("Some words", "Other words"))
    assert [line.split()[0] for line in lessons.verify([], root)] == ["notebooks/42_answer.ipynb", "solutions/42_answer.ipynb"]


def test_line_breaks_comments_and_docstrings_execute_nothing(root, monkeypatch):
    put(root)
    master(root).write_text(MASTER.replace('print("ran")', 'print(  # as it says\n    "ran")').replace("The least", "The fewest"))
    assert ["has other text than" in problem for problem in lessons.verify([], root)] == [True, True]
    monkeypatch.setattr(lessons, "execute", lambda *_: pytest.fail("nothing that runs has changed"))
    lessons.build([], root)
    assert lessons.verify([], root) == []
    master(root).write_text(MASTER.replace('"ran"', '"run"'))
    assert ["is stale" in problem for problem in lessons.verify([], root)] == [True, True]


def test_changed_library_code_that_it_shows_makes_it_stale(root, monkeypatch):
    master(root).write_text(MASTER.replace('print("ran")', 'lab.show("course.models.vit.ViT")'))
    put(root)
    monkeypatch.setattr(stubs, "shown_source", lambda dotted: f"other {dotted}")
    assert len(lessons.verify([], root)) == 2


def test_a_changed_answer_of_the_library_makes_it_stale(root, monkeypatch):
    put(root)
    monkeypatch.setattr(lessons.exercises, "right", lambda exercise, marked: f"other = {exercise.name!r}")
    assert len(lessons.verify([], root)) == 2


def test_a_result_measured_again_that_it_names_makes_it_stale(root, tmp_path, monkeypatch):
    results = tmp_path / "results"
    results.mkdir()
    monkeypatch.setattr(lessons.results, "FOLDER", results)
    master(root).write_text(MASTER.replace('print("ran")', 'print("fast_h200")'))
    for name in ("fast_h200", "other_h200"):
        (results / f"{name}.json").write_text("{}")
    put(root)
    (results / "other_h200.json").write_text('{"rows": []}')
    assert lessons.verify([], root) == []
    (results / "fast_h200.json").write_text('{"rows": []}')
    assert len(lessons.verify([], root)) == 2


def test_text_takes_numbers_from_recorded_results(root, monkeypatch):
    numbers = """# %% numbers=true
def faster(name):
    return value(name, "old") / value(name, "new")
"""
    recorded = {"rows": [{"case": "old", "ms": 30.0}, {"case": "new", "ms": 20.0}]}
    monkeypatch.setattr(lessons.results, "load", lambda name: recorded)
    master(root).write_text(numbers + MASTER.replace("Some words.", 'It is {result: faster("a") | .1f} times\n# as fast.'))
    put(root)
    for notebook in (lessons.learner_notebook(master(root)), lessons.instructor_notebook(master(root))):
        assert notebook.cells[0].source == "# A lesson\nIt is 1.5 times\nas fast." and "faster" not in str(notebook)
    recorded["rows"][0]["ms"] = 50.0
    assert ["has other text than" in problem for problem in lessons.verify([], root)] == [True, True]
    monkeypatch.setattr(lessons, "execute", lambda *_: pytest.fail("no code has changed"))
    lessons.build([], root)
    assert lessons.verify([], root) == [] and "It is 2.5 times" in (root / "solutions/42_answer.ipynb").read_text()


def test_predictions_questions_and_exercises_have_bars_of_their_own_colors():
    text = """Before.

> **Predict.** How many
> - a list
>
> $x$

> **Question.** Why?

> A quotation.

## Exercise: write it

Write `f`.

## Next

After."""
    bars = {kind: f'<div style="border-left: 6px solid {color}; padding-left: 1em">' for kind, color in lessons.BARS.items()}
    assert lessons.boxed(text) == f"""Before.

{bars["Predict"]}

**Predict.** How many
- a list

$x$

</div>

{bars["Question"]}

**Question.** Why?

</div>

> A quotation.

## Exercise: write it

{bars["Exercise"]}

Write `f`.

</div>

## Next

After."""
    found = "".join(cell.source for master in lessons.masters([]) for cell in lessons.learner_notebook(master).cells
                    if cell.cell_type == "markdown")
    assert found.count("<div") == found.count("</div>") and all(found.count(bar) > 50 for bar in bars.values())


@pytest.mark.parametrize(("directive", "says"), [("{result: value('vit_h200', 'no such row') | .1f}", "has 0 rows 'no such row'"),
                                                 ("{result: nothing | .1f}", "nothing | .1f} cannot be filled in")])
def test_a_number_that_is_not_there_stops_the_build(root, directive, says):
    master(root).write_text(MASTER.replace("Some words.", directive))
    with pytest.raises(CourseError, match=re.escape(says)):
        lessons.build([], root)


def test_an_edited_notebook_is_found(root):
    put(root)
    path = root / "notebooks/42_answer.ipynb"
    path.write_text(path.read_text().replace("Some words", "My words"))
    found, = lessons.verify([], root)
    assert "has other text than" in found and "solutions/42_answer.py" in found


def test_new_points_reach_both_notebooks_and_outputs_stay(root, monkeypatch):
    put(root)
    path = root / "solutions/42_answer.ipynb"
    solved = nbformat.read(path, as_version=4)
    solved.cells[1].outputs = [nbformat.v4.new_output("stream", text="ran, and measured\n")]
    lessons.write_notebook(solved, path)
    real, before = lessons.exercises.find, path.read_text()
    monkeypatch.setattr(lessons, "execute", lambda *_: pytest.fail("nothing that a lesson shows has changed"))
    lessons.build([], root)
    assert path.read_text() == before
    monkeypatch.setattr(lessons.exercises, "find", lambda name: replace(real(name), points=7))
    assert [line.partition(" has other points")[0] for line in lessons.verify([], root)] == \
        ["notebooks/42_answer.ipynb", "solutions/42_answer.ipynb"]
    lessons.build([], root)
    assert lessons.verify([], root) == [] and "ran, and measured" in path.read_text() and '"points": 7' in path.read_text()


def test_an_executed_notebook_that_was_edited_is_made_again(root, monkeypatch):
    put(root)
    path = root / "solutions/42_answer.ipynb"
    path.write_text(path.read_text().replace("Some words", "My words"))
    monkeypatch.setattr(lessons, "execute", lambda notebook, _: notebook)
    lessons.build([], root)
    assert lessons.verify([], root) == []


def test_a_missing_notebook_is_stale(root):
    assert len(lessons.verify([], root)) == 2


@pytest.mark.parametrize(("change", "words"), [
    (lambda cell: cell.update(outputs=[nbformat.v4.new_output("stream", text="42")]), "has outputs"),
    (lambda cell: cell.update(source=f"{stubs.BEGIN}\nx = 1\n{stubs.END}"), "between its markers"),
    (lambda cell: cell.update(source="# computing_takes_so_long = flops  /  peak_flops"), "shows a line of an answer"),
    (lambda cell: cell.update(source="error = self.norm(output - target)"), "shows a line of an answer"),
])
def test_a_leak_is_found(root, change, words):
    put(root)
    path = root / "notebooks/42_answer.ipynb"
    notebook = nbformat.read(path, as_version=4)
    change(notebook.cells[1])
    nbformat.write(notebook, path)
    assert any(words in line for line in lessons.verify([], root))


@pytest.mark.slow
def test_build_executes_keeps_outputs_and_hides_this_machine(root, capsys):
    text = MASTER.replace('print("ran")', 'import os, sys\nprint("ran in", os.getcwd(), sys.prefix)')
    master(root).write_text(text.replace('# %% exercise="relative-l2"\nfrom course.models.vit import RelativeL2\n', ""))
    lessons.build([], root)
    solved = nbformat.read(root / "solutions/42_answer.ipynb", as_version=4)
    assert solved.cells[1].outputs[0].text == "ran in ~/course/notebooks ~/course/.venv\n"
    assert "passed" in solved.cells[-1].outputs[0].data["text/plain"]
    assert str(root) not in (root / "solutions/42_answer.ipynb").read_text()
    assert lessons.verify([], root) == [] and "executing" in capsys.readouterr().out
    lessons.build([], root)
    assert "executing" not in capsys.readouterr().out          # it is up to date


@pytest.mark.slow
def test_a_lesson_that_fails_is_not_written(root):
    master(root).write_text(MASTER.replace("max(", "min("))
    with pytest.raises(CourseError, match="roofline has not passed") as caught:
        lessons.build([], root)
    assert str(caught.value).splitlines()[1].strip() == 'check("roofline")'          # the cell that failed
    assert not (root / "solutions/42_answer.ipynb").exists()


def test_an_exercise_cell_is_an_import_or_has_markers(root):
    master(root).write_text('# %% exercise="roofline"\ndef roofline_seconds(): return 1\n')
    with pytest.raises(CourseError, match="BEGIN SOLUTION"):
        lessons.instructor_notebook(master(root))
    master(root).write_text('# %% exercise="rooflime"\nx = 1\n')
    with pytest.raises(CourseError, match="did you mean 'roofline'"):
        lessons.instructor_notebook(master(root))


def test_an_answer_calls_what_the_learner_wrote_before(root):
    """An import of the library's `online_softmax` would take the place of the learner's."""
    module = "course.lab.exercises.lesson19_flash_attention"
    cell = lessons.expand_answer(f"from {module} import attend_keys, flash_forward_kernel, key_range", find("flash-forward"))
    assert "= online_softmax(" in cell and f"from {module} import head_offset, load_tile, store_tile\n" in cell
    assert "online_softmax, store_tile" in right(find("flash-forward"))     # alone, it needs the library's


def test_names_of_lessons(root):
    assert lessons.masters(["42"], root) == lessons.masters(["42_answer"], root) == lessons.masters([], root) == [master(root)]
    with pytest.raises(CourseError, match="42_answer"):
        lessons.masters(["43"], root)
    with pytest.raises(CourseError, match="release"):
        lessons.masters([], root / "notebooks")


def test_the_lessons_of_the_course_are_up_to_date_and_leak_nothing():
    assert lessons.verify([]) == []


def test_every_exercise_of_a_lesson_stands_in_it_once_with_its_check():
    for path in lessons.masters([]):
        notebook = lessons.instructor_notebook(path)
        ids = [cell.metadata.nbgrader.grade_id for cell in notebook.cells if "nbgrader" in cell.metadata]
        names = [exercise.name for exercise in all_exercises().values() if exercise.lesson == path.stem[:2]]
        assert sorted(ids) == sorted([*names, *(f"check-{name}" for name in names)])


@pytest.mark.slow
@pytest.mark.parametrize("path", lessons.masters([]), ids=lambda path: path.stem)
def test_masters_execute_from_top_to_bottom_in_the_time_that_they_name(path):
    """As `course lessons build --force` does, in a copy, so that the committed notebooks stay as they are.

    Processor seconds, since other tests run beside it, as many more as this machine needs for a loop."""
    before = worked()
    lessons.execute(lessons.instructor_notebook(path), lessons.ROOT / "notebooks")
    assert 2 < worked() - before < slowness() * (60 + 4 * 60 * stated(path))


def slowness():
    """How many times as long this machine takes for a loop as the one on which lessons' minutes were measured; at least 1."""
    begin = time.process_time()
    for _ in range(5_000_000):
        pass
    return max(1.0, (time.process_time() - begin) / 0.15)


def stated(path):
    """Minutes of computing on two cores that a lesson names."""
    amount = re.search(r"^# \| computing \| (.*?) minutes? on two cores", path.read_text(), re.MULTILINE).group(1)
    return 0.5 if amount == "half a" else float(amount)


@pytest.mark.parametrize("path", lessons.masters([]), ids=lambda path: path.stem)
def test_code_needs_no_horizontal_scrolling(path):
    assert not lessons.long_lines(path)


def test_a_lesson_whose_code_needs_scrolling_is_not_built(tmp_path):
    (tmp_path / "solutions").mkdir()
    long = f"print({'1 + ' * 22}1)"
    (tmp_path / "solutions/99_long.py").write_text(f"# %% [markdown]\n# {long}\n# %%\nprint(1)\n{long}\n")
    with pytest.raises(CourseError, match=r"99_long.py has code of more than 88 columns.* break print\(1 \+ [^;]*$"):
        lessons.build([], tmp_path)


def test_the_whole_course_computes_for_less_than_half_an_hour():
    assert sum(map(stated, lessons.masters([]))) < 30


@pytest.mark.slow
def test_a_blank_notebook_stops_at_its_first_exercise_with_words(tmp_path):
    shutil.copytree(lessons.ROOT / "notebooks", tmp_path / "notebooks")
    notebook = notebook_cells.load_notebook(tmp_path / "notebooks/00_start_here.ipynb")
    with pytest.raises(CourseError, match="matmul-cost has not passed") as caught:
        lessons.execute(notebook, tmp_path / "notebooks")
    assert "not written yet" in str(caught.value)
