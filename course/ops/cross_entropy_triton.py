"""The kernels behind `course.models.gpt.ChunkedLoss` on a GPU: cross-entropy and its gradient, which takes the logits' place.

Logits are read from memory once and their gradient is written once; all between stays on the chip. A program has one token:
50,304 logits in 16 bits are 100 KB, and what all multiprocessors together work at fits into the cache. So the second reading,
for the gradient, after the first, for the largest logit and the sum of exponentials, costs next to nothing. torch.compile
writes the gradient elsewhere, which is a second chunk of logits in memory.

Where each rank has some columns of the logits, the ranks exchange three numbers a token between the two readings: then they
are two kernels, and logits are read twice.

The sum is taken as the logits come, each new maximum scaling down what there is (Milakov and Gimelshein 2018, arXiv:1805.02867).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, EACH, WARPS = 2048, 8, 32                    # at a time so many times 8 logits of a token, and who works on them


@triton.jit
def summary(logits, columns, block: tl.constexpr, each: tl.constexpr):
    """(the largest of a token's logits, the sum of exponentials of all less the largest).

    Of 8 neighbours the largest is found first: so 9 exponentials are computed for them where one by one it would be 16.
    """
    per_bit: tl.constexpr = 1.4426950408889634      # 1 / ln 2: a GPU has powers of two, of which those of e are made
    top = tl.full((block,), -1e38, tl.float32)       # so that its multiples are numbers, too
    total = tl.zeros((block,), tl.float32)
    for start in range(0, columns, block * each):
        at = start + tl.arange(0, block)[:, None] * each + tl.arange(0, each)[None, :]
        value = tl.load(logits + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(value, 1))
        total = total * tl.exp2((top - new) * per_bit) + tl.sum(tl.exp2(value * per_bit - (new * per_bit)[:, None]), 1)
        top = new
    largest = tl.max(top, 0)
    return largest, tl.sum(total * tl.exp2((top - largest) * per_bit), 0)


@triton.jit
def differentiate(logits, aim, by, log, columns, block: tl.constexpr):
    """A token's logits, (columns,), become by · (exp(logit - log) - 1 at the target `aim`), where aim < 0 is not among them."""
    per_bit: tl.constexpr = 1.4426950408889634
    wanted = tl.load(logits + aim, mask=aim >= 0, other=0.0).to(tl.float32)
    low = log * per_bit
    tl.debug_barrier()                              # no thread writes before all have read the target's logit
    for start in range(0, columns, block):
        at = start + tl.arange(0, block)
        value = tl.load(logits + at, mask=at < columns, other=0.0).to(tl.float32)
        grad = by * tl.exp2(value * per_bit - low)
        tl.store(logits + at, grad.to(logits.dtype.element_ty), mask=at < columns)
    tl.debug_barrier()
    tl.store(logits + aim, (by * (tl.exp2(wanted * per_bit - low) - 1)).to(logits.dtype.element_ty), mask=aim >= 0)


@triton.jit
def whole(logits, target, weights, losses, columns, block: tl.constexpr,
          each: tl.constexpr):
    """logits (N, columns), in their place weight · (softmax - 1 at the target); losses (N,): log sum exp - logit."""
    token = tl.program_id(0).to(tl.int64)
    logits += token * columns
    aim = tl.load(target + token)
    largest, total = summary(logits, columns, block, each)
    log = tl.log(total) + largest
    tl.store(losses + token, log - tl.load(logits + aim).to(tl.float32))
    differentiate(logits, aim, tl.load(weights + token), log, columns, block * each)


@triton.jit
def first_reading(logits, target, found, tokens, columns, block: tl.constexpr,
                  each: tl.constexpr):
    """found (3, N): the largest of a token's logits, the sum of exponentials, and the target's logit, 0 if it is not here."""
    token = tl.program_id(0).to(tl.int64)
    logits += token * columns
    aim = tl.load(target + token)
    largest, total = summary(logits, columns, block, each)
    tl.store(found + token, largest)
    tl.store(found + tokens + token, total)
    tl.store(found + 2 * tokens + token, tl.load(logits + aim, mask=aim >= 0, other=0.0).to(tl.float32))


@triton.jit
def second_reading(logits, target, weights, logs, columns, block: tl.constexpr,
                   each: tl.constexpr):
    """logits (N, columns), in their place weight · (exp(logit - log) - 1 at the target)."""
    token = tl.program_id(0).to(tl.int64)
    logits += token * columns
    differentiate(logits, tl.load(target + token), tl.load(weights + token), tl.load(logs + token), columns,
                  block * each)


def cross_entropy_(logits: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """The tokens' cross-entropies in float32, (N,), of contiguous logits, (N, V), which become their gradients times the weights,
    (N,). target: (N,), from 0 to V - 1."""
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    whole[(len(logits),)](logits, target, weights.float(), losses, logits.shape[-1], BLOCK, EACH, num_warps=WARPS)
    return losses


def summarize(logits: Tensor, target: Tensor) -> Tensor:
    """(3, N) in float32, of contiguous logits, (N, V / tp): the largest, the sum of exponentials of all less the largest, the
    target's. target: (N,), -1 where it is another rank's."""
    found = logits.new_empty(3, len(logits), dtype=torch.float32)
    first_reading[(len(logits),)](logits, target, found, len(logits), logits.shape[-1], BLOCK, EACH, num_warps=WARPS)
    return found


def differentiate_(logits: Tensor, target: Tensor, weights: Tensor, logs: Tensor) -> None:
    """The same logits become their gradients times the weights, (N,). logs: (N,), of all ranks' sum of exponentials, float32."""
    second_reading[(len(logits),)](logits, target, weights.float(), logs, logits.shape[-1], BLOCK, EACH, num_warps=WARPS)
