"""The pure functions behind the pictures of lessons 07 and 08, and what watches a step."""

import numpy as np
import pytest
import torch

from course.lab.figures import data_parallel
from course.lab.instruments import bytes_sent
from course.ranks.notebook_ranks import ranks
from course.training import assemble


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_a_ring_ends_with_everything_everywhere(n):
    assert (data_parallel.ring_counts(n, 0) == 1).all()
    half, end = data_parallel.ring_counts(n, n - 1), data_parallel.ring_counts(n, 2 * (n - 1))
    assert [int((row == n).sum()) for row in half] == [1] * n           # each rank has one whole sum
    assert all(half[rank, (rank + 1) % n] == n for rank in range(n))
    assert (end == n).all()


def test_the_ring_of_the_picture_is_that_of_the_answer():
    """Each step adds what the left neighbor has, one rank's numbers more."""
    assert data_parallel.ring_counts(4, 1).tolist() == [[1, 1, 1, 2], [2, 1, 1, 1], [1, 2, 1, 1], [1, 1, 2, 1]]


def test_buckets_are_ready_with_their_last_gradient():
    parts = [(1.0, 10.0), (2.0, 10.0), (3.0, 25.0), (1.0, 1.0)]
    assert data_parallel.fill_buckets(parts, 20) == ([3.0, 6.0, 7.0], [20.0, 25.0, 1.0])
    assert data_parallel.fill_buckets(parts, 1e9) == ([7.0], [46.0])
    assert data_parallel.fill_buckets(parts, 0) == ([1.0, 3.0, 6.0, 7.0], [10.0, 10.0, 25.0, 1.0])


def test_an_all_reduce_takes_latency_and_twice_the_bytes():
    assert data_parallel.all_reduce_seconds(100, 4, 50, 0.5) == pytest.approx(0.5 + 1.5 * 2)
    assert data_parallel.all_reduce_seconds(0, 2, 1e9, 1e-5) == pytest.approx(1e-5)


def test_pictures_are_drawn():
    assert "after 2 of 6" in data_parallel.ring(4, 2).axes[0].get_title().lower()
    bars = data_parallel.timeline({"backward": [(0, 1), (1, 2)], "network": [(1, 2.5)]}, 2.0).axes[0]
    assert len(bars.patches) == 3 and max(bar.get_x() + bar.get_width() for bar in bars.patches) == 2500
    drawn = data_parallel.logarithmic({"a": ([1, 2, 4], [1.0, 2.0, 4.0])}, "x", "y", dashed={"b": ([1, 4], [1, 1])}).axes[0]
    assert len(drawn.lines) == 2 and drawn.get_xscale() == "log"
    assert [label.get_text() for label in drawn.get_xticklabels()] == ["1", "2", "4"]          # few points: each has its tick


def test_seven_curves_are_told_apart_and_bars_stand_at_their_points():
    lines = {str(n): (range(1, 21), [n + 1.0] * 20) for n in range(7)}
    drawn = data_parallel.logarithmic(lines, "x", "y").axes[0]
    assert len({(line.get_color(), line.get_marker()) for line in drawn.lines}) == 7
    drawn = data_parallel.logarithmic({"a": ([1, 2], [2.0, 3.0])}, "x", "y", bars={"a": [(1, 4), (2, 5)]}).axes[0]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in drawn.lines[1:]] == [([1, 1], [1, 4]), ([2, 2], [2, 5])]


def test_ticks_of_a_narrow_logarithmic_axis_are_plain_numbers():
    figure = data_parallel.logarithmic({"loss": (range(1, 21), [0.12 + 0.004 * n for n in range(20)])}, "x", "y")
    figure.canvas.draw()
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert {"0.12", "0.14", "0.18"} <= set(labels) and not any("e" in label or "$" in label for label in labels)


def send_and_reduce():
    import torch.distributed as dist

    with bytes_sent.Traffic() as seen:
        x, y = torch.ones(10), torch.empty(10)
        for work in [dist.isend(x, 1 - dist.get_rank()), dist.irecv(y, 1 - dist.get_rank())]:
            work.wait()
        dist.all_reduce(x)
    return seen.sent, seen.to, seen.kinds


def test_traffic_counts_bytes_and_collectives():
    assert ranks(2)(send_and_reduce) == [(80, {1 - rank}, ["send", "recv", "all-reduce"]) for rank in (0, 1)]


def watched():
    from course import config, parallel
    from course.lab.instruments import bucket_timeline

    c = config.load("vit-demo", ["data.source=mock", "train.device=cpu", "parallel.dp=2", "parallel.bucket_mb=0.5",
                                 "optim.warmup=0", "model.depth=2", "model.dim=64"])
    training = assemble.assemble(c, parallel.build_mesh(c.parallel, parallel.join("cpu")))
    batch = training.model.example(2, torch.device("cpu"))
    steps = [bucket_timeline.record_step(training, batch) for _ in (1, 2)]
    return len(training.gradients.buckets), len(list(training.model.parameters())), steps


def test_a_step_is_watched_from_its_first_gradient_to_its_last_all_reduce():
    for buckets, parameters, steps in ranks(2)(watched):
        for seen in steps:
            assert len(seen.gradients) == parameters and len(seen.spans) == buckets > 1
            assert np.all(np.diff(seen.gradients) >= 0) and seen.gradients[0] > 0
            assert seen.gradients[-1] <= seen.backward <= seen.finished
            assert all(begin <= end for begin, end in seen.spans) and seen.spans[0][0] < seen.backward
