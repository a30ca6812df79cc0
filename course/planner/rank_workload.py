"""Turn a configuration into the workload of one rank: tokens, bytes, linears and process groups.

    local = workload_of(load("gpt-1.3b", ["parallel.tp=2"]), hardware.load("h200"), gpus=2)
    block_linears(local.m)               # of a block (course/models/linears.py); `linear_time` gives the seconds of one

`block_time.py` and `step_time.py` compute everything from a `RankWorkload`.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from course.config import Config, Parallel
from course.config.axes import AXES, check_ep
from course.config.context_choice import context_method
from course.models import DiTConfig, GPTConfig, ModelConfig
from course.models.linears import Linear
from course.ops.number_formats import LOW_PRECISION
from course.ops.packed_attention import is_faster
from course.planner import collectives
from course.planner.collectives import Group
from course.planner.hardware import Hardware
from course.planner.host_overhead import Host, host_of
from course.planner.kernel_efficiency import BYTES, Kernels, kernels_of
from course.planner.parameter_memory import fullest_share, narrow_weights, own_masters, tokens_of
from course.utils.errors import CourseError

Moved = list[tuple[str, float]]                     # (kind of memory-bound kernel, bytes)


@dataclass(frozen=True)
class RankWorkload:
    """The work of one rank, as numbers derived from the configuration."""

    config: Config
    kernels: Kernels
    host: Host
    dp: int                                         # data-parallel ranks
    micro: int                                      # samples per micro-batch on this rank
    micros: int                                     # micro-batches per step
    groups: dict[str, Group]

    @property
    def p(self) -> Parallel:
        """The layout."""
        return self.config.parallel

    @property
    def context(self) -> str:
        """How attention works across cp."""
        return context_method(self.config)

    @property
    def m(self) -> ModelConfig:
        """The model's configuration."""
        return self.config.model

    @property
    def length(self) -> int:
        """Tokens per sample."""
        return self.m.tokens

    @property
    def tokens(self) -> float:
        """Tokens per micro-batch on this rank, inside attention and MLP."""
        return self.micro * tokens_of(self.config)

    @property
    def rest(self) -> float:
        """Tokens per micro-batch on this rank, between attention and MLP: sequence parallelism splits these over tp."""
        return self.micro * math.ceil(tokens_of(self.config) / (self.p.tp if self.p.sp else 1))

    @property
    def mixtures(self) -> float:
        """Share of the blocks that have experts."""
        m = self.m
        return m.depth // m.moe_every / m.depth if isinstance(m, GPTConfig) and m.experts else 0.0

    @property
    def choices(self) -> float:
        """Choices of experts per micro-batch on this rank: top_k for each token."""
        return self.tokens * self.m.top_k if isinstance(self.m, GPTConfig) else 0.0

    @property
    def rows(self) -> float:
        """Rows per micro-batch that the experts of the fullest rank take."""
        return self.choices * fullest_share(self.config)

    @property
    def low(self) -> int:
        """Bytes per number inside attention and MLP."""
        return 2 if self.config.precision in LOW_PRECISION else BYTES[self.config.precision]

    @property
    def stream(self) -> int:
        """Bytes per number of the residual stream. DiT's is always narrow, as the output of the first linear: a step takes
        116.6 ms with stream=wide and 116.1 ms with stream=narrow (results/dit_h200.json)."""
        return self.low if self.config.stream == "narrow" or isinstance(self.m, DiTConfig) else max(4, self.low)

    @property
    def wide(self) -> int:
        """Bytes per number of a norm's input and output."""
        return max(4, self.low)

    @property
    def casts(self) -> bool:
        """Whether autocast casts weights that are not in 16 bits already."""
        return self.low == 2 and not narrow_weights(self.config)

    @property
    def masters(self) -> bool:
        """Whether a single data-parallel rank keeps linears' weights in 16 bits, and with one micro-batch their gradients too."""
        return own_masters(self.config)

    @property
    def gradient(self) -> int:
        """Bytes per number of an averaged gradient."""
        return max(4, self.low)

    @property
    def message(self) -> float:
        """Bytes per micro-batch that a pipeline rank sends to the next one."""
        return self.stream * self.rest * self.m.dim

    @property
    def backend(self) -> str:
        """The attention kernel."""
        chosen = self.config.attention
        if self.packed:
            return "triton"
        return chosen if chosen != "default" else default_backend(self.kernels.hardware)

    @property
    def packed(self) -> bool:
        """Whether attention on a GPU uses the packed Triton kernel (`course/ops/packed_attention.py`), as in `fuse_blocks`."""
        c, m = self.config, self.m
        own = not isinstance(m, GPTConfig) or (m.position == "learned" and m.groups == m.heads and not m.qk_norm)
        return (c.kernels == "triton" and c.attention == "default" and c.precision in LOW_PRECISION and own and c.parallel.cp == 1
                and is_faster(m.head_width, self.length, isinstance(m, GPTConfig)))

    @property
    def bias(self) -> bool:
        """Whether linears have a bias: optional in GPT, always in other models."""
        return self.m.bias if isinstance(self.m, GPTConfig) else True

    def precision_of(self, name: str) -> str:
        """The format of a linear's matmuls."""
        c = self.config
        if c.precision == "fp8":
            module = name.replace("blocks.", "blocks.1.", 1)            # block 1 stands for all blocks
            return "bf16" if c.fp8.keeps(module) else "fp8"
        return c.precision

    def seconds(self, moved: Moved) -> float:
        """Seconds of memory-bound kernels."""
        return sum(self.kernels.memory(kind, size) for kind, size in moved)


