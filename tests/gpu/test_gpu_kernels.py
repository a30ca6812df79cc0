"""Lesson 19's kernels between matmuls, compiled: they compute what PyTorch computes, and checks interpret them nevertheless."""

import pytest
import torch

from course.lab.checks import check, notebook_cells
from course.lab.checks.exercise import find, right
from course.lab.exercises import lesson19_kernels as lesson
from course.lab.instruments import kernel_speed
from course.lab.instruments.watched_memory import watched
from course.ops.triton_language import INTERPRETED

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a GPU")
DEVICE = torch.device("cuda")


@pytest.mark.parametrize(("rows", "columns"), [(97, 1152), (1000, 4096), (33, 70)])
@pytest.mark.parametrize("name", kernel_speed.MATRIX_WORK)
def test_results_are_those_of_pytorch_and_the_library(name, rows, columns):
    torch.manual_seed(0)
    work = kernel_speed.MATRIX_WORK[name](rows, columns, DEVICE)
    wanted = [x.double() for x in work.calls.pop("PyTorch")()]
    for who, call in work.calls.items():
        for mine, its in zip(call(), wanted, strict=True):
            assert (mine.reshape(its.shape).double() - its).norm() <= 2**-6 * its.norm(), who


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_takes_any_strides(dtype):
    x, room = torch.randn(300, 700, device=DEVICE).to(dtype), torch.full((320, 720), 5.0, device=DEVICE, dtype=dtype)
    lesson.copy(x.T, room.T[10:710, 10:310])
    assert torch.equal(room[10:310, 10:710], x) and (room[:10] == 5).all() and (room[310:] == 5).all()


@pytest.mark.parametrize(("make", "size"), [
    (kernel_speed.flash_work, (2, 2, 300, 64)), (kernel_speed.flash_backward_work, (2, 2, 300, 64)),
    (kernel_speed.cross_entropy_work, (33, 5001)), (kernel_speed.cross_entropy_work, (70, 50304))])
def test_attention_and_cross_entropy_are_those_of_pytorch(make, size):
    torch.manual_seed(0)
    work = make(*size, DEVICE)
    wanted = work.calls.pop("PyTorch")()
    for who, call in work.calls.items():
        for mine, its in zip(call(), wanted, strict=True):
            assert (mine.double() - its.double()).norm() <= 2**-6 * its.double().norm(), who


def test_kernels_are_watched_under_the_interpreter():
    x, y = torch.randn(30, 50), torch.zeros(30, 50)
    with watched(x, y) as accesses:
        lesson.copy(x, y, 8, 16)
    assert torch.equal(x, y) and len(accesses.programs) == 16 and accesses.loads == [1500, 0]


@pytest.mark.parametrize("name", ["copy", "add-norm", "online-softmax"])
def test_checks_pass_on_a_machine_with_a_gpu(name):
    found = check.check_answer(find(name), notebook_cells.whole_answer(right(find(name))), 1)
    assert found.passed, found


def test_speed_of_an_exercise_is_measured_beside_pytorch():
    speed = kernel_speed.of_exercise("copy", DEVICE)
    assert [*speed] == ["lesson", "PyTorch"] and all(row["GB/s"] > 100 for row in speed.values())
    assert [*kernel_speed.of_exercise("cross-entropy", DEVICE)] == ["lesson", "PyTorch", "library"]
    assert kernel_speed.of_exercise("matmul-cost", DEVICE) == {}
