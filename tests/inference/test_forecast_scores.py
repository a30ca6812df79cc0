import json
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from course import config
from course.data import Pairs
from course.data.weather import layout
from course.inference import forecast_scores
from course.training import trainer
from course.utils.errors import CourseError
from tests.conftest import GRID, fields


@pytest.fixture
def run(tiny):
    return trainer.main(config.load("vit-demo", [*tiny, "train.steps=30", "optim.lr=1e-2"]))


def test_scores_and_pictures(run, capsys):
    result = forecast_scores.score_run(run, samples=3, animate=True)
    folder = run / "evaluation"
    assert json.loads((folder / "scores.json").read_text()) == result
    assert {p.name for p in folder.iterdir()} == {"scores.json", "forecast.png", "skill.png", "forecast.gif"}
    assert matplotlib.image.imread(folder / "forecast.png").shape[0] > 200
    with Image.open(folder / "forecast.gif") as movie:
        assert movie.n_frames == 21
    assert result["hours"] == list(range(6, 121, 6)) and result["channels"] == list(layout.CHANNELS)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    m, p = result["rmse"]["model"][0][0], result["rmse"]["persistence"][0][0]
    assert last == f"u10 RMSE 6 h: model {m:.3g}, persistence {p:.3g}, {100 * (1 - m / p):.0f}% better"


def test_persistence_and_climatology_equal_numpy(run, small_data):
    result = forecast_scores.score_run(run, samples=100)
    data = fields(24, 3).astype("float64")                              # the test year
    starts = np.arange(24 - 20)
    weights = np.cos(np.deg2rad(layout.latitudes(GRID[0])))
    weights = (weights / weights.mean())[:, None]
    climate = np.load(small_data / "stats" / "time_means.npy")
    for lead in (1, 7, 20):
        truth = data[starts + lead]
        for name, forecast in (("persistence", data[starts]), ("climatology", climate[None])):
            expected = np.sqrt((weights * (forecast - truth) ** 2).mean((0, 2, 3)))
            np.testing.assert_allclose(result["rmse"][name][lead - 1], expected, rtol=2e-4)


def test_rolling_feeds_the_forecast_back(small_data, tiny):
    settings = config.load("vit-demo", tiny)
    pairs = Pairs(str(small_data), "test", 20, GRID)
    scores = forecast_scores.score({"model": lambda x: x + 1.0}, pairs, [0, 1], settings, torch.device("cpu"), 0)
    shift = (scores.forecast[5] - scores.forecast[0]) / pairs.std[0]
    np.testing.assert_allclose(shift, 5.0, atol=1e-3)
    np.testing.assert_allclose(scores.truth[5], fields(24, 3)[5, 0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("days", "hours"), [(5, [48, 96]), (1, [48])])
def test_a_step_of_days_is_pictured_after_one(tiny, monkeypatch, days, hours):
    """More than a day, and more than all that forecasts otherwise are long."""
    run = trainer.main(config.load("vit-demo", [*tiny, "train.steps=1", "data.lead=8"]))
    (run / "evaluation").mkdir()
    (run / "evaluation" / "forecast.gif").touch()                       # an older one, not of this evaluation
    drawn = []
    monkeypatch.setattr(forecast_scores, "DAYS", days)
    monkeypatch.setattr(forecast_scores.plots, "truth_forecast_error", lambda *given: drawn.append(given) or Figure())
    result = forecast_scores.score_run(run, samples=1)
    truth, _, title, start = drawn[0]
    assert result["hours"] == hours and title.endswith(f"forecast of {hours[0]} hours") and (truth != start).any()
    assert [Path(file).name for file in result["files"]] == ["forecast.png", "skill.png"]


@pytest.mark.parametrize(("change", "words"), [
    (lambda run: run.parent, r"not the folder of a run .*: give the folder of a run, such as runs/vit-demo/default"),
    (lambda run: run.parent / "defalut", r"defalut does not exist: give the folder of a run"),
    (lambda run: Path("gpt-demo"), r"gpt-demo is a preset, not a run: give the folder of a run, such as runs/gpt-demo/default"),
    (lambda run: [file.unlink() for d in (run / "checkpoints").iterdir() for file in d.iterdir()] and run, "damaged"),
])
def test_bad_runs_are_explained(run, change, words):
    with pytest.raises(CourseError, match=words):
        forecast_scores.score_run(change(run))


def test_a_split_that_is_too_short_is_explained(run):
    with pytest.raises(CourseError, match="5 days long"):
        forecast_scores.score_run(run, split="valid")
