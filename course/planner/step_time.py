"""Predict the time of a training step from its configuration, by arithmetic alone: no model is built.

    time = predict(load("gpt-1.3b", ["parallel.tp=2"]), hardware.load("h200"), gpus=2)
    time.step                            # seconds: the sum of the parts of `Time`

`block_time.py` counts the busiest rank's work kernel by kernel. This module adds what happens once per step, and what waits: the
optimizer, gradient averaging, the pipeline bubble, the host (`host_overhead.py`) and the loader. Only one number is fitted to
measured steps: how much collectives slow down concurrent matmuls (`block_time.BESIDE`).
"""

import math
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from course.config import Config
from course.models import DiTConfig, GPTConfig, ViTConfig
from course.planner import collectives, flops
from course.planner.block_time import BESIDE, block_time, ends_time
from course.planner.collectives import Group
from course.planner.experts_time import experts_time
from course.planner.hardware import Hardware
from course.planner.kernel_efficiency import TINY_KERNEL
from course.planner.muon_time import muon_time, on_rank, sharers
from course.planner.parameter_memory import (
    block_parameters,
    block_weights,
    expert_waits,
    expert_weights,
    head_norm_weights,
    small_weights,
)
from course.planner.rank_workload import RankWorkload, workload_of
from course.utils.errors import CourseError

# loader -> bytes/s (per worker, at most) on a host with 16 cores. Source: results/loaders_h200.json, pairs of 41.5 MB; for native
# beginning_h200.json, 53 to 64 pairs/s whatever the number of workers
LOADERS = {"native": (1.27e9, 2.4e9), "threads": (5.7e9, 36e9), "dali": (3.4e9, 11e9), "dali_numpy": (5.9e9, 36e9)}

STEP_TINY_KERNELS = 98                              # once a step: the learning rate, the loss scale, numbers for the log

Parts = dict[str, float]                            # part of a step, as in `block_time.py` -> seconds
Known = dict[tuple[Any, ...], tuple[Parts, list[Parts]]]


