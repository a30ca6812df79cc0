"""FP8 against bf16: the method on numbers made up, and on the CPU's emulation."""

import json
import math

import pytest
import torch

from course.bench.results import load
from course.lab.authoring.lessons import ROOT
from course.utils.errors import CourseError
from experiments import loss_alignment


def test_windows_are_means_and_leave_out_what_fills_none():
    assert loss_alignment.windows(torch.arange(8.0), 3).tolist() == [1, 4]


def test_the_gap_is_relative_and_a_curve_that_breaks_is_infinitely_far():
    reference = torch.tensor([4.0, 2.0])
    assert loss_alignment.gap(torch.tensor([5.0, 1.5]), reference) == 0.25
    assert loss_alignment.gap(torch.tensor([4.0, math.inf]), reference) == math.inf


def test_the_spread_is_that_of_the_seeds():
    curves = torch.tensor([[2.0, 1.0], [3.0, 1.0], [4.0, 1.0]])                         # 1 in 2, and 0
    assert loss_alignment.spread(curves) == pytest.approx(0.25)


def run(level, noise=0.0):
    """Forty losses that fall to a level, as a recorded run."""
    return {"losses": [level + 1 / (i + 1) + noise * (-1) ** i for i in range(40)]}


def test_the_verdict_compares_with_the_same_seed_and_the_spread():
    runs = {"bf16, seed 0": run(1.0), "bf16, seed 1": run(1.02), "bf16, seed 2": run(0.98), "fp8 current": run(1.005, 0.5),
            "fp8 frozen scales": run(1.05), "fp8 delayed, 1024 max": {"error": "out of memory"}}
    found = loss_alignment.judge(runs, 4)
    assert found["within"] == {"fp8 current": True, "fp8 frozen scales": False}         # noise of single steps does not count
    assert found["gap"]["bf16, seed 1"] == pytest.approx(0.017, rel=0.1)
    runs["fp8 current"]["losses"][7] = None                                             # not a number
    assert loss_alignment.judge(runs, 4)["within"]["fp8 current"] is False
    del runs["bf16, seed 2"]
    assert loss_alignment.judge(runs, 4) == {}


@pytest.mark.parametrize(("argument", "small", "sentence"), [
    ("models=vit", False, "models=vit is none of dit-xl; dit-xl-512; gpt-1.3b: choose"),
    ("models=dit-xl-512", True, "models=dit-xl-512 is none of dit-xl; gpt-1.3b: choose"),
    ("runs=bf16, seed 0;bf16, seed 9", False, "runs=bf16, seed 9 is none of bf16, seed 0; bf16, seed 1; .*: choose")])
def test_a_name_that_there_is_not_is_refused_with_those_that_there_are(argument, small, sentence):
    with pytest.raises(CourseError, match=sentence):
        loss_alignment.jobs_of([argument], small)
    assert loss_alignment.jobs_of(["models=dit-xl", "runs=bf16, seed 1"], small) == ["dit-xl | bf16, seed 1"]


@pytest.mark.parametrize(("argument", "sentence"), [("modles=dit-xl", r"no 'modles' \(did you mean 'models'\?\): give models="),
                                                    ("run=bf16, seed 1", r"no 'run' \(did you mean 'runs'\?\): give models="),
                                                    ("dit-xl", "no 'dit-xl': give models=")])
def test_what_chooses_nothing_is_refused_before_everything_is_run(argument, sentence):
    with pytest.raises(CourseError, match=sentence):
        loss_alignment.jobs_of([argument], False)


def test_all_runs_are_configurations_from_the_same_weights():
    from course import config
    from course.models import build_model
    from course.parallel import initialize_serial, serial_layout

    for model in loss_alignment.MODELS:
        for name in loss_alignment.RUNS:
            assert loss_alignment.settings(model, name, False).train.steps == loss_alignment.STEPS
    small = config.load("dit-demo", ["model.depth=1"])
    model = initialize_serial(build_model(small.model, 7), 7, torch.device("cpu"))
    loss_alignment.same_weights(model, serial_layout(model), small, torch.device("cpu"))
    fresh = initialize_serial(build_model(small.model), 0, torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


def test_weights_that_are_copies_of_masters_are_refused():
    """The optimizer would write its own over them after the first step."""
    from course import config
    from course.parallel import build_mesh, join
    from course.training.assemble import assemble

    small = config.load("dit-demo", ["model.depth=1", "precision=bf16", "kernels=triton", "train.device=cpu"])
    training = assemble(small, build_mesh(small.parallel, join("cpu")))
    with pytest.raises(CourseError, match="has others, its masters: compare with kernels=pytorch and"):
        loss_alignment.same_weights(training.model, training.layout, small, torch.device("cpu"))


@pytest.mark.slow
def test_emulated_fp8_agrees_with_bf16_and_frozen_scales_do_not(tmp_path, monkeypatch):
    """A DiT learns digits: recipes within half the spread of three seeds or so, frozen scales ten times outside and more.

    A tiny GPT at this pace would not do: after some steps its FP8 run is to bf16 as another seed is, and whether it is within the
    spread of three is luck, other luck on another processor.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    names = [*loss_alignment.SEEDS, "fp8 delayed, 1024 max", "fp8 current", loss_alignment.FROZEN, loss_alignment.TOKENS_APART]
    loss_alignment.main(tmp_path / "found.json", [f"dit-xl | {name}" for name in names], small=True)
    found = json.loads((tmp_path / "found.json").read_text())["models"]["dit-xl"]
    assert [len(row["losses"]) for row in found["runs"].values()] == [160] * len(names)
    assert found["within"] == {"fp8 delayed, 1024 max": True, "fp8 current": True, loss_alignment.FROZEN: False}
    assert found["gap"][loss_alignment.FROZEN] > 10 * found["spread"]
    assert found["gap"][loss_alignment.TOKENS_APART] < found["spread"] / 2      # bf16 over two ranks is no other training


def test_what_was_recorded_on_an_h200_says_what_readme_and_lesson_say():
    found = load("alignment_h200")["models"]
    for about in found.values():
        again = loss_alignment.judge(about["runs"], about["steps"] // loss_alignment.WINDOWS)
        assert again["within"] == about["within"] and again["spread"] == pytest.approx(about["spread"])
        assert all(verdict == (name != loss_alignment.FROZEN) for name, verdict in again["within"].items())
        assert about["steps"] >= 500
