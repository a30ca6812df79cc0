"""Checks: right answers pass, every known mistake fails with its own hint, and nothing else gets through."""

import time

import pytest

from course.lab import blank, check, present
from course.lab.exercise import Exercise, all_exercises, find, known_mistakes, right, wrong

EXERCISES = all_exercises()
PAIRS = [(name, mistake) for name, exercise in EXERCISES.items() for mistake in known_mistakes(exercise)]
QUICK = "roofline"                                   # its mistakes are tried in the fast tests


def verdict(name: str, source: str, seed: int = 5, **how):
    return check.examine(find(name), source, seed, **how)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == QUICK else pytest.mark.slow) for n in EXERCISES])
@pytest.mark.parametrize("hidden", [False, True])
def test_the_right_answer_passes(name, hidden):
    found = verdict(name, right(find(name)), hidden=hidden)
    assert found.passed, present.text(found)
    sizes = find(name).sizes
    assert len(found.facts) == len(find(name).claims) * len(sizes)


@pytest.mark.parametrize(("name", "mistake"), [
    pytest.param(name, mistake, marks=[] if name == QUICK else pytest.mark.slow, id=f"{name}: {mistake.name}")
    for name, mistake in PAIRS])
def test_every_known_mistake_fails_with_its_hint(name, mistake):
    found = verdict(name, wrong(find(name), mistake))
    assert not found.passed
    assert found.hint not in ("", check.UNKNOWN), present.text(found)
    if not mistake.silent:
        assert found.hint == mistake.hint, present.text(found)


def test_mistakes_have_hints_of_their_own():
    for exercise in EXERCISES.values():
        mistakes = known_mistakes(exercise)
        assert len(mistakes) >= 5
        assert len({m.hint for m in mistakes}) == len({m.name for m in mistakes}) == len(mistakes)


def test_inputs_are_drawn_afresh_by_seed_and_size():
    for exercise in EXERCISES.values():
        one, again, other, hidden = (exercise.draw(*how) for how in ((1, False), (1, False), (2, False), (1, True)))
        assert all(one[name].equal(again[name]) for name in one)
        assert any(not one[name].equal(other[name]) for name in one)
        assert any(one[name].shape != hidden[name].shape for name in one)


def test_an_answer_for_one_seed_fails_on_another():
    exercise = find("roofline")
    work = exercise.draw(5, False)["work"].tolist()
    table = {tuple(row): max(row[0] / row[2], row[1] / row[3]) for row in work}
    source = f"TABLE = {table}\ndef roofline_seconds(*row):\n    return TABLE.get(row, 1.0)\n"
    assert verdict("roofline", source, 5).passed
    assert not verdict("roofline", source, 6).passed
    assert not verdict("roofline", source, 5, hidden=True).passed


@pytest.mark.parametrize(("source", "words", "hint"), [
    (f"def roofline_seconds(*row):\n    {blank.STUB}\n", "not written yet", "replace the line"),
    ("def roofline_seconds(*row):\n    return 1 / 0\n", "line 2 of your answer", "read the last line"),
    ("def roofline_seconds(*row)\n    return 1\n", "SyntaxError", "read the last line"),
    ("import sys\ndef roofline_seconds(*row):\n    sys.exit(0)\n", "SystemExit", "read the last line"),
    ("import os\ndef roofline_seconds(*row):\n    os._exit(0)\n", "before it returned anything", "leaves Python"),
    ("import os\ndef roofline_seconds(*row):\n    os.abort()\n", "crashed", "leaves Python"),
    ("def roofline_seconds(*row):\n    return float('nan')\n", "not finite", ""),
    ("def roofline_seconds(*row):\n    return 'three'\n", "ValueError", ""),
])
def test_what_stops_an_answer_is_said(source, words, hint):
    found = verdict("roofline", source)
    assert not found.passed and words in present.text(found) and hint in found.hint


def test_an_endless_loop_ends_in_a_sentence(monkeypatch):
    exercise = find("roofline")
    short = Exercise(**{**vars(exercise), "limits": check.sandbox.Limits(seconds=6)})
    found = check.examine(short, "def roofline_seconds(*row):\n    while True: pass\n", 1)
    assert not found.passed and "more than 6 seconds" in found.facts[0].text and "loop" in found.hint


