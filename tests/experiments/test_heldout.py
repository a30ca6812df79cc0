"""The held-out configurations are those that the seed draws, and every one is a run that the library takes."""

import json
from statistics import median

import pytest

from course import config
from course.bench import results
from course.planner.step_time import predict
from experiments import heldout

LISTS = pytest.mark.parametrize("name", list(heldout.SEEDS))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if place else [])
                                  for place, name in enumerate(heldout.SEEDS)])
def test_the_committed_list_is_what_the_seed_draws(name):
    committed, grid = results.load(f"{name}"), heldout.GRIDS.get(name, heldout.GRID)
    assert committed["configurations"] == heldout.drawn(name)
    assert committed["seed"] == heldout.SEEDS[name] and committed["grid"] == json.loads(json.dumps(grid))


def test_a_slower_host_makes_what_waits_for_it_longer():
    row = {"preset": "vit-demo", "settings": ["data.source=mock", "parallel.dp=1"], "gpus": 1}
    known = heldout.predicted(row, 1e-3)
    assert heldout.predicted(row, 2e-3).step == pytest.approx(2 * known.step)               # too small a model for a GPU
    assert heldout.predicted(row) == predict(config.load(row["preset"], row["settings"]), heldout.hardware.load("h200"))


@pytest.mark.parametrize("name", [name for name in heldout.SEEDS if name not in heldout.GRIDS])
def test_there_are_at_least_two_dozen_over_all_axes_and_models(name):
    rows = heldout.listed(name)
    settings = [config.load(row["preset"], row["settings"]) for row in rows]
    assert len(rows) >= 24 and {row["gpus"] for row in rows} == {1, 2, 4}
    for axis in ("dp", "tp", "cp", "pp"):
        assert {getattr(c.parallel, axis) for c in settings} == {1, 2, 4}
    assert {c.model.kind for c in settings} == {"vit", "gpt", "dit"}
    assert {c.precision for c in settings} == {"bf16", "tf32", "fp8"}
    assert {c.train.recompute for c in settings} == {"none", "selective", "full"}
    assert {c.compile for c in settings} == {True, False}
    for row, c in zip(rows, settings, strict=True):
        p = c.parallel
        assert p.dp * p.tp * p.cp * p.pp == row["gpus"]


def test_the_fifth_list_is_of_sharded_weights_and_of_experts_on_two_gpus():
    rows = heldout.listed("heldout_5")
    settings = [config.load(row["preset"], row["settings"]) for row in rows]
    sharded, experts = settings[:8], settings[8:]
    assert {row["gpus"] for row in rows} == {2} and len(experts) == 6
    assert {c.parallel.zero for c in sharded} == {2, 3} and {c.model.kind for c in sharded} == {"vit", "gpt", "dit"}
    assert [c.parallel.ep for c in experts] == [1, 2, 1, 2, 1, 2] and all(c.model.experts > 0 for c in experts)


def test_what_does_not_fit_the_layout_or_the_memory_is_not_possible():
    size = ["data.source=mock", "train.global_batch=8", "train.micro_batch=4", "model.heads=16"]
    assert heldout.possible("gpt-124m", [*size, "parallel.dp=1"], 1)
    assert not heldout.possible("gpt-124m", [*size, "parallel.dp=1", "parallel.tp=5"], 5)                 # heads
    assert not heldout.possible("gpt-124m", [*size, "parallel.dp=1", "model.dim=8192", "model.depth=40"], 1)        # memory
    assert not heldout.possible("gpt-124m", [*size, "parallel.dp=1", "model.depth=1", "model.context=64"], 1)       # too small
    assert not heldout.possible("gpt-124m", [*size[:2], "train.micro_batch=8", "parallel.dp=1", "parallel.pp=2"], 2)


