"""Reading notebooks and slicing the definitions out of them."""

import ast
import json
import time

import nbformat
import pytest

from course.lab.checks import notebook_cells
from course.utils.errors import CourseError


def run(cell_list, *names):
    """Execute the slice; returns its namespace and source."""
    answer = notebook_cells.definitions(cell_list, names)
    assert not answer.problem, answer.problem
    space = {"__name__": "answer"}
    exec(answer.source, space)
    return space, answer.source


def test_slice_has_what_is_needed_and_nothing_else():
    space, source = run(["import math, os\nimport json", "SCALE = 2\ntrain_for_hours()",
                         "def helper(x):\n    return math.sqrt(x) * SCALE", "@staticmethod\ndef unused(): pass",
                         "def answer(x):\n    return helper(x)", "answer(3)\nprint('done')"],
                        "answer")
    assert space["answer"](4) == 4
    assert "train_for_hours" not in source and "json" not in source and "unused" not in source and "print" not in source


def test_the_last_definition_counts():
    space, _ = run(["def f(): return 1", "def f(): return 2"], "f")
    assert space["f"]() == 2


def test_parameters_are_not_globals():
    _, source = run(["model = build()\nbatch = load()", "def step(model, batch):\n    return [model for model in batch]"], "step")
    assert "build" not in source and "load" not in source


def test_what_runs_at_definition_sees_what_was_there_then():
    space, _ = run(["from math import pi as x", "def f(a=x):\n    return a, x", "x = 4"], "f")
    assert space["f"]() == (pytest.approx(3.14159, abs=1e-4), 4)


def test_things_made_from_their_earlier_selves():
    space, _ = run(["n = 1\nn = n + 1\nn += 1", "table = {}\ntable['a'] = n", "def f(): return table"], "f")
    assert space["f"]() == {"a": 3}


def test_wrapped_functions_classes_and_recursion():
    space, _ = run(["from functools import cache", "def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)",
                    "fib = cache(fib)", "class Base:\n    def f(self): return fib(30)", "class Mine(Base):\n    pass"], "Mine")
    assert space["Mine"]().f() == 832040


def test_magics_shell_and_star_imports():
    space, _ = run(["%matplotlib inline\n!ls\nfrom math import *", "%%time\ndef f(): return floor(2.5)",
                    "%%bash\necho f = 3"], "f")
    assert space["f"]() == 2


def test_missing_and_broken_are_told_apart():
    assert "f is not defined" in notebook_cells.definitions(["g = 1"], ["f"]).problem
    broken = notebook_cells.definitions(["g = 1", "def f(:\n  pass"], ["f"]).problem
    assert broken.startswith("the cell with `def f` is not valid Python: line 1, `def f(:`: ")
    assert "not valid Python" in notebook_cells.definitions(["f = 1\nreturn f"], ["f"]).problem
    assert not notebook_cells.definitions(["def broken(:", "def f(): pass"], ["f"]).problem
    assert notebook_cells.definitions(["def f(): pass", "def f(:\n  pass"], ["f"]).broken      # not the one before
    assert not notebook_cells.definitions(["g = 1"], ["f"]).broken
    assert not notebook_cells.definitions(["def f(:\n  pass", "def f(): pass"], ["f"]).problem


@pytest.mark.parametrize(("cell", "line"), [
    ("import torch\n\nx = 1\ndef f():\n    return x +\n", 5), ("\n\ndef f(:\n    pass", 3), ("%%time\ndef f():\n  return )", 3)])
def test_a_broken_cell_is_named_with_its_line(cell, line):
    problem = notebook_cells.definitions(["print(1)", cell], ["f"]).problem
    assert problem.startswith("the cell with `def f`") and f"line {line}, `" in problem
    assert "<unknown>" not in problem and "code cell" not in problem


def test_a_broken_cell_that_defines_nothing_wanted_is_named_by_its_beginning():
    problem = notebook_cells.definitions(["\n# my try\nreturn f(3)"], ["f"]).problem
    assert problem == "the cell that begins with `# my try` is not valid Python: line 3, `return f(3)`: 'return' outside function"


def test_pieces_know_their_cells_and_lines():
    """Lines count from the top of the cell, whatever else the answer needs and whatever IPython takes away."""
    found = notebook_cells.definitions(["import math\nimport torch", "%%time\n\nhalf = 0.5",
                               "\n# a remark\n\n@staticmethod\ndef g(): return half",
                               "!ls\n%matplotlib inline\ndef f():\n    return g(), math.pi"], ["f"])
    assert [(piece.cell, piece.line) for piece in found.pieces] == [
        ("the cell that begins with `import math`", 1), ("the cell that begins with `%%time`", 3),
        ("the cell that begins with `# a remark`", 4), ("the cell with `def f`", 3)]
    assert [piece.text.split("\n")[0] for piece in found.pieces] == ["import math", "half = 0.5", "@staticmethod", "def f():"]
    assert notebook_cells.name_cell("class Mine:\n  def f(self): pass", ["Mine"]) == "the cell with `class Mine`"
    assert len(notebook_cells.name_cell("x" * 1000, ["f"])) < 100


