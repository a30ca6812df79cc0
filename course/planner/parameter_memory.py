"""Bytes of a rank's parameters and of what belongs to each of them: gradient, states, average, copies in 16 bits.

`memory.py` adds them to what a step keeps on its way (`activation_memory.py`). A `Rank` is what one rank of a layout has to do.
"""

from dataclasses import dataclass
from functools import cached_property

from course.config import Config
from course.models import DiTConfig, GPTConfig
from course.models.dit import TimestepEmbedder
from course.ops.number_formats import LOW_PRECISION


@dataclass(frozen=True)
class Rank:
    """What a rank of a layout has to do: its share of the model and of the samples."""

    config: Config
    stage: int                                      # its place along pp
    shares: tuple[int, ...]                         # blocks of each of its chunks
    samples: int                                    # B, of a micro-batch
    micros: int                                     # micro-batches of a step
    whole: int                                      # T, tokens of a sample
    tokens: int                                     # of these, over cp
    local: int                                      # and with sequence parallelism over tp

    @property
    def first(self) -> bool:
        """Whether the embedding is here."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether head and loss are here."""
        return self.stage == self.config.parallel.pp - 1

    @property
    def n(self) -> int:
        """Tokens of a micro-batch that its matmuls see."""
        return self.samples * self.tokens

    @property
    def s(self) -> int:
        """Tokens of a micro-batch that its norms see."""
        return self.samples * self.local

    @property
    def blocks(self) -> int:
        """How many of the model's blocks are here, of all chunks."""
        return sum(self.shares)

    @cached_property
    def weights(self) -> tuple[int, int]:
        """`count` of it, which many terms need."""
        return count(self)


# ---- formats

def low(c: Config) -> int:
    """Bytes of a number that matmuls and attention multiply."""
    return 2 if c.precision in LOW_PRECISION else wide(c)


def wide(c: Config) -> int:
    """Bytes of a parameter, a gradient, a state, and of sums and norms."""
    return 8 if c.precision == "fp64" else 4


def stream(c: Config) -> int:
    """Bytes of a number that flows between blocks. DiT's is its first map's result, in the format of the matmuls anyway."""
    return low(c) if c.stream == "narrow" or isinstance(c.model, DiTConfig) else wide(c)


# ---- parameters and what belongs to them

def hidden(c: Config) -> int:
    """M, the MLP's width on a rank."""
    return c.model.hidden // c.parallel.tp


def widths(c: Config) -> tuple[int, int]:
    """(features of the queries, of keys and values together) on a rank."""
    m = c.model
    return m.dim // c.parallel.tp, 2 * m.groups * (m.dim // m.heads) // c.parallel.tp


def patch(c: Config) -> int:
    """P, values of a patch."""
    m = c.model
    return 0 if isinstance(m, GPTConfig) else (m.latent[0] if isinstance(m, DiTConfig) else m.channels) * m.patch**2


def gated(c: Config) -> int:
    """How many maps lead into the MLP's hidden units: 2 with gates."""
    return 2 if isinstance(c.model, GPTConfig) and c.model.mlp == "swiglu" else 1


def norm_weights(c: Config) -> int:
    """Numbers of a norm's weights."""
    m = c.model
    return 0 if isinstance(m, DiTConfig) else m.dim if isinstance(m, GPTConfig) and m.norm == "rms" else 2 * m.dim


def block_weights(c: Config) -> tuple[int, int]:
    """(weights of a block's four linears, of its modulation) on a rank: D·(D + K) for queries, keys and values with K features of
    the latter two, D² out, 2·D·M for the MLP (3 with gates); DiT's 6·D²; all over tp."""
    D, (q, kv), M = c.model.dim, widths(c), hidden(c)
    return D * (q + kv) + q * D + (gated(c) + 1) * D * M, D * modulation(c, 6)


def modulation(c: Config, numbers: int) -> int:
    """Features of a modulation on a rank, so many for each of the model's; 0 where there is none."""
    return numbers * c.model.dim // c.parallel.tp if isinstance(c.model, DiTConfig) else 0


def block_parameters(c: Config) -> int:
    """All parameters of a block: the linears' weights, their biases, two norms."""
    D, (q, kv) = c.model.dim, widths(c)
    biases = q + kv + D + gated(c) * hidden(c) + D + modulation(c, 6)
    has = c.model.bias if isinstance(c.model, GPTConfig) else True
    return sum(block_weights(c)) + biases * has + 2 * norm_weights(c)


def embedding(c: Config) -> tuple[int, int]:
    """(weights of linears before the blocks, all other parameters there)."""
    m, D, P = c.model, c.model.dim, patch(c)
    match m:
        case GPTConfig():
            return 0, m.vocab * D // c.parallel.tp + (m.context * D if m.position == "learned" else 0)
        case DiTConfig():
            return P * D + TimestepEmbedder.WAVES * D + D * D, 3 * D + (m.classes + 1) * D
        case _:
            return P * D, D + m.tokens * D


