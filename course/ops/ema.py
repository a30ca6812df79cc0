"""Exponential moving average (EMA) of the weights; a diffusion model samples better with it than with the last weights.

After every update the average moves by a fraction, 1 - decay, towards the weights:

    ema = decay · ema + (1 - decay) · weights = ema - (1 - decay) · (ema - weights)

The second form is gradient descent on half the squared distance from the weights, with learning rate 1 - decay. PyTorch's fused
SGD does it in one kernel for all tensors. The kernel reads weights and average once and writes the average once. It needs no
synchronization, can be captured in a CUDA graph, and skips the update if the device flag says that the optimizer skipped its own.

The optimizer's parameters are averaged, so the average has their sharding: with ZeRO-1 each rank averages its shard. The
result is the same in every layout. Checkpoints store it as `name.ema`. It starts at the initial weights. Ho, Jain and Abbeel
2020 (arXiv:2006.11239), appendix B, use a decay of 0.9999.
"""

from typing import Any

import torch
from torch import Tensor, nn

from course.ops import fused_adam


class MovingAverage:
    """Averages an optimizer's parameters at the end of each of its steps. values: the average of each parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float):
        self.values: dict[nn.Parameter, Tensor] = {
            p: p.detach().clone() for group in optimizer.param_groups for p in group["params"]}
        for parameter, value in self.values.items():
            value.grad = parameter.detach()         # shares memory; maximize negates it, weight_decay=1 adds the average
        others = list(self.values)
        if isinstance(optimizer, fused_adam.Adam):        # it updates the average of large parameters itself
            optimizer.values, optimizer.follow = self.values, 1 - decay
            others = [p for p in others if not fused_adam.has_own_kernel(p)]
        if others:
            self.follow = torch.optim.SGD([self.values[p] for p in others], 1 - decay, weight_decay=1.0, maximize=True,
                                          fused=True)
            optimizer.register_step_post_hook(self.after)

    def after(self, optimizer: Any, *_: Any) -> None:
        """Move the average towards the weights, unless the optimizer skipped its update."""
        self.follow.found_inf = getattr(optimizer, "found_inf", None)                   # type: ignore[attr-defined]
        self.follow.step()


def moving_average(optimizer: torch.optim.Optimizer | None) -> dict[nn.Parameter, Tensor]:
    """The moving average of an optimizer's parameters; empty if it has none."""
    found = getattr(optimizer, "average", None)
    return found.values if found else {}
