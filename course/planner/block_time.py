"""Predict the time of one micro-batch on one rank: in a block, and in embedding and head. `step_time.py` builds a step from it.

The time of matmuls and attention follows from their shapes on the rank, that of memory-bound kernels from the bytes they read and
write (`kernel_efficiency.py`), and that of collectives from the bytes they move (`collectives.py`). Overlap is subtracted.
"""

import math
from collections.abc import Callable

from course.config.context_choice import attention_leaves_graph
from course.models import DiTConfig, GPTConfig, ViTConfig
from course.models.linears import Linear, block_linears
from course.parallel.tensor_parallel import overlapped_linear
from course.planner import collectives
from course.planner.activation_memory import chunked, fused
from course.planner.kernel_efficiency import TINY_KERNEL
from course.planner.parameter_memory import expert_waits, normed_heads, uneven
from course.planner.rank_workload import Moved, RankWorkload, linear_time

# The slowdown of matmuls by a concurrent collective, over the collective's time. NCCL occupies up to 32 of 132 multiprocessors on
# NVLink, and a matmul tiled for all of them needs a second wave. This is the only number fitted to measured steps: with buckets
# of 25 and 100 MB, gradient averaging on 4 H200s lost 0.54 to 0.85 (results/beside_h200.json; on four others 0.58 to 1.15).
# Overlapped linears and the ring, which were not fitted, confirm it (tests/bench/test_recorded_steps.py).
BESIDE = 0.74
BARRIER = 4.5e-6                                    # seconds of a symmetric-memory barrier (results/symmetric_2xh100.json)
BLOCK_TINY_KERNELS = 4, 8                           # of a block forward and backward: casts of biases, sums of partial sums


# ---- a block ----

def block_time(local: RankWorkload, mixture: bool = False) -> dict[str, float]:
    """Part -> seconds of one block and micro-batch. `forward` and `backward` are sums; recomputation counts as backward.

    mixture: of a block with experts, without their own time (`experts_time.py`)."""
    each = [linear_time(local, linear) for linear in block_linears(local.m, mixture)]
    forward_mm, backward_mm = sum(y for y, *_ in each), sum(dx + dw for _, dx, dw, _ in each)
    casts = sum(cast for *_, cast in each)
    attend, attend_back, around, around_back, hidden = attention_time(local)
    tiny, tiny_back = (number * TINY_KERNEL for number in BLOCK_TINY_KERNELS)
    kept = local.seconds(forward_bytes(local, mixture)) + slow_norms(local, False) + tiny
    gone = local.seconds(backward_bytes(local, mixture)) + slow_norms(local, True) + tiny_back
    comm, comm_back, beside = tensor_time(local, each)
    modulated, modulated_back = modulation_time(local)
    comm, comm_back = comm + modulated, comm_back + modulated_back
    again, how = 0.0, local.config.train.recompute
    if how == "selective":                          # keeps the outputs of overlapped linears and a ring
        collectives = modulated if local.p.overlapped else comm
        again = kept + collectives + (0.0 if local.context == "ring" else around)
    leaves = attention_leaves_graph(local.config)
    if how == "full" or (how == "selective" and local.config.compile
                         and (leaves or (mixture and expert_waits(local.config)))):
        spare = 0.0 if isinstance(local.m, DiTConfig) or local.config.precision == "fp8" or mixture else each[3][0]
        again = (forward_mm - spare + around + kept + casts / 2 + comm
                 + (0.0 if how == "selective" and leaves else attend))
    return {"matmul": forward_mm + backward_mm, "attention": attend + attend_back, "memory": kept + gone + casts,
            "recompute": again, "tensor": comm + comm_back, "context": around + around_back, "hidden": beside + hidden,
            "forward": forward_mm + attend + around + kept + casts / 2 + comm,
            "backward": backward_mm + attend_back + around_back + gone + casts / 2 + comm_back + again}


def inner_width(local: RankWorkload, mixture: bool) -> float:
    """The width of a block's MLP, or of its shared experts, on a rank."""
    m = local.m
    return (m.shared_experts * m.expert_hidden if mixture and isinstance(m, GPTConfig) else m.hidden) / local.p.tp