def head(c: Config) -> tuple[int, int]:
    """(weights of linears after the blocks, all other parameters there). GPT's map to logits counts here even if it is tied."""
    m, D, P = c.model, c.model.dim, patch(c)
    if isinstance(m, GPTConfig):
        return m.vocab * D // c.parallel.tp, norm_weights(c)
    bias = P if getattr(m, "head_bias", True) else 0
    return D * P + D * modulation(c, 2), norm_weights(c) + bias + modulation(c, 2)


def count(rank: Rank) -> tuple[int, int]:
    """(weights that only linears use and autocast would cast, all other parameters) of a rank.

    Of the former there may be 16-bit copies (`zero1.castable_weights`). Those of gradients that are completed in float32 count as
    others: with sequence parallelism what tp does not cut, whose gradients are in parts; GPT's head, which adds its own up over
    chunks.
    """
    c = rank.config
    linear, every = rank.blocks * sum(block_weights(c)), rank.blocks * block_parameters(c)
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
        every -= head(c)[0]                          # the weight is there once
    return linear - partial, every - linear + partial


def replicas(c: Config) -> int:
    """Ranks over which gradients are averaged, and ZeRO-1 cuts."""
    return max(c.parallel.dp, 1) * c.parallel.cp


def sharded(c: Config) -> int:
    """Over how many ranks states are cut."""
    return replicas(c) if c.parallel.zero else 1


def own_masters(c: Config) -> bool:
    """Whether one rank alone computes with 16-bit copies (`course/parallel/data_parallel/master_weights.py`)."""
    return replicas(c) == 1 and c.masters and c.precision in ("bf16", "fp16")


def narrow_weights(c: Config) -> bool:
    """Whether the rank computes with 16-bit copies and has masters of its share: so, or ZeRO-1 in bf16 or fp16."""
    return own_masters(c) or (sharded(c) > 1 and c.precision in ("bf16", "fp16"))


def narrow(rank: Rank) -> int:
    """How many weights these copies have."""
    return rank.weights[0] if narrow_weights(rank.config) else 0


def parameters(rank: Rank) -> float:
    """4 bytes a parameter; of those with 16-bit copies, these alone, and the optimizer has the rest."""
    return sum(rank.weights) * wide(rank.config) - narrow(rank) * (wide(rank.config) - 2)


def gradients(rank: Rank, done: float) -> float:
    """4 bytes a parameter, 2 of a copy in 16 bits without buckets, if there is one micro-batch. Buckets hold them from the start,
    a second micro-batch finds them; otherwise they come in backward."""
    c = rank.config
    always = (replicas(c) > 1 and c.parallel.data in ("bucketed", "ddp")) or rank.micros > 1
    size = sum(rank.weights) * wide(c) - (narrow(rank) * (wide(c) - 2) if own_masters(c) and rank.micros == 1 else 0)
    return size * (1.0 if always else done)


def states(rank: Rank) -> float:
    """Adam's two, 8 bytes a parameter, over the ranks of ZeRO-1; and the rank's share of float32 masters (Rajbhandari et al.
    2020, arXiv:1910.02054, section 3.1). SGD has one with momentum."""
    c = rank.config
    each = 2 if c.optim.name == "adam" else 1 if c.optim.momentum else 0
    return (each * sum(rank.weights) + narrow(rank)) * wide(c) / sharded(c)


def average(rank: Rank) -> float:
    """4 bytes of each parameter that this rank updates, with optim.ema."""
    return sum(rank.weights) * wide(rank.config) / sharded(rank.config) if rank.config.optim.ema else 0.0


def copies(rank: Rank, live: float) -> float:
    """Casts of the blocks' weights, kept for backward: 2 bytes a weight, for each micro-batch under way, whose forward pass makes
    its own. live: how many blocks' activations there are, over all micro-batches.

    native FP8 keeps the transpose, 1 byte. Compiled blocks that compute again cast again; eager ones have autocast's cache of
    all casts until the forward pass ends. Where the weights are in 16 bits nothing is cast.
    """
    c = rank.config
    if c.precision not in LOW_PRECISION:
        return 0.0
    four, modulated = block_weights(c)
    casts = 0 if narrow_weights(c) else 2
    if c.train.recompute != "none":
        return min(live, rank.blocks) * casts * (four + modulated) if not c.compile and c.precision != "fp8" else 0.0
    if c.precision == "fp8":
        return live * (four * (1 if c.fp8.by == "native" else 2) + 2 * modulated)  # the modulation stays in bf16, fp8.keep
    return live * casts * (four + modulated)


def tokens_of(config: Config) -> int:
    """Tokens of a sample on the rank along cp that has most; of a GPT two pieces of a zigzag, unless heads are cut instead."""
    m, p = config.model, config.parallel
    if isinstance(m, GPTConfig) and p.cp > 1 and p.context != "all_to_all":
        return 2 * -(-m.tokens // (2 * p.cp))
    return -(-m.tokens // p.cp)


def uneven(config: Config) -> bool:
    """Whether tp's ranks cannot have equally many of these: then they are padded, and go by NCCL in any case."""
    return tokens_of(config) % config.parallel.tp > 0
