"""The kernel behind `course.models.gpt.ChunkedLoss` on a GPU: cross-entropy and its gradient, which takes the logits' place.

Logits are read from memory once and their gradient is written once; all between stays on the chip. A program has one token:
50,304 logits in 16 bits are 100 KB, and what all multiprocessors together work at fits into the cache. So the second reading,
for the gradient, after the first, for the largest logit and the sum of exponentials, costs next to nothing. torch.compile
writes the gradient elsewhere, which is a second chunk of logits in memory.

The sum is taken as the logits come, each new maximum scaling down what there is (Milakov and Gimelshein 2018, arXiv:1805.02867).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192                                        # logits of a token at a time


@triton.jit
def kernel(logits, target, weights, losses, columns, block: tl.constexpr):              # type: ignore[no-untyped-def]
    """logits (tokens, columns), in their place weight · (softmax - 1 at the target); losses (tokens,): log sum exp - logit."""
    token = tl.program_id(0).to(tl.int64)
    logits += token * columns
    aim = tl.load(target + token)
    wanted = tl.load(logits + aim).to(tl.float32)
    top = tl.full((block,), -3e38, tl.float32)
    total = tl.zeros((block,), tl.float32)
    for start in range(0, columns, block):
        at = start + tl.arange(0, block)
        value = tl.load(logits + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, value)
        total = total * tl.exp(top - new) + tl.exp(value - new)
        top = new
    largest = tl.max(top, 0)
    log = tl.log(tl.sum(total * tl.exp(top - largest), 0)) + largest
    tl.store(losses + token, log - wanted)
    by = tl.load(weights + token)
    tl.debug_barrier()                              # no thread writes before all have read the target's logit
    for start in range(0, columns, block):
        at = start + tl.arange(0, block)
        value = tl.load(logits + at, mask=at < columns, other=0.0).to(tl.float32)
        grad = by * (tl.exp(value - log) - tl.where(at == aim, 1.0, 0.0))
        tl.store(logits + at, grad.to(logits.dtype.element_ty), mask=at < columns)


def cross_entropy_(logits: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """The tokens' cross-entropies in float32, (N,), of contiguous logits, (N, V), which become their gradients times the weights,
    (N,). target: (N,), from 0 to V - 1."""
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    kernel[(len(logits),)](logits, target, weights.float(), losses, logits.shape[-1], BLOCK, num_warps=16)
    return losses
