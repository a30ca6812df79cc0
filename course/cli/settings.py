"""`course settings`: print each setting's default, its possible values, and the comment beside it in the dataclass."""

import dataclasses
import inspect
import re
import shutil
import textwrap
from typing import Any, Literal, get_args, get_origin

from course.config import Config
from course.config.schema import as_text
from course.models import KINDS
from course.utils.errors import CourseError, did_you_mean

COLUMN = 34                                         # where explanations begin


def main(section: str) -> None:
    """Print the settings of a section, or of all."""
    known = sections()
    if section and section not in known:
        raise CourseError(f"there is no section {section!r}{did_you_mean(section, known)}; the sections are {', '.join(known)}")
    print("\n\n".join(described(name, known[name]) for name in ([section] if section else known)))
    if not section:
        print("\nOn a command line: course train vit-demo train.steps=100 optim.lr=1e-3. In a YAML file: sections with keys.")


def sections() -> dict[str, type]:
    """The dataclasses of settings by section name: "run" for settings outside any section, "model.gpt" for a GPT's."""
    inner = {entry.name: entry.type for entry in dataclasses.fields(Config) if isinstance(entry.type, type)
             and dataclasses.is_dataclass(entry.type)}
    return {"run": Config, **{f"model.{kind}": section for kind, section in KINDS.items()}, **inner}


def described(name: str, section: type) -> str:
    """A section as text for a terminal of 80 columns or more."""
    said = comments(section)
    prefix = "" if name == "run" else "model." if name.startswith("model.") else f"{name}."
    lines = [f"{name}: {' '.join((section.__doc__ or '').split())}"]
    for entry in dataclasses.fields(section):
        if kind := choices(entry.type):
            lines += setting(f"{prefix}{entry.name}={as_text(entry.default)}", kind, said.get(entry.name, ""))
    return "\n".join(lines)


def setting(assignment: str, kind: str, comment: str) -> list[str]:
    """The lines of one setting: on the left its default as the user types it, on the right its possible values and meaning."""
    width = max(80, shutil.get_terminal_size().columns) - COLUMN - 1
    right = textwrap.wrap(f"({kind}) {comment}".strip(), width)
    if len(assignment) > COLUMN - 4:
        return [f"  {assignment}", *(" " * COLUMN + line for line in right)]
    return [f"  {assignment:{COLUMN - 2}}{right[0]}", *(" " * COLUMN + line for line in right[1:])]


def choices(kind: Any) -> str:
    """The possible values of a setting, in words; "" for a section."""
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return "list"
    return {int: "whole number", float: "number", bool: "true | false", str: "text"}.get(kind, "")


def comments(section: type) -> dict[str, str]:
    """Each field's comment, in its class or a base class: on the lines before it, beside it, or below it."""
    found: dict[str, str] = {}
    for its_class in reversed([each for each in section.__mro__ if dataclasses.is_dataclass(each)]):
        before, last = "", ""
        for line in inspect.getsource(its_class).splitlines():
            field, comment = re.match(r"    (\w+): [^#]+", line), line.partition("#")[2].strip()
            if field:
                last = field[1]
                found[last] = f"{before} {comment}".strip()
                before = ""
            elif re.match(r"    # ", line):
                before = f"{before} {comment}".strip()
            elif last and re.match(r" {20,}#", line):
                found[last] += f" {comment}"
    return found
