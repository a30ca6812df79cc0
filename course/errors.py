"""One exception for everything a user can mend, and words for its sentence: how a process ended, what was probably meant."""

import difflib
import signal
from collections.abc import Iterable


class CourseError(Exception):
    """Bad input, said in one sentence: what is wrong, where, and what to do.

    The command line prints the sentence without a traceback and exits with status 1.
    """


def ending(code: int) -> str:
    """A process's return code in words, as `subprocess` gives it: `exited with code 3`, `died of SIGKILL`."""
    return f"exited with code {code}" if code >= 0 else f"died of {signal.Signals(-code).name}"


def nearest(word: str, candidates: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the most similar candidate, or nothing."""
    found = most_alike(word, candidates)
    return f" (did you mean {found!r}?)" if found else ""


def most_alike(word: str, candidates: Iterable[str]) -> str:
    """The most similar candidate: the shortest that begins so, else the most alike; "" if none is."""
    known = list(candidates)
    begun = sorted((name for name in known if len(word) > 2 and name.startswith(word)), key=len)
    return next(iter(begun or difflib.get_close_matches(word, known, 1, cutoff=0.5)), "")
