"""The definition of an exercise, and the registry of exercises and known mistakes."""

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
CORRECT = "correct"                                  # the first level of an open task
Tensors = dict[str, Tensor]
Cases = list[str] | dict[str, list[str]]             # the question behind each number of every output, or by output name


@dataclass(frozen=True)
class Exercise:
    """One exercise: the library objects that the learner writes, the program that runs them, and claims about its outputs.

    `draw(seed, hidden)` draws the inputs; grading uses `hidden`, which draws other sizes. `program(inputs)` runs the library
    with the learner's objects in place of its own, in a separate process, and returns tensors. It does not know the expected
    outputs: they come from the same program with the library's own objects. If there is a `weigh`, `program` returns a
    transcript of events instead, and `weigh(inputs, transcript)` computes the outputs in the checking process. It must
    validate every part of the transcript before using it.

    With a `ladder` it is an open task: optional, and scored by levels. The first level is that the answer is correct; each
    further one adds its points if the claims that `levels` names for it hold too.
    """

    name: str                                        # the argument of `check`, and nbgrader's grade_id
    lesson: str                                      # "01"
    objects: tuple[str, ...]                         # dotted names of the objects that the learner writes
    draw: Callable[[int, bool], Tensors]
    program: Callable[[Tensors], Tensors]
    claims: dict[str, str]                           # output name -> what holds if it is right, in a sentence
    flags: dict[str, str] = field(default_factory=dict)      # output that is 1.0 if its claim holds -> what failed
    untried: dict[str, str] = field(default_factory=dict)    # output that is empty if its claim was not tried -> why not
    measured: dict[str, str] = field(default_factory=dict)   # output of a claim -> output with the numbers for its "{}"
    read_as: dict[float, str] = field(default_factory=dict)  # a number with a special meaning -> that meaning in words
    cases: Callable[[Tensors], Cases] | None = None  # the question behind each number of an output, in words
    unknown: str = UNKNOWN                           # the hint if no other fits
    explain: Callable[[Tensors, Tensors, Tensors], str] | None = None    # (inputs, expected, got) -> a better one, or ""
    tolerance: float = 1e-9                          # relative, in the 2-norm: float64 and a few hundred additions
    weigh: Callable[[Tensors, Tensors], Tensors] | None = None           # (inputs, transcript) -> outputs
    sizes: tuple[int, ...] = (1,)                    # numbers of ranks to run on, one after another
    points: int = 1                                  # of an open task: for each level
    levels: dict[str, str] = field(default_factory=dict)     # output -> the level of its claim, if that is not the first
    ladder: tuple[str, ...] = ()                     # an open task's hints, which the learner opens one by one
    limits: Limits = field(default=Limits())

    @property
    def open(self) -> bool:
        """Whether it is an open task."""
        return bool(self.ladder)

    @property
    def level_names(self) -> tuple[str, ...]:
        """The levels of an open task, the first one first."""
        return tuple(dict.fromkeys([CORRECT, *(self.levels.get(key, CORRECT) for key in self.claims)]))

    def level(self, key: str) -> int:
        """The number of the level to which an output's claim belongs."""
        return self.level_names.index(self.levels.get(key, CORRECT))

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the learner's cell defines."""
        return tuple(dotted.rpartition(".")[2] for dotted in self.objects)

    def weighed(self, inputs: Tensors, returned: Tensors) -> Tensors:
        """The outputs to compare, from what `program` returned."""
        return self.weigh(inputs, returned) if self.weigh else returned

    @property
    def facts(self) -> int:
        """The number of facts of a complete check: every claim on every number of ranks."""
        return len(self.claims) * len(self.sizes)

    @property
    def needs_triton(self) -> bool:
        """Whether the answer is a Triton kernel."""
        return has_kernel(self.objects)

    @property
    def version(self) -> str:
        """12 hexadecimal digits that change when the check or the answer changes."""
        module = self.program.__module__
        definition = hidden_answers.original_text(module, Path(str(sys.modules[module].__file__)))
        text = definition + "".join(map(stubs.answer_source, self.objects))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@cache
