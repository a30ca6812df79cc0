"""The optimizer of a run, its learning rate over the steps, and the norm by which gradients are clipped."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course.config import Config
from course.ops import fused_adam
from course.ops.ema import MovingAverage
from course.ops.muon import Muon
from course.ops.number_formats import LOW_PRECISION, parameter_dtype
from course.parallel import Layout, Placement
from course.parallel.whole_weights import WholeWeights


def learning_rate(step: Tensor, config: Config) -> Tensor:
    """Linear warm-up, then half a cosine to `min_lr` at step `train.steps` (Loshchilov and Hutter 2017)."""
    o = config.optim
    if o.schedule == "constant":
        rate = torch.full_like(step, o.lr, dtype=torch.float32)
    else:
        done = (step - o.warmup) / max(1, config.train.steps - o.warmup)
        rate = o.min_lr + (o.lr - o.min_lr) * 0.5 * (1 + torch.cos(math.pi * done.clamp(0, 1)))
    return torch.minimum(rate, o.lr * (step + 1) / o.warmup) if o.warmup else rate


def build_optimizer(parameters: Sequence[nn.Parameter], lr: Tensor, config: Config,
                    copies: Mapping[nn.Parameter, Tensor] | None = None, layout: Layout | None = None) -> torch.optim.Optimizer:
    """Build the fused optimizer, with the learning rate as a tensor, (), that the step sets, and with the weights' average.

    copies: parameter -> the 16-bit copy with which the model computes; only the Adam of kernels=triton keeps them equal.
    layout: where the parameters are; Muon needs it, and then all ranks call this together.
    """
    o = config.optim
    optimizer: Any
    if o.name == "sgd":
        optimizer = torch.optim.SGD(parameters, lr, o.momentum, weight_decay=o.weight_decay, fused=True)
        # PyTorch would make these in the first step and, if that is skipped, leave them uninitialized
        for parameter in parameters if o.momentum else []:
            if parameter.requires_grad:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    elif o.name == "muon":
        optimizer = build_muon(parameters, lr, config, layout)
    else:
        kind = fused_adam.Adam if config.kernels == "triton" else torch.optim.Adam
        optimizer = kind(parameters, lr, o.betas, o.eps, o.weight_decay, fused=True, capturable=config.graphs,
                         decoupled_weight_decay=o.name == "adamw")
        if copies:
            optimizer.copies = copies
    if o.ema:
        optimizer.average = MovingAverage(optimizer, o.ema)
    return optimizer


def build_muon(parameters: Sequence[nn.Parameter], lr: Tensor, config: Config, layout: Layout | None) -> Muon:
    """Build Muon. With 16-bit matmuls it orthogonalizes in bf16, as its authors do; else in the parameters' dtype."""
    if layout is None:
        raise ValueError("Muon needs the parameters' layout")
    o, hidden = config.optim, [p for p in parameters if p.requires_grad and is_hidden_matrix(layout.placements[p])]
    matrices = set(hidden)
    others = [p for p in parameters if p not in matrices]
    dtype = torch.bfloat16 if config.precision in LOW_PRECISION else parameter_dtype(config.precision)
    return Muon(hidden, others, WholeWeights(hidden, layout, dtype), lr, o.muon_momentum, o.weight_decay, dtype, betas=o.betas,
                eps=o.eps, capturable=config.graphs)


def is_hidden_matrix(where: Placement) -> bool:
    """Whether a parameter is the weight of a linear in a block. The other weights there, of norms, have one logical dim."""
    return where.name.startswith("blocks.") and where.name.endswith(".weight") and len(where.global_shape) > 1


def gradient_norm(parameters: Sequence[nn.Parameter], layout: Layout) -> Tensor:
    """The 2-norm of all gradients, each logical element counted once, on the rank that owns it."""
    mesh = layout.mesh
    owned = [p.grad for p in parameters if p.grad is not None and layout.placements[p].owner]
    norm = torch.linalg.vector_norm(tensor_norms(owned)) if owned else torch.zeros((), device=mesh.world.device)
    if mesh.all.size > 1:
        squares = norm.double() ** 2
        dist.all_reduce(squares, group=mesh.all.group)
        norm = squares.sqrt()
    return norm.float()


def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of each tensor, (n,), in float32 or wider: PyTorch's default would round those of 16-bit tensors to 16 bits."""
    found: dict[int, Tensor] = {}
    for kind in dict.fromkeys(x.dtype for x in tensors):                # the multi-tensor kernel takes one dtype
        at = [i for i, x in enumerate(tensors) if x.dtype == kind]
        wide = torch.promote_types(kind, torch.float32)
        found |= zip(at, torch._foreach_norm([tensors[i] for i in at], dtype=wide), strict=True)
    return torch.stack([found[i] for i in range(len(tensors))])


def clip_factor(norm: Tensor, most: float) -> Tensor:
    """The factor by which to scale gradients so that their norm, (), is at most `most` (0: any)."""
    return (most / (norm + 1e-6)).clamp(max=1.0) if most else torch.ones_like(norm)
