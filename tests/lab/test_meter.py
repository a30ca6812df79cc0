"""Bytes that are alive: made within the context, counted once, gone when freed."""

import torch

from course.lab.instruments.tensor_memory import MemoryMeter


def test_it_counts_what_is_made_and_forgets_what_is_freed():
    given = torch.ones(1000)
    with MemoryMeter() as meter:
        a = given * 2
        assert meter.now == 4000
        view = a.view(10, 100)[2:]
        given.add_(view.sum())                       # neither a view nor what was there before counts again
        b = a + 1
        del a
        assert meter.now == 8000                     # the view keeps it
        del view
        assert meter.now == 4000 and 8000 <= meter.peak <= 8100
        b[0] = 1
    assert meter.now == 4000


def test_it_sees_what_autograd_keeps():
    x = torch.ones(100, 100, requires_grad=True)
    with MemoryMeter() as meter:
        y = x.exp().sin().sum()
        kept = meter.now
        y.backward()
    assert 40_000 <= kept <= 40_100                  # exp's output, which sin needs too; sin's own output is free
    assert meter.now <= 40_100                       # the gradient of x