def forward_bytes(local: RankWorkload, mixture: bool = False) -> Moved:
    """The bytes that a block's norms, activations and residual sums read and write in the forward pass.

    Compiled, residual sum and norm are one kernel, which reads stream and branch and writes stream and matmul input. Eager, they
    are separate, and autocast casts around norms in 32 bits.
    """
    m, low, stream, wide = local.m, local.low, local.stream, local.wide
    rest, n = local.rest * m.dim, local.tokens * m.dim
    inner = local.tokens * inner_width(local, mixture)
    swiglu = isinstance(m, GPTConfig) and m.mlp == "swiglu"
    gates = 2 if isinstance(m, DiTConfig) else 0
    turn, normed = heads_to_turn(local), heads_to_norm(local)
    drop = 2 * rest if getattr(m, "dropout", 0.0) else 0.0
    if local.config.compile:
        return [("fused", size) for size in norm_bytes(local, False)] * 2 + [
            ("fused", inner * (3 if swiglu else 2) * low), ("fused", turn * 2 * low), ("fused", normed * 2 * low),
            ("fused", drop * 2 * stream)]
    cast = n if not local.p.overlapped else rest
    moved_bytes: Moved = [("norm", rest * 2 * wide), ("elementwise", rest * (2 * stream + low))] * 2
    moved_bytes += [("elementwise", cast * (wide + low) * (low < wide)),
                    ("elementwise", rest * (stream + wide) * (stream < wide))] * 2
    moved_bytes += [("elementwise", inner * (5 if swiglu else 2) * low), ("elementwise", turn * 30), ("elementwise", drop * 60)]
    moved_bytes += [("norm", normed * 2 * wide), ("elementwise", normed * 2 * (low + wide) * (low < wide))]
    return moved_bytes + [("elementwise", rest * 4 * wide), ("elementwise", rest * (2 * wide + low))] * gates


def backward_bytes(local: RankWorkload, mixture: bool = False) -> Moved:
    """The bytes that these operations move in the backward pass, with the sums over tokens for the gradients of biases and norms.

    The gradients of queries, keys and values are concatenated, in eager mode after a copy that reorders heads. Triton kernels
    fuse most of the sums."""
    m, low, stream, wide = local.m, local.low, local.stream, local.wide
    rest, n = local.rest * m.dim, local.tokens * m.dim
    inner = local.tokens * inner_width(local, mixture)
    qkv = local.tokens * block_linears(m)[0].n / local.p.tp
    swiglu = isinstance(m, GPTConfig) and m.mlp == "swiglu"
    gates = 2 if isinstance(m, DiTConfig) else 0
    turn, normed = heads_to_turn(local), heads_to_norm(local)
    own = "fused" if local.config.compile else "columns"                # the compiler fuses these kernels too
    ends = 2 if not fused(local.config) else 0 if isinstance(m, DiTConfig) else 1       # biases at the end of the branches
    middle = 0 if local.config.kernels == "triton" and not swiglu else inner * (2 if swiglu else 1)
    sums: Moved = [(own, low * (qkv * (not local.packed) + middle + ends * rest))] if local.bias else []
    joined = 0 if local.packed else low * qkv
    if local.config.compile:
        moved_bytes: Moved = [("fused", size) for size in norm_bytes(local, True)] * 2
        moved = inner * (5 if swiglu else 3) * low
        return moved_bytes + sums + [("fused", moved), ("fused", 2 * joined), ("fused", turn * 2 * low),
                                    ("fused", normed * 5 * low)]         # for the queries and keys, and for the weights
    cast = n if not local.p.overlapped else rest
    moved_bytes = [("norm_back", rest * 3 * wide), ("elementwise", rest * 3 * stream), ("elementwise", rest * (stream + low)),
             ("elementwise", cast * (wide + low) * (low < wide)), ("columns", rest * 2 * wide)] * 2
    moved_bytes += [("elementwise", inner * (8 if swiglu else 3) * low), ("elementwise", turn * 30),
              ("shuffle", 2 * joined), ("shuffle", 2 * joined), ("norm_back", normed * 3 * wide), ("columns", normed * 2 * wide),
              ("elementwise", normed * 2 * (low + wide) * (low < wide))]
    return moved_bytes + sums + [("elementwise", rest * 6 * wide), ("elementwise", rest * (3 * wide + low))] * gates


def heads_to_turn(local: RankWorkload) -> float:
    """Numbers of queries and keys that rotary positions turn, as if keys had as many heads."""
    rotary = isinstance(local.m, GPTConfig) and local.m.position == "rotary"
    return 2 * local.tokens * local.m.attention_width / local.p.tp if rotary else 0.0


def heads_to_norm(local: RankWorkload) -> float:
    """Numbers of queries and keys that are normed."""
    m = local.m
    return local.tokens * (m.heads + m.groups) * m.head_width / local.p.tp if normed_heads(local.config) else 0.0


