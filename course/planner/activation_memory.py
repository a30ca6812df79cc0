"""Bytes of activations, logits, temporaries and communication buffers in a training step.

Each term has its own function. `peak_memory.py` says which terms are alive at which moment, and defines the units.
"""


from course.config import Config
from course.config.context_choice import attention_leaves_graph, context_method
from course.models import DiTConfig, GPTConfig
from course.models.linears import linears
from course.ops.number_formats import LOW_PRECISION
from course.planner.parameter_memory import (
    Rank,
    block_weights,
    expert_waits,
    expert_weights,
    fullest_share,
    gated,
    gathers,
    hidden,
    low,
    modulation,
    narrow_weights,
    normed_heads,
    over_blocks,
    own_masters,
    patch,
    per_share,
    replicas,
    shard_size,
    shared_hidden,
    stage,
    stream,
    uneven,
    wide,
    widths,
)

Terms = dict[str, float]


def block(rank: Rank, mixture: bool = False) -> Terms:
    """The activations that one block, with experts or without, keeps for one micro-batch: name -> bytes."""
    return {"none": everything, "selective": selective, "full": only_input}[rank.config.train.recompute](rank, mixture)


def kept(rank: Rank) -> float:
    """Bytes that one block keeps for one micro-batch, the mean over the rank's blocks."""
    return over_blocks(rank, lambda mixture: sum(block(rank, mixture).values())) / rank.blocks


def attention(rank: Rank) -> Terms:
    """The activations that attention keeps, in bytes: queries, keys and values as one tensor, the output, and a float32
    log-sum-exp per query and head (Dao 2023, arXiv:2307.08691, section 3.1).

    Rotary positions and norms create new queries and keys, and a non-contiguous output that the next linear copies. A norm
    keeps a number for each head, and an eager one a float32 copy of 16-bit queries and keys. Context parallelism: `gather` keeps
    all keys and values, and with a causal mask the output in two pieces and whole. `all_to_all` keeps the exchanged tensors, and
    the output before and after the exchange.
    """
    c, n = rank.config, rank.n
    size, (q, kv) = low(c), widths(c)
    kept: Terms = {"qkv": n * (q + kv) * size, "answer": n * q * size, "log-sum-exp": n * c.model.heads / c.parallel.tp * 4}
    if isinstance(c.model, GPTConfig) and (c.model.position == "rotary" or c.model.qk_norm):
        kept |= {"turned": n * (q + kv / 2) * size, "answer, copied": n * q * size}
    if normed_heads(c):
        copies = low(c) < wide(c) and not c.compile
        kept["heads to norm"] = n * (q + kv / 2) * wide(c) * (copies + 1 / c.model.head_width)
    if c.parallel.cp > 1 and context_method(c) == "gather":
        kept["all keys and values"] = rank.samples * rank.whole * kv * size
        if isinstance(c.model, GPTConfig):
            kept["answer, whole"] = n * q * size
    if c.parallel.cp > 1 and context_method(c) == "all_to_all":
        kept["answer, exchanged"] = n * q * size
    if c.attention == "math":
        kept["scores"] = rank.samples * c.model.heads / c.parallel.tp * rank.tokens * rank.whole * (2 * size)
    return kept


def normed(rank: Rank) -> float:
    """Bytes of a norm's output as the next linear keeps it: gathered, unless an overlapped linear gathers it again in backward.

    FP8 keeps the transpose, 1 byte per number."""
    c = rank.config
    tokens = rank.s if c.parallel.overlapped else rank.n
    return tokens * c.model.dim * multiplied(c)


def multiplied(c: Config) -> int:
    """Bytes per number of the input that a linear keeps: FP8's transpose, or the matmul's operand."""
    return 1 if c.precision == "fp8" else low(c)


def everything(rank: Rank, mixture: bool = False) -> Terms:
    """The activations that a block keeps without recomputation."""
    c, n, s, D = rank.config, rank.n, rank.s, rank.config.model.dim
    kept = attention(rank) | {"norm 1": normed(rank)}
    M = shared_hidden(c) if mixture else hidden(c)
    if M:
        kept |= {"norm 2": normed(rank), "up": gated(c) * n * M * low(c), "down": n * M * multiplied(c)}
    if mixture:
        kept |= experts(rank)
    if c.precision == "fp8":
        kept["answer, FP8"] = n * widths(c)[0]      # attention itself keeps its output in 16 bits
    if gated(c) == 2 and not c.compile:
        kept["gate"] = n * M * low(c)               # after SiLU; compiled blocks recompute it
    if fused(c):
        kept |= {"input": s * D * stream(c), "sum": s * D * stream(c)}
    elif c.compile:
        kept |= {"input": s * D * stream(c), "attention's branch": s * D * low(c)}
    else:
        kept |= {"input": s * D * normed_from(c), "sum": s * D * normed_from(c)}
    if isinstance(c.model, DiTConfig):
        kept |= modulated(rank)
    return kept | dropped(rank)


