"""Rows of images, and curves beside the band of the seeds."""

import numpy as np
import pytest

from course.lab.figures import dit


def test_images_stand_in_rows_below_their_columns():
    figure = dit.images({"one": np.zeros((3, 8, 8)), "two": np.ones((3, 8, 8))}, [1, 2, 4], "samples")
    assert len(figure.axes) == 6 and [axis.get_title() for axis in figure.axes[:3]] == ["1", "2", "4"]
    assert [figure.axes[i].get_ylabel() for i in (0, 3)] == ["one", "two"]


def test_curves_are_percent_of_the_first_seed():
    seeds = np.array([[1.0, 2.0], [1.1, 2.2], [0.9, 1.8]])
    axis, = dit.curves_beside_seeds([20, 40], seeds, {"near": [1.02, 2.0], "far": [1.5, 3.0]}, "%").axes
    drawn = {line.get_label(): line.get_ydata() for line in axis.lines}
    assert drawn["near"] == pytest.approx([2, 0]) and drawn["far"] == pytest.approx([50, 50])
    assert axis.collections[0].get_datalim(axis.transData).y1 == pytest.approx(10)


def test_the_adaln_block_shows_the_path_of_the_tokens_and_six_vectors():
    axis, = dit.adaln_block().axes
    words = [text.get_text() for text in axis.texts if text.get_text()]
    assert [word for word in words if word in ("shift", "scale", "gate")] == 2 * ["shift", "scale", "gate"]
    assert [word for word in words if word in ("norm", "modulate", "attention", "MLP", "×", "+")] == [
        "norm", "modulate", "attention", "×", "+", "norm", "modulate", "MLP", "×", "+"]