def norm_bytes(local: RankWorkload, backward: bool) -> list[float]:
    """Bytes of each compiled kernel of a residual sum with its norm. In backward, a second kernel sums over tokens for the
    gradients of the norm's weights, or of DiT's gate, scale and shift."""
    low, stream, rest = local.low, local.stream, local.rest * local.m.dim
    if not backward:
        return [rest * (2 * stream + 2 * low)]
    return [rest * (2 * low + 3 * stream), rest * ((2 * low + stream) if isinstance(local.m, DiTConfig) else (low + stream))]


def slow_norms(local: RankWorkload, backward: bool) -> float:
    """The additional seconds of a block's compiled residual sums and norms, compared with other compiled kernels of equal bytes.

    For some row widths the compiler generates loops that read rows twice. Triton kernels have no such penalty."""
    if not local.config.compile or fused(local.config):
        return 0.0
    sizes, m = norm_bytes(local, backward), local.m
    others = local.seconds([("fused", size) for size in sizes])
    return 2 * (local.kernels.norm(sizes, m.dim, isinstance(m, DiTConfig), backward) - others)


def attention_time(local: RankWorkload) -> tuple[float, float, float, float, float]:
    """(forward, backward) seconds of one block's attention, (forward, backward) of cp communication, and its hidden seconds.

    gather: all-gather keys and values, reduce-scatter their gradients. ring: send each piece of keys and values during the work
    on the one before. all_to_all: exchange queries, keys and values before attention and the output after, in backward too.
    """
    m, p, c = local.m, local.p, local.config
    causal, width = isinstance(m, GPTConfig), m.head_width
    heads, T = local.micro * m.heads / p.tp, local.length
    backend = local.backend
    low = "bf16" if c.precision == "fp8" else c.precision

    def attend(heads: float, queries: float, keys: float, causal: bool, backward: bool, by: str = backend) -> float:
        return local.kernels.attention(heads, queries, keys, width, causal, low, by, backward)

    if p.cp == 1:
        return attend(heads, T, T, causal, False), attend(heads, T, T, causal, True), 0.0, 0.0, 0.0
    group, here = local.groups["cp"], T / p.cp
    shared = m.groups / m.heads if isinstance(m, GPTConfig) else 1.0    # key-value heads per query head
    queries = local.low * local.tokens * m.attention_width / p.tp       # bytes
    pair = 2 * shared * queries
    if local.context == "all_to_all":
        there = collectives.all_to_all(queries + pair, group) + collectives.all_to_all(queries, group)
        shuffled = local.seconds([("shuffle", 4 * (queries + pair)), ("shuffle", 4 * queries)])
        return (attend(heads / p.cp, T, T, causal, False), attend(heads / p.cp, T, T, causal, True), there + shuffled,
                there + shuffled, 0.0)
    if local.context == "gather":
        # a causal rank's two pieces see all keys up to their own; of the fused kernels only flash has this mask
        by = "flash" if causal and backend in ("default", "cudnn") else backend
        times = [attend(heads, here, T / 2, False, back, by) if causal else attend(heads, here, T, False, back)
                 for back in (False, True)]
        around = (collectives.all_gather(pair * p.cp, group)
                  + local.seconds([("shuffle", 2 * pair), ("shuffle", 4 * pair * p.cp)]),
                  collectives.reduce_scatter(pair * p.cp, group) + local.seconds([("shuffle", 4 * pair * p.cp)]))
        return times[0], times[1], *around, 0.0
    return ring_time(local, attend, heads, here, causal, queries, pair)


def ring_time(local: RankWorkload, attend: Callable[..., float], heads: float, here: float, causal: bool, queries: float,
              pair: float) -> tuple[float, float, float, float, float]:
    """`attention_time` for a ring: in each of cp rounds, the slower of work and messages counts.

    Causal rounds after the first compute half a square: half the keys or half the queries. In backward, the gradients of keys and
    values travel round the ring too, in 32 bits.
    """
    p, wide = local.p, 4 / local.low
    turns = p.cp - 1
    group = local.groups["cp"]
    out: list[float] = []
    around: list[float] = []
    hidden = 0.0
    for back in (False, True):
        own, other = attend(heads, here, here, causal, back), attend(heads, here, here / (2 if causal else 1), False, back)
        message = pair * (1 + wide) if back else pair
        wire = collectives.CALL + group.ring / turns + message / group.bandwidth
        merged = queries if not causal else 0.75 * queries              # average number of rows that a round adds to
        merge = local.seconds([("elementwise", merged * (2 + 6 * wide) if not back else (merged + message / 2) * (1 + 2 * wide))])
        out.append(own + turns * other)
        around.append(turns * (merge + max(0.0, wire - other) + BESIDE * min(wire, other)))
        hidden += turns * min(wire, other)
    return out[0], out[1], around[0], around[1], hidden


