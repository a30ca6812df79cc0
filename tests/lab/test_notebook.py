"""What lessons call."""

import json
import math
import sys

import pytest
from matplotlib.figure import Figure

from course.lab import notebook
from course.lab.checks.exercise import find, right
from course.lab.exercises import lesson19_kernels
from course.lab.figures import style, widgets
from course.training import optimizer
from course.utils.errors import CourseError


def test_beside_says_by_how_much(capsys):
    notebook.beside("speed", 100, 25, "samples/s")
    text = capsys.readouterr().out
    assert "25% of your prediction" in text and "25.0 samples/s" in text and text.count("▒") == 40 and text.count("█") == 10
    notebook.beside("tokens", 128, 128, how="counted")
    assert "counted        128" in (text := capsys.readouterr().out) and "just as predicted" in text and "measured" not in text
    notebook.beside("speed", 100, 104)
    assert "within 10%" in capsys.readouterr().out
    with pytest.raises(CourseError, match=r"speed: predicted nan .* finite"):
        notebook.beside("speed", math.nan, 3)
    for nothing in (None, "two"):
        with pytest.raises(CourseError, match=rf"speed: you predicted {nothing!r}: put a number there"):
            notebook.beside("speed", nothing, 3)


@pytest.mark.parametrize(("predicted", "measured", "words", "bars"), [
    (0, 3, "more than that", (0, 40)), (3, 0, "less than that", (40, 0)), (0, 0, "just as predicted", (0, 0)),
    (-2, 1, "more than that", (0, 40)), (-1, -2, "less than that", (0, 0)), (1e-9, 3, "times as much", (1, 40))])
def test_zero_and_less_is_a_prediction_too(capsys, predicted, measured, words, bars):
    notebook.beside("of ten", predicted, measured)
    text = capsys.readouterr().out
    assert words in text and (text.count("▒"), text.count("█")) == bars and text.startswith("of ten\n  predicted ")


@pytest.mark.parametrize(("ratio", "text"), [(1, "just as predicted"), (4, "4 times as much"),
                                             (1.04, "within 10% of your prediction"),
                                             (151, "150 times as much"), (2345678, "2,300,000 times as much"),
                                             (0.5, "50% of your prediction"), (0.0123, "1.2% of your prediction"),
                                             (1e-6, "0.0001% of your prediction")])
def test_how_a_number_compares_with_its_prediction(ratio, text):
    assert notebook.compare_in_words(2, 2 * ratio) == text


@pytest.mark.parametrize(("value", "text"), [(1234.5, "1,234"), (12.345, "12.3"), (0.5, "0.500"), (0, "0"), (3e-7, "3e-07"),
                                             (2.5e9, "2.5e+09"), (999.9, "1,000")])
def test_numbers_for_people(value, text):
    assert notebook.number(value) == text


def test_recorded_results_name_their_hardware(capsys):
    runs = notebook.results("foundation_h200")["runs"]
    notebook.recorded("foundation_h200", {"bf16": {"samples/s": runs["mock-bf16"]["samples_per_s"]}})
    text = capsys.readouterr().out
    assert "H200" in text and "PyTorch 2.11" in text and "| bf16 | 152 |" in text and "needs a GPU" in text
    with pytest.raises(CourseError, match="foundation_h200"):
        notebook.results("nothing")


@pytest.mark.parametrize(("days", "said"), [([], "2026-11-22 ("), (["2026-11-22"], "2026-11-22 ("),
                                            (["2026-11-26", "2026-11-24"], "2026-11-22 to 2026-11-26 (")])
def test_recorded_results_of_several_days_say_from_when_to_when(capsys, monkeypatch, days, said):
    rows = [{"ms": 1.0}, *({"ms": 2.0, "date": day} for day in days)]
    about = {"hardware": "H200", "torch": "2.11", "date": "2026-11-22", "rows": rows}
    monkeypatch.setattr(notebook, "results", lambda name: about)
    notebook.recorded("some", {"a": {"ms": 1.0}})
    assert f"PyTorch 2.11, {said}" in capsys.readouterr().out


@pytest.mark.parametrize(("clone", "said"), [(True, "[some.json](../course/bench/results/some.json)"),
                                             (False, "(bench/results/some.json of the package)")])
