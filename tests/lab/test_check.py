"""Checks: what they say of answers that stop, hide, spy or make two mistakes at once; test_answers.py has whole ones."""

import json
import re
import subprocess
import sys
import time

import pytest
import torch

from course.lab.authoring import stubs
from course.lab.checks import check, diagnosis, notebook_cells, render
from course.lab.checks.exercise import Exercise, all_exercises, find, known_mistakes, right, wrong
from course.lab.exercises import lesson17_performance_model
from course.lab.sandbox.child import describe_error
from course.ranks.notebook_ranks import ranks
from tests.lab import classroom

EXERCISES = all_exercises()


def verdict(name: str, source: str, seed: int = 5, **how):
    return check.check_answer(find(name), notebook_cells.whole_answer(source), seed, **how)


@pytest.mark.slow
def test_two_mistakes_at_once_get_a_hint_for_one():
    """Each spoils an output of its own, so that what came is the work of neither alone."""
    first, second = (next(m for m in known_mistakes(find("matmul-cost")) if m.name == name)
                     for name in ("multiplications alone", "the result is not written"))
    source = wrong(find("matmul-cost"), first).replace(second.old, second.new)
    found = verdict("matmul-cost", source)
    assert found.hint == first.hint and sum(fact.held for fact in found.facts) == 0


def test_a_mistake_that_changes_nothing_on_these_inputs_explains_no_other():
    import torch

    exercise = find("roofline")
    first, second = ({"seconds": torch.tensor([x], dtype=torch.float64)} for x in (1.0, 2.0))
    expected, unknown = check.Run((first,)), check.Run((second,))
    assert check.hint_for_numbers(exercise, unknown, expected,
                                  [expected] * len(check.comparable_mistakes(exercise))) == check.UNKNOWN_CASE


def test_who_writes_into_the_batch_in_a_way_of_their_own_is_told_of_it():
    import torch

    exercise = find("training-step")
    right_one = {key: torch.ones(()) for key in exercise.claims}
    found = check.hint_for_numbers(exercise, check.Run((right_one | {"kept": torch.zeros(())},)), check.Run((right_one,)),
                                   [check.Run()] * len(check.comparable_mistakes(exercise)))
    assert found == "do not write into `batch`: work on a copy"


@pytest.mark.parametrize("exercise", [e for e in EXERCISES.values() if not e.explain], ids=lambda e: e.name)
def test_numbers_that_no_mistake_gives_get_a_hint(exercise):
    import torch

    right_one, other = ({key: torch.tensor([x], dtype=torch.float64) for key in exercise.claims} for x in (1.0, 0.7))
    nothing = [check.Run()] * len(check.comparable_mistakes(exercise))
    assert check.hint_for_numbers(exercise, check.Run((other,)), check.Run((right_one,)), nothing)


def test_who_keeps_too_much_is_not_told_to_copy_the_arguments():
    import torch

    exercise = find("sharded-adam")                  # its "kept" is a budget
    right_one = {key: torch.ones(()) for key in exercise.claims}
    found = check.hint_for_numbers(exercise, check.Run((right_one | {"kept": torch.zeros(())},)), check.Run((right_one,)),
                                   [check.Run()] * len(check.comparable_mistakes(exercise)))
    assert found and "arguments" not in found


def test_mistakes_have_names_of_their_own_and_a_hint():
    """Variants of one mistake, such as several thresholds, have one hint."""
    for exercise in EXERCISES.values():
        mistakes = known_mistakes(exercise)
        assert len({m.hint for m in mistakes}) >= 5 and all(m.hint for m in mistakes)
        assert len({m.name for m in mistakes}) == len(mistakes)
        assert len({(m.old, m.new) for m in mistakes}) == len(mistakes)


def test_inputs_are_drawn_afresh_by_seed_and_size():
    for exercise in EXERCISES.values():
        one, again, other, hidden = (exercise.draw(*how) for how in ((1, False), (1, False), (2, False), (1, True)))
        assert all(one[name].equal(again[name]) for name in one)
        assert any(not one[name].equal(other[name]) for name in one)
        few = all(x.numel() <= 8 for x in one.values())          # then the numbers are themselves the sizes of what is tried
        assert any(one[name].shape != hidden[name].shape or (few and not one[name].equal(hidden[name])) for name in one)