# ---- tp ----

def tensor_time(local: RankWorkload, each: list[tuple[float, float, float, float]]) -> tuple[float, float, float]:
    """(forward, backward, hidden) seconds of the tp collectives around the four linears of a block.

    Without sequence parallelism: two all-reduces forward (16 bits) and two backward (the norm's 32 bits). With it: an all-gather
    before column linears and a reduce-scatter after row linears, reversed in backward; the bytes are equal. Overlap hides the
    collectives of column linears in backward behind their matmuls.
    """
    p, group = local.p, local.groups["tp"]
    if p.tp == 1:
        return 0.0, 0.0, 0.0
    numbers = local.tokens * local.m.dim
    low = local.low * numbers                       # bytes of all tokens
    regions = len(each) // 2                        # each of a column and a row linear
    if not local.p.overlapped:
        there, back = region_time(local)
        return regions * there, regions * back, 0.0
    padded = uneven(local.config)
    if p.symmetric and not padded:
        return symmetric_time(local, each)
    once, as_one = collectives.all_gather(low, group), padded or (overlapped_linear.small(local.micro, low)
                                                                  and not local.config.graphs)
    ordering = local.seconds([("copy", 2 * low)]) if as_one else 0.0
    columns = each[0:2 * regions:2]
    beside = sum(min(once, dx) + min(once, dw) for _, dx, dw, _ in columns)             # gather x again, scatter dx
    return 2 * regions * (once + ordering), 3 * regions * (once + ordering) - (1 - BESIDE) * beside, beside


def region_time(local: RankWorkload) -> tuple[float, float]:
    """(forward, backward) seconds of entering and leaving a tensor-parallel region without overlap."""
    p, group = local.p, local.groups["tp"]
    low, wide = (size * local.tokens * local.m.dim for size in (local.low, local.wide))
    if p.tp == 1:
        return 0.0, 0.0
    if not p.sp:
        copies = [local.seconds([("copy", 2 * size)]) for size in (low, wide)]
        return collectives.all_reduce(low, group) + copies[0], collectives.all_reduce(wide, group) + copies[1]
    copied = 2 * wide / p.tp + 2 * low, 2 * wide + 2 * low + 2 * low / p.tp             # pieces of dim 1, reordered
    moves = [local.seconds([("shuffle", size)]) for size in copied]
    return (collectives.all_gather(wide, group) + collectives.reduce_scatter(low, group) + moves[0],
            collectives.reduce_scatter(wide, group) + collectives.all_gather(low, group) + moves[1])


def modulation_time(local: RankWorkload) -> tuple[float, float]:
    """(forward, backward) seconds of gathering a DiT's modulation, which is small, and of the collective for its gradient."""
    if local.p.tp == 1 or not isinstance(local.m, DiTConfig):
        return 0.0, 0.0
    group, condition = local.groups["tp"], local.low * local.micro * local.m.dim        # bytes
    back = collectives.reduce_scatter(6 * condition, group) if local.p.sp else collectives.all_reduce(condition, group)
    return collectives.all_gather(6 * condition, group), back


def symmetric_time(local: RankWorkload, each: list[tuple[float, float, float, float]]) -> tuple[float, float, float]:
    """`tensor_time` through symmetric memory (`parallel/tensor_parallel/symmetric_memory.py`): ranks write what a ring would
    send, then wait at a barrier. In a gather a rank copies its own piece; in a scatter it sums the pieces."""
    p, group = local.p, local.groups["tp"]
    whole = local.low * local.tokens * local.m.dim  # bytes
    piece = whole / p.tp
    sent = BARRIER + (whole - piece) / group.bandwidth
    gather = sent + local.seconds([("copy", 2 * piece)])
    added = local.seconds([("fused", (p.tp + 1) * piece)])
    shown = hidden = 0.0
    regions = len(each) // 2
    for _, dx, dw, _ in each[0:2 * regions:2]:      # column linears: gather x again, scatter dx
        for long, under in ((gather, dx), (sent, dw)):
            covered = min(long, under)
            shown, hidden = shown + long - (1 - BESIDE) * covered, hidden + covered
    return regions * (gather + sent + added), regions * (gather + added) + shown, hidden


