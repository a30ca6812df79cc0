"""The runs behind lesson 08, at the smallest size."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from course.resilience.preemption import GO_ON
from course.utils.errors import CourseError
from experiments import convergence


@pytest.fixture
def small(small_data, tmp_path, monkeypatch):
    monkeypatch.setattr(convergence.simulation, "make", lambda settings: None)
    monkeypatch.setattr(convergence, "POINTS", 3)
    monkeypatch.setattr(convergence, "SPEED_STEPS", 30)
    return convergence.Convergence(
        batches=(4, 64), rates=(1e-3,), data=str(small_data), length=0.006, jobs=2, device="cpu", runs=str(tmp_path / "runs"),
        out=str(tmp_path / "curves.json"), settings=("model.grid=[8,16]", "model.dim=16", "model.depth=1", "model.heads=2"))


def test_the_plan_has_every_batch_and_rate_and_names_of_their_own():
    c = convergence.Convergence()
    runs = convergence.plan(c)
    assert len({run.name for run in runs}) == len(runs)
    assert {(run.batch, run.lr) for run in runs} == {(batch, lr) for batch in c.batches for lr in c.rates}
    assert {run.schedule for run in runs} == {"constant", "cosine"} and any(run.warmup == 0 for run in runs)


def test_larger_batches_take_fewer_steps_and_more_samples():
    steps = [convergence.steps_of(batch) for batch in (4, 8, 16, 32, 64, 128)]
    assert steps == sorted(steps, reverse=True)
    samples = [count * batch for count, batch in zip(steps, (4, 8, 16, 32, 64, 128), strict=True)]
    assert samples == sorted(samples)


def test_settings_are_read_as_key_value():
    values = convergence.schema.parse(["jobs=8", "batches=[4,8]"])
    found = convergence.schema.build(convergence.Convergence, values, "test")
    assert found == replace(convergence.Convergence(), jobs=8, batches=(4, 8))


def test_no_run_at_a_time_is_refused_before_any_work(small):
    with pytest.raises(CourseError, match=r"jobs=0 makes no runs: .* at least 1"):
        convergence.main(replace(small, jobs=0))


@pytest.mark.slow
def test_runs_are_made_kept_and_written_as_curves(small, tmp_path, capsys):
    convergence.main(small)
    first = capsys.readouterr().out
    found = json.loads((tmp_path / "curves.json").read_text())
    assert len(found["runs"]) == len(convergence.plan(small)) == 2 + 1 + 1 and set(found["speed"]) == {"4", "64"}
    for run in found["runs"]:
        assert run["step"][-1] == run["steps"] and len(run["valid_loss"]) == len(run["step"]) >= 3
        assert all(value > 0 for value in run["valid_loss"] + run["u10"])
    assert "wrote" in first
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("b*/metrics.jsonl")}
    convergence.main(small)                          # everything is there
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("b*/metrics.jsonl")}
    convergence.main(replace(small, tensorboard=str(tmp_path / "board")))
    assert len(list((tmp_path / "board").rglob("events*"))) == len(found["runs"])


@pytest.mark.slow
def test_a_run_that_does_not_run_is_told_and_kept_out(small, capsys):
    wrong = convergence.Run(4, 1e-3, 3, schedule="triangle")
    assert "schedule" in convergence.make(wrong, small) and "ended early" in capsys.readouterr().out
    assert convergence.curve(wrong, small)["step"] == []


@pytest.mark.parametrize(("value", "kept"), [(0.1234567, 0.12346), (7, 7), (None, None), ("nan", None), ("inf", None)])
def test_what_is_not_finite_is_no_number_of_a_curve(value, kept):
    assert convergence.short(value) == kept


def test_a_run_that_was_stopped_is_not_one_that_ended_early(small, monkeypatch):
    stopped = subprocess.CompletedProcess([], GO_ON, "", "")
    monkeypatch.setattr(convergence, "train", lambda overrides, c: stopped)
    one = convergence.plan(small)[0]
    with pytest.raises(CourseError, match="the same command goes on"):
        convergence.make(one, small)
    monkeypatch.undo()
    assert not list(Path(small.runs).rglob("ended.txt"))
