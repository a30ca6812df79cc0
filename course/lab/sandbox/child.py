"""The process inside the sandbox: replace library objects by answers, run the exercise's program, write its tensors.

    python -m course.lab.sandbox.child FOLDER

It imports a copy of the package in which the exercise's objects are blank. FOLDER holds `job.json`
({"exercise", "module", "kernels", "answers", "ranks", "seconds"}) and, for each answer i, the inputs `inputs-i.safetensors` and
the answer `answer-i.json`, a list of (cell, line, text). Rank r writes its outputs to `out-i-r.safetensors`. An error goes to
`error-i.json` ({"kind", "text", "cure"}). After all imports and before any answer's code, it tells the watchdog that the run has
started. Nothing here knows the expected outputs.
"""

import __future__

import json
import linecache
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from course.ranks.collective_mismatch import CELL

START_VARIABLE = "COURSE_SANDBOX_BEGUN"              # holds the file descriptor of the watchdog's start pipe
LIBRARY_RAISED = ("no line of yours raised this, but the library could not go on with what your code takes, returns or yields: "
                  "compare that with what the docstring and the lesson say")

OWN_ERRORS = {"course.lab.checks.return_values": "InvalidReturn", "course.lab.instruments.gpu_compiler": "DoesNotCompile"}

CURES = (                                            # error message of PyTorch, NumPy or Triton -> cure
    (r"no attribute 'get_bf16'",
     "this computes in bf16, which keeps 8 bits: cast what you load, .to(tl.float32), before you compute with it"),
    (r"returned an incorrect number of gradients",
     "`backward` returns one thing for each argument of `forward` after ctx, in order: a gradient, or None for what has none"),
    (r"returned an invalid gradient",
     "the gradient that `backward` returns has to have the shape of the argument that it belongs to"),
    (r"Mismatch in shape: grad_output",
     "what `forward` returned is longer or shorter than it should be: look at the dim that is cut, and at whose piece it is"),
    (r"buffer is smaller than requested size|offset must be non-negative",
     "more is asked of the file than it has from there on: a count, a type or an offset is too large. Go through the parts in "
     "order, with the bytes that each takes"),
    (r"rank \d+ is not part of group",
     "torch.distributed wants the ranks of the whole run: the i-th rank of an axis is axis.ranks[i]"),
    (r"index out of range|out of bounds",
     "an index is negative, or too large for what is here: look at what it is on each rank, at both ends of what it may be"),
    (r"shapes cannot be multiplied|must match the size of tensor|must match the existing size|doesn't match the broadcast shape",
     "two shapes do not fit: print both, and ask of each dim whether it is cut here or whole"),
    (r"must have the same dtype|expected scalar type|same dtype",
     "two number formats meet: bring one tensor to the other's, .to(other.dtype)"),
    (r"modified by an inplace operation|is being modified inplace|a leaf Variable that requires grad",
     "this writes into a tensor that autograd still needs: make a new one"),
    (r"does not require grad",
     "the way back to the input is cut: look for .detach(), .data, torch.no_grad() or a collective of torch.distributed, which "
     "has no gradient"),
    (r"Boolean value of Tensor|truth value of an array",
     "an `if` or a `while` wants one truth, and here is a whole tensor of them: choose with torch.where"),
)


