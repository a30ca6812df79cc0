"""How long a training step takes, from its configuration: plain arithmetic, no model is built.

    time = predict(load("gpt-1.3b", ["parallel.tp=2"]), hardware.load("h200"), gpus=2)
    time.step                            # seconds; the parts of `Time` add up to it

The busiest rank's work is counted kernel by kernel (`block_time.py`). Then what is done once a step and what waits is added: the
optimizer, gradients on their way, a pipeline's bubble, the host (`host_overhead.py`), the loader. Nothing is fitted to measured
steps, but what collectives cost the matmuls beside them (`block_time.BESIDE`).
"""

import math
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from course.config import Config
from course.models import DiTConfig, GPTConfig, ViTConfig
from course.models.linears import linears
from course.planner import collectives, flops
from course.planner.block_time import BESIDE, block_time, ends_time
from course.planner.hardware import Hardware
from course.planner.rank_workload import RankWorkload, workload_of
from course.utils.errors import CourseError

# bytes/s that loaders give on a host of 16 cores, by worker, and at most (results/loaders_h200.json: pairs of 41.5 MB; of native,
# beginning_h200.json: 53 to 64 pairs/s whatever the workers)
LOADERS = {"native": (1.27e9, 2.4e9), "threads": (5.7e9, 36e9), "dali": (3.4e9, 11e9), "dali_numpy": (5.9e9, 36e9)}

Parts = dict[str, float]                            # part of a step -> seconds, as `block_time.py` has them
Known = dict[tuple[Any, ...], tuple[Parts, list[Parts]]]


