"""Lesson 19's FlashAttention, compiled: it computes what the formula says, in tiles that T fits and in such that it does not."""

import pytest
import torch

from course.lab.exercises import lesson19_flash_attention as lesson
from course.lab.exercises.lesson19_flash_attention import Tiles
from course.ops.triton_language import INTERPRETED

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a GPU")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T", [37, 256, 1000])
@pytest.mark.parametrize(("D", "tiles"), [(16, Tiles(32, 16)), (64, Tiles(64, 64)), (64, Tiles(64, 32, 4, 2)),
                                          (128, Tiles(64, 64, 8, 2))])
def test_attention_and_its_gradients_are_those_of_float64(D, tiles, T, causal):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, T, 3, 3, D, device="cuda").bfloat16().permute(2, 0, 3, 1, 4)
    dy = torch.randn(2, T, 3, D, device="cuda").bfloat16().transpose(1, 2)
    y, lse = lesson.flash_forward(q, k, v, causal, tiles)
    gradients = lesson.flash_backward(q, k, v, y, lse, dy, causal, tiles, tiles)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = lesson.plain_attention(*leaves, causal)
    for mine, its in zip((y, *gradients), (wanted, *torch.autograd.grad(wanted, leaves, dy.double())), strict=True):
        assert (mine.double() - its).norm() <= 2**-7 * its.norm()
    again = lesson.flash_backward(q, k, v, y, lse, dy, causal, tiles, tiles)
    assert all(torch.equal(one, other) for one, other in zip(gradients, again, strict=True))
