"""Counts of collectives and of what is kept for the backward pass."""

import pytest
import torch
import torch.distributed as dist

from course.lab.instruments import bytes_sent, tensor_memory
from course.lab.instruments.bytes_sent import Collective
from course.ranks.notebook_ranks import ranks


@pytest.mark.parametrize(("op", "sent"), [("all-reduce", 150.0), ("all-gather", 300.0), ("reduce-scatter", 75.0),
                                          ("all-to-all", 75.0), ("send to 1", 100.0), ("recv from 1", 0.0)])
def test_what_a_ring_of_four_sends(op, sent):
    assert Collective(op, (0, 1, 2, 3), 100).sent == sent


def call() -> tuple[float, list[Collective]]:
    def work() -> float:
        x = torch.ones(3, 4)
        dist.all_reduce(x)
        dist.all_gather_into_tensor(torch.empty(6, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
        return x.sum().item()

    return bytes_sent.collectives(work)


def test_collectives_are_counted_with_their_bytes():
    result, calls = ranks(2)(call)[0]
    assert result == 24.0
    assert calls == [Collective("all-reduce", (0, 1), 48), Collective("all-gather", (0, 1), 24)]


def test_what_backward_needs_is_counted_once_and_parameters_are_not():
    weight, x = torch.ones(5, 5, requires_grad=True), torch.ones(7, 5, requires_grad=True)
    y, kept = tensor_memory.saved_for_backward(lambda: (x @ weight).exp(), [weight])
    assert kept == x.nbytes + y.nbytes
    _, kept = tensor_memory.saved_for_backward(lambda: (x * x, x.view(5, 7) * x.view(5, 7)), [weight])
    assert kept == x.nbytes                          # four times, under two shapes
    _, kept = tensor_memory.saved_for_backward(lambda: x @ weight)
    assert kept == x.nbytes + weight.nbytes