def experts(rank: Rank) -> Terms:
    """The activations that a block's router and experts keep: the router's input, in float32; rows sorted by expert, and their
    hidden units; the output of each choice, which its gate multiplies.

    Besides: four tensors of a number for each expert and token, and 8 bytes for each index of a sort. Compiled blocks compute the
    gates of hidden units again, unless experts leave their graph."""
    c, m, rows = rank.config, rank.config.model, expert_rows(rank)
    assert isinstance(m, GPTConfig)
    choices = rank.n * m.top_k * gathers(c)
    gates = 0 if c.compile and c.parallel.ep == gathers(c) else gated(c) - 1
    width, routed = m.expert_hidden / c.parallel.tp, rank.s * m.dim * wide(c)
    if low(c) == wide(c) and m.shared_experts and c.parallel.tp == 1:
        routed = 0                                  # the shared experts' input
    return {"router's input": routed, "scores": 4 * rank.s * m.experts * wide(c), "sorted rows": rows * m.dim * low(c),
            "experts' up": gated(c) * rows * width * low(c), "experts' gate": gates * rows * width * low(c),
            "experts' down": rows * width * low(c), "choices": choices * m.dim * low(c),
            "order": 8 * (2 * choices + 2 * rows * (c.parallel.ep > gathers(c)))}


def expert_rows(rank: Rank) -> float:
    """Rows of a micro-batch for which the fullest rank's experts have memory: with parallel.dispatch=gather all choices."""
    c, m = rank.config, rank.config.model
    assert isinstance(m, GPTConfig)
    return rank.n * m.top_k * (gathers(c) if gathers(c) > 1 else fullest_share(c))


def fused(c: Config) -> bool:
    """Whether norms and residual sums are Triton kernels (`course/ops/fused_add_norm.py`)."""
    return c.kernels == "triton" and getattr(c.model, "norm", "layer") == "layer"


def normed_from(c: Config) -> int:
    """Bytes per number of an eager norm's input: autocast computes norms in float32, from a copy if the stream is narrow."""
    return wide(c)


def modulated(rank: Rank) -> Terms:
    """DiT's additional activations for modulation: the factors of the gates and, in eager mode, those of the scales, in float32.

    Compiled blocks keep the output of attention's branch anyway and recompute the sum. Triton kernels keep both."""
    c, size = rank.config, rank.s * rank.config.model.dim
    few: Terms = {"conditions": rank.samples * c.model.dim * 6 * low(c)}
    if fused(c):
        return few | {"attention's branch": size * low(c), "MLP's branch": size * low(c)}
    if c.compile:
        return few | {"MLP's branch": size * low(c)}
    return few | {"attention's branch": size * low(c), "MLP's branch": size * low(c), "before scales": 2 * size * wide(c)}


def dropped(rank: Rank) -> Terms:
    """Dropout masks after attention and MLP, 1 byte per number."""
    m = rank.config.model
    return {"masks": 2.0 * rank.s * m.dim} if getattr(m, "dropout", 0.0) else {}


def selective(rank: Rank, mixture: bool = False) -> Terms:
    """The activations that a block keeps with train.recompute=selective: its input and the outputs of matmuls and attention.

    Overlapped linears keep the scattered output. If attention or experts break a compiled block's graph, only theirs are kept."""
    c, n, s, D = rank.config, rank.n, rank.s, rank.config.model.dim
    q, kv = widths(c)
    M = shared_hidden(c) if mixture else hidden(c)
    kept: Terms = {"input": s * D * stream(c), "answer": n * q * low(c), "log-sum-exp": n * c.model.heads / c.parallel.tp * 4}
    own = {"experts' up": experts(rank)["experts' up"], "experts' outputs": expert_rows(rank) * D * low(c)} if mixture else {}
    if c.compile and ((mixture and expert_waits(c)) or attention_leaves_graph(c)):
        return (kept if attention_leaves_graph(c) else only_input(rank)) | own
    put_out = s if c.parallel.overlapped else n
    kept |= {"qkv": n * (q + kv) * low(c), "attention's branch": put_out * D * low(c), "up": gated(c) * n * M * low(c)}
    summed = c.parallel.tp > 1 and not c.parallel.overlapped
    if isinstance(c.model, DiTConfig) or summed or not c.compile:       # only DiT's gates and tp's all-reduce need it
        kept["MLP's branch"] = put_out * D * low(c)
    if isinstance(c.model, DiTConfig):
        kept["conditions"] = rank.samples * D * 6 * low(c)
    return kept | own


