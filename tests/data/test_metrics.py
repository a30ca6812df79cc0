import pytest
import torch

from course.data import Pairs
from course.data.weather.baselines import Regression, neighbors
from course.data.weather.metrics import latitude_weights, squared_error
from tests.conftest import GRID


def test_weights_are_areas_with_mean_one():
    weights = latitude_weights(torch.tensor([60.0, 0.0, -60.0]))
    assert weights.tolist() == pytest.approx([0.75, 1.5, 0.75])


def test_squared_error_weighs_rows_by_area():
    forecast, truth = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4)
    forecast[0, 0, 1] = 2.0                                             # an error of 2 on the equator alone
    weights = latitude_weights(torch.tensor([60.0, 0.0, -60.0]))
    assert squared_error(forecast, truth, weights).item() == pytest.approx(4 * 1.5 / 3)


def test_neighbors_wrap_around_the_globe():
    state = torch.arange(12.0).view(1, 1, 3, 4)
    table = neighbors(state).view(3, 4, 10)
    assert table[1, 0].tolist() == [3, 0, 1, 7, 4, 5, 11, 8, 9, 1]      # west of column 0 is column 3
    assert table[0, 1, :3].tolist() == [0, 1, 2]                        # beyond the pole, the outermost row


class Shifted(Pairs):
    """Pairs whose target is a linear function of neighbors: the western one, plus twice the other channel."""

    def __init__(self):
        self.shape, self.size = (2, *GRID), 40

    def __len__(self):
        return 40

    def __getitems__(self, samples):
        state = torch.randn(len(samples), 2, *GRID, generator=torch.Generator().manual_seed(samples[0]))
        return {"input": state, "target": state.roll(1, -1) + 2 * state.flip(1), "sample": torch.tensor(samples)}


def test_regression_finds_a_linear_law_exactly():
    regression = Regression(Shifted(), ridge=1e-9)
    batch = Shifted().__getitems__([99])
    torch.testing.assert_close(regression(batch["input"]), batch["target"], atol=1e-3, rtol=0)
