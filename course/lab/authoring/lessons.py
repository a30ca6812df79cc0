"""Build lessons: turn the master `solutions/NN_name.py` into the learner's notebook and the executed one.

A master is a script in jupytext's percent format. A cell marked `exercise="name"` is an exercise. Either it imports library
objects, and the notebooks show their sources (blank for the learner), or it holds its answer between nbgrader's markers. A cell
that calls `check("name")` is nbgrader's autograded test. `notebooks/NN_name.ipynb` is the learner's notebook,
`solutions/NN_name.ipynb` the executed one.

A cell marked `numbers=true` is in neither notebook. It defines the names for `{result: EXPRESSION | FORMAT}` in the text
(`course/bench/results`), so that the text never repeats recorded numbers by copy.
"""

import ast
import filecmp
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from course.bench import results
from course.lab.authoring import stubs
from course.lab.checks import exercise as exercises
from course.lab.checks import notebook_cells, own_notebooks
from course.lab.checks.exercise import Exercise
from course.lab.grading import shipped_files
from course.lab.notebook import BUILDING
from course.utils.atomic_files import atomic
from course.utils.colors import BLUE, GREEN, ORANGE
from course.utils.errors import CourseError

ROOT = stubs.PACKAGE.parent                          # holds notebooks/ and solutions/ in a clone
SHIPPED = stubs.PACKAGE / "given"                    # the same files in a wheel
COLUMNS = 88                                         # of a line of code, at most
BUILDER_VERSION = "2"                                # a new version makes all notebooks stale
CELL_TIMEOUT = 900                                   # seconds that a cell may take
CHECK_CALL = re.compile(r'^check\("([\w-]+)"', re.MULTILINE)
SHOW_CALL = re.compile(r'\bshow\("([\w.]+)"\)')
WIDGET = "application/vnd.jupyter.widget-view+json"
QUOTE = re.compile(r"^> \*\*(\w+)(?:.*\n?)(?:^>.*\n?)*", re.MULTILINE)
TASK = re.compile(r"^(## (?:Exercise|Open task): .*\n)((?:(?!## ).*(?:\n|$))+)", re.MULTILINE)
BARS = {"Predict": ORANGE, "Question": BLUE, "Exercise": GREEN}
MIN_LEAK = 30                                        # answer lines at least this long count as leaks


def masters(names: list[str], root: Path = ROOT) -> list[Path]:
    """The masters with these names (such as 01 or 01_baseline), or all. Raises `CourseError` if one is missing."""
    paths = sorted((root / "solutions").glob("[0-9][0-9]_*.py"))
    if not paths:
        raise CourseError(f"{root}/solutions holds no lessons' masters: use the `course` of a clone of the repository; "
                          "a release or a wheel for learners has none")
    for name in names:
        if not any(path.stem.startswith(name.removesuffix(".py")) for path in paths):
            raise CourseError(f"there is no lesson {name}; there are {', '.join(path.stem for path in paths)}")
    return [path for path in paths if not names or any(path.stem.startswith(n.removesuffix(".py")) for n in names)]


def build(names: list[str], root: Path = ROOT, force: bool = False) -> None:
    """Write the notebooks of these lessons, and execute those whose code, or what it shows, has changed.

    If only text, line breaks, comments, points or other nbgrader metadata changed, it executes nothing and keeps the outputs.
    Raises `CourseError` for code that is too long for a notebook's cell.
    """
    for master in masters(names, root):
        if long := long_lines(master):
            raise CourseError(f"{master.name} has code of more than {COLUMNS} columns, for which a learner would have to scroll: "
                              f"break {'; '.join(line.strip() for line in long)}")
        write_notebook(learner_notebook(master), root / "notebooks" / f"{master.stem}.ipynb")
        target, notebook = root / "solutions" / f"{master.stem}.ipynb", instructor_notebook(master)
        before = None if force or is_stale(target, notebook) else notebook_cells.load_notebook(target)
        if before is None or parsed(notebook_cells.code_cells(before)) != parsed(notebook_cells.code_cells(notebook)):
            print(f"executing {master.name}", flush=True)
            notebook = execute(notebook, root / "notebooks")
        else:
            take_outputs(notebook, before)
        write_notebook(notebook, target)
        print(f"{master.stem}: up to date")


