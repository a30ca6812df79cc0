"""Permuting tokens to experts and back: gradients are those of indexing, and choices without a row count nothing."""

import torch

from course.ops.permutation import permute, unpermute

ORDER = torch.tensor([[4, 0], [1, -1], [3, 2]])      # token 1 has one row; row 5 belongs to no token
TOKEN = torch.tensor([0, 1, 2, 2, 0, 1])


def through(x, gates):
    return unpermute(permute(x, TOKEN, ORDER).square(), ORDER, gates)


def test_values():
    x, gates = torch.randn(3, 4, dtype=torch.float64), torch.rand(3, 2, dtype=torch.float64)
    share = torch.where(ORDER >= 0, gates, 0).sum(1, keepdim=True)
    assert torch.allclose(through(x, gates), share * x.square())


def test_gradients():
    given = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(through, given)


def test_sums_are_in_float32_and_rounded_once():
    """1 + 2^-8 + 2^-8 in bf16: added one after the other, each small one would be lost."""
    rows = torch.tensor([[1.0], [2**-8], [2**-8]], dtype=torch.bfloat16)
    assert unpermute(rows, torch.tensor([[0, 1, 2]]), torch.ones(1, 3)).item() == 1 + 2**-7
