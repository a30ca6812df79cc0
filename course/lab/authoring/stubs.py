"""Show a library object's source whole, as an exercise's answer, or blank, as its stub.

An object is a top-level function or class, given by its dotted name, such as `course.models.vit.RelativeL2`. Its source is the
answer. Its blank keeps signatures, docstrings and the shape comments on signatures, and raises "not implemented yet". So every
answer exists once, as the code that the tests cover.
"""

import ast
import builtins
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from course.lab.authoring import hidden_answers
from course.utils.errors import CourseError, did_you_mean

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"  # nbgrader's own markers
UNWRITTEN = "not implemented yet"                    # what a blank raises
STUB = f'raise NotImplementedError("{UNWRITTEN}")  # your code here'
PACKAGE = Path(__file__).parents[2]                  # the folder of `course`
# not copied with the package: mistakes are nearly answers, and no answer needs recorded data
IGNORED = ("__pycache__", "mistakes", "*.json", Path(hidden_answers.ARCHIVE).name)
TABLES = ("host_", "kernels_")                       # recorded results that the planner reads
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class LibraryObject:
    """A top-level function or class of a library module."""

    module: str                                      # course.models.vit
    name: str                                        # RelativeL2
    file: Path
    text: str                                        # source of the whole module
    tree: ast.Module
    node: Function | ast.ClassDef

    @property
    def lines(self) -> tuple[int, int]:
        """First and last line in the module, from 1, decorators included."""
        return min([self.node.lineno, *(d.lineno for d in self.node.decorator_list)]), self.node.end_lineno or 0


def find_object(dotted: str) -> LibraryObject:
    """Look up a library object without importing its module. Raises `CourseError` if there is none."""
    module, _, name = dotted.rpartition(".")
    spec = find_spec(module) if module.startswith("course") else None       # only the course's own package
    if spec is None or spec.origin is None:
        raise CourseError(f"{dotted}: the library has no module {module}")
    file = Path(spec.origin)
    text = hidden_answers.original_text(module, file)
    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and node.name == name:
            return LibraryObject(module, name, file, text, tree, node)
    there = [node.name for node in tree.body if isinstance(node, Function | ast.ClassDef)]
    raise CourseError(f"{dotted}: {module} has no function or class {name} at its top level{did_you_mean(name, there)}")


def answer_source(*objects: str, marked: bool = False, written: Collection[str] = ()) -> str:
    """The sources of objects that share a cell, below the imports that they need, without duplicates.

    `marked` puts the parts that the learner writes between nbgrader's markers. `written`: dotted names of objects that are there
    already and are not imported.
    """
    every = list(map(find_object, objects))
    return needed_imports(every, written) + "\n\n".join(object_source(found, marked) for found in every)


def object_source(library_object: LibraryObject, marked: bool) -> str:
    """An object's source, without imports."""
    lines = without_type_notes(library_object.text)
    first, last = library_object.lines
    if marked:
        for start, end, indent in sorted(answer_bodies(library_object.node), reverse=True):
            lines[start - 1:end] = [indent + BEGIN, *lines[start - 1:end], indent + END]
            last += 2
    return "\n".join(lines[first - 1:last]).rstrip() + "\n"


def clear_answers(text: str) -> str:
    """Replace the lines between the markers by the stub, as nbgrader does."""
    lines, inside = [], False
    for line in text.splitlines():
        if BEGIN in line:
            inside = True
            lines.append(line[:len(line) - len(line.lstrip())] + STUB)
        elif END in line:
            inside = False
        elif not inside:
            lines.append(line)
    return "\n".join(lines) + "\n"


