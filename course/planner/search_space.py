"""Enumerate the layouts of a model on a number of GPUs, and the variants of each layout.

    asked = SearchRequest(load("gpt-7b"), hardware.load("h100-80"), 64, frozenset(), ("bf16",))
    starts, refused = trainable_layouts(asked)      # one variant of each layout; why other layouts have none
    for config in all_variants(asked, starts[0]): ...

A *layout* here factors the number of GPUs into pp x dp x cp x tp; its *variants* differ in the other `KEYS`. Keys that the user
has fixed keep their values. `validation.refusal` checks a variant. This module predicts no times.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations, product
from typing import Any

from course.config import Config
from course.config.axes import AXES
from course.config.schema import as_text
from course.config.validation import batch_rule, pipeline_rule, refusal, tensor_rule
from course.models import GPTConfig
from course.planner import collectives, parameter_memory, peak_memory, step_time
from course.planner.hardware import Hardware

# keys that the search chooses unless the user fixes them
KEYS = (*(f"parallel.{key}" for key in (*AXES, "order", "sp", "overlap", "context", "schedule", "chunks", "zero", "shard",
                                           "ep", "dispatch", "bucket_mb")),
        "train.micro_batch", "train.recompute", "precision")
# `other_choices` tries all combinations
WAYS = ("parallel.sp", "parallel.overlap", "parallel.context", "parallel.zero", "parallel.shard", "parallel.ep",
        "parallel.dispatch")
RECOMPUTE = ("none", "selective", "full")           # from fastest to smallest
# of a GPU's memory: most measured peaks are within this share of the prediction (tests/planner/test_search.py)
FREE = 0.05
CHUNKS = 64                                         # at most, on a pipeline rank: with so many the bubble is negligible
BUCKET = 4                                          # MiB of gradients in a bucket per rank of dp x cp, across nodes
Choice = dict[str, Any]                             # key -> value


@dataclass(frozen=True)
class SearchRequest:
    """The question of a search: a configuration whose `fixed` keys stay, on `gpus` GPUs of a machine."""

    config: Config
    machine: Hardware                               # with full nodes
    gpus: int
    fixed: frozenset[str]
    precisions: tuple[str, ...]
    free: float = FREE                              # the share of a GPU's memory that stays free
    known: step_time.Known = field(default_factory=dict, init=False, compare=False)      # cached block times

    @cached_property
    def hardware(self) -> Hardware:
        """The machine, with nodes as full as a job of this size makes them (`fill_nodes`)."""
        return fill_nodes(self.machine, self.gpus)

    @property
    def room(self) -> float:
        """Bytes that a layout may use on a GPU."""
        return self.machine.room(self.free)

    @cached_property
    def node(self) -> int:
        """GPUs of a node, which the innermost link joins."""
        return self.hardware.links[0].span or self.gpus

    def values(self, key: str, free: Iterable[Any]) -> list[Any]:
        """The candidates for a key: the user's value if it is fixed, else `free`."""
        return [get_value(self.config, key)] if key in self.fixed else list(free)


