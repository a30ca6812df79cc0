"""One exception for everything a user can mend, and the words for how a process ended."""

import signal


class CourseError(Exception):
    """Bad input, said in one sentence: what is wrong, where, and what to do.

    The command line prints the sentence without a traceback and exits with status 1.
    """


def ending(code: int) -> str:
    """A process's return code in words, as `subprocess` gives it: `exited with code 3`, `died of SIGKILL`."""
    return f"exited with code {code}" if code >= 0 else f"died of {signal.Signals(-code).name}"
