"""What a check of lesson 19 says of a kernel that does not run, and several answers in one process."""

import pytest

from course.lab.checks import check, notebook_cells
from course.lab.checks.exercise import find, right

pytest.importorskip("triton")


def runs_of(name, *sources):
    exercise = find(name)
    return check.run_answers(exercise, [(notebook_cells.whole_answer(source), exercise.draw(1, False)) for source in sources],
                             1, None)[0]


def test_an_error_inside_a_kernel_names_the_learners_line():
    source = right(find("online-softmax"))
    blank = source.replace("return new", 'raise NotImplementedError("not implemented yet")\n    return new')
    wrong = source.replace("return new", "return mew")
    unwritten, misspelt = runs_of("online-softmax", blank, wrong)
    assert check.describe_stop(find("online-softmax"), unwritten) == check.UNWRITTEN
    assert misspelt.kind == "NameError" and "return mew, total, y" in misspelt.error


@pytest.mark.slow
def test_a_kernel_keeps_no_lines_of_a_longer_answer_before_it():
    source = right(find("flash-forward"))
    longer = source.replace("    store_tile(y +", "    sums = total\n    store_tile(y +")
    longer = longer.replace("tl.log2(total)", "tl.log2(sums)")
    one, other = runs_of("flash-forward", longer, source)
    assert not one.error and not other.error


def test_a_kernel_that_reads_elsewhere_does_not_crash_the_check():
    astray = right(find("flash-forward")).replace("k += head_offset", "k += 10**12 + head_offset")
    run, = runs_of("flash-forward", astray)
    assert not run.error and run.outputs[0]["guards"] == 0.5           # it only read


def compile_error(name, old, new, head=""):
    source = right(find(name))
    assert old in source
    run, = runs_of(name, head + source.replace(old, new))
    assert run.kind == "DoesNotCompile" and check.describe_stop(find(name), run) == run.error
    assert check.hint_for_error(find(name), run, 1, False, 1, pytest.fail) == run.cure
    return run.error


@pytest.mark.slow
def test_what_a_gpu_does_not_run_is_named_with_its_line():
    said = compile_error("fused-gelu", "0.7978845608028654", "FACTOR", "FACTOR = 0.7978845608028654\n")
    assert said.startswith("your kernel runs in the interpreter, but does not compile for a GPU: Cannot access global variable "
                           "FACTOR\nline 17 of the cell with the answer: u = FACTOR * (z")
    said = compile_error("online-softmax", "return new, total, y", "return new, total, y.to(v.dtype)")
    assert "Loop-carried variable out" in said


def test_a_misspelled_name_needs_no_search_for_known_mistakes():
    run = check.Run(kind="NameError", error="NameError: name 'x_rwo' is not defined")
    assert "read the error first" in check.hint_for_error(find("copy"), run, 1, False, 1, pytest.fail)
