"""What one can hand in: right answers pass, in whatever words; known mistakes and plausible ones fail, with their own hint."""

import os
from collections.abc import Sequence

import pytest

from course.lab.checks import check, notebook_cells, render
from course.lab.checks.exercise import UNKNOWN, Exercise, all_exercises, find, known_mistakes, right, wrong
from tests.lab import answers

EXERCISES = all_exercises()
QUICK = "roofline"                                   # tried in the fast tests
RANKS = "zero-optimizer"
SEED = int(os.environ.get('ANSWERS_SEED', 5))
Judged = tuple[list[check.Fact], str]


def marks(name):
    """An exercise may go to another process than the next."""
    return [pytest.mark.xdist_group(name), *([] if name == QUICK else [pytest.mark.slow])]


def each(names):
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in names])


@pytest.mark.parametrize("exercise", [pytest.param(e, marks=marks(e.name), id=e.name) for e in EXERCISES.values()])
def test_right_answers_pass_and_wrong_ones_fail_with_a_hint(exercise, monkeypatch):
    """On inputs as learners have them, and on hidden ones, whose sizes they never saw; on ranks wrong ones on the former."""
    levels = answers.scored(exercise.name)
    assert len(levels) >= 3 or not exercise.open, "an open task needs three right answers"
    rights, wrongs = [right(exercise), *answers.others(exercise.name)], answers.plausible(exercise.name)
    slips = check.comparable_mistakes(exercise)
    sources = rights + [wrong(exercise, slip) for slip in slips] + [source for source, _ in wrongs] + [row[0] for row in levels]
    assert len(set(sources)) == len(sources), "an answer is there twice: what it replaces is not there"
    for hidden, found in judged(exercise, sources, monkeypatch).items():
        for source in rights:
            facts, _ = found[source]
            assert all(fact.held for fact in facts), f"{source}\n{facts}"
            assert len(facts) == len(exercise.claims) * len(exercise.sizes)
        for source, reached, words in levels:
            facts, hint = found[source]
            verdict = check.Verdict(exercise.name, tuple(facts))
            assert tuple(exercise.level_names[level] for level in verdict.reached) == reached, f"{source}\n{facts}"
            assert verdict.passed and words in hint, f"{source}\n{hint}"
        for slip in slips:
            if (source := wrong(exercise, slip)) in found:
                facts, hint = found[source]
                assert not all(fact.held for fact in facts), f"{slip.name} passes"
                assert hint == slip.hint or slip.hint in hint.split(check.HINT_SEPARATOR), f"{slip.name}: {facts}"
        for source, words in wrongs:
            if source in found:
                facts, hint = found[source]
                if hidden or words is not None:
                    assert not all(fact.held for fact in facts) and hint, f"{source}\n{facts}"
                assert hidden or words is None or words in hint, f"{source}\n{hint}\n{facts}"  # hidden, a hint is general


def judged(exercise: Exercise, sources: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> dict[bool, dict[str, Judged]]:
    """What a check finds of each answer on inputs that are not hidden, and on those that are: facts and a hint. On hidden ones
    it leaves out wrong answers that need ranks.

    All run in one process for each number of ranks, with what they are compared with beside them: to start one takes seconds.
    """
    rights = {right(exercise), *answers.others(exercise.name), *(source for source, *_ in answers.scored(exercise.name))}
    comparable = check.comparable_mistakes(exercise)
    slips = [wrong(exercise, slip) for slip in comparable]
    complete = {right(exercise), *answers.others(exercise.name)}        # needs no known mistake beside it
    costly = max(exercise.sizes) > 1                 # one that stops takes its ranks with it, and new ones take seconds
    found: dict[tuple[bool, str], Judged] = {(hidden, source): ([], "") for hidden in (False, True) for source in sources
                                             if source in rights or not (hidden and costly)}
    for size in exercise.sizes:
        left = [key for key, (facts, _) in found.items() if check.is_correct(facts)]
        beside = [(hidden, slip) for hidden, source in left if source not in complete for slip in slips]
        tried = list(dict.fromkeys([*left, *beside]))
        inputs = {hidden: exercise.draw(SEED, hidden) for hidden in (False, True)}
        runs, _ = check.run_answers(exercise, [(notebook_cells.whole_answer(source), inputs[hidden]) for hidden, source in
                                           [(False, right(exercise)), (True, right(exercise)), *tried]], size, None)
        assert not runs[0].error and not runs[1].error
        came = dict(zip(tried, runs[2:], strict=True))
        for hidden, source in left:
            reference = (runs[hidden], *(came.get((hidden, slip), check.Run()) for slip in slips))
            monkeypatch.setattr(check, "expected_run", lambda *_, runs=reference: runs[0])
            monkeypatch.setattr(check, "reference_runs", lambda *given, runs=reference: runs if len(given) < 5 else (
                runs[0], *(run for slip, run in zip(comparable, runs[1:], strict=True) if slip.stops == given[4])))
            facts, hint = check.compare_run(exercise, came[hidden, source], SEED, hidden, size)
            found[hidden, source] = found[hidden, source][0] + facts, hint or found[hidden, source][1]
    return {hidden: {source: judged for (which, source), judged in found.items() if which == hidden} for hidden in (False, True)}


@each([name for name, exercise in EXERCISES.items() if any(slip.silent for slip in known_mistakes(exercise))])
def test_a_mistake_that_yields_nothing_to_compare_with_fails_with_a_hint(name, monkeypatch):
    monkeypatch.setattr(check, "RANK_SECONDS", 12.0)    # most of them wait for one another for ever
    for slip in known_mistakes(find(name)):
        if slip.silent:
            found = check.check_answer(find(name), notebook_cells.whole_answer(wrong(find(name), slip)), SEED)
            assert not found.passed and found.hint not in ("", UNKNOWN), f"{slip.name}: {render.text(found)}"


@each([QUICK, RANKS])                                # the way is the same for all, and lessons' masters go it, too
def test_a_mistake_in_a_process_of_its_own_gets_the_same_hint(name):
    mistake = known_mistakes(find(name))[0]
    found = check.check_answer(find(name), notebook_cells.whole_answer(wrong(find(name), mistake)), SEED)
    assert not found.passed and found.hint == mistake.hint, render.text(found)


@each([QUICK, RANKS])
def test_the_right_answer_passes_as_it_is_graded(name):
    found = check.check_answer(find(name), notebook_cells.whole_answer(right(find(name))), SEED, hidden=True)
    assert found.passed, render.text(found)