@dataclass(frozen=True)
class Time:
    """Seconds of a step on its busiest rank, by what they go into. They add up to `step`; `hidden` is beside them."""

    matmul: float = 0.0                             # of linears, forward and backward
    attention: float = 0.0                          # scores, softmax and values
    memory: float = 0.0                             # norms, activations, sums, casts, loss: bound by memory
    recompute: float = 0.0                          # what backward computes again
    optimizer: float = 0.0                          # update, average of the weights, gradient norm
    tensor: float = 0.0                             # tp's collectives, as far as nothing hides them
    context: float = 0.0                            # cp's, and merging of answers
    data: float = 0.0                               # dp's, and what hidden ones take from the matmuls
    send: float = 0.0                               # a pipeline's messages
    bubble: float = 0.0                             # a pipeline's ranks waiting for others
    launch: float = 0.0                             # the GPU waiting for the host
    loading: float = 0.0                            # waiting for the loader
    hidden: float = 0.0                             # collectives beside the computation: no part of the step
    flops: float = 0.0                              # model FLOPs of the step for each GPU
    peak: float = math.inf                          # FLOP/s of the GPU in the format of the linears
    samples: int = 0

    @property
    def parts(self) -> dict[str, float]:
        """The parts by name, in seconds."""
        others = ("hidden", "flops", "peak", "samples")
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name not in others}

    @property
    def step(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the GPU could have done meanwhile."""
        return self.flops / self.step / self.peak

    @property
    def samples_per_s(self) -> float:
        """Of the whole job: samples of a global batch over the step's seconds."""
        return self.samples / self.step


def predict(config: Config, hardware: Hardware, gpus: int = 0, known: Known | None = None) -> Time:
    """Seconds of one step of a configuration on some hardware. gpus: how many there are, for parallel.dp=0; else the layout's.

    known: what is known of blocks (`blocks_of`), from predictions of the same model on the same hardware.
    Raises `CourseError` where batch and layout do not divide, or the hardware does not know the format.
    """
    return time_of(workload_of(config, hardware, gpus), known)


def time_of(local: RankWorkload, known: Known | None = None) -> Time:
    """The same of a rank's part."""
    c, p = local.config, local.p
    layers = shares(local.m.depth, p.pp, p.chunks)
    block, ends = blocks_of(local, {} if known is None else known)
    inner = {count: rank_time(block, count, []) for count in set(layers[1:-1])}         # ranks with as many blocks are alike
    first, last = (rank_time(block, layers[0], ends[:1]), rank_time(block, layers[-1], ends[1:]))
    ranks = [first, *(inner[count] for count in layers[1:-1]), last] if p.pp > 1 else [rank_time(block, layers[0], ends)]
    busiest = max(ranks, key=lambda parts: parts["forward"] + parts["backward"])
    each_micro_batch = busiest["forward"] + busiest["backward"]
    total = {name: local.micros * value for name, value in busiest.items()}
    most = layers[0]
    weights = parameters_of_rank(local, most, first=True)
    if local.micros > 1:                            # gradients are added up, those in 16 bits to a sum that begins as their cast
        cast, added = (6, 10) if local.masters else (0, 12)
        total["memory"] += local.seconds([("elementwise", (cast + (local.micros - 1) * added) * weights)])
    data, hidden = data_time(local, weights, busiest["backward"], busiest["forward"])
    data += partial_time(local, most)
    send, bubble = pipeline_time(local, each_micro_batch, ranks)
    parts = {"matmul": total["matmul"], "attention": total["attention"], "memory": total["memory"],
             "recompute": total["recompute"], "tensor": total["tensor"], "context": total["context"],
             "optimizer": optimizer_time(local, weights), "data": data, "send": send, "bubble": bubble}
    host = local.host.seconds(c, local.dp, most, local.micros, buckets_of(local, weights))
    parts["launch"] = max(0.0, host - sum(parts.values()))
    parts["loading"] = max(0.0, loading_time(local) - sum(parts.values()))
    samples = c.train.global_batch
    ranks_number = p.pp * local.dp * p.cp * p.tp
    return Time(**parts, hidden=hidden + total["hidden"], flops=flops.step(c.model, samples) / ranks_number,
                peak=local.kernels.hardware.peak(c.precision), samples=samples)


def blocks_of(local: RankWorkload, known: Known) -> tuple[Parts, list[Parts]]:
    """(the parts of a block, of what comes before and after the blocks) of a micro-batch, kept in `known`: thousands of layouts
    of one model differ in keys that do not change them."""
    c, p = local.config, local.p
    alike = (c.precision, c.train.recompute, p.tp, p.cp, p.sp, p.overlap, p.context, local.micro, local.casts, local.masters,
             c.graphs, local.groups["tp"], local.groups["cp"])
    if alike not in known:
        known[alike] = block_time(local), ends_time(local)
    return known[alike]


@cache
def shares(depth: int, pp: int, chunks: int) -> list[int]:
    """Blocks on each rank of a pipeline: `tensor_split` over pp x chunks stages, of which each rank has every pp-th."""
    stages = [depth // (pp * chunks) + (stage < depth % (pp * chunks)) for stage in range(pp * chunks)]
    if min(stages) < 1:
        raise CourseError(f"{pp} pipeline ranks with {chunks} chunks each need {pp * chunks} blocks, but the model has {depth}: "
                          "use a smaller parallel.pp or parallel.chunks")
    return [sum(stages[rank::pp]) for rank in range(pp)]


def rank_time(block: dict[str, float], layers: int, ends: list[dict[str, float]]) -> dict[str, float]:
    """The parts of one micro-batch on a rank with so many blocks, and what it has of embedding and head."""
    return {name: layers * value + sum(end.get(name, 0.0) for end in ends) for name, value in block.items()}


# ---- once a step ----

def parameters_of_rank(local: RankWorkload, layers: int, first: bool) -> float:
    """How many parameters a rank has that holds so many blocks and one end of the model."""
    m, tp = local.m, local.p.tp
    of_block = sum(linear.k * linear.n / (tp if linear.cut else 1) + local.bias * linear.n / (tp if linear.cut == "column" else 1)
                   for linear in linears(m)) + (0 if isinstance(m, DiTConfig) else 4 * m.dim)
    if isinstance(m, GPTConfig):
        ends = m.vocab / tp * m.dim * (1 if m.tied or local.p.pp > 1 else 2) + m.context * m.dim * (m.position == "learned")
    else:
        patch = (m.channels if isinstance(m, ViTConfig) else m.latent[0]) * m.patch**2
        # labels, time and the last modulation; positions
        rows = m.classes + m.dim * (1 + 2 / tp) if isinstance(m, DiTConfig) else m.tokens
        ends = (patch * (1 if local.p.pp > 1 else 2) + rows) * m.dim
    return layers * of_block + ends * first


def optimizer_time(local: RankWorkload, weights: float) -> float:
    """Seconds of the update, with what belongs to it.

    Fused Adam reads weight, gradient and two states and writes all but the gradient, 28 bytes a parameter (SGD 12, with momentum
    20); the norm reads gradients once, 4 bytes, or 2 where they are in 16 bits, of which Adam then reads two fewer; of weights in
    16 bits it writes two more; the average reads the weight and reads and writes itself, 12; in Triton, in one pass with Adam, 8
    (`course/ops/fused_adam.py`). ZeRO-1 does its share.
    The step's few numbers (weight of the batch, norm, flags) are all-reduces of nothing but latency.
    """
    o, c = local.config.optim, local.config
    ranks = local.dp * local.p.cp
    mine = weights / ranks if local.p.zero else weights
    hand = o.name == "adam" and c.kernels == "triton"
    each = (28 if o.name == "adam" else 20 if o.momentum else 12) + ((8 if hand else 12) if o.ema else 0)
    each += 2 * (local.masters and local.micros > 1)                    # of one micro-batch gradients are in 16 bits, too
    calls = 3 * collectives.all_reduce(8, local.groups["all"])
    history = 0.0
    if c.precision == "fp8" and c.fp8.recipe == "delayed":              # of three tensors of each linear, moved by one step
        history = local.seconds([("elementwise", 3 * 4 * local.m.depth * 3 * 4 * c.fp8.history)])
    norm = (2 if local.masters and local.micros == 1 else 4) * mine
    return local.seconds([("fused" if hand else "adam", each * mine), ("elementwise", norm)]) + calls + history


def buckets_of(local: RankWorkload, weights: float) -> int:
    """How many buckets so many parameters' gradients have: at most one for each parameter, of which a block has about 12."""
    p = local.p
    if local.groups["dp_cp"].size == 1 or p.data in ("naive", "none"):
        return 1
    most = 12 * local.m.depth
    return max(1, min(most, math.ceil(local.gradient * weights / max(1.0, p.bucket_mb * 2**20))))


def data_time(local: RankWorkload, weights: float, backward: float, forward: float) -> tuple[float, float]:
    """(exposed, hidden) seconds of averaging gradients over dp x cp, 4 bytes a parameter.

    Buckets run beside the last micro-batch's backward pass, all but the last one, and slow it down (`BESIDE`); gradients are
    copied into them. ZeRO-1 scatters in that place, and gathers the new weights beside the next forward pass.
    """
    p, group, size = local.p, local.groups["dp_cp"], local.gradient * weights
    if group.size == 1 or p.data == "none":
        return 0.0, 0.0
    if p.data == "naive":                           # laid end to end, reduced, divided and copied back
        return collectives.all_reduce(size, group) + local.seconds([("copy", 2 * size)] * 2 + [("elementwise", 2 * size)]), 0.0
    copies = local.seconds([("copy", 2 * size)]) if p.data == "bucketed" else 0.0
    number = buckets_of(local, weights)
    bucket = size / number
    if not p.zero:
        total = number * collectives.all_reduce(bucket, group)
        shown = exposed(total, number, backward)
        return copies + shown + BESIDE * (total - shown), total - shown
    scatter = number * collectives.reduce_scatter(bucket, group)
    gather = number * collectives.all_gather(bucket * (0.5 if local.low == 2 and local.config.precision != "fp8" else 1.0), group)
    shown = exposed(scatter, number, backward) + exposed(gather, number, forward)
    return copies + shown + BESIDE * (scatter + gather - shown), scatter + gather - shown


def partial_time(local: RankWorkload, layers: int) -> float:
    """Seconds of completing gradients of which ranks have parts, after all else.

    With sequence parallelism those of norms and row linears' biases; and those of a token embedding that both ends of a pipeline
    have.
    """
    m, p = local.m, local.p
    seconds = 0.0
    if p.tp > 1 and p.sp:
        each = (2 if isinstance(m, DiTConfig) else 6) * m.dim
        seconds += collectives.all_reduce(local.gradient * layers * each, local.groups["tp"])
    if p.pp > 1 and isinstance(m, GPTConfig) and m.tied:
        seconds += collectives.all_reduce(local.gradient * m.vocab / p.tp * m.dim, local.groups["ends"])
    return seconds


def exposed(total: float, number: int, beside: float) -> float:
    """What is seen of `number` collectives that begin while something else runs: the last one, and what does not fit beside."""
    return max(total / number, total - beside)


def pipeline_time(local: RankWorkload, busiest: float, ranks: list[dict[str, float]]) -> tuple[float, float]:
    """(seconds of messages that are seen, of the bubble) beside the busiest rank's work.

    The first micro-batch goes through all ranks and back before the last rank has work of its own for all: the bubble is one
    micro-batch's time on the other ranks, of 1/chunks each if interleaved (parallel/pipeline_parallel/schedules.py). Messages:
    `waits`.
    """
    p = local.p
    if p.pp == 1:
        return 0.0, 0.0
    whole = sum(parts["forward"] + parts["backward"] for parts in ranks)
    step = collectives.strides(p.order, {"pp": p.pp, "dp": local.dp, "cp": p.cp, "tp": p.tp})["pp"]
    message = collectives.send_along(local.message, step, p.pp, local.kernels.hardware)
    return waits(p.schedule, p.pp, local.micros, p.chunks) * message, (whole - busiest) / p.chunks


def waits(schedule: str, p: int, m: int, v: int) -> float:
    """How many messages, one after another, make a step longer, of m micro-batches; the others are under way beside work.

    All: the first micro-batch's way to the last rank and back, 2·(p - 1). interleaved: through all p·v stages, 2·(p·v - 1). 1f1b:
    2·(p - 1)·m / p + 2·(p - 2), since a rank sends a forward pass on that waited for the backward pass of p micro-batches before,
    round and round. As parallel/pipeline_parallel/schedules.py's `timeline` has them where p divides m; else 1f1b's is within 1
    of it, and interleaved waits less.
    """
    if v > 1:
        return 2 * (p * v - 1)
    return 2 * (p - 1) if schedule == "gpipe" else max(2 * (p - 1), 2 * (p - 1) * m / p + 2 * (p - 2))


def loading_time(local: RankWorkload) -> float:
    """Seconds in which the loaders of a node give its GPUs their samples; tokens and latents are small enough not to count."""
    c, m = local.config, local.m
    if c.data.source == "mock" or not isinstance(m, ViTConfig):
        return 0.0
    each, most = LOADERS[c.data.loader]
    node = local.kernels.hardware.links[0].span or 1
    sharing = min(node, local.dp * local.p.cp * local.p.tp * local.p.pp)
    rate = min(max(1, c.data.workers) * each, min(most, local.kernels.hardware.storage) / sharing)
    return local.micro * local.micros * 2 * 4 * m.channels * math.prod(m.grid) / rate