# ---- embedding, head and loss ----

def ends_time(local: RankWorkload) -> list[dict[str, float]]:
    """[parts before the blocks, parts after the blocks] for one micro-batch, as in `block_time`."""
    m, p, low, wide = local.m, local.p, local.low, local.wide
    n, rest = local.tokens * m.dim, local.rest * m.dim
    group = local.groups["tp"]
    if isinstance(m, GPTConfig):
        rows = m.vocab / p.tp * m.dim
        comm = (collectives.all_reduce(wide * n, group) if not p.sp else 2 * collectives.all_gather(wide * n, group))
        embed = part(memory=(local.seconds([("elementwise", n * 2 * wide), ("elementwise", 3 * wide * rest)]),
                             local.seconds([("columns", 2 * wide * n), ("copy", wide * rows)])), tensor=(comm, 0.0))
        return [embed, gpt_head(local)]
    patch = m.channels * m.patch**2 if isinstance(m, ViTConfig) else m.latent[0] * m.patch**2
    values = local.rest * patch
    y, _, dw, cast = linear_time(local, Linear("embed.proj", patch, m.dim), first=True)
    embed = part(matmul=(y, dw), memory=(local.seconds([("elementwise", values * (wide + low)), ("elementwise", rest * 3 * wide)])
                                         + cast, local.seconds([("columns", 2 * wide * rest)])))
    y, dx, dw, cast = linear_time(local, Linear("head.proj", m.dim, patch))
    # patchify input and target (read and write), and the loss: difference, square and gradient
    loss = [("shuffle", 4 * wide * values), ("fused" if local.config.compile else "elementwise",
                                             values * (10 if local.config.compile else 30))]
    head = part(matmul=(y, dx + dw), memory=(local.seconds([("norm", 2 * wide * rest), *loss]) + cast,
                                             local.seconds([("norm_back", 5 * wide * rest)])))
    return [embed, head]


def gpt_head(local: RankWorkload) -> dict[str, float]:
    """The parts of the final norm, logits and loss.

    The loss in chunks over the whole vocabulary reads each logit and writes its gradient once. Otherwise logits are read and
    written several times around the softmax. Eager: 2 bytes read and 4 written, then exponentials, weights and cast. Compiled:
    about once in each direction. Each chunk reads and writes the weight's gradient, which is scaled in the end. If the weight is
    the embedding's too, both gradients are added."""
    m, p, wide = local.m, local.p, local.wide
    assert isinstance(m, GPTConfig)
    group, rest, n = local.groups["tp"], local.rest * m.dim, local.tokens * m.dim
    y, dx, dw, cast = linear_time(local, Linear("head.proj", m.dim, m.vocab, "column"))
    logits = local.tokens * m.vocab / p.tp
    in_chunks = chunked(local.config)
    chunks = math.ceil(local.tokens / m.loss_chunk) if in_chunks else 0
    sums = [("elementwise", (8.0 if local.low == 2 else 16.0) * m.vocab / p.tp * m.dim)] * chunks
    loss = [("fused", 12 * logits)] if local.config.compile else [("elementwise", (28 if local.low == 2 else 36) * logits)]
    if in_chunks and p.tp == 1:                                           # ops/cross_entropy_triton.py
        loss = [("fused", 2 * local.low * logits)]
    each = (2 * wide * in_chunks + 3 * wide * (m.tied and p.pp == 1)) * m.vocab / p.tp * m.dim
    comm = comm_back = 0.0
    if p.tp > 1:
        three = 2 * collectives.all_reduce(4 * local.tokens, group)           # the maximum and two sums per token
        whole = collectives.all_gather(wide * n, group)
        comm, comm_back = three + (whole if p.sp else 0.0), whole if p.sp else collectives.all_reduce(wide * n, group)
    return part(matmul=(y, dx + dw), memory=(local.seconds([("norm", 2 * wide * rest), *loss, *sums]) + cast,
                                             local.seconds([("norm_back", 5 * wide * rest), ("elementwise", each)])),
                tensor=(comm, comm_back))


def part(**times: tuple[float, float]) -> dict[str, float]:
    """Turn parts, each (forward, backward) seconds, into the form of `block_time`."""
    return {**{name: sum(both) for name, both in times.items()}, "forward": sum(both[0] for both in times.values()),
            "backward": sum(both[1] for both in times.values())}
