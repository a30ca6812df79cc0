"""Figures of forecasts."""

import numpy as np
import pytest

from course.utils import plots


def colors(figure) -> list[tuple[float, float]]:
    """The range of colors of each map."""
    return [axis.images[0].get_clim() for axis in figure.axes if axis.images]


def test_maps_share_a_scale_where_they_are_given_one():
    truth = np.random.default_rng(0).normal(size=(2, 8, 16))
    forecast = truth + np.array([0.1, 1.0])[:, None, None]
    own = [colors(plots.truth_forecast_error(truth[i], forecast[i], "")) for i in range(2)]
    assert own[0] != own[1] and own[0][2] == pytest.approx((-0.1, 0.1)) and own[1][2] == pytest.approx((-1, 1))
    scale = plots.scale_of(truth, forecast)
    assert scale[2] == pytest.approx(1)
    shared = [colors(plots.truth_forecast_error(truth[i], forecast[i], "", scale=scale)) for i in range(2)]
    most = max(-scale[0], scale[1])                  # a field with both signs diverges from 0
    assert shared[0] == shared[1] == [(-most, most), (-most, most), (-scale[2], scale[2])]


def test_a_perfect_forecast_has_colors_too():
    field = np.ones((8, 16))
    assert plots.scale_of(field, field)[2] > 0