@pytest.mark.parametrize(("one", "other", "same"), [
    ("Damaged: remove /tmp/tmpab12/ckpt-3/model.bin", "Damaged: remove /tmp/tmpzz/ckpt-3/model.bin\nmore", True),
    ("Error: [rank0]:[F1123 11:23:50.1 Group] sizes", "Error: [rank1]:[F1123 11:24:01.9 Group] sizes", True),
    ("Damaged: remove /tmp/tmpab12/model.bin", "Damaged: remove /tmp/tmpab12/index.json", False),
    ("The ranks disagree: rank 0 gathers in line 3 of the cell 6: `a.b()`; rank 1 gathers (2,) in line 3 of the cell 6: `a.b()`.",
     "The ranks disagree: rank 0 gathers in line 9 of the cell x: `d`; rank 1 gathers (2,) in line 9 of the cell x: `d`.", True),
    ("The ranks disagree: rank 0 gathers in line 3 of the cell 6: `a`; rank 1 gathers (2,) in line 3 of the cell 6: `a`.",
     "The ranks disagree: rank 0 gathers in line 3 of the cell 6: `a`; rank 1 gathers (3,) in line 3 of the cell 6: `a`.", False),
    ("ValueError: 3", "ValueError: 4", False)])
def test_errors_are_the_same_but_for_folders_and_clocks(one, other, same):
    assert (check.comparable_line(one) == check.comparable_line(other)) == same


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [False, True])
def test_an_exercise_before_that_is_still_blank_is_named(hidden):
    blank_one = f"def overlap(mine, theirs):\n    {stubs.STUB}\n"
    source = right(find("put-together")).replace("from course.checkpoint.shards import overlap", blank_one)
    assert blank_one in source
    found = verdict("put-together", source, hidden=hidden)
    assert [fact.text for fact in found.facts] == [check.EARLIER_UNWRITTEN if hidden
                                                   else "it calls `overlap`, which is not written yet"]
    assert found.hint.startswith(f"write {'that' if hidden else '`overlap`'} first, in the earlier exercise that asks for it: ")
    own = verdict("put-together", classroom.blank_source(*find("put-together").objects), hidden=hidden)
    assert [fact.text for fact in own.facts] == [check.UNWRITTEN] and "replace the line that raises" in own.hint


def test_numbers_are_shown_with_as_many_digits_as_tell_them_apart():
    values = torch.tensor([1.4293, 1.42506], dtype=torch.float64)
    assert check.format_pair(values, 2 * values) == ("1.4293, 1.42506", "2.8586, 2.85012")
    assert check.format_pair(values + 1e-7, values) == ("1.4293001, 1.4250601", "1.4293, 1.42506")
    assert len(set(check.format_pair(values + 1e-12, values))) == 2


@pytest.mark.slow
def test_an_answer_for_one_seed_fails_on_another():
    exercise = find("roofline")
    work = exercise.draw(5, False)["work"].tolist()
    table = {tuple(row): max(row[0] / row[2], row[1] / row[3]) for row in work}
    source = f"TABLE = {table}\ndef roofline_seconds(*row):\n    return TABLE.get(row, 1.0)\n"
    assert verdict("roofline", source, 5).passed
    assert not verdict("roofline", source, 6).passed
    assert not verdict("roofline", source, 5, hidden=True).passed


@pytest.mark.parametrize(("source", "words", "hint"), [
    (f"def roofline_seconds(*row):\n    {stubs.STUB}\n", "not written yet", "replace the line"),
    ("def roofline_seconds(*row):\n    return 1 / 0\n", "line 2 of the cell", "line of your code"),
    ("def roofline_seconds(*row)\n    return 1\n", "SyntaxError: expected ':'\n      line 1 of the cell", "line of your code"),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in (
        ("import sys\ndef roofline_seconds(*row):\n    sys.exit(0)\n", "SystemExit", "line of your code"),
        ("import os\ndef roofline_seconds(*row):\n    os._exit(0)\n", "before it returned anything", "ends the process"),
        ("import os\ndef roofline_seconds(*row):\n    os.abort()\n", "crashed", "ends the process"),
        ("def roofline_seconds(*row):\n    return float('nan')\n", "gave nan", ""),
        ("def roofline_seconds(*row):\n    return 'three'\n", "returned a str ('three'); expected a number", "one number"))),
])
def test_what_stops_an_answer_is_said(source, words, hint):
    found = verdict("roofline", source)
    assert not found.passed and words in render.text(found) and hint in found.hint


@pytest.mark.parametrize(("error", "words"), [
    (ValueError("Global rank 1 is not part of group <ProcessGroup>"), "axis.ranks[i]"),
    (AttributeError("'InterpreterBuilder' object has no attribute 'get_bf16'"), ".to(tl.float32)")])
def test_errors_in_the_words_of_a_library_have_a_cure(error, words):
    assert words in describe_error(error)["cure"]


