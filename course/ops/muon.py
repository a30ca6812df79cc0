"""Muon: momentum, orthogonalized, for the matrices between embedding and head; AdamW for all other parameters.

A step makes of a matrix's gradient g, momentum m and values w (rows, columns), with learning rate lr:

    m = momentum · m + g
    u = g + momentum · m                                                    Nesterov's look ahead
    o = U Vᵀ, roughly, where u = U S Vᵀ                                     all singular values become about 1
    w = w - lr · (0.2 · sqrt(max(rows, columns)) · o + weight_decay · w)    decoupled decay, as AdamW's

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon) orthogonalize with five Newton-Schulz iterations, which are matmuls
only. Liu et al. 2025 (arXiv:2502.16982, "Moonlight") found the factor 0.2 · sqrt(max(rows, columns)): the update's elements are
then as large as AdamW's, so AdamW's learning rate and weight decay carry over.

A weight with three or more logical dims is a stack of matrices, one for each index of its first dim. A fused QKV is three. With
grouped queries, each head of a group is one. SwiGLU's `up` is two.

Orthogonalization needs whole matrices, and a rank may hold a part of one. An `Exchange` collects the parts and returns the
results (`course/parallel/whole_weights.py`).
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

ITERATIONS = 5
A, B, C = 3.4445, -4.7750, 2.0315                   # x -> A x + B x³ + C x⁵ sends (0, 1] to about 0.7 to 1.2 in five iterations
TINY = 1e-30                                        # least norm: a matrix of zeros stays zero
RMS = 0.2                                           # of AdamW's updates, as Liu et al. measured


class Exchange(Protocol):
    """Ranks that hold parts of the same weights work together: each orthogonalizes some of them, whole."""

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """From this rank's parts, one for each weight, to the weights that it works on, whole, in their logical shapes."""

    def scatter(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """From the results of the weights that `gather` returned to this rank's parts of all results, flat."""


class Muon(torch.optim.Optimizer):
    """Muon for `hidden` parameters, PyTorch's fused AdamW for `others`.

    lr: (), on the device. dtype: of the orthogonalization and its communication. options: more arguments of AdamW. The training
    step sets `grad_scale` and `found_inf`, (), on the device: the divisor of gradients, and 1 to change nothing. The states of a
    hidden parameter are its `momentum`, those of the others AdamW's.
    """

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(self, hidden: Sequence[nn.Parameter], others: Sequence[nn.Parameter], exchange: Exchange, lr: Tensor,
                 beta: float, weight_decay: float, dtype: torch.dtype, **options: Any):
        super().__init__([{"params": [*hidden]}, {"params": [*others]}], {"lr": lr, "weight_decay": weight_decay})
        self.hidden, self.exchange, self.beta, self.dtype = [*hidden], exchange, beta, dtype
        self.adamw: Any = torch.optim.AdamW([{"params": [*others]}], lr, weight_decay=weight_decay, fused=True, **options)
        self.adamw.state = self.state               # one for all, which checkpoints read and write
        for parameter in hidden:
            self.state[parameter]["momentum"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:                        # type: ignore[override]
        """Update all parameters. All ranks call it together."""
        self.update_hidden()
        self.adamw.grad_scale, self.adamw.found_inf = self.grad_scale, self.found_inf
        self.adamw.step()

    def update_hidden(self) -> None:
        """Update the hidden parameters."""
        group, skip = self.param_groups[0], self.found_inf > 0
        rate = group["lr"].double()                 # float32 would round 1 - rate · decay, which is close to 1
        wholes = self.exchange.gather([self.next_momentum(p, skip) for p in self.hidden])
        updates = self.exchange.scatter([orthogonal_update(whole) for whole in wholes])
        for parameter, update in zip(self.hidden, updates, strict=True):
            new = parameter * (1 - rate * group["weight_decay"]) - rate * update.view(parameter.shape)
            parameter.copy_(torch.where(skip, parameter, new))

    def next_momentum(self, parameter: nn.Parameter, skip: Tensor) -> Tensor:
        """Add a parameter's gradient to its momentum, unless skip, (), is true. Returns Nesterov's look ahead."""
        momentum = self.state[parameter]["momentum"]
        given = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient = given.to(parameter.dtype) / self.grad_scale
        momentum.copy_(torch.where(skip, momentum, self.beta * momentum + gradient))
        return (gradient + self.beta * momentum).to(self.dtype)


def orthogonal_update(weight: Tensor) -> Tensor:
    """What a weight of logical shape (rows, columns) or (n, ..., columns), n matrices, loses for a learning rate of 1."""
    stacked = weight.flatten(1, -2) if weight.dim() > 2 else weight                     # (n, rows, columns) or (rows, columns)
    return (RMS * math.sqrt(max(stacked.shape[-2:])) * orthogonalize(stacked)).view(weight.shape)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Send the singular values of matrices (..., rows, columns) to about 1, by Newton-Schulz iterations in their dtype."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices           # (..., m, n), m <= n: the products below are (..., m, m)
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide)          # at least the largest singular value
    x = (x / norm.clamp(min=TINY)).to(x.dtype)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = A * x + (B * square + C * square @ square) @ x
    return x.mT if tall else x