@dataclass(frozen=True)
class Time:
    """The seconds of a step on its busiest rank, part by part. The parts add up to `step`, without `hidden`."""

    matmul: float = 0.0                             # linears, forward and backward
    attention: float = 0.0                          # scores, softmax and values
    memory: float = 0.0                             # memory-bound kernels: norms, activations, sums, casts, loss
    recompute: float = 0.0                          # recomputation in the backward pass
    optimizer: float = 0.0                          # update, moving average, gradient norm
    tensor: float = 0.0                             # exposed tp collectives
    dispatch: float = 0.0                           # ep's collectives, and the GPU waiting while the host reads their sizes
    context: float = 0.0                            # exposed cp collectives, and merging of partial results
    data: float = 0.0                               # exposed dp collectives, and the slowdown of matmuls by hidden ones
    send: float = 0.0                               # exposed pipeline messages
    bubble: float = 0.0                             # pipeline ranks waiting for others
    launch: float = 0.0                             # GPU waiting for the host
    loading: float = 0.0                            # step waiting for the loader
    hidden: float = 0.0                             # collectives hidden behind computation: not part of `step`
    flops: float = 0.0                              # model FLOPs of the step per GPU
    peak: float = math.inf                          # FLOP/s of the GPU in the format of the matmuls
    samples: int = 0                                # in the global batch

    @property
    def parts(self) -> dict[str, float]:
        """Part -> seconds."""
        others = ("hidden", "flops", "peak", "samples")
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name not in others}

    @property
    def step(self) -> float:
        """Seconds of the step: the sum of `parts`."""
        return sum(self.parts.values())

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: model FLOPs over what the GPU could do in that time at its peak."""
        return self.flops / self.step / self.peak

    @property
    def samples_per_s(self) -> float:
        """Samples per second of the whole job."""
        return self.samples / self.step


def predict(config: Config, hardware: Hardware, gpus: int = 0, known: Known | None = None) -> Time:
    """Predict the time of one training step on some hardware. gpus: how many there are, needed for parallel.dp=0.

    known: a cache of block times (`blocks_of`), to share between predictions of one model on one hardware.
    Raises `CourseError` if the layout does not divide batch and GPUs, or if the hardware does not support the format.
    """
    return time_of(workload_of(config, hardware, gpus), known)


def time_of(local: RankWorkload, known: Known | None = None) -> Time:
    """`predict` for a rank's workload."""
    c, p = local.config, local.p
    layers = shares(local.m.depth, p.pp, p.chunks)
    block, ends = blocks_of(local, {} if known is None else known)
    inner = {count: rank_time(block, count, []) for count in set(layers[1:-1])}         # ranks with equal blocks take equal time
    first, last = (rank_time(block, layers[0], ends[:1]), rank_time(block, layers[-1], ends[1:]))
    ranks = [first, *(inner[count] for count in layers[1:-1]), last] if p.pp > 1 else [rank_time(block, layers[0], ends)]
    busiest = max(ranks, key=lambda parts: parts["forward"] + parts["backward"])
    each_micro_batch = busiest["forward"] + busiest["backward"]
    total = {name: local.micros * value for name, value in busiest.items()}
    most = layers[0]
    weights, experts = parameters_of_rank(local, most, first=True), spread_experts(local, most)
    if local.micros > 1:                            # accumulate gradients; the sum of 16-bit ones starts as a cast
        cast, added = (6, 10) if local.masters else (0, 12)
        total["memory"] += local.seconds([("elementwise", (cast + (local.micros - 1) * added) * weights)])
    data, hidden = data_time(local, weights, experts, busiest["backward"], busiest["forward"])
    data += partial_time(local, most)
    send, bubble = pipeline_time(local, each_micro_batch, ranks)
    parts = {"matmul": total["matmul"], "attention": total["attention"], "memory": total["memory"],
             "recompute": total["recompute"], "tensor": total["tensor"], "dispatch": total.get("dispatch", 0.0),
             "context": total["context"], "optimizer": optimizer_time(local, weights, most, experts), "data": data, "send": send,
             "bubble": bubble}
    parts["launch"] = launch_time(local, most, weights, sum(parts.values()), local.micros * busiest["forward"])
    parts["loading"] = max(0.0, loading_time(local) - sum(parts.values()))
    samples = c.train.global_batch
    ranks_number = p.pp * local.dp * p.cp * p.tp
    return Time(**parts, hidden=hidden + total["hidden"], flops=flops.step(c.model, samples) / ranks_number,
                peak=local.kernels.hardware.peak(c.precision), samples=samples)


def blocks_of(local: RankWorkload, known: Known) -> tuple[Parts, list[Parts]]:
    """(the parts of a block; those before and after the blocks) for one micro-batch, cached in `known`: most layouts of a model
    differ only in keys that do not change these times."""
    c, p = local.config, local.p
    alike = (c.precision, c.train.recompute, p.tp, p.cp, p.sp, p.overlap, p.context, local.micro, local.casts, local.masters,
             c.graphs, local.groups["tp"], local.groups["cp"], local.groups["ep"], p.dispatch, p.pp > 1)
    if alike not in known:
        known[alike] = mean_block(local), ends_time(local)
    return known[alike]


def mean_block(local: RankWorkload) -> Parts:
    """The parts of a block; with experts in some of the blocks, their mean."""
    share = local.mixtures
    kinds = [(1 - share, block_time(local))] if share < 1 else []
    if share:
        kinds += [(share, block_time(local, True)), (share, experts_time(local))]
    names = dict.fromkeys(name for _, parts in kinds for name in parts)
    return {name: sum(weight * parts.get(name, 0.0) for weight, parts in kinds) for name in names}