def test_ranks_that_are_late_hear_what_others_did():
    late = check.Run(kind="late", error="Not done after 30 s")
    hint = check.hint_for_error(find("ring-all-reduce"), late, 1, False, 2, lambda: None)
    assert hint.startswith("seen here before: every rank waits in its send") and "; isend and irecv take ranks" in hint
    assert hint.endswith(f"Else {check.ENDED_HINT}") and check.hint_for_error(find("roofline"), late, 1, False, 1,
                                                                              id) == check.ENDED_HINT


def test_who_starts_ranks_for_an_answer_does_without_pytorch():
    """A second less, for every check on several ranks: the ranks themselves import it."""
    code = "import sys, course.lab.sandbox.child; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_who_looks_for_a_mistake_says_so():
    said = []
    wrong_one = "def roofline_seconds(*row):\n    return 1.0\n"
    assert verdict("roofline", wrong_one, looking=lambda: said.append(1)).hint and said == [1]
    assert verdict("roofline", right(find("roofline")), looking=lambda: said.append(2)).passed and said == [1]


def test_an_endless_loop_ends_in_a_sentence(monkeypatch):
    exercise = find("roofline")
    short = Exercise(**{**vars(exercise), "limits": check.sandbox.Limits(seconds=1)})         # starting Python does not count
    found = check.check_answer(short, notebook_cells.whole_answer("def roofline_seconds(*row):\n    while True: pass\n"), 1)
    assert not found.passed and found.late and "more than 1 seconds" in found.facts[0].text and "loop" in found.hint


@pytest.mark.slow
def test_an_answer_on_ranks_cannot_keep_its_time_from_counting():
    """Not even one that takes away all that lies beside it, on the first rank that comes to it."""
    exercise = find("average-gradients")
    short = Exercise(**{**vars(exercise), "limits": check.sandbox.Limits(seconds=2)})
    source = """
import os
while True:
    for file in os.scandir("."):
        try:
            os.remove(file)
        except OSError:
            pass
def average_gradients(parameters, axis):
    pass
"""
    (run,), ended = check.run_answers(short, [(notebook_cells.whole_answer(source), short.draw(1, True))], 2, None)
    assert ended.late and ended.ended == "it ran for more than 2 seconds and was stopped" and run.kind == "late", ended


def test_the_learners_process_has_blanks_and_no_expected_values():
    """What an answer could find: no answer in its copy of the library, no mistakes, no verdict to change."""
    source = """
import pathlib, course, course.lab.exercises.lesson00_start_here as here
def roofline_seconds(*row):
    body = pathlib.Path(here.__file__).read_text().split('def roofline_seconds')[1].split('def ')[0]
    raise RuntimeError("|".join([body.splitlines()[2].strip(), str(sorted(p.name for p in pathlib.Path('.').glob('*'))),
                                 str(pathlib.Path(course.__file__).parent.joinpath('lab/mistakes').exists())]))
"""
    text = verdict("roofline", source).facts[0].text
    assert "raise NotImplementedError" in text and "max(" not in text.split("in roofline_seconds")[0]
    assert "'answer-0.json', 'job.json']" in text and "|False" in text     # its inputs may hold what is hidden from it


AVERAGE = "import torch.distributed as dist\n\ndef average_gradients(parameters, axis):\n"


@pytest.mark.slow
@pytest.mark.parametrize(("body", "words", "hint"), [
    ("    if axis.rank == 1:\n        return\n    for p in parameters:\n        dist.all_reduce(p.grad)\n",
     ["Rank 0", "all-reduce of", "float64", "rank 1", "dist.all_reduce(p.grad)"], "same collectives"),
    ("    for p in list(parameters)[axis.rank:]:\n        dist.all_reduce(p.grad)\n", ["all-reduce of", "rank 0", "rank 1"],
     "same collectives"),
    ("    if axis.rank == 1:\n        raise ValueError('the gradients are too heavy')\n    dist.barrier()\n",
     ["rank 1: ValueError: the gradients are too heavy", "line 5 of the cell"], "line of your code"),
    ("    for p in parameters:\n        dist.all_reduce(p.gradient)\n", ["has no attribute 'gradient'"], "line of your code"),
    ("    if axis.rank == 1:\n        while True: pass\n    dist.barrier()\n", ["rank 1", "while True: pass"], "does not end"),
    ("    import os\n    if axis.rank == 1:\n        os._exit(3)\n    dist.barrier()\n", ["Rank 1 exited with code 3"],
     "ends the process"),
])
def test_who_stopped_where_among_ranks(body, words, hint, monkeypatch):
    """Which rank stopped at which collective, with its shape, and whom the others were waiting for; soon, even on a busy machine.

    Only ranks that do not meet are told of collectives.
    """
    monkeypatch.setattr(check, "RANK_SECONDS", 10.0)
    begin = time.monotonic()
    found = verdict("average-gradients", AVERAGE + body)
    told = render.text(found, color=False)
    assert not found.passed and all(word.lower() in told.lower() for word in words), told
    assert hint in found.hint and ("same collectives" in found.hint) == ("same collectives" in hint)
    assert "Traceback" not in told and "site-packages" not in told
    assert time.monotonic() - begin < 40             # a minute, of which ranks wait 20 seconds less here


