"""Find a learner's code: the cells of a notebook, a script or the running kernel, and the definitions in them."""

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

MAX_BYTES = 50_000_000                               # bytes of a notebook, outputs included
MAX_CODE = 1_000_000                                 # characters of code in it
MAX_CELLS = 5000
MAX_STATEMENTS = 20_000                              # top-level statements, in a notebook that somebody else handed in


@dataclass(frozen=True)
class Piece:
    """A contiguous piece of a cell's source, and its position. Tracebacks use the cell's description as file name."""

    cell: str                                        # "the cell with `def training_step`"
    line: int                                        # its first line in the cell, from 1
    text: str


@dataclass(frozen=True)
class Answer:
    """The definitions that an exercise asks for, with everything they need; `problem` says why there are none."""

    pieces: tuple[Piece, ...] = ()
    problem: str = ""
    broken: bool = False                             # the problem is a cell that is not valid Python
    imported: bool = False                           # the problem is that the cell imports what the learner should write

    @property
    def source(self) -> str:
        """The pieces joined into one text."""
        return "\n\n".join(piece.text for piece in self.pieces) + "\n"


def whole_answer(source: str) -> tuple[Piece, ...]:
    """A complete answer as one piece."""
    return Piece(CELL + "with the answer", 1, source),


@dataclass(frozen=True)
class Contents:
    """The parts of a notebook that count: its code cells, in order, and the lesson in its metadata ("" if none)."""

    code: tuple[str, ...]
    lesson: str = ""


def load_notebook(path: Path) -> Any:
    """Load an .ipynb, or a .py in percent format through jupytext, as nbformat node. Raises `CourseError` if it is neither."""
    try:
        import nbformat  # slow to import
    except ImportError as error:
        raise CourseError("reading notebooks needs JupyterLab's packages: pip install 'course[lab]'") from error

    with parse_errors(path):
        text = read_text(path)
        return nbformat.reads(text, as_version=4) if path.suffix.lower() == ".ipynb" else parse_script(text, path)


def read_contents(path: Path) -> Contents:
    """The code cells and lesson of a notebook or script. Raises `CourseError` if it cannot be read or is too large.

    Current notebooks (version 4) are read without nbformat, which takes seconds to import.
    """
    with parse_errors(path):
        notebook = json.loads(read_text(path)) if path.suffix.lower() == ".ipynb" else {}
        if notebook.get("nbformat") != 4:
            notebook = load_notebook(path)
        contents = notebook_contents(notebook)
        check_size(contents.code, len(notebook["cells"]), path)
        return contents


def notebook_contents(notebook: Any) -> Contents:
    """The code cells and lesson of a notebook in memory: its JSON, or nbformat's node."""
    return Contents(tuple(code_cells(notebook)), metadata_lesson(notebook.get("metadata")))


def metadata_lesson(metadata: Any) -> str:
    """The lesson in a notebook's metadata; "" if there is none."""
    course = metadata.get("course") if isinstance(metadata, dict) else None
    lesson = course.get("lesson") if isinstance(course, dict) else None
    return lesson if isinstance(lesson, str) and len(lesson) <= 20 else ""


def cell_source(cell: Any) -> str:
    """A cell's text, which JSON may store as a list of lines, with Unix line endings and without a byte-order mark."""
    if not isinstance(cell["source"], list | str):
        raise ValueError("a cell without text")
    return unix_lines("".join(cell["source"])).removeprefix("\ufeff")


def parse_script(text: str, path: Path) -> Any:
    """Parse a script in percent format into a notebook. Raises `CourseError` for too many cells."""
    try:
        import jupytext  # slow to import
    except ImportError as error:
        raise CourseError("reading scripts needs JupyterLab's packages: pip install 'course[lab]'") from error

    if text.count("\n# %%") > MAX_CELLS:            # check before jupytext parses them
        raise CourseError(f"{path} has more than {MAX_CELLS} cells: remove cells that do not belong to the lesson")
    return jupytext.reads(text, fmt="py:percent")


