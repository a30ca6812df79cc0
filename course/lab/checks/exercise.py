"""What an exercise is, and how it is found by name."""

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from torch import Tensor

from course.lab import exercises
from course.lab.authoring import hidden_answers, stubs
from course.lab.sandbox.limits import Limits
from course.utils.errors import CourseError, did_you_mean

UNKNOWN = "no known mistake gives these numbers: try your code on a case small enough to do by hand"
Tensors = dict[str, Tensor]
Cases = list[str] | dict[str, list[str]]             # what was asked, for each number of all outputs, or of each by name


@dataclass(frozen=True)
class Exercise:
    """One exercise: whose place the learner's code takes, what is run with it, and what is claimed of the outcome.

    `draw(seed, hidden)` makes the inputs, afresh for every seed and of other sizes where `hidden` (which
    grading uses). `program(inputs)` runs the real thing, with the learner's objects in the library's
    place, in a process of its own; it returns tensors, and knows nothing of what they should be: the
    expected ones come from the same program with the library's objects. If there is a `weigh`, they are
    a transcript of what happened, and `weigh(inputs, transcript)` makes the outputs of it, in the process
    that judges: it looks at every part before it uses it.
    """

    name: str                                        # what `check` is called with, and nbgrader's grade_id
    lesson: str                                      # "01"
    objects: tuple[str, ...]                         # dotted names of what the learner writes
    draw: Callable[[int, bool], Tensors]
    program: Callable[[Tensors], Tensors]
    claims: dict[str, str]                           # name of an output -> what holds if it is right, in a sentence
    flags: dict[str, str] = field(default_factory=dict)      # of outputs that are 1.0 if the claim holds: what it means if not
    untried: dict[str, str] = field(default_factory=dict)    # of outputs that are empty if the claim was not tried: why not
    read_as: dict[float, str] = field(default_factory=dict)  # numbers that stand for something else: in words
    cases: Callable[[Tensors], Cases] | None = None  # what was asked, in words, for each number of an output
    unknown: str = UNKNOWN                           # the hint where none fits
    tolerance: float = 1e-9                          # relative, in the 2-norm: float64 and a few hundred additions
    weigh: Callable[[Tensors, Tensors], Tensors] | None = None           # what is claimed, from inputs and a transcript
    sizes: tuple[int, ...] = (1,)                    # numbers of ranks it is run on, each in turn
    points: int = 1
    limits: Limits = field(default=Limits())

    @property
    def names(self) -> tuple[str, ...]:
        """What the learner's cell defines."""
        return tuple(dotted.rpartition(".")[2] for dotted in self.objects)

    def weighed(self, inputs: Tensors, returned: Tensors) -> Tensors:
        """The outputs that are compared, from what `program` returned."""
        return self.weigh(inputs, returned) if self.weigh else returned

    @property
    def facts(self) -> int:
        """How many facts a check finds if nothing stops it: every claim on every number of ranks."""
        return len(self.claims) * len(self.sizes)

    @property
    def version(self) -> str:
        """Changes when the check or the answer does: 12 hexadecimal digits."""
        module = self.program.__module__
        definition = hidden_answers.original_text(module, Path(str(sys.modules[module].__file__)))
        text = definition + "".join(map(stubs.answer_source, self.objects))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Mistake:
    """A known wrong answer: the right one with a piece replaced, and what to tell whoever made it.

    The answer's outputs are compared with those of each mistake, so a hint is given only to who made just that mistake;
    `by` names outputs that are enough to know it by, such as which collectives sent too much. `silent` marks one that yields
    nothing to compare with: it stops, or `waits` for ever.
    """

    name: str                                        # "a sum for a mean"
    old: str                                         # a piece of the answer
    new: str                                         # what stands there instead
    hint: str
    by: tuple[str, ...] = ()
    silent: bool = False
    waits: bool = False


@cache
def all_exercises() -> dict[str, Exercise]:
    """Every exercise by name, in the order of the lessons: the modules of `course.lab.exercises`."""
    listed = [exercise for module in iter_modules(exercises.__path__)
             for exercise in import_module(f"{exercises.__name__}.{module.name}").EXERCISES]
    by_name = {exercise.name: exercise for exercise in sorted(listed, key=lambda exercise: exercise.lesson)}
    assert len(by_name) == len(listed), "two exercises have the same name"
    return by_name


def offered(root: Path = stubs.PACKAGE.parent) -> dict[str, Exercise]:
    """The exercises of the lessons that are there, as a notebook or as a master; all, where neither are."""
    lessons = {path.stem[:2] for folder in ("notebooks", "solutions") for path in (root / folder).glob("[0-9][0-9]_*")}
    return {name: exercise for name, exercise in all_exercises().items() if exercise.lesson in lessons or not lessons}


def find(name: str, lesson: str = "") -> Exercise:
    """An exercise by name; a `CourseError` names the nearest of those that are offered where there is none.

    lesson: the number of the one whose exercises it then lists; else, and where it has none, those of all.
    """
    known = all_exercises()
    if name not in known:
        available = offered()
        lessons_own = [other for other, exercise in available.items() if exercise.lesson == lesson]
        listed = f"lesson {lesson} has" if lessons_own else "there are"
        hint = did_you_mean(name, lessons_own) or did_you_mean(name, available)
        raise CourseError(f"there is no exercise {name!r}{hint}; {listed} {', '.join(lessons_own or available)}")
    return known[name]


def known_mistakes(exercise: Exercise) -> tuple[Mistake, ...]:
    """The known wrong answers of an exercise, from the module of `course.lab.mistakes` named like its own."""
    module = exercise.program.__module__.rpartition(".")[2]
    return tuple(import_module(f"course.lab.mistakes.{module}").MISTAKES[exercise.name])


def right(exercise: Exercise, marked: bool = False) -> str:
    """The right answer's source; `marked` puts it between nbgrader's markers."""
    return stubs.answer_source(*exercise.objects, marked=marked)


def wrong(exercise: Exercise, mistake: Mistake) -> str:
    """The source of a wrong answer; a `CourseError` where the right one no longer has the piece to replace."""
    source = right(exercise)
    if mistake.old not in source:
        raise CourseError(f"{exercise.name}: the mistake {mistake.name!r} replaces {mistake.old!r}, which the answer has not")
    return source.replace(mistake.old, mistake.new)
