"""A language model that predicts the next token: GPT-2.

Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3: the decoder of Vaswani et al.
2017 with the norms before attention and MLP, and one more after the last block. Learned positions; the output projection
is the token embedding again (Press and Wolf 2016, arXiv:1608.05859).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course import random
from course.errors import CourseError
from course.models.layers import TENSOR_PLAN, Batch, Block, Dropout, Linear, Tokens, Total


@dataclass(frozen=True)
class GPTConfig:
    kind: Literal["gpt"] = "gpt"
    vocab: int = 50304                              # GPT-2's 50257 tokens, padded to a multiple of 128
    context: int = 1024                             # the most tokens that the model looks at
    dim: int = 768
    depth: int = 12
    heads: int = 12
    mlp_ratio: float = 4.0                          # width of the MLP over dim
    dropout: float = 0.0                            # after the embedding, attention and MLP
    tied: bool = True                               # the output projection is the token embedding, one weight


class Embed(nn.Module):
    """Look up the vector of each token and add that of its position."""

    def __init__(self, c: GPTConfig):
        super().__init__()
        self.token = nn.Embedding(c.vocab, c.dim)
        self.pos = nn.Parameter(torch.empty(1, c.context, c.dim))
        self.drop = Dropout(c.dropout, "embed.drop")

    def forward(self, batch: Batch) -> Tensor:
        pos = self.pos.index_select(1, batch["position"][0])            # (1, T, D)
        return self.drop(self.token(batch["tokens"]) + pos, batch)      # (B, T, D)


class Head(nn.Module):
    """Map each token to the logits of the next."""

    def __init__(self, c: GPTConfig):
        super().__init__()
        self.norm = nn.LayerNorm(c.dim)
        self.proj = Linear(c.dim, c.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:                             # (B, T, D)
        return self.proj(self.norm(x))                                  # (B, T, V)


class CrossEntropy(nn.Module):
    """-log softmax(logits)[target] of each token, in float32 or float64."""

    seam = "cross_entropy"                          # where a vocabulary in pieces puts its own

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:        # (B, T, V), (B, T)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))            # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(target)


class NextToken(nn.Module):
    """(sum of the tokens' cross-entropies, number of tokens). A target of -1 weighs nothing, nor does a sample -1, padding."""

    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = CrossEntropy()
        self.total = Total()

    def forward(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:           # (B, T, V)
        weights = self.weights(batch)                                                   # (B, T)
        losses = self.cross_entropy(output, batch["target"].clamp(min=0))               # (B, T)
        total, weight = self.total(torch.stack([(losses * weights).sum(), weights.sum()]))
        return total, weight

    def weight(self, batch: Batch) -> Tensor:
        """How many tokens of each sample weigh, (B,)."""
        return self.weights(batch).sum(1)

    def weights(self, batch: Batch) -> Tensor:
        """1 for each token that weighs, else 0, (B, T). In float64, which counts exactly beyond float32's 2^24."""
        return ((batch["target"] >= 0) & (batch["sample"] >= 0)[:, None]).double()


VOCABULARY_PLAN = {**TENSOR_PLAN, "embed.token": "vocabulary", "head.proj": "vocabulary_head"}
# what has a token as dim 1: every tensor-parallel rank looks up and predicts all of them, in its part of the vocabulary
TOKEN_PLAN = {"tokens": "context", "target": "context", "position": "sequence"}


class GPT(nn.Module):
    """Logits of the next token, (B, T, V), from the tokens up to each position."""

    tensor_plan = VOCABULARY_PLAN
    token_plan = TOKEN_PLAN

    def __init__(self, c: GPTConfig, seed: int = 0):
        super().__init__()
        self.c, self.seed = c, seed
        self.embed = Embed(c)
        self.blocks = nn.ModuleDict({
            str(i): Block(c.dim, c.heads, int(c.dim * c.mlp_ratio), f"blocks.{i}", c.dropout, causal=True)
            for i in range(c.depth)})
        self.head = Head(c)
        if c.tied:
            self.head.proj.weight = self.embed.token.weight
        self.loss = NextToken()
        self.tokens = Tokens()

    def init_plan(self) -> dict[str, float | str]:
        """Pattern of serial names -> standard deviation, "ones" or "zeros"; the first that fits counts.

        Each of the 2·depth residual branches adds its variance to the last: theirs starts so small that the sum is 0.02^2
        (Radford et al. 2019, section 2.3).
        """
        residual = 0.02 / math.sqrt(2 * self.c.depth)
        return {"*norm*.weight": "ones", "*.bias": "zeros", "*.attn.out.weight": residual, "*.mlp.down.weight": residual,
                "*": 0.02}

    def prepare(self, batch: Batch, step: Tensor) -> Batch:
        """A loader's batch, `tokens` (B, T + 1), as the model takes it: `tokens`, `target` and `position`, (B, T) each.

        In training with dropout also `keys`, one random key for each sample, (B,). Raises `CourseError` if T is more
        than the context.
        """
        sample, tokens, target = batch["sample"], batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        T = tokens.shape[1]
        if self.c.context < T:
            raise CourseError(f"a sample of {T} tokens is longer than model.context={self.c.context}: "
                              "make the samples shorter or model.context larger")
        position = torch.arange(T, device=sample.device).expand(len(sample), T)
        ready = {"sample": sample, "tokens": tokens, "target": target, "position": position}
        if self.training and self.c.dropout:
            ready["keys"] = random.sample_keys(self.seed, step, sample)
        return ready

    def forward(self, batch: Batch, x: Tensor | None = None) -> Tensor:
        """The output for a prepared batch. Of a pipeline's stage, which lacks some parts, `x` is what the last one put out."""
        if self.embed is not None:
            x = self.embed(batch)                                       # (B, T, D)
        for block in self.blocks.values():
            x = block(x, batch)                                         # (B, T, D)
        return x if self.head is None else self.head(x)                 # (B, T, V)

    def example(self, samples: int, device: torch.device, first: int = 0) -> Batch:
        """A loader's batch of random tokens in the right shapes: samples `first` and on, the same in every run."""
        length = self.c.context + 1
        counter = torch.arange(first * length, (first + samples) * length, device=device).view(samples, length)
        tokens = (random.uniform(random.key("example", "tokens"), counter) * self.c.vocab).long()
        return {"tokens": tokens, "sample": torch.arange(first, first + samples, device=device)}
