"""The experiment measures each case by each method, and stops where a launch fails."""

import json

import pytest

from course.bench import gpu_pool
from course.parallel.context_parallel.attention import METHODS
from course.utils.errors import CourseError
from experiments import context_steps


@pytest.mark.slow
def test_two_ranks_learn_as_one(tmp_path):
    context_steps.main(tmp_path / "found.json", small=True)
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert len(rows) == len(context_steps.CASES) * (1 + len(METHODS)) and all(row["ms"] > 0 for row in rows)
    alone = {row["case"]: row["losses"] for row in rows if row["gpus"] == 1}
    for row in rows:
        assert row["losses"] == pytest.approx(alone[row["case"]], rel=1e-5), row


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_configuration_has_the_ranks_and_the_method(ranks):
    for case in context_steps.CASES.values():
        c = context_steps.config_of(case, ranks, "ring", True, small=False)
        assert (c.parallel.cp, c.parallel.context, c.graphs, c.train.global_batch) == (ranks, "ring", True, case.samples)


def test_a_launch_that_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_pool, "start", lambda program, gpus: {"error": "no memory"})
    with pytest.raises(CourseError, match="on one GPU ended early: no memory"):
        context_steps.main(tmp_path / "found.json", small=True)
