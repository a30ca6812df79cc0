"""One exception for everything a user can mend."""


class CourseError(Exception):
    """Bad input, said in one sentence: what is wrong, where, and what to do.

    The command line prints the sentence without a traceback and exits with status 1.
    """