def test_recorded_results_link_to_their_file_where_notebooks_have_it_beside_them(tmp_path, capsys, monkeypatch, clone, said):
    file = tmp_path / "course/bench/results/some.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"hardware": "H200", "torch": "2.11", "date": "2026-11-22"}))
    if clone:
        (tmp_path / "notebooks").mkdir()
    monkeypatch.setattr("course.bench.results.FOLDER", file.parent)
    monkeypatch.setattr(notebook.stubs, "PACKAGE", tmp_path / "course")
    notebook.recorded("some", {"a": {"ms": 1.0}})
    assert said in capsys.readouterr().out


def test_show_names_file_and_line(capsys):
    notebook.show("course.models.vit.Embed")
    text = capsys.readouterr().out
    assert text.startswith("# course/models/vit.py, line ") and "class Embed(nn.Module):" in text


def test_yours_stands_in_the_librarys_place_and_leaves_again():
    from course.training import step

    original, rate = step.eager, optimizer.learning_rate

    def eager(*_):
        return "mine"

    with notebook.yours(eager):
        assert step.eager(1, 2, 3, 4) == "mine"
    assert step.eager is original and optimizer.learning_rate is rate
    with pytest.raises(CourseError, match="not the answer to an exercise"), notebook.yours(style.curves):
        pass


def test_a_cell_that_stops_in_what_has_not_passed_says_so_in_a_sentence(monkeypatch):
    def copy(*_):
        raise NotImplementedError("not implemented yet")

    def stop():
        with notebook.yours(copy):
            lesson19_kernels.copy(1, 2)

    with pytest.raises(notebook.CheckFailed, match=r'stopped \(NotImpl.*First let the exercise pass: check\("copy"'):
        stop()
    monkeypatch.setattr(notebook, "_passed", {"copy"})
    with pytest.raises(NotImplementedError):
        stop()


def test_a_blank_is_named_in_place_of_a_traceback():
    class Shell:
        def showtraceback(self, shown, tb_offset=None):
            self.shown = shown

    def unwritten():
        raise NotImplementedError("not implemented yet")

    def unsupported():
        raise NotImplementedError("no such layout")

    for function, kind, words in ((unwritten, notebook.CheckFailed, "_in_place_of_a_traceback`, which is not written yet: "),
                                  (unsupported, NotImplementedError, "no such layout")):
        shell = Shell()
        try:
            function()
        except NotImplementedError as error:
            notebook.show_blank(shell, type(error), error, error.__traceback__)
        assert shell.shown[0] is kind and words in str(shell.shown[1])


