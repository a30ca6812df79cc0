"""Sample from a language model one token at a time, with the keys and values of past tokens cached.

Each new token attends to all before it, but their keys and values do not change. They are computed once and kept, so a token
costs one position's forward pass instead of all. The cache replaces the model's own attention at the seam `attend`; the model
knows nothing of it. Grouped heads make it smaller: it holds only the few key-value heads.
"""

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from course.models import GPT
from course.models.layers import Attend, GroupedAttention, Linear
from course.ops.attention import attend
from course.ops.number_formats import autocast, precision_of_weights
from course.utils import random
from course.utils.errors import CourseError


class CachedAttend(Attend):
    """Attention of new tokens to all so far. `most`: how many there will be at most."""

    def __init__(self, most: int):
        super().__init__()
        self.most, self.past = most, 0
        self.keys = self.values = torch.empty(0)    # (B, g, most, d) from the first call on

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:       # (B, h, T, d), 2 x (B, g, T, d)
        if self.past == 0:
            self.keys, self.values = (k.new_empty(*k.shape[:2], self.most, k.shape[3]) for _ in range(2))
        start, end = self.past, self.past + k.shape[2]
        self.keys[:, :, start:end], self.values[:, :, start:end] = k, v
        self.past = end
        # the first call has the whole prompt, under a causal mask; each later one has a single token, which sees everything
        return attend(q, self.keys[:, :, :end], self.values[:, :, :end], start == 0)    # (B, h, T, d)


@contextmanager
def kv_cache(model: GPT, most: int) -> Iterator[None]:
    """Inside the block the model's blocks cache the keys and values of up to `most` tokens."""
    cores = [(module, module.core) for module in model.blocks.modules() if isinstance(module, GroupedAttention)]
    for attention, _ in cores:
        attention.core = CachedAttend(most)
    try:
        yield
    finally:
        for attention, core in cores:
            attention.core = core


@torch.no_grad()
def generate(model: GPT, tokens: Tensor, count: int, temperature: float = 1.0, top_k: int = 0, seed: int = 0,
             cache: bool = True, last: Collection[int] = ()) -> Tensor:
    """Append `count` tokens to each prompt: (B, T) int64 -> (B, T + count), or fewer once every row has one of `last`.

    model: a whole GPT (not a pipeline stage, nor one split by tp or cp); with 16-bit weights it multiplies in 16 bits.
    temperature: 0 takes the most probable token, below 1 prefers probable ones. top_k: draw only from this many of the most
    probable; 0: from all. The same seed draws the same tokens, with other random numbers for each row. cache: without it every
    token recomputes everything, for comparison. last: the tokens that end a text.

    Raises `CourseError` if prompt and new tokens exceed the model's context, or the prompt is empty.
    """
    length = tokens.shape[1]
    check(model, length, count, temperature, top_k)
    was_training, ending = model.training, torch.tensor(sorted(last), device=tokens.device)
    model.eval()
    try:
        with (kv_cache(model, length + count) if cache else nullcontext(),
              autocast(precision_of_weights(model, "fp32"), tokens.device)):
            known = 0                               # tokens in the cache
            for _ in range(count):
                logits = model(as_batch(model, tokens, known))[:, -1, :model.c.words]      # (B, V), without padding
                tokens = torch.cat([tokens, sample_token(logits, temperature, top_k, seed, tokens.shape[1])[:, None]], 1)
                known = tokens.shape[1] - 1 if cache else 0
                if last and torch.isin(tokens[:, length:], ending).any(1).all():
                    break
    finally:
        model.train(was_training)
    return tokens


def check(model: GPT, length: int, count: int, temperature: float, top_k: int) -> None:
    """Raise `CourseError` if the model or the arguments do not allow sampling."""
    if model.embed is None or model.head is None:
        raise CourseError("generating needs a whole model, not a stage of a pipeline: load the checkpoint with parallel.pp=1")
    if any(isinstance(module, Linear) and module.communication.mode for module in model.modules()):
        raise CourseError("generating needs a whole model, not one that tensor parallelism has cut: load the checkpoint with "
                          "parallel.tp=1")
    if length < 1 or count < 0:
        raise CourseError(f"a prompt of {length} tokens and {count} new ones: give at least one token, and ask for 0 or more")
    if length + count > model.c.context:
        raise CourseError(f"a prompt of {length} tokens and {count} new ones are more than model.context={model.c.context}: "
                          "shorten the prompt or ask for fewer (`course sample --count`)")
    if not 0 <= temperature < math.inf or top_k < 0:
        raise CourseError(f"temperature={temperature} and top_k={top_k} must be numbers that are not negative: 0 means the most "
                          "probable token, and all tokens")


def as_batch(model: GPT, tokens: Tensor, known: int) -> dict[str, Tensor]:        # (B, T) -> values (B, T - known)
    """The tokens from number `known` on, as the model's batch."""
    samples, length = tokens.shape
    position = torch.arange(known, length, device=tokens.device).expand(samples, length - known)
    batch = {"sample": torch.arange(samples, device=tokens.device), "tokens": tokens[:, known:], "position": position}
    real = {"real": torch.ones_like(position, dtype=torch.bool)} if model.c.experts else {}
    return batch | real | ({"seen": position} if model.c.position == "rotary" else {})


def sample_token(logits: Tensor, temperature: float, top_k: int, seed: int, position: int) -> Tensor:
    """Draw a token for each row: (B, V) -> (B,). A function of seed, row and position: it needs no generator.

    The index of the largest logit / temperature + Gumbel noise has the probabilities of the softmax (Gumbel 1954; Maddison et al.
    2014, arXiv:1411.0030).
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.double()                        # at a small temperature the largest stays 0, and none is infinite
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature     # (B, V)
    samples, vocab = logits.shape
    if 0 < top_k < vocab:
        best = logits.topk(top_k)                                       # 2 x (B, top_k): exactly so many, even among equal ones
        logits = torch.full_like(logits, -torch.inf).scatter(-1, best.indices, best.values)
    row, column = torch.arange(samples, device=logits.device)[:, None], torch.arange(vocab, device=logits.device)
    key = random.fold(random.fold(random.key(seed, "generate"), torch.full_like(row, position)), row)       # (B, 1)
    gumbel = -(-random.uniform(key, column, torch.float64).log()).log()                 # (B, V)
    return (logits + gumbel).argmax(-1)
