"""One outcome for all ranks: an action runs on each, and a failure on any of them is raised on all, so that none waits for it."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from course.parallel.mesh import Axis
from course.utils.errors import CourseError


def run_on_all(everyone: Axis, action: Callable[[], Any]) -> list[Any]:
    """Each rank's result of `action`; if it fails on one rank, all raise an error of that kind, and none waits for it."""
    result, error = None, None
    try:
        result = action()
    except (CourseError, OSError) as failure:
        error = type(failure) if isinstance(failure, CourseError) else CourseError, str(failure) or type(failure).__name__
    if everyone.size == 1:
        answers = [(result, error)]
    else:
        answers = [(None, None)] * everyone.size
        dist.all_gather_object(answers, (result, error), group=everyone.group)
    for rank, (_, failed) in enumerate(answers):
        if failed is not None:
            kind, sentence = failed
            raise kind(sentence if everyone.size == 1 else f"rank {rank}: {sentence}")
    return [answer for answer, _ in answers]
