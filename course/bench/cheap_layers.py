"""What stands for attention or MLP where only the kernels around them are measured (`kernel_table.py`).

A module of its own, which is loaded once however a program is started: an operator that is made a second time leaves whoever has
the first with memory that is gone.
"""

import torch
from torch import Tensor, nn


@torch.library.custom_op("course::cheap_layer", mutates_args=())
def cheap_layer(x: Tensor) -> Tensor:
    """What a matmul would put out, in the shape of x, for which nothing is computed: memory that nobody wrote. Its gradient is no
    better."""
    return torch.empty_like(x)


cheap_layer.register_fake(torch.empty_like)
cheap_layer.register_autograd(lambda ctx, grad: cheap_layer(grad))


class CheapLayer(nn.Module):
    """In the place of attention or MLP. The compiler cannot look inside, so it makes the kernels around it that a block has."""

    def __init__(self, low: torch.dtype):
        super().__init__()
        self.low = low

    def forward(self, x: Tensor) -> Tensor:                             # (B, T, D) -> (B, T, D)
        return cheap_layer(x.to(self.low))                                 # as autocast hands it to a linear
