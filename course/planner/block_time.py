"""How long one micro-batch takes on one rank: in a block, and in embedding and head. `step_time.py` makes a step of it.

Matmuls by their shapes on the rank, attention, what is bound by memory by the bytes that it reads and writes
(`kernel_efficiency.py`), collectives by the bytes that they move (`collectives.py`), less what overlaps.
"""

import math
from collections.abc import Callable

from course.config.validation import attention_leaves_graph
from course.models import DiTConfig, GPTConfig, ViTConfig
from course.models.linears import Linear, linears
from course.parallel.tensor_parallel import overlapped_linear
from course.planner import collectives
from course.planner.activation_memory import chunked, fused
from course.planner.parameter_memory import uneven
from course.planner.rank_workload import Moved, RankWorkload, linear_time

# Of the time of a collective that runs beside matmuls, the share by which these become slower: NCCL takes up to 32 of 132
# multiprocessors on NVLink, and a matmul cut for all of them needs a second wave. The one number here that is taken from steps:
# from those with and without averaged gradients on 4 H200s, in buckets of 25 and 100 MB, which lost 0.54 to 0.85
# (results/beside_h200.json; four others lost 0.58 to 1.15). Overlapped linears and the ring, from which it was not taken, bear
# it out (tests/bench/test_recorded_steps.py).
BESIDE = 0.74
BARRIER = 4.5e-6                                    # seconds of a barrier of symmetric memory (results/symmetric_2xh100.json)


# ---- a block ----

def block_time(local: RankWorkload) -> dict[str, float]:
    """The parts of one block and micro-batch. `forward` and `backward` are sums over the parts, the recomputed with backward."""
    each = [linear_time(local, linear) for linear in linears(local.m)]
    forward_mm, backward_mm = sum(y for y, *_ in each), sum(dx + dw for _, dx, dw, _ in each)
    casts = sum(cast for *_, cast in each)
    attend, attend_back, around, around_back, hidden = attention_time(local)
    kept = local.seconds(forward_bytes(local)) + slow_norms(local, False)
    gone = local.seconds(backward_bytes(local)) + slow_norms(local, True)
    comm, comm_back, beside = tensor_time(local, each)
    modulated, modulated_back = modulation_time(local)
    comm, comm_back = comm + modulated, comm_back + modulated_back
    again, how = 0.0, local.config.train.recompute
    if how == "selective":                          # which keeps what overlapped linears and a ring put out
        collectives = modulated if local.p.overlapped else comm
        again = kept + collectives + (0.0 if local.p.context == "ring" else around)
    if how == "full" or (how == "selective" and local.config.compile and attention_leaves_graph(local.config)):
        spare = 0.0 if isinstance(local.m, DiTConfig) or local.config.precision == "fp8" else each[3][0]
        again = forward_mm - spare + around + kept + casts / 2 + comm + (attend if how == "full" else 0.0)
    return {"matmul": forward_mm + backward_mm, "attention": attend + attend_back, "memory": kept + gone + casts,
            "recompute": again, "tensor": comm + comm_back, "context": around + around_back, "hidden": beside + hidden,
            "forward": forward_mm + attend + around + kept + casts / 2 + comm,
            "backward": backward_mm + attend_back + around_back + gone + casts / 2 + comm_back + again}