def fill_nodes(hardware: Hardware, gpus: int) -> Hardware:
    """Hardware whose nodes hold only the GPUs that a job uses on each: 60 GPUs on nodes of 8 are 10 nodes with 6."""
    node = hardware.links[0].span or gpus
    each = max(count for count in range(1, min(node, gpus) + 1) if gpus % count == 0)
    if gpus <= node or each == node:
        return hardware
    return replace(hardware, links=tuple(replace(link, span=max(1, link.span * each // node)) if link.span else link
                                         for link in hardware.links))


# ---- layouts

def trainable_layouts(asked: SearchRequest) -> tuple[list[Config], dict[str, int]]:
    """(one trainable variant of each layout, {why the library refuses a layout: number of layouts})."""
    taken: list[Config] = []
    refused: dict[str, int] = {}
    for sizes in factors(asked.gpus):
        if any(f"parallel.{axis}" in asked.fixed and getattr(asked.config.parallel, axis) not in (0, size) for axis, size in
               sizes.items()):                      # dp=0 means any
            continue
        for precision in asked.precisions:
            why, start = trainable_variant(asked, sizes, precision)
            if start is not None:
                taken.append(start)
            else:
                refused[why] = refused.get(why, 0) + 1
    return taken, refused


def trainable_variant(asked: SearchRequest, sizes: dict[str, int], precision: str) -> tuple[str, Config | None]:
    """("", a trainable variant of a layout), or (why there is none, None)."""
    base = changed(asked.config, {"precision": precision, **{f"parallel.{axis}": size for axis, size in sizes.items()}})
    if has_idle_ranks(base):
        return "a context-parallel rank would have no token", None
    if sentence := hopeless(base):
        return sentence, None
    base = changed(base, {"parallel.bucket_mb": bucket_of(asked, base)})
    why = ""
    for chunks in schedule_choices(asked, base):
        for others in other_choices(asked, base):
            config = changed(base, {**chunks, **others, "train.micro_batch": micro_batch_sizes(asked, base)[0]})
            if not (sentence := refusal(config) or out_of_reach(asked, config)):
                return "", config
            why = why or sentence
    return why, None


def bucket_of(asked: SearchRequest, config: Config) -> float:
    """parallel.bucket_mb for a layout: across nodes it grows with dp x cp, up to a power of two that holds all gradients of a
    rank.

    A ring takes as many steps as ranks, whatever its bytes. For this reason Megatron-core's buckets hold max(40e6, 1e6 * dp)
    numbers of 4 bytes (megatron/core/distributed/distributed_data_parallel_config.py).
    """
    p = config.parallel
    all_of_it = parameter_memory.wide(config) * max(sum(rank.weights)
                                                    for rank in peak_memory.ranks(config, peak_memory.fullest(config))) / 2**20
    over_nodes = min(BUCKET * p.dp * p.cp, 2 ** math.ceil(math.log2(all_of_it))) if asked.gpus > asked.node else 0
    return asked.values("parallel.bucket_mb", [max(asked.config.parallel.bucket_mb, over_nodes)])[0]


def out_of_reach(asked: SearchRequest, config: Config) -> str:
    """A sentence that says why a layout's tp ranks cannot use symmetric memory, or "" if they can or need not."""
    if not config.parallel.symmetric or tp_shares_node(asked, config):
        return ""
    return (f"parallel.overlap=symmetric joins GPUs of one node, and parallel.tp={config.parallel.tp} with parallel.order="
            f"{config.parallel.order} goes beyond nodes of {asked.node}: use parallel.overlap=nccl there, or another parallel.tp")


def has_idle_ranks(config: Config) -> bool:
    """Whether some cp ranks would have no tokens. The library allows that, but nobody wants it."""
    return config.parallel.cp > config.model.tokens


def hopeless(c: Config) -> str:
    """A sentence that says why every variant of a layout is refused, or ""."""
    return tensor_rule(c) or batch_rule(c) or (pipeline_rule(c) if c.model.depth < c.parallel.pp else "")


def divisors(number: int) -> list[int]:
    """All divisors of a number, increasing."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def factors(gpus: int) -> Iterator[dict[str, int]]:
    """Yield all factorizations of a number of GPUs into pp x dp x cp x tp."""
    for pp in divisors(gpus):
        for cp in divisors(gpus // pp):
            for tp in divisors(gpus // pp // cp):
                yield {"pp": pp, "dp": gpus // pp // cp // tp, "cp": cp, "tp": tp}


# ---- choices within a layout

def schedule_choices(asked: SearchRequest, config: Config) -> list[Choice]:
    """Schedules with their chunks: 1f1b; interleaved, with equally many blocks in all stages or else two chunks; and gpipe, which
    keeps more activations but waits for fewer messages."""
    pp, depth = config.parallel.pp, config.model.depth
    if pp == 1:                                     # a preset may set more chunks
        return [{}] if "parallel.chunks" in asked.fixed else [{"parallel.chunks": 1}]
    even = [v for v in divisors(depth // pp) if 1 < v <= CHUNKS] if depth % pp == 0 else [2] if depth >= 2 * pp else []
    chunks = asked.values("parallel.chunks", [1, *even])
    choices = [{"parallel.schedule": "interleaved" if v > 1 else "1f1b", "parallel.chunks": v} for v in chunks]
    choices += [{"parallel.schedule": "gpipe", "parallel.chunks": 1}] * (1 in chunks)
    if "parallel.schedule" in asked.fixed:
        wanted = asked.config.parallel.schedule
        choices = [{"parallel.schedule": wanted, "parallel.chunks": v} for v in chunks if (v > 1) == (wanted == "interleaved")]
    return choices or [{}]


def micro_batch_sizes(asked: SearchRequest, config: Config) -> list[int]:
    """Micro-batch sizes: the divisors of a rank's samples."""
    share = config.train.global_batch // config.parallel.dp
    return asked.values("train.micro_batch", divisors(share) if share else [1])


def other_choices(asked: SearchRequest, config: Config) -> list[Choice]:
    """All combinations of the `WAYS`, the most promising ones first.

    Symmetric memory requires the tp ranks to share a node. Keys without effect on a layout stay unchanged.
    """
    return [{**way, "parallel.context": context, **sharding, **spread}
            for way, context, sharding, spread in product(tensor_parallel_choices(asked, config), context_choices(asked, config),
                                                      sharding_choices(asked, config), expert_choices(asked, config))]


def sharding_choices(asked: SearchRequest, config: Config) -> list[Choice]:
    """ZeRO stages; stages 2 and 3 over all ranks of dp x cp, or over those of a node with copies on other nodes (hybrid)."""
    p = config.parallel
    ranks = p.dp * p.cp
    if ranks == 1:
        return [{"parallel.zero": p.zero}]
    near = max(count for count in divisors(ranks) if neighbors_share_node(asked, config, count))
    hybrid = [near] if 1 < near < ranks else []
    return [{"parallel.zero": zero, "parallel.shard": shard} for zero in asked.values("parallel.zero", [1, 0, 2, 3])
            for shard in asked.values("parallel.shard", [0, *hybrid] if zero >= 2 else [0])]


def expert_choices(asked: SearchRequest, config: Config) -> list[Choice]:
    """Ranks of dp x cp over which experts are spread, first those of a node, the most first, then beyond it; and how tokens reach
    them, by gather only where cp does not cut samples."""
    p, m = config.parallel, config.model
    if not isinstance(m, GPTConfig) or not m.experts:
        return [{}]
    sizes = [size for size in divisors(p.dp * p.cp) if m.experts % size == 0]
    near = [size for size in sizes if neighbors_share_node(asked, config, size)]
    return [{"parallel.ep": ep, "parallel.dispatch": how} for ep in asked.values("parallel.ep", [*near[::-1], *sizes[len(near):]])
            for how in asked.values("parallel.dispatch", ["all_to_all", "gather"][:2 if ep > 1 == p.cp else 1])]


def tensor_parallel_choices(asked: SearchRequest, config: Config) -> list[Choice]:
    """Sequence parallelism and overlap of the tensor-parallel linears."""
    p = config.parallel
    if p.tp == 1:
        return [{}]
    near = ["symmetric"] if tp_shares_node(asked, config) else []
    return [{"parallel.sp": sp, "parallel.overlap": overlap} for sp in asked.values("parallel.sp", [True, False])
            for overlap in (asked.values("parallel.overlap", ["nccl", *near, "none"]) if sp else [p.overlap])]


def context_choices(asked: SearchRequest, config: Config) -> list[str]:
    """Context-parallel methods."""
    p = config.parallel
    return asked.values("parallel.context", ["all_to_all", "ring", "gather"]) if p.cp > 1 else [p.context]


def tp_shares_node(asked: SearchRequest, config: Config) -> bool:
    """Whether the tp ranks of a layout share a node."""
    return collectives.share_node(((strides(config)["tp"], config.parallel.tp),), asked.hardware, asked.gpus)


def neighbors_share_node(asked: SearchRequest, config: Config, size: int) -> bool:
    """Whether so many neighbors along dp x cp share a node: ranks that share one copy of the parameters, or of the experts."""
    inner = math.gcd(size, config.parallel.cp)
    dims = sorted(((strides(config)["cp"], inner), (strides(config)["dp"], size // inner)))
    return collectives.share_node(tuple(dims), asked.hardware, asked.gpus)


def strides(config: Config) -> dict[str, int]:
    """Axis -> distance between neighboring ranks of a layout."""
    return collectives.strides(config.parallel.order, {axis: getattr(config.parallel, axis) for axis in AXES})


def rank_orders(asked: SearchRequest, config: Config) -> list[str]:
    """Rank orders that place ranks on nodes differently: permutations of the axes with several ranks."""
    p = config.parallel
    now = p.order.split("-")
    if asked.gpus <= asked.node:
        return [p.order]
    long = [axis for axis in now if getattr(p, axis) > 1]
    found_orders = []
    for some in permutations(long):
        names = iter(some)
        found_orders.append("-".join(next(names) if axis in long else axis for axis in now))
    return asked.values("parallel.order", found_orders)


def all_variants(asked: SearchRequest, config: Config) -> Iterator[Config]:
    """Yield all combinations of a layout's choices: in a host-bound step, a single change may not help where several do."""
    for order in rank_orders(asked, config):
        there = changed(config, {"parallel.order": order})
        yield from reachable(asked, (changed(there, {**choice, **chunks, "train.micro_batch": micro}) for choice, chunks, micro
                                     in product(other_choices(asked, there), schedule_choices(asked, there),
                                                micro_batch_sizes(asked, there))))


def reachable(asked: SearchRequest, candidates: Iterable[Config]) -> Iterator[Config]:
    """Leave out candidates that use symmetric memory across nodes."""
    return (one for one in candidates if not out_of_reach(asked, one))


def least_memory_variants(asked: SearchRequest, start: Config) -> Iterator[Config]:
    """Yield the variants of a layout that need the least memory: the smallest micro-batch and the most recomputation; with
    stage 3 of ZeRO also the least recomputation, of the smallest micro-batch and of the largest, which accumulates nothing.

    Of the schedules only 1f1b, if allowed, since it keeps least; of overlaps that need the same memory, only one."""
    again = asked.values("train.recompute", RECOMPUTE)[::-1]
    some = schedule_choices(asked, start)
    some = some[:1] if some[0].get("parallel.schedule") == "1f1b" else some
    choices = other_choices(asked, start)
    some_stages = len({others["parallel.zero"] for others in choices}) > 1
    alike: dict[Any, Choice] = {}
    for others in choices:                                   # the first of those that need the same memory
        if others["parallel.zero"] in (0, 2) and some_stages:           # 1 and 3 need less
            continue
        if others.get("parallel.shard") and "parallel.shard" not in asked.fixed:        # over all ranks needs less
            continue
        alike.setdefault(tuple(value != "none" if key == "parallel.overlap" else value for key, value in others.items()), others)
    sizes = micro_batch_sizes(asked, start)
    for chunks, others in product(some, alike.values()):
        ways = [(sizes[0], tuple(again))]
        if others["parallel.zero"] == 3:
            ways += [(micro, tuple(again[::-1])) for micro in (sizes[0], sizes[-1])]
        for micro, order in dict.fromkeys(ways):             # the same ones where a setting is fixed
            variants = (changed(start, {**chunks, **others, "train.micro_batch": micro, "train.recompute": how}) for how in order)
            config = next((one for one in variants if not refusal(one)), None)
            if config is not None:
                yield config


# ---- configurations

def get_value(config: Config, key: str) -> Any:
    """The value of a dotted key such as parallel.tp."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def changed(config: Config, choices: Choice) -> Config:
    """A configuration with some keys changed, unchecked: `refusal` checks it."""
    sections: dict[str, Choice] = {}
    for key, value in choices.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    own = sections.pop("", {})
    return replace(config, **own, **{name: replace(getattr(config, name), **values) for name, values in sections.items()})


def settings(config: Config, base: Config) -> list[str]:
    """key=value for each of the `KEYS` whose value differs from that in `base`."""
    return [f"{key}={as_text(get_value(config, key))}" for key in KEYS if get_value(config, key) != get_value(base, key)]