@pytest.mark.slow
def test_lines_are_counted_in_the_cell_that_they_are_in():
    """Not in the answer that is put together from imports and helpers of other cells."""
    helper = "import math\n\n# two times in one\nimport torch\ndef longer(a, b):\n    return max(a, b) / zero\n"
    mine = "# mine\nzero = 0\n\n\ndef roofline_seconds(f, m, p, b):\n    compute = f / p\n    return longer(compute, m / b)\n"
    answer = notebook_cells.definitions([helper, mine], ["roofline_seconds"])
    text = check.check_answer(find("roofline"), answer.pieces, 5).facts[0].text
    assert "line 7 of the cell with `def roofline_seconds`: return longer(compute, m / b)" in text
    assert "line 6 of the cell that begins with `import math`: return max(a, b) / zero" in text


@pytest.mark.slow
def test_annotations_of_the_future_are_for_all_cells():
    mine = "def roofline_seconds(f: No, m: Such, p, b) -> Name:\n    return f"
    answer = notebook_cells.definitions(["from __future__ import annotations", mine], ["roofline_seconds"])
    assert "gave" in check.check_answer(find("roofline"), answer.pieces, 5).facts[0].text


@pytest.mark.parametrize("name", [name for name in EXERCISES if find(name).cases])
def test_what_was_asked_is_said_for_each_number(name):
    exercise = find(name)
    inputs = exercise.draw(5, False)
    size = exercise.sizes[0]
    returned = exercise.program(inputs) if size == 1 else ranks(size)(exercise.program, inputs)[0]
    asked, found = exercise.cases(inputs), exercise.weighed(inputs, returned)
    for key in exercise.claims.keys() - exercise.flags.keys():
        assert len(found[key]) == len(asked[key] if isinstance(asked, dict) else asked), key


@pytest.mark.slow
def test_what_was_asked_can_be_asked_again():
    """A call as it is shown, and the number that is said to be right."""
    own = {"pipeline_seconds": lesson17_performance_model.pipeline_seconds}
    source = "def pipeline_seconds(stages, micros, chunks):\n    return float(micros)\n"
    for fact in verdict("pipeline-seconds", source).facts[:3]:
        call, wrong, right = re.search(r"(pipeline_seconds\(.*\)) gave (\S+); (\S+) is right", fact.text).groups()
        assert float(wrong) != float(right) == pytest.approx(eval(call, own), rel=1e-5)


@pytest.mark.slow
def test_few_numbers_are_shown_with_what_was_asked_but_never_hidden_ones():
    half = "def roofline_seconds(f, m, p, b):\n    return max(f / p, m / b) / 2\n"
    exercise = find("roofline")
    flops, moved, peak_flops, peak_bytes = exercise.draw(5, False)["work"].tolist()[0]
    right_one = max(flops / peak_flops, moved / peak_bytes)
    text = verdict("roofline", half).facts[0].text
    assert f"roofline_seconds(flops={flops:.6g}, " in text and "(12 of 12 cases are wrong)" in text
    assert f"gave {right_one / 2:.6g}; {right_one:.6g} is right" in text
    hidden = exercise.draw(5, True)["work"].tolist()
    text = render.text(verdict("roofline", half, hidden=True))
    assert "its numbers are not what they should be" in text and "0.5" not in text
    assert not any(f"{max(f / p, m / b):.4g}"[:5] in text or f"{f:.4g}" in text for f, m, p, b in hidden)


@pytest.mark.parametrize(("body", "words"), [("raise ValueError(f)", "it stopped with an error, which is left out"), *(
    pytest.param(*one, marks=pytest.mark.slow) for one in (
        ("raise type(f'E{f:.0f}', (Exception,), {})('here')", "it stopped with an error, which is left out"),
        ("import os; os._exit(1 + int(f) % 200)", "it ended before it returned anything"),
        ("return f'{f}'", "cannot be used"),
        ("import json, os; open('error-0.json', 'w').write(json.dumps(dict(kind='late', text=f'{f}', cure=f'{f}'))); os._exit(0)",
         "it took too long")))])
