"""What the host needs for a training step: Python, autograd, torch.compile's guards, launches. The GPU may wait for it.

It is not computed but measured, by `course bench host` (bench/host_overhead_table.py): steps of models so small that nothing else
counts, with few and many blocks, one and several micro-batches. A `Cost` is what fits them best. Each row of a table is such a
cost, of a kind of model in a setting; what a configuration adds to its model's row is taken to be what the same setting added
where it was measured.

Hosts differ: two machines of one make by 1.6, and the same one from second to second by a fifth. So costs are in units of a small
step of plain PyTorch, which is measured beside them: they hold for any host, and the unit tells how fast it is.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from course.config import Config
from course.config.validation import attention_leaves_graph
from course.models import GPTConfig, family_of
from course.planner.hardware import RESULTS, Hardware, table_file
from course.planner.parameter_memory import uneven
from course.utils.errors import CourseError

REFERENCE = "host_h200.json"                         # whose host stands for those that were not measured
PLAIN = ("none",)
RECOMPUTE = (*PLAIN, "selective", "full")


@dataclass(frozen=True)
class Cost:
    """What the host does: once a step, for a micro-batch with no block, for a block of a micro-batch, for each bucket of
    gradients but the first."""

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
        """Of a step of so many blocks, micro-batches and buckets of gradients on a rank."""
        return self.step + micros * (self.micro + blocks * self.block) + (buckets - 1) * self.bucket


@dataclass(frozen=True)
class Setting:
    """What is measured beside a model's plain rows: on which kind of model, how it is set, with which recomputations uncompiled,
    and with which compiled, if at all."""

    kind: str
    overrides: tuple[str, ...]
    eager: tuple[str, ...] = PLAIN
    compiled: tuple[str, ...] = ()
    gpus: int = 1


SETTINGS = {
    "fp8": Setting("vit", ("precision=fp8",), RECOMPUTE, RECOMPUTE),
    "tf32": Setting("vit", ("precision=tf32",)),
    "rotary": Setting("gpt", ("model.position=rotary",)),
    "swiglu": Setting("gpt", ("model.mlp=swiglu",)),
    "rms": Setting("gpt", ("model.norm=rms",)),
    "dp": Setting("gpt", ("parallel.dp=2",), gpus=2),
    "zero": Setting("gpt", ("parallel.dp=2", "parallel.zero=1"), gpus=2),
    "pp": Setting("gpt", ("parallel.pp=2", "parallel.schedule=1f1b"), gpus=2),
    "tp": Setting("gpt", ("parallel.tp=2", "parallel.sp=false"), compiled=PLAIN, gpus=2),
    "sp": Setting("gpt", ("parallel.tp=2", "parallel.sp=true", "parallel.overlap=none"), gpus=2),
    "nccl": Setting("gpt", ("parallel.tp=2", "parallel.sp=true", "parallel.overlap=nccl"), ("none", "full"), PLAIN, 2),
    "symmetric": Setting("gpt", ("parallel.tp=2", "parallel.sp=true", "parallel.overlap=symmetric"), compiled=PLAIN, gpus=2),
    "ring": Setting("gpt", ("parallel.cp=2", "parallel.context=ring"), compiled=PLAIN, gpus=2),
    "gather": Setting("vit", ("parallel.cp=2", "parallel.context=gather"), compiled=PLAIN, gpus=2),
    "causal gather": Setting("gpt", ("parallel.cp=2", "parallel.context=gather"), compiled=PLAIN, gpus=2),
    "all_to_all": Setting("gpt", ("parallel.cp=2", "parallel.context=all_to_all"), compiled=PLAIN, gpus=2)}
STEP = ("dp", "zero", "pp")                          # are the same whatever runs the blocks
FUSED = ("tf32", "rotary", "swiglu", "rms")          # are nothing more to launch for compiled blocks
# where a setting was not measured with recomputation: its forward pass is half of what it adds, and is done again, or partly
AGAIN = {"none": 1.0, "selective": 1.25, "full": 1.5}


def row_name(kind: str, setting: str, compiled: bool, recompute: str) -> str:
    """What a row of the table is called: "gpt", "vit, fp8, compiled, full"."""
    return ", ".join(word for word in (kind, setting, "compiled" * compiled, recompute * (recompute != "none")) if word)


@dataclass(frozen=True)
class Host:
    """A measured host: what steps cost, by `row_name`, in steps of `host_overhead_table.plain_step`; and the seconds of such a
    step."""

    rows: Mapping[str, Cost]
    plain_step: float

    def seconds(self, config: Config, dp: int, blocks: int, micros: int, buckets: int = 1) -> float:
        """Seconds of a step on a rank with so many blocks, micro-batches and buckets of gradients; dp: its data parallel ranks.
        A graph needs none."""
        if config.graphs:
            return 0.0
        compiled, recompute = config.compile, config.train.recompute
        cost = self.rows[row_name(family_of(config.model), "", compiled, recompute)]
        for name, times in added(config, dp):
            cost = cost + self.beyond(name, compiled, recompute) * times
        return max(0.0, self.plain_step * cost.of(blocks, micros, buckets))

    def beyond(self, name: str, compiled: bool, recompute: str) -> Cost:
        """What a setting adds to a step; where it was not measured compiled or with this recomputation, what it adds without."""
        if compiled and name in FUSED:
            return Cost()
        kind = SETTINGS[name].kind
        ways = [(compiled, recompute), (compiled, "none"), (False, recompute), (False, "none")]
        fast, how = next((fast, how) for fast, how in ways if row_name(kind, name, fast, how) in self.rows)
        more = self.rows[row_name(kind, name, fast, how)] - self.rows[row_name(kind, "", fast, how)]
        return more if how == recompute or name in STEP else more * AGAIN[recompute]


def added(config: Config, dp: int) -> Iterator[tuple[str, float]]:
    """The settings of a configuration beyond its model's plain row, and how many times each counts.

    Context parallel rows have averaged gradients, too, as "dp" has; a ring has cp - 1 rounds where it was measured with one, and
    symmetric memory a copy for each of tp ranks. Interleaved, a micro-batch is sent on for every chunk.
    """
    m, p = config.model, config.parallel
    if config.precision in ("fp8", "tf32"):
        yield config.precision, 1.0
    if isinstance(m, GPTConfig):
        yield from ((name, 1.0) for name in (m.position, m.mlp, m.norm) if name in SETTINGS)
    if dp * p.cp > 1:
        yield "dp", 1.0
        if p.zero:
            yield "zero", 1.0
            yield "dp", -1.0
    if p.tp > 1:
        direct = p.symmetric and not uneven(config)
        way = "symmetric" if direct else "sp" if p.overlap == "none" else "nccl"
        yield way if p.sp else "tp", p.tp / 2 if direct else 1.0
    if p.cp > 1:
        times = p.cp - 1 if p.context == "ring" else 1.0
        yield "causal gather" if attention_leaves_graph(config) else p.context, times
        yield "dp", -times
    if p.pp > 1:
        yield "pp", float(p.chunks)


@cache
def host_of(hardware: Hardware) -> Host:
    """The host of some hardware: as measured on it, or else like the H200's."""
    reference = read(RESULTS / REFERENCE)
    if not hardware.host:
        return reference
    own = read(table_file(hardware, hardware.host, "host"))
    return Host({**reference.rows, **own.rows}, own.plain_step)          # one GPU measures no layouts


def source(hardware: Hardware) -> str:
    """Where `host_of` has its costs from, in words."""
    return f"a host measured there ({hardware.host})" if hardware.host else f"a host like the H200s' ({REFERENCE})"


def read(path: Path) -> Host:
    """A table of `course bench host`; rows that could not be measured are left out."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        rows = {str(name): Cost(*map(float, cost)) for name, cost in table["host"].items() if isinstance(cost, list)}
        plain_step = float(table["plain_step"])
        if not 0 < plain_step < math.inf or not all(math.isfinite(cost.of(1, 1, 2)) for cost in rows.values()):
            raise ValueError("a plain step takes more than 0, and every cost is a number")
        return Host(rows, plain_step)
    except Exception as error:                       # whatever a damaged or foreign file makes of it
        raise CourseError(f"{path} is no table of the host ({type(error).__name__}: {error}): make one with `course bench host "
                          "--out FILE`") from error
