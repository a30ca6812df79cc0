"""What a learner's function returned, in sentences."""

import pytest
import torch

from course.lab.checks import check, notebook_cells, return_values
from course.lab.checks.exercise import find, right


@pytest.mark.parametrize(("call", "text", "cure"), [
    (lambda: return_values.number(None, "f"), "`f` returned None; expected a number", "did you forget it?"),
    (lambda: return_values.number("x" * 99, "f"), "returned a str ('xxx", "one number"),
    (lambda: return_values.number((1, 2), "f"), "returned a tuple of 2", "one number"),
    (lambda: return_values.pair(3, "f", "(a, b)"), "`f` returned an int (3); expected a pair, (a, b)", "comma"),
    (lambda: return_values.pair((1, 2, 3), "f", "(a, b)"), "returned a tuple of 3", "(a, b)"),
    (lambda: return_values.several(None, "f", "a list"), "`f` returned None; expected a list", "did you forget it?"),
    (lambda: return_values.several(3.0, "f", "a list of pairs"), "returned a float (3.0)", "return a list of pairs"),
    (lambda: return_values.function(None, "f", "g"), "`f` returned None; expected the function `g`", "did you forget it?"),
    (lambda: return_values.function(torch.ones(2), "f", "g"), "returned a tensor of shape (2,)", "`return g`"),
    (lambda: return_values.tensor(0.5, "f", (), torch.float64), "`f` returned a float (0.5); expected a scalar tensor",
     ".item()"),
    (lambda: return_values.tensor(None, "f", (), torch.float64), "`f` returned None; expected a scalar tensor",
     "did you forget it?"),
    (lambda: return_values.tensor((1, 2), "f", (), torch.float64), "returned a tuple of 2", "return a scalar tensor"),
    (lambda: return_values.tensor(torch.ones(3), "f", (), torch.float32), "shape (3,); expected a scalar tensor", "summed"),
    (lambda: return_values.tensor(torch.ones(3), "f", (2,), torch.float32), "shape (3,); expected a tensor of shape (2,)",
     "summed"),
    (lambda: return_values.tensor(torch.ones(()), "f", (), torch.float64, " as x"), "torch.float32 as x; expected torch.float64",
     "zeros_like"),
    (lambda: return_values.tensor(torch.ones(2).sum().long(), "f", (), torch.float64), "type torch.int64", ".to(target.dtype)"),
    (lambda: return_values.tensor(torch.ones(()) > 0, "f", (), torch.float64), "type torch.bool", ".to(target.dtype)"),
    (lambda: return_values.tensor(6, "f", (), torch.float64, " as the weight"), "an int (6) as the weight", "padding"),
    (lambda: return_values.tensor(torch.ones((), dtype=torch.float64), "f", (), torch.float32), "expected torch.float32",
     "type"),
    (lambda: return_values.takes(lambda: 0, "f", "one argument, x", 1), "`f` must take one argument, x", "parentheses"),
])
def test_a_wrong_return_value_is_a_sentence_with_a_cure(call, text, cure):
    with pytest.raises(return_values.InvalidReturn) as caught:
        call()
    assert text in caught.value.text and cure in caught.value.cure


def test_right_return_values_pass_through():
    scalar = torch.ones((), dtype=torch.float64)
    assert return_values.number(3, "f") == return_values.number(scalar * 3, "f") == 3.0
    assert return_values.several((1, 2), "f", "") == [1, 2]
    assert return_values.pair([1, 2], "f", "") == (1, 2) and return_values.function(len, "f", "g") is len
    assert return_values.tensor(scalar, "f", (), torch.float64) is scalar


L2_RETURNS = "return (error / size * weight).sum(), weight.sum()"
STEP_RETURNS = "return loss.detach()"


# exercise, what is replaced in its answer and by what, what is said of it
SLIPS = [
    ("relative-l2", L2_RETURNS, L2_RETURNS.removeprefix("return "), "`forward` returned None", "forget"),
    ("relative-l2", L2_RETURNS, "return weight.sum(), (error / size * weight).sum()", "the weight first", "in this order"),
    ("relative-l2", ", weight.sum()", "", "expected a pair, (sum, weight)", "comma"),
    ("relative-l2", ").sum(), ", ").sum().item(), ", "a float", ".item()"),
    ("relative-l2", ").sum(), ", ").sum().detach(), ", "has no gradient", ".detach()"),
    ("relative-l2", ").sum(), ", "), ", "shape (6,) as the sum", "summed"),
    ("training-step", STEP_RETURNS, "", "`training_step` returned None", "forget"),
    ("training-step", STEP_RETURNS, "return loss.item()", "a float", ".item()"),
    ("training-step", STEP_RETURNS, "return loss.detach().float()", "expected torch.float64", ".float()"),
    ("training-step", STEP_RETURNS, "return total, weight", "a tuple of 2", "scalar"),
    ("accumulate", "def compute(batch: Batch)", "def compute()", "`compute` must take one argument, the batch", "parentheses"),
    ("accumulate", "    return compute\n", "", "`eager` returned None", "forget"),
    ("accumulate", "return loss ", "loss ", "`compute` returned None", "forget"),
    ("accumulate", "return loss ", "return loss.item() ", "a float", ".item()"),
    ("loss-scaler", "good = torch.where(bad > 0, 0, good + 1)", "good = good * 0 if bad > 0 else good + 1",
     "the value of a tensor", "torch.where"),
    ("named-parts", "@contextmanager\n", "", "expected something for `with`", "@contextmanager"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", dict.fromkeys(name for name, *_ in SLIPS))
def test_exercises_look_at_what_is_returned(name):
    """All of an exercise's in one process."""
    exercise, slips = find(name), [slip for of, *slip in SLIPS if of == name]
    assert all(old in right(exercise) for old, *_ in slips)
    inputs = exercise.draw(5, False)
    sources = [right(exercise).replace(old, new) for old, new, *_ in slips]
    runs, _ = check.run_answers(exercise, [(notebook_cells.whole_answer(source), inputs) for source in sources], 1, None)
    for run, (_, new, text, cure) in zip(runs, slips, strict=True):
        facts, hint = check.compare_run(exercise, run, 5, False, 1)
        assert not facts[0].held and text in facts[0].text and cure in hint, (new, facts, hint)
        assert "line" not in hint                    # which no line of theirs raised
