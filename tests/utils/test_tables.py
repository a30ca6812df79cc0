"""Tables in a terminal and in a notebook."""

from rich.console import Console
from rich.table import Table

from course.utils import tables


def table() -> Table:
    made = Table(title="what is <here>")
    made.add_column("micro-\nbatch", justify="right")
    made.add_column("found", overflow="fold")
    made.add_row("1", "[green]ok[/]")
    made.add_row("2", "[red]no[/]\ncure: \\[lab] & more")
    return made


def test_a_terminal_gets_text(capsys):
    tables.print_table(table(), Console(width=60))
    assert "cure: [lab] & more" in capsys.readouterr().out


def test_a_notebook_gets_html_that_wraps_and_the_same_text(monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(tables, "in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append(bundle))
    tables.print_table(table(), Console(width=60))
    bundle, = shown
    assert "cure: [lab] & more" in bundle["text/plain"] and capsys.readouterr().out == ""
    assert "<caption>what is &lt;here&gt;</caption>" in bundle["text/html"]
    assert '<th style="text-align: right">micro-<wbr>batch</th>' in bundle["text/html"]
    assert '<td style="text-align: right">1</td><td style="text-align: left">ok</td>' in bundle["text/html"]
    assert "<b>no<br>cure: [lab] &amp; more</b>" in bundle["text/html"]