def test_reads_notebooks_and_scripts(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# hello"), nbformat.v4.new_code_cell("x = 1")])
    nbformat.write(notebook, tmp_path / "a.ipynb")
    (tmp_path / "a.py").write_text("# %% [markdown]\n# # hello\n\n# %%\nx = 1\n")
    codes = [notebook_cells.code_cells(notebook_cells.load_notebook(tmp_path / name)) for name in ("a.ipynb", "a.py")]
    assert codes == [["x = 1"]] * 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe\x00", b'{"cells": 3}', b'{"nbformat": 4, "nbformat_minor": 5}',
                                     b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [{"source": 3}]}',
                                     b"[" * 100000, b'"' + b"a" * 100])
def test_a_damaged_notebook_is_a_sentence(tmp_path, content):
    path = tmp_path / "a.ipynb"
    path.write_bytes(content)
    with pytest.raises(CourseError, match=r"a\.ipynb"):
        notebook_cells.read_contents(path)


def test_too_large_missing_or_of_another_kind(tmp_path, monkeypatch):
    with pytest.raises(CourseError, match=r"no such file$"):
        notebook_cells.read_contents(tmp_path / "b.ipynb")
    (tmp_path / "01_baseline_mine.ipynb").touch()
    with pytest.raises(CourseError, match=r"no such file \(did you mean '01_baseline_mine.ipynb'\?\)"):
        notebook_cells.read_contents(tmp_path / "01_baselin_mine.ipynb")
    with pytest.raises(CourseError, match="give a notebook"):
        notebook_cells.read_contents(tmp_path / "b.docx")
    (tmp_path / "a.py").write_text("x = '" + "a" * 1_000_001 + "'\n")
    with pytest.raises(CourseError, match="MB of code"):
        notebook_cells.read_contents(tmp_path / "a.py")
    monkeypatch.setattr(notebook_cells, "MAX_BYTES", 10)
    with pytest.raises(CourseError, match="clear its outputs"):
        notebook_cells.read_contents(tmp_path / "a.py")


WINDOWS = {
    "a mark": lambda text: text.encode("utf-8-sig"), "CRLF": lambda text: text.replace("\n", "\r\n").encode(),
    "old line ends": lambda text: text.replace("\n", "\r").encode(), "UTF-16": lambda text: text.encode("utf-16"),
    "UTF-16 without a mark": lambda text: text.encode("utf-16-le"), "UTF-16, the other order": lambda text:
    b"\xfe\xff" + text.encode("utf-16-be"), "UTF-32": lambda text: text.encode("utf-32"),
    "Windows' own": lambda text: text.replace("李", "ß").encode("cp1252"),
    "a mark and CRLF": lambda text: text.replace("\n", "\r\n").encode("utf-8-sig"),
}
ANSWER = "# größer → 李\ndef f(x):\n    return 'ü' * x\n"


@pytest.mark.parametrize("suffix", [".ipynb", ".py"])
@pytest.mark.parametrize("how", WINDOWS)
def test_a_file_is_read_however_a_program_on_windows_saves_it(tmp_path, how, suffix):
    path = tmp_path / f"01_baseline{suffix}"
    answer = ANSWER if how != "Windows' own" else ANSWER.replace("→", "-")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Übung"), nbformat.v4.new_code_cell(answer)])
    text = f"# %% [markdown]\n# # Übung\n\n# %%\n{answer}"
    text = json.dumps(notebook, ensure_ascii=False, indent=1) if suffix == ".ipynb" else text
    path.write_bytes(WINDOWS[how](text))
    read = notebook_cells.load_notebook(path)
    assert read.cells[0].source.rstrip("\n") == "# Übung"
    space, _ = run(notebook_cells.code_cells(read), "f")
    assert space["f"](2) == "üü" and "\r" not in "".join(notebook_cells.code_cells(read))


def test_line_ends_and_marks_inside_cells_are_no_part_of_them(tmp_path):
    path = tmp_path / "01_baseline.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("\ufeffdef f(x):\r\n    return x\r\n")]), path)
    assert notebook_cells.code_cells(notebook_cells.load_notebook(path)) == ["def f(x):\n    return x\n"]


@pytest.mark.parametrize("text", ['{"cells": [', "", '{"cells": [], "metadata": {}, "nbformat": 9}'])
def test_a_notebook_that_cannot_be_read_has_a_cure(tmp_path, text):
    path = tmp_path / "01_baseline.ipynb"
    path.write_text(text)
    with pytest.raises(CourseError, match=r"cannot be read as a notebook .* open it in JupyterLab .* take an earlier copy"):
        notebook_cells.read_contents(path)


