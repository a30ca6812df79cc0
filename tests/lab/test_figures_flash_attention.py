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


def recorded_row(who, kernel, tflops, **more):
    return {"who": who, "kernel": kernel, "head_dim": 64, "tokens": 4096, "causal": True, "tflops": tflops} | more


def test_speeds_take_the_lessons_best_and_compare_it_with_flash():
    rows = [recorded_row("lesson", "forward", 250.0), recorded_row("lesson", "forward", 300.0, best=True),
            recorded_row("flash", "forward", 400.0), recorded_row("flash", "backward", 200.0)]
    assert flash_attention.speeds(rows, "forward") == {
        "heads of 64, 4,096 tokens, causal": {"lesson": 300.0, "flash": 400.0, "lesson / flash": 0.75}}


def test_configurations_are_sorted_and_leave_out_what_does_not_fit():
    report = {"rows": 64, "columns": 32, "warps": 4, "stages": 2, "most_registers": 0, "registers": 128, "spills": 0,
              "shared_kb": 32.0, "programs_per_sm": 4, "limited_by": "registers"}
    rows = [recorded_row("lesson", "forward", 200.0) | report, recorded_row("lesson", "forward", 300.0) | report | {"stages": 3},
            {"who": "lesson", "kernel": "forward", "error": "out of resource"}, recorded_row("flash", "forward", 400.0),
            recorded_row("lesson", "forward", 500.0, tokens=16384) | report]
    table = flash_attention.configurations(rows, "forward", 64, 4096, True)
    assert list(table) == ["64 x 32, 4 warps, 3 stages", "64 x 32, 4 warps, 2 stages"]
    assert [values["warps on an SM"] for values in table.values()] == [16, 16]