def answer_bodies(node: ast.AST) -> Iterator[tuple[int, int, str]]:
    """(first line, last line, indentation) of the body, without docstring, of each function or method.

    It skips an `__init__` without a docstring: that one only sets attributes, so the learner gets it.
    """
    if isinstance(node, ast.ClassDef):
        for child in node.body:
            yield from answer_bodies(child)
    elif isinstance(node, Function) and (node.name != "__init__" or ast.get_docstring(node)):
        start = node.body[0].lineno
        if ast.get_docstring(node) is not None:
            start = (node.body[0].end_lineno or 0) + 1
        else:                                        # a comment above the first statement belongs to the answer
            start = min(start, last_line_of_signature(node) + 1)
        yield start, node.end_lineno or 0, " " * node.body[0].col_offset


def last_line_of_signature(node: Function) -> int:
    """The last line of `def ...:`."""
    parts = [node.lineno, *(a.end_lineno or 0 for a in ast.walk(node.args) if isinstance(a, ast.expr | ast.arg))]
    return max(parts + ([node.returns.end_lineno or 0] if node.returns else []))


def needed_imports(objects: Sequence[LibraryObject], written: Collection[str] = ()) -> str:
    """The import lines that these objects' sources need outside their modules, without what is `written` (dotted names)."""
    lines: list[str] = []
    known = {found.name for found in objects} | set(dir(builtins))
    for module in dict.fromkeys(found.module for found in objects):
        group = [found for found in objects if found.module == module]
        needed = {n.id for found in group for n in ast.walk(found.node) if isinstance(n, ast.Name)} - known
        module_names = []
        for node in group[0].tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias for alias in node.names if (alias.asname or alias.name.split(".")[0]) in needed]
                if names:
                    lines.append(ast.unparse(ast.Import(names) if isinstance(node, ast.Import)
                                             else ast.ImportFrom(node.module, names, node.level)))
            elif isinstance(node, Function | ast.ClassDef) and node.name in needed and f"{module}.{node.name}" not in written:
                module_names.append(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                module_names += [n.id for n in ast.walk(node)
                        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.id in needed]
        if module_names:
            lines.append(f"from {module} import {', '.join(sorted(module_names))}")
    return "\n".join(dict.fromkeys(lines)) + "\n\n\n" if lines else ""


def shown_source(dotted: str) -> str:
    """An object's source as lessons show it."""
    library_object = find_object(dotted)
    first, last = library_object.lines
    return "\n".join(without_type_notes(library_object.file.read_text(encoding="utf-8"))[first - 1:last]) + "\n"


def without_type_notes(text: str) -> list[str]:
    """The lines of a module without its comments for the type checker."""
    return [re.sub(r"\s*# type: ignore(\[[^]]*\])?", "", line) for line in text.splitlines()]


def build_blanked_package(objects: Sequence[str], folder: Path) -> Path:
    """Copy the package to `folder`/course with these objects blank; returns `folder`, to be first on PYTHONPATH.

    It leaves out the known mistakes, which are nearly answers, and recorded results but for the planner's tables.
    """
    target, ignored = folder / "course", shutil.ignore_patterns(*IGNORED)
    shutil.copytree(PACKAGE, target,
                    ignore=lambda inside, names: {name for name in ignored(inside, names) if not name.startswith(TABLES)})
    unhidden = {hidden_answers.module_file(module): text for module,
             text in hidden_answers.hidden_texts().items() if ".mistakes." not in module}
    for file, text in (unhidden | blanked_modules(objects)).items():
        (target / file.relative_to(PACKAGE)).write_text(text, encoding="utf-8")
    return folder


def blanked_modules(objects: Sequence[str]) -> dict[Path, str]:
    """The texts of these objects' modules, by file, with the objects blank and all line numbers unchanged."""
    groups: dict[Path, list[LibraryObject]] = {}
    for found in map(find_object, objects):
        groups.setdefault(found.file, []).append(found)
    texts = {}
    for file, group in groups.items():
        lines = group[0].text.splitlines()
        for start, end, indent in (body for found in group for body in answer_bodies(found.node)):
            lines[start - 1:end] = [indent + STUB, *[""] * (end - start)]
        texts[file] = "\n".join(lines) + "\n"
    return texts