@cache
def shares(depth: int, pp: int, chunks: int) -> list[int]:
    """Blocks on each pipeline rank: `tensor_split` over pp x chunks stages; rank r has every pp-th from r.

    Raises `CourseError` if a stage would have no block."""
    stages = [depth // (pp * chunks) + (stage < depth % (pp * chunks)) for stage in range(pp * chunks)]
    if min(stages) < 1:
        raise CourseError(f"{pp} pipeline ranks with {chunks} chunks each need {pp * chunks} blocks, but the model has {depth}: "
                          "use a smaller parallel.pp or parallel.chunks")
    return [sum(stages[rank::pp]) for rank in range(pp)]


def rank_time(block: dict[str, float], layers: int, ends: list[dict[str, float]]) -> dict[str, float]:
    """The parts of one micro-batch on a rank with so many blocks, and what it has of embedding and head."""
    return {name: layers * value + sum(end.get(name, 0.0) for end in ends) for name, value in block.items()}


def launch_time(local: RankWorkload, layers: int, weights: float, work: float, forward: float) -> float:
    """Seconds that the GPU waits for launches. work: seconds of the step's kernels and collectives; forward: of forward passes.

    The host runs ahead of the GPU, but not in a forward pass with experts in which it reads numbers of rows. Such a pass waits
    for its own launches, half of the blocks'. With recomputation the backward pass is one, too."""
    shape = local.micros, buckets_of(local, weights)
    host = local.host.seconds(local.config, local.dp, layers, *shape)
    if not local.mixtures or not expert_waits(local.config) or local.config.train.recompute != "none":
        return max(0.0, host - work)
    launches = (host - local.host.seconds(local.config, local.dp, 0, *shape)) / 2
    return max(0.0, launches - forward) + max(0.0, host - launches - (work - forward))


# ---- once a step ----

def parameters_of_rank(local: RankWorkload, layers: int, first: bool) -> float:
    """Parameters of a rank with `layers` blocks and, if `first`, one end of the model."""
    m, tp, share = local.m, local.p.tp, local.mixtures
    of_block = (1 - share) * block_parameters(local.config) + (share * block_parameters(local.config, True) if share else 0)
    if isinstance(m, GPTConfig):
        ends = m.vocab / tp * m.dim * (1 if m.tied or local.p.pp > 1 else 2) + m.context * m.dim * (m.position == "learned")
    else:
        patch = (m.channels if isinstance(m, ViTConfig) else m.latent[0]) * m.patch**2
        # DiT: labels, time and the last modulation; ViT: positions
        rows = m.classes + m.dim * (1 + 2 / tp) if isinstance(m, DiTConfig) else m.tokens
        ends = (patch * (1 if local.p.pp > 1 else 2) + rows) * m.dim
    return layers * of_block + ends * first


def spread_experts(local: RankWorkload, layers: int) -> float:
    """Of the parameters of a rank with `layers` blocks, those of experts that ep spreads: fewer ranks hold the same ones."""
    return layers * local.mixtures * expert_weights(local.config) if local.p.ep > 1 else 0.0


def optimizer_time(local: RankWorkload, weights: float, layers: int, experts: float = 0.0) -> float:
    """Seconds of the optimizer update, with gradient norm, moving average and FP8 history.

    Bytes per parameter: fused Adam reads weight, gradient and two states and writes all but the gradient, 28 (SGD 12, with
    momentum 20). 16-bit gradients save Adam 2, and 16-bit weights cost it 2 more. The norm reads 4, or 2 with 16-bit gradients.
    The moving average reads the weight and reads and writes itself, 12, or 8 in one pass with Adam in Triton
    (`course/ops/fused_adam.py`). With ZeRO each rank updates its shard. Muon's update of the blocks' matrices: `muon_time.py`.
    experts: as in `data_time`; ZeRO shards them over fewer ranks.
    Three all-reduces of a few numbers (batch weight, norm, flags) cost only latency.
    """
    o, c = local.config.optim, local.config
    mine, muon = (weights - experts) / sharers(local), o.name == "muon"
    mine += experts / (local.groups["expert_dp"].size if local.p.zero else 1)
    hand = o.adam and c.kernels == "triton"
    each = (28 if o.adam or muon else 20 if o.momentum else 12) + ((8 if hand else 12) if o.ema else 0)
    each += 2 * (local.masters and local.micros > 1)                    # with one micro-batch, 16-bit gradients offset this
    calls = 3 * collectives.all_reduce(8, local.groups["all"])
    history = 0.0
    if c.precision == "fp8" and c.fp8.recipe == "delayed":              # three tensors per linear, shifted by one step
        history = local.seconds([("elementwise", 3 * 4 * local.m.depth * 3 * 4 * c.fp8.history)])
    norm, tiny = (2 if local.masters and local.micros == 1 else 4) * mine, STEP_TINY_KERNELS * TINY_KERNEL
    moved = each * mine - (28 * layers * sum(on_rank(local)) / sharers(local) if muon else 0)
    matrices = muon_time(local, layers) if muon else 0.0
    return local.seconds([("fused" if hand else "adam", moved), ("elementwise", norm)]) + matrices + calls + history + tiny


def buckets_of(local: RankWorkload, weights: float) -> int:
    """Number of gradient buckets for `weights` parameters: at most one per parameter tensor, about 12 in a block."""
    p = local.p
    if local.groups["dp_cp"].size == 1 or p.data in ("naive", "none"):
        return 1
    most = 12 * local.m.depth
    return max(1, min(most, math.ceil(local.gradient * weights / max(1.0, p.bucket_mb * 2**20))))


def data_time(local: RankWorkload, weights: float, experts: float, backward: float, forward: float) -> tuple[float, float]:
    """(exposed, hidden) seconds of averaging gradients. experts: of the weights, those that ep spreads, whose gradients are
    averaged over dp x cp / ep ranks."""
    c, share, small = local.config, local.mixtures, 0.0
    if small_weights(c):                            # gathered in 8 bits
        each = (1 - share) * block_weights(c)[0] + (share * block_weights(c, True)[0] if share else 0)
        small = local.m.depth // local.p.pp * each
    shown, hidden = average_time(local, weights - experts, small, backward, forward)
    if experts:
        groups = local.groups | {"dp_cp": local.groups["expert_dp"], "shard": local.groups["expert_dp"], "replicate": Group(1)}
        more, beside = average_time(replace(local, groups=groups), experts, 0.0, backward, forward)
        shown, hidden = shown + more, hidden + beside
    return shown, hidden


def average_time(local: RankWorkload, weights: float, small: float, backward: float, forward: float) -> tuple[float, float]:
    """(exposed, hidden) seconds of averaging gradients over dp x cp, `local.gradient` bytes per parameter.

    All buckets but the last overlap with the last micro-batch's backward pass and slow it down (`BESIDE`); gradients are copied
    into buckets. ZeRO-1 reduce-scatters instead, and gathers the new weights during the next forward pass.
    """
    p, group, size = local.p, local.groups["dp_cp"], local.gradient * weights
    if p.zero >= 2:
        return sharded_time(local, weights, small, backward, forward)
    if group.size == 1 or p.data == "none":
        return 0.0, 0.0
    if p.data == "naive":                           # concatenated, reduced, divided and copied back
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


def sharded_time(local: RankWorkload, weights: float, small: float, backward: float, forward: float) -> tuple[float, float]:
    """(exposed, hidden) seconds of the gathers and scatters of stages 2 and 3 (`course/parallel/data_parallel/fsdp.py`).

    small: of the weights, those that are gathered in 8 bits.

    Gradients are copied and reduce-scattered after each micro-batch's backward pass, unit by unit. Stage 2 gathers the weights
    once a step; stage 3 for each pass, or for each forward pass, or once (`parallel.reshard_after`). With replicas, each share's
    gradient is all-reduced in the last backward pass. The first gather and the last scatter of a pass are exposed.
    """
    p, shard, replicate = local.p, local.groups["shard"], local.groups["replicate"]
    units = local.m.depth // p.pp + 2
    low = 2.0 if local.low == 2 and local.config.precision != "fp8" else float(local.gradient)
    sums = low if p.reduce_in == "matmul" else float(local.gradient)
    gathered = low * (weights - small) + small
    gather = units * collectives.all_gather(gathered / units, shard)
    scatter = units * collectives.reduce_scatter(sums * weights / units, shard)
    average = units * collectives.all_reduce(local.gradient * weights / units / shard.size, replicate)
    micros = local.micros
    forwards = 1 if p.zero == 2 or p.reshard_after == "step" else micros            # that gather
    beside = scatter + (gather if p.zero == 3 and p.reshard_after == "forward" else 0.0)
    shown = (forwards * exposed(gather, units, forward) + (micros - 1) * exposed(beside, units, backward)
             + exposed(beside + average, units, backward))
    total = forwards * gather + micros * beside + average
    moved = micros * (low + sums) * weights + (local.gradient + low) * weights / shard.size
    return local.seconds([("copy", moved)]) + shown + BESIDE * (total - shown), total - shown


def partial_time(local: RankWorkload, layers: int) -> float:
    """Seconds of the all-reduces that complete partial gradients, after the backward pass.

    Sequence parallelism: the gradients of norms and of row linears' biases. Tensor parallelism: those of heads' norms. Pipelines:
    those of a tied token embedding, which the first and the last stage share.
    """
    m, p = local.m, local.p
    seconds = 0.0
    each = (2 if isinstance(m, DiTConfig) else 6) * m.dim * p.sp + head_norm_weights(local.config)
    if p.tp > 1 and each:
        seconds += collectives.all_reduce(local.gradient * layers * each, local.groups["tp"])
    if p.pp > 1 and isinstance(m, GPTConfig) and m.tied:
        seconds += collectives.all_reduce(local.gradient * m.vocab / p.tp * m.dim, local.groups["ends"])
    return seconds


def exposed(total: float, number: int, beside: float) -> float:
    """Exposed seconds of `number` overlapped collectives: at least the last one, and what exceeds `beside` seconds of work."""
    return max(total / number, total - beside)


def pipeline_time(local: RankWorkload, busiest: float, ranks: list[dict[str, float]]) -> tuple[float, float]:
    """(seconds of exposed messages, seconds of the bubble), besides the busiest rank's work.

    The busiest rank waits while the first micro-batch goes through the other ranks and back: this is the bubble. With
    interleaving it is divided by `chunks` (parallel/pipeline_parallel/schedules.py). `waits` counts the messages.
    """
    p = local.p
    if p.pp == 1:
        return 0.0, 0.0
    whole = sum(parts["forward"] + parts["backward"] for parts in ranks)
    step = collectives.strides(p.order, {"pp": p.pp, "dp": local.dp, "cp": p.cp, "tp": p.tp})["pp"]
    message = collectives.send_along(local.message, step, p.pp, local.kernels.hardware)
    return waits(p.schedule, p.pp, local.micros, p.chunks) * message, (whole - busiest) / p.chunks


def waits(schedule: str, p: int, m: int, v: int) -> float:
    """Number of pipeline messages that lengthen a step with m micro-batches; the others overlap with work.

    p: pipeline ranks, v: chunks. gpipe: the first micro-batch goes to the last rank and back, 2·(p - 1). interleaved: through all
    p·v stages, 2·(p·v - 1). 1f1b: 2·(p - 1)·m / p + 2·(p - 2), and at least gpipe's, since each forward pass waits for the
    backward pass of the micro-batch p earlier. These equal `timeline` in parallel/pipeline_parallel/schedules.py if p divides m.
    Otherwise 1f1b is within 1 of it, and interleaved waits less.
    """
    if v > 1:
        return 2 * (p * v - 1)
    return 2 * (p - 1) if schedule == "gpipe" else max(2 * (p - 1), 2 * (p - 1) * m / p + 2 * (p - 2))


def loading_time(local: RankWorkload) -> float:
    """Seconds in which a node's loaders read the samples of a step. Tokens and latents are too small to count: 0."""
    c, m = local.config, local.m
    if c.data.source == "mock" or not isinstance(m, ViTConfig):
        return 0.0
    each, most = LOADERS[c.data.loader]
    node = local.kernels.hardware.links[0].span or 1
    sharing = min(node, local.dp * local.p.cp * local.p.tp * local.p.pp)
    rate = min(max(1, c.data.workers) * each, min(most, local.kernels.hardware.storage) / sharing)
    return local.micro * local.micros * 2 * 4 * m.channels * math.prod(m.grid) / rate
