"""What a learner wrote: the code cells of a notebook, a script or the running kernel, and the definitions in them."""

import ast
import codecs
import dis
import inspect
import io
import json
import re
import tokenize
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from course.errors import CourseError, nearest
from course.meet import CELL

LARGEST = 50_000_000                                 # bytes of a notebook, outputs and all, that anybody has a reason to hand in
COOKIE = re.compile(r"\A((?:[^\n]*\n)?[ \t\f]*#.*?coding[:=][ \t]*)[-\w.]+")        # Python's: in the first or second line
MOST_CODE = 1_000_000                                # characters of code in it


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

    @property
    def source(self) -> str:
        """The pieces, one after another."""
        return "\n\n".join(piece.text for piece in self.pieces) + "\n"


def whole(source: str) -> tuple[Piece, ...]:
    """A text that is an answer as it stands."""
    return Piece(CELL + "with the answer", 1, source),


def load(path: Path) -> Any:
    """A notebook (nbformat node) from .ipynb or, by jupytext, from a .py in percent format; `CourseError` if it is none."""
    try:
        import jupytext  # slow to import, and only where there are notebooks
        import nbformat
        import nbformat.warnings
    except ImportError as error:
        raise CourseError("reading notebooks needs JupyterLab's packages: pip install 'course[lab]'") from error

    if path.suffix.lower() not in (".ipynb", ".py"):
        raise CourseError(f"{path}: give a notebook (.ipynb) or a script in percent format (.py)")
    for category in (nbformat.warnings.MissingIDFieldWarning, nbformat.warnings.DuplicateCellId):
        warnings.filterwarnings("ignore", category=category)            # ids of cells, of which nothing here depends
    try:
        if not path.is_file():
            there = [file.name for file in path.parent.glob(f"*{path.suffix}")]
            raise CourseError(f"{path}: there is no such file{nearest(path.name, there)}")
        if path.stat().st_size > LARGEST:
            raise CourseError(f"{path} has more than {LARGEST // 1_000_000} MB: clear its outputs and save it again")
        text = text_of(path.read_bytes())
        notebook = (nbformat.reads(text, as_version=4) if path.suffix.lower() == ".ipynb" else
                    jupytext.reads(COOKIE.sub(r"\1utf-8", text, count=1), fmt="py:percent"))       # it takes no other
        for cell in notebook.cells:
            if not isinstance(cell.source, str) or not isinstance(cell.cell_type, str):
                raise ValueError("a cell without text")
            cell.source = unix(cell.source).removeprefix("\ufeff")
        if sum(map(len, code(notebook))) > MOST_CODE:
            raise CourseError(f"{path} has more than {MOST_CODE // 1_000_000} MB of code: put long data into a file")
    except CourseError:
        raise
    except Exception as error:                       # whatever the parsers meet in a damaged or hostile file
        raise CourseError(f"{path} cannot be read as a notebook ({type(error).__name__}): {cure(path)}") from error
    return notebook


def cure(path: Path) -> str:
    """What to do about a notebook that cannot be read."""
    if path.suffix.lower() == ".py":
        return "save it as text, in percent format"
    try:
        if path.stat().st_size > LARGEST:
            return "clear its outputs and save it again"
        raw = path.read_bytes()
        json.loads(text_of(raw))
    except OSError:
        return "see whether you may read it"
    except (ValueError, RecursionError):             # JupyterLab would not open it either
        if any(line.strip().startswith((b"<<<<<<< ", b">>>>>>> ")) for line in raw.splitlines()):
            return "it holds a conflict of git's, between <<<<<<< and >>>>>>>: settle it there, or take either version whole"
        return "it is empty, cut off, or was changed by another program: take an earlier copy, or write it anew from the lesson's"
    return "open it in JupyterLab and save it again"


