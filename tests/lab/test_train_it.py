"""Lesson 22: predictions hold on four ranks, claims show what was measured, and the figure rings the fastest layout that fits."""

import pytest

from course.lab.checks import check
from course.lab.checks.exercise import find
from course.lab.exercises import lesson22_train_it as lesson
from course.lab.figures import train_it as figures
from course.ranks.notebook_ranks import ranks
from course.utils.errors import CourseError


def test_one_rank_is_too_small_and_several_layouts_fit():
    assert lesson.predict("parallel.dp=1").memory > 2 * lesson.MEMORY
    found = lesson.candidates()
    fits = [chosen for chosen, each in found.items() if each.memory <= lesson.MEMORY]
    assert {figures.kind(chosen) for chosen in fits} == set(figures.KINDS) and len(fits) < len(found)
    assert lesson.predict(*lesson.settings()).seconds <= lesson.FAST * lesson.fastest()


def test_settings_that_do_not_go_together_raise():
    with pytest.raises(CourseError, match="naive"):
        lesson.predict("parallel.dp=4", "parallel.zero=1", "parallel.data=naive")


def test_skill_is_0_for_a_guess_and_1_for_the_rule():
    assert lesson.skill(lesson.math.log(12)) == pytest.approx(0) and lesson.skill(lesson.math.log(2)) == pytest.approx(1)


def test_the_figure_rings_the_fastest_that_fits():
    figure = figures.candidates(lesson.candidates(), lesson.MEMORY)
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    (x,), (y,) = lines["fastest that fits"].get_data()
    assert y == pytest.approx(1e3 * lesson.fastest()) and x <= lesson.MEMORY / 1e6
    assert lines["memory of a rank"].get_xdata()[0] == lesson.MEMORY / 1e6
    assert sum(len(line.get_xdata()) for line in figure.axes[0].lines[:4]) == len(lesson.candidates())


def test_a_claim_shows_what_was_measured_and_survives_a_forged_measurement():
    exercise = find("train-it")
    run = check.Run(({"memory_mb": lesson.torch.tensor([3.456, 3.2])},))
    assert check.with_numbers(exercise, "memory", run) == "the fullest rank needs at most 3.6 MB: 3.46 MB, predicted 3.20"
    assert "nan MB" in check.with_numbers(exercise, "memory", check.Run(({"memory_mb": lesson.torch.ones(7)},)))
    assert check.with_numbers(exercise, "one", run) == exercise.claims["one"]


def peak(*chosen: str) -> float:
    """Bytes of tensors on this rank at their peak."""
    with lesson.shared_folder(lesson.join("cpu")) as folder:
        lesson.told(lesson.join("cpu"), lambda: lesson.write_language(folder, 1))
        return lesson.train(lesson.configuration(chosen, 1, folder), lesson.join("cpu"), killed_at=4)


@pytest.mark.slow
def test_memory_is_predicted_within_a_tenth():
    for chosen in (lesson.settings(), ["parallel.pp=4", "train.micro_batch=2"],
                   ["parallel.dp=2", "parallel.pp=2", "train.micro_batch=2"],
                   ["parallel.tp=2", "parallel.dp=2", "parallel.zero=1"]):
        measured = max(ranks(4, timeout=120)(peak, *chosen))
        assert measured == pytest.approx(lesson.predict(*chosen).memory, rel=0.12), chosen
