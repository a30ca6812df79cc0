"""The moving average of the weights, of which a diffusion model draws better than of the last ones.

After every update the average moves a little way, 1 - decay, towards the weights:

    ema = decay · ema + (1 - decay) · weights = ema - (1 - decay) · (ema - weights)

Written so, it is gradient descent on half the square of the distance from the weights, at the rate 1 - decay. The fused SGD
does it in one kernel for all tensors: it reads the weights and the average once, writes the average once, waits for nothing,
can be captured in a graph, and leaves the average alone where the device's flag says that the update was left out.

The average is of what the optimizer updates, so it is cut as that is: ZeRO-1's ranks have the average of their share. It is
the same in every layout. In checkpoints it is `name.ema`. It starts at the first weights. Ho, Jain and Abbeel 2020
(arXiv:2006.11239), appendix B, use a decay of 0.9999.
"""

from typing import Any

import torch
from torch import Tensor, nn

from course.ops import fused_adam


class MovingAverage:
    """Follows what an optimizer updates, as the last act of each of its steps. values: the average of each parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float):
        self.values: dict[nn.Parameter, Tensor] = {
            p: p.detach().clone() for group in optimizer.param_groups for p in group["params"]}
        for parameter, value in self.values.items():
            value.grad = parameter.detach()         # the same memory: maximize turns its sign, weight_decay adds the average
        others = list(self.values)
        if isinstance(optimizer, fused_adam.Adam):        # of large parameters it takes the average along
            optimizer.values, optimizer.follow = self.values, 1 - decay
            others = [p for p in others if not fused_adam.has_own_kernel(p)]
        if others:
            self.follow = torch.optim.SGD([self.values[p] for p in others], 1 - decay, weight_decay=1.0, maximize=True,
                                          fused=True)
            optimizer.register_step_post_hook(self.after)

    def after(self, optimizer: Any, *_: Any) -> None:
        """Move towards the weights, unless the optimizer has left them as they were."""
        self.follow.found_inf = getattr(optimizer, "found_inf", None)                   # type: ignore[attr-defined]
        self.follow.step()


def moving_average(optimizer: torch.optim.Optimizer | None) -> dict[nn.Parameter, Tensor]:
    """The average that follows an optimizer, by parameter; empty where there is none."""
    found = getattr(optimizer, "average", None)
    return found.values if found else {}