def main(folder: Path) -> None:
    """Run every answer of the job, on one rank or several."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    pipe = os.environ.pop(START_VARIABLE, "")                 # ranks inherit no descriptors: there the number means another file
    for number in range(job["answers"]):
        if job["ranks"] > 1:
            run_on_ranks(job, folder, number, pipe if number == 0 else "")
            continue
        try:
            run_answer(folder, number, job["module"], job["exercise"], 0, pipe if number == 0 else "", job["kernels"], alone=True)
        except BaseException as error:
            write_error(folder / f"error-{number}.json", describe_error(error))


def run_on_ranks(job: dict[str, Any], folder: Path, number: int, pipe: str) -> None:
    """Run answer `number` on several ranks. pipe: see `report_start`."""
    from course.ranks.notebook_ranks import RankError, ranks

    try:
        call = ranks(job["ranks"], timeout=job["seconds"], imports=job["module"])
        call(int)                                    # once they answer, they have imported everything
        report_start(pipe)
        call(run_rank, str(folder), number, job["module"], job["exercise"])
    except RankError as error:
        reports = {rank: json.loads(file.read_text(encoding="utf-8")) for rank in range(job["ranks"])
                if (file := folder / f"error-{number}-{rank}.json").exists()}
        if error.unmet:
            report = {"kind": "ranks", "text": error.unmet, "cure": ""}
        elif reports:
            report = merge_errors(reports)
        else:
            report = {"kind": "late" if error.text.startswith("Not done after") else "ended", "text": error.text, "cure": ""}
        write_error(folder / f"error-{number}.json", report)


def report_start(pipe: str) -> None:
    """Tell the watchdog to start the clock, through this file descriptor; "": it knows already, or there is none."""
    if pipe:
        os.write(int(pipe), b".")
        os.close(int(pipe))


def run_rank(folder: str, number: int, module: str, name: str) -> None:
    """Run an answer on one rank of several. It records an exception and raises it again, so that other ranks stop waiting."""
    import torch.distributed as dist

    from course.ranks.collective_mismatch import lost

    rank = dist.get_rank()
    try:
        run_answer(Path(folder), number, module, name, rank)
    except Exception as error:
        if not lost(error):
            write_error(Path(folder, f"error-{number}-{rank}.json"), describe_error(error))
        raise


def merge_errors(reports: dict[int, dict[str, str]]) -> dict[str, str]:
    """Merge the errors of several ranks into one report; equal texts appear once."""
    from course.utils.errors import rank_names

    ranks_by_text: dict[str, list[int]] = {}
    for rank, report in reports.items():
        ranks_by_text.setdefault(report["text"], []).append(rank)
    first = reports[min(reports)]
    return first | {"text": "\n".join(f"{rank_names(ranks)}: {text}" for text, ranks in ranks_by_text.items())}


def run_answer(folder: Path, number: int, module: str, name: str, rank: int, pipe: str = "", kernels: bool = False,
               alone: bool = False) -> None:
    """Run the exercise's program with answer `number` instead of the library's objects. pipe: see `report_start`.

    kernels: the answer is a Triton kernel, so that it has to compile for a GPU, too. alone: no other rank needs the inputs, so
    their file goes before the answer runs, which could read there what the program hides from it.
    """
    import torch  # late: the process that only starts ranks saves a second
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(1)
    exercise = next(one for one in import_module(module).EXERCISES if one.name == name)      # `find` would import all modules
    file = folder / f"inputs-{number}.safetensors"
    inputs = {key: value.clone() for key, value in load_file(file).items()}         # not mapped from the file
    if alone:
        file.unlink()
    report_start(pipe)
    with installed_answers(exercise.objects, load_answer(folder / f"answer-{number}.json", exercise.names)):
        outputs = run_kernels(exercise.program, inputs) if kernels else exercise.program(inputs)
    save_file({key: value.detach().clone().contiguous() for key, value in outputs.items()},
              folder / f"out-{number}-{rank}.safetensors")


def run_kernels(program: Callable[[Any], Any], inputs: Any) -> Any:
    """Run a program whose kernels are interpreted, then compile them. Raises `DoesNotCompile` for one that does not."""
    from course.lab.instruments import gpu_compiler

    with gpu_compiler.noted_launches() as launches:
        outputs = program(inputs)
    gpu_compiler.compile_all(launches)
    return outputs


def load_answer(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """Execute an answer's pieces, each with its cell's name and line numbers; returns the named objects."""
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    future = 0
    pieces = json.loads(path.read_text(encoding="utf-8"))
    for cell in {cell for cell, *_ in pieces}:       # lines of a longer answer before this one would follow its last line,
        linecache.cache.pop(cell, None)              # and Triton would read them as part of its last kernel
    for cell, line, text in pieces:
        register_lines(cell, line, text)
        code = compile("\n" * (line - 1) + text, cell, "exec", future, dont_inherit=True)
        future |= code.co_flags & __future__.annotations.compiler_flag          # applies to all later pieces
        exec(code, module.__dict__)
    return {name: getattr(module, name) for name in names}


def register_lines(cell: str, line: int, text: str) -> None:
    """Register a cell's lines with `linecache`, so that tracebacks can quote them."""
    lines = list(linecache.getlines(cell))
    new = [f"{each}\n" for each in text.splitlines()]
    lines += ["\n"] * (line - 1 + len(new) - len(lines))
    lines[line - 1:line - 1 + len(new)] = new
    linecache.cache[cell] = (0, None, lines, cell)


@contextmanager
def installed_answers(objects: tuple[str, ...], answers: dict[str, Any]) -> Iterator[None]:
    """Inside the block, replace the library's objects by answers in every library module that refers to them."""
    replacements = []
    for dotted in objects:
        module, _, name = dotted.rpartition(".")
        __import__(module)
        original = getattr(sys.modules[module], name)
        for other in [m for key, m in list(sys.modules.items()) if key.split(".")[0] == "course"]:
            for attribute in [key for key, value in vars(other).items() if value is original]:
                setattr(other, attribute, answers[name])
                replacements.append((other, attribute, original))
    try:
        yield
    finally:
        for other, attribute, original in replacements:
            setattr(other, attribute, original)


def describe_error(error: BaseException) -> dict[str, str]:
    """Report an error: its kind, a text with the learner's lines in the traceback, and a cure if one is known."""
    error = first_cause(error)
    for module, kind in OWN_ERRORS.items():          # not imported: no such error possible
        if module in sys.modules and isinstance(error, getattr(sys.modules[module], kind)):
            return {"kind": kind, "text": error.text, "cure": error.cure}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(CELL)]
    lines = [f"line {frame.lineno} of {frame.filename}: {frame.line}" for frame in frames[-4:]]
    if isinstance(error, SyntaxError) and str(error.filename).startswith(CELL):
        lines.append(f"line {error.lineno} of {error.filename}: {(error.text or '').strip()}")
        error = SyntaxError(error.msg)               # drop "(the cell ..., line 3)"
    if isinstance(error, NotImplementedError) and str(error) == "not implemented yet" and frames:         # a blank
        error = NotImplementedError(f"`{failing_function(error)}`: {error}")
    return {"kind": type(error).__name__, "text": "\n".join([f"{type(error).__name__}: {error}", *lines]),
            "cure": next((cure for words, cure in CURES if re.search(words, str(error))), "" if lines else LIBRARY_RAISED)}


def first_cause(error: BaseException) -> BaseException:
    """What a kernel raised, without what Triton's interpreter wraps around it."""
    while type(error).__name__ == "InterpreterError" and error.__cause__:
        error = error.__cause__
    return error


def failing_function(error: BaseException, file: str = CELL) -> str:
    """The function or class in which an error occurred, by its name in the last file whose name begins like this."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [code.co_qualname for code in codes if code.co_filename.startswith(file)][-1].split(".")[0]


def write_error(path: Path, report: dict[str, str]) -> None:
    """Write an error report; keep the end of a long text."""
    path.write_text(json.dumps(report | {"text": report["text"][-8000:]}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