def test_an_answer_that_stops_cannot_say_what_it_was_given_where_that_is_hidden(body, words):
    source = f"def roofline_seconds(f, m, p, b):\n    {body}\n"
    hidden = find("roofline").draw(5, True)["work"].tolist()
    found = verdict("roofline", source, hidden=True)
    text = found.facts[0].text + found.hint
    assert words in text and not any(f"{row[0]:.4g}"[:5] in text or f"{row[0]:.0f}" in text for row in hidden)
    assert "line 2" not in text and "exit status" not in text and "ValueError" not in text
    assert words not in verdict("roofline", source).facts[0].text
    assert "read the error" not in found.hint                           # the page leaves it out


@pytest.mark.parametrize("choice", [1, 2])
def test_nothing_that_an_answer_chooses_is_shown_of_hidden_inputs(choice):
    """Outputs whose shape, type or size an answer made of what it was given: the pages for both choices are the same."""
    def page(name: str, got: torch.Tensor, expected: torch.Tensor) -> str:
        exercise = find(name)
        key = next(key for key in exercise.claims if key not in exercise.flags)
        return check.describe_difference(exercise, key, expected, got, {}, True)

    right = torch.ones(4, dtype=torch.float64)
    pages = [page("roofline", got, right) for got in (torch.ones(choice, 4 + choice, dtype=torch.float64),
                                                      torch.ones(4, dtype=[torch.int8, torch.bool, torch.float16][choice]),
                                                      right + choice)]
    assert pages == [f"its {what} what {'they' if 'are' in what else 'it'} should be" for what in
                     ("shape is not", "type is not", "numbers are not")]
    slow = check.Verdict("roofline", (check.Fact(False, "no"),), seconds=choice + 0.3)
    assert f"{choice}.3 s" not in render.text(slow, graded=True) + render.html(slow, graded=True)
    assert f"{choice}.3 s" in render.text(slow)


def test_flags_and_few_numbers_in_words():
    import torch

    exercise = find("accumulate")

    def told(key, expected, got, hidden=False):
        return check.describe_difference(exercise, key, torch.tensor(expected), torch.tensor(got), {}, hidden)

    assert told("scaled_cast", 1.0, 0.0) == told("scaled_cast", 1.0, 0.0, hidden=True) == exercise.flags["scaled_cast"]
    assert told("micro_seen", [4.0, 2.0], [6.0]) == "it is 6; it should be 4, 2"
    assert told("whole_losses", [1.25, 2.0], [2.5, 4.0]) == "it is 2.5, 4; it should be 1.25, 2"
    assert told("whole_losses", [1.25, 2.0], [2.5, 4.0], hidden=True) == "its numbers are not what they should be"
    assert told("whole_losses", [1.25, 2.0], [1.25, 2.0]) == ""


def test_a_rank_is_named_only_where_not_all_say_the_same():
    assert check.claim_fact("all meet", ["", ""]) == check.Fact(True, "all meet")
    assert check.claim_fact("all meet", ["late", "late"]).text == "all meet: no, late"
    assert check.claim_fact("all meet", ["", "late"]).text == "all meet: no, rank 1: late"
    assert check.claim_fact("all meet", ["early", "late"]).text == "all meet: no, rank 0: early"


def test_what_was_not_tried_is_neither_held_nor_failed():
    exercise = find("1f1b")
    assert check.claim_difference(exercise, "losses", torch.ones(2), torch.zeros(0)) == exercise.untried["losses"]
    assert check.claim_difference(exercise, "losses", torch.ones(2), torch.ones(2)) == ""
    assert "relative" in check.claim_difference(exercise, "losses", torch.ones(2), torch.zeros(2))
    fact = check.claim_fact("it trains", ["not tried: first that"] * 2, "not tried: first that")
    assert fact == check.Fact(False, "it trains: not tried: first that", tried=False)
    found = check.Verdict("x", (check.Fact(True, "fine"), fact))
    assert not found.passed and "  – it trains: not" in render.text(found, color=False)
    assert "–</b> it trains" in render.html(found) and "✗" not in render.html(found)


@pytest.mark.slow
def test_a_schedule_wrong_on_the_last_rank_alone_blames_no_other():
    source = right(find("1f1b")).replace("    return alternate(forward, backward", "    if rank == p - 1:\n        backward = "
                                                                                   "backward[:-1]\n    return "
                                                                                   "alternate(forward, backward")
    found = verdict("1f1b", source)
    told = render.text(found, color=False)
    assert "✗ on 2 ranks: in simulation every rank does every pass once: no, in some pipeline, passes are missing" in told
    assert "rank 0" not in told and "it is forever, forever, forever, forever; it should be " in told
    assert "– on 2 ranks: the library trains with it: the losses of two steps are right: not tried" in told


