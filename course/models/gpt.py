"""A language model that predicts the next token: GPT-2 and, by configuration alone, Llama and variants in between.

Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3: the decoder of Vaswani et al.
2017 with the norms before attention and MLP, and one more after the last block. Positions are learned; the output projection
reuses the token embedding (Press and Wolf 2016, arXiv:1608.05859). Llama (Touvron et al. 2023, arXiv:2302.13971, section
2.2) is norm=rms mlp=swiglu position=rotary bias=false tied=false, with fewer key and value heads, kv_heads. Qwen3 (Qwen Team
2025, arXiv:2505.09388, section 2) adds qk_norm=true and a head_dim of its own. With experts the MLP of some blocks is a mixture
of experts (`course/models/experts.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from course.models.experts import MoE
from course.models.interface import Batch, Loss, Model, Rule
from course.models.layers import (
    MLP,
    TENSOR_PLAN,
    Dropout,
    GroupedAttention,
    Linear,
    RMSNorm,
    RopeScaling,
    SumOverTokens,
    SwiGLU,
    rope_cos_sin,
)
from course.ops.autograd import Context
from course.ops.number_formats import matmul_dtype
from course.utils import random
from course.utils.errors import CourseError


@dataclass(frozen=True)
class GPTConfig:
    """A language model, GPT-2's architecture unless the keys say Llama's."""

    kind: str = "gpt"                               # which model; it decides which settings there are
    vocab: int = 50304                              # GPT-2's 50257 tokens, padded to a multiple of 128
    vocab_used: int = 0                             # so many entries are tokens, the others padding; 0: all are tokens
    context: int = 1024                             # the most tokens that the model looks at
    dim: int = 768                                  # width: features per token between blocks
    depth: int = 12                                 # blocks
    heads: int = 12                                 # attention heads, which share the width
    kv_heads: int = 0                               # key and value heads, each for heads / kv_heads query heads; 0: heads
    head_dim: int = 0                               # width of a head; 0: dim / heads
    qk_norm: bool = False                           # an RMSNorm of each head's queries and of its keys, before they are rotated
    mlp_ratio: float = 4.0                          # width of the MLP over dim
    mlp_width: int = 0                              # width of the MLP; 0: what mlp_ratio says
    mlp: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"    # gelu_tanh: the approximation that GPT-2 was trained with
    norm: Literal["layer", "rms"] = "layer"         # LayerNorm, or RMSNorm, which subtracts nothing
    norm_eps: float = 1e-5                          # added to variances in norms
    position: Literal["learned", "rotary"] = "learned"     # a vector for each position, or rotated queries and keys
    rope_theta: float = 10_000.0                    # rotary's slowest pair of features turns once in about 2π·theta tokens
    # rotary's slow pairs turn so many times slower, as in Llama 3.1 and later (layers.RopeScaling); 1: no slower
    rope_factor: float = 1.0
    rope_low: float = 1.0                           # slow pairs turn at most so many times in rope_context tokens
    rope_high: float = 4.0                          # fast, unchanged pairs turn at least so many times; the others are blended
    rope_context: int = 8192                        # context in training, in tokens, before it was extended
    bias: bool = True                               # of the linears; the head has none
    dropout: float = 0.0                            # after the embedding, attention and MLP
    tied: bool = True                               # the output projection is the token embedding, one weight
    # tokens whose logits are in memory at a time for the loss; 0: all. With GPT-2's vocabulary, 4096 take 0.8 GB in float32,
    # and are enough rows of a matmul for tensor cores
    loss_chunk: int = 4096
    experts: int = 0                                # MLPs; a token goes through top_k (course/models/experts.py); 0: one for all
    top_k: int = 2                                  # experts of each token
    expert_width: int = 0                           # width of an expert; 0: that of the MLP
    shared_experts: int = 0                         # further experts that take every token, as one MLP
    moe_every: int = 1                              # one of so many blocks has experts; with 2, blocks 1, 3 and so on
    routing: Literal["softmax", "sigmoid"] = "softmax"      # scores of a token's experts: they sum to 1, or each is by itself
    norm_topk: bool = True                          # with top_k of 2 or more, divide a token's top_k scores by their sum
    balance_loss: float = 0.01                      # weight of the load-balancing loss, which is 1 for balanced experts
    z_loss: float = 0.0                             # weight of the mean square of logsumexp(router's logits); usual: 0.001
    balance_rate: float = 0.0                       # change of the router's biases in a step; no loss needed; 0: none
    capacity_factor: float = 0.0                    # an expert's most tokens of a sample, over its fair share; 0: it drops none

    @property
    def tokens(self) -> int:
        """T, the tokens of a sample, by the name that other models use."""
        return self.context

    @property
    def hidden(self) -> int:
        """The MLP's width."""
        return self.mlp_width or int(self.dim * self.mlp_ratio)

    @property
    def expert_hidden(self) -> int:
        """The width of an expert."""
        return self.expert_width or self.hidden

    def has_experts(self, block: int) -> bool:
        """Whether the block of this number, from 0, has experts."""
        return self.experts > 0 and (block + 1) % self.moe_every == 0

    @property
    def groups(self) -> int:
        """The number of key and value heads."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """The width of a head."""
        return self.head_dim or self.dim // self.heads

    @property
    def attention_width(self) -> int:
        """The width of all query heads together."""
        return self.heads * self.head_width

    @property
    def stretch(self) -> RopeScaling | None:
        """The stretching of rotary positions, if any."""
        return RopeScaling(self.rope_factor, self.rope_low, self.rope_high, self.rope_context) if self.rope_factor != 1 else None

    @property
    def words(self) -> int:
        """The number of tokens in the vocabulary, without padding."""
        return self.vocab_used or self.vocab


class Embed(nn.Module):
    """Look up the vector of each token and, with learned positions, add that of its position."""

    def __init__(self, c: GPTConfig):
        super().__init__()
        self.token = nn.Embedding(c.vocab, c.dim)
        self.pos = nn.Parameter(torch.empty(1, c.context, c.dim)) if c.position == "learned" else None
        self.drop = Dropout(c.dropout, "embed.drop")

    def forward(self, batch: Batch) -> Tensor:
        x = self.token(batch["tokens"])                                 # (B, T, D)
        if self.pos is not None:
            x = x + self.pos.index_select(1, batch["position"][0])      # (B, T, D)
        return self.drop(x, batch)


def norm(c: GPTConfig) -> nn.Module:
    """The norm before attention, MLP and head."""
    return RMSNorm(c.dim, c.norm_eps) if c.norm == "rms" else nn.LayerNorm(c.dim, c.norm_eps)


class Block(nn.Module):
    """A transformer block of any GPT or Llama kind: pre-norm attention, then MLP, each added to its input."""

    def __init__(self, c: GPTConfig, name: str):
        super().__init__()
        self.norm1 = norm(c)
        self.attn = GroupedAttention(c.dim, c.heads, c.groups, c.bias, c.head_width, c.norm_eps if c.qk_norm else None)
        self.drop1 = Dropout(c.dropout, f"{name}.drop1")
        self.norm2 = norm(c)
        self.mlp = (SwiGLU(c.dim, c.hidden, c.bias) if c.mlp == "swiglu" else
                    MLP(c.dim, c.hidden, c.bias, "tanh" if c.mlp == "gelu_tanh" else "none"))
        self.drop2 = Dropout(c.dropout, f"{name}.drop2")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:               # (B, T, D)
        x = x + self.drop1(self.attn(self.norm1(x), batch), batch)      # (B, T, D)
        return x + self.drop2(self.mlp(self.norm2(x)), batch)           # (B, T, D)


class MoEBlock(Block):
    """A block with a mixture of experts for an MLP; also returns its auxiliary loss of each sample."""

    def __init__(self, c: GPTConfig, name: str):
        super().__init__(c, name)
        self.mlp = MoE(c)                           # type: ignore[assignment]  # in the place of the dense one

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:    # type: ignore[override]  # (B, T, D)
        x = x + self.drop1(self.attn(self.norm1(x), batch), batch)      # (B, T, D)
        y, penalty = self.mlp(self.norm2(x), batch)                     # (B, T, D), (B,)
        return x + self.drop2(y, batch), penalty                        # (B, T, D), (B,)


class CrossEntropy(nn.Module):
    """-log softmax(logits)[target] of each token, in float32 or float64."""

    seam = "cross_entropy"                          # a cut vocabulary puts its own loss here

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:        # (B, T, V), (B, T)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))            # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(target)

    def with_gradient(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:   # (N, V), (N,)
        """(the losses, (N,); their gradients, softmax(logits) minus 1 at the target, (N, V), in new memory)."""
        column = target[:, None]                                        # (N, 1)
        log = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))            # (N, V)
        losses = -log.gather(-1, column).squeeze(-1)                    # (N,)
        return losses, log.exp_().scatter_add_(-1, column, torch.full_like(column, -1, dtype=log.dtype))

    def in_place(self, logits: Tensor, target: Tensor, weights: Tensor) -> Tensor:      # (N, V), 2 x (N,)
        """The losses on a GPU, (N,) in float32, in one kernel; the logits become their gradients times the weights."""
        from course.ops.cross_entropy_triton import cross_entropy_  # Triton comes with PyTorch for GPUs alone

        return cross_entropy_(logits, target, weights)                  # (N,)


class ChunkedLoss(Function):
    """The sum of weight · cross-entropy over the tokens, from the input of the map to logits, a chunk of tokens at a time.

    Logits are the largest tensors of training: 50,304 numbers per token, where a block's output has 768. Here only one chunk's
    logits are in memory at a time. The forward pass computes their gradient at once, and from it the gradients of x and weight.
    It keeps only these two. The backward pass multiplies them by one number. So nothing is computed twice.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, target: Tensor, weights: Tensor, cross_entropy: CrossEntropy,
                size: int, chunk: Any = None) -> Tensor:                # (N, D), (V, D), (N,), (N,)
        low, wide = matmul_dtype(x), torch.promote_types(weight.dtype, torch.float32)
        matrix, sums, total, parts = weight.to(low), None, weights.new_zeros(()), []
        for rows, aims, factors in zip(x.to(low).split(size), target.split(size), weights.split(size), strict=True):
            loss, grad = (chunk or chunk_of_loss)(rows, matrix, aims, factors, cross_entropy)           # (), (n, V)
            total = total + loss
            parts.append(grad @ matrix)          # (n, D)
            sums = product_plus(sums, grad.T, rows, wide)               # (V, D)
            del grad                                                    # before the next chunk's logits
        ctx.save_for_backward(torch.cat(parts), sums)
        ctx.dtypes = x.dtype, weight.dtype
        return total                                                    # ()

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        to_x, to_weight = ctx.dtypes
        # dw in memory of its own; a second backward is an error from autograd, not a wrong number
        torch._foreach_mul_([dw], grad.to(dw.dtype))                    # twice as fast as dw.mul_(grad), which is not vectorized
        return dx.to(to_x) * grad, dw.to(to_weight), None, None, None, None, None