def forward_bytes(local: RankWorkload) -> Moved:
    """What norms, activations and residual sums of a block read and write, forward.

    Compiled, each is one kernel: sum and norm together read stream and branch and write stream and the matmul's input. PyTorch's
    own are one by one: autocast lets norms work in 32 bits and casts around them.
    """
    m, low, stream, wide = local.m, local.low, local.stream, local.wide
    rest, n = local.rest * m.dim, local.tokens * m.dim
    inner = local.tokens * local.m.hidden / local.p.tp
    swiglu = isinstance(m, GPTConfig) and m.mlp == "swiglu"
    gates = 2 if isinstance(m, DiTConfig) else 0
    turn = 2 * n / local.p.tp if isinstance(m, GPTConfig) and m.position == "rotary" else 0.0
    drop = 2 * rest if getattr(m, "dropout", 0.0) else 0.0
    if local.config.compile:
        return [("fused", size) for size in norm_bytes(local, False)] * 2 + [
            ("fused", inner * (3 if swiglu else 2) * low), ("fused", turn * 2 * low), ("fused", drop * 2 * stream)]
    cast = n if not local.p.overlapped else rest
    moved_bytes: Moved = [("norm", rest * 2 * wide), ("elementwise", rest * (2 * stream + low))] * 2
    moved_bytes += [("elementwise", cast * (wide + low) * (low < wide)),
                    ("elementwise", rest * (stream + wide) * (stream < wide))] * 2
    moved_bytes += [("elementwise", inner * (5 if swiglu else 2) * low), ("elementwise", turn * 30), ("elementwise", drop * 60)]
    return moved_bytes + [("elementwise", rest * 4 * wide), ("elementwise", rest * (2 * wide + low))] * gates


def backward_bytes(local: RankWorkload) -> Moved:
    """The same backward, and sums over tokens for the gradients of biases and norms' weights, and of queries, keys and values put
    together, twice uncompiled (once to get the heads in order). By hand most of these sums are taken in passing."""
    m, low, stream, wide = local.m, local.low, local.stream, local.wide
    rest, n = local.rest * m.dim, local.tokens * m.dim
    inner = local.tokens * local.m.hidden / local.p.tp
    qkv = local.tokens * linears(m)[0].n / local.p.tp
    swiglu = isinstance(m, GPTConfig) and m.mlp == "swiglu"
    gates = 2 if isinstance(m, DiTConfig) else 0
    turn = 2 * n / local.p.tp if isinstance(m, GPTConfig) and m.position == "rotary" else 0.0
    own = "fused" if local.config.compile else "columns"                # the compiler makes these kernels, too
    ends = 2 if not fused(local.config) else 0 if isinstance(m, DiTConfig) else 1       # branches' biases
    middle = 0 if local.config.kernels == "triton" and not swiglu else inner * (2 if swiglu else 1)
    sums: Moved = [(own, low * (qkv * (not local.packed) + middle + ends * rest))] if local.bias else []
    joined = 0 if local.packed else low * qkv
    if local.config.compile:
        moved_bytes: Moved = [("fused", size) for size in norm_bytes(local, True)] * 2
        moved = inner * (5 if swiglu else 3) * low
        return moved_bytes + sums + [("fused", moved), ("fused", 2 * joined), ("fused", turn * 2 * low)]
    cast = n if not local.p.overlapped else rest
    moved_bytes = [("norm_back", rest * 3 * wide), ("elementwise", rest * 3 * stream), ("elementwise", rest * (stream + low)),
             ("elementwise", cast * (wide + low) * (low < wide)), ("columns", rest * 2 * wide)] * 2
    moved_bytes += [("elementwise", inner * (8 if swiglu else 3) * low), ("elementwise", turn * 30),
              ("shuffle", 2 * joined), ("shuffle", 2 * joined)]
    return moved_bytes + sums + [("elementwise", rest * 6 * wide), ("elementwise", rest * (3 * wide + low))] * gates


def norm_bytes(local: RankWorkload, backward: bool) -> list[float]:
    """What a residual sum with its norm moves, compiled. Backward a second kernel reads what the sums over tokens are of: the
    gradients of the norm's weights, or of DiT's gate, scale and shift."""
    low, stream, rest = local.low, local.stream, local.rest * local.m.dim
    if not backward:
        return [rest * (2 * stream + 2 * low)]
    return [rest * (2 * low + 3 * stream), rest * ((2 * low + stream) if isinstance(local.m, DiTConfig) else (low + stream))]


def slow_norms(local: RankWorkload, backward: bool) -> float:
    """By how many seconds the compiler's residual sums and norms of a block take longer than its other kernels would for as many
    bytes. Of rows that fit badly it makes loops that read them twice. By hand they are as fast as the others."""
    if not local.config.compile or fused(local.config):
        return 0.0
    sizes, m = norm_bytes(local, backward), local.m
    others = local.seconds([("fused", size) for size in sizes])
    return 2 * (local.kernels.norm(sizes, m.dim, isinstance(m, DiTConfig), backward) - others)


