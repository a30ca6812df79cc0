"""How many bytes a training step needs on the fullest rank, predicted from the configuration alone.

`predict(config)` adds up what is alive at each moment at which a step can be at its fullest, and takes the largest:

    first        before there are optimizer states. In its first step FP8 with delayed scales multiplies in 16 bits; and the
                 stages of a pipeline get to know each other by more forward passes than will ever wait (`Pipeline._agree`)
    loss         the last micro-batch's forward pass is done: all that backward needs is there, and the head at work
    backward     the last block's backward pass: the head's is done, and what one block computes on the way is there
    end          the first block's: all gradients are there, and hardly any activations
    optimizer    gradients and states, no activations

It counts what `torch.cuda.max_memory_allocated` counts, from the start of the process. Every term is a function of its own.

Units. n = B·T tokens of a micro-batch that a rank multiplies, s those of its norms and sums (with sequence parallelism s = n/tp,
else s = n), D the width, M the MLP's, both over tp where tp cuts. Bytes a number: `low` of the matmuls, `stream` of what flows
between blocks. A reader can check a block by counting tensors of n·D numbers: in 16 bits, without parallelism, a GELU block keeps

    eager                18        two inputs of norms, in float32: 2·2; what norms put out: 2; queries, keys, values: 3;
                                   attention's answer: 1; hidden units before and after GELU: 8
    compiled             17, 16    wide, narrow stream: the second norm's input is not kept but computed again, as the first plus
                                   what attention's branch added; the latter is kept instead, in 16 bits
    compiled, selective  11, 10    neither norms' results nor GELU's
    full                 2, 1      the block's input

and some statistics. The way to count is that of Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1, where a block keeps
34·n·D bytes with dropout; what is kept here is what this library's blocks keep, as the tests see it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache

from course.compilation import attention_leaves
from course.config import Config
from course.models import DiTConfig, GPTConfig
from course.models.dit import Time
from course.parallel.schedule import alive, passes_of
from course.precision import LOW

MIB = 2**20
# cuBLAS's workspace, from PyTorch's allocator: its default on Hopper (PyTorch, CUDA semantics, "cuBLAS workspaces")
CUBLAS = 32 * MIB
# Not predictions but a margin, a rule of thumb that nothing here has measured yet: what the driver and the compiled code of a
# process take, and what the allocator holds in pieces that fit nobody
CONTEXT, FRAGMENTS = 512 * MIB, 0.03
Terms = dict[str, float]


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank at its fullest moment."""

    parameters: int                                 # in the optimizer's format, or with ZeRO-1 what the rank computes with
    gradients: int
    states: int                                     # the optimizer's, and with ZeRO-1 the rank's share of master weights
    average: int                                    # the weights' moving average
    copies: int                                     # of weights in 16 bits, cast for the matmuls and kept for their backward
    activations: int                                # what blocks, embedding and head's norm keep for backward
    logits: int                                     # what the head puts out, and what the loss makes of it
    batch: int                                      # the loader's, and as the model takes it
    buffers: int                                    # what goes between ranks: shares of gradients, messages of a pipeline
    workspace: int                                  # what is computed on the way and soon forgotten
    reserve: int                                    # beside tensors: the process's own, and the allocator's odd pieces
    moment: str                                     # which one: first, loss, backward, end or optimizer
    stage: int                                      # which rank along pp

    @property
    def allocated(self) -> int:
        """The bytes of all tensors, which `torch.cuda.max_memory_allocated` measures."""
        return sum(getattr(self, name) for name in TENSORS)

    @property
    def total(self) -> int:
        """What the device has to have."""
        return self.allocated + self.reserve


TENSORS = tuple(entry.name for entry in fields(Memory) if entry.name not in ("reserve", "moment", "stage"))


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
        return self.stage == 0

    @property
    def last(self) -> bool:
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
        return sum(self.shares)

    @cached_property
    def weights(self) -> tuple[int, int]:
        """`count` of it, which many terms need."""
        return count(self)

    @cached_property
    def kept(self) -> float:
        """Bytes that one of its blocks keeps of one micro-batch."""
        return sum(block(self).values())


