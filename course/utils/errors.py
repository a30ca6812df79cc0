"""One exception for everything that a user can fix, and phrases for its message: how a process ended, what was probably meant."""

import difflib
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path


class CourseError(Exception):
    """Bad input, explained in one sentence: what is wrong, where, and what to do.

    The command line prints the sentence without a traceback and exits with status 1. A notebook shows the sentence alone.
    """

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return [f"\x1b[31m{self}\x1b[0m"]


def does_not_exist(path: Path) -> str:
    """`PATH does not exist`, and where it is if the user works outside the course's folder, which holds the package."""
    folder = Path(__file__).resolve().parents[2]
    there = not path.is_absolute() and Path.cwd() != folder and (folder / path).exists()
    return (f"{path} does not exist here, but in {folder}: are you outside the course's folder? Go there, or else" if there else
            f"{path} does not exist:")


def describe_exit(code: int) -> str:
    """A process's return code, as `subprocess` gives it, in words: `exited with code 3`, `died of SIGKILL`."""
    return f"exited with code {code}" if code >= 0 else f"died of {signal.Signals(-code).name}"


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the most similar candidate, or nothing."""
    found = closest_match(word, candidates)
    return f" (did you mean {found!r}?)" if found else ""


def closest_match(word: str, candidates: Iterable[str]) -> str:
    """The most similar candidate: the shortest that begins with the word, else the closest match; "" if there is none."""
    known = list(candidates)
    begun = sorted((name for name in known if len(word) > 2 and name.startswith(word)), key=len)
    return next(iter(begun or difflib.get_close_matches(word, known, 1, cutoff=0.5)), "")


# messages of running out of memory: PyTorch's on a GPU, cuBLAS's, and the host's on Linux, macOS and Windows
OUT = ("out of memory", "STATUS_ALLOC_FAILED", "can't allocate memory", "Cannot allocate memory", "not enough memory",
       "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that a GPU or the host ran out of memory; not all such exceptions have their own type."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in OUT)


def rank_names(ranks: Sequence[int]) -> str:
    """"rank 2", "ranks 0 and 3", "ranks 0-3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
