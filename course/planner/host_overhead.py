"""Predict the host time of a training step: Python, autograd, torch.compile's guards, kernel launches. The GPU may wait for it.

`course bench host` (bench/host_overhead_table.py) measures it, on models so small that the GPU waits for the host: with few and
many blocks, one and several micro-batches. A `Cost` is the best fit. Each row of the table is the cost of a kind of model in a
setting. A configuration's cost is its model's row plus what its settings added where they were measured.

Hosts differ: two machines of one model by a factor of 1.6, and one machine over time by 20%. So costs are in units of a small
plain PyTorch step, measured at the same time. Costs then hold for any host, and the unit says how fast it is.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from course.config import Config
from course.config.context_choice import attention_leaves_graph, context_method
from course.models import GPTConfig, family_of
from course.planner.hardware import RESULTS, Hardware, table_file
from course.planner.parameter_memory import uneven
from course.utils.errors import CourseError

REFERENCE = "host_h200.json"                         # stands for hosts without a table
PLAIN = ("none",)
RECOMPUTE = (*PLAIN, "selective", "full")


@dataclass(frozen=True)
class Cost:
    """Host cost per step, per micro-batch without blocks, per block and micro-batch, and per gradient bucket after the first."""

    step: float = 0.0
    micro: float = 0.0
    block: float = 0.0
    bucket: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.step + other.step, self.micro + other.micro, self.block + other.block, self.bucket + other.bucket)

    def __sub__(self, other: "Cost") -> "Cost":
        return self + other * -1.0

    def __mul__(self, times: float) -> "Cost":
        return Cost(times * self.step, times * self.micro, times * self.block, times * self.bucket)

    def of(self, blocks: int, micros: int, buckets: int = 1) -> float:
        """The cost of a step with so many blocks, micro-batches and gradient buckets on a rank."""
        return self.step + micros * (self.micro + blocks * self.block) + (buckets - 1) * self.bucket


@dataclass(frozen=True)
class Setting:
    """A measured setting: kind of model, overrides, and the values of train.recompute measured in eager and compiled mode.

    beside: other settings that its overrides contain, whose costs are not its own."""

    kind: str
    overrides: tuple[str, ...]
    eager: tuple[str, ...] = PLAIN
    compiled: tuple[str, ...] = ()
    gpus: int = 1
    beside: tuple[str, ...] = ()


EXPERTS = ("model.experts=4", "model.top_k=2", "model.moe_every=1")
SETTINGS = {
    "fp8": Setting("vit", ("precision=fp8",), RECOMPUTE, RECOMPUTE),
    "tf32": Setting("vit", ("precision=tf32",)),
    "rotary": Setting("gpt", ("model.position=rotary",)),
    "swiglu": Setting("gpt", ("model.mlp=swiglu",)),
    "rms": Setting("gpt", ("model.norm=rms",)),
    "qk_norm": Setting("gpt", ("model.qk_norm=true",)),
    "experts": Setting("gpt", EXPERTS, RECOMPUTE, PLAIN),
    "shared experts": Setting("gpt", (*EXPERTS, "model.shared_experts=1"), compiled=PLAIN, beside=("experts",)),
    "dp": Setting("gpt", ("parallel.dp=2",), gpus=2),
    "zero 1": Setting("gpt", ("parallel.dp=2", "parallel.zero=1"), gpus=2),
    "zero 2": Setting("gpt", ("parallel.dp=2", "parallel.zero=2"), compiled=PLAIN, gpus=2),
    "zero 3": Setting("gpt", ("parallel.dp=2", "parallel.zero=3"), ("none", "full"), PLAIN, 2),
    "zero 3 in fp8": Setting("gpt", ("parallel.dp=2", "parallel.zero=3", "precision=fp8"), compiled=PLAIN, gpus=2),
    "ep": Setting("gpt", (*EXPERTS, "parallel.dp=2", "parallel.ep=2"), PLAIN, PLAIN, 2, ("experts", "dp")),
    "pp": Setting("gpt", ("parallel.pp=2", "parallel.schedule=1f1b"), gpus=2),
    "tp": Setting("gpt", ("parallel.tp=2", "parallel.sp=false"), compiled=PLAIN, gpus=2),
    "sp": Setting("gpt", ("parallel.tp=2", "parallel.sp=true", "parallel.overlap=none"), gpus=2),
    "nccl": Setting("gpt", ("parallel.tp=2", "parallel.sp=true", "parallel.overlap=nccl"), ("none", "full"), PLAIN, 2),
    "symmetric": Setting("gpt", ("parallel.tp=2", "parallel.sp=true", "parallel.overlap=symmetric"), compiled=PLAIN, gpus=2),
    "ring": Setting("gpt", ("parallel.cp=2", "parallel.context=ring"), compiled=PLAIN, gpus=2),
    "gather": Setting("vit", ("parallel.cp=2", "parallel.context=gather"), compiled=PLAIN, gpus=2),
    "causal gather": Setting("gpt", ("parallel.cp=2", "parallel.context=gather"), compiled=PLAIN, gpus=2),
    "all_to_all": Setting("gpt", ("parallel.cp=2", "parallel.context=all_to_all"), compiled=PLAIN, gpus=2)}
STEP = ("dp", "zero 1", "pp")                          # cost the same for eager and compiled blocks
OUTSIDE = ("experts", "shared experts", "ep")           # run outside the compiled code
FUSED = ("tf32", "rotary", "swiglu", "rms", "qk_norm")          # add no launches to compiled blocks
# factors for a setting not measured with recomputation: half its cost is the forward pass, which runs again fully or in part
AGAIN = {"none": 1.0, "selective": 1.25, "full": 1.5}


def row_name(kind: str, setting: str, compiled: bool, recompute: str) -> str:
    """The name of a row of the table, such as "gpt" or "vit, fp8, compiled, full"."""
    return ", ".join(word for word in (kind, setting, "compiled" * compiled, recompute * (recompute != "none")) if word)


@dataclass(frozen=True, eq=False)                  # compared by identity, so that `beyond` can be cached
class Host:
    """A measured host. rows: `row_name` -> cost in plain steps; plain_step: seconds of `host_overhead_table.plain_step`."""

    rows: Mapping[str, Cost]
    plain_step: float

    def seconds(self, config: Config, dp: int, blocks: int, micros: int, buckets: int = 1) -> float:
        """Host seconds of a step on a rank with so many blocks, micro-batches and gradient buckets; 0 for a CUDA graph.

        dp: the number of data-parallel ranks."""
        if config.graphs:
            return 0.0
        compiled, recompute = config.compile, config.train.recompute
        cost = self.rows[row_name(family_of(config.model), "", compiled, recompute)]
        for name, times in added(config, dp):
            cost = cost + beyond(self, name, compiled, recompute) * times
        return max(0.0, self.plain_step * cost.of(blocks, micros, buckets))


@cache
def beyond(host: Host, name: str, compiled: bool, recompute: str) -> Cost:
    """What a setting adds to a step. If not measured compiled or with this recomputation: what it adds without."""
    if compiled and name in FUSED:
        return Cost()
    kind = SETTINGS[name].kind
    ways = [(compiled, recompute), (compiled, "none"), (False, recompute), (False, "none")]
    if name in OUTSIDE:
        ways[1], ways[2] = ways[2], ways[1]
    fast, how = next((fast, how) for fast, how in ways if row_name(kind, name, fast, how) in host.rows)
    more = host.rows[row_name(kind, name, fast, how)] - host.rows[row_name(kind, "", fast, how)]
    for other in SETTINGS[name].beside:
        more = more - beyond(host, other, fast, how)
    return more if how == recompute or name in STEP else more * AGAIN[recompute]


def added(config: Config, dp: int) -> Iterator[tuple[str, float]]:
    """Yield (setting, factor) for the settings that a configuration adds to its model's plain row.

    Context-parallel rows include gradient averaging, as "dp" does, so it is subtracted. A ring has cp - 1 rounds and was measured
    with one. Symmetric memory makes one copy per tp rank. The interleaved schedule sends a micro-batch once per chunk.
    """
    m, p = config.model, config.parallel
    narrow = p.zero == 3 and config.precision == "fp8" and dp * p.cp > 1               # weights are gathered in 8 bits
    if config.precision in ("fp8", "tf32") and not narrow:
        yield config.precision, 1.0
    if isinstance(m, GPTConfig):
        yield from ((name, 1.0) for name in (m.position, m.mlp, m.norm) if name in SETTINGS)
        if m.qk_norm:
            yield "qk_norm", 1.0
        if m.experts:
            share = m.depth // m.moe_every / m.depth
            yield "experts", share
            yield "shared experts", share * (m.shared_experts > 0)
            yield "ep", share * (p.ep > 1)
    if dp * p.cp > 1:
        yield "zero 3 in fp8" if narrow else f"zero {int(p.zero)}" if p.zero else "dp", 1.0
    if p.tp > 1:
        direct = p.symmetric and not uneven(config)
        way = "symmetric" if direct else "sp" if p.overlap == "none" else "nccl"
        yield way if p.sp else "tp", p.tp / 2 if direct else 1.0
    if p.cp > 1:
        how = context_method(config)
        times = p.cp - 1 if how == "ring" else 1.0
        yield "causal gather" if attention_leaves_graph(config) else how, times
        yield "dp", -times
    if p.pp > 1:
        yield "pp", float(p.chunks)


@cache
def host_of(hardware: Hardware) -> Host:
    """The host of some hardware: its own table, or the H200's."""
    reference = read(RESULTS / REFERENCE)
    if not hardware.host:
        return reference
    own = read(table_file(hardware, hardware.host, "host"))
    return Host({**reference.rows, **own.rows}, own.plain_step)          # a table from one GPU has no parallel rows


def source(hardware: Hardware) -> str:
    """Describe the source of `host_of`."""
    return f"a host measured there ({hardware.host})" if hardware.host else f"a host like the H200s' ({REFERENCE})"


def read(path: Path) -> Host:
    """Read a table of `course bench host`, without the rows that failed. Raises `CourseError` if it is something else."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        rows = {str(name): Cost(*map(float, cost)) for name, cost in table["host"].items() if isinstance(cost, list)}
        plain_step = float(table["plain_step"])
        if not 0 < plain_step < math.inf or not all(math.isfinite(cost.of(1, 1, 2)) for cost in rows.values()):
            raise ValueError("a plain step takes more than 0, and every cost is a number")
        return Host(rows, plain_step)
    except Exception as error:                       # a damaged or foreign file may raise anything
        raise CourseError(f"{path} is no table of the host ({type(error).__name__}: {error}): make one with `course bench host "
                          "--out FILE`") from error