def predict(config: Config) -> Memory:
    """The memory of the fullest rank in training. parallel.dp=0 counts as 1: it depends on how many GPUs there will be.

    Of a pipeline only both ends are looked at: no other stage has more blocks or keeps more micro-batches than the first one.
    """
    pp = config.parallel.pp
    return max((of_rank(rank) for rank in ranks(config, sorted({0, pp - 1}))), key=lambda memory: memory.total)


def ranks(config: Config, stages: Iterable[int] = ()) -> Iterator[Rank]:
    """The first rank along dp, cp and tp, which has the most samples and tokens, of these pipeline stages, or of each."""
    p, t, m = config.parallel, config.train, config.model
    samples = -(-t.global_batch // max(p.dp, 1))
    micro = min(t.micro_batch or samples, samples)
    whole = m.context if isinstance(m, GPTConfig) else m.tokens
    tokens = -(-whole // p.cp)
    if isinstance(m, GPTConfig) and p.cp > 1 and p.context != "all_to_all":
        tokens = 2 * -(-whole // (2 * p.cp))        # two pieces of a zigzag
    local = -(-tokens // p.tp) if p.sp else tokens
    parts = p.pp * p.chunks
    for stage in stages or range(p.pp):
        shares = tuple(m.depth // parts + (chunk * p.pp + stage < m.depth % parts) for chunk in range(p.chunks))
        yield Rank(config, stage, shares, micro, -(-samples // micro), whole, tokens, local)


def of_rank(rank: Rank) -> Memory:
    """The memory of one rank at its fullest moment."""
    found = [memory_at(moment, rank) for moment in ("loss", "backward", "end", "optimizer")]
    return max([*found, *beginning(rank)], key=lambda memory: memory.total)


def beginning(rank: Rank) -> Iterator[Memory]:
    """What the first step needs, where that is not what the others do: it has no states yet."""
    c = rank.config
    if c.precision == "fp8" and c.fp8.by == "hand" and c.fp8.recipe == "delayed":
        # without ZeRO-1, which in bf16 would keep 16-bit copies of the weights
        plain = replace(rank, config=replace(c, precision="bf16", parallel=replace(c.parallel, zero=False)))
        yield from (first(memory_at(moment, plain), rank) for moment in ("loss", "backward"))
    if c.parallel.pp > 1:
        yield first(memory_at("rehearsal", rank), rank)


def first(memory: Memory, rank: Rank) -> Memory:
    """The same without states, at the first step of a rank."""
    without = replace(memory, states=0, average=round(average(rank)), buffers=round(buffers(rank, 1, "first")), moment="first")
    return replace(without, reserve=reserve(without.allocated, foreign(rank)))


def memory_at(moment: str, rank: Rank) -> Memory:
    """The memory of one rank at one moment."""
    done = 1.0 if moment in ("end", "optimizer") else 0.0               # of its gradients
    live, micros = under_way(rank, moment)
    parts = {"parameters": parameters(rank), "gradients": gradients(rank, done), "states": states(rank), "average": average(rank),
             "copies": copies(rank, live), "activations": live * rank.kept + ends(rank, micros, moment),
             "logits": logits(rank, micros, moment), "batch": batch(rank), "buffers": buffers(rank, micros, moment),
             "workspace": workspace(rank, moment) + CUBLAS}
    whole = {name: round(size) for name, size in parts.items()}
    return Memory(**whole, reserve=reserve(sum(whole.values()), foreign(rank)), moment=moment, stage=rank.stage)


def reserve(allocated: int, others: float) -> int:
    """A margin for what no tensor of PyTorch's holds, in bytes. others: what another library holds."""
    return round(CONTEXT + FRAGMENTS * allocated + others)


def under_way(rank: Rank, moment: str) -> tuple[float, float]:
    """(how many blocks' activations there are, of how many micro-batches) at a moment.

    With a pipeline, at the fullest moment of the rank's schedule.
    """
    p = rank.config.parallel
    if moment in ("end", "optimizer"):
        return (1, 1) if moment == "end" else (0, 0)
    if p.pp == 1:
        return rank.blocks, 1
    micros = rank.micros if p.schedule == "gpipe" else min(rank.micros, 4 * p.pp)      # the others then only repeat themselves
    blocks, passes = waiting(p.schedule, p.pp, rank.stage, micros, rank.shares)
    if moment == "rehearsal":
        each = passes // p.chunks + 1
        return rank.blocks * each, each
    return blocks, passes / p.chunks


@lru_cache(maxsize=65536)                           # a planner asks the same of many layouts
def waiting(schedule: str, pp: int, stage: int, micros: int, shares: tuple[int, ...]) -> tuple[int, int]:
    """The most blocks of a rank, and the most forward passes, whose backward pass is still to come, at a schedule's fullest
    moment. shares: blocks of each of its chunks."""
    if len(shares) == 1:                            # 1f1b fills the pipeline from here to its end, gpipe has all
        passes = micros if schedule == "gpipe" else min(pp - stage, micros)
        return passes * shares[0], passes
    work = passes_of(schedule, pp, stage, micros, len(shares))
    now = most = 0
    for one in work:
        now += shares[one.chunk] * (1 if one.kind == "F" else -1)
        most = max(most, now)
    return most, alive(work)


# ---- formats

def low(c: Config) -> int:
    """Bytes of a number that matmuls and attention multiply."""
    return 2 if c.precision in LOW else wide(c)


def wide(c: Config) -> int:
    """Bytes of a parameter, a gradient, a state, and of sums and norms."""
    return 8 if c.precision == "fp64" else 4


def stream(c: Config) -> int:
    """Bytes of a number that flows between blocks. DiT's is its first map's result, in the format of the matmuls anyway."""
    return low(c) if c.stream == "narrow" or isinstance(c.model, DiTConfig) else wide(c)


# ---- parameters and what belongs to them

def hidden(c: Config) -> int:
    """M, the MLP's width on a rank."""
    m = c.model
    return (m.hidden if isinstance(m, GPTConfig) else int(m.dim * m.mlp_ratio)) // c.parallel.tp


def widths(c: Config) -> tuple[int, int]:
    """(features of the queries, of keys and values together) on a rank."""
    m = c.model
    groups = m.groups if isinstance(m, GPTConfig) else m.heads
    return m.dim // c.parallel.tp, 2 * groups * (m.dim // m.heads) // c.parallel.tp


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
    """(weights of a block's linears that tp cuts, those that it does not): D·(D + K) for queries, keys and values with K features
    of the latter two, D² out, 2·D·M for the MLP (3 with gates), over tp; DiT's modulation, 6·D², whole."""
    D, (q, kv), M = c.model.dim, widths(c), hidden(c)
    return D * (q + kv) + q * D + (gated(c) + 1) * D * M, 6 * D * D if isinstance(c.model, DiTConfig) else 0


def block_parameters(c: Config) -> int:
    """All parameters of a block: the linears' weights, their biases, two norms."""
    D, (q, kv) = c.model.dim, widths(c)
    biases = q + kv + D + gated(c) * hidden(c) + D + (6 * D if isinstance(c.model, DiTConfig) else 0)
    has = c.model.bias if isinstance(c.model, GPTConfig) else True
    return sum(block_weights(c)) + biases * has + 2 * norm_weights(c)


def embedding(c: Config) -> tuple[int, int]:
    """(weights of linears before the blocks, all other parameters there)."""
    m, D, P = c.model, c.model.dim, patch(c)
    match m:
        case GPTConfig():
            return 0, m.vocab * D // c.parallel.tp + (m.context * D if m.position == "learned" else 0)
        case DiTConfig():
            return P * D + Time.WAVES * D + D * D, 3 * D + (m.classes + 1) * D
        case _:
            return P * D, D + m.tokens * D


def head(c: Config) -> tuple[int, int]:
    """(weights of linears after the blocks, all other parameters there). GPT's map to logits counts here even if it is tied."""
    m, D, P = c.model, c.model.dim, patch(c)
    if isinstance(m, GPTConfig):
        return m.vocab * D // c.parallel.tp, norm_weights(c)
    return (D * P, norm_weights(c) + P) if not isinstance(m, DiTConfig) else (D * P + 2 * D * D, P + 2 * D)


def count(rank: Rank) -> tuple[int, int]:
    """(weights that only linears use and autocast would cast, all other parameters) of a rank.

    ZeRO-1 keeps 16-bit copies of the former (`zero.castable`); with sequence parallelism those that tp does not cut have
    gradients in parts, which are completed in float32, and count as the others.
    """
    c = rank.config
    cut, uncut = block_weights(c)
    linear, every = rank.blocks * (cut + uncut), rank.blocks * block_parameters(c)
    partial = rank.blocks * uncut if c.parallel.sp and c.parallel.tp > 1 else 0
    tied = isinstance(c.model, GPTConfig) and c.model.tied
    for here, (weights, others) in ((rank.first, embedding(c)), (rank.last, head(c))):
        if here:
            linear += weights
            every += weights + others
            partial += weights if c.parallel.sp and c.parallel.tp > 1 and not isinstance(c.model, GPTConfig) else 0
    if tied and rank.last:
        linear -= head(c)[0]
        every -= head(c)[0] if rank.first else 0     # on one rank the weight is there once
    return linear - partial, every - linear + partial


def replicas(c: Config) -> int:
    """Ranks over which gradients are averaged, and ZeRO-1 cuts."""
    return max(c.parallel.dp, 1) * c.parallel.cp


def sharded(c: Config) -> int:
    """Over how many ranks states are cut."""
    return replicas(c) if c.parallel.zero else 1


def narrow_weights(c: Config) -> bool:
    """Whether the rank computes with 16-bit copies and has masters of its share: ZeRO-1 in bf16 or fp16."""
    return sharded(c) > 1 and c.precision in ("bf16", "fp16")


def parameters(rank: Rank) -> float:
    """4 bytes a parameter; with ZeRO-1 and 16-bit matmuls 2 for a linear's weight (`course/parallel/zero.py`)."""
    linear, others = rank.weights
    return linear * (2 if narrow_weights(rank.config) else wide(rank.config)) + others * wide(rank.config)


def gradients(rank: Rank, done: float) -> float:
    """4 bytes a parameter. Buckets hold them from the start, a second micro-batch finds them; otherwise they come in backward."""
    c = rank.config
    always = (replicas(c) > 1 and c.parallel.data in ("bucketed", "ddp")) or rank.micros > 1
    return sum(rank.weights) * wide(c) * (1.0 if always else done)


def states(rank: Rank) -> float:
    """Adam's two, 8 bytes a parameter, over the ranks of ZeRO-1; and the rank's share of float32 masters (Rajbhandari et al.
    2020, arXiv:1910.02054, section 3.1). SGD has one with momentum."""
    c, (linear, others) = rank.config, rank.weights
    each = 2 if c.optim.name == "adam" else 1 if c.optim.momentum else 0
    masters = linear if narrow_weights(c) else 0
    return (each * (linear + others) + masters) * wide(c) / sharded(c)


def average(rank: Rank) -> float:
    """4 bytes of each parameter that this rank updates, with optim.ema."""
    return sum(rank.weights) * wide(rank.config) / sharded(rank.config) if rank.config.optim.ema else 0.0


def copies(rank: Rank, live: float) -> float:
    """Casts of the blocks' weights, kept for backward: 2 bytes a weight, for each micro-batch under way, whose forward pass makes
    its own. live: how many blocks' activations there are, over all micro-batches.

    FP8 by hand keeps the transpose, 1 byte. Compiled blocks that compute again cast again; eager ones have autocast's cache of
    all casts until the forward pass ends. With ZeRO-1's 16-bit copies nothing is cast.
    """
    c = rank.config
    if c.precision not in LOW:
        return 0.0
    cut, uncut = block_weights(c)
    casts = 0 if narrow_weights(c) else 2
    if c.train.recompute != "none":
        return min(live, rank.blocks) * casts * (cut + uncut) if not c.compile and c.precision != "fp8" else 0.0
    if c.precision == "fp8":
        return live * (cut * (1 if c.fp8.by == "hand" else 2) + 2 * uncut)      # the modulation stays in bf16, fp8.keep
    return live * casts * (cut + uncut)


# ---- activations

def block(rank: Rank) -> Terms:
    """What one block keeps of one micro-batch, in bytes."""
    return {"none": everything, "selective": selective, "full": only_input}[rank.config.train.recompute](rank)


def attention(rank: Rank) -> Terms:
    """What attention keeps, in bytes: the linear's result, whose parts queries, keys and values are, the answer, and a float32
    log-sum-exp for each query and head (Dao 2023, arXiv:2307.08691, section 3.1).

    Rotary positions make new queries and keys, and an answer whose heads lie apart, which the next linear copies. Context
    parallelism: `gather` has all keys and values, and with a causal mask the answer in two pieces and whole; `all_to_all` has
    what it exchanged, and the answer before and after.
    """
    c, n = rank.config, rank.n
    size, (q, kv) = low(c), widths(c)
    kept: Terms = {"qkv": n * (q + kv) * size, "answer": n * q * size, "log-sum-exp": n * c.model.heads / c.parallel.tp * 4}
    if isinstance(c.model, GPTConfig) and c.model.position == "rotary":
        kept |= {"turned": n * (q + kv / 2) * size, "answer, copied": n * q * size}
    if c.parallel.cp > 1 and c.parallel.context == "gather":
        kept["all keys and values"] = rank.samples * rank.whole * kv * size
        if isinstance(c.model, GPTConfig):
            kept["answer, whole"] = n * q * size
    if c.parallel.cp > 1 and c.parallel.context == "all_to_all":
        kept["answer, exchanged"] = n * q * size
    if c.attention == "math":
        kept["scores"] = rank.samples * c.model.heads / c.parallel.tp * rank.tokens * rank.whole * (2 * size)
    return kept


def normed(rank: Rank) -> float:
    """Bytes of a norm's result as the linear after it keeps it: gathered, unless that gathers it again in backward; of FP8 by
    hand the transpose, 1 byte a number."""
    c = rank.config
    tokens = rank.s if c.parallel.overlapped else rank.n
    return tokens * c.model.dim * multiplied(c)


def multiplied(c: Config) -> int:
    """Bytes of a number that a linear keeps of its input: FP8's transpose, or what the matmul multiplies."""
    return 1 if c.precision == "fp8" else low(c)


def everything(rank: Rank) -> Terms:
    """Without recomputation."""
    c, n, s, D, M = rank.config, rank.n, rank.s, rank.config.model.dim, hidden(rank.config)
    kept = attention(rank)
    kept |= {"norm 1": normed(rank), "norm 2": normed(rank), "up": gated(c) * n * M * low(c), "down": n * M * multiplied(c)}
    if c.precision == "fp8":
        kept["answer, FP8"] = n * widths(c)[0]      # what attention itself keeps is the answer in 16 bits
    if gated(c) == 2 and not c.compile:
        kept["gate"] = n * M * low(c)               # after SiLU; compiled, computed again
    if c.compile:
        kept |= {"input": s * D * stream(c), "attention's branch": s * D * low(c)}
    else:
        kept |= {"input": s * D * normed_from(c), "sum": s * D * normed_from(c)}
    if isinstance(c.model, DiTConfig):
        kept |= modulated(rank)
    return kept | dropped(rank)


def normed_from(c: Config) -> int:
    """Bytes of a number of an eager norm's input: autocast computes norms in float32, of a copy if the stream is narrow."""
    return wide(c)


def modulated(rank: Rank) -> Terms:
    """What DiT's modulation keeps more: what the gates multiply (compiled, of attention's branch it is kept anyway) and, eager,
    what the scales multiply, in float32."""
    c, size = rank.config, rank.s * rank.config.model.dim
    few: Terms = {"conditions": rank.samples * c.model.dim * 6 * low(c)}
    if c.compile:
        return few | {"MLP's branch": size * low(c)}
    return few | {"attention's branch": size * low(c), "MLP's branch": size * low(c), "before scales": 2 * size * wide(c)}


def dropped(rank: Rank) -> Terms:
    """Dropout's masks, a byte a number, after attention and MLP."""
    m = rank.config.model
    return {"masks": 2.0 * rank.s * m.dim} if getattr(m, "dropout", 0.0) else {}


def selective(rank: Rank) -> Terms:
    """With train.recompute=selective: the input and the results of matmuls and attention; of linears that overlap with their
    communication what they scatter. Of a compiled block whose attention leaves the compiler the checkpoint sees that alone."""
    c, n, s, D, M = rank.config, rank.n, rank.s, rank.config.model.dim, hidden(rank.config)
    q, kv = widths(c)
    kept: Terms = {"input": s * D * stream(c), "answer": n * q * low(c), "log-sum-exp": n * c.model.heads / c.parallel.tp * 4}
    if c.compile and attention_leaves(c):
        return kept
    put_out = s if c.parallel.overlapped else n
    kept |= {"qkv": n * (q + kv) * low(c), "attention's branch": put_out * D * low(c), "up": gated(c) * n * M * low(c)}
    summed = c.parallel.tp > 1 and not c.parallel.overlapped
    if isinstance(c.model, DiTConfig) or summed or not c.compile:       # all but DiT's gates and tp's sum could do without it
        kept["MLP's branch"] = put_out * D * low(c)
    if isinstance(c.model, DiTConfig):
        kept["conditions"] = rank.samples * D * 6 * low(c)
    return kept


def only_input(rank: Rank) -> Terms:
    """With train.recompute=full: (B, T, D) (Chen et al. 2016, arXiv:1604.06174)."""
    return {"input": rank.s * rank.config.model.dim * stream(rank.config)}


def ends(rank: Rank, micros: float, moment: str) -> float:
    """What embedding and head keep of so many micro-batches beside the logits, in bytes: patches in the matmul's format; input
    and result of the head's norm, until its backward pass is done. Of a stage without a head its result, until the gradient of
    that comes."""
    c, size = rank.config, rank.s * rank.config.model.dim
    patches = rank.s * patch(c) * low(c) if rank.first and c.precision in LOW else 0    # in float32 they are the batch's own
    if not rank.last:
        return micros * (patches + size * stream(c))
    if moment in ("backward", "end"):
        return micros * patches
    after = size * (stream(c) if c.compile else normed_from(c))
    if not isinstance(c.model, GPTConfig):
        after += size * (low(c) + (wide(c) if isinstance(c.model, DiTConfig) and not c.compile else 0))
    return micros * (patches + after)


# ---- the head, the loss, and what is soon forgotten

def logits(rank: Rank, micros: float, moment: str) -> float:
    """What the head puts out and the loss keeps of it, in bytes: predictions of P values a token in the matmul's format; eager
    also the error in float32. GPT's logits, if loss_chunk=0: those of all tokens, eager with log-softmax in float32. Through the
    backward pass the former stay, which have a name there."""
    c = rank.config
    if not rank.last or not micros or (isinstance(c.model, GPTConfig) and chunked(c)):
        return 0.0
    numbers = rank.n * c.model.vocab / c.parallel.tp if isinstance(c.model, GPTConfig) else float(rank.s * patch(c))
    kept = 0 if c.compile and c.precision in LOW else wide(c)
    if getattr(c.model, "residual", False):
        kept += wide(c)                             # the sum with the input
    count = micros if moment in ("loss", "rehearsal") else 1
    return count * numbers * (low(c) + (kept if moment in ("loss", "rehearsal") else 0))


def chunked(c: Config) -> bool:
    """Whether GPT's loss takes some tokens at a time. FP8 in the head does not, where Transformer Engine has none."""
    assert isinstance(c.model, GPTConfig)
    in_fp8 = (c.precision == "fp8" and c.fp8.by == "hand"
              and not any(fnmatchcase("head.proj", pattern) for pattern in c.fp8.keep))
    return c.model.loss_chunk > 0 and not in_fp8


def head_workspace(rank: Rank) -> float:
    """What the loss computes on the way, in bytes.

    Of predictions: eager the square's derivative, three temporaries in float32; compiled the gradient. Of logits: their gradient,
    eager also that of log-softmax in float32. In chunks of N tokens: logits, log-softmax in float32 and gradient, N·V each, of
    which a GPU that has the whole vocabulary has but one; the gradients of x (twice, as they are put together) and weight, and
    the latter in the matmuls' format, on a CPU with one chunk's product.
    """
    c, P = rank.config, patch(rank.config)
    if not isinstance(c.model, GPTConfig):
        return rank.s * P * (low(c) if c.compile else 3 * wide(c))
    V, D = c.model.vocab / c.parallel.tp, c.model.dim
    if not chunked(c):
        return rank.n * V * (low(c) if c.compile and c.precision in LOW else 2 * wide(c))
    rows, gpu = min(c.model.loss_chunk, rank.n), c.train.device != "cpu"
    some = low(c) + wide(c) + (wide(c) if c.parallel.tp > 1 else low(c) if c.precision in LOW else 0)
    if gpu and c.parallel.tp == 1 and c.precision != "fp64":            # loss_kernel.py
        some = low(c)
    weight = V * D * (wide(c) + (low(c) * (1 if gpu else 2) if c.precision in LOW else low(c)))
    return rows * V * some + weight + rank.n * D * 3 * low(c)


def workspace(rank: Rank, moment: str) -> float:
    """What is computed on the way at a moment, in bytes."""
    if moment == "optimizer":
        return 0.0                                  # the fused optimizers need nothing
    if moment in ("loss", "rehearsal"):
        return head_workspace(rank) if rank.last else 0.0
    return block_workspace(rank)


def block_workspace(rank: Rank) -> float:
    """What the backward pass of a block computes on the way, in bytes: what it computes again; the gradients of the stream and of
    the hidden units; and that of its largest weight, in the matmuls' format and in float32."""
    c, n, s, D, M = rank.config, rank.n, rank.s, rank.config.model.dim, hidden(rank.config)
    weight = max(D * M * gated(c), 6 * D * D if isinstance(c.model, DiTConfig) else 0) * (wide(c) + low(c) * (c.precision in LOW))
    again = 0.0
    if c.train.recompute != "none":
        again = sum(everything(rank).values()) - rank.kept
        again += low(c) * sum(block_weights(c)) if c.precision in LOW else 0            # casts of one block's weights
    return max(again, 0) + s * D * stream(c) + max(gated(c) * n * M * low(c), ring_workspace(rank)) + weight


def ring_workspace(rank: Rank) -> float:
    """What a ring's backward pass computes on the way, in bytes (`ring.py`): float32 gradients of queries, keys and values,
    the sums that come and go for others' keys and values, two pairs of keys and values; less what the block's MLP has let go of
    by then. Kernels for GPUs have no scores in memory; on a CPU they come on top."""
    c, n, (q, kv) = rank.config, rank.n, widths(rank.config)
    if c.parallel.cp == 1 or c.parallel.context != "ring":
        return 0.0
    gone = (1 + gated(c)) * n * hidden(c) * low(c) if c.train.recompute != "full" else 0
    return n * (q + kv) * wide(c) + 3 * n * kv * wide(c) + 2 * n * kv * low(c) - gone


def batch(rank: Rank) -> float:
    """Bytes of a step's samples on this rank, as the loader gives them and as the model takes them; in a graph also its own copy
    of the former. Fields and patches in the parameters' format; ids and positions count for little, tokens 8 bytes each."""
    c, m = rank.config, rank.config.model
    samples = rank.samples * rank.micros
    if isinstance(m, GPTConfig):
        return samples * (m.context + 1) * 8.0 * (2 if c.graphs else 1)
    given, taken = (1, 2) if isinstance(m, DiTConfig) else (2, 2)       # latents; input and target
    copies = c.graphs + (1 if not by_dali(c) else 0)
    return samples * m.tokens * patch(c) * wide(c) * (given * copies + taken)


def by_dali(c: Config) -> bool:
    """Whether batches lie in DALI's memory, not in PyTorch's."""
    return c.data.source == "files" and c.data.loader.startswith("dali")


def foreign(rank: Rank) -> float:
    """Bytes on the device that another library holds: DALI's batches, as many as it reads ahead."""
    c, m = rank.config, rank.config.model
    if not by_dali(c) or isinstance(m, GPTConfig):
        return 0.0
    return rank.samples * rank.micros * m.tokens * patch(c) * wide(c) * 2.0 * c.data.ahead


def buffers(rank: Rank, micros: float, moment: str) -> float:
    """What goes between ranks, in bytes: ZeRO-1's share of the mean gradients; at the end `naive`'s copy of all gradients; a
    pipeline's messages, one on its way in and one out in each direction."""
    c, every = rank.config, sum(rank.weights)
    size = 0.0
    if c.parallel.zero and replicas(c) > 1:
        size += every * wide(c) / replicas(c)
    elif replicas(c) > 1 and c.parallel.data == "naive" and moment == "optimizer":
        size += every * wide(c)
    if c.parallel.pp > 1 and micros:
        size += 4 * rank.s * c.model.dim * stream(c)
    return size
