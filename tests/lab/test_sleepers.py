"""Stages that sleep: the real pipeline, with the passes of the schedule in their order, and about as slow as theory says."""

import pytest

from course.lab.instruments import simulated_pipeline
from course.parallel.pipeline_parallel.schedules import idle_share, passes_of, timeline
from course.ranks.notebook_ranks import ranks


@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("interleaved", 2)])
def test_what_was_seen_is_the_schedule(name, v):
    for seen in ranks(2)(simulated_pipeline.run_pipeline, name, 4, v):
        made = [passes_of(name, 2, rank, 4, v) for rank in range(2)]
        for rank in range(2):
            mine = sorted((when, work) for (other, work), when in seen.items() if other == rank)
            assert [work for _, work in mine] == made[rank]
        assert idle_share(seen, 2) > idle_share(timeline(made, v), 2) - 0.02  # sleeping takes its time, on a busy machine more