def only_input(rank: Rank, mixture: bool = False) -> Terms:
    """The block input, (B, T, D), kept with train.recompute=full (Chen et al. 2016, arXiv:1604.06174)."""
    return {"input": rank.s * rank.config.model.dim * stream(rank.config)}


def ends(rank: Rank, micros: float, moment: str) -> float:
    """Bytes that embedding and head keep for `micros` micro-batches, without the logits.

    The first stage keeps patches in the matmuls' format. The last keeps input and output of the final norm until its backward
    pass is done. Other stages keep their output until its gradient arrives."""
    c, size = rank.config, rank.s * rank.config.model.dim
    # in float32 the batch holds them
    patches = rank.s * patch(c) * low(c) if rank.first and c.precision in LOW_PRECISION else 0
    if not rank.last:
        return micros * (patches + size * stream(c))
    if moment in ("backward", "end", "reduce", "embedding"):
        return micros * patches
    after = size * (stream(c) if c.compile else normed_from(c))
    if not isinstance(c.model, GPTConfig):
        after += size * (low(c) + (wide(c) if isinstance(c.model, DiTConfig) and not c.compile else 0))
    return micros * (patches + after)


# ---- head, loss and temporaries

def logits(rank: Rank, micros: float, moment: str) -> float:
    """Bytes of head output and loss activations: P values per token in the matmuls' format, and in eager mode a float32 error.

    GPT with loss_chunk=0: the logits of all tokens; eager, log-softmax in float32. A Python variable keeps the output alive
    through backward. For each waiting micro-batch of a pipeline, GPT keeps one of the two."""
    c = rank.config
    if not rank.last or not micros or chunked(c):
        return 0.0
    numbers = rank.n * c.model.vocab / c.parallel.tp if isinstance(c.model, GPTConfig) else float(rank.s * patch(c))
    in_pieces = isinstance(c.model, GPTConfig) and c.parallel.tp > 1 and c.precision in LOW_PRECISION
    kept = wide(c) if in_pieces or not c.compile else 0                 # the softmax over a split vocabulary, also when compiled
    if getattr(c.model, "residual", False):
        kept += wide(c)                             # the sum with the input
    if moment not in ("loss", "rehearsal"):
        return numbers * low(c)
    each = low(c) + kept
    waiting = (kept or low(c)) if isinstance(c.model, GPTConfig) else each
    return numbers * (each + (micros - 1) * waiting)


def chunked(c: Config) -> bool:
    """Whether the loss is GPT's, in chunks of tokens. Native FP8 in the head excludes it; Transformer Engine has no FP8 head."""
    in_fp8 = c.precision == "fp8" and c.fp8.by == "native" and not c.fp8.keeps("head.proj")
    return isinstance(c.model, GPTConfig) and c.model.loss_chunk > 0 and not in_fp8


def head_workspace(rank: Rank) -> float:
    """Bytes of the temporaries of the loss.

    Predictions: eager, three float32 temporaries of the square's derivative; compiled, the gradient. Logits: their gradient;
    eager, also that of log-softmax in float32. In chunks of N tokens: logits, float32 log-softmax and gradient, N·V each; a GPU
    with the whole vocabulary needs only one. Besides: the gradients of x (twice, during concatenation) and of the weight, the
    latter also in the matmuls' format, and on a CPU one chunk's product.
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
    """Bytes of the temporaries at a moment."""
    if moment == "optimizer":
        return muon_workspace(rank) if rank.config.optim.name == "muon" else 0.0       # fused optimizers need none
    if moment == "rehearsal" and not chunked(rank.config):
        return 0.0                                  # no backward pass; only the chunked loss computes gradients in forward
    if moment in ("loss", "rehearsal"):
        return head_workspace(rank) if rank.last else 0.0
    return block_workspace(rank, moment)


def muon_workspace(rank: Rank) -> float:
    """Bytes of Muon's temporaries (`course/ops/muon.py`), in the matmuls' format: the largest of three sums.

    A rank gathers the looks ahead of its part of the blocks' weights into an equal share of whole ones. While it puts these
    together, looks ahead, messages and whole weights are alive. While it orthogonalizes the last one, these are whole weights and
    results, and four temporaries of that weight's size. When it sends results back, these are whole weights, results, and the
    messages that it sends and receives; one process alone receives nothing.
    """
    c = rank.config
    held = over_blocks(rank, lambda mixture: sum(block_weights(c, mixture))) - rank.experts
    largest = max(linear.k * linear.n for linear in linears(c.model))
    part, work = held / shard_size(c), max(held / replicas(c), largest)
    alone = replicas(c) * c.parallel.tp * c.parallel.pp == 1
    return low(c) * max(part + 2 * work + largest, 2 * work + 3 * largest, 2 * work + (1 if alone else 2) * part)


def block_workspace(rank: Rank, moment: str) -> float:
    """Bytes of the temporaries in a block's backward pass: recomputed activations; gradients of residual stream and hidden
    units; the gradient of the largest weight, in the matmuls' format and, for float32 parameters, in float32."""
    c, n, s, D, M = rank.config, rank.n, rank.s, rank.config.model.dim, hidden(rank.config)
    if moment in ("reduce", "embedding"):                         # the block's backward pass is done
        return s * D * stream(c)
    mixture = rank.mixtures > 0
    weight = max(D * M * gated(c), D * modulation(c, 6))
    if mixture:
        weight = expert_weights(c) * gated(c) // (gated(c) + 1)
    inner = experts_workspace(rank) if mixture else gated(c) * n * M * low(c)
    as_it_is = own_masters(c) or (stage(c) >= 2 and narrow_weights(c))
    weight *= low(c) if as_it_is else wide(c) + low(c) * (c.precision in LOW_PRECISION)
    again = 0.0
    if c.train.recompute != "none":
        again = sum(everything(rank, mixture).values()) - sum(block(rank, mixture).values())
        again -= experts(rank)["choices"] if mixture else 0.0           # done before the experts' own backward pass
        # casts of the block's weights
        again += low(c) * sum(block_weights(c, mixture)) if c.precision in LOW_PRECISION and not own_masters(c) else 0
    return max(again, 0) + s * D * stream(c) + max(inner, ring_workspace(rank)) + weight


