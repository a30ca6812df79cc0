"""The measurement behind the planner's claim: what is measured, and what the file says of it."""

import json
from statistics import median

import pytest

from course.bench import results
from course.config import load
from course.config.validation import refusal
from course.planner import hardware, peak_memory, step_time
from experiments import heldout, planner_choice

H200 = hardware.load("h200")


def rows_of(*rows):
    """(preset, choice, milliseconds or None)."""
    return [{"preset": preset, "choice": choice, **({"ms": ms} if ms else {"error": "lost"})} for preset, choice, ms in rows]


def test_the_verdict_is_the_first_choices_time_over_the_fastests():
    rows = rows_of(("a", 1, 103.0), ("a", 2, 100.0), ("a", 0, 130.0), ("b", 2, 51.0), ("b", 1, 50.0),
                   ("c", 1, None), ("c", 2, 9.0), ("d", 1, None), ("e", 1, 7.0), ("e", 2, None))
    assert planner_choice.verdict(rows) == {"a": pytest.approx(1.03), "b": 1.0, "c": float("inf"), "d": float("inf")}


@pytest.mark.parametrize("preset", planner_choice.MODELS)
def test_what_is_measured_is_what_a_user_would_try(preset):
    """The planner's layouts over all axes, its first choice first, and neighbors of that; each runs and fits."""
    cases = planner_choice.cases_of(preset, planner_choice.MODELS[preset], H200, 4)
    configs = [load(case["preset"], case["settings"]) for case in cases]
    assert [case["choice"] for case in cases if case["choice"]] == [*range(1, sum(case["choice"] > 0 for case in cases) + 1)]
    assert len(cases) >= 9 and len({case["name"] for case in cases}) == len(cases)
    assert 2 <= sum(case["choice"] == 0 for case in cases) <= planner_choice.NEAR
    for axis in ("pp", "dp", "cp", "tp"):
        assert {getattr(c.parallel, axis) for c in configs} == {1, 2, 4}
    assert all(refusal(c) == "" and peak_memory.predict(c).total <= H200.memory for c in configs)
    assert all(c.parallel.pp * c.parallel.dp * c.parallel.cp * c.parallel.tp == 4 for c in configs)
    predicted = [case["predicted_ms"] for case in cases if case["choice"]]
    assert predicted == sorted(predicted)


@pytest.mark.slow
def test_small_measures_all_models(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(planner_choice, "NEAR", 1)
    monkeypatch.setattr(planner_choice, "TINY", {"gpt-1.3b": planner_choice.TINY["gpt-1.3b"]})
    monkeypatch.setattr(planner_choice, "MODELS", {"gpt-1.3b": []})
    planner_choice.main(tmp_path / "rows.json", small=True)
    found = json.loads((tmp_path / "rows.json").read_text())
    assert [row["choice"] for row in found["rows"]] == [1, 2, 0]
    assert all(row["ms"] > 0 and row["predicted_ms"] > 0 for row in found["rows"])
    assert found["verdict"] == planner_choice.verdict(found["rows"]) and "the first choice takes" in capsys.readouterr().out
    assert "--small" in found["meaning"]


def test_todays_code_is_near_the_layouts_that_the_planner_chose_among():
    """The file keeps what was predicted when they were measured; these are today's predictions."""
    rows = [row for row in results.load("planned_2xh200")["rows"]
            if "ms" in row and row["preset"] in ("gpt-1.3b", "dit-xl")]
    rows = [row for row in rows if heldout.runs_as_recorded(load(row["preset"], row["settings"]))]
    off = [abs(step_time.predict(load(row["preset"], row["settings"]), H200, 2).step * 1e3 / row["ms"] - 1) for row in rows]
    assert len(rows) == 12 and median(off) < 0.03 and max(off) < 0.11
