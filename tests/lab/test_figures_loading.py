"""The pure functions behind the pictures of lesson 03."""

import pytest

from course.lab.figures import data_loading as pictures


def test_without_reading_ahead_every_step_waits_for_its_batch():
    assert pictures.waiting_share([2.0] * 5, 3.0, 0) == pytest.approx(2 / 5)


def test_reading_ahead_hides_reads_that_are_shorter_than_steps():
    """Only the first batch is waited for: 2 seconds of 5 steps of 3 and those 2."""
    assert pictures.waiting_share([2.0] * 5, 3.0, 1) == pytest.approx(2 / 17)


def test_no_depth_helps_where_reading_takes_longer_but_readers_do():
    slow = [4.0] * 300
    assert pictures.waiting_share(slow, 2.0, 1) == pytest.approx(0.5, abs=0.01)
    assert pictures.waiting_share(slow, 2.0, 16) == pytest.approx(0.5, abs=0.02)
    assert pictures.waiting_share(slow, 2.0, 4, readers=2) < 0.02


def test_depth_hides_what_is_late_now_and_then():
    """Four reads of 1, then one of 6: in a step of 3 it is late by 3, which two batches in store make good."""
    times = [1.0, 1.0, 1.0, 1.0, 6.0] * 60
    shares = [pictures.waiting_share(times, 3.0, depth) for depth in (0, 1, 2, 4)]
    assert shares[0] == pytest.approx(2 / 5) and shares[1] == pytest.approx(3 / 18, abs=0.02)
    assert shares[2] < 0.01 and shares[3] < 0.01


def test_reading_times_have_their_average():
    times = pictures.read_times(0.8, 6.0, 20)
    assert sum(times) / len(times) == pytest.approx(0.8) and {round(t, 6) for t in times} >= {6.0}
    assert len(set(times)) == 2


def test_copies_beside_steps_save_all_but_the_first():
    one, two = pictures.copy_and_compute(1.0, 3.0, 4, ahead=False), pictures.copy_and_compute(1.0, 3.0, 4, ahead=True)
    assert max(row[4] for row in one) == 16 and max(row[4] for row in two) == 13
    assert {row[0] for row in two} == {"copies", "computing"}
    computing = [row for row in two if row[2] == "compute"]
    copies = [row for row in two if row[2] == "copy"]
    assert all(copy[4] <= step[3] for copy, step in zip(copies, computing, strict=True))


def test_tiles_are_of_the_rank_that_reads_them():
    axis = pictures.stream(0, 10, 4, 2, 3).axes[0]
    assert len(axis.patches) == 12 and sorted(int(text.get_text()) for text in axis.texts[:10]) == list(range(10))
    colors = [patch.get_facecolor()[:3] for patch in axis.patches[:4]]
    assert colors[0] == colors[1] != colors[2] == colors[3]


def test_pictures_are_drawn():
    native = {"native": {"0": 5.0, "1": 6.0, "8": 9.0}}
    drawn = pictures.speeds_by_workers(native, {"floor": {"1": 10.0, "8": 60.0}}, {"model": 20.0}).axes[0]
    assert len(drawn.lines) == 3 and drawn.get_xscale() == drawn.get_yscale() == "log"
    assert pictures.streams(pictures.copy_and_compute(1, 2, 2, True)).axes[0].get_xlim()[1] == 5
