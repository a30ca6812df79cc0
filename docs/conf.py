"""The site of the course, made by Sphinx (`make docs`): README, guides, lessons, and the library from its docstrings.

Sources stay where they are, since the repository is the source folder: links between files mean the same on the site.
A link to a file that is no page, such as a recorded result, becomes a download. Pages of the library are written to
docs/api before Sphinx looks for sources, in the reading order of `course/__init__.py`; its index has a line for each name.

The site needs no network: mathematics becomes MathML, which browsers draw without a script or a font from elsewhere.

Lessons are the learners' notebooks, with the outputs that the executed ones have beside the same cells: what was measured
is seen, what answers an exercise is not. With the tag `answers` (`make docs ANSWERS=1`) they are the executed ones.
"""

import ast
import json
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "course/bench/results"
sys.path.insert(0, str(ROOT))

import course  # noqa: E402
import course.lab  # noqa: E402
from course.lab.authoring import lessons  # noqa: E402

project = "Deep Learning at Scale"
html_title = project
root_doc = "README"
include_patterns = ["README.md", "docs/**.md", "submit/*.md", "data/README.md", "notebooks/[0-9][0-9]_*.ipynb"]
exclude_patterns = [".*", "site", "build", "runs", "grades", "data/*/**", "notebooks/*_mine*", "notebooks/.*"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary"]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"                        # registered below
html_copy_source = False                             # the sources hold what `prepare_batch` leaves out
html_show_sourcelink = False

nb_execution_mode = "off"                            # `course lessons build` executes them
nb_render_markdown_format = "gfm"                    # tables in outputs
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3                             # links to headings, #like-this, as GitHub has them
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type",          # a lesson may begin a section one level deeper
                     "ref.python"]                       # of an annotation that fits several: bytes, Layout

autosummary_generate = False                         # the pages are written below
autodoc_inherit_docstrings = False                   # torch's are written for another reader
autodoc_default_options = {"members": True, "member-order": "bysource", "ignore-module-all": True}
autodoc_mock_imports = ["triton", "transformer_engine"]      # not on machines without a GPU

CONTENTS = """

```{toctree}
:hidden:
:caption: Guides
docs/install
docs/learners
docs/instructors
docs/using
docs/results
docs/faq
docs/contributors
docs/comparison
```
```{toctree}
:hidden:
:glob:
:caption: Lessons
notebooks/*
```
```{toctree}
:hidden:
:caption: Reference
docs/api/index
data/README
submit/README
submit/FAULTS
```
"""


def prepared(app: Any, name: str, text: list[str]) -> None:
    """Sphinx's event `source-read`: what a page is made of, before it is parsed."""
    if name == root_doc:
        text[0] += CONTENTS
    elif name.startswith("notebooks/"):
        executed = ROOT / f"solutions/{Path(name).name}.ipynb"
        if executed.is_file():                       # learners have none
            app.env.note_dependency(str(executed))
            solved = json.loads(executed.read_text())
            text[0] = json.dumps(solved if "answers" in app.tags else without_answers(json.loads(text[0]), solved))


def without_answers(blank: dict[str, Any], solved: dict[str, Any]) -> dict[str, Any]:
    """A learner's notebook with the outputs of the executed one, of cells that are the same in both."""
    told = secrets(solved)
    outputs = {cell["id"]: cell for cell in solved["cells"] if cell["cell_type"] == "code"}
    for cell in blank["cells"]:
        beside = outputs.get(cell["id"])
        if cell["cell_type"] == "code" and beside and beside["source"] == cell["source"]:
            cell["outputs"] = [output for output in beside["outputs"] if not tells(json.dumps(output), told)]
    return blank


def secrets(solved: dict[str, Any]) -> list[str]:
    """The statements of a lesson's answers that tell something, without white space, as they stand in JSON."""
    lines = [line for cell in solved["cells"] for line in lessons.answer_lines("".join(cell["source"]))]
    squeezed = [json.dumps(lessons.without_spaces(line))[1:-1] for line in lines]
    return [line for line in squeezed if len(line) >= lessons.MIN_LEAK]


def tells(output: str, told: list[str]) -> bool:
    """Whether an output shows a statement of an answer, as source code that is shown after an exercise does."""
    plain = lessons.without_spaces(output.replace("\\n", ""))
    return any(line in plain for line in told)


def modules(package: Any) -> list[str]:
    """All modules of a package that a map names: not exercises and their mistakes, nor `__main__`, which runs when imported."""
    found = [module.name for module in walk_packages(package.__path__, f"{package.__name__}.")]
    return [name for name in found if not re.match(r"course\.lab\.(exercises|mistakes)\.|.*__main__$", name)]


