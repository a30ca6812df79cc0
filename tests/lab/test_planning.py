"""Three recorded runs as numbers, and what is told of predictions of them."""

import pytest

from course.lab.exercises.lesson17_performance_model import step_seconds
from course.lab.instruments import recorded_runs
from course.lab.instruments.recorded_runs import Rates
from course.utils.errors import CourseError

RATES = Rates(matmul=670e12, attention=450e12, memory=2.3e12, latency=2e-6, bandwidth=300e9)


def test_the_three_runs_are_one_of_each_kind_and_say_nothing_of_their_time():
    runs = recorded_runs.runs()
    assert [(run.tp, run.pp) for run in runs.values()] == [(1, 1), (2, 1), (1, 4)]
    assert all(str(round(step.ms)) not in str(runs[name]) for name, step in recorded_runs.recorded_run_steps().items())
    assert runs["one GPU"].vocab and runs["one GPU"].update > 0 == runs["pipeline"].update == runs["tensor parallel"].vocab


def test_a_few_lines_of_arithmetic_are_not_far_from_what_was_measured():
    """With one set of rates for all three, of kernels."""
    for name, run in recorded_runs.runs().items():
        assert step_seconds(run, RATES) * 1e3 == pytest.approx(recorded_runs.recorded_run_steps()[name].ms, rel=0.15), name


def test_predictions_are_told_beside_what_was_recorded(capsys):
    recorded_runs.compare_predictions({"one GPU": 300.0, "pipeline": 700})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "263 ms" in lines[1] and "+14%" in lines[1] and "734 ms" in lines[2] and "-5%" in lines[2]
    assert "tensor" not in "".join(lines)


@pytest.mark.parametrize(("predicted", "words"), [({"two GPUs": 1.0}, "predict one GPU, tensor parallel, pipeline"),
                                                  ({"pipeline": 0.0}, "takes more than 0")])
def test_what_is_no_prediction_gets_a_sentence(predicted, words):
    with pytest.raises(CourseError, match=words):
        recorded_runs.compare_predictions(predicted)