def long_lines(master: Path) -> list[str]:
    """Lines of code that are too long for a cell. Not in it: text, exercises, whose source is the library's, and numbers."""
    found, shown = list[str](), False
    for line in master.read_text(encoding="utf-8").splitlines():
        if line.startswith("# %%"):
            shown = not any(word in line for word in ("[markdown]", "exercise=", "numbers=true"))
        elif shown and len(line) > COLUMNS and "SLURM" not in line and not line.lstrip().startswith('f"{'):  # unbreakable words
            found.append(line)
    return found


def take_outputs(notebook: Any, executed: Any) -> None:
    """Copy the outputs of an executed notebook to the same code cells of another."""
    own, other = ([cell for cell in book.cells if cell.cell_type == "code"] for book in (notebook, executed))
    for cell, before in zip(own, other, strict=True):
        cell.outputs, cell.execution_count = before.outputs, before.execution_count


def verify(names: list[str], root: Path = ROOT) -> list[str]:
    """The findings of `build --check`: a sentence for everything that is stale or reveals an answer."""
    problems = []
    for master in masters(names, root):
        solved = instructor_notebook(master)
        for folder, wanted in (("notebooks", learner_notebook(master)), ("solutions", solved)):
            path = root / folder / f"{master.stem}.ipynb"
            if is_stale(path, wanted):
                problems.append(f"{folder}/{path.name} is stale: run `course lessons build {master.stem}`")
            elif cell_texts(notebook := notebook_cells.load_notebook(path)) != cell_texts(wanted):
                problems.append(f"{folder}/{path.name} has other text than solutions/{master.name}: edit that, and run `course "
                                f"lessons build {master.stem}`, which executes what has other code")
            elif all_nbgrader_metadata(notebook) != all_nbgrader_metadata(wanted):
                problems.append(f"{folder}/{path.name} has other points, or other metadata for nbgrader, than its exercises: run "
                                f"`course lessons build {master.stem}`, which keeps its outputs")
        path = root / "notebooks" / f"{master.stem}.ipynb"
        if path.is_file():
            problems += [f"notebooks/{path.name} {leak}"
                      for leak in find_leaks(notebook_cells.load_notebook(path), solved)]
    return problems


def copy(folder: Path, home: Path | None = None) -> None:
    """Copy the blank notebooks to folder/notebooks and the scripts for clusters to folder/submit.

    They come from `home`, a clone or the files inside a wheel. Identical files stay. Raises `CourseError`, before writing
    anything, if a file of the same name has other contents.
    """
    home = home or (SHIPPED if SHIPPED.is_dir() else ROOT)
    names = shipped_files.list_files(home)
    first = next((name for name in names if name.suffix == ".ipynb"), None)
    if first is None:
        raise CourseError(f"{home}/notebooks holds no lessons: install the course's wheel, or use the `course` of a clone")
    for part in (folder, folder / "notebooks", folder / "submit"):
        if part.exists() and not part.is_dir():
            raise CourseError(f"{part} is a file, but a folder is needed there: name another one, or move the file")
    existing = [name for name in names if (folder / name).exists()]
    changed = [name for name in existing if not filecmp.cmp(folder / name, home / name, shallow=False)]
    if changed:
        more = f" and {len(changed) - 1} more" if changed[1:] else ""
        raise CourseError(f"{folder} has {changed[0]}{more}, which was changed, or written by another version: "
                          "nothing was copied; name another folder, or move what is there")
    for name in sorted({*names} - {*existing}):
        with atomic(folder / name) as temporary:
            shutil.copy(home / name, temporary)
    own_notebooks.remember_course(folder)
    print(f"{folder}/notebooks has the lessons; begin with: jupyter lab {shlex.quote(str(folder / first))}\n"
          f"{folder}/submit has scripts for clusters; say before sbatch: export COURSE_PYTHON={shlex.quote(sys.executable)}")