def product_plus(sums: Tensor | None, a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:       # (M, N), (M, K), (K, N)
    """a @ b in the dtype `wide`, added in place to the sums of before. On a GPU the product is not rounded first."""
    if not a.is_cuda or a.dtype == wide:
        product = (a @ b).to(wide)
        return product if sums is None else sums.add_(product)
    if sums is None:
        return torch.mm(a, b, out_dtype=wide)
    return torch.addmm(sums, a, b, out_dtype=wide, out=sums)


def chunk_of_loss(x: Tensor, weight: Tensor, target: Tensor, weights: Tensor,
                  cross_entropy: CrossEntropy) -> tuple[Tensor, Tensor]:
    """(sum of weight · cross-entropy; its gradient with respect to the logits, in their format): (n, D), (V, D) -> (), (n, V)."""
    logits = F.linear(x, weight)                                        # (n, V)
    losses, grad = cross_entropy.with_gradient(logits, target)          # (n,), (n, V)
    return (losses * weights).sum(), grad.mul_(weights[:, None].to(grad.dtype)).to(logits.dtype)


class Chunk:
    """`chunk_of_loss` as a part of the head that torch.compile compiles by itself. It is not a module: inside an autograd
    function, a module's hooks (those of PyTorch's FLOP counter) find no gradient function."""

    def __init__(self) -> None:
        self.run: Any = chunk_of_loss

    def __call__(self, x: Tensor, weight: Tensor, target: Tensor, weights: Tensor,      # (n, D), (V, D), 2 x (n,)
                 cross_entropy: Any) -> tuple[Tensor, Tensor]:
        in_place = vars(type(cross_entropy)).get("in_place")            # its own, none inherited by a class that changes the rest
        if in_place and x.is_cuda and x.dtype != torch.float64:
            logits = F.linear(x, weight)                                # (n, V)
            losses = in_place(cross_entropy, logits, target, weights)   # (n,)
            return (losses * weights).sum(), logits                     # the logits are now the gradients
        return self.run(x, weight, target, weights, cross_entropy)      # (), (n, V)

    def compile(self, **how: Any) -> None:
        """Compile the function for all later calls."""
        self.run = torch.compile(chunk_of_loss, **how)


# The loop over chunks stays out of the compiler (this is `torch.compiler.disable` without importing it here). The compiler would
# unroll all chunks into one program, which takes longer with each chunk, and reorder it. It sums the weight's gradients last, so
# those of all chunks are in memory, together with some chunks' gradients of logits. For 16 chunks of 512 tokens with 8192 logits
# each, forward and backward took 69 MB compiled and 39 MB in a loop
@torch._disable_dynamo
def chunked_loss(*given: Any) -> Tensor:
    """`ChunkedLoss`, chunk after chunk; without gradients its value alone."""
    return ChunkedLoss.apply(*given) if torch.is_grad_enabled() else sum_of_chunks(*given)


def sum_of_chunks(x: Tensor, weight: Tensor, target: Tensor, weights: Tensor, cross_entropy: CrossEntropy, size: int,
                  chunk: Chunk) -> Tensor:                              # (N, D), (V, D), (N,), (N,)
    """The same sum without gradients of x and weight. A chunk's gradient of logits is dropped; it takes no extra memory."""
    low, total = matmul_dtype(x), weights.new_zeros(())
    matrix = weight.to(low)                                             # (V, D)
    for rows, aims, factors in zip(x.to(low).split(size), target.split(size), weights.split(size), strict=True):
        total = total + chunk(rows, matrix, aims, factors, cross_entropy)[0]
    return total                                                        # ()


class Enter(nn.Module):
    """The input of the map to logits passes through here. With a cut vocabulary, ranks compute parts from here on."""

    seam = "enter"

    def forward(self, x: Tensor) -> Tensor:                             # (..., D)
        return x


class Head(nn.Module):
    """Map each token to the logits of the next, (B, T, V).

    In training with `loss_chunk`, and in evaluation with `loss_alone`, it returns the sum of the loss instead, a scalar, and
    never has all logits in memory. If the product runs in FP8 it always returns logits: that matmul records amaxes, and is not
    cut into chunks.
    """

    def __init__(self, c: GPTConfig):
        super().__init__()
        self.norm = norm(c)
        self.enter = Enter()
        self.proj = Linear(c.dim, c.vocab, bias=False)
        self.cross_entropy, self.chunk, self.of_chunk = CrossEntropy(), c.loss_chunk, Chunk()
        self.loss_alone = False                     # set by `course.training.validation.forward_only`

    def forward(self, x: Tensor, batch: Batch) -> Tensor:               # (B, T, D)
        x = self.enter(self.norm(x))                                    # (B, T, D)
        if not ((self.training or self.loss_alone) and self.chunk and self.proj.product.plain):
            return self.proj(x)                                         # (B, T, V)
        target, weights = batch["target"].clamp(min=0), token_weights(batch)            # 2 x (B, T)
        return chunked_loss(x.flatten(0, 1), self.proj.weight, target.flatten(), weights.flatten(), self.cross_entropy,
                            self.chunk, self.of_chunk)                  # ()


def token_weights(batch: Batch) -> Tensor:
    """1 for each token that counts in the loss, else 0, (B, T). In float64, which is exact beyond float32's 2^24."""
    return ((batch["target"] >= 0) & (batch["sample"] >= 0)[:, None]).double()


class NextToken(Loss):
    """(sum of the tokens' cross-entropies, number of tokens). A target of -1 weighs nothing, nor does a sample of -1, padding.

    Takes logits, or the sum that the head has computed from them; with experts, in training, also their auxiliary loss of each
    sample, which counts once for each of its tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = CrossEntropy()
        self.sum_over_tokens = SumOverTokens()

    def forward(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:              # (B, T, V) or ()
        weights = token_weights(batch)                                                  # (B, T)
        if isinstance(output, tuple):
            output, penalty = output                                                    # ..., (B,)
            total, weight = self(output, batch)
            return total + (penalty * self.sum_over_tokens(weights.sum(1))).sum(), weight
        if output.dim():
            output = (self.cross_entropy(output, batch["target"].clamp(min=0)) * weights).sum()         # ()
        total, weight = self.sum_over_tokens(torch.stack([output, weights.sum()]))
        return total, weight

    def weight(self, batch: Batch) -> Tensor:
        """The number of tokens of each sample that count, (B,)."""
        return token_weights(batch).sum(1)


VOCABULARY_PLAN = {**TENSOR_PLAN, "embed.token": "vocabulary", "head.proj": "vocabulary_head"}
# tensors with tokens as dim 1: every tensor-parallel rank looks up and predicts all tokens, in its part of the vocabulary
TOKEN_PLAN = {"tokens": "context", "target": "context", "position": "sequence", "seen": "context",
              "real": "sequence"}


def experts_plan(c: GPTConfig) -> dict[str, str]:
    """The tensor plan of a model with experts, which itself cuts the experts' weights: it names the linears that are left."""
    dense = not all(c.has_experts(block) for block in range(c.depth))
    shared = {"shared.up": "column", "shared.down": "row"} if c.shared_experts else {}
    return {name: style for name, style in VOCABULARY_PLAN.items() if dense or not name.startswith("mlp.")} | shared


class GPT(Model):
    """Logits of the next token, (B, T, V), from the tokens up to each position; in training see `Head`."""

    tensor_plan: Mapping[str, str] = VOCABULARY_PLAN
    token_plan = TOKEN_PLAN

    def __init__(self, c: GPTConfig, seed: int = 0):
        super().__init__(c, seed)
        self.embed = Embed(c)
        self.blocks = nn.ModuleDict({str(i): (MoEBlock if c.has_experts(i) else Block)(c, f"blocks.{i}") for i in range(c.depth)})
        if c.experts:
            self.tensor_plan = experts_plan(c)
        self.head = Head(c)
        if c.tied:
            self.head.proj.weight = self.embed.token.weight
        self.float32_sums = ("head.proj.weight",) if c.loss_chunk else ()               # in ChunkedLoss
        self.loss = NextToken()

    def init_plan(self) -> dict[str, Rule]:
        """Pattern of serial names -> standard deviation, "ones" or "zeros"; the first match counts.

        The variances of the 2·depth residual branches add up: their last weights start so small that the sum is 0.02^2
        (Radford et al. 2019, section 2.3).
        """
        residual = 0.02 / math.sqrt(2 * self.c.depth)
        return {"*norm*.weight": "ones", "*.bias": "zeros", "*.attn.out.weight": residual, "*.mlp.down.weight": residual,
                "*.experts.down": residual, "*.shared.down.weight": residual, "*": 0.02}

    def prepare(self, batch: Batch, step: Tensor) -> Batch:
        """Prepare a loader's batch, `tokens` (B, T + 1): `tokens`, `target` and `position`, (B, T) each, and `sample`, (B,).

        With rotary positions also `seen`, the `position` of the tokens that attention sees, which sequence parallelism does not
        cut. In training with dropout also `keys`, one random key per sample, (B,). A batch may bring its own `target`, (B, T),
        with -1 for tokens to ignore. Raises `CourseError` if T is more than the context.
        """
        sample, tokens = batch["sample"], batch["tokens"][:, :-1]
        target = batch["target"] if "target" in batch else batch["tokens"][:, 1:]
        T = tokens.shape[1]
        if self.c.context < T:
            raise CourseError(f"a sample of {T} tokens is longer than model.context={self.c.context}: "
                              "make the samples shorter or model.context larger")
        position = torch.arange(T, device=sample.device).expand(len(sample), T)
        ready = {"sample": sample, "tokens": tokens, "target": target, "position": position}
        if self.c.position == "rotary":
            ready["seen"] = position
        if self.c.experts:                          # tokens that no layout and no loader has added
            ready["real"] = (sample >= 0)[:, None].expand(len(sample), T)
        if self.training and self.c.dropout:
            ready["keys"] = random.sample_keys(self.seed, step, sample)
        return ready

    def forward(self, batch: Batch, x: Any = None) -> Any:
        """The output for a prepared batch. A pipeline stage, which lacks some parts, gets the previous one's output as `x`.

        With experts, the auxiliary loss of each sample goes along, (B,), to the output in training.
        """
        x, penalty = x if isinstance(x, tuple) else (x, None)           # (B, T, D), (B,)
        if self.embed is not None:
            x = self.embed(batch)                                       # (B, T, D)
            penalty = x.new_zeros(len(x), dtype=torch.promote_types(x.dtype, torch.float32)) if self.c.experts else None
        if "seen" in batch:                                             # the same angles for all blocks: computed once
            dtype = torch.promote_types(x.dtype, torch.float32)
            cos_sin = rope_cos_sin(batch["seen"][0], self.c.head_width, self.c.rope_theta, dtype, self.c.stretch)
            batch = {**batch, "rope": cos_sin}                          # (2, T, d / 2)
        for block in self.blocks.values():
            x = block(x, batch)                                         # (B, T, D)
            if isinstance(x, tuple):
                x, more = x                                             # (B, T, D), (B,)
                penalty = penalty + more
        if self.head is None:
            return x if penalty is None else (x, penalty)
        output = self.head(x, batch)                                    # (B, T, V)
        return (output, penalty) if self.training and penalty is not None else output

    def compiled_parts(self) -> list[Any]:
        """The parts of any model, and the chunk: the head leaves the compiler between chunks."""
        return [*super().compiled_parts(), *([self.head.of_chunk] if isinstance(self.head, Head) else [])]

    def want_loss_alone(self, alone: bool) -> None:
        """If alone, the head returns the sum of the loss and never holds all logits."""
        if isinstance(self.head, Head):
            self.head.loss_alone = alone

    def example(self, samples: int, device: torch.device, first: int = 0) -> Batch:
        """A random batch in the shapes of a loader's: samples `first` and on, the same in every run."""
        length = self.c.context + 1
        counter = torch.arange(first * length, (first + samples) * length, device=device).view(samples, length)
        tokens = (random.uniform(random.key("example", "tokens"), counter) * self.c.words).long()
        return {"tokens": tokens, "sample": torch.arange(first, first + samples, device=device)}