@pytest.mark.parametrize(("name", "half", "many"), [("heldout", 0.12, 8), ("heldout_2", 0.06, 2)])
def test_todays_code_is_near_the_first_two_lists(name, half, many):
    """Their files do not keep what was predicted then."""
    rows = results.load(f"{name}_h200")["rows"]
    drawn = {row["name"]: row for row in heldout.listed(name)}
    off = [abs(heldout.predicted(drawn[row["name"]]).step * 1e3 / row["ms"] - 1) for row in rows]
    assert len(rows) == 20 and not any("predicted_ms" in row for row in rows)
    assert median(off) < half and sum(error >= 0.2 for error in off) <= many


def test_the_third_list_was_predicted_well_on_one_gpu():
    """What was predicted when it was measured stands in the file; today's predictions come from today's code."""
    rows = results.load("heldout_3_h200")["rows"]
    drawn = {row["name"]: row for row in heldout.listed("heldout_3")}

    def off(predicted, gpus=(1, 2)):
        return [abs(predicted(row) / row["ms"] - 1) for row in rows if drawn[row["name"]]["gpus"] in gpus]

    def then(row):
        return row["predicted_ms"]

    def now(row):
        return heldout.predicted(drawn[row["name"]], row["plain_step"]).step * 1e3

    peaks = [abs(row["predicted_gb"] / max(row["memory_gb"], row["first_gb"]) - 1) for row in rows]
    assert len(rows) == 20 and sum(error >= 0.2 for error in off(then)) == 2 and sum(peak > 0.07 for peak in peaks) == 1
    assert median(off(then)) < 0.05 and max(off(then, (1,))) < 0.07 and median(peaks) < 0.02
    assert median(off(now, (2,))) < 0.1 < median(off(then, (2,))) and max(off(now)) < 0.5


def test_the_fourth_list_was_off_where_gpus_wait_for_their_host():
    """What was predicted when it was measured; on one and two GPUs all that were off by a fifth are predicted to wait for their
    host for a good part."""
    rows = results.load("heldout_4_h200")["rows"]
    drawn = {row["name"]: row for row in heldout.listed("heldout_4")}
    for gpus, number, bad, least, half in ((1, 12, 2, 0.2, 0.06), (2, 8, 3, 0.1, 0.14)):
        own = [row for row in rows if drawn[row["name"]]["gpus"] == gpus]
        off = {row["name"]: row["predicted_ms"] / row["ms"] - 1 for row in own}
        worst = [row for row in own if abs(off[row["name"]]) >= 0.2]
        assert len(own) == number and len(worst) == bad and all(off[row["name"]] < 0 for row in worst)
        waits = [heldout.predicted(drawn[row["name"]], row["plain_step"]).launch / row["predicted_ms"] * 1e3 for row in worst]
        assert min(waits) > least and median(map(abs, off.values())) < half and max(map(abs, off.values())) < 0.5
        if gpus == 1:                                # peaks of steps after the first
            assert max(abs(row["predicted_gb"] / row["memory_gb"] - 1) for row in own) < 0.025
    own = [row for row in rows if drawn[row["name"]]["gpus"] == 4]
    off = {row["name"]: row["predicted_ms"] / row["ms"] - 1 for row in own}
    assert len(own) == 10 and [name for name, error in off.items() if abs(error) >= 0.2] == ["4-00", "4-07"]
    assert off["4-00"] < 0 and off["4-07"] < 0 and median(map(abs, off.values())) < 0.07
    today = {row["name"]: heldout.predicted(drawn[row["name"]], row["plain_step"]).step * 1e3 / row["ms"] - 1 for row in rows}
    assert [name for name, error in today.items() if abs(error) >= 0.2] == ["2-01", "2-02"]
    peaks = {row["name"]: row["predicted_gb"] / row["memory_gb"] - 1 for row in own}
    long, wide = peaks.pop("4-09"), peaks.pop("4-06")            # pipelines in TF32, whose logits counted twice
    now = [heldout.predicted_gb(drawn[row["name"]]) / max(row["memory_gb"], row["first_gb"]) - 1
           for row in own if row["name"] in ("4-09", "4-06")]
    assert max(map(abs, peaks.values())) < 0.06 and min(long, wide) > 0.5 and max(map(abs, now)) < 0.09