def read_text(path: Path) -> str:
    """The text of a notebook or script. Raises `CourseError` if it is missing, too large, or of another type."""
    if path.suffix.lower() not in (".ipynb", ".py"):
        raise CourseError(f"{path}: give a notebook (.ipynb), such as notebooks/00_start_here_mine.ipynb, or a script in percent "
                          "format (.py)")
    if not path.is_file():
        siblings = [file.name for file in path.parent.glob(f"*{path.suffix}")]
        raise CourseError(f"{path}: there is no such file{did_you_mean(path.name, siblings)}")
    if path.stat().st_size > MAX_BYTES:
        raise CourseError(f"{path} has more than {MAX_BYTES // 1_000_000} MB: clear its outputs and save it again")
    return decode_text(path.read_bytes())


def check_size(sources: Sequence[str], cells: int, path: Path) -> None:
    """Raise `CourseError` if a notebook has more code or more cells than allowed."""
    if cells > MAX_CELLS:
        raise CourseError(f"{path} has more than {MAX_CELLS} cells: remove cells that do not belong to the lesson")
    if sum(map(len, sources)) > MAX_CODE:
        raise CourseError(f"{path} has more than {MAX_CODE // 1_000_000} MB of code: put long data into a file")


@contextmanager
def parse_errors(path: Path) -> Iterator[None]:
    """Turn any parser error in a damaged or hostile file into a `CourseError` that names the file."""
    try:
        yield
    except CourseError:
        raise
    except Exception as error:
        raise CourseError(f"{path} cannot be read as a notebook ({type(error).__name__}): open it in JupyterLab and save it; if "
                          "that does not open it, take an earlier copy, or write it again from the lesson's") from error


def decode_text(data: bytes) -> str:
    """Decode a notebook or script in UTF-8, UTF-16, UTF-32 or Windows-1252; returns text with Unix line endings."""
    with suppress(UnicodeDecodeError):
        return unix_lines(data.decode(json.detect_encoding(data)))       # by a byte-order mark or by zero bytes
    return unix_lines(data.decode("cp1252", errors="replace"))


def unix_lines(text: str) -> str:
    """Text with Unix line endings."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def new_metadata(course: dict[str, Any]) -> Any:
    """Metadata for a notebook: a Python kernel of any version, and the course's own entries."""
    import nbformat

    return nbformat.from_dict({"kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
                               "language_info": {"name": "python"}, "course": course})