def instructor_notebook(master: Path) -> Any:
    """The notebook with answers between nbgrader's markers, numbers filled in and nbgrader's metadata, not executed."""
    notebook = notebook_cells.load_notebook(master)
    fill_numbers(notebook)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"lesson{master.stem[:2]}-{number:03d}"
        name = cell.metadata.pop("exercise", None)
        if name:
            cell.source = expand_answer(cell.source, exercises.find(name))
            cell.metadata["nbgrader"] = nbgrader_metadata(name, solution=True)
        elif cell.cell_type == "code" and (match := CHECK_CALL.search(cell.source)):
            exercise = exercises.find(match[1])
            cell.metadata["nbgrader"] = nbgrader_metadata(f"check-{exercise.name}", solution=False) | {
                "points": 0 if exercise.open else exercise.points}           # nbgrader gives all points or none
    notebook.metadata = notebook_cells.new_metadata(
        {"lesson": master.stem[:2], "source": source_digest(notebook_cells.code_cells(notebook))})
    return notebook


def fill_numbers(notebook: Any) -> None:
    """Remove the cells marked `numbers=true`, and fill `{result: ...}` in the text from them. Raises `CourseError`."""
    names = defined("\n".join(cell.source for cell in notebook.cells if cell.metadata.get("numbers")))
    notebook.cells = [cell for cell in notebook.cells if not cell.metadata.get("numbers")]
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = boxed(results.fill(cell.source, names))


def boxed(text: str) -> str:
    """A cell's text with a colored bar beside each prediction, question and exercise; letters keep the page's color."""
    def box(color: str, inner: str) -> str:
        return f'<div style="border-left: 6px solid {color}; padding-left: 1em">\n\n{inner.strip()}\n\n</div>\n'

    def unquoted(found: re.Match[str]) -> str:
        return box(BARS.get(found[1], BARS["Question"]), re.sub(r"^> ?", "", found[0], flags=re.MULTILINE))

    text = QUOTE.sub(unquoted, text)
    return TASK.sub(lambda found: f"{found[1]}\n{box(BARS['Exercise'], found[2])}\n" if found[2].strip() else found[0],
                    text).rstrip("\n")


@cache
def defined(source: str) -> dict[str, Any]:
    """The names that `source` defines, plus `value` and `load`, which read recorded results."""
    names: dict[str, Any] = {"value": results.value, "load": results.load}
    exec(source, names)
    return names


def learner_notebook(master: Path) -> Any:
    """The notebook with blank exercises and no outputs."""
    notebook = instructor_notebook(master)
    for cell in notebook.cells:
        if "nbgrader" in cell.metadata and cell.metadata["nbgrader"]["solution"]:
            cell.source = stubs.clear_answers(cell.source).rstrip("\n")
    return notebook


def expand_answer(source: str, exercise: Exercise) -> str:
    """An exercise's cell with its answer: replace imports of the exercise's objects by their sources."""
    if stubs.BEGIN in source:
        return source
    modules = {dotted.rpartition(".")[0]: dotted for dotted in exercise.objects}
    nodes = ast.parse(source).body
    if not all(isinstance(node, ast.ImportFrom) and node.module in modules for node in nodes):
        raise CourseError(f"exercise {exercise.name}: its cell must either import {', '.join(exercise.objects)} and nothing "
                          f"else, or have its answer between {stubs.BEGIN} and {stubs.END}")
    return exercises.right(exercise, marked=True).rstrip("\n")


def nbgrader_metadata(name: str, solution: bool) -> dict[str, Any]:
    """nbgrader's metadata for a cell: an answer to collect, or a test to run."""
    return {"grade_id": name, "solution": solution, "grade": not solution, "locked": not solution, "task": False,
            "schema_version": 3}


def source_digest(code: list[str]) -> str:
    """A hash of everything that outputs depend on: code, the library objects that it shows, recorded results, builder."""
    text = "\n".join(code)
    shown = sorted(set(SHOW_CALL.findall(text)))
    recorded = (path.read_text(encoding="utf-8") for path in sorted(results.FOLDER.glob("*.json")) if f'"{path.stem}"' in text)
    parts = [BUILDER_VERSION, *parsed(code), *(stubs.shown_source(dotted) for dotted in shown), *recorded]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def parsed(code: list[str]) -> list[str]:
    """The syntax of cells, without what changes no output: comments, line breaks and docstrings."""
    trees = [ast.parse(cell) for cell in code]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return [ast.dump(tree) for tree in trees]


