"""Triton kernels behind `course.models.gpt.ChunkedLoss`: cross-entropy and its gradient, which overwrites the logits.

Logits are read from DRAM once, and their gradient is written once. Each program handles one token: 50,304 logits in 16 bits
are 100 KB, and the tokens of all multiprocessors fit into the L2 cache. The first pass finds the largest logit and the sum of
exponentials. The second pass, for the gradient, reads from the cache and is almost free. torch.compile writes the gradient to
new memory, as large as the chunk of logits.

If tp shards the logits by columns, the ranks exchange three numbers per token between the two passes. Then each pass is a
kernel of its own, and logits are read from DRAM twice.

The sum is computed online: each new maximum rescales the sum so far (Milakov and Gimelshein 2018, arXiv:1805.02867).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, EACH, WARPS = 2048, 8, 32                    # a step handles BLOCK x EACH logits of a token


@triton.jit
def summary(logits, columns, block: tl.constexpr, each: tl.constexpr):
    """(largest logit of a token, sum of exp(logit - largest)).

    It first finds the maximum of 8 neighbors: this takes 9 exponentials for the 8 instead of 16.
    """
    per_bit: tl.constexpr = 1.4426950408889634      # 1 / ln 2: GPUs compute exp through exp2
    top = tl.full((block,), -1e38, tl.float32)       # finite, so that its multiples are
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
    """Overwrite a token's logits, (columns,), with by · (exp(logit - log) - 1 at the target `aim`); aim < 0: no target here."""
    per_bit: tl.constexpr = 1.4426950408889634
    wanted = tl.load(logits + aim, mask=aim >= 0, other=0.0).to(tl.float32)
    low = log * per_bit
    tl.debug_barrier()                              # all threads read the target's logit before any writes
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
    """Both passes: logits (N, columns) become weight · (softmax - 1 at the target); losses (N,): log sum exp - logit."""
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
    """found (3, N): a token's largest logit, sum of exp(logit - largest), and target logit, 0 if it is on another rank."""
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
    """logits (N, columns) become weight · (exp(logit - log) - 1 at the target)."""
    token = tl.program_id(0).to(tl.int64)
    logits += token * columns
    differentiate(logits, tl.load(target + token), tl.load(weights + token), tl.load(logs + token), columns,
                  block * each)


def cross_entropy_(logits: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Cross-entropy per token, (N,) float32, of contiguous logits (N, V), which become their gradients times `weights` (N,).

    target: (N,), from 0 to V - 1.
    """
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    whole[(len(logits),)](logits, target, weights.float(), losses, logits.shape[-1], BLOCK, EACH, num_warps=WARPS)
    return losses


def summarize(logits: Tensor, target: Tensor) -> Tensor:
    """(3, N) float32 from contiguous logits (N, V / tp): the largest logit, the sum of exp(logit - largest), the target's logit.

    target: (N,), -1 if it is on another rank; then the target's logit is 0.
    """
    found = logits.new_empty(3, len(logits), dtype=torch.float32)
    first_reading[(len(logits),)](logits, target, found, len(logits), logits.shape[-1], BLOCK, EACH, num_warps=WARPS)
    return found


def differentiate_(logits: Tensor, target: Tensor, weights: Tensor, logs: Tensor) -> None:
    """Overwrite the logits with their gradients times `weights` (N,). logs: (N,) float32, log sum exp over all ranks."""
    second_reading[(len(logits),)](logits, target, weights.float(), logs, logits.shape[-1], BLOCK, EACH, num_warps=WARPS)
