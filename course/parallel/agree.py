"""One outcome for all ranks: each rank runs an action, and if it fails on one, all raise the error, so that none waits."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from course.parallel.mesh import Axis
from course.utils.errors import CourseError


def run_on_all(everyone: Axis, action: Callable[[], Any]) -> list[Any]:
    """Run `action` on every rank and return all results in rank order. If it fails on one rank, all raise its `CourseError`."""
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
