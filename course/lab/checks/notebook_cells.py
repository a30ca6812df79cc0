"""What a learner wrote: the code cells of a notebook, a script or the running kernel, and the definitions in them."""

import ast
import bisect
import dis
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from course.ranks.collective_mismatch import CELL
from course.utils.errors import CourseError, did_you_mean

MAX_BYTES = 50_000_000                               # bytes of a notebook, outputs and all, that anybody has a reason to hand in
MAX_CODE = 1_000_000                                 # characters of code in it
MAX_CELLS = 5000
MAX_STATEMENTS = 20_000                              # at the top of its cells, where somebody else handed it in


@dataclass(frozen=True)
class Piece:
    """Source that stands together in a cell, and where: in the file that tracebacks name, which is a cell, not a path."""

    cell: str                                        # "the cell with `def training_step`"
    line: int                                        # of its beginning there, from 1
    text: str


@dataclass(frozen=True)
class Answer:
    """What an exercise asks for, with all that it needs; `problem` says why there is none."""

    pieces: tuple[Piece, ...] = ()
    problem: str = ""
    broken: bool = False                             # the problem is a cell that is not valid Python
    imported: bool = False                           # the problem is that it only imports what it should write

    @property
    def source(self) -> str:
        """The pieces, one after another."""
        return "\n\n".join(piece.text for piece in self.pieces) + "\n"


def whole_answer(source: str) -> tuple[Piece, ...]:
    """A text that is an answer as it stands."""
    return Piece(CELL + "with the answer", 1, source),


@dataclass(frozen=True)
class Contents:
    """What counts of a notebook: its code cells, in order, and the lesson that its metadata name ("" if none)."""

    code: tuple[str, ...]
    lesson: str = ""


def load_notebook(path: Path) -> Any:
    """A notebook (nbformat node) from .ipynb or, by jupytext, from a .py in percent format; `CourseError` if it is none."""
    try:
        import nbformat  # slow to import, and only where there are notebooks
    except ImportError as error:
        raise CourseError("reading notebooks needs JupyterLab's packages: pip install 'course[lab]'") from error

    with parse_errors(path):
        text = read_text(path)
        return nbformat.reads(text, as_version=4) if path.suffix.lower() == ".ipynb" else parse_script(text, path)


def read_contents(path: Path) -> Contents:
    """What counts of a notebook or script.

    Most notebooks are read without nbformat, which takes seconds to import.
    """
    with parse_errors(path):
        notebook = json.loads(read_text(path)) if path.suffix.lower() == ".ipynb" else {}
        if notebook.get("nbformat") != 4:
            notebook = load_notebook(path)
        contents = notebook_contents(notebook)
        check_size(contents.code, len(notebook["cells"]), path)
        return contents


def notebook_contents(notebook: Any) -> Contents:
    """What counts of a notebook that is in memory: its JSON, or nbformat's node."""
    return Contents(tuple(code_cells(notebook)), metadata_lesson(notebook.get("metadata")))


def metadata_lesson(metadata: Any) -> str:
    """The lesson that a notebook's metadata name; "" if they name none."""
    course = metadata.get("course") if isinstance(metadata, dict) else None
    lesson = course.get("lesson") if isinstance(course, dict) else None
    return lesson if isinstance(lesson, str) and len(lesson) <= 20 else ""


def cell_source(cell: Any) -> str:
    """The text of a cell, which in a notebook's JSON may be a list of lines: with Unix's line ends, without a byte-order mark."""
    if not isinstance(cell["source"], list | str):
        raise ValueError("a cell without text")
    return unix_lines("".join(cell["source"])).removeprefix("\ufeff")


def parse_script(text: str, path: Path) -> Any:
    """A notebook from the text of a script in percent format."""
    try:
        import jupytext  # slow to import, and only where there are scripts
    except ImportError as error:
        raise CourseError("reading scripts needs JupyterLab's packages: pip install 'course[lab]'") from error

    if text.count("\n# %%") > MAX_CELLS:            # before it makes anything of them
        raise CourseError(f"{path} has more than {MAX_CELLS} cells: leave out those that are no part of the lesson")
    return jupytext.reads(text, fmt="py:percent")


