"""Bars of launches end where the arithmetic of the exercises says."""

from itertools import pairwise

import pytest

from course.lab.exercises import lesson02_profiling
from course.lab.exercises.lesson06_cuda_graphs import eager_time, graphed_time
from course.lab.figures import cuda_graphs

LAUNCHES, WORKS = [5.0] * 6, [2.0, 9.0, 1.0, 1.0, 8.0, 2.0]


def end(bars) -> float:
    return max(begin + length for _, begin, length in bars)


def test_bars_end_when_the_gpu_is_done():
    eager, graph = cuda_graphs.eager_bars(LAUNCHES, WORKS, 1.0), cuda_graphs.graph_bars(WORKS, 10.0, 1.0)
    assert end(eager) == pytest.approx(eager_time(LAUNCHES, WORKS, 1.0))
    assert end(graph) == pytest.approx(graphed_time(WORKS, 10.0, 1.0))
    for bars in (eager, graph):
        gpu = [(begin, length) for lane, begin, length in bars if lane == "GPU"]
        assert [length for _, length in gpu] == WORKS
        assert all(a + b <= c for (a, b), (c, _) in pairwise(gpu))       # one kernel at a time


def test_the_timeline_has_two_lanes_for_each_step():
    bars = cuda_graphs.eager_bars(LAUNCHES, WORKS, 1.0)
    axis, = cuda_graphs.timeline({"eager": bars, "graphed": cuda_graphs.graph_bars(WORKS, 10.0, 1.0)}).axes
    lanes = [label.get_text() for label in axis.get_yticklabels()]
    assert lanes == ["eager: host", "eager: GPU", "graphed: host", "graphed: GPU"]
    assert len(axis.patches) == len(bars) + 7 and f"{end(bars):.3g} µs" in axis.texts[0].get_text()


def test_buffers_name_what_moves():
    axis, = cuda_graphs.buffers().axes
    assert {"copy_", "clone", "kernels"} <= {text.get_text() for text in axis.texts}


def test_without_gaps_an_eager_step_is_lesson_02s():
    assert eager_time(LAUNCHES, WORKS, 0.0) == pytest.approx(lesson02_profiling.replay(LAUNCHES, WORKS)[0])