def experts_workspace(rank: Rank) -> float:
    """Bytes of the temporaries in the backward pass of a block's experts: the gradient of the hidden units, or those of the rows
    before and after they are exchanged."""
    c, m, rows = rank.config, rank.config.model, expert_rows(rank)
    assert isinstance(m, GPTConfig)
    exchanged = rows + rank.n * m.top_k * (c.parallel.ep > 1)
    return max(gated(c) * rows * m.expert_hidden / c.parallel.tp, exchanged * m.dim) * low(c)


def ring_workspace(rank: Rank) -> float:
    """Bytes of the temporaries in ring attention's backward pass (`ring_attention.py`), less what the MLP has freed by then.

    These are float32 gradients of queries, keys and values, traveling sums for other ranks' keys and values, and two pairs of
    keys and values. GPU kernels hold no scores in memory. On a CPU, in float64 and with attention=math, scores come on top."""
    c, n, (q, kv) = rank.config, rank.n, widths(rank.config)
    if c.parallel.cp == 1 or context_method(c) != "ring":
        return 0.0
    gone = (1 + gated(c)) * n * hidden(c) * low(c) if c.train.recompute != "full" else 0
    return n * (q + kv) * wide(c) + 3 * n * kv * wide(c) + 2 * n * kv * low(c) - gone


def batch(rank: Rank) -> float:
    """Bytes of a step's samples on this rank, as loaded and as model input; a CUDA graph adds a copy of the loaded ones.

    Fields and patches have the parameters' format, tokens 8 bytes. Ids and positions are negligible."""
    c, m = rank.config, rank.config.model
    samples = rank.samples * rank.micros
    if isinstance(m, GPTConfig):
        return samples * (m.context + 1) * 8.0 * (2 if c.graphs else 1)
    given, taken = (1, 2) if isinstance(m, DiTConfig) else (2, 2)       # DiT: latents; ViT: input and target
    copies = c.graphs + (1 if not by_dali(c) else 0)
    return samples * m.tokens * patch(c) * wide(c) * (given * copies + taken)


def by_dali(c: Config) -> bool:
    """Whether batches are in DALI's memory instead of PyTorch's."""
    return c.data.source == "files" and c.data.loader.startswith("dali")


def foreign(rank: Rank) -> float:
    """Bytes on the device outside PyTorch's allocator: the batches that DALI reads ahead, and symmetric memory, with two buffers
    each for gathers and scatters."""
    c, m = rank.config, rank.config.model
    rooms = 4.0 * low(c) * rank.n * m.dim if c.parallel.symmetric and not uneven(c) else 0.0
    if not by_dali(c) or isinstance(m, GPTConfig):
        return rooms
    return rooms + rank.samples * rank.micros * m.tokens * patch(c) * wide(c) * 2.0 * c.data.ahead


def buffers(rank: Rank, micros: float, moment: str) -> float:
    """Bytes of communication buffers: ZeRO-1's shard of the averaged gradients; at the end `naive`'s copy of all gradients; one
    incoming and one outgoing pipeline message in each direction."""
    c, every = rank.config, sum(rank.weights)
    size = 0.0
    if stage(c) == 1:
        size += per_share(rank, every, rank.experts) * wide(c)
    elif replicas(c) > 1 and c.parallel.data == "naive" and moment == "optimizer":
        size += every * wide(c)
    if c.parallel.pp > 1 and micros:
        size += 4 * rank.s * c.model.dim * stream(c)
    return size
