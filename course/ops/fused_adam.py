"""Fused Adam for `kernels=triton`: updates the weights, their moving average and their 16-bit copies in one pass.

The update equals PyTorch's fused Adam (Kingma and Ba 2014, arXiv:1412.6980) followed by `course.ops.ema`. Weight decay is either
added to the gradient or, decoupled, applied to the weight (AdamW, Loshchilov and Hutter 2017, arXiv:1711.05101). The states are
the same too, so checkpoints are interchangeable. Each large float32 parameter on a GPU gets its own launch of the Triton kernel
(`fused_adam_triton.py`). PyTorch's fused Adam updates the many small ones in a few kernels.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

LARGE = 2**18                                       # elements: from this size on, an own kernel launch pays off


class Adam(torch.optim.Adam):
    """PyTorch's fused Adam, which also updates the moving average of `has_own_kernel` parameters. Gradients may have 16 bits.

    The training step sets `grad_scale` and `found_inf` on the device, as for PyTorch's. values: the average of each parameter;
    follow: the fraction by which it moves towards the weights (`MovingAverage` sets both). copies: the 16-bit weights that the
    model computes with, by parameter (`course/parallel/data_parallel/master_weights.py`).
    """

    grad_scale: Tensor
    found_inf: Tensor
    values: dict[nn.Parameter, Tensor] | None = None
    copies: Mapping[nn.Parameter, Tensor] = MappingProxyType({})
    follow = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:                        # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            for p in held:
                self.init_state(p)
            self.update_with_kernel([p for p in held if has_own_kernel(p)], group)
            self.update_with_pytorch([p for p in held if not has_own_kernel(p)], group)
            for p in group["params"]:
                if self.values and p.grad is None and has_own_kernel(p):       # frozen: its average still moves towards it
                    self.values[p].lerp_(p, self.follow * (1 - self.found_inf))

    def init_state(self, p: nn.Parameter) -> None:
        """Create a parameter's states at its first update, with PyTorch's names and dtypes."""
        if not self.state[p]:
            self.state[p] |= {"step": torch.zeros((), dtype=torch.float32, device=p.device), "exp_avg": torch.zeros_like(p),
                              "exp_avg_sq": torch.zeros_like(p)}

    def update_with_kernel(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update large parameters, each with one kernel."""
        if not parameters:
            return
        from course.ops import fused_adam_triton  # imports Triton, which only machines with GPUs have

        steps = [self.state[p]["step"] for p in parameters]
        torch._foreach_add_(steps, 1)
        for p in parameters:
            own, grad = self.state[p], p.grad
            assert grad is not None                  # `parameters` are those with one
            fused_adam_triton.update(p, grad.contiguous(), own["exp_avg"], own["exp_avg_sq"],
                               self.values[p] if self.values else None, self.copies.get(p), own["step"], group["lr"],
                               self.grad_scale,
                               self.found_inf, group["betas"], group["eps"], group["weight_decay"], self.follow,
                               group["decoupled_weight_decay"])
        torch._foreach_sub_(steps, [self.found_inf] * len(steps))       # a list: one tensor would be read on the host

    def update_with_pytorch(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update the other parameters with PyTorch's fused Adam."""
        own = [self.state[p] for p in parameters]
        first, second, steps = ([states[name] for states in own] for name in ("exp_avg", "exp_avg_sq", "step"))
        if parameters:
            adam([*parameters], cast_gradients(parameters), first, second, [], steps, fused=True, grad_scale=self.grad_scale,
                 found_inf=self.found_inf, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
                 weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
                 decoupled_weight_decay=group["decoupled_weight_decay"])
        masters = [p for p in parameters if p in self.copies]
        if masters:
            torch._foreach_copy_([self.copies[p] for p in masters], [*masters])


def cast_gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    """The gradients in the parameters' dtypes, which PyTorch's kernel requires."""
    found = [p.grad for p in parameters if p.grad is not None]
    narrow = [i for i, p in enumerate(parameters) if found[i].dtype != p.dtype]
    if narrow:
        wide = [torch.empty_like(parameters[i]) for i in narrow]
        torch._foreach_copy_(wide, [found[i] for i in narrow])
        for i, gradient in zip(narrow, wide, strict=True):
            found[i] = gradient
    return found


def has_own_kernel(p: Tensor) -> bool:
    """Whether the Triton kernel updates a parameter: large, float32, contiguous and on a GPU."""
    return p.is_cuda and p.dtype == torch.float32 and p.numel() >= LARGE and p.is_contiguous()