def text_of(data: bytes) -> str:
    """The text of a notebook or script, in whatever encoding a program on its way has saved it, with Unix's line ends."""
    marks = [(codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
             (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")]
    named = [encoding for mark, encoding in marks if data.startswith(mark)][:1]
    named = named or [json.detect_encoding(data)]    # UTF-16 and UTF-32 without a mark have zeros at its beginning
    with suppress(SyntaxError):                      # a line such as # -*- coding: latin-1 -*-
        named.append(tokenize.detect_encoding(io.BytesIO(data).readline)[0])
    for encoding in (*named, "cp1252"):
        with suppress(UnicodeDecodeError, LookupError):
            return unix(data.decode(encoding))
    return unix(data.decode("latin-1"))              # which takes every byte


def unix(text: str) -> str:
    """Text whose lines end as Unix has them."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def new_metadata(course: dict[str, Any]) -> Any:
    """A notebook's metadata: a Python kernel whatever its version, and what the course keeps there."""
    import nbformat

    return nbformat.from_dict({"kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
                               "language_info": {"name": "python"}, "course": course})


def outputs(text: str) -> Any:
    """A cell's outputs from JSON."""
    import nbformat

    return [nbformat.from_dict(output) for output in json.loads(text)]


def code(notebook: Any) -> list[str]:
    """The sources of a notebook's code cells, in order."""
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def history() -> list[str]:
    """What was executed in the running kernel, in order; empty outside of one."""
    try:
        from IPython import get_ipython
    except ImportError:
        return []
    shell = get_ipython()
    return list(shell.user_ns.get("In", [])) if shell else []


def definitions(cells: Iterable[str], wanted: Sequence[str]) -> Answer:
    """The last definitions of `wanted` in the cells, with every import, function and value that they need.

    A slice of the program: top-level statements that bind a needed name, in order. Statements that bind
    nothing needed, such as a training run or a plot, stay out, so checking takes no longer than the check.
    """
    statements, broken, since = [], "", 0
    for cell in cells:
        try:
            text = plain(cell)
            tree = ast.parse(text)
            compile(tree, "<cell>", "exec", dont_inherit=True)      # finds what the parser lets pass, such as a stray return
            statements += [(node, piece(node, text, called(cell, wanted))) for node in tree.body]
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if any(name in cell for name in wanted):
                broken = f"{called(cell, wanted)} is not valid Python: {fault(error, cell)}"
            if defined(cell, wanted):
                since = len(statements)
    bound = [binds(node) for node, _ in statements]
    keep: set[int] = set()
    needed, seen = [(name, len(statements)) for name in wanted], set()
    while needed:
        name, before = needed.pop()                  # what it was bound to last, before this statement
        index = next((i for i in reversed(range(before)) if name in bound[i]), None)
        if index is None or (name, index) in seen:
            continue
        seen.add((name, index))
        keep.add(index)
        now, later = uses(statements[index][0])
        needed += [(other, index) for other in now] + [(other, len(statements)) for other in later]
    missing = [name for name in wanted if not any(name in bound[index] for index in keep)]
    latest = max((index for index in keep if bound[index] & set(wanted)), default=-1)
    if broken and (missing or latest < since):       # what was defined before it is not what stands there now
        return Answer(problem=broken, broken=True)
    if missing:
        return Answer(problem=f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not defined: "
                              "write and run the exercise's cell first")
    keep |= {index for index, (node, _) in enumerate(statements)
             if isinstance(node, ast.ImportFrom) and (node.module == "__future__" or node.names[0].name == "*")}
    return Answer(tuple(statements[index][1] for index in sorted(keep)))


def imported(answer: Answer, objects: Sequence[str]) -> str:
    """What is wrong with an answer that takes one of these objects (dotted names) from the library; "" if it writes them all."""
    bound: dict[str, str] = {}                       # a name to what it was bound to last: an object of the library, or ""
    for node in ast.parse(answer.source).body:
        bound |= dict.fromkeys(binds(node), "")
        if isinstance(node, ast.ImportFrom) and not node.level:
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    name = next((name for name in objects if bound.get(name.rpartition(".")[2]) == name), "").rpartition(".")[2]
    return f"{name} is only imported, from the library, where it is blank while your answer is checked" if name else ""


def called(cell: str, wanted: Sequence[str]) -> str:
    """What a message calls a cell: by what it defines of an exercise, or else by how it begins."""
    if found := defined(cell, wanted):
        return f"{CELL}with `{found}`"
    first = next((line.strip() for line in cell.splitlines() if line.strip()), "")
    return f"{CELL}that begins with `{first if len(first) <= 50 else first[:50] + '...'}`"


def defined(cell: str, wanted: Sequence[str]) -> str:
    """The beginning of the first definition of a wanted name in a cell, such as "def training_step"; "" if there is none."""
    found = re.search(rf"\b(def|class)\s+({'|'.join(map(re.escape, wanted))})\b", cell)
    return f"{found[1]} {found[2]}" if found else ""


def fault(error: Exception, cell: str) -> str:
    """What is wrong with a cell's Python, and in which of its lines."""
    lines = cell.split("\n")
    if isinstance(error, SyntaxError) and error.lineno and error.lineno <= len(lines):
        return f"line {error.lineno}, `{lines[error.lineno - 1].strip()}`: {error.msg}"
    return str(error) or type(error).__name__


def plain(cell: str) -> str:
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


def binds(node: ast.stmt) -> set[str]:
    """The names that a top-level statement binds, and those whose attributes or items it sets."""
    changed = {base.id for inner in ast.walk(node)
               if isinstance(inner, ast.Attribute | ast.Subscript) and isinstance(inner.ctx, ast.Store)
               for base in ast.walk(inner.value) if isinstance(base, ast.Name)}
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        changed = set()                              # what it changes when called is its own affair
    return changed | {step.argval for step in dis.get_instructions(compiled(node)) if step.opname == "STORE_NAME"}


def uses(node: ast.stmt) -> tuple[set[str], set[str]]:
    """The global names that a statement reads when it runs, and those that what it defines reads when called.

    The compiler knows which names are local. A class's body runs at once, its methods do not.
    """
    now: set[str] = set()
    later: set[str] = set()
    left = [(compiled(node), True)]
    while left:
        code, runs = left.pop()
        names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_NAME", "LOAD_GLOBAL")}
        (now if runs else later).update(names)
        left += [(constant, runs and not constant.co_flags & inspect.CO_NEWLOCALS)
                 for constant in code.co_consts if isinstance(constant, CodeType)]
    return now, later


def compiled(node: ast.stmt) -> CodeType:
    """A statement as a module of its own."""
    return compile(ast.Module([node], []), "<cell>", "exec", dont_inherit=True)


def piece(node: ast.stmt, text: str, cell: str) -> Piece:
    """The source of a statement, decorators included."""
    decorators = getattr(node, "decorator_list", [])
    if decorators:
        first = decorators[0].lineno
        return Piece(cell, first, "\n".join(text.splitlines()[first - 1:node.end_lineno]))
    return Piece(cell, node.lineno, ast.get_source_segment(text, node) or "")