def test_statements_are_cut_as_python_cuts_them():
    cell = ("größe = 'ü'; x = [1,\n  2]; y = '''ä\n\n ö'''  # remark\nif größe:\n\tz = 3\n\f\nw = 1\n"
            "def f(\n    a): return a\n")
    statements = notebook_cells.Program([cell]).statements
    assert [one.text for one in statements] == [ast.get_source_segment(cell, node) for node in ast.parse(cell).body]


@pytest.mark.parametrize("odd", ["\u2028", "\x0b", "\x1c", "\x85"])
def test_what_only_unicode_calls_a_line_end_shifts_no_decorated_function(odd):
    space, source = run([f"text = 'a{odd}b'\nfrom functools import cache\n\n@cache\ndef f(): return 1"], "f")
    assert space["f"]() == 1 and source.startswith("from functools import cache\n\n@cache\ndef f")


def test_the_time_that_slicing_takes_grows_no_faster_than_the_code():
    def seconds(count):
        chain = "".join(f"a{i + 1} = a{i}\n" for i in range(count))
        begin = time.process_time()
        found = notebook_cells.definitions([f"a0 = 1\n{'x' * 5}\n{chain}\ndef f(): return a{count}"], ["f"])
        assert len(found.pieces) == count + 2
        return time.process_time() - begin

    seconds(100)
    short, long = seconds(2000), seconds(16_000)
    assert long < 20 * short                          # 8 times as long; 64 if each statement looked at all others


HEADED = "# ---\n# jupyter:\n{}# ---\n\n# %%\ndef f(): return 1\n"


def test_a_damaged_header_of_a_script_is_a_sentence(tmp_path):
    path = tmp_path / "01_baseline.py"
    path.write_text(HEADED.format("#   a: " + "[" * 2000 + "\n"))
    with pytest.raises(CourseError, match="cannot be read as a notebook"):
        notebook_cells.read_contents(path)
    path.write_text(HEADED.format("#   jupytext:\n#     formats: ipynb,py:percent\n"))
    assert len(notebook_cells.read_contents(path).code) == 1
    path.write_text("# %%\ndef f(): return 1\n" + "# a long remark\n" * 1000 + "# ---\n# ---\n")
    assert len(notebook_cells.read_contents(path).code) == 1


@pytest.mark.parametrize(("sources", "says"), [
    (["x = 1"] * 5001, "more than 5000 cells"),
    (["x = '" + "a" * 400_000 + "'"] * 3, "more than 1 MB of code")])
def test_a_notebook_has_no_more_code_than_anybody_writes(tmp_path, sources, says):
    path = tmp_path / "01_baseline.ipynb"
    made = [{"cell_type": "code", "metadata": {}, "source": source, "outputs": [], "execution_count": None} for source in sources]
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 4, "metadata": {}, "cells": made}))
    with pytest.raises(CourseError, match=says):
        notebook_cells.read_contents(path)
    path = tmp_path / "01_baseline.py"
    path.write_text("\n# %%\n".join(["", *sources]))
    with pytest.raises(CourseError, match=says):
        notebook_cells.read_contents(path)


def test_more_statements_than_anybody_writes_are_refused_where_a_limit_is_given():
    with pytest.raises(CourseError, match="more than 20 statements"):
        notebook_cells.Program(["a\n" * 21], most=20)
    assert len(notebook_cells.Program(["a\n" * 21]).statements) == 21


@pytest.mark.parametrize("kind", ["text", "lines", "format 3", "script"])
def test_contents_are_what_load_gives(tmp_path, kind):
    path = tmp_path / ("a.py" if kind == "script" else "a.ipynb")
    text = "\ufeff# ü\r\ndef f(x):\r\n    return x\r\n"
    source = text.splitlines(True) if kind == "lines" else text
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "source": source, "input": source, "language": "python"}
    body = {"metadata": {"course": {"lesson": "01"}}, "nbformat": 4, "nbformat_minor": 4, "cells": [
        {"cell_type": "markdown", "metadata": {}, "source": "# no code"}, cell | {"execution_count": None}]}
    if kind == "format 3":
        sheets = [{"cells": [cell], "metadata": {}}]
        body = {"metadata": body["metadata"], "nbformat": 3, "nbformat_minor": 0, "worksheets": sheets}
    path.write_text("# %%\n" + text if kind == "script" else json.dumps(body), encoding="utf-8")
    found = notebook_cells.read_contents(path)
    assert list(found.code) == notebook_cells.code_cells(notebook_cells.load_notebook(path))
    assert "return x" in found.code[0] and "\r" not in found.code[0]
    assert found.lesson == ("" if kind == "script" else "01")


@pytest.mark.parametrize("lesson", [["01"], 1, "0" * 200_000, {"a": 1}, None])
def test_a_lesson_in_the_metadata_is_a_short_text_or_none(lesson):
    assert notebook_cells.metadata_lesson({"course": {"lesson": lesson}}) == ""
    assert notebook_cells.metadata_lesson({"course": lesson}) == ""
    assert notebook_cells.metadata_lesson([lesson]) == "" and notebook_cells.metadata_lesson({"course": {"lesson": "01"}}) == "01"