def test_the_learners_process_has_blanks_and_no_expected_values():
    """What an answer could find: no answer in its copy of the library, no mistakes, no verdict to change."""
    source = """
import pathlib, course, course.lab.exercises.start as here
def roofline_seconds(*row):
    body = pathlib.Path(here.__file__).read_text().split('def roofline_seconds')[1].split('def ')[0]
    raise RuntimeError("|".join([body.splitlines()[2].strip(), str(sorted(p.name for p in pathlib.Path('.').glob('*'))),
                                 str(pathlib.Path(course.__file__).parent.joinpath('lab/mistakes').exists())]))
"""
    text = verdict("roofline", source).facts[0].text
    assert "raise NotImplementedError" in text and "max(" not in text.split("in roofline_seconds")[0]
    assert "'answer-0.py', 'inputs.safetensors', 'job.json']" in text and "|False" in text


AVERAGE = "import torch.distributed as dist\n\ndef average_gradients(parameters, axis):\n"


@pytest.mark.slow
@pytest.mark.parametrize(("body", "words"), [
    ("    if axis.rank == 1:\n        return\n    for p in parameters:\n        dist.all_reduce(p.grad)\n",
     ["Rank 0", "all-reduce of", "float64", "rank 1", "dist.all_reduce(p.grad)"]),
    ("    for p in list(parameters)[axis.rank:]:\n        dist.all_reduce(p.grad)\n", ["all-reduce of", "rank 0", "rank 1"]),
    ("    if axis.rank == 1:\n        raise ValueError('the gradients are too heavy')\n    dist.barrier()\n",
     ["Rank 1 raised", "the gradients are too heavy"]),
    ("    if axis.rank == 1:\n        while True: pass\n    dist.barrier()\n", ["rank 1", "while True: pass"]),
    ("    import os\n    if axis.rank == 1:\n        os._exit(3)\n    dist.barrier()\n", ["Rank 1 exited with code 3"]),
])
def test_who_stopped_where_among_ranks(body, words):
    """Which rank stopped at which collective, with its shape, and whom the others were waiting for; within a minute."""
    begin = time.monotonic()
    found = verdict("average-gradients", AVERAGE + body)
    told = present.text(found, colour=False)
    assert not found.passed and all(word.lower() in told.lower() for word in words), told
    assert time.monotonic() - begin < 60


def test_hint_only_for_just_that_mistake():
    found = verdict("roofline", "def roofline_seconds(*row):\n    return 0.123\n")
    assert not found.passed and found.hint == check.UNKNOWN


def test_differ_knows_shapes_types_and_sizes():
    import torch

    a = torch.arange(4, dtype=torch.float64)
    assert check.differ(a, a + 1e-12, 1e-9) == ""
    assert "relative difference" in check.differ(a, a + 1e-6, 1e-9)
    assert "shape" in check.differ(a, a[:2], 1e-9) and "type" in check.differ(a, a.float(), 1e-9)
    assert check.differ(a, None, 1e-9) == "nothing was returned"
    assert "not finite" in check.differ(a, a / 0, 1e-9)
    assert check.differ(torch.zeros(3), torch.zeros(3), 1e-9) == "" and check.differ(torch.zeros(3), torch.ones(3), 1e-9)
    assert "it is 2, it should be 1" in check.differ(torch.tensor(1.0), torch.tensor(2.0), 1e-9)


def test_a_verdict_in_words_and_in_html():
    facts = (check.Fact(True, "fine"), check.Fact(False, "<script>alert(1)</script>\x1b[2J"))
    bad = check.Verdict("x", facts, "a <b>hint</b>", "out<put")
    plain, rich = present.text(bad, colour=False), present.html(bad)
    assert "✓ fine" in plain and "✗ <script>" in plain and "hint: a <b>hint</b>" in plain and "\x1b" not in plain
    assert "<script>" not in rich and "&lt;script&gt;" in rich and "1 of 2" in rich and "out&lt;put" in rich
    good = check.Verdict("x", (check.Fact(True, "fine"),))
    assert good.passed and "passed" in present.text(good) and not check.Verdict("x", ()).passed
    assert "\x1b[32m" in present.text(good)
