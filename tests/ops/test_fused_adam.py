"""Fused Adam without a GPU: a formula in its kernel's place, and parameters that count as large."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from course.ops import fused_adam
from course.ops.ema import MovingAverage


def update(weight, grad, first, second, average, copy, step, rate, scale, found, betas, eps, decay, follow, decoupled):
    """What `fused_adam_triton.update` does."""
    if found == 0:
        grad = grad.float() / scale
        if decoupled:
            weight *= 1 - rate * decay
        else:
            grad += decay * weight
        first.lerp_(grad, 1 - betas[0])
        second.lerp_(grad**2, 1 - betas[1])
        weight -= rate * first / (1 - betas[0]**step) / ((second / (1 - betas[1]**step)).sqrt() + eps)
        if average is not None:
            average.lerp_(weight, follow)
        if copy is not None:
            copy.copy_(weight)


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    monkeypatch.setitem(sys.modules, "course.ops.fused_adam_triton", SimpleNamespace(update=update))
    monkeypatch.setattr("course.ops.fused_adam.has_own_kernel", lambda p: p.numel() > 10)


def trained(kind, ema, betas=(0.9, 0.999), **options):
    """Parameters, states and averages after six steps: the third and fifth are skipped, before the fourth one is frozen."""
    torch.manual_seed(0)
    held = [nn.Parameter(torch.randn(shape)) for shape in ((4, 5), (7,), (3, 6))]
    optimizer = kind(held, torch.tensor(1e-2), betas, 1e-8, 0.1, fused=True, **options)
    average = MovingAverage(optimizer, ema) if ema else None
    for number in range(6):
        for p in held:
            p.grad = torch.randn(p.shape) * 4
        if number > 2:
            held[2].grad = None
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(float(number in (2, 4)))
        optimizer.step()
    states = {f"{i} {name}": optimizer.state[p][name] for i, p in enumerate(held) for name in sorted(optimizer.state[p])}
    return {**dict(enumerate(p.detach() for p in held)), **states,
            **({f"{i} ema": average.values[p] for i, p in enumerate(held)} if average else {})}


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.0)])
def test_parameters_states_and_averages_are_those_of_pytorchs(ema, betas):
    torch.testing.assert_close(trained(fused_adam.Adam, ema, betas), trained(torch.optim.Adam, ema, betas), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_decoupled_decay_is_that_of_pytorchs_adamw(ema):
    with_kernel = trained(fused_adam.Adam, ema, decoupled_weight_decay=True)
    torch.testing.assert_close(with_kernel, trained(torch.optim.AdamW, ema), rtol=1e-5, atol=1e-6)
    assert (with_kernel[0] - trained(fused_adam.Adam, ema)[0]).abs().max() > 1e-3