@pytest.mark.slow
def test_a_loss_in_float32_spoils_what_is_said_of_it_and_no_more():
    told = render.text(verdict("accumulate", right(find("accumulate")).replace(", dtype=weight.dtype", "")), color=False)
    assert "✗ the returned loss has the dtype of your inputs, here float64: no, it has another dtype" in told
    assert told.count("not compared, because the dtype differs") == 3 and told.count("✗") == 1 and "9 of 26" in told


@pytest.mark.slow
@pytest.mark.parametrize(("name", "slip", "case"), [
    ("loss-scaler", "the wrong way", r'next_scale\("fp16", scale=(\d+), good=\d+, bad=1\)\[0\] gave \d+; [\d.]+ is right'),
    ("loss-scaler", "the count goes on", r'next_scale\("fp16", scale=\d+, good=1999, bad=0\)\[1\] gave 2000; 0 is right'),
    ("loss-scaler", "a bad step is left out", r"a scale of 65536, of whose steps [\d and]+ are bad, after step \d+ gave \d+; "),
    ("learning-rate", "warm-up from zero", r"step 0 of lr=[\d.]+, warmup=\d+, schedule=cosine, min_lr=0, train.+ gave 0; "),
    ("learning-rate", "beyond the end", r"step \d+ of lr=.* gave [\d.e-]+; [\d.e-]+ is right \(6 of \d+ cases are wrong\)"),
    ("amax-history", "at the end", r"remember\(\[\[([\d.]+(, )?){6}\]\], \[[\d.]+\]\), of one row, gave ([\d.]+(, )?){6}; "),
])
def test_where_a_number_is_wrong_one_case_is_shown(name, slip, case):
    source = wrong(find(name), next(m for m in known_mistakes(find(name)) if m.name == slip))
    texts = [fact.text for fact in verdict(name, source).facts]
    assert any(re.search(case, text) for text in texts), texts


def test_cases_next_to_zero_are_not_blamed_for_what_others_round_off():
    expected = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    assert check.wrong_cases(expected, torch.tensor([1.0, 1e-12, 3.0], dtype=torch.float64), 1e-9) == [2]
    assert check.wrong_cases(expected, torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64), 1e-9) == [1]
    assert check.wrong_cases(expected, expected / 0, 1e-9) == [0, 1, 2]


def test_facts_are_counted_against_all_claims():
    stopped = verdict("matmul-cost", "def matmul_cost(*sizes):\n    return 1 / 0\n")
    assert "0 of 2 checks hold" in render.headline(stopped)
    assert "0 of 26 checks hold" in render.headline(check.unreadable_verdict(find("accumulate"), "it is not there", "write it"))


@pytest.mark.slow
def test_seconds_are_those_that_one_waits(monkeypatch):
    """Those of the library's answer, too."""
    real = check.expected_run

    def slow(*job):
        time.sleep(1)
        return real(*job)

    monkeypatch.setattr(check, "expected_run", slow)
    begin = time.monotonic()
    found = verdict("roofline", right(find("roofline")), seed=77)
    waited = time.monotonic() - begin
    assert 1 < found.seconds <= waited and waited - 0.5 < found.seconds


def test_hint_only_for_just_that_mistake():
    found = verdict("roofline", "def roofline_seconds(*row):\n    return 0.123\n")
    assert not found.passed and found.hint == check.UNKNOWN_CASE


@pytest.mark.parametrize(("error", "kind", "hint"), [
    ("Rank 0 died of SIGABRT.", "ranks", diagnosis.TOO_LONG_MESSAGE),
    ("Rank 0 died of SIGSEGV.", "ended", diagnosis.FREED_MEMORY),
    ("it printed more than 20 MB and was stopped", "ended", "print less, and not inside a loop"),
    ("it ran for more than 20 seconds and was stopped", "ended", check.ENDED_HINT),
    ("There was no rule registered for HigherOrderOperator cond", "NotImplementedError", check.HIGHER_ORDER)])
def test_a_way_to_die_has_a_cause(error, kind, hint):
    exercise = find("ring-all-reduce")
    assert check.hint_for_error(exercise, check.Run(kind=kind, error=error), 5, False, 2, lambda: None) == hint


