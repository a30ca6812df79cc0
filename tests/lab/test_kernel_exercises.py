"""Lesson 19's softmax and LayerNorm: what answers are compared with agrees with PyTorch in float64, in one block or several."""

import pytest
import torch
import torch.nn.functional as F

from course.lab.exercises import lesson19_kernels as lesson

pytest.importorskip("triton")


@pytest.mark.parametrize("columns", [1, 64, 65])
def test_softmax_of_rows_is_pytorchs(columns):
    x = 10 * torch.randn(5, columns, generator=torch.Generator().manual_seed(0))
    y = torch.empty_like(x)
    lesson.softmax(x, y)
    torch.testing.assert_close(y.double(), x.double().softmax(-1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("tokens", "rows"), [(1, 4), (8, 4), (9, 4), (9, 32)])
def test_sum_and_norm_and_gradients_are_pytorchs(tokens, rows):
    x, y, dz, dn = torch.randn(4, tokens, 48, generator=torch.Generator().manual_seed(0))
    weight, bias = torch.randn(2, 48, generator=torch.Generator().manual_seed(1))
    z, n, dx = (torch.empty_like(x) for _ in range(3))
    mean, rstd = torch.empty(2, tokens)
    lesson.add_norm(x, y, weight, bias, z, n, mean, rstd, 1e-5, rows)
    parts = torch.empty(2, -(-tokens // rows), 48)
    sums = lesson.add_norm_backward(dz, dn, z, weight, mean, rstd, dx, parts, rows)

    leaves = [t.double().requires_grad_() for t in (x, y, weight, bias)]
    total = leaves[0] + leaves[1]
    norm = F.layer_norm(total, (48,), *leaves[2:])
    wanted = torch.autograd.grad((total, norm), leaves, (dz.double(), dn.double()))
    for mine, its in ((z, total), (n, norm), (dx, wanted[0]), (dx, wanted[1]), (sums[0], wanted[2]), (sums[1], wanted[3])):
        torch.testing.assert_close(mine.double(), its.detach(), rtol=1e-4, atol=1e-5)