def is_stale(path: Path, wanted: Any) -> bool:
    """Whether a notebook is missing, or was built from other sources than the one that should be there."""
    if not path.is_file():
        return True
    built: str = notebook_cells.load_notebook(path).metadata.get("course", {}).get("source")
    return built != wanted.metadata["course"]["source"]


def cell_texts(notebook: Any) -> list[tuple[str, str]]:
    """Each cell's type and source. Outputs are left out, because they contain timings."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def all_nbgrader_metadata(notebook: Any) -> list[dict[str, Any]]:
    """Each cell's metadata for nbgrader."""
    return [cell.metadata.get("nbgrader", {}) for cell in notebook.cells]


def find_leaks(notebook: Any, solved: Any) -> Iterator[str]:
    """Find where a learner's notebook reveals an answer: by outputs, markers, or a line of an answer."""
    texts = [cell.source for cell in notebook.cells]
    if any(cell.get("outputs") or cell.get("attachments") for cell in notebook.cells):
        yield "has outputs"
    if any(stubs.BEGIN in text for text in texts):
        yield "has an answer between its markers"
    everything = without_spaces("\n".join(texts))
    for cell in solved.cells:
        for line in answer_lines(cell.source):
            if len(without_spaces(line)) >= MIN_LEAK and without_spaces(line) in everything:
                yield f"shows a line of an answer: {line.strip()}"


def answer_lines(source: str) -> Iterator[str]:
    """The lines between the markers, without comments."""
    inside = False
    for line in source.splitlines():
        if stubs.BEGIN in line or stubs.END in line:
            inside = stubs.BEGIN in line
        elif inside:
            yield line.split("  #")[0]


def without_spaces(text: str) -> str:
    """A text without whitespace."""
    return "".join(text.split())


def execute(notebook: Any, folder: Path) -> Any:
    """Run all cells in a fresh kernel, and remove this machine's paths from outputs. Raises `CourseError` if a cell fails."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    folder.mkdir(exist_ok=True)
    os.environ[BUILDING] = "1"                       # inherited by the kernel
    metadata = notebook.metadata
    try:
        NotebookClient(notebook, timeout=CELL_TIMEOUT, kernel_name="python3", record_timing=False, store_widget_state=False,
                       resources={"metadata": {"path": str(folder)}}).execute()
    except CellExecutionError as error:
        output_texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for cell in notebook.cells
                for output in cell.get("outputs", [])]
        where = next((line for line in str(error).splitlines()[1:] if line.strip("- ")), "")     # below nbclient's header
        raise CourseError("\n".join([f"lesson {metadata['course']['lesson']} does not run; the cell that begins with",
                                     f"    {where}", f"stopped with {error.ename}: {error.evalue}",
                                     *output_texts[-2:]])) from None
    finally:
        del os.environ[BUILDING]
    notebook.metadata = notebook_cells.new_metadata(dict(metadata["course"]))
    scrub_outputs(notebook, folder.parent)
    return notebook


def scrub_outputs(notebook: Any, root: Path) -> None:
    """Remove from outputs what means nothing elsewhere: this machine's folders, and widgets without their kernel."""
    import nbformat

    names = {str(root): "~/course", sys.prefix: "~/course/.venv", sys.base_prefix: "~/python", str(Path.home()): "~"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            text = json.dumps(cell.outputs)
            for folder, name in names.items():
                text = text.replace(json.dumps(folder)[1:-1], name)
            cell.outputs = list(filter(without_widget, map(nbformat.from_dict, json.loads(text))))


def without_widget(output: Any) -> bool:
    """Remove the widget from an output; returns whether the output stays. A progress bar, without an image, goes."""
    return output.get("data", {}).pop(WIDGET, None) is None or "image/png" in output["data"]


def write_notebook(notebook: Any, path: Path) -> None:
    """Write a notebook atomically, if it differs from the file."""
    import nbformat

    text = nbformat.writes(notebook) + "\n"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        with atomic(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
