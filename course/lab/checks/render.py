"""Render a verdict: text with colors for a terminal, HTML for a notebook or a page.

A `graded` verdict shows neither the seed nor the answer's output: both would reveal the hidden inputs.
"""

import os
import re
from html import escape

from course.lab.checks.check import Fact, Verdict
from course.lab.checks.exercise import Exercise, all_exercises
from course.utils.errors import CourseError, is_out_of_memory

UNSHOWN = "the output of graded runs is not shown"
GREEN, RED, AMBER, DIM, PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[0m"

MARKS = {"held": ("✓", GREEN, "#0a7d46"), "failed": ("✗", RED, "#c0392b"), "untried": ("–", DIM, "#767676")}


def outcome(fact: Fact) -> str:
    """The outcome of a claim: a key of `MARKS`."""
    return "held" if fact.held else "failed" if fact.tried else "untried"


def headline(verdict: Verdict) -> str:
    """The outcome in one line."""
    if verdict.unchecked:
        return f"{verdict.exercise}: could not be checked"
    exercise = all_exercises().get(verdict.exercise)
    if exercise and exercise.open:
        return headline_of_levels(verdict, exercise)
    held = sum(fact.held for fact in verdict.facts)
    of, made = max(verdict.of, len(verdict.facts)), len(verdict.facts)
    later = f" ({of - made} more come once these do)" if 1 < made < of else ""          # such as those on more ranks
    return f"{verdict.exercise}: {'passed' if verdict.passed else 'not yet'}, {held} of {of} checks hold{later}"


def headline_of_levels(verdict: Verdict, task: Exercise) -> str:
    """The outcome of an open task in one line: which of its levels are reached."""
    levels, reached = task.level_names, [task.level_names[level] for level in verdict.reached]
    return f"{verdict.exercise} (open task): {len(reached)} of {len(levels)} levels ({', '.join(reached) or 'not correct yet'})"


def footer(verdict: Verdict, graded: bool = False) -> str:
    """How it was checked, in one line. A graded one leaves out the seconds: an answer could signal through them."""
    how = f"; your code ran {verdict.isolation}" if verdict.isolation else ""
    return f"{'hidden inputs' if graded else f'{verdict.seconds:.1f} s, inputs of seed {verdict.seed}'}{how}"


def shown_output(verdict: Verdict, graded: bool = False) -> str:
    """The end of the answer's output if it did not pass; "" otherwise."""
    if verdict.passed or not verdict.output.strip():
        return ""
    return UNSHOWN if graded else printable(end_of(verdict.output))


def text(verdict: Verdict, color: bool = True, graded: bool = False) -> str:
    """Lines for a terminal. Marks and words carry the same information without color."""
    def paint(code: str, line: str) -> str:
        return f"{code}{line}{PLAIN}" if color else line

    lines = [paint(GREEN if verdict.passed else RED, headline(verdict))]
    for fact in verdict.facts:
        mark, code, _ = MARKS[outcome(fact)]
        lines.append(paint(code, f"  {mark} ") + printable(fact.text).replace("\n", "\n      "))
    if verdict.hint:
        lines.append(paint(AMBER, "  hint: ") + printable(verdict.hint))
    if output := shown_output(verdict, graded):
        lines.append(paint(DIM, "  printed: " + output.replace("\n", "\n    ")))
    lines.append(paint(DIM, f"  {footer(verdict, graded)}"))
    return "\n".join(lines)


def html(verdict: Verdict, graded: bool = False) -> str:
    """The same as HTML, with everything escaped. Text uses the page's color and marks have their own background, so that both
    are readable in light and dark mode."""
    tint = MARKS["held" if verdict.passed else "failed"][2]
    rows = "".join(f'<li style="list-style:none;white-space:pre-wrap;margin:.1em 0">{badge(outcome(fact))} '
                   f'{escape(printable(fact.text))}</li>' for fact in verdict.facts)
    hint = f'<p style="margin:.4em 0"><b>Hint.</b> {escape(printable(verdict.hint))}</p>' if verdict.hint else ""
    output = shown_output(verdict, graded)
    output = f"<details><summary>What it printed</summary><pre>{escape(output)}</pre></details>" if output else ""
    return (f'<div style="border-left:4px solid {tint};padding:.3em .9em;margin:.3em 0"><b style="font-weight:bold">'
            f'{escape(headline(verdict))}</b><ul style="margin:.3em 0;padding:0">{rows}</ul>{hint}{output}'
            f'<small>{escape(footer(verdict, graded))}</small></div>')


def badge(what: str) -> str:
    """A mark of `MARKS` as HTML: white on its color."""
    mark, _, color = MARKS[what]
    shape = "border-radius:.25em;display:inline-block;width:1.3em;text-align:center"
    return f'<b style="background:{color};color:#ffffff;{shape}">{mark}</b>'


def printable(text: str) -> str:
    """Replace control characters, which a terminal might execute."""
    return "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text)


def printable_line(text: str) -> str:
    """Like `printable`, in one line: for names that somebody else chose."""
    return "".join(char if char.isprintable() else "�" for char in text)


def quote_untrusted(text: str) -> str:
    """A learner's words for use in our sentence: unchanged if plain, else quoted, without the characters that separate our
    own statements."""
    plain = re.fullmatch(r"[\w.%/()+,=\[\] -]{0,200}", text) and "confirmed" not in text.lower()
    return text if plain else '"' + re.sub(r"[\";:]", "'", printable_line(text)) + '"'


def failure_reason(error: BaseException) -> str:
    """Why this machine failed, in words that no answer can choose: the system's, the course's, or the error's type.

    For a `CourseError` it is the first line only: the rest may quote a program.
    """
    if isinstance(error, CourseError):
        return printable(str(error).split("\n")[0])[:300]
    if isinstance(error, OSError) and error.errno:
        return f"{type(error).__name__}: {os.strerror(error.errno)}"
    return "there is no memory left" if is_out_of_memory(error) else type(error).__name__


def end_of(text: str, most: int = 1500) -> str:
    """The last `most` characters of a text."""
    return text.strip() if len(text) <= most else "... " + text.strip()[-most:]
