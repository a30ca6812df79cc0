"""What lesson 21 compares answers with is right: it agrees with one process that has all experts and all rows."""

import pytest
import torch

from course.lab.exercises import lesson21_experts as lesson
from course.ranks.notebook_ranks import ranks


def serial(inputs):
    """Each rank's rows, outputs and gradients, and the gradients of all experts, in one process."""
    weights = inputs["weights"].clone().requires_grad_()
    parts = [inputs["rows"][rank, :n].clone().requires_grad_() for rank, n in enumerate(inputs["lengths"])]
    experts = [inputs["experts"][rank, :n] for rank, n in enumerate(inputs["lengths"])]
    outputs = [torch.einsum("nd,nde->ne", rows, weights[expert]) for rows, expert in zip(parts, experts, strict=True)]
    total = sum((y * inputs["grads"][rank, :len(y)]).sum() for rank, y in enumerate(outputs))
    gradients = torch.autograd.grad(total, [*parts, weights])
    return outputs, gradients[:-1], gradients[-1]


@pytest.mark.parametrize("hidden", [False, True])
def test_rows_through_spread_experts_match_one_process(hidden):
    inputs = lesson.draw_rows(3, hidden)
    outputs, rows, weights = serial(inputs)
    found = ranks(4)(lesson.run_through_experts, inputs)
    for rank, each in enumerate(found):
        assert torch.allclose(each["all"], outputs[rank]) and torch.allclose(each["all_rows"], rows[rank])
        assert torch.allclose(each["pair"], outputs[rank]) and torch.allclose(each["pair_rows"], rows[rank])
        assert (each["computed"], each["sent"]) == (1, 1)
    assert torch.allclose(torch.cat([each["all_weights"] for each in found]), weights)


def test_exchanged_rows_and_gradients_are_where_they_belong():
    inputs = lesson.draw_rows(3, True)
    number = len(inputs["weights"])
    found = ranks(4)(lesson.run_exchange_rows, inputs)
    for rank, each in enumerate(found):
        parts = []
        for source, n in enumerate(inputs["lengths"]):
            experts = inputs["experts"][source, :n].sort().values
            parts.append(inputs["rows"][source, :n][experts * 4 // number == rank])
        assert torch.equal(each["all"], torch.cat(parts)) and each["sent"] == 1


def test_the_balance_loss_is_one_for_balanced_experts():
    experts = torch.arange(12)[:, None] % 4
    even = torch.full((12, 4), 0.25)
    assert lesson.balance_loss(even, experts) == 1
    one = torch.eye(4)[[0] * 12]
    assert lesson.balance_loss(one, torch.zeros(12, 1, dtype=torch.long)) == 4      # all tokens with one expert: E
