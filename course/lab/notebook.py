"""What lessons call: check an answer, show code, compare a measurement with a prediction, show recorded results."""

import base64
import math
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, SupportsFloat

import torch
from matplotlib.figure import Figure

from course.bench.results import FOLDER as RESULTS
from course.bench.results import load as results
from course.lab.authoring import stubs
from course.lab.checks import check as checks
from course.lab.checks import exercise as exercises
from course.lab.checks import notebook_cells, own_notebooks, render
from course.lab.figures import widgets
from course.ops import triton_language
from course.utils.errors import CourseError
from course.utils.machine import cores, in_notebook

MISSING_HINT = "write the cell of the exercise, run it, then this one"
BROKEN_HINT = "fix that line, run the cell, then this one"
IMPORTED_HINT = "define it in this notebook, in the exercise's cell, instead of importing it; run that cell, then this one"
_passed: set[str] = set()                            # exercises that passed since the kernel started
_opened: dict[str, int] = {}                         # open task -> how many of its hints are open
BUILDING = "COURSE_BUILDS_LESSONS"                   # set while the builder executes a lesson


class CheckFailed(Exception):
    """An answer did not pass. A notebook shows one line instead of a traceback: the verdict is already above it."""

    def _render_traceback_(self) -> list[str]:
        return [f"{render.RED}{self}{render.PLAIN}"]


def begin(lesson: str) -> None:
    """Change to the course's folder, where `data` and `runs` are, and print what this lesson runs on.

    The folder is a clone, a release, or the output of `course lessons copy`, which has `submit` instead of `course`.
    """
    home = next((folder for folder in [Path.cwd(), *Path.cwd().parents]
                 if (folder / "notebooks").is_dir() and ((folder / "course").is_dir() or (folder / "submit").is_dir())), None)
    if in_notebook():
        name_blanks()
    if home:
        os.chdir(home)
        own_notebooks.remember_course(home)
    device = f"{torch.cuda.get_device_name()} GPU" if torch.cuda.is_available() else "no GPU: everything here runs on the CPU"
    print(f"Lesson {lesson}, PyTorch {torch.__version__}, {cores()} CPU cores, {device}")
    if not home:
        print(f"The course's folder was not found above {Path.cwd()}: data and runs will be made here")


def name_blanks() -> None:
    """From now on, a cell that calls what is still blank shows a sentence in place of a traceback."""
    from IPython import get_ipython

    get_ipython().set_custom_exc((NotImplementedError,), show_blank)


def show_blank(shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: int | None = None) -> None:
    """Show a NotImplementedError in a notebook: one that a blank raised as a sentence, another one as usual."""
    from course.lab.sandbox.child import failing_function

    if str(error) == stubs.UNWRITTEN:
        sentence = CheckFailed(f"this cell calls `{failing_function(error, '')}`, which is not written yet: {MISSING_HINT}")
        shell.showtraceback((CheckFailed, sentence, None))
    else:
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)


def check(name: str, seed: int | None = None) -> None:
    """Check an exercise: run the notebook's latest definitions in a separate process and show the verdict.

    Every check draws new inputs; pass `seed` to repeat an earlier check. If a claim fails, it shows which one and a hint,
    then raises `CheckFailed`, so that "run all" stops here and nbgrader records a failure. An open task is optional and stops
    nothing. On a GPU it also prints the speed of a kernel that passed.
    """
    exercise = exercises.find(name)
    answer = notebook_cells.find_answer(notebook_cells.Program(written()), exercise.names, exercise.objects)
    if answer.problem:
        hint = IMPORTED_HINT if answer.imported else BROKEN_HINT if answer.broken else MISSING_HINT
        verdict = checks.unreadable_verdict(exercise, answer.problem, hint)
    else:
        verdict = checks.check_answer(exercise, answer.pieces, secrets.randbits(31) if seed is None else seed,
                                 looking=partial(print, "Not yet. Looking for what went wrong ...", flush=True))
    display({"text/html": render.html(verdict)}, render.text(verdict, sys.stdout.isatty()))
    if exercise.needs_triton and not triton_language.INSTALLED:
        return                                       # the rest of the lesson can be read
    if not verdict.passed and exercise.open:
        print(f'This task is optional. The first of its {len(exercise.ladder)} hints: lab.hint("{name}")')
        return
    if not verdict.passed:
        raise CheckFailed(f"{name} has not passed yet: see above")
    _passed.add(name)
    if gpu() and triton_language.INSTALLED:
        show_speed(exercise)
    print(f'Compare your code with the course\'s own: lab.answer("{name}")')


