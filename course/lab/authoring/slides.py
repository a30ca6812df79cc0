"""`course lessons slides`: a lesson's statements and figures as a reveal.js deck, from the executed notebook of its master.

A heading begins a slide, and long sections go on downwards. Code and printed output are left out, and so are answers to
exercises.
Answers to questions become speaker notes (press S).
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from course.lab.authoring import lessons
from course.lab.checks import notebook_cells
from course.utils.atomic_files import atomic
from course.utils.errors import CourseError

WORDS = 90                                           # on one slide, unless a single block has more
# a block that stays on one slide: an answer, a box, a listing, or a paragraph, list or table
BLOCK = re.compile(r"<details>.*?</details>|<div.*?</div>|^```.*?^```|(?:^(?!<details>|<div|```)[^\n]*\S[^\n]*\n?)+",
                   re.DOTALL | re.MULTILINE)


def write(names: list[str], out: Path, reveal: str = "", root: Path = lessons.ROOT) -> list[Path]:
    """Write a deck out/NN_name.html for each of these lessons, or for all. Returns the files.

    reveal: the address or folder of reveal.js; "": nbconvert's default on the network. Raises `CourseError` if a lesson is
    missing
    or was not executed.
    """
    from nbconvert import SlidesExporter
    from traitlets.config import Config

    address = {"reveal_url_prefix": reveal} if reveal else {}
    exporter = SlidesExporter(config=Config(SlidesExporter={"reveal_scroll": True, **address}))
    exporter.exclude_input = exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    files = []
    for master in lessons.masters(names, root):
        path = root / "solutions" / f"{master.stem}.ipynb"
        if not path.is_file():
            raise CourseError(f"{path} is missing: run `course lessons build {master.stem}`, which executes the lesson")
        html, _ = exporter.from_notebook_node(deck(notebook_cells.load_notebook(path)), {"metadata": {"name": master.stem}})
        files.append(out / f"{master.stem}.html")
        with atomic(files[-1]) as temporary:
            temporary.write_text(html, encoding="utf-8")
        print(f"wrote {files[-1]}")
    return files


def deck(notebook: Any) -> Any:
    """The notebook of a deck: its cells say where slides begin, and which are notes."""
    import nbformat

    cells = [cell for source in notebook.cells
             for cell in (text_cells(source) if source.cell_type == "markdown" else figures(source))]
    return nbformat.v4.new_notebook(cells=cells, metadata=notebook.metadata)


def text_cells(cell: Any) -> Iterator[Any]:
    """A markdown cell as slides with at most `WORDS` words, and notes."""
    for section in re.split(r"^(?=##? )", cell.source, flags=re.MULTILINE):
        slide: list[str] = []
        answers: list[str] = []
        kind = "slide" if section.startswith("#") else "subslide"
        for block in BLOCK.findall(section):
            if block.startswith("<details>"):
                answers.append(re.sub(r"</?details>|<summary>.*?</summary>", "", block).strip())
                continue
            if slide and len(" ".join([*slide, block]).split()) > WORDS and not slide[-1].startswith("#"):
                yield from slide_of(slide, answers, kind)
                slide, answers, kind = [], [], "subslide"
            slide.append(block.strip())
        yield from slide_of(slide, answers, kind)


def slide_of(blocks: list[str], answers: list[str], kind: str) -> Iterator[Any]:
    """The cells of one slide: its text, then its notes. Answers without a question on the slide are notes of the one before."""
    if blocks:
        yield marked("markdown", kind, source="\n\n".join(blocks))
    if answers:
        yield marked("markdown", "notes", source="\n\n".join(answers))


def figures(cell: Any) -> Iterator[Any]:
    """The pictures that a code cell shows, each on a slide."""
    for output in cell.outputs:
        if "image/png" in output.get("data", {}):
            yield marked("code", "subslide", outputs=[output])


def marked(cell_type: str, kind: str, **contents: Any) -> Any:
    """A new cell, with the kind of slide that it begins."""
    import nbformat

    new = nbformat.v4.new_markdown_cell if cell_type == "markdown" else nbformat.v4.new_code_cell
    return new(metadata={"slideshow": {"slide_type": kind}}, **contents)
