"""Schedules: complete, without circles, messages in the order in which they are awaited, bubbles and memory as theory says."""

import pytest

from course.parallel.pipeline_parallel import schedules
from course.parallel.pipeline_parallel.schedules import Pass, alive, bubble, crossed, idle_share, passes_of, timeline

CASES = [("gpipe", p, m, 1) for p in (1, 2, 3, 4, 8) for m in (1, 2, 5, 8, 16)]
CASES += [("1f1b", p, m, 1) for p in (1, 2, 3, 4, 8) for m in (1, 2, 5, 8, 16)]
CASES += [("interleaved", p, m, v) for p in (2, 3, 4, 8) for v in (2, 3, 4)
          for m in (p, p + 1, 2 * p - 1, 2 * p, 3 * p + 1, 4 * p)]


def make(name, p, m, v):
    return [passes_of(name, p, rank, m, v) for rank in range(p)]


@pytest.mark.parametrize("name, p, m, v", CASES)
def test_every_pass_once_and_nobody_waits_in_a_circle(name, p, m, v):
    made = make(name, p, m, v)
    for passes in made:
        assert sorted(map(repr, passes)) == sorted(repr(Pass(kind, c, i)) for kind in "FB" for c in range(v) for i in range(m))
    assert len(timeline(made, v)) == 2 * p * m * v


@pytest.mark.parametrize("name, p, m, v", [case for case in CASES if case[1] > 1])
def test_messages_are_awaited_in_the_order_in_which_they_are_sent(name, p, m, v):
    assert crossed(make(name, p, m, v), v) == 0


def test_messages_that_cross_are_noticed():
    first, last = [schedules.gpipe(2, rank, 3) for rank in range(2)]
    assert crossed([first, last[:3] + last[:2:-1]]) == 2


@pytest.mark.parametrize("p, m, v", [(2, 4, 1), (4, 4, 1), (4, 16, 1), (8, 16, 1), (2, 4, 2), (4, 8, 2), (4, 16, 2), (4, 12, 3)])
def test_the_bubble_is_the_theory_s(p, m, v):
    for name in (["gpipe", "1f1b"] if v == 1 else ["interleaved"]):
        assert idle_share(timeline(make(name, p, m, v), v), p) == pytest.approx(bubble(p, m, v))


def test_what_stays_alive():
    for rank in range(4):
        assert alive(schedules.gpipe(4, rank, 16)) == 16
        assert alive(schedules.one_forward_one_backward(4, rank, 16)) == 4 - rank
        assert alive(schedules.one_forward_one_backward(4, rank, 2)) == min(4 - rank, 2)


def test_a_circle_is_noticed():
    with pytest.raises(ValueError, match="circle"):
        timeline([[Pass("B", 0, 0), Pass("F", 0, 0)], [Pass("F", 0, 0), Pass("B", 0, 0)]])
