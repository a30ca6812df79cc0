"""Figures of lesson 19, from real runs of the kernels."""

import numpy as np
import pytest
import torch

from course.lab.exercises import lesson19_flash_attention as lesson
from course.lab.figures import flash_attention
from course.lab.instruments.watched_memory import watched
from course.ops.triton_language import INTERPRETED

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")


def order(causal):
    q, k, v = (torch.randn(1, 1, 60, 16) for _ in range(3))
    y, lse = torch.empty_like(q), torch.empty(1, 1, 60)
    with watched(q, k, v, y, lse) as accesses:
        lesson.launch_forward(q, k, v, y, lse, causal, lesson.Tiles(32, 16))
    return flash_attention.tile_order(accesses, 32, 16, 16)


def test_causal_tiles_end_at_the_diagonal():
    assert np.array_equal(order(True), [[1, 2, 0, 0], [1, 2, 3, 4]])
    assert np.array_equal(order(False), [[1, 2, 3, 4], [1, 2, 3, 4]])


def test_the_picture_says_how_many_tiles_are_read():
    axis, = flash_attention.tiles_read(order(True), 32, 16).axes
    assert axis.get_title() == "6 of 8 tiles are read"
    assert sorted(text.get_text() for text in axis.texts) == ["1", "1", "2", "2", "3", "4"]


def test_running_softmax_ends_with_the_log_sum_exp():
    scores, values = torch.randn(2, 40), torch.randn(40, 16)
    y, lse, tops, totals = lesson.fold_tiles(scores, values, 1.0)
    assert tops.shape == (3, 2)
    torch.testing.assert_close(tops, torch.stack([scores[:, :end].amax(1) for end in (16, 32, 40)]))
    torch.testing.assert_close(tops[-1] + totals[-1].log2(), lse)
    torch.testing.assert_close(y, torch.exp2(scores - lse[:, None]) @ values)
    left, right = flash_attention.running_softmax(tops, totals, ["rising", "falling"]).axes
    assert [list(line.get_ydata()) for line in left.lines] == tops.T.tolist()
    assert [list(line.get_ydata()) for line in right.lines] == totals.T.tolist()
