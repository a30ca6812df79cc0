"""Figures of lesson 19's kernels between matmuls, from real runs."""

import numpy as np
import pytest
import torch

from course.lab.exercises import lesson19_kernels as lesson
from course.lab.figures import kernels
from course.lab.instruments.watched_memory import watched

pytest.importorskip("triton")


def copied(x, y):
    with watched(x, y) as accesses:
        lesson.copy(x, y, 2, 4)
    return accesses


def test_each_element_belongs_to_the_program_of_its_tile():
    x, y = torch.randn(6, 5).T[:, :3], torch.zeros(5, 3)                # 5 x 3: x is transposed, with other elements beside it
    accesses = copied(x, y)
    for tensor, matrix in enumerate((x, y)):
        assert np.array_equal(kernels.touched_by(accesses, tensor, matrix), [[0] * 3, [0] * 3, [1] * 3, [1] * 3, [2] * 3])
    accesses.visits.pop(0)
    assert (kernels.touched_by(accesses, 0, x)[:2] == -1).all() and torch.equal(x, y)


def test_tiles_are_drawn_where_programs_read_and_write():
    x, y = torch.randn(3, 6), torch.zeros(3, 6)
    left, right = kernels.tiles_of_programs(copied(x, y), {"x": x, "y": y}).axes
    mine, its = ([patch.get_bbox().bounds for patch in axis.patches] for axis in (left, right))
    assert mine == its == [(0, 0, 4, 2), (4, 0, 2, 2), (0, 2, 4, 1), (4, 2, 2, 1)]
    assert [text.get_text() for text in left.texts] == ["0", "1", "2", "3"]
    assert (left.get_title(), right.get_title()) == ("x: 18 elements read", "y: 18 elements written")


def test_the_timeline_has_a_load_before_the_store_of_each_program():
    x, y = torch.randn(3, 6), torch.zeros(3, 6)
    axis, = kernels.accesses_over_time(copied(x, y), ["x", "y"]).axes
    lines = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axis.lines}
    assert lines == {"read x": [(2 * i, i) for i in range(4)], "write y": [(2 * i + 1, i) for i in range(4)]}


def test_speeds_are_by_size_and_by_who_computes():
    rows = [{"kernel": "copy", "who": who, "rows": 4096, "columns": 1024, "gb_per_s": speed}
            for who, speed in (("lesson", 3000.0), ("PyTorch", 2900.0), ("compiled", 3100.0))]
    assert kernels.speeds([*rows, rows[0] | {"kernel": "add-norm"}], "copy") == {
        "4,096 x 1,024": {"this lesson": 3000.0, "PyTorch": 2900.0, "torch.compile": 3100.0}}
