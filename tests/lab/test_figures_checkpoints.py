"""Boxes of two layouts over one another, and what a new one needs of the old."""

import pytest

from course.lab.figures import checkpoints


@pytest.mark.parametrize("old", [(1, 1), (2, 1), (3, 1), (1, 4), (2, 3)])
@pytest.mark.parametrize("new", [(1, 1), (4, 1), (1, 3), (2, 2)])
def test_every_number_is_needed_once_and_comes_from_somewhere(old, new):
    pieces, wanted = checkpoints.grid_boxes(*old), checkpoints.grid_boxes(*new)
    assert len(pieces) == old[0] * old[1]
    total = 0
    for (top, bottom), (left, right) in wanted:
        found = checkpoints.pieces_needed(pieces, ((top, bottom), (left, right)))
        assert sum(found.values()) == (bottom - top) * (right - left)
        total += sum(found.values())
    assert total == checkpoints.ROWS * checkpoints.COLUMNS


def test_the_picture_has_the_pieces_the_boxes_and_says_what_is_needed():
    figure = checkpoints.boxes(checkpoints.grid_boxes(2, 1), checkpoints.grid_boxes(3, 1), 1, "halves to thirds")
    axis, = figure.axes
    assert len(axis.patches) == 5 and [text.get_text() for text in axis.texts] == ["new 0", "new 1", "new 2"]
    assert figure.get_supxlabel() == "new 1 needs 64 of rank00000, 64 of rank00001" and axis.get_title() == "halves to thirds"


def test_a_rank_beyond_the_last_is_the_last():
    assert "new 3 needs" in checkpoints.layouts(2, 1, 4, 1, 9).get_supxlabel()


def test_dots_lie_on_the_lines_that_they_agree_with():
    drawn = checkpoints.lines_and_dots({"a": ([1, 2, 3], [3, 2, 1]), "b": ([1, 2], [0, 0])}, {"c": ([2], [2])}, "loss", "t")
    axis, = drawn.axes
    lines = {line.get_label(): (line.get_linestyle(), list(line.get_ydata())) for line in axis.get_lines()}
    assert lines == {"a": ("-", [3, 2, 1]), "b": ("--", [0, 0]), "c": ("None", [2])}
