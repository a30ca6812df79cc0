"""Figures of lesson 11."""

import numpy as np
import pytest

from course.lab.figures import context_parallel
from course.parallel.context_parallel.ring_attention import visible


@pytest.mark.parametrize(("size", "percent"), [(2, 67), (4, 57), (8, 53)])
def test_a_causal_ring_waits_and_a_zigzag_does_not(size, percent):
    plain, zigzag = (context_parallel.ring_work(size, flag) for flag in (False, True))
    assert plain.sum() == zigzag.sum() == pytest.approx(size * size / 2)        # half of the square, however it is shared
    assert round(100 * context_parallel.efficiency(plain)) == percent
    assert (zigzag == 0.5).all() and context_parallel.efficiency(zigzag) == 1
    assert context_parallel.efficiency(context_parallel.ring_work(size, False, causal=False)) == 1


def test_the_zigzags_rounds_are_what_the_library_computes():
    work = context_parallel.ring_work(4, True)
    for turn in range(1, 4):
        for rank in range(4):
            rows, columns = visible(True, rank, (rank - turn) % 4, 6, 6)
            assert len(range(6)[rows]) * len(range(6)[columns]) / 36 == work[turn, rank]


def test_every_visible_score_is_in_one_round():
    rounds = context_parallel.ring_rounds(4, True)
    assert ((rounds >= 0) == np.tri(8, dtype=bool)).all() and set(rounds.flatten()) == {-1, 0, 1, 2, 3}


def test_the_picture_says_what_it_shows():
    scores, bars = context_parallel.ring(4, False, 2).axes
    assert len(scores.patches) == 36 and "round 2 of 3" in scores.get_title() and "57%" in bars.get_title()
    assert [bar.get_height() for bar in bars.patches] == [0, 0, 1, 1]