@pytest.mark.slow
def test_check_of_a_script_shows_and_raises(monkeypatch, tmp_path, capsys):
    script = tmp_path / "00_x.py"
    script.write_text('# %% exercise="roofline"\ndef roofline_seconds(a, b, c, d):\n'
                      "    ### BEGIN SOLUTION\n    return a\n    ### END SOLUTION\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    with pytest.raises(notebook.CheckFailed, match="roofline has not passed") as caught:
        notebook.check("roofline", seed=3)
    assert len(caught.value._render_traceback_()) == 1
    assert "seed 3" in capsys.readouterr().out
    with pytest.raises(CourseError, match="did you mean 'roofline'"):
        notebook.check("rooflin")

    def matmul_cost():
        """As a learner passes it, without quotes."""

    with pytest.raises(CourseError, match=r'named in quotes: check\("matmul-cost"\)') as caught:
        notebook.check(matmul_cost)
    assert caught.value._render_traceback_() == [f"\x1b[31m{caught.value}\x1b[0m"]             # no traceback in a notebook
    with pytest.raises(notebook.CheckFailed):
        notebook.check("matmul-cost")
    assert "matmul_cost is not defined" in capsys.readouterr().out


@pytest.mark.slow
def test_an_answer_that_the_notebook_only_imports_is_to_be_defined_there(monkeypatch, capsys):
    own = "from course.lab.exercises.lesson00_start_here import roofline_seconds"
    monkeypatch.setattr(notebook, "written", lambda: [own])
    with pytest.raises(notebook.CheckFailed):
        notebook.check("roofline")
    text = capsys.readouterr().out
    assert "roofline_seconds is only imported" in text and "define it in this notebook" in text and "not written yet" not in text
    monkeypatch.setattr(notebook, "written", lambda: [own, "def roofline_seconds(f, m, p, b):\n    return max(f / p, m / b)"])
    notebook.check("roofline")


def test_the_answer_is_shown_once_it_has_been_found(monkeypatch, capsys):
    monkeypatch.setattr(notebook, "_passed", set())
    monkeypatch.setattr(notebook, "written", lambda: ["def roofline_seconds(f, m, p, b):\n    return max(f / p, m / b)"])
    with pytest.raises(CourseError, match=r'roofline has not passed .* check\("roofline"\) first'):
        notebook.answer("roofline")
    notebook.check("roofline")
    assert 'lab.answer("roofline")' in capsys.readouterr().out
    notebook.answer("roofline")
    text = capsys.readouterr().out
    assert text.startswith("# course/lab/exercises/lesson00_start_here.py, line ")
    assert "max(flops / peak_flops, moved / peak_bytes)" in text
    with pytest.raises(CourseError, match="accumulate has not passed"):
        notebook.answer("accumulate")
    with pytest.raises(CourseError, match="did you mean 'roofline'"):
        notebook.answer("rofline")


def test_a_broken_cell_of_the_notebook_is_named(monkeypatch, capsys):
    monkeypatch.setattr(notebook, "written", lambda: ["", "def roofline_seconds(f, m, p, b):\n    return max(f / p, m / b"])
    with pytest.raises(notebook.CheckFailed):
        notebook.check("roofline")
    text = capsys.readouterr().out
    assert "the cell with `def roofline_seconds` is not valid Python: line 2, `return max" in text
    assert "fix that line, run the cell, then this one" in text


def test_only_exercises_of_lessons_that_are_there_are_offered(tmp_path):
    from course.lab.checks import exercise

    assert list(exercise.all_exercises())[:2] == ["matmul-cost", "roofline"]     # in the order of the lessons
    assert list(exercise.offered(tmp_path)) == list(exercise.all_exercises())
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks/00_start_here.ipynb").touch()
    assert list(exercise.offered(tmp_path)) == ["matmul-cost", "roofline"]
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions/07_data_parallel.py").touch()
    assert "average-gradients" in exercise.offered(tmp_path) and "accumulate" not in exercise.offered(tmp_path)
    with pytest.raises(CourseError) as caught:
        exercise.find("averag-gradients")
    assert "accumulate" in str(caught.value)
    there = {path.name[:2] for path in (notebook.stubs.PACKAGE.parent / "notebooks").glob("*.ipynb")}
    assert ("average-gradients" in str(caught.value)) == ("07" in there)


def test_begin_finds_the_course(monkeypatch, tmp_path, capsys):
    for name in ("notebooks/deep", "course"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "notebooks/deep")
    notebook.begin("07")
    from pathlib import Path

    assert Path.cwd() == tmp_path and "Lesson 07" in capsys.readouterr().out


def test_tensorboard_opens_and_serves(tmp_path, monkeypatch, capsys):
    from urllib.request import urlopen

    monkeypatch.setattr("IPython.display.display", lambda *_: None)
    address = notebook.tensorboard(tmp_path)
    assert address.startswith("http://127.0.0.1:") and urlopen(address, timeout=20).status == 200
    monkeypatch.setenv(notebook.BUILDING, "1")
    assert notebook.tensorboard(tmp_path) == "" and "opens here" in capsys.readouterr().out


def test_a_slider_redraws(monkeypatch):
    shown, drawn = [], []
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw, metadata: shown.append((bundle, metadata)))

    def draw(n: int) -> Figure:
        drawn.append(n)
        return style.curves({"line": ([0, 1], [0, n])}, "x", "y")

    box = widgets.explore(draw, alt="a line", n=[1, 2, 3])
    slider, sentence, image, words = box.children
    before = bytes(image.value)
    slider.value = 3
    assert drawn == [1, 3] and bytes(image.value) != before and image.value[:4] == b"\x89PNG"
    bundle, metadata = shown[0]
    assert bundle["text/plain"] == "a line" and {"image/png", "application/vnd.jupyter.widget-view+json"} <= set(bundle)
    assert metadata == {"image/png": {"alt": "a line"}}
    assert slider.description == "n" and words.value == "<i>a line</i>" and sentence.value == ""