def read_text(path: Path) -> str:
    """The text of a notebook or script, if it is there and no larger than any may be."""
    if path.suffix.lower() not in (".ipynb", ".py"):
        raise CourseError(f"{path}: give a notebook (.ipynb) or a script in percent format (.py)")
    if not path.is_file():
        siblings = [file.name for file in path.parent.glob(f"*{path.suffix}")]
        raise CourseError(f"{path}: there is no such file{did_you_mean(path.name, siblings)}")
    if path.stat().st_size > MAX_BYTES:
        raise CourseError(f"{path} has more than {MAX_BYTES // 1_000_000} MB: clear its outputs and save it again")
    return decode_text(path.read_bytes())


def check_size(sources: Sequence[str], cells: int, path: Path) -> None:
    """Refuse a notebook with more code, or more cells, than anybody has a reason to write."""
    if cells > MAX_CELLS:
        raise CourseError(f"{path} has more than {MAX_CELLS} cells: leave out those that are no part of the lesson")
    if sum(map(len, sources)) > MAX_CODE:
        raise CourseError(f"{path} has more than {MAX_CODE // 1_000_000} MB of code: put long data into a file")


@contextmanager
def parse_errors(path: Path) -> Iterator[None]:
    """Turn whatever the parsers meet in a damaged or hostile file into a `CourseError` that names it."""
    try:
        yield
    except CourseError:
        raise
    except Exception as error:
        raise CourseError(f"{path} cannot be read as a notebook ({type(error).__name__}): open it in JupyterLab and save it; if "
                          "that does not open it, take an earlier copy, or write it anew from the lesson's") from error


def decode_text(data: bytes) -> str:
    """The text of a notebook or script, in whatever encoding a program on its way has saved it, with Unix's line ends."""
    with suppress(UnicodeDecodeError):
        return unix_lines(data.decode(json.detect_encoding(data)))       # by its mark, or by the zeros at its beginning
    return unix_lines(data.decode("cp1252", errors="replace"))


def unix_lines(text: str) -> str:
    """Text whose lines end as Unix has them."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def new_metadata(course: dict[str, Any]) -> Any:
    """A notebook's metadata: a Python kernel whatever its version, and what the course keeps there."""
    import nbformat

    return nbformat.from_dict({"kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
                               "language_info": {"name": "python"}, "course": course})


