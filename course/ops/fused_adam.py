"""Adam that follows the weights with their average, and writes their copies in 16 bits, in the same pass, with `kernels=triton`.

It updates parameters as PyTorch's fused Adam does (Kingma and Ba 2014, arXiv:1412.6980) and `course.ops.ema` after it, and
has their states, so that checkpoints of either go on with the other. Large float32 parameters on a GPU have a kernel of their
own, `fused_adam_triton.py`; the rest, many and short, are PyTorch's, in a few kernels for all.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

LARGE = 2**18                                       # numbers from which on a parameter's own kernel is worth its launch


class Adam(torch.optim.Adam):
    """PyTorch's fused Adam; of the parameters that are `has_own_kernel` it takes the average along. Gradients may be in 16 bits.

    The step sets `grad_scale` and `found_inf`, on the device, as for PyTorch's. values, follow: the average of each parameter
    and the share of the way to the weights that it goes (`MovingAverage` sets them). copies: what the model computes with in the
    place of a parameter, in 16 bits, if it does (`course/parallel/data_parallel/master_weights.py`).
    """

    grad_scale: Tensor
    found_inf: Tensor
    values: dict[nn.Parameter, Tensor] | None = None
    copies: Mapping[nn.Parameter, Tensor] = MappingProxyType({})
    follow = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:                        # type: ignore[override]
        """One update of all parameters that have a gradient."""
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            for p in held:
                self.init_state(p)
            self.update_with_kernel([p for p in held if has_own_kernel(p)], group)
            self.update_with_pytorch([p for p in held if not has_own_kernel(p)], group)
            for p in group["params"]:
                if self.values and p.grad is None and has_own_kernel(p):       # frozen, and its average may not be there yet
                    self.values[p].lerp_(p, self.follow * (1 - self.found_inf))

    def init_state(self, p: nn.Parameter) -> None:
        """A parameter's states, at its first update: PyTorch's names and formats."""
        if not self.state[p]:
            self.state[p] |= {"step": torch.zeros((), dtype=torch.float32, device=p.device), "exp_avg": torch.zeros_like(p),
                              "exp_avg_sq": torch.zeros_like(p)}

    def update_with_kernel(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Large parameters, each in one kernel."""
        if not parameters:
            return
        from course.ops import fused_adam_triton  # imports Triton, which only machines with GPUs have

        steps = [self.state[p]["step"] for p in parameters]
        torch._foreach_add_(steps, 1)
        for p in parameters:
            own = self.state[p]
            fused_adam_triton.update(p, p.grad.contiguous(), own["exp_avg"], own["exp_avg_sq"],               # type: ignore[union-attr]
                               self.values[p] if self.values else None, self.copies.get(p), own["step"], group["lr"],
                               self.grad_scale,
                               self.found_inf, group["betas"], group["eps"], group["weight_decay"], self.follow)
        torch._foreach_sub_(steps, [self.found_inf] * len(steps))       # a list: one tensor would be read on the host

    def update_with_pytorch(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """The others, as PyTorch updates them."""
        own = [self.state[p] for p in parameters]
        first, second, steps = ([states[name] for states in own] for name in ("exp_avg", "exp_avg_sq", "step"))
        if parameters:
            adam([*parameters], cast_gradients(parameters), first, second, [], steps, fused=True, grad_scale=self.grad_scale,
                 found_inf=self.found_inf, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
                 weight_decay=group["weight_decay"], eps=group["eps"], maximize=False)
        masters = [p for p in parameters if p in self.copies]
        if masters:
            torch._foreach_copy_([self.copies[p] for p in masters], [*masters])


def cast_gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    """The parameters' gradients in their own format, which PyTorch's kernel wants."""
    found = [p.grad for p in parameters if p.grad is not None]
    narrow = [i for i, p in enumerate(parameters) if found[i].dtype != p.dtype]
    if narrow:
        wide = [torch.empty_like(parameters[i]) for i in narrow]
        torch._foreach_copy_(wide, [found[i] for i in narrow])
        for i, gradient in zip(narrow, wide, strict=True):
            found[i] = gradient
    return found


def has_own_kernel(p: Tensor) -> bool:
    """Whether a parameter has a kernel of its own."""
    return p.is_cuda and p.dtype == torch.float32 and p.numel() >= LARGE and p.is_contiguous()
