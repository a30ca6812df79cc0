"""Triton kernel behind `course.ops.fused_adam`: Adam, the moving average and the 16-bit weights in one pass over memory.

Per element it reads the weight, gradient, both moments and the average, and writes all but the gradient: 36 bytes. PyTorch's
fused Adam also writes the unscaled gradient, and the average takes a separate pass: 44 bytes. With 16-bit weights, the kernel
reads 2 bytes fewer (gradient) and writes 2 more (weights).
"""

import math

import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 8


@triton.jit
def adam(weight, grad, first, second, average, copy, step, rate, scale, found, rest1, rest2, log1, log2,
         eps, decay, follow, count, averaged: tl.constexpr, copied: tl.constexpr, decoupled: tl.constexpr,
         block: tl.constexpr):
    """All (count,) in float32, except `copy` in 16 bits and `grad` in either. step (already incremented), rate, scale and found:
    scalars in memory. rest1, rest2: 1 - beta; log1, log2: log(beta)."""
    if tl.load(found) == 0:
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = at < count
        number = tl.load(step).to(tl.float64)       # float64, because 1 - 0.999 loses digits
        bias1, bias2 = 1 - tl.exp(number * log1), 1 - tl.exp(number * log2)
        by, pace = tl.load(scale), (tl.load(rate) / bias1).to(tl.float32)
        root = tl.sqrt(bias2).to(tl.float32)
        w = tl.load(weight + at, mask=inside, other=0.0)
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) / by
        if decoupled:
            w -= tl.load(rate) * decay * w
        else:
            g += decay * w
        m, v = tl.load(first + at, mask=inside, other=0.0), tl.load(second + at, mask=inside, other=0.0)
        m = (1 - rest1) * m + rest1 * g             # m + rest1 · (g - m) loses a small g where beta is 0
        v = (1 - rest2) * v + rest2 * g * g
        w -= pace * m / (tl.sqrt(v) / root + eps)
        tl.store(first + at, m, mask=inside)
        tl.store(second + at, v, mask=inside)
        tl.store(weight + at, w, mask=inside)
        if copied:
            tl.store(copy + at, w.to(copy.dtype.element_ty), mask=inside)
        if averaged:
            a = tl.load(average + at, mask=inside, other=0.0)
            tl.store(average + at, a - follow * (a - w), mask=inside)


def update(weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, average: Tensor | None, copy: Tensor | None,
           step: Tensor, rate: Tensor, scale: Tensor, found: Tensor, betas: tuple[float, float], eps: float, decay: float,
           follow: float, decoupled: bool = False) -> None:
    """Update a parameter in place, move its average, if any, by the fraction `follow`, and round the result to `copy`, if any.

    weight, grad, first, second, average, copy: contiguous, of the same shape. step, rate, scale, found: () float32, as in
    PyTorch's fused Adam: steps including this one, learning rate, divisor of the gradient, and 1 to skip the update.
    decoupled: whether the decay shrinks the weight (AdamW) or is added to the gradient.
    """
    count, rests = weight.numel(), [1 - beta for beta in betas]
    logs = [math.log(beta) if beta else -math.inf for beta in betas]
    adam[(triton.cdiv(count, BLOCK),)](
        weight, grad, first, second, average, copy, step, rate, scale, found, *rests, *logs, eps, decay, follow, count,
        average is not None, copy is not None, decoupled, BLOCK, num_warps=WARPS)