def hint(name: str) -> None:
    """Open the next hint of an open task, and show it below those already open. Raises `CourseError` for an exercise."""
    task = exercises.find(name)
    if not task.open:
        raise CourseError(f'{name} is no open task: check("{name}") says what to look at')
    _opened[name] = min(_opened.get(name, 0) + 1, len(task.ladder))
    for number, text in enumerate(task.ladder[:_opened[name]], 1):
        print(f"Hint {number} of {len(task.ladder)}: {text}")


def show_speed(exercise: exercises.Exercise) -> None:
    """Measure the notebook's kernel on the GPU beside PyTorch's and the library's, and print it; nothing for other exercises."""
    from course.lab.instruments import kernel_speed  # late: it imports every kernel

    definitions = vars(sys.modules["__main__"])
    with yours(*(definitions[name] for name in exercise.names if name in definitions)):
        speeds = kernel_speed.of_exercise(exercise.name, torch.device("cuda"))
    for who, speed in speeds.items():
        columns = "   ".join(f"{number(value):>6} {unit}" for unit, value in speed.items())
        print(f"  {'yours' if who == 'lesson' else who:8} {columns}")


def answer(name: str) -> None:
    """Show the course's answer to an exercise that has passed since the kernel started; else raise `CourseError`.

    The answer is no secret (it is library code), but it teaches more after you have found your own.
    """
    exercise = exercises.find(name)
    if name not in _passed:
        raise CourseError(f'{name} has not passed in this session: run check("{name}") first, and see the answer after it has')
    for dotted in exercise.objects:
        show(dotted)


def written() -> list[str]:
    """The code cells executed so far in this notebook, or all code cells of a master that runs as a script."""
    executed = notebook_cells.executed_cells()
    script = getattr(sys.modules["__main__"], "__file__", None)
    if executed or not script:
        return executed
    from course.lab.authoring import lessons

    return notebook_cells.code_cells(lessons.instructor_notebook(Path(script)))


@contextmanager
def yours(*objects: Any) -> Iterator[None]:
    """Inside the block, replace the library's objects with yours of the same names.

    Raises `CourseError` for an object that no exercise asks for, and `CheckFailed` if the block stops and the exercise of such an
    object has not passed.
    """
    from course.lab.sandbox.child import first_cause, installed_answers

    dotted = {d.rpartition(".")[2]: d for exercise in exercises.all_exercises().values() for d in exercise.objects}
    for thing in objects:
        if thing.__name__ not in dotted:
            names = [name for exercise in exercises.offered().values() for name in exercise.names]
            raise CourseError(f"{thing.__name__} is not the answer to an exercise; there are {', '.join(names)}")
    with installed_answers(tuple(dotted[thing.__name__] for thing in objects), {thing.__name__: thing for thing in objects}):
        try:
            yield
        except Exception as error:
            own = {thing.__name__ for thing in objects}
            pending = [name for name, exercise in exercises.all_exercises().items()
                       if own & {*exercise.names} and name not in _passed]
            if not pending:
                raise
            cause = first_cause(error)
            raise CheckFailed(f"this cell runs your code, which stopped ({type(cause).__name__}: {cause}). First let the "
                              f'exercise pass: check("{pending[0]}")') from None


def picture(figure: Figure, words: str) -> None:
    """Show a figure; `words` is its alt text."""
    display({"image/png": base64.b64encode(widgets.png(figure)).decode()}, words, {"image/png": {"alt": words}})


def show(dotted: str) -> None:
    """Show the source of a library object, with syntax highlighting in a notebook."""
    library_object = stubs.find_object(dotted)
    source = f"# {library_object.module.replace('.', '/')}.py, line {library_object.lines[0]}\n{stubs.shown_source(dotted)}"
    if not in_notebook():
        print(source)
        return
    from IPython.display import Code
    from IPython.display import display as draw

    draw(Code(source, language="python"))


def beside(what: str, predicted: float, measured: float, unit: str = "", how: str = "measured") -> None:
    """Print a prediction and a measurement as bars; `how` says where the number comes from, such as "counted" or "recorded".

    Values of zero or less get no bar. Raises `CourseError` if the prediction is no number or either one is not finite.
    """
    if not isinstance(predicted, SupportsFloat):
        raise CourseError(f"{what}: you predicted {predicted!r}: put a number there")
    if not (math.isfinite(predicted) and math.isfinite(measured)):
        raise CourseError(f"{what}: predicted {predicted} and {how} {measured} cannot be compared: both must be finite numbers")
    largest, column = max(predicted, measured), max(len("predicted"), len(how))
    print(what)
    for name, value, mark, words in (("predicted", predicted, "▒", ""),
                                     (how, measured, "█", compare_in_words(predicted, measured))):
        bar = mark * max(1, round(40 * value / largest)) if value > 0 else ""
        print(f"  {name:{column}} {number(value):>8} {unit}  {bar}  {words}".rstrip())