def chapters(package: Any, left: list[str]) -> list[tuple[str, str, list[str]]]:
    """The lines of a package's map: title, text, and the modules that it names, which are taken from `left`."""
    lines = re.findall(r"^    (\S.*?) {2,}(\S.*(?:\n {8,}.*)*)", package.__doc__ or "", re.MULTILINE)
    own = {name for title, _ in lines for name in re.findall(r"\w+", title)}
    found = []
    for title, text in lines:
        first, *others = re.findall(r"\w+", title)
        roof = f"{package.__name__}.{first}"
        named = [f"{package.__name__}.{word}" for word in (first, *others)]
        for word in re.findall(r"\w+", text):
            named += [f"{roof}.{word}", *([] if word in own else [f"{package.__name__}.{word}"])]
            named += [name for name in left if name.startswith(f"{package.__name__}.{word}_")]     # figures_mesh with figures
        named += [name for name in left if name.startswith(f"{roof}.") and first != "lab"]
        here = [name for name in dict.fromkeys(named) if name in left]
        left[:] = [name for name in left if name not in here]
        found.append((title, " ".join(text.split()), here))
    return found


def public(name: str) -> list[str]:
    """The public functions and classes that a module defines, in order, each with the module's name before it."""
    spec = find_spec(name)
    tree = ast.parse(Path(spec.origin).read_text()) if spec and spec.origin else ast.Module([], [])
    named = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [f"{name}.{word}" for word in named if word[0] != "_"]


def summary(name: str) -> str:
    """A module in the index: its first line and those of its public names, which autosummary takes from their docstrings."""
    rows = "\n".join(f"   {word}" for word in (name, *(f"~{word}" for word in public(name))))
    return f"\n```{{eval-rst}}\n.. autosummary::\n   :nosignatures:\n\n{rows}\n```\n"


def write_library(app: Any, config: Any) -> None:
    """Sphinx's event `config-inited`: write docs/api, a page for each line of the maps, and one of what they do not name."""
    folder = ROOT / "docs/api"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    left = modules(course)
    pages, index = [], []
    for package in (course, course.lab):
        lines = chapters(package, left)
        if package is course.lab:
            lines.append(("others", "What the maps do not name.", list(left)))
        for title, text, names in lines:
            page = "-".join([*package.__name__.split(".")[1:], *re.findall(r"\w+", title)])
            body = "".join(f"\n## {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n```\n" for name in names)
            if names:
                (folder / f"{page}.md").write_text(f"# {title}\n\n{text}\n{body}")
                pages.append(page)
                index += [f"\n## [{title}]({page}.md)\n\n{text}\n", *map(summary, names)]
    head = "# The library, in reading order\n\n```{toctree}\n:hidden:\n" + "\n".join(pages) + "\n```\n"
    (folder / "index.md").write_text(head + "".join(index))


def literal(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Sphinx's event `autodoc-process-docstring`: docstrings are plain text with `code`, lists and indented tables.

    A paragraph becomes text in which nothing but `code` is markup; what is indented, a table or a program, stays as it is.
    """
    written = []
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        first, *others = paragraph.splitlines() or [""]
        if first.startswith("- ") or not any(line.startswith(" ") for line in (first, *others)):
            parts = re.split(r"`([^`]*)`", paragraph)
            parts[::2] = [re.sub(r"([\\*|_`])", r"\\\1", part) for part in parts[::2]]
            parts[1::2] = [f"``{part.strip()}``" for part in parts[1::2]]
            written += ["".join(part + ("\\ " if i % 2 and parts[i + 1][:1].isalnum() else "") for i, part in enumerate(parts))]
        else:
            written += ["::", "\n".join(f"    {line}" for line in (first, *others))]
    lines[:] = [*"\n\n".join(written).splitlines(), ""]


def entrance(app: Any, error: Exception | None) -> None:
    """Sphinx's event `build-finished`: the README is what a web server shows first; and the recorded results, to which outputs
    of lessons link, in which Sphinx follows no links."""
    page = Path(app.outdir) / f"{root_doc}.html"
    if error is None and page.is_file():
        shutil.copyfile(page, page.with_name("index.html"))
        shutil.copytree(ROOT / RESULTS, page.parent / RESULTS, ignore=shutil.ignore_patterns("*.py", "__pycache__"),
                        dirs_exist_ok=True)


def mathml(latex: str, display: str) -> str:
    """A formula as MathML, display: inline or block. The converter knows `aligned` by the name `align*`, and no `\\_` in text."""
    return convert(re.sub(r"\\(begin|end)\{aligned\}", r"\\\1{align*}", latex), display=display).replace(r"\_", "_")


def write_inline(writer: Any, node: nodes.math) -> None:
    """Sphinx's visitor of a formula in a sentence."""
    writer.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def write_block(writer: Any, node: nodes.math_block) -> None:
    """Sphinx's visitor of a formula between paragraphs; one that is wider than a telephone scrolls."""
    writer.body.append(f'<div class="math">{mathml(node.astext(), "block")}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (write_inline, None), (write_block, None))
    app.connect("config-inited", write_library)
    app.connect("source-read", prepared)
    app.connect("autodoc-process-docstring", literal)
    app.connect("build-finished", entrance)
