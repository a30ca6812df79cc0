"""What can be varied in how a model is trained on so many GPUs, and which variants of a layout a run takes.

    asked = Search(load("gpt-7b"), hardware.load("h100-80"), 64, frozenset(), ("bf16",))
    starts, refused = possible(asked)    # a variant of each layout; why others have none
    for config in everything(asked, starts[0]): ...

A *layout* here is a way to write the GPUs as pp x dp x cp x tp; its *variants* differ in the other `KEYS`. What the user has
fixed stays. `validation.refusal` says of one variant whether a run takes it; here they are listed, and nothing is predicted.
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
from course.planner import collectives, memory, parameter_memory, step_time
from course.planner.hardware import Hardware

# What the search chooses, where the user has not
KEYS = (*(f"parallel.{key}" for key in (*AXES, "order", "sp", "overlap", "context", "schedule", "chunks", "zero", "bucket_mb")),
        "train.micro_batch", "train.recompute", "precision")
WAYS = ("parallel.sp", "parallel.overlap", "parallel.context", "parallel.zero")         # all combinations: `other_choices`
RECOMPUTE = ("none", "selective", "full")           # from fast to small
# of a GPU's memory: most measured peaks are this near a prediction (tests/planner/test_search.py)
FREE = 0.05
CHUNKS = 64                                         # of a pipeline's rank at most: with as many no bubble is left to speak of
BUCKET = 4                                          # MiB of gradients in a bucket for each rank that shares it, over nodes
Choice = dict[str, Any]                             # key -> value


@dataclass(frozen=True)
class SearchRequest:
    """What is asked: a configuration of which `fixed` keys stay, on so many GPUs."""

    config: Config
    machine: Hardware                               # with whole nodes
    gpus: int
    fixed: frozenset[str]
    precisions: tuple[str, ...]
    free: float = FREE                              # the share of a GPU's memory that stays free
    known: step_time.Known = field(default_factory=dict, init=False, compare=False)      # what is known of blocks

    @cached_property
    def hardware(self) -> Hardware:
        """The machine, of whose nodes a job of so many GPUs may fill a part."""
        return fill_nodes(self.machine, self.gpus)

    @property
    def room(self) -> float:
        """Bytes of a GPU that a layout may take."""
        return self.machine.room(self.free)

    @cached_property
    def node(self) -> int:
        """GPUs that the innermost link joins."""
        return self.hardware.links[0].span or self.gpus

    def values(self, key: str, free: Iterable[Any]) -> list[Any]:
        """What a key may be: what the user says, or any of these."""
        return [get_value(self.config, key)] if key in self.fixed else list(free)


def fill_nodes(hardware: Hardware, gpus: int) -> Hardware:
    """The same, with as many GPUs in a node as a job of so many has on each: 60 on nodes of 8 are 10 nodes with 6."""
    node = hardware.links[0].span or gpus
    each = max(count for count in range(1, min(node, gpus) + 1) if gpus % count == 0)
    if gpus <= node or each == node:
        return hardware
    return replace(hardware, links=tuple(replace(link, span=max(1, link.span * each // node)) if link.span else link
                                         for link in hardware.links))


# ---- layouts

def trainable_layouts(asked: SearchRequest) -> tuple[list[Config], dict[str, int]]:
    """(a variant of each layout that the library takes, why it takes no variant of others, and of how many)."""
    taken: list[Config] = []
    refused: dict[str, int] = {}
    for sizes in factors(asked.gpus):
        if any(f"parallel.{axis}" in asked.fixed and getattr(asked.config.parallel, axis) not in (0, size) for axis, size in
               sizes.items()):                      # dp=0: what the others leave
            continue
        for precision in asked.precisions:
            why, start = trainable_variant(asked, sizes, precision)
            if start is not None:
                taken.append(start)
            else:
                refused[why] = refused.get(why, 0) + 1
    return taken, refused


def trainable_variant(asked: SearchRequest, sizes: dict[str, int], precision: str) -> tuple[str, Config | None]:
    """("", a variant of a layout that a run takes), or (why it takes none, None)."""
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
    """parallel.bucket_mb for the sizes of a layout: over nodes the larger, the more ranks there are of dp x cp, up to a power
    of two that holds all gradients of a rank.

    A ring has as many steps as ranks, whatever the bytes. Megatron-core's buckets have max(40e6, 1e6 * dp) numbers of 4 bytes for
    this reason (megatron/core/distributed/distributed_data_parallel_config.py).
    """
    p = config.parallel
    all_of_it = parameter_memory.wide(config) * max(sum(rank.weights)
                                                    for rank in memory.ranks(config, sorted({0, p.pp - 1}))) / 2**20
    over_nodes = min(BUCKET * p.dp * p.cp, 2 ** math.ceil(math.log2(all_of_it))) if asked.gpus > asked.node else 0
    return asked.values("parallel.bucket_mb", [max(asked.config.parallel.bucket_mb, over_nodes)])[0]


def out_of_reach(asked: SearchRequest, config: Config) -> str:
    """Why symmetric memory, which the user may have asked for, cannot join a layout's tp ranks; "" if it can."""
    if not config.parallel.symmetric or tp_shares_node(asked, config):
        return ""
    return (f"parallel.overlap=symmetric joins GPUs of one node, and parallel.tp={config.parallel.tp} with parallel.order="
            f"{config.parallel.order} goes beyond nodes of {asked.node}: use parallel.overlap=nccl there, or another parallel.tp")


def has_idle_ranks(config: Config) -> bool:
    """Whether some ranks would have nothing to do: the library takes that, and nobody wants it."""
    return config.parallel.cp > config.model.tokens