def compare_in_words(predicted: float, measured: float) -> str:
    """Compare a measurement with its prediction in words: two significant digits, no exponent."""
    if math.isclose(predicted, measured):
        return "just as predicted"
    if not (predicted > 0 and measured > 0):
        return "more than that" if measured > predicted else "less than that"
    ratio = measured / predicted
    if 0.9 <= ratio <= 1.1:
        return "within 10% of your prediction"
    rounded = float(f"{ratio if ratio > 1 else 100 * ratio:.2g}")
    return f"{rounded:,.15g} times as much" if ratio > 1 else f"{rounded:.15g}% of your prediction"


def number(value: float) -> str:
    """Format with three significant digits, and without an exponent from 0.001 to a million."""
    if value == 0 or not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def gpu() -> bool:
    """Whether there is a GPU to measure on. Without one, cells that need it show a recorded result."""
    return torch.cuda.is_available()


def kernels() -> bool:
    """Whether Triton is installed, so that kernels run here, interpreted or on a GPU. If not, print what to do."""
    if not triton_language.INSTALLED:
        print(f"Kernels do not run here, because Triton is not installed: {triton_language.CURE}")
    return triton_language.INSTALLED


def recording(name: str) -> Path:
    """A recorded file of `course/bench/results`: a trace (traces/NAME.json.gz) or memory snapshot (traces/NAME.pickle.gz), which
    `course profile` reads, samples (traces/NAME.npz), or a folder with curves for TensorBoard (tensorboard/NAME)."""
    return RESULTS / name


def recorded(name: str, rows: Mapping[str, Mapping[str, Any]], why: str = "This needs a GPU, and there is none here") -> None:
    """Show recorded results as a table (row -> column -> value), with the hardware and the dates of measurement."""
    result = results(name)
    clone = (stubs.PACKAGE.parent / "notebooks").is_dir()                 # only there does the link below lead anywhere
    file = f"[{name}.json](../course/bench/results/{name}.json)" if clone else f"bench/results/{name}.json of the package"
    days = [result["date"], *(row["date"] for row in result.get("rows", ()) if "date" in row)]
    when = " to ".join(sorted({min(days), max(days)}))
    lines = [f"*{why}. Recorded on {result['hardware']}, PyTorch {result['torch']}, {when} ({file}):*\n"]
    for label, values in rows.items():
        if len(lines) == 1:
            lines += [f"| | {' | '.join(values)} |", f"|---|{'--:|' * len(values)}"]
        shown = (number(value) if isinstance(value, (int, float)) else str(value) for value in values.values())
        lines.append(f"| {label} | {' | '.join(shown)} |")
    display({"text/markdown": "\n".join(lines)}, "\n".join(lines))


def tensorboard(logdir: str | Path = "runs", height: int = 600) -> str:
    """Open TensorBoard inside the notebook and return its address. It listens on 127.0.0.1 only and ends with the kernel."""
    if os.environ.get(BUILDING):
        print(f"(TensorBoard opens here when you run this cell: it shows the curves and pictures under {logdir})")
        return ""
    from IPython.display import IFrame
    from IPython.display import display as draw
    from tensorboard import program

    server = program.TensorBoard()
    server.configure(argv=[None, "--logdir", str(logdir), "--host", "127.0.0.1",
                                 "--port", "0", "--load_fast", "false"])              # 0: a free port
    address: str = server.launch()
    draw(IFrame(address, "100%", height))
    print(f"TensorBoard of {logdir}: {address}" +
          ("" if Path(logdir).exists() else f" (empty: {Path(logdir).resolve()} does not exist yet; a run makes it)"))
    return address


def display(rich: dict[str, str], plain: str, metadata: dict[str, Any] | None = None) -> None:
    """Show rich output in a notebook and plain text elsewhere, never on stderr: nbgrader counts that as an error."""
    if not in_notebook():
        print(plain)
        return
    from IPython.display import display as draw

    draw(rich | {"text/plain": plain}, raw=True, metadata=metadata)


