"""What several commands share: presets, settings, and lists of numbers."""

import os
from typing import Annotated

import typer

from course.utils.errors import CourseError

KEYS = "[KEY=VALUE]..."
SETTINGS = {"ignore_unknown_options": True}            # so --steps is refused as a setting, with an explanation
OF_A_RUN = "settings, such as train.steps=100; `course settings` lists all of them"
Preset = Annotated[str, typer.Argument(help="a name from `course presets`, or the path of a YAML file")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar=KEYS, help=OF_A_RUN)]


def say_next(command: str) -> None:
    """Print a next command to paste; of several ranks only rank 0 prints it."""
    if command and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(f"next: {command}", flush=True)


def numbers(text: str, option: str, least: int = 1) -> list[int]:
    """`1,2,4` as numbers of at least `least`."""
    found = [int(part) if part.strip().isdecimal() else -1 for part in text.split(",")]
    if min(found) < least:
        raise CourseError(f"{option} {text} is wrong: give whole numbers from {least}, such as 1,4,8")
    return found