def test_values_that_do_not_go_together_show_a_sentence_in_the_place_of_the_picture(monkeypatch):
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw, metadata: None)

    def draw(n: int, m: int) -> Figure:
        if n < m:
            raise CourseError(f"{n} < {m}: choose more")
        return style.curves({"line": ([0, 1], [0, n])}, "x", "y")

    box = widgets.explore(draw, alt="a line", start={"n": 2}, n=[1, 2, 3], m=[1, 3])
    n, m, sentence, image, _ = box.children
    assert n.value == 2 and m.value == 1
    m.value = 3
    assert sentence.value == "<b>2 &lt; 3: choose more</b>" and image.layout.display == "none"
    n.value = 3
    assert sentence.value == "" and image.layout.display == ""


def test_many_sliders_stand_in_two_columns(monkeypatch):
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw, metadata: None)
    names = [f"slider{number}" for number in range(7)]
    box = widgets.explore(lambda **values: style.curves({"line": ([0, 1], [0, 1])}, "x", "y"), alt="a line",
                          **{name: [1, 2] for name in names})
    left, right = box.children[0].children
    assert [slider.description for column in (left, right) for slider in column.children] == names
    assert len(left.children) == 4


def legend(axis) -> list[str]:
    return [text.get_text() for text in axis.get_legend().get_texts()]


def test_figures_leave_nothing_out_and_give_neighbors_different_marks():
    names = [f"dot {number}" for number in range(9)]
    roof = style.roofline({"one": (1e11, 1e10), "two": (1e12, 1e10)}, dict.fromkeys(names, (5.0, 3e10))).axes[0]
    assert legend(roof) == ["one", "two", *names] and not roof.texts
    marks = [line.get_marker() for line in roof.lines if line.get_label() in names]
    assert len(marks) == 9 and len(set(marks[:6])) == 6
    many = style.curves({name: ([0, 1], [0, 1]) for name in names}, "x", "y")
    assert [text.get_text() for text in many.legends[0].get_texts()] == names and many.axes[0].get_legend() is None


def test_figures_draw_what_they_are_given():
    import numpy as np

    roof = style.roofline({"machine": (1e11, 1e10)}, {"dot": (5.0, 3e10)}, "title").axes[0]
    line = roof.lines[0]
    assert max(line.get_ydata()) == 1e11 and line.get_ydata()[0] == pytest.approx(1e10 * line.get_xdata()[0])
    assert roof.get_title() == "title" and legend(roof) == ["machine", "dot"]
    curves = style.curves({"a": ([1, 2], [3, 4])}, "x", "y", levels={"level": 5.0}).axes[0]
    assert legend(curves) == ["a", "level"]
    patches = style.patches(np.zeros((32, 64)), 4).axes[0]
    assert len(patches.get_xticks()) == 16 and len(patches.get_yticks()) == 8


def test_a_kernel_is_not_checked_where_triton_is_missing_and_the_lesson_goes_on(monkeypatch, capsys):
    monkeypatch.setattr("course.ops.triton_language.INSTALLED", False)
    monkeypatch.setattr(notebook, "written", lambda: [right(find("copy"))])
    monkeypatch.setattr(notebook, "_passed", set())
    assert not notebook.kernels() and "Triton is not installed: " in capsys.readouterr().out
    notebook.check("copy")
    text = capsys.readouterr().out
    assert "it needs Triton, which is not installed: " in text and not notebook._passed


def test_a_kernel_that_passed_on_a_gpu_is_timed(monkeypatch, capsys):
    timed = []

    def speed(name, device):
        timed.append((name, device.type, lesson19_kernels.copy))
        return {"lesson": {"ms": 0.5, "GB/s": 2000.0}, "PyTorch": {"ms": 0.4, "GB/s": 2500.0}}

    def copy(x, y):
        """The learner's."""

    monkeypatch.setattr("course.lab.instruments.kernel_speed.of_exercise", speed)
    monkeypatch.setattr(sys.modules["__main__"], "copy", copy, raising=False)
    notebook.show_speed(find("copy"))
    assert timed == [("copy", "cuda", copy)] and lesson19_kernels.copy is not copy
    assert capsys.readouterr().out.splitlines() == ["  yours     0.500 ms    2,000 GB/s", "  PyTorch   0.400 ms    2,500 GB/s"]