def has_kernel(objects: tuple[str, ...]) -> bool:
    """Whether one of these library objects is a Triton kernel. Cached: CPython 3.11 cannot parse in two threads at once."""
    return "@triton.jit" in stubs.answer_source(*objects)


@dataclass(frozen=True)
class Mistake:
    """A known wrong answer: the right one with a piece of its source replaced, and the hint for it.

    A check compares the answer's outputs with those of each mistake, so the hint goes only to learners who made this mistake.
    `by` names outputs that are enough to identify it, such as which collectives sent too much. `stops` is the kind of error with
    which it stops: an answer is compared with it only if it stops in this way. A `silent` mistake returns nothing to compare
    with: it stops, or it hangs (`waits`).
    """

    name: str                                        # "a sum for a mean"
    old: str                                         # a piece of the right answer
    new: str                                         # its replacement
    hint: str
    by: tuple[str, ...] = ()
    stops: str = ""                                  # an exception's name, or "ranks"
    silent: bool = False
    waits: bool = False


@cache
def all_exercises() -> dict[str, Exercise]:
    """All exercises by name, in the order of the lessons, from the modules of `course.lab.exercises`."""
    listed = [exercise for module in iter_modules(exercises.__path__)
             for exercise in import_module(f"{exercises.__name__}.{module.name}").EXERCISES]
    by_name = {exercise.name: exercise for exercise in sorted(listed, key=lambda exercise: (exercise.lesson, exercise.open))}
    assert len(by_name) == len(listed), "two exercises have the same name"
    return by_name


def offered(root: Path = stubs.PACKAGE.parent) -> dict[str, Exercise]:
    """The exercises whose lesson has a notebook or a master below `root`; all exercises if no lesson has."""
    lessons = {path.stem[:2] for folder in ("notebooks", "solutions") for path in (root / folder).glob("[0-9][0-9]_*")}
    return {name: exercise for name, exercise in all_exercises().items() if exercise.lesson in lessons or not lessons}


def find(name: str, lesson: str = "") -> Exercise:
    """Look up an exercise by name. Raises `CourseError` that suggests the nearest offered name if there is none.

    lesson: the error lists this lesson's exercises; without it, or if the lesson has none, it lists all.
    """
    known = all_exercises()
    if not isinstance(name, str):
        own = str(getattr(name, "__name__", "")).replace("_", "-")
        raise CourseError(f'an exercise is named in quotes: check("{own if own in known else "matmul-cost"}")')
    if name not in known:
        available = offered()
        lessons_own = [other for other, exercise in available.items() if exercise.lesson == lesson]
        listed = f"lesson {lesson} has" if lessons_own else "there are"
        hint = did_you_mean(name, lessons_own) or did_you_mean(name, available)
        raise CourseError(f"there is no exercise {name!r}{hint}; {listed} {', '.join(lessons_own or available)}")
    return known[name]


def known_mistakes(exercise: Exercise) -> tuple[Mistake, ...]:
    """The known wrong answers to an exercise, from the module of `course.lab.mistakes` with the same name as its own."""
    module = exercise.program.__module__.rpartition(".")[2]
    return tuple(import_module(f"course.lab.mistakes.{module}").MISTAKES[exercise.name])


def right(exercise: Exercise, marked: bool = False) -> str:
    """The source of the right answer. `marked` puts it between nbgrader's markers, for a cell of the lesson's notebook.

    There it calls what the learner wrote in the lesson's other exercises, where else it imports the library's.
    """
    others = [dotted for other in all_exercises().values() if other.lesson == exercise.lesson for dotted in other.objects]
    return stubs.answer_source(*exercise.objects, marked=marked, written=others if marked else ())


def wrong(exercise: Exercise, mistake: Mistake) -> str:
    """The source of a wrong answer. Raises `CourseError` if the right one no longer has the piece to replace."""
    source = right(exercise)
    if mistake.old not in source:
        raise CourseError(f"{exercise.name}: the answer lacks {mistake.old!r}, which the mistake {mistake.name!r} replaces")
    return source.replace(mistake.old, mistake.new)