@pytest.mark.parametrize(("source", "more"), [("y = x", ""), ("work = dist.all_reduce(x, async_op=True)", check.NOT_AWAITED)])
def test_only_who_communicates_asynchronously_is_asked_whether_they_wait(source, more):
    assert check.with_question(check.UNKNOWN_ON_RANKS, notebook_cells.whole_answer(source)) == check.UNKNOWN_ON_RANKS + more
    assert check.with_question("another", notebook_cells.whole_answer(source)) == "another"


def test_a_flag_with_a_value_for_each_case_names_one():
    exercise = find("survive")
    inputs = exercise.draw(5, False)
    cases = exercise.cases(inputs)
    expected = torch.ones(len(cases), dtype=torch.float64)
    got = expected.clone()
    got[2] = 0
    told = check.describe_difference(exercise, "again", expected, got, inputs, False)
    assert told == f"not always: {cases[2]} (1 of {len(cases)} cases are wrong)"
    assert check.describe_difference(exercise, "again", expected, got, inputs, True) == "not always"


def test_weights_that_nothing_trains_are_numbers_like_others():
    """Losses are blamed or cleared only where there are some."""
    def hint(name, *doubled):
        found = {key: torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64) for key in find(name).claims}
        expected, run = (check.Run((found | change,)) for change in ({}, {key: 2 * found[key] for key in doubled}))
        return check.hint_for_unknown(find(name), run, expected)

    assert hint("training-bytes", "weights") == "every number is 2 times what it should be"
    assert "the losses are right" in hint("training-step", "weights")
    assert "the forward pass" in hint("training-step", "losses", "weights")


def test_differ_knows_shapes_types_and_sizes():
    import torch

    a = torch.arange(4, dtype=torch.float64)
    assert check.difference(a, a + 1e-12, 1e-9) == ""
    assert "relative difference" in check.difference(a, a + 1e-6, 1e-9)
    assert "shape" in check.difference(a, a[:2], 1e-9) and "type" in check.difference(a, a.float(), 1e-9)
    assert check.difference(a, None, 1e-9) == "nothing was returned"
    assert "not finite" in check.difference(a, a / 0, 1e-9)
    assert check.difference(torch.zeros(3), torch.zeros(3), 1e-9) == "" and check.difference(torch.zeros(3), torch.ones(3), 1e-9)


def test_a_verdict_in_words_and_in_html():
    facts = (check.Fact(True, "fine"), check.Fact(False, "<script>alert(1)</script>\x1b[2J"))
    bad = check.Verdict("x", facts, "a <b>hint</b>", "out<put")
    plain, rich = render.text(bad, color=False), render.html(bad)
    assert "✓ fine" in plain and "✗ <script>" in plain and "hint: a <b>hint</b>" in plain and "\x1b" not in plain
    assert "<script>" not in rich and "&lt;script&gt;" in rich and "1 of 2" in rich and "out&lt;put" in rich
    good = check.Verdict("x", (check.Fact(True, "fine"),))
    assert good.passed and "passed" in render.text(good) and not check.Verdict("x", ()).passed
    assert "\x1b[32m" in render.text(good)


def luminance(color: str) -> float:
    """Of #rrggbb, as WCAG 2.2 defines it."""
    parts = [int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_marks_have_the_contrast_of_wcag_aa_on_every_page():
    """Each has its own background; all words have the page's color."""
    verdict = check.Verdict("roofline", (check.Fact(False, "it adds up"), check.Fact(True, "it returns")), "look again")
    for mark, _, color in render.MARKS.values():
        assert 1.05 / (luminance(color) + 0.05) >= 4.5, mark
    colors = re.findall(r"(?<!background:)(?<!solid )#[0-9a-f]{6}", render.html(verdict))
    assert colors and set(colors) == {"#ffffff"}


def outcome(ended: str = "", output: str = "", late: bool = False) -> check.sandbox.Outcome:
    return check.sandbox.Outcome(not ended, ended, output, 1.0, late)


FULL = "No space left on device"
ITSELF = "it ended by itself with exit status 1 (sys.exit)"


@pytest.mark.parametrize(("text", "machine", "doubtful"), [
    ("OSError: [Errno 28] No space left on device: '/x/out'", FULL, False),
    ("SafetensorError: Error while serializing: I/O error: Os { code: 28, kind: StorageFull }", FULL, False),
    ("OSError: [Errno 122] Disk quota exceeded", "Disk quota exceeded", False),
    ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "Resource temporarily unavailable", False),
    ("OSError: [Errno 23] Too many open files in system", "Too many open files in system", False),
    ("DistNetworkError: the server socket has failed to listen: port: 29500, code: -98, name: EADDRINUSE, message: address "
     "already in use", "Address already in use", False),
    ("RuntimeError: can't start new thread", "Resource temporarily unavailable", False),
    ("The ranks did not start: 12 processes wait for 2 cores", "The ranks did not start", False),
    ("OSError: [Errno 28] No space left on device\nline 3 of the cell with `def f`: open('x')", FULL, True),
    ("OSError: [Errno 24] Too many open files", "Too many open files", True),         # a limit of its own process
    ("ValueError: 28", "", False), ("OSError: [Errno 2] No such file or directory", "", False)])
