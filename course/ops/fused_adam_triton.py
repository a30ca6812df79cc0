"""The kernel behind `course.ops.fused_adam` on a GPU: Adam, the weights' average and their copy in 16 bits, in one pass over
memory.

Each number of a parameter is read with its gradient, both moments and its average, and all but the gradient are written: 36
bytes. PyTorch's fused Adam also writes the gradient, with its scale taken out, and the average takes a pass of its own: 44 bytes.
With 16-bit weights two fewer are read, of the gradient, and two more written: the weights.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 8


@triton.jit
def adam(weight, grad, first, second, average, copy, step, rate, scale, found, rest1, rest2, log1, log2,
         eps, decay, follow, count, averaged: tl.constexpr, copied: tl.constexpr, block: tl.constexpr):
    """(count,) in float32, but `copy` in 16 bits and `grad` in either; `step`, counted already, rate, scale and found: scalars in
    memory. rest: 1 - beta; log: of beta."""
    if tl.load(found) == 0:
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = at < count
        number = tl.load(step).to(tl.float64)       # in float64: 1 - 0.999 has few digits left
        bias1, bias2 = 1 - tl.exp(number * log1), 1 - tl.exp(number * log2)
        by, pace = tl.load(scale), (tl.load(rate) / bias1).to(tl.float32)
        root = tl.sqrt(bias2).to(tl.float32)
        w = tl.load(weight + at, mask=inside, other=0.0)
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) / by + decay * w
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
           follow: float) -> None:
    """One step of a parameter in place, and of its average, if any, by `follow` of the way; `copy` gets it, rounded.

    weight, grad, first, second, average, copy: of one shape, any, and contiguous. step, rate, scale, found: () in float32, as in
    PyTorch's fused Adam: steps, this one among them, learning rate, what the gradient is divided by, 1 if nothing is to change.
    """
    count, rests = weight.numel(), [1 - beta for beta in betas]
    logs = [math.log(beta) if beta else -math.inf for beta in betas]
    adam[(triton.cdiv(count, BLOCK),)](
        weight, grad, first, second, average, copy, step, rate, scale, found, *rests, *logs, eps, decay, follow, count,
        average is not None, copy is not None, BLOCK, num_warps=WARPS)