def hopeless(c: Config) -> str:
    """Why no run takes a layout's sizes, whatever else of it varies; "" if one may."""
    return tensor_rule(c) or batch_rule(c) or (pipeline_rule(c) if c.model.depth < c.parallel.pp else "")


def divisors(number: int) -> list[int]:
    """All of them, increasing."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def factors(gpus: int) -> Iterator[dict[str, int]]:
    """Every way to write a number as pp x dp x cp x tp."""
    for pp in divisors(gpus):
        for cp in divisors(gpus // pp):
            for tp in divisors(gpus // pp // cp):
                yield {"pp": pp, "dp": gpus // pp // cp // tp, "cp": cp, "tp": tp}


# ---- what a layout can vary in

def schedule_choices(asked: SearchRequest, config: Config) -> list[Choice]:
    """Schedules with their chunks: 1f1b; interleaved with so many that all stages have equally many blocks, or else with two;
    gpipe, which keeps more, but waits for fewer messages."""
    pp, depth = config.parallel.pp, config.model.depth
    if pp == 1:                                     # a preset may have more
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
    """Micro-batches: the divisors of a rank's samples."""
    share = config.train.global_batch // config.parallel.dp
    return asked.values("train.micro_batch", divisors(share) if share else [1])


def other_choices(asked: SearchRequest, config: Config) -> list[Choice]:
    """What else a layout can vary in, but its rank order: all combinations, the ones likely to be the best first.

    Symmetric memory is for tp ranks of one node. Keys that mean nothing to a layout stay as they are.
    """
    p = config.parallel
    zeros = asked.values("parallel.zero", [1, 0]) if p.dp * p.cp > 1 else [p.zero]
    return [{**way, "parallel.context": context, "parallel.zero": zero}
            for way, context, zero in product(tensor_parallel_choices(asked, config), context_choices(asked, config), zeros)]


def tensor_parallel_choices(asked: SearchRequest, config: Config) -> list[Choice]:
    """Ways in which tp's linears communicate."""
    p = config.parallel
    if p.tp == 1:
        return [{}]
    near = ["symmetric"] if tp_shares_node(asked, config) else []
    return [{"parallel.sp": sp, "parallel.overlap": overlap} for sp in asked.values("parallel.sp", [True, False])
            for overlap in (asked.values("parallel.overlap", ["nccl", *near, "none"]) if sp else [p.overlap])]


def context_choices(asked: SearchRequest, config: Config) -> list[str]:
    """Ways to attend over cp ranks."""
    p = config.parallel
    return asked.values("parallel.context", ["all_to_all", "ring", "gather"]) if p.cp > 1 else [p.context]


def tp_shares_node(asked: SearchRequest, config: Config) -> bool:
    """Whether a layout's tp ranks share a node."""
    stride = collectives.strides(config.parallel.order, {axis: getattr(config.parallel, axis) for axis in AXES})["tp"]
    return collectives.share_node(((stride, config.parallel.tp),), asked.hardware, asked.gpus)


def rank_orders(asked: SearchRequest, config: Config) -> list[str]:
    """Rank orders that differ in which ranks share a node: permutations of the axes that have several ranks."""
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
    """All that a layout can vary in, together: where the host is the limit, no single change may make a step faster."""
    for order in rank_orders(asked, config):
        there = changed(config, {"parallel.order": order})
        yield from reachable(asked, (changed(there, {**choice, **chunks, "train.micro_batch": micro}) for choice, chunks, micro
                                     in product(other_choices(asked, there), schedule_choices(asked, there),
                                                micro_batch_sizes(asked, there))))


def reachable(asked: SearchRequest, candidates: Iterable[Config]) -> Iterator[Config]:
    """Those whose linears, where they go by symmetric memory, find it in their own node."""
    return (one for one in candidates if not out_of_reach(asked, one))


def least_memory_variants(asked: SearchRequest, start: Config) -> Iterator[Config]:
    """Variants of a layout that need little memory: a sample at a time, as much computed again as can be. Of schedules 1f1b, if
    it may be, than which none keeps less; of overlaps one, which all need the same."""
    again = asked.values("train.recompute", RECOMPUTE)[::-1]
    some = schedule_choices(asked, start)
    some = some[:1] if some[0].get("parallel.schedule") == "1f1b" else some
    alike: dict[Any, Choice] = {}
    for others in other_choices(asked, start):               # of those that need the same the first counts
        alike.setdefault(tuple(value != "none" if key == "parallel.overlap" else value for key, value in others.items()), others)
    micro = micro_batch_sizes(asked, start)[0]
    for chunks, others in product(some, alike.values()):
        variants = (changed(start, {**chunks, **others, "train.micro_batch": micro, "train.recompute": how}) for how in again)
        config = next((one for one in variants if not refusal(one)), None)
        if config is not None:
            yield config


# ---- configurations

def get_value(config: Config, key: str) -> Any:
    """The value of a key such as parallel.tp."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def changed(config: Config, choices: Choice) -> Config:
    """A configuration with other values of some keys. Nothing is checked: `refusal` does so."""
    sections: dict[str, Choice] = {}
    for key, value in choices.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    own = sections.pop("", {})
    return replace(config, **own, **{name: replace(getattr(config, name), **values) for name, values in sections.items()})


def settings(config: Config, base: Config) -> list[str]:
    """key=value of all that the search chose and that differs from a configuration."""
    return [f"{key}={as_text(get_value(config, key))}" for key in KEYS if get_value(config, key) != get_value(base, key)]
