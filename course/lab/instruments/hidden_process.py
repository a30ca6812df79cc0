"""A process that answers an exercise's questions, so that the answer's own process does not hold what they are about.

    with HiddenProcess(build, knowledge) as hidden:
        hidden.ask("seconds", 3)                      # build(knowledge)("seconds", 3), computed there

Only one end of a pipe is left on this side. `build` and what it returns live in the other process.

A question without arguments is the check's own, for what the answer may not know: it is the last one that is answered.
"""

import multiprocessing
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

import torch

from course.lab.checks.return_values import InvalidReturn

Build = Callable[[Any], Callable[..., Any]]


class HiddenProcess:
    """A process with a function `build(knowledge)`; it ends with the block."""

    def __init__(self, build: Build, knowledge: Any):
        """build: a function of a module. knowledge: anything that can be pickled."""
        linux = sys.platform == "linux"              # elsewhere a forked process may not use all libraries
        context = multiprocessing.get_context("fork") if linux else multiprocessing.get_context("spawn")
        self.end, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(build, theirs, self.end), daemon=True)
        with warnings.catch_warnings():              # Python 3.12 warns of forks beside threads: no thread here holds a lock
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()
        self.end.send(knowledge)                     # not an argument of the process, which keeps those here

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end.close()
        self.process.join()

    def ask(self, *question: Any) -> Any:
        """The function's answer, or the `InvalidReturn` that it raises. No tensors: they would travel in shared memory."""
        self.end.send(question)
        answer = self.end.recv()
        if isinstance(answer, InvalidReturn):
            raise answer
        return answer


def serve(build: Build, end: Connection, other: Connection) -> None:
    """The other process: answer until the pipe is closed."""
    other.close()
    torch.set_num_threads(1)
    answer, over = build(end.recv()), False
    while True:
        try:
            question = end.recv()
        except EOFError:
            return
        try:
            if over:
                raise InvalidReturn("what is hidden was asked for before the answer was complete",
                                    "use only what the task hands to your function")
            over = not question
            end.send(answer(*question))
        except InvalidReturn as error:
            end.send(error)
