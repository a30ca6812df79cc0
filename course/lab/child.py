"""What runs in a process of its own: put answers in the library's place, run an exercise's program, write tensors.

    python -m course.lab.child FOLDER

imports a copy of the package in which the exercise's objects are blank. The folder holds `job.json`
({"exercise", "answers", "ranks"}), `inputs.safetensors` and the answers' sources; for answer i and rank r
the outputs go to `out-i-r.safetensors`, or what went wrong to `error-i-r.json`. Nothing here knows what
the outputs should be.
"""

import json
import linecache
import sys
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

YOURS = "<your answer>"


def main(folder: Path) -> None:
    """Run every answer of the job, on one rank or several."""
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(1)
    for number in range(job["answers"]):
        if job["ranks"] == 1:
            work(str(folder), number, job["exercise"], 0)
            continue
        from course.launch import RankError, ranks

        try:
            ranks(job["ranks"], timeout=job["seconds"])(on_rank, str(folder), number, job["exercise"])
        except RankError as error:
            complain(folder, number, 0, "ranks", str(error))


def on_rank(folder: str, number: int, name: str) -> None:
    """The work of one rank among several; what it raises is the launcher's to tell."""
    work(folder, number, name, torch.distributed.get_rank(), catch=False)


def work(folder: str, number: int, name: str, rank: int, catch: bool = True) -> None:
    """Run the exercise's program with answer `number` in the library's place."""
    from course.lab import exercise as exercises

    exercise, here = exercises.find(name), Path(folder)
    inputs = load_file(here / "inputs.safetensors")
    try:
        with installed(exercise.objects, load(here / f"answer-{number}.py", exercise.names)):
            outputs = exercise.program(inputs)
        save_file({key: value.detach().clone().contiguous() for key, value in outputs.items()},
                  here / f"out-{number}-{rank}.safetensors")
    except BaseException as error:
        if not catch:
            raise
        complain(here, number, rank, type(error).__name__, told(error))


def complain(folder: Path, number: int, rank: int, kind: str, text: str) -> None:
    """Write down what went wrong."""
    (folder / f"error-{number}-{rank}.json").write_text(json.dumps({"kind": kind, "text": text[-8000:]}))


def load(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """Execute an answer's source; returns the objects of these names."""
    source = path.read_text()
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    linecache.cache[YOURS] = (len(source), None, source.splitlines(keepends=True), YOURS)
    exec(compile(source, YOURS, "exec"), module.__dict__)
    return {name: getattr(module, name) for name in names}


@contextmanager
def installed(objects: tuple[str, ...], answers: dict[str, Any]) -> Iterator[None]:
    """Put answers in the place of the library's objects, wherever a module of the library refers to them."""
    replaced = []
    for dotted in objects:
        module, _, name = dotted.rpartition(".")
        __import__(module)
        original = getattr(sys.modules[module], name)
        for other in [m for key, m in list(sys.modules.items()) if key.split(".")[0] == "course"]:
            for attribute in [key for key, value in vars(other).items() if value is original]:
                setattr(other, attribute, answers[name])
                replaced.append((other, attribute, original))
    try:
        yield
    finally:
        for other, attribute, original in replaced:
            setattr(other, attribute, original)


def told(error: BaseException) -> str:
    """The error with the lines of the learner's own code that led to it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == YOURS]
    lines = [f"line {frame.lineno} of your answer, in {frame.name}: {frame.line}" for frame in frames[-4:]]
    if isinstance(error, SyntaxError) and error.filename == YOURS:
        lines.append(f"line {error.lineno} of your answer: {(error.text or '').strip()}")
    return "\n".join([f"{type(error).__name__}: {error}", *lines])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
