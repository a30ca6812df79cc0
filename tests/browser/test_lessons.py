"""The lessons as learners meet them: `make lab`, a browser, keys and clicks.

`COURSE_SCREENS=docs/screens python -m pytest tests/browser` takes the screenshots of docs/screens again.
"""

import ast
import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.sign import NotebookNotary

from course.lab.authoring.lessons import ROOT
from course.lab.checks import notebook_cells
from course.lab.mistakes.lesson00_start_here import MISTAKES
from tests.browser.lab import Lab

pytestmark = pytest.mark.xdist_group("browser")     # one JupyterLab for all, where groups are kept together

# Values that a control keeps once it has been moved, by lesson, so that the controls after it have something to change: only the
# interleaved schedule has chunks, and one GPU has nothing to cut.
KEPT = {"12": {"schedule": "interleaved"}, "17": {"batch": "64", "gpus": "8", "tp": "2"}}
# Stand-ins by lesson: the forecasts of the model that lesson 01 trains are noise here.
GIVEN = {"01": "import torch\n\nu10 = 0\ntruths, forecasts = (list(states) for states in torch.randn(2, 9, 1, 32, 64))\n"}
RUNS = """from pathlib import Path
from course.lab import notebook as lab
from course.lab.instruments import recorded_curves
lab.begin("08")
logs = Path("runs/reference")
recorded_curves.to_tensorboard({"runs": [run for run in lab.results("convergence")["runs"] if run["batch"] == 16]}, logs)
address = lab.tensorboard(logs)"""


def keep(lab: Lab, name: str, top: Any = None) -> None:
    """A screenshot, if somebody wants them."""
    if folder := os.environ.get("COURSE_SCREENS"):
        (ROOT / folder).mkdir(exist_ok=True)
        lab.picture(ROOT / folder / f"{name}.png", top)


def write(path: Path, sources: list[str]) -> None:
    """A notebook with these code cells."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)


def test_a_learner_does_lesson_00(lab: Lab):
    lab.open("notebooks/00_start_here.ipynb")
    lab.wait(lambda: "01_baseline.ipynb" in lab.one(".jp-DirListing-content").text, "the file browser does not show the lessons")
    see_no_strangers(lab)
    lab.restart_and_run_all()
    assert lab.prompts()[-1] == "[ ]:"               # it stops at the first exercise
    task, check = lab.cell("def matmul_cost"), lab.cell('check("matmul-cost")')
    lab.wait(lambda: "not written yet" in lab.shown(check), "the check says nothing")

    lab.last_line(task, "return m * k * n, itemsize * (m * k + k * n + m * n)")
    lab.run(task)
    wrong = lab.run(check, "matmul-cost: not yet")
    hint = next(mistake.hint for mistake in MISTAKES["matmul-cost"] if mistake.name == "multiplications alone")
    assert f"Hint. {hint}" in wrong
    keep(lab, "hint", task)

    lab.last_line(task, "return 2 * m * k * n, itemsize * (m * k + k * n + m * n)")
    lab.run(task)
    right = lab.run(check, "matmul-cost: passed")
    assert "Hint." not in right
    keep(lab, "passed", task)

    lab.last_line(lab.cell("def roofline_seconds"), "return max(flops / peak_flops, moved / peak_bytes)")
    lab.restart_and_run_all()
    prompts = lab.prompts()
    assert prompts == [f"[{number}]:" for number in range(1, len(prompts) + 1)]
    lab.wait(lambda: "rank 3 of 4 has the sum 6" in lab.shown(lab.cell("def add_up")), "no sum")
    roof = lab.cell("widgets.explore(")
    move_each_control(lab, roof, "00")
    keep(lab, "slider", lab.all(".jp-OutputArea", roof)[0])


def see_no_strangers(lab: Lab) -> None:
    """Nothing asks or offers what is not the course's: no news, no nbgrader."""
    assert not lab.all(".Toastify__toast") and not lab.all(".jp-Dialog")
    assert not [item.text for item in lab.all(".lm-MenuBar-itemLabel") if "nbgrader" in item.text.lower()]
    assert not [item for item in lab.all(".jp-Toolbar button, .jp-Toolbar jp-button") if "Validate" in item.text]
    assert not lab.all("[data-id='nbgrader-create-assignment'], [title*='Create Assignment']")


