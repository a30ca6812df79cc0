"""Answers to exercises that are not the library's own: RIGHT ones, {exercise: source or sources}, which pass in other words than
its, and WRONG ones, (exercise, source, what the hint says), which fail: on hidden inputs alone if the last is None, since they
were fitted to an example.
"""

from importlib import import_module
from pkgutil import iter_modules

MODULES = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]


def others(exercise: str) -> list[str]:
    """Other right answers to an exercise."""
    found = [source for module in MODULES for name, source in module.RIGHT.items() if name.partition(",")[0] == exercise]
    return [each for source in found for each in ([source] if isinstance(source, str) else source)]


def scored(exercise: str) -> list[tuple[str, tuple[str, ...], str]]:
    """Right answers to an open task: source, the levels that it reaches, and words of the hint for the next level."""
    return [(source, levels, words) for module in MODULES for name, source, levels, words in getattr(module, "SCORED", [])
            if name == exercise]


def plausible(exercise: str) -> list[tuple[str, str | None]]:
    """Wrong answers that are not known mistakes as they stand, each with words of the hint that it gets."""
    return [(source, words) for module in MODULES for name, source, words in getattr(module, "WRONG", []) if name == exercise]