def attention_time(local: RankWorkload) -> tuple[float, float, float, float, float]:
    """(forward, backward) seconds of one block's attention, the same of cp's communication around it, and what of that is hidden.

    gather: keys and values of all ranks, their gradients scattered. ring: one piece after another, each sent beside the work on
    the one before. all_to_all: queries, keys and values before, the answer after, backward too.
    """
    m, p, c = local.m, local.p, local.config
    causal, width = isinstance(m, GPTConfig), m.dim // m.heads
    heads, T = local.micro * m.heads / p.tp, local.length
    backend = local.backend
    low = "bf16" if c.precision == "fp8" else c.precision

    def attend(heads: float, queries: float, keys: float, causal: bool, backward: bool, by: str = backend) -> float:
        return local.kernels.attention(heads, queries, keys, width, causal, low, by, backward)

    if p.cp == 1:
        return attend(heads, T, T, causal, False), attend(heads, T, T, causal, True), 0.0, 0.0, 0.0
    group, here = local.groups["cp"], T / p.cp
    shared = m.groups / m.heads if isinstance(m, GPTConfig) else 1.0    # keys' and values' heads for each of the queries'
    queries = local.low * local.tokens * m.dim / p.tp                   # bytes
    pair = 2 * shared * queries
    if p.context == "all_to_all":
        there = collectives.all_to_all(queries + pair, group) + collectives.all_to_all(queries, group)
        shuffled = local.seconds([("shuffle", 4 * (queries + pair)), ("shuffle", 4 * queries)])
        return (attend(heads / p.cp, T, T, causal, False), attend(heads / p.cp, T, T, causal, True), there + shuffled,
                there + shuffled, 0.0)
    if p.context == "gather":
        # a causal rank's two pieces see all keys up to their own: no fused kernel but flash has such a mask
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
    """The same of a ring: cp rounds, in each of which the slower of work and messages counts.

    Causal rounds but the first are half of the square: half the keys or half the queries. Backward, gradients of keys and values
    go round too, in 32 bits.
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
        merged = queries if not causal else 0.75 * queries              # rows that a round adds to, on average
        merge = local.seconds([("elementwise", merged * (2 + 6 * wide) if not back else (merged + message / 2) * (1 + 2 * wide))])
        out.append(own + turns * other)
        around.append(turns * (merge + max(0.0, wire - other) + BESIDE * min(wire, other)))
        hidden += turns * min(wire, other)
    return out[0], out[1], around[0], around[1], hidden


# ---- tp ----

def tensor_time(local: RankWorkload, each: list[tuple[float, float, float, float]]) -> tuple[float, float, float]:
    """(forward, backward, hidden) seconds of tp's collectives around the four linears of a block.

    Without sequence parallelism two all-reduces forward (16 bits) and two backward (in the norm's 32). With it a gather before a
    column linear and a scatter after a row linear, backward the other way round; the same bytes. What column linears do backward
    runs beside their matmuls.
    """
    p, group = local.p, local.groups["tp"]
    if p.tp == 1:
        return 0.0, 0.0, 0.0
    numbers = local.tokens * local.m.dim
    low, wide = local.low * numbers, local.wide * numbers               # bytes of all tokens
    if not p.sp:
        copies = [local.seconds([("copy", 2 * size)]) for size in (low, wide)]
        return 2 * (collectives.all_reduce(low, group) + copies[0]), 2 * (collectives.all_reduce(wide, group) + copies[1]), 0.0
    if not local.p.overlapped:
        copied = 2 * wide / p.tp + 2 * low, 2 * wide + 2 * low + 2 * low / p.tp         # pieces of dim 1, put in order
        moves = [local.seconds([("shuffle", size)]) for size in copied]
        return (2 * (collectives.all_gather(wide, group) + collectives.reduce_scatter(low, group) + moves[0]),
                2 * (collectives.reduce_scatter(wide, group) + collectives.all_gather(low, group) + moves[1]), 0.0)
    padded = uneven(local.config)
    if p.symmetric and not padded:
        return symmetric_time(local, each)
    once, as_one = collectives.all_gather(low, group), padded or (overlapped_linear.small(local.micro, low)
                                                                  and not local.config.graphs)
    ordering = local.seconds([("copy", 2 * low)]) if as_one else 0.0
    beside = sum(min(once, dx) + min(once, dw) for _, dx, dw, _ in each[0:3:2])         # x gathered again, dx scattered
    return 4 * (once + ordering), 6 * (once + ordering) - (1 - BESIDE) * beside, beside


def modulation_time(local: RankWorkload) -> tuple[float, float]:
    """(forward, backward) seconds of gathering a DiT's modulation, few numbers, and of what its gradient needs."""
    if local.p.tp == 1 or not isinstance(local.m, DiTConfig):
        return 0.0, 0.0
    group, condition = local.groups["tp"], local.low * local.micro * local.m.dim        # bytes
    back = collectives.reduce_scatter(6 * condition, group) if local.p.sp else collectives.all_reduce(condition, group)
    return collectives.all_gather(6 * condition, group), back


def symmetric_time(local: RankWorkload, each: list[tuple[float, float, float, float]]) -> tuple[float, float, float]:
    """The same through each other's memory (`parallel/tensor_parallel/symmetric_memory.py`): ranks write what a ring would send,
    and wait for all. A rank copies its own piece of what is gathered, and adds up pieces where they are scattered."""
    p, group = local.p, local.groups["tp"]
    whole = local.low * local.tokens * local.m.dim  # bytes
    piece = whole / p.tp
    sent = BARRIER + (whole - piece) / group.bandwidth
    gather = sent + local.seconds([("copy", 2 * piece)])
    added = local.seconds([("fused", (p.tp + 1) * piece)])
    shown = hidden = 0.0
    for _, dx, dw, _ in each[0:3:2]:                # of column linears: x gathered again, dx scattered
        for long, under in ((gather, dx), (sent, dw)):
            covered = min(long, under)
            shown, hidden = shown + long - (1 - BESIDE) * covered, hidden + covered
    return 2 * (gather + sent + added), 2 * (gather + added) + shown, hidden


# ---- embedding, head and loss ----

def ends_time(local: RankWorkload) -> list[dict[str, float]]:
    """The parts of what comes before the blocks, and of what comes after them, for one micro-batch."""
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
    # fields cut into patches, input and target (read and written), and the loss: difference, its square and gradient
    loss = [("shuffle", 4 * wide * values), ("fused" if local.config.compile else "elementwise",
                                             values * (10 if local.config.compile else 30))]
    head = part(matmul=(y, dx + dw), memory=(local.seconds([("norm", 2 * wide * rest), *loss]) + cast,
                                             local.seconds([("norm_back", 5 * wide * rest)])))
    return [embed, head]


def gpt_head(local: RankWorkload) -> dict[str, float]:
    """The last norm, logits and loss. In chunks of the whole vocabulary each logit is read and its gradient written, once. Else
    it is read and written several times around the softmax: by PyTorch's own kernels 2 bytes read and 4 written, then
    exponentials, weights and the cast; compiled about once in each direction. Each chunk reads and writes the weight's
    gradient."""
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
    comm = comm_back = 0.0
    if p.tp > 1:
        three = 2 * collectives.all_reduce(4 * local.tokens, group)           # the largest, and two sums of each token
        whole = collectives.all_gather(wide * n, group)
        comm, comm_back = three + (whole if p.sp else 0.0), whole if p.sp else collectives.all_reduce(wide * n, group)
    return part(matmul=(y, dx + dw), memory=(local.seconds([("norm", 2 * wide * rest), *loss, *sums]) + cast,
                                             local.seconds([("norm_back", 5 * wide * rest)])), tensor=(comm, comm_back))


def part(**times: tuple[float, float]) -> dict[str, float]:
    """Parts, each (forward, backward), as `block_time` gives them."""
    return {**{name: sum(both) for name, both in times.items()}, "forward": sum(both[0] for both in times.values()),
            "backward": sum(both[1] for both in times.values())}