def test_each_widget_of_the_other_lessons_follows_its_controls(lab: Lab, home: Path):
    masters = sorted(ROOT.glob("solutions/[0-9][0-9]_*.py"))[1:]
    found = [(master.stem[:2], source) for master in masters for source in widgets(master)]
    assert len(found) == sum(master.read_text().count("widgets.explore(") for master in masters)
    write(home / "notebooks/widgets.ipynb", [source for _, source in found])
    lab.open("notebooks/widgets.ipynb")
    for (lesson, _), cell in zip(found, lab.all(".jp-CodeCell"), strict=True):
        lab.run(cell)
        move_each_control(lab, cell, lesson)
    keep(lab, "planner", lab.all(".jp-OutputArea", cell)[0])


def move_each_control(lab: Lab, cell: Any, lesson: str) -> None:
    """Each control of a cell's widget changes the picture, or puts a sentence in its place; moved back, it brings it back."""
    for name, control in lab.wait(lambda: lab.seen(cell) and lab.controls(cell), f"lesson {lesson}: no picture").items():
        step = -1 if lab.is_last(control) else 1
        before = lab.move(cell, control, step)
        lab.move(cell, control, -step)
        lab.wait(lambda: lab.seen(cell) == before, f"lesson {lesson}: {name}, moved back, shows another picture")   # noqa: B023
        while (value := KEPT.get(lesson, {}).get(name)) and lab.value(control) != value:
            lab.move(cell, control, 1)


@pytest.mark.parametrize("lesson", ["00", "10", "17"])
def test_a_lesson_that_has_run_fits_the_window(lab: Lab, home: Path, lesson: str):
    master, = ROOT.glob(f"solutions/{lesson}_*.py")
    notebook = nbformat.read(master.with_suffix(".ipynb"), as_version=4)
    live = iter(widgets(master))
    for cell in notebook.cells:
        if cell.cell_type == "code" and "widgets.explore(" in cell.source:
            cell.source, cell.outputs = next(live), []
    nbformat.write(notebook, home / f"notebooks/{lesson}_fits.ipynb")
    NotebookNotary(data_dir=str(home.parent / "share")).sign(notebook)     # as if it had run here, so that all outputs are shown
    for width in (720, 1280):
        lab.resize(width)
        lab.open(f"notebooks/{lesson}_fits.ipynb")
        if width == 720:
            lab.hide_files()
        for cell in [cell for cell in lab.all(".jp-CodeCell") if "widgets.explore(" in lab.source(cell)]:
            lab.run(cell)
            lab.wait(lambda: lab.seen(cell), "no picture")          # noqa: B023
        for name in ("Light", "Dark"):
            lab.theme(name)
            see_no_strangers(lab)
            assert lab.cut() == [], f"{name}, {width} pixels"


def test_tensorboard_opens_in_the_notebook(lab: Lab, home: Path):
    write(home / "notebooks/runs.ipynb", [RUNS])
    lab.open("notebooks/runs.ipynb")
    cell = lab.cell("lab.tensorboard")
    lab.run(cell, "TensorBoard of runs/reference")
    lab.browser.switch_to.frame(lab.one(".jp-OutputArea iframe", cell))
    lab.wait(lambda: {"valid_loss", "b016-lr1.0e-03-warmup20-constant"} <= set(lab.one("body").text.replace("\n", " ").split()),
             "TensorBoard does not name the curves")
    lab.one("scalar-card line-chart")
    lab.browser.switch_to.default_content()
    keep(lab, "tensorboard", lab.all(".jp-OutputArea", cell)[0])


def widgets(master: Path) -> list[str]:
    """A cell that runs alone for each widget of a lesson, all exercises being done."""
    found, earlier = [], []
    for cell in notebook_cells.load_notebook(master).cells:
        for statement in ast.parse(cell.source).body if cell.cell_type == "code" else []:
            if "widgets.explore(" in ast.unparse(statement):
                found.append(alone(statement, earlier, GIVEN.get(master.stem[:2], "")))
            earlier.append(statement)
    return found


def alone(last: ast.stmt, earlier: list[ast.stmt], given: str) -> str:
    """A cell that runs alone: a lesson's statement, and before it those that give values to the names that it uses."""
    there = {name for statement in ast.parse(given).body for name in bound(statement)}
    wanted, kept = names(last), []
    while more := [statement for statement in earlier if statement not in kept and bound(statement) & (wanted - there)]:
        kept += more
        wanted |= set().union(*(names(statement) for statement in more))
    return given + "\n".join(ast.unparse(statement) for statement in [*(one for one in earlier if one in kept), last])


def bound(statement: ast.stmt) -> set[str]:
    """The names to which an import, a definition or an assignment gives a value."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return set().union(*(names(target, ast.Store) for target in targets))


def names(tree: ast.AST, context: type[ast.expr_context] = ast.Load) -> set[str]:
    """The names that a piece of code uses, or assigns to."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, context)}
