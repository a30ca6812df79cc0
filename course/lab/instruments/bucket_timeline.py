"""Record the timeline of a step of bucketed data parallelism: backward, and each bucket's all-reduce."""

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from course.data import Batch
from course.parallel.data_parallel.gradients import Bucket, Bucketed
from course.training.assemble import Training


@dataclass
class StepTimeline:
    """Times in seconds since the step's backward pass began."""

    backward: float = 0.0                            # end of the backward pass
    finished: float = 0.0                            # when all averages were ready
    gradients: list[float] = field(default_factory=list)                # when each parameter got its gradient
    begin: dict[int, float] = field(default_factory=dict)               # bucket -> start of its all-reduce
    end: dict[int, float] = field(default_factory=dict)

    @property
    def spans(self) -> list[tuple[float, float]]:
        """Begin and end of each bucket's all-reduce, in order."""
        return [(self.begin[number], self.end[number]) for number in sorted(self.begin)]


def record_step(training: Training, batch: Batch) -> StepTimeline:
    """Record forward, backward and averaging of this rank's share of a batch, then clear the gradients.

    Needs a CPU, where calls are synchronous, and parallel.data=bucketed: raises TypeError otherwise.
    """
    gradients, model = training.gradients, training.model
    if not isinstance(gradients, Bucketed):
        raise TypeError("bucket_timeline.record_step watches parallel.data=bucketed")
    timeline, original_start, zero = StepTimeline(), gradients.start, 0.0
    order = {id(bucket): number for number, bucket in enumerate(gradients.buckets)}

    def start(bucket: Bucket) -> None:
        number = order[id(bucket)]
        timeline.begin[number] = time.perf_counter() - zero
        original_start(bucket)
        bucket.work.get_future().add_done_callback(partial(ended, number))

    def ended(number: int, future: Any) -> None:
        timeline.end[number] = time.perf_counter() - zero

    batch = model.prepare(batch, training.progress.step)
    gradients.begin(1)
    gradients.start = start                          # type: ignore[method-assign]
    hooks = [p.register_post_accumulate_grad_hook(lambda p: timeline.gradients.append(time.perf_counter() - zero))
             for p in model.parameters()]
    output = model(batch)
    total, weight = model.loss(output, batch)
    zero = time.perf_counter()
    (total / weight).backward()
    timeline.backward = time.perf_counter() - zero
    gradients.finish()
    timeline.finished = time.perf_counter() - zero
    for hook in hooks:
        hook.remove()
    gradients.start = original_start                           # type: ignore[method-assign]
    gradients.clear()
    return timeline