def test_failures_of_the_machine_are_told_from_the_answers(tmp_path, text, machine, doubtful):
    (tmp_path / "error-0.json").write_text(json.dumps({"kind": text.split(":")[0], "text": text, "cure": ""}))
    run = check.read_run(tmp_path, 0, 1, outcome(), find("roofline"))
    assert run.machine_failure == machine and (run.maybe_answer == doubtful or not machine) and run.error == text


@pytest.mark.parametrize(("ended", "machine", "doubtful"), [
    (outcome("it had not started after 300 seconds: is this machine too busy?", late=True), "it did not start in time", False),
    (outcome("it ran for more than 30 seconds and was stopped", late=True), "", False),
    (outcome(ITSELF, "bwrap: Can't mkdir /tmp/x: " + FULL), FULL, False),
    (outcome(ITSELF, "bwrap: Creating new namespace failed"), "the sandbox did not start", False),
    (outcome(ITSELF, "Traceback (most recent call last)\nOSError: " + FULL), FULL, False),
    (outcome(ITSELF, "hello\nOSError: " + FULL), FULL, True), (outcome(ITSELF, "hello"), "", True),
    (outcome("it crashed: killed (signal 9); perhaps this machine ran out of memory"),
     "it was killed, perhaps since memory ran out", True),
    (outcome("it crashed: segmentation fault (signal 11)"), "", False)])
def test_a_run_that_the_machine_stopped_is_told_from_one_that_stopped_itself(tmp_path, ended, machine, doubtful):
    run = check.read_run(tmp_path, 0, 1, ended, find("roofline"))
    assert (run.machine_failure, run.maybe_answer) == (machine, doubtful)


@pytest.mark.parametrize(("run", "believing", "unchecked"), [
    (check.Run(kind="OSError", error=FULL, machine_failure=FULL), False, True),
    (check.Run(kind="OSError", error=FULL, machine_failure=FULL), True, True),
    (check.Run(kind="OSError", error=FULL, machine_failure=FULL, maybe_answer=True), True, True),
    (check.Run(kind="OSError", error=FULL, machine_failure=FULL, maybe_answer=True), False, False),
    (check.Run(kind="ended", error="it ended"), True, False)])
def test_an_answer_that_blames_the_machine_gains_a_second_run_and_no_more(monkeypatch, run, believing, unchecked):
    works, calls = check.run_answers, []

    def execute(exercise, answers, size, layers):
        if layers is None:                           # of ours
            return works(exercise, answers, size, layers)
        calls.append(size)
        return [run], outcome()

    monkeypatch.setattr(check, "run_answers", execute)
    found = check.check_answer(find("roofline"), [], 5, hidden=True, believing=believing)
    assert found.unchecked == unchecked and not found.passed and len(calls) == 1


def test_where_our_own_answer_does_not_run_nobodys_is_judged(monkeypatch):
    def fails(*_):
        raise check.CourseError("roofline: the check itself does not run here")

    monkeypatch.setattr(check, "expected_run", fails)
    monkeypatch.setattr(check, "run_answers", lambda *_: ([check.Run(kind="OSError", error="x")], outcome()))
    with pytest.raises(check.CourseError, match="does not run here"):
        check.check_answer(find("roofline"), [], 5)


@pytest.mark.parametrize("header", [
    b'{"a": ' + b"[" * 99_000 + b"}", json.dumps({f"t{i}": {} for i in range(9000)}).encode(),
    json.dumps({"a" * 200_000: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode(), b"7", b"[]", b"{"])
def test_an_outputs_file_has_a_short_header_of_few_tensors(tmp_path, monkeypatch, header):
    monkeypatch.setattr(check, "load_tensors", lambda content: pytest.fail("it is not looked at"))
    (tmp_path / "out-0-0.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert check.read_run(tmp_path, 0, 1, outcome(), find("roofline")).kind == "ended"


def test_no_rank_is_named_where_inputs_are_hidden():
    assert check.claim_fact("it holds", ["", "no"]).text == "it holds: no, rank 1: no"
    assert check.claim_fact("it holds", ["", "no"], hidden=True).text == "it holds: no, no"
