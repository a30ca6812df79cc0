"""Lessons as slides: statements and figures, no code, answers as notes."""

import re
import sys
from types import SimpleNamespace

import nbformat
import pytest

from course.cli import main
from course.lab.authoring import lessons, slides
from course.lab.checks import notebook_cells
from course.utils.errors import CourseError

BOX = '<div style="border-left: 6px solid #0072B2">\n\n**Question.** Why?\n\n</div>'
TEXT = f"""# A lesson

One statement.

| a | table |
|---|---|
| stays | whole |

{BOX}

<details><summary>Answer</summary>
Because.

It <i>is</i> so.
</details>

## A section
Its first words.
"""


def cells(text: str) -> list[tuple[str, str]]:
    """(kind of slide, text) for the cells that a markdown cell becomes."""
    return [(cell.metadata["slideshow"]["slide_type"], cell.source)
            for cell in slides.text_cells(nbformat.v4.new_markdown_cell(text))]


def test_headings_begin_slides_and_answers_are_notes():
    first, notes, second = cells(TEXT)
    assert first == ("slide", TEXT[:TEXT.index("\n\n<details>")]) and second == ("slide", "## A section\nIts first words.")
    assert notes == ("notes", "Because.\n\nIt <i>is</i> so.")


def test_a_long_section_goes_on_downwards():
    paragraphs = [f"{'word ' * 40}{number}." for number in range(5)]
    found = cells("## Long\n\n" + "\n\n".join(paragraphs))
    assert [kind for kind, _ in found] == ["slide", "subslide", "subslide"]
    assert "\n\n".join(text for _, text in found) == "## Long\n\n" + "\n\n".join(paragraphs)
    assert [kind for kind, _ in cells(f"## Long\n\n{'word ' * 300}")] == ["slide"]               # no heading alone


def test_an_answer_at_the_beginning_belongs_to_the_slide_before():
    assert cells("<details><summary>A</summary>\nSo.\n</details>\nMore.") == [("subslide", "More."), ("notes", "So.")]


def test_of_code_only_pictures_stay():
    picture = nbformat.v4.new_output("display_data", {"image/png": "aGVsbG8=", "text/plain": "alt"})
    printed = nbformat.v4.new_output("stream", text="printed")
    (figure,) = slides.figures(nbformat.v4.new_code_cell("secret()", outputs=[printed, picture]))
    assert figure.outputs == [picture] and figure.source == ""


@pytest.mark.parametrize("path", sorted((lessons.ROOT / "solutions").glob("*.ipynb")), ids=lambda path: path.stem[:2])
def test_every_statement_and_figure_of_a_lesson_is_in_its_deck_and_no_code(path):
    notebook = notebook_cells.load_notebook(path)
    made = slides.deck(notebook)
    without = [re.sub(r"</?details>|<summary>.*?</summary>", "", cell.source) for cell in notebook.cells
               if cell.cell_type == "markdown"]
    assert sorted(word for cell in made.cells for word in cell.source.split()) == sorted(
        word for text in without for word in text.split())
    pictures = [output.data["image/png"] for cell in notebook.cells for output in cell.get("outputs", [])
                if "image/png" in output.get("data", {})]
    assert [cell.outputs[0].data["image/png"] for cell in made.cells if cell.cell_type == "code"] == pictures
    assert not any(cell.source for cell in made.cells if cell.cell_type == "code")


def test_the_command_writes_a_deck(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["course", "lessons", "slides", "09", "--out", str(tmp_path), "--reveal", "reveal.js"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    page = (tmp_path / "09_mesh.html").read_text()
    assert not ended.value.code and capsys.readouterr().out == f"wrote {tmp_path}/09_mesh.html\n"
    assert "Four axes" in page and "reveal.js/dist/reveal.js" in page and "movedim" not in page


def test_a_lesson_that_was_not_executed_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(lessons, "masters", lambda names, root: [SimpleNamespace(stem="00_x")])
    with pytest.raises(CourseError, match=r"00_x.ipynb is missing: run `course lessons build 00_x`"):
        slides.write([], tmp_path, root=tmp_path)
