"""The optimizers of a run: one update, by its formula."""

import pytest
import torch
from torch import nn

from course import config
from course.training.optimizer import build_optimizer

DECAY, RATE = 0.5, 0.1


def updated(name, gradient, *settings):
    """A weight of ones after one update with a gradient."""
    weight = nn.Parameter(torch.ones(gradient.shape, dtype=torch.float64))
    c = config.load("vit-demo", [f"optim.name={name}", f"optim.weight_decay={DECAY}", "precision=fp64", *settings])
    optimizer = build_optimizer([weight], torch.tensor(RATE), c)
    weight.grad = gradient
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(0.0)
    optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("kernels", ["pytorch", "triton"])
def test_adamw_shrinks_weights_and_adam_adds_decay_to_gradients(kernels):
    """The first step of Adam moves each weight by the learning rate, against the sign of what it takes as the gradient."""
    gradient = torch.tensor([-0.2, 0.3, 0.7, 2.0], dtype=torch.float64)
    torch.testing.assert_close(updated("adamw", gradient, f"kernels={kernels}"), 1 - RATE * DECAY - RATE * gradient.sign(),
                               rtol=0, atol=1e-6)
    torch.testing.assert_close(updated("adam", gradient, f"kernels={kernels}"), 1 - RATE * (gradient + DECAY).sign(),
                               rtol=0, atol=1e-6)