def code_cells(notebook: Any) -> list[str]:
    """The sources of a notebook's code cells, in order."""
    return [cell_source(cell) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def executed_cells() -> list[str]:
    """The code that the running kernel executed, in order; empty outside a kernel."""
    try:
        from IPython import get_ipython
    except ImportError:
        return []
    shell = get_ipython()
    return list(shell.user_ns.get("In", [])) if shell else []


@dataclass(frozen=True)
class Statement:
    """A top-level statement of a cell: the names that it binds, its code, and its position."""

    cell: int                                        # index of the cell
    line: int                                        # its first line in the cell, from 1
    text: str
    bound: frozenset[str]
    code: CodeType                                   # compiled as a separate module
    always_included: bool                            # kept in every slice, because it affects other statements


class Program:
    """A notebook's code, with each cell parsed once for all exercises that slice it.

    Parsing takes time linear in the code's length. Raises `CourseError` for more than `most` statements (0: no limit).
    """

    def __init__(self, cells: Iterable[str], most: int = 0):
        self.cells = list(cells)
        self.statements: list[Statement] = []
        self.syntax_errors: list[tuple[int, Exception, int]] = []       # cell, error, number of statements before it
        for number, cell in enumerate(self.cells):
            try:
                self.statements += parse_statements(number, cell)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                self.syntax_errors.append((number, error, len(self.statements)))
            if most and len(self.statements) > most:
                raise CourseError(f"has more than {most} statements outside of functions: put long data into a file")
        self.bindings: dict[str, list[int]] = {}       # statements that bind each name, in order
        for place, statement in enumerate(self.statements):
            for name in statement.bound:
                self.bindings.setdefault(name, []).append(place)

    def last_binding(self, name: str, before: int) -> int | None:
        """The last statement before statement `before` that binds a name; None if there is none."""
        places = self.bindings.get(name, [])
        found = bisect.bisect_left(places, before)
        return places[found - 1] if found else None

    def find_broken_cell(self, wanted: Sequence[str]) -> tuple[str, int]:
        """Describe the last broken cell that mentions a wanted name; also the number of statements before the last one that
        defines one."""
        text, since = "", 0
        for number, error, before in self.syntax_errors:
            cell = self.cells[number]
            if any(name in cell for name in wanted):
                text = f"{name_cell(cell, wanted)} is not valid Python: {describe_fault(error, cell)}"
            if first_definition(cell, wanted):
                since = before
        return text, since

    def slice(self, wanted: Sequence[str]) -> Answer:
        """Slice out the last definitions of `wanted`, with every import, function and value that they need."""
        broken, since = self.find_broken_cell(wanted)
        keep: set[int] = set()
        needed = [(name, len(self.statements)) for name in wanted]
        while needed:
            place = self.last_binding(*needed.pop())         # its last binding before the statement that reads it
            if place is None or place in keep:
                continue
            keep.add(place)
            now, later = used_names(self.statements[place].code)
            needed += [(other, place) for other in now] + [(other, len(self.statements)) for other in later]
        bound = {name for place in keep for name in self.statements[place].bound}
        missing = [name for name in wanted if name not in bound]
        latest = max((place for place in keep if self.statements[place].bound & set(wanted)), default=-1)
        if broken and (missing or latest < since):   # the definition found is older than the broken cell
            return Answer(problem=broken, broken=True)
        if missing:
            return Answer(problem=f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not defined: "
                                  "write and run the exercise's cell first")
        keep |= {place for place, statement in enumerate(self.statements) if statement.always_included}
        names = {number: name_cell(self.cells[number], wanted) for number in {self.statements[place].cell for place in keep}}
        return Answer(tuple(Piece(names[one.cell], one.line, one.text) for one in (self.statements[i] for i in sorted(keep))))


def definitions(cells: Iterable[str], wanted: Sequence[str]) -> Answer:
    """Slice out the last definitions of `wanted` from cells, with every import, function and value that they need.

    The slice has the top-level statements that bind a needed name, in order. It leaves out all others, such as a training run
    or a plot, so that checking does not repeat them.
    """
    return Program(cells).slice(wanted)


def find_answer(program: Program, names: Sequence[str], objects: Sequence[str]) -> Answer:
    """The answer to an exercise, with everything it needs; a problem if it only imports `objects` (dotted names)."""
    answer = program.slice(names)
    problem = "" if answer.problem else import_problem(answer, objects)
    return Answer(problem=problem, imported=True) if problem else answer


def parse_statements(number: int, cell: str) -> list[Statement]:
    """The statements of a cell. Raises what Python raises if the cell is invalid."""
    text, tree = parse_cell(cell)
    compile(tree, "<cell>", "exec", dont_inherit=True)               # finds errors that the parser misses, such as a stray return
    lines = [line.encode() for line in text.split("\n")]             # Python counts columns in bytes
    statements_of_cell = []
    for node in tree.body:
        code = compile_statement(node)
        always = isinstance(node, ast.ImportFrom) and (node.module == "__future__" or node.names[0].name == "*")
        statements_of_cell.append(Statement(number, *statement_source(node, lines), frozenset(bound_names(node, code)), code,
                                            always))
    return statements_of_cell


def parse_cell(cell: str) -> tuple[str, ast.Module]:
    """A cell as plain Python, and its syntax tree. Imports IPython, which is slow, only for cells that need it."""
    text = unix_lines(cell)
    if not text.lstrip().startswith("In ["):         # a copied prompt is a valid annotation
        with suppress(SyntaxError):
            return text, ast.parse(text)
    text = plain_python(text)
    return text, ast.parse(text)


def import_problem(answer: Answer, objects: Sequence[str]) -> str:
    """The problem of an answer that imports one of these objects (dotted names) from the library; "" if it imports none."""
    bound: dict[str, str] = {}                       # name -> the dotted name that it was imported from, or ""
    for node in ast.parse(answer.source).body:
        bound |= dict.fromkeys(bound_names(node, compile_statement(node)), "")
        if isinstance(node, ast.ImportFrom) and not node.level:
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    name = next((name for name in objects if bound.get(name.rpartition(".")[2]) == name), "").rpartition(".")[2]
    return f"{name} is only imported, from the library, where it is blank while your answer is checked" if name else ""


ERROR_WORDS = {MemoryError: "its code is nested too deeply", RecursionError: "its code is nested too deeply",
         UnicodeEncodeError: "it has a character that is none (half of a surrogate pair)"}


def name_cell(cell: str, wanted: Sequence[str]) -> str:
    """Describe a cell by the wanted name that it defines, or else by its first line."""
    if found := first_definition(cell, wanted):
        return f"{CELL}with `{found}`"
    first = next((line.strip() for line in cell.splitlines() if line.strip()), "")
    return f"{CELL}that begins with `{first if len(first) <= 50 else first[:50] + '...'}`"


def first_definition(cell: str, wanted: Sequence[str]) -> str:
    """The first definition of a wanted name in a cell, such as "def training_step"; "" if there is none."""
    match = re.search(rf"\b(def|class)\s+({'|'.join(map(re.escape, wanted))})\b", cell)
    return f"{match[1]} {match[2]}" if match else ""


def describe_fault(error: Exception, cell: str) -> str:
    """The error in a cell's Python, with the line if known."""
    lines = cell.split("\n")
    if isinstance(error, SyntaxError) and error.lineno and error.lineno <= len(lines):
        line = lines[error.lineno - 1].strip()
        return f"line {error.lineno}, `{line if len(line) <= 200 else line[:200] + '...'}`: {error.msg}"
    return ERROR_WORDS.get(type(error), str(error)[:200] or type(error).__name__)


def plain_python(cell: str) -> str:
    """Turn a cell into plain Python: magics and shell commands become calls, which bind nothing that an answer needs.

    Line numbers stay the same.
    """
    try:
        from IPython.core.inputtransformer2 import TransformerManager
    except ImportError:
        return cell
    before = len(cell) - len(cell.lstrip())          # blank lines, which IPython removes
    skipped = cell[:before].count("\n")
    if cell.lstrip().startswith("%%"):
        head, _, cell = cell.lstrip().partition("\n")
        if head.split()[0] not in ("%%time", "%%timeit", "%%capture"):
            return ""
        skipped += 1 + cell[:len(cell) - len(cell.lstrip())].count("\n")
    return "\n" * skipped + TransformerManager().transform_cell(cell)


def bound_names(node: ast.stmt, code: CodeType) -> set[str]:
    """The names that a top-level statement binds, or whose attributes or items it sets."""
    modified: set[str] = set()
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):    # their bodies run elsewhere
        modified = {base.id for inner in ast.walk(node)
                   if isinstance(inner, ast.Attribute | ast.Subscript) and isinstance(inner.ctx, ast.Store)
                   for base in ast.walk(inner.value) if isinstance(base, ast.Name)}
    return modified | {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_NAME"}


def used_names(statement: CodeType) -> tuple[set[str], set[str]]:
    """The global names that a statement reads when it runs, and those that its functions read when called.

    Compiled code tells global names from local ones. A class body runs at once; its methods run later.
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
    """Compile a statement as a separate module."""
    return compile(ast.Module([node], []), "<cell>", "exec", dont_inherit=True)


def statement_source(node: ast.stmt, lines: Sequence[bytes]) -> tuple[int, str]:
    """The first line of a statement, and its source: whole lines if it has decorators."""
    decorators = getattr(node, "decorator_list", [])
    first, last = (decorators[0].lineno if decorators else node.lineno), node.end_lineno or node.lineno
    source = list(lines[first - 1:last])
    if not decorators:
        source[-1] = source[-1][:node.end_col_offset]
        source[0] = source[0][node.col_offset:]
    return first, b"\n".join(source).decode()
