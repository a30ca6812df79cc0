"""Tables that fit where they are shown: a terminal, a file, a notebook's cell."""

import io
from html import escape

from rich.console import Console
from rich.table import Table
from rich.text import Text

from course.utils.machine import in_notebook


def print_table(table: Table, console: Console) -> None:
    """Print a table; in a notebook show it as HTML, whose cells wrap where a printed table would need a scroll bar."""
    if not in_notebook():
        console.print(table)
        return
    from IPython.display import display

    text = io.StringIO()
    Console(file=text, width=console.width, force_jupyter=False).print(table)
    display({"text/html": to_html(table), "text/plain": text.getvalue()}, raw=True)


def to_html(table: Table) -> str:
    """The table with its title and its alignment; of its styles only red is kept, as bold."""
    columns = [(f"text-align: {column.justify}", [str(cell) for cell in column.cells]) for column in table.columns]
    rows = zip(*(cells for _, cells in columns), strict=True)
    lines = ["".join(f'<td style="{style}">{cell_to_html(cell)}</td>' for (style, _), cell in zip(columns, row, strict=True))
             for row in rows]
    heads = "".join(f'<th style="{style}">{cell_to_html(str(column.header))}</th>'
                    for column, (style, _) in zip(table.columns, columns, strict=True))
    title = f"<caption>{escape(str(table.title))}</caption>" if table.title else ""
    return (f'<table style="overflow-wrap: anywhere">{title}<thead><tr>{heads}</tr></thead><tbody>'
            + "".join(f"<tr>{line}</tr>" for line in lines) + "</tbody></table>")


def cell_to_html(markup: str) -> str:
    """A cell that rich would print."""
    text = Text.from_markup(markup)
    plain = escape(text.plain).replace("-\n", "-<wbr>").replace("\n", "<br>")
    return f"<b>{plain}</b>" if any(span.style == "red" for span in text.spans) else plain
