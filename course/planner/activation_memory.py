"""Bytes that a step keeps on its way: what blocks, embedding and head leave for backward, logits, work space, buffers.

Each term is a function of its own; `memory.py` says which of them are there at which moment, and in which units they count.
"""


from course.config import Config
from course.config.validation import attention_leaves_graph
from course.models import DiTConfig, GPTConfig
from course.ops.number_formats import LOW_PRECISION
from course.planner.parameter_memory import (
    Rank,
    block_weights,
    gated,
    hidden,
    low,
    modulation,
    own_masters,
    patch,
    replicas,
    stream,
    uneven,
    wide,
    widths,
)

Terms = dict[str, float]


def block(rank: Rank) -> Terms:
    """What one block keeps of one micro-batch, in bytes."""
    return {"none": everything, "selective": selective, "full": only_input}[rank.config.train.recompute](rank)


def kept(rank: Rank) -> float:
    """The sum of it."""
    return sum(block(rank).values())


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
    if fused(c):
        kept |= {"input": s * D * stream(c), "sum": s * D * stream(c)}
    elif c.compile:
        kept |= {"input": s * D * stream(c), "attention's branch": s * D * low(c)}
    else:
        kept |= {"input": s * D * normed_from(c), "sum": s * D * normed_from(c)}
    if isinstance(c.model, DiTConfig):
        kept |= modulated(rank)
    return kept | dropped(rank)


def fused(c: Config) -> bool:
    """Whether norms and residual sums are Triton kernels (`course/ops/fused_add_norm.py`)."""
    return c.kernels == "triton" and getattr(c.model, "norm", "layer") == "layer"


def normed_from(c: Config) -> int:
    """Bytes of a number of an eager norm's input: autocast computes norms in float32, of a copy if the stream is narrow."""
    return wide(c)


def modulated(rank: Rank) -> Terms:
    """What DiT's modulation keeps more: what the gates multiply (compiled, of attention's branch it is kept anyway, and the sum
    computed again; with Triton both are kept) and, eager, what the scales multiply, in float32."""
    c, size = rank.config, rank.s * rank.config.model.dim
    few: Terms = {"conditions": rank.samples * c.model.dim * 6 * low(c)}
    if fused(c):
        return few | {"attention's branch": size * low(c), "MLP's branch": size * low(c)}
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
    if c.compile and attention_leaves_graph(c):
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
    # in float32 they are the batch's own
    patches = rank.s * patch(c) * low(c) if rank.first and c.precision in LOW_PRECISION else 0
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
    backward pass the former stay, which have a name there. Of a pipeline's micro-batches that wait GPT keeps one of both."""
    c = rank.config
    if not rank.last or not micros or chunked(c):
        return 0.0
    numbers = rank.n * c.model.vocab / c.parallel.tp if isinstance(c.model, GPTConfig) else float(rank.s * patch(c))
    in_pieces = isinstance(c.model, GPTConfig) and c.parallel.tp > 1 and c.precision in LOW_PRECISION
    kept = wide(c) if in_pieces or not c.compile else 0                 # compiled, too, the softmax of a vocabulary in pieces
    if getattr(c.model, "residual", False):
        kept += wide(c)                             # the sum with the input
    if moment not in ("loss", "rehearsal"):
        return numbers * low(c)
    each = low(c) + kept
    waiting = (kept or low(c)) if isinstance(c.model, GPTConfig) else each
    return numbers * (each + (micros - 1) * waiting)


def chunked(c: Config) -> bool:
    """Whether it is GPT's loss, and takes some tokens at a time. FP8 in the head does not, where Transformer Engine has none."""
    in_fp8 = c.precision == "fp8" and c.fp8.by == "native" and not c.fp8.keeps("head.proj")
    return isinstance(c.model, GPTConfig) and c.model.loss_chunk > 0 and not in_fp8


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
        return rank.n * V * (low(c) if c.compile else 2 * wide(c))
    rows, gpu = min(c.model.loss_chunk, rank.n), c.train.device != "cpu"
    some = low(c) + wide(c) + (wide(c) if c.parallel.tp > 1 else low(c) if c.precision in LOW_PRECISION else 0)
    if gpu and c.parallel.tp == 1 and c.precision != "fp64":            # ops/cross_entropy_triton.py
        some = low(c)
    weight = V * D * (wide(c) + (low(c) * (1 if gpu else 2) if c.precision in LOW_PRECISION else low(c)))
    return rows * V * some + weight + rank.n * D * 3 * low(c)


def workspace(rank: Rank, moment: str) -> float:
    """What is computed on the way at a moment, in bytes."""
    if moment == "optimizer":
        return 0.0                                  # the fused optimizers need nothing
    if moment == "rehearsal" and not chunked(rank.config):
        return 0.0                                  # no backward pass, which the loss in chunks has in its forward
    if moment in ("loss", "rehearsal"):
        return head_workspace(rank) if rank.last else 0.0
    return block_workspace(rank)


def block_workspace(rank: Rank) -> float:
    """What the backward pass of a block computes on the way, in bytes: what it computes again; the gradients of the stream and of
    the hidden units; and that of its largest weight, in the matmuls' format and, if the parameter is, in float32."""
    c, n, s, D, M = rank.config, rank.n, rank.s, rank.config.model.dim, hidden(rank.config)
    weight = max(D * M * gated(c), D * modulation(c, 6))
    weight *= low(c) if own_masters(c) else wide(c) + low(c) * (c.precision in LOW_PRECISION)
    again = 0.0
    if c.train.recompute != "none":
        again = sum(everything(rank).values()) - kept(rank)
        # casts of its weights
        again += low(c) * sum(block_weights(c)) if c.precision in LOW_PRECISION and not own_masters(c) else 0
    return max(again, 0) + s * D * stream(c) + max(gated(c) * n * M * low(c), ring_workspace(rank)) + weight


def ring_workspace(rank: Rank) -> float:
    """What a ring's backward pass computes on the way, in bytes (`ring_attention.py`): float32 gradients of queries, keys and
    values, the sums that come and go for others' keys and values, two pairs of keys and values; less what the block's MLP has let
    go of by then. Kernels for GPUs have no scores in memory; on a CPU, in float64 and with attention=math, they come on top."""
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
    """Bytes on the device beside PyTorch's allocator: DALI's batches, as many as it reads ahead; and what ranks write into with
    symmetric memory, two places each for what is gathered and scattered."""
    c, m = rank.config, rank.config.model
    rooms = 4.0 * low(c) * rank.n * m.dim if c.parallel.symmetric and not uneven(c) else 0.0
    if not by_dali(c) or isinstance(m, GPTConfig):
        return rooms
    return rooms + rank.samples * rank.micros * m.tokens * patch(c) * wide(c) * 2.0 * c.data.ahead


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