def workload_of(config: Config, hardware: Hardware, gpus: int) -> RankWorkload:
    """The workload of one rank. Raises `CourseError` if the layout does not divide GPUs and batch, or for an unknown format."""
    p, t = config.parallel, config.train
    others = p.pp * p.cp * p.tp
    dp = p.dp or max(1, gpus // others)
    if gpus and dp * others != gpus:
        raise CourseError(f"parallel: pp={p.pp} x dp={dp} x cp={p.cp} x tp={p.tp} = {dp * others}, but there are {gpus} GPUs: "
                          f"change an axis, or predict for {dp * others}")
    check_ep(p.ep, dp * p.cp)
    if t.global_batch % dp:
        raise CourseError(f"train.global_batch={t.global_batch} is not divisible by parallel.dp={dp}: choose a multiple of it")
    hardware.peak(config.precision)
    share = t.global_batch // dp
    micro = min(t.micro_batch or share, share)
    kernels = kernels_of(hardware)
    config = replace(config, parallel=replace(p, dp=dp, overlap=overlap_on(replace(p, dp=dp), hardware)))
    return RankWorkload(config, kernels, host_of(hardware), dp, micro, -(-share // micro),
                 collectives.groups(p.order, p.pp, dp, p.cp, p.tp, hardware, kernels.curves, p.shard, p.ep))


def overlap_on(p: Parallel, hardware: Hardware) -> Literal["auto", "none", "nccl", "symmetric"]:
    """parallel.overlap of a layout whose dp is known, with `auto` replaced by what a run takes on this hardware: symmetric memory
    if the tp ranks share a node (`course/parallel/tensor_parallel/overlap_choice.py`)."""
    if p.overlap != "auto" or not p.overlapped:
        return p.overlap
    stride = collectives.strides(p.order, {axis: getattr(p, axis) for axis in AXES})["tp"]
    near = collectives.share_node(((stride, p.tp),), hardware, p.pp * p.dp * p.cp * p.tp)
    return "symmetric" if near else "nccl"


def default_backend(hardware: Hardware) -> str:
    """PyTorch's default attention: cuDNN on Hopper and Blackwell, flash on Ampere, memory-efficient on older GPUs."""
    if "fp8" in hardware.peaks:
        return "cudnn"
    return "flash" if "bf16" in hardware.peaks else "efficient"


def linear_time(local: RankWorkload, linear: Linear, first: bool = False) -> tuple[float, float, float, float]:
    """(seconds of y = x W'; of dx = dy W; of dW = dy' x; of casts) of one linear. first: its input needs no gradient.

    Casts: autocast reads a weight in 4 bytes and writes it in 2, and its gradient the other way; native FP8 writes input, weight
    and gradient in both memory orders, a byte each. Weights in 16 bits need none.
    """
    tp = local.p.tp
    k, n = linear.k // (tp if linear.cut == "row" else 1), linear.n // (tp if linear.cut == "column" else 1)
    rows, precision = linear.rows * local.tokens, local.precision_of(linear.name)
    matmul = local.kernels.matmul
    times = matmul(rows, k, n, precision), 0.0 if first else matmul(rows, n, k, precision), matmul(n, rows, k, precision)
    if precision == "fp8":
        casts = [("cast", rows * k * (local.low + 2)), ("cast", k * n * 6.0), ("cast", rows * n * (local.low + 2))]
    elif local.casts:
        casts = [("elementwise", k * n * 6.0), ("elementwise", k * n * 6.0)]
    else:
        casts = []
    return *times, local.seconds(casts)
