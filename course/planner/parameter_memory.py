"""Bytes of a rank's parameters, gradients, optimizer states, moving average and 16-bit copies.

`peak_memory.py` adds activations and temporaries (`activation_memory.py`). A `Rank` describes the share of work of one rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from course.config import Config
from course.config.context_choice import context_method
from course.models import DiTConfig, GPTConfig
from course.models.dit import TimestepEmbedder
from course.ops.number_formats import LOW_PRECISION


@dataclass(frozen=True)
class Rank:
    """One rank's share of the model and of the samples."""

    config: Config
    stage: int                                      # rank along pp
    shares: tuple[int, ...]                         # blocks in each chunk
    samples: int                                    # B, samples per micro-batch
    micros: int                                     # micro-batches per step
    whole: int                                      # T, tokens per sample
    tokens: int                                     # of these, on one cp rank
    local: int                                      # of these, on one tp rank with sequence parallelism

    @property
    def first(self) -> bool:
        """Whether this rank has the embedding."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether this rank has head and loss."""
        return self.stage == self.config.parallel.pp - 1

    @property
    def n(self) -> int:
        """Tokens per micro-batch in the matmuls."""
        return self.samples * self.tokens

    @property
    def s(self) -> int:
        """Tokens per micro-batch in the norms."""
        return self.samples * self.local

    @property
    def blocks(self) -> int:
        """Number of blocks on this rank, over all chunks."""
        return sum(self.shares)

    @cached_property
    def mixtures(self) -> int:
        """Number of these blocks that have experts."""
        m, p = self.config.model, self.config.parallel
        if not isinstance(m, GPTConfig) or not m.experts:
            return 0
        parts, found = p.pp * p.chunks, 0
        for chunk, number in enumerate(self.shares):
            part = chunk * p.pp + self.stage
            first = part * (m.depth // parts) + min(part, m.depth % parts)
            found += sum(m.has_experts(block) for block in range(first, first + number))
        return found

    @property
    def experts(self) -> int:
        """Number of the experts' parameters on this rank."""
        return self.mixtures * expert_weights(self.config) if self.mixtures else 0

    @cached_property
    def weights(self) -> tuple[int, int]:
        """`count` of this rank, cached because many terms need it."""
        return count(self)


# ---- formats

def low(c: Config) -> int:
    """Bytes per number in matmuls and attention."""
    return 2 if c.precision in LOW_PRECISION else wide(c)


def wide(c: Config) -> int:
    """Bytes per number of parameters, gradients, states, sums and norms."""
    return 8 if c.precision == "fp64" else 4


def stream(c: Config) -> int:
    """Bytes per number of the residual stream. DiT's is the output of its first linear, so always in the matmuls' format."""
    return low(c) if c.stream == "narrow" or isinstance(c.model, DiTConfig) else wide(c)


# ---- parameters, gradients, states

def hidden(c: Config) -> int:
    """M, the MLP's width on a rank."""
    return c.model.hidden // c.parallel.tp


def widths(c: Config) -> tuple[int, int]:
    """(features of the queries, of keys and values together) on a rank."""
    m = c.model
    return m.attention_width // c.parallel.tp, 2 * m.groups * m.head_width // c.parallel.tp


def patch(c: Config) -> int:
    """P, values per patch; 0 for a GPT."""
    m = c.model
    return 0 if isinstance(m, GPTConfig) else (m.latent[0] if isinstance(m, DiTConfig) else m.channels) * m.patch**2


def gated(c: Config) -> int:
    """Number of linears into the MLP's hidden units: 2 for SwiGLU, else 1."""
    return 2 if isinstance(c.model, GPTConfig) and c.model.mlp == "swiglu" else 1


def norm_weights(c: Config) -> int:
    """Number of parameters of a norm."""
    m = c.model
    return 0 if isinstance(m, DiTConfig) else m.dim if isinstance(m, GPTConfig) and m.norm == "rms" else 2 * m.dim


def head_norm_weights(c: Config) -> int:
    """Number of parameters of the norms of a block's queries and keys, which tp does not cut."""
    return 2 * c.model.head_width if normed_heads(c) else 0


def normed_heads(c: Config) -> bool:
    """Whether queries and keys are normed."""
    return isinstance(c.model, GPTConfig) and c.model.qk_norm


def block_weights(c: Config, mixture: bool = False) -> tuple[int, int]:
    """(weights of a block's linears, weights of its modulation or experts, which FP8 leaves in 16 bits) on a rank, all divided by
    tp. mixture: of a block with experts.

    D·(H + K) for queries, keys and values, with H features of queries and K of keys and values; H·D for the output; 2·D·M for
    the MLP (3 with gates), or for the shared experts. Modulation: 6·D² for DiT."""
    D, (q, kv), M = c.model.dim, widths(c), shared_hidden(c) if mixture else hidden(c)
    return D * (q + kv) + q * D + (gated(c) + 1) * D * M, expert_weights(c) if mixture else D * modulation(c, 6)


def expert_weights(c: Config) -> int:
    """Number of weights of a block's experts on a rank: ep and tp divide them."""
    assert isinstance(c.model, GPTConfig)
    return (gated(c) + 1) * c.model.dim * c.model.experts * c.model.expert_hidden // c.parallel.ep // c.parallel.tp


def fullest_share(c: Config) -> float:
    """Rows that the experts of the fullest rank take, over the choices of a rank's tokens: `parallel.imbalance`, at most ep and
    what the experts' capacity lets pass."""
    assert isinstance(c.model, GPTConfig)
    share = min(c.parallel.imbalance, c.parallel.ep)                    # without ep all choices of its tokens
    return min(share, c.model.capacity_factor or share)


def gathers(c: Config) -> int:
    """The ep ranks whose tokens each rank gathers, as parallel.dispatch=gather has it; else 1."""
    return c.parallel.ep if c.parallel.dispatch == "gather" else 1


def expert_waits(c: Config) -> int:
    """How often the host waits in one forward pass of a block's experts, which breaks compiled graphs: for the numbers of rows to
    send, and for the groups of both matmuls in formats without a grouped kernel."""
    return (c.parallel.ep > gathers(c)) + 2 * (c.precision not in ("bf16", "fp8"))


def shared_hidden(c: Config) -> int:
    """The width of the shared experts, as one MLP, on a rank."""
    assert isinstance(c.model, GPTConfig)
    return c.model.shared_experts * c.model.expert_hidden // c.parallel.tp


def over_blocks(rank: Rank, count: Callable[..., float]) -> float:
    """The sum of a count over all blocks of a rank. count: whether it has experts -> the number of one block."""
    dense = rank.blocks - rank.mixtures
    return (dense * count(False) if dense else 0) + (rank.mixtures * count(True) if rank.mixtures else 0)


def modulation(c: Config, numbers: int) -> int:
    """Features of a DiT modulation on a rank, with `numbers` per feature of the model; 0 for other models."""
    return numbers * c.model.dim // c.parallel.tp if isinstance(c.model, DiTConfig) else 0


def block_parameters(c: Config, mixture: bool = False) -> int:
    """Number of parameters of a block on a rank: weights, biases, two norms, those of heads, and a router with experts."""
    D, (q, kv), router = c.model.dim, widths(c), 0
    biases = q + kv + D + gated(c) * hidden(c) + D + modulation(c, 6)
    if mixture:
        assert isinstance(c.model, GPTConfig)
        router = c.model.experts * (D + (c.model.balance_rate > 0))
        biases = q + kv + D + (gated(c) * shared_hidden(c) + D) * (c.model.shared_experts > 0)
    has = c.model.bias if isinstance(c.model, GPTConfig) else True
    return sum(block_weights(c, mixture)) + router + biases * has + 2 * norm_weights(c) + head_norm_weights(c)


def embedding(c: Config) -> tuple[int, int]:
    """(weights of linears before the blocks, all other parameters before the blocks)."""
    m, D, P = c.model, c.model.dim, patch(c)
    match m:
        case GPTConfig():
            return 0, m.vocab * D // c.parallel.tp + (m.context * D if m.position == "learned" else 0)
        case DiTConfig():
            return P * D + TimestepEmbedder.WAVES * D + D * D, 3 * D + (m.classes + 1) * D
        case _:
            return P * D, D + m.tokens * D


def head(c: Config) -> tuple[int, int]:
    """(weights of linears after the blocks, all other parameters after the blocks). A GPT's logit weight counts even if tied."""
    m, D, P = c.model, c.model.dim, patch(c)
    if isinstance(m, GPTConfig):
        return m.vocab * D // c.parallel.tp, norm_weights(c)
    bias = P if getattr(m, "head_bias", True) else 0
    return D * P + D * modulation(c, 2), norm_weights(c) + bias + modulation(c, 2)


def count(rank: Rank) -> tuple[int, int]:
    """(weights that may have 16-bit copies, all other parameters) of a rank, as in `zero1.castable_weights`.

    Linears and experts use the former. Weights whose gradients are completed in float32 count as others: with sequence
    parallelism those that tp does not split, whose gradients are partial; and a GPT's head, which sums its gradient over chunks.
    """
    c = rank.config
    linear = int(over_blocks(rank, lambda mixture: sum(block_weights(c, mixture))))
    every = int(over_blocks(rank, lambda mixture: block_parameters(c, mixture)))
    partial = 0
    tied = isinstance(c.model, GPTConfig) and c.model.tied
    for here, (weights, others), cut in ((rank.first, embedding(c), 0), (rank.last, head(c), c.model.dim * modulation(c, 2))):
        if here:
            linear += weights
            every += weights + others
            partial += weights - cut if c.parallel.sp and c.parallel.tp > 1 and not isinstance(c.model, GPTConfig) else 0
    if rank.last and isinstance(c.model, GPTConfig) and (c.model.tied or c.model.loss_chunk):
        linear -= head(c)[0]
    if rank.last and rank.first and tied:
        every -= head(c)[0]                          # one tied weight
    return linear - partial, every - linear + partial


def replicas(c: Config) -> int:
    """Number of ranks over which gradients are averaged."""
    return max(c.parallel.dp, 1) * c.parallel.cp


def shard_size(c: Config) -> int:
    """Number of ranks over which optimizer states are sharded, from stage 2 on also gradients, in stage 3 also weights."""
    return (c.parallel.shard or replicas(c)) if c.parallel.zero else 1


def per_share(rank: Rank, every: float, experts: float) -> float:
    """What a rank has of the numbers that ZeRO shards, `every` before it does, of which `experts` belong to experts.

    These are sharded over the ranks that hold the same experts: dp x cp / ep.
    """
    c = rank.config
    if c.parallel.ep == 1:
        return every / shard_size(c)
    return (every - experts) / shard_size(c) + experts / (max(replicas(c) // c.parallel.ep, 1) if c.parallel.zero else 1)


def stage(c: Config) -> int:
    """ZeRO's stage; one rank alone has no stage 1."""
    return c.parallel.zero if replicas(c) > 1 or c.parallel.zero >= 2 else 0


def own_masters(c: Config) -> bool:
    """Whether a single data-parallel rank has 16-bit weights and masters (`course/parallel/data_parallel/master_weights.py`)."""
    return replicas(c) == 1 and stage(c) < 2 and c.masters and c.precision in ("bf16", "fp16")


def small_weights(c: Config) -> bool:
    """Whether the weights of the blocks' linears are gathered in 8 bits (`course/parallel/data_parallel/fsdp.py`)."""
    return stage(c) == 3 and c.precision == "fp8" and c.fp8.by == "native" and c.fp8.recipe == "delayed"


def narrow_weights(c: Config) -> bool:
    """Whether the rank computes with 16-bit weights and holds masters: `own_masters`, or ZeRO in bf16 or fp16."""
    return own_masters(c) or (stage(c) > 0 and c.precision in ("bf16", "fp16"))


def narrow(rank: Rank) -> int:
    """Number of 16-bit weights with masters."""
    return rank.weights[0] if narrow_weights(rank.config) else 0


def parameters(rank: Rank) -> float:
    """Bytes of the parameters: 4 each, or 2 for 16-bit weights, whose masters count as `states`."""
    return sum(rank.weights) * wide(rank.config) - narrow(rank) * (wide(rank.config) - 2)


def gradients(rank: Rank, done: float) -> float:
    """Bytes of the gradients: 4 per parameter, or 2 for 16-bit weights of `own_masters` with one micro-batch.

    Buckets hold gradients from the start, and later micro-batches find them. Otherwise backward creates them: `done` of them."""
    c = rank.config
    always = (replicas(c) > 1 and c.parallel.data in ("bucketed", "ddp")) or rank.micros > 1
    size = sum(rank.weights) * wide(c) - (narrow(rank) * (wide(c) - 2) if own_masters(c) and rank.micros == 1 else 0)
    return size * (1.0 if always else done)


def states(rank: Rank) -> float:
    """Bytes of the optimizer states and masters, sharded by ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1). Adam
    has two states, 8 bytes per parameter; SGD one with momentum, else none; Muon one for the blocks' matrices, and Adam's for the
    rest. In stages 2 and 3 all parameters have masters."""
    c = rank.config
    each = 2 if c.optim.adam or c.optim.name == "muon" else 1 if c.optim.momentum else 0
    spared = over_blocks(rank, lambda mixture: sum(block_weights(c, mixture))) - rank.experts if c.optim.name == "muon" else 0
    masters, own = (sum(rank.weights), rank.experts) if stage(c) >= 2 else (narrow(rank), rank.experts * narrow_weights(c))
    return per_share(rank, each * sum(rank.weights) - spared + masters, each * rank.experts + own) * wide(c)


def average(rank: Rank) -> float:
    """Bytes of the moving average with optim.ema: 4 per parameter that this rank updates."""
    return per_share(rank, sum(rank.weights), rank.experts) * wide(rank.config) if rank.config.optim.ema else 0.0


def copies(rank: Rank, live: float) -> float:
    """Bytes of the blocks' weight casts that backward needs: 2 per weight and micro-batch in flight, since each pass casts.

    live: blocks with live activations, over all micro-batches. Native FP8 keeps the transpose, 1 byte. With recomputation,
    compiled blocks and experts cast again, and eager ones keep autocast's cache until the forward pass ends. 16-bit weights need
    no casts.
    """
    c = rank.config
    if c.precision not in LOW_PRECISION:
        return 0.0
    four = over_blocks(rank, lambda mixture: block_weights(c, mixture)[0]) / rank.blocks
    modulated = over_blocks(rank, lambda mixture: block_weights(c, mixture)[1]) / rank.blocks           # or experts
    casts = 0 if narrow_weights(c) else 2
    if c.train.recompute != "none":
        modulated -= rank.experts / rank.blocks
        return min(live, rank.blocks) * casts * (four + modulated) if not c.compile and c.precision != "fp8" else 0.0
    if small_weights(c):
        return live * 2 * modulated
    if c.precision == "fp8":
        return live * (four * (1 if c.fp8.by == "native" else 2) + 2 * modulated)  # the modulation stays in bf16, fp8.keep
    return live * casts * (four + modulated)


def tokens_of(config: Config) -> int:
    """Tokens per sample on the fullest cp rank. A GPT's rank has two zigzag pieces, unless all_to_all splits heads instead."""
    m, p = config.model, config.parallel
    if isinstance(m, GPTConfig) and p.cp > 1 and context_method(config) != "all_to_all":
        return 2 * -(-m.tokens // (2 * p.cp))
    return -(-m.tokens // p.cp)


def uneven(config: Config) -> bool:
    """Whether tp does not divide these tokens: then they are padded, and always go through NCCL."""
    return tokens_of(config) % config.parallel.tp > 0