def code_cells(notebook: Any) -> list[str]:
    """The sources of a notebook's code cells, in order."""
    return [cell_source(cell) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def executed_cells() -> list[str]:
    """What was executed in the running kernel, in order; empty outside of one."""
    try:
        from IPython import get_ipython
    except ImportError:
        return []
    shell = get_ipython()
    return list(shell.user_ns.get("In", [])) if shell else []


@dataclass(frozen=True)
class Statement:
    """A statement at the top of a cell: what it binds and reads, and where it stands."""

    cell: int                                        # its place among the cells
    line: int                                        # of its beginning there, from 1
    text: str
    bound: frozenset[str]
    code: CodeType                                   # compiled as a module of its own
    always_included: bool                            # it is in every slice: it changes what others mean


class Program:
    """A notebook's code, each cell parsed once, however many exercises ask for a slice of it.

    Linear in the code's length; more than `most` statements are a `CourseError` (0: any number).
    """

    def __init__(self, cells: Iterable[str], most: int = 0):
        self.cells = list(cells)
        self.statements: list[Statement] = []
        self.syntax_errors: list[tuple[int, Exception, int]] = []       # cell, what is wrong with it, statements before it
        for number, cell in enumerate(self.cells):
            try:
                self.statements += parse_statements(number, cell)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                self.syntax_errors.append((number, error, len(self.statements)))
            if most and len(self.statements) > most:
                raise CourseError(f"has more than {most} statements outside of functions: put long data into a file")
        self.bindings: dict[str, list[int]] = {}       # where each name is bound, in order
        for place, statement in enumerate(self.statements):
            for name in statement.bound:
                self.bindings.setdefault(name, []).append(place)

    def last_binding(self, name: str, before: int) -> int | None:
        """The last statement that binds a name before another one."""
        places = self.bindings.get(name, [])
        found = bisect.bisect_left(places, before)
        return places[found - 1] if found else None

    def find_broken_cell(self, wanted: Sequence[str]) -> tuple[str, int]:
        """The last broken cell that names what is wanted, and how many statements stand before the last one to define it."""
        text, since = "", 0
        for number, error, before in self.syntax_errors:
            cell = self.cells[number]
            if any(name in cell for name in wanted):
                text = f"{name_cell(cell, wanted)} is not valid Python: {describe_fault(error, cell)}"
            if first_definition(cell, wanted):
                since = before
        return text, since

    def slice(self, wanted: Sequence[str]) -> Answer:
        """The last definitions of `wanted`, with every import, function and value that they need."""
        broken, since = self.find_broken_cell(wanted)
        keep: set[int] = set()
        needed = [(name, len(self.statements)) for name in wanted]
        while needed:
            place = self.last_binding(*needed.pop())         # what the name was bound to last, before the statement that reads it
            if place is None or place in keep:
                continue
            keep.add(place)
            now, later = used_names(self.statements[place].code)
            needed += [(other, place) for other in now] + [(other, len(self.statements)) for other in later]
        bound = {name for place in keep for name in self.statements[place].bound}
        missing = [name for name in wanted if name not in bound]
        latest = max((place for place in keep if self.statements[place].bound & set(wanted)), default=-1)
        if broken and (missing or latest < since):   # what was defined before it is not what stands there now
            return Answer(problem=broken, broken=True)
        if missing:
            return Answer(problem=f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not defined: "
                                  "write and run the exercise's cell first")
        keep |= {place for place, statement in enumerate(self.statements) if statement.always_included}
        names = {number: name_cell(self.cells[number], wanted) for number in {self.statements[place].cell for place in keep}}
        return Answer(tuple(Piece(names[one.cell], one.line, one.text) for one in (self.statements[i] for i in sorted(keep))))


def definitions(cells: Iterable[str], wanted: Sequence[str]) -> Answer:
    """The last definitions of `wanted` in the cells, with every import, function and value that they need.

    A slice of the program: top-level statements that bind a needed name, in order. Statements that bind
    nothing needed, such as a training run or a plot, stay out, so checking takes no longer than the check.
    """
    return Program(cells).slice(wanted)


def find_answer(program: Program, names: Sequence[str], objects: Sequence[str]) -> Answer:
    """What an exercise asks for, with all that it needs, unless it only imports it (objects: dotted names) from the library."""
    answer = program.slice(names)
    problem = "" if answer.problem else import_problem(answer, objects)
    return Answer(problem=problem, imported=True) if problem else answer


def parse_statements(number: int, cell: str) -> list[Statement]:
    """The statements of a cell; whatever Python says where it is not valid."""
    text, tree = parse_cell(cell)
    compile(tree, "<cell>", "exec", dont_inherit=True)               # finds what the parser lets pass, such as a stray return
    lines = [line.encode() for line in text.split("\n")]             # Python counts columns in bytes
    statements_of_cell = []
    for node in tree.body:
        code = compile_statement(node)
        always = isinstance(node, ast.ImportFrom) and (node.module == "__future__" or node.names[0].name == "*")
        statements_of_cell.append(Statement(number, *statement_source(node, lines), frozenset(bound_names(node, code)), code,
                                            always))
    return statements_of_cell


def parse_cell(cell: str) -> tuple[str, ast.Module]:
    """A cell as plain Python, and its syntax tree; without IPython, which is slow to import, where it is plain already."""
    text = unix_lines(cell)
    if not text.lstrip().startswith("In ["):         # a copied prompt is a valid annotation
        with suppress(SyntaxError):
            return text, ast.parse(text)
    text = plain_python(text)
    return text, ast.parse(text)


def import_problem(answer: Answer, objects: Sequence[str]) -> str:
    """What is wrong with an answer that takes one of these objects (dotted names) from the library; "" if it writes them all."""
    bound: dict[str, str] = {}                       # a name to what it was bound to last: an object of the library, or ""
    for node in ast.parse(answer.source).body:
        bound |= dict.fromkeys(bound_names(node, compile_statement(node)), "")
        if isinstance(node, ast.ImportFrom) and not node.level:
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    name = next((name for name in objects if bound.get(name.rpartition(".")[2]) == name), "").rpartition(".")[2]
    return f"{name} is only imported, from the library, where it is blank while your answer is checked" if name else ""


ERROR_WORDS = {MemoryError: "its code is nested too deeply", RecursionError: "its code is nested too deeply",
         UnicodeEncodeError: "it has a character that is none (half of a surrogate pair)"}


def name_cell(cell: str, wanted: Sequence[str]) -> str:
    """What a message calls a cell: by what it defines of an exercise, or else by how it begins."""
    if found := first_definition(cell, wanted):
        return f"{CELL}with `{found}`"
    first = next((line.strip() for line in cell.splitlines() if line.strip()), "")
    return f"{CELL}that begins with `{first if len(first) <= 50 else first[:50] + '...'}`"


def first_definition(cell: str, wanted: Sequence[str]) -> str:
    """The beginning of the first definition of a wanted name in a cell, such as "def training_step"; "" if there is none."""
    match = re.search(rf"\b(def|class)\s+({'|'.join(map(re.escape, wanted))})\b", cell)
    return f"{match[1]} {match[2]}" if match else ""


def describe_fault(error: Exception, cell: str) -> str:
    """What is wrong with a cell's Python, and in which of its lines."""
    lines = cell.split("\n")
    if isinstance(error, SyntaxError) and error.lineno and error.lineno <= len(lines):
        line = lines[error.lineno - 1].strip()
        return f"line {error.lineno}, `{line if len(line) <= 200 else line[:200] + '...'}`: {error.msg}"
    return ERROR_WORDS.get(type(error), str(error)[:200] or type(error).__name__)


def plain_python(cell: str) -> str:
    """A cell as plain Python: magics and shell commands become calls, which bind nothing that an answer needs.

    Lines keep their numbers.
    """
    try:
        from IPython.core.inputtransformer2 import TransformerManager
    except ImportError:
        return cell
    before = len(cell) - len(cell.lstrip())          # lines without anything, which IPython takes away
    skipped = cell[:before].count("\n")
    if cell.lstrip().startswith("%%"):
        head, _, cell = cell.lstrip().partition("\n")
        if head.split()[0] not in ("%%time", "%%timeit", "%%capture"):
            return ""
        skipped += 1 + cell[:len(cell) - len(cell.lstrip())].count("\n")
    return "\n" * skipped + TransformerManager().transform_cell(cell)


def bound_names(node: ast.stmt, code: CodeType) -> set[str]:
    """The names that a top-level statement binds, and those whose attributes or items it sets."""
    modified: set[str] = set()
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):    # what these change is their own affair
        modified = {base.id for inner in ast.walk(node)
                   if isinstance(inner, ast.Attribute | ast.Subscript) and isinstance(inner.ctx, ast.Store)
                   for base in ast.walk(inner.value) if isinstance(base, ast.Name)}
    return modified | {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_NAME"}


def used_names(statement: CodeType) -> tuple[set[str], set[str]]:
    """The global names that a statement reads when it runs, and those that what it defines reads when called.

    The compiler knows which names are local. A class's body runs at once, its methods do not.
    """
    now: set[str] = set()
    later: set[str] = set()
    left = [(statement, True)]
    while left:
        code, runs = left.pop()
        names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_NAME", "LOAD_GLOBAL")}
        (now if runs else later).update(names)
        left += [(constant, runs and not constant.co_flags & inspect.CO_NEWLOCALS)
                 for constant in code.co_consts if isinstance(constant, CodeType)]
    return now, later


def compile_statement(node: ast.stmt) -> CodeType:
    """A statement as a module of its own."""
    return compile(ast.Module([node], []), "<cell>", "exec", dont_inherit=True)


def statement_source(node: ast.stmt, lines: Sequence[bytes]) -> tuple[int, str]:
    """Where a statement begins, and its source; with decorators whole lines. No text is split."""
    decorators = getattr(node, "decorator_list", [])
    first, last = (decorators[0].lineno if decorators else node.lineno), node.end_lineno or node.lineno
    source = list(lines[first - 1:last])
    if not decorators:
        source[-1] = source[-1][:node.end_col_offset]
        source[0] = source[0][node.col_offset:]
    return first, b"\n".join(source).decode()
