"""A stand-in for attention or MLP, to measure only the kernels around them (`kernel_table.py`).

This is a separate module, so that it loads only once: registering an operator twice frees memory that the first one still uses.
"""

import torch
from torch import Tensor, nn


@torch.library.custom_op("course::cheap_layer", mutates_args=())
def cheap_layer(x: Tensor) -> Tensor:
    """Uninitialized memory in the shape of x, in place of a matmul's output. Its gradient is uninitialized too."""
    return torch.empty_like(x)


cheap_layer.register_fake(torch.empty_like)
cheap_layer.register_autograd(lambda ctx, grad: cheap_layer(grad))


class CheapLayer(nn.Module):
    """Replaces attention or MLP. The compiler cannot look inside, so it generates the same kernels around it as in a block."""

    def __init__(self, low: torch.dtype):
        super().__init__()
        self.low = low

    def forward(self, x: Tensor) -> Tensor:                             # (B, T, D) -> (B, T, D)
        return cheap_layer(x.to(self.low))                              # as autocast passes it to a linear
