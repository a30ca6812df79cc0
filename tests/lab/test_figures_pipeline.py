"""Timelines: every pass is drawn where it belongs, and what theory says stands above."""

import pytest
from matplotlib.patches import Rectangle

from course.lab.figures import pipeline
from course.parallel.pipeline_parallel.schedules import gpipe, one_forward_one_backward, timeline


def boxes(axis) -> list[Rectangle]:
    return [patch for patch in axis.patches if isinstance(patch, Rectangle)]


def test_every_pass_is_a_box_at_its_time():
    when = timeline([gpipe(3, rank, 4) for rank in range(3)])
    axis, = pipeline.timelines({"GPipe": when}, 3).axes
    drawn = sorted((round(box.get_x(), 6), round(box.get_y() + 0.42), round(box.get_width(), 6)) for box in boxes(axis))
    assert drawn == sorted((start, rank, end - start) for (rank, _), (start, end) in when.items())
    assert "idle 33.3%" in axis.get_title(loc="left") and len(axis.texts) == len(when)


@pytest.mark.parametrize(("name", "p", "m", "v", "words"), [
    ("gpipe", 4, 8, 2, ["idle 27.3%", "8, 8, 8, 8"]),             # v is for interleaved alone
    ("1f1b", 4, 8, 3, ["idle 27.3%", "4, 3, 2, 1"]),
    ("interleaved", 4, 8, 2, ["idle 15.8%", "5.5, 4.5, 3.5, 2.5"]),
    ("interleaved", 8, 4, 2, ["8 micro-batches"]),                # fewer than ranks cannot be interleaved
    ("gpipe", 8, 64, 1, ["idle 9.9%"])])
def test_a_schedule_with_its_theory(name, p, m, v, words):
    figure = pipeline.simulated(name, p, m, v)
    told = figure.get_suptitle() + figure.axes[0].get_title(loc="left")
    assert all(word in told for word in words), told


def test_two_timelines_share_their_clock():
    runs = {name: timeline([make(4, rank, 2) for rank in range(4)])
            for name, make in (("GPipe", gpipe), ("1F1B", one_forward_one_backward))}
    one, other = pipeline.timelines(runs, 4).axes
    assert one.get_xlim() == other.get_xlim()


def test_bars_of_what_is_kept():
    made = {"GPipe": [gpipe(4, rank, 16) for rank in range(4)],
            "1F1B": [one_forward_one_backward(4, rank, 16) for rank in range(4)]}
    axis, = pipeline.activations_kept(made).axes
    assert [bar.get_height() for bar in axis.patches] == [16, 16, 16, 16, 4, 3, 2, 1]
