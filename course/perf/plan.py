"""Which layout of a model on so many GPUs is the fastest that fits: predicted, not tried.

    plan = search(load("gpt-7b"), hardware.load("h100-80"), 64)
    plan.layouts[0].config               # ready to be trained; `.time` and `.memory` say what to expect
    plan.misfits                         # why others do not fit

A *layout* here is a way to write the GPUs as pp x dp x cp x tp. Each has many variants (`KEYS`), which are near one another; of
each layout the fastest variant stands in the list. `steptime.predict` gives its time, `memory.predict` its memory. What fits
leaves a share of the GPU's memory free (`FREE`): a run that is slower by a percent goes on, one without memory ends.

What is searched. All layouts, and of each all micro-batches (divisors of a rank's samples) with all schedules and numbers of
chunks, each with the least recomputation that fits, which is the fastest: exhaustively. Then, of the most promising layouts, what
is left: for few GPUs (`FEW`) all of it together, for more greedily: sequence parallelism and its overlap, context method and
ZeRO-1, then the rank order, then micro-batches with that overlap again, as long as something gets faster. A layout that does not
fit is looked at in all variants of one sample and full recomputation before it is given up. A variant takes a simpler one's place
if it is faster by more than predictions can tell (`MARGIN`). Of more layouts than `MANY` those whose blocks alone take longer
(`promise`) than the steps of the `REFINED` fastest are left out, and counted. The tests compare with all variants of all layouts.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import cycle, permutations, product
from typing import Any

from course.config import Config
from course.errors import CourseError
from course.models import GPTConfig
from course.perf import comms, memory, steptime
from course.perf import hardware as hardware_presets
from course.perf.hardware import Hardware
from course.perf.layouts import AXES, divisors, factors, hopeless, refusal, unable
from course.perf.local import local_of
from course.perf.memory import Memory
from course.perf.steptime import Time

# What the search chooses, where the user has not
KEYS = (*(f"parallel.{key}" for key in (*AXES, "order", "sp", "overlap", "context", "schedule", "chunks", "zero", "bucket_mb")),
        "train.micro_batch", "train.recompute", "precision")
WAYS = ("parallel.sp", "parallel.overlap", "parallel.context", "parallel.zero")         # of which `rest` has all combinations
RECOMPUTE = ("none", "selective", "full")           # from fast to small
FEW = 8                                             # GPUs of which all that a layout can vary in is tried together
MARGIN = 0.005                                      # of the time: no prediction is better than that
FREE = 0.05                                         # of a GPU's memory: most peaks that were measured are this near (`PEAKS`)
PEAKS = (144, 127)                                  # whose memory was measured here, and of them within 5% of what is predicted
BUCKET = 4                                          # MiB of gradients in a bucket for each rank that shares it, over nodes
REFINED = 32                                        # layouts, the most promising ones, of which all that is greedy is searched
MANY = 256                                          # layouts, of more than which those that cannot be among these are left out
SLACK = 0.8                                         # of a sample's time in the largest micro-batch: in no smaller one it is less
Choice = dict[str, Any]                             # key -> value


@dataclass(frozen=True)
class Layout:
    """A configuration and what is predicted of it."""

    config: Config
    memory: Memory
    time: Time

    @property
    def sizes(self) -> dict[str, int]:
        """pp, dp, cp and tp."""
        return {axis: getattr(self.config.parallel, axis) for axis in AXES}


@dataclass(frozen=True)
class Misfit:
    """Layouts that do not fit, by their tightest variant."""

    sizes: dict[str, int]                           # pp, dp, cp and tp
    needs: int                                      # bytes
    term: str                                       # the largest part of them
    bytes: int                                      # that part
    cure: str                                       # what would make it fit, "" if the search has tried all that there is


@dataclass(frozen=True)
class Plan:
    """The answer of a search."""

    config: Config                                  # what was asked
    hardware: Hardware                              # its nodes as `seated` fills them
    gpus: int
    free: float                                     # the share of a GPU's memory that layouts leave
    layouts: tuple[Layout, ...]                     # that fit, the fastest first
    misfits: tuple[Misfit, ...]                     # that do not, the one that comes nearest first
    refused: dict[str, int]                         # why the library would not take others, and how many
    slower: int = 0                                 # of many layouts those too slow for the list, fit or not
    fixed: frozenset[str] = frozenset()             # keys that were not to be chosen
    precisions: tuple[str, ...] = ()                # formats that were
    machine: Hardware | None = None                 # with whole nodes, where `hardware` has them filled in part

    @property
    def whole(self) -> Hardware:
        """The hardware with whole nodes."""
        return self.machine or self.hardware

    @property
    def room(self) -> float:
        """Bytes of a GPU that a layout may take."""
        return self.hardware.room(self.free)


@dataclass(frozen=True)
class Search:
    """What is asked: a configuration of which `fixed` keys stay, on so many GPUs."""

    config: Config
    hardware: Hardware
    gpus: int
    fixed: frozenset[str]
    precisions: tuple[str, ...]
    free: float = FREE                              # the share of a GPU's memory that stays free
    known: steptime.Known = field(default_factory=dict, init=False, compare=False)      # what is known of blocks

    @property
    def room(self) -> float:
        """Bytes of a GPU that a layout may take."""
        return self.hardware.room(self.free)

    @cached_property
    def node(self) -> int:
        """GPUs that the innermost link joins."""
        return self.hardware.links[0].span or self.gpus

    def values(self, key: str, free: Iterable[Any]) -> list[Any]:
        """What a key may be: what the user says, or any of these."""
        return [get(self.config, key)] if key in self.fixed else list(free)


def search(config: Config, hardware: Hardware, gpus: int, fixed: Iterable[str] = (), precisions: Iterable[str] = (),
           free: float = FREE) -> Plan:
    """The layouts of a model on so many GPUs that fit their memory, the fastest first, and why others do not.

    fixed: keys whose values in `config` stay, such as "parallel.tp"; those of `KEYS` that it does not name are chosen here.
    precisions: formats to choose among, instead of the configuration's. free: the share of a GPU's memory that a layout leaves.
    Raises `CourseError` with what would do instead, if no layout divides what it has to, or none fits.
    """
    if gpus < 1:
        raise CourseError(f"--gpus {gpus}: a model needs one GPU at least")
    if not 0 <= free < 1:
        raise CourseError(f"--free {free:g}: a share of the memory is at least 0 and less than 1, such as {FREE}")
    for precision in precisions or [config.precision]:
        hardware.peak(precision)
        if sentence := unable(changed(config, {"precision": precision}), hardware):
            raise CourseError(sentence)
    whole, hardware = hardware, seated(hardware, gpus)
    asked = Search(config, hardware, gpus, frozenset(fixed), tuple(precisions) or (config.precision,), free)
    starts, refused = possible(asked)
    if not starts:
        raise CourseError(why_none(asked, refused))
    looked = firsts(asked, starts, REFINED if len(starts) > MANY else 0)
    found = sorted((one for one in looked if isinstance(one, Layout)), key=lambda layout: layout.time.step)
    misfits = sorted((one for one in looked if isinstance(one, Misfit)), key=lambda one: one.needs)
    if not found:
        raise CourseError(nowhere(replace(asked, hardware=whole), misfits))
    found = [refined(asked, layout) for layout in found[:REFINED]] + found[REFINED:]
    found.sort(key=lambda layout: layout.time.step)
    return Plan(config, hardware, gpus, free, tuple(found), tuple(misfits), refused, looked.count(None),
                asked.fixed, asked.precisions, whole)


def seated(hardware: Hardware, gpus: int) -> Hardware:
    """The same, with as many GPUs in a node as a job of so many has on each: 60 on nodes of 8 are 10 nodes with 6."""
    node = hardware.links[0].span or gpus
    each = max(count for count in range(1, min(node, gpus) + 1) if gpus % count == 0)
    if gpus <= node or each == node:
        return hardware
    return replace(hardware, links=tuple(replace(link, span=max(1, link.span * each // node)) if link.span else link
                                         for link in hardware.links))


# ---- variants

def possible(asked: Search) -> tuple[list[Config], dict[str, int]]:
    """(a variant of each layout that the library takes, why it takes no variant of others, and of how many)."""
    taken: list[Config] = []
    refused: dict[str, int] = {}
    for sizes in factors(asked.gpus):
        if any(f"parallel.{axis}" in asked.fixed and getattr(asked.config.parallel, axis) not in (0, size) for axis, size in
               sizes.items()):                      # dp=0: what the others leave
            continue
        for precision in asked.precisions:
            why, start = start_of(asked, sizes, precision)
            if start is not None:
                taken.append(start)
            else:
                refused[why] = refused.get(why, 0) + 1
    return taken, refused


def start_of(asked: Search, sizes: dict[str, int], precision: str) -> tuple[str, Config | None]:
    """("", a variant of a layout that a run takes), or (why it takes none, None)."""
    base = changed(asked.config, {"precision": precision, "parallel.bucket_mb": bucket_of(asked, sizes["dp"] * sizes["cp"]),
                                  **{f"parallel.{axis}": size for axis, size in sizes.items()}})
    if too_thin(base):
        return "a context-parallel rank would have no token", None
    if sentence := hopeless(base):
        return sentence, None
    why = ""
    for chunks in schedules(asked, base):
        for others in rest(asked, base):
            config = changed(base, {**chunks, **others, "train.micro_batch": micros(asked, base)[0]})
            if not (sentence := refusal(config) or out_of_reach(asked, config)):
                return "", config
            why = why or sentence
    return why, None


def bucket_of(asked: Search, ranks: int) -> float:
    """parallel.bucket_mb for so many ranks of dp x cp: over nodes the larger, the more there are.

    A ring has as many steps as ranks, whatever the bytes. Megatron-core's buckets have max(40e6, 1e6 * dp) numbers of 4 bytes for
    this reason (megatron/core/distributed/distributed_data_parallel_config.py).
    """
    usual = asked.config.parallel.bucket_mb
    return asked.values("parallel.bucket_mb", [max(usual, BUCKET * ranks) if asked.gpus > asked.node else usual])[0]


def out_of_reach(asked: Search, config: Config) -> str:
    """Why symmetric memory, which the user may have asked for, cannot join a layout's tp ranks; "" if it can."""
    if not config.parallel.symmetric or together(asked, config):
        return ""
    return (f"parallel.overlap=symmetric joins GPUs of one node, and parallel.tp={config.parallel.tp} with parallel.order="
            f"{config.parallel.order} goes beyond nodes of {asked.node}: use parallel.overlap=nccl there, or another parallel.tp")


def too_thin(config: Config) -> bool:
    """Whether some ranks would have nothing to do: the library takes that, and nobody wants it."""
    m, p = config.model, config.parallel
    tokens = m.context if isinstance(m, GPTConfig) else m.tokens
    return p.cp > tokens


def schedules(asked: Search, config: Config) -> list[Choice]:
    """Schedules with their chunks: 1f1b; interleaved with so many that all stages have equally many blocks, or else with two;
    gpipe, which keeps more, but waits for fewer messages."""
    pp, depth = config.parallel.pp, config.model.depth
    if pp == 1:                                     # a preset may have more
        return [{}] if "parallel.chunks" in asked.fixed else [{"parallel.chunks": 1}]
    even = [v for v in divisors(depth // pp) if v > 1] if depth % pp == 0 else [2] if depth >= 2 * pp else []
    chunks = asked.values("parallel.chunks", [1, *even])
    found = [{"parallel.schedule": "interleaved" if v > 1 else "1f1b", "parallel.chunks": v} for v in chunks]
    found += [{"parallel.schedule": "gpipe", "parallel.chunks": 1}] * (1 in chunks)
    if "parallel.schedule" in asked.fixed:
        wanted = asked.config.parallel.schedule
        found = [{"parallel.schedule": wanted, "parallel.chunks": v} for v in chunks if (v > 1) == (wanted == "interleaved")]
    return found or [{}]


def micros(asked: Search, config: Config) -> list[int]:
    """Micro-batches: the divisors of a rank's samples."""
    share = config.train.global_batch // config.parallel.dp
    return asked.values("train.micro_batch", divisors(share) if share else [1])


def rest(asked: Search, config: Config) -> list[Choice]:
    """What else a layout can vary in, but its rank order: all combinations, the ones likely to be the best first.

    Symmetric memory is for tp ranks of one node. Keys that mean nothing to a layout stay as they are.
    """
    p = config.parallel
    zeros = asked.values("parallel.zero", [True, False]) if p.dp * p.cp > 1 else [p.zero]
    return [{**way, "parallel.context": context, "parallel.zero": zero}
            for way, context, zero in product(ways(asked, config), contexts(asked, config), zeros)]


def ways(asked: Search, config: Config) -> list[Choice]:
    """Ways in which tp's linears communicate."""
    p = config.parallel
    if p.tp == 1:
        return [{}]
    near = ["symmetric"] if together(asked, config) else []
    return [{"parallel.sp": sp, "parallel.overlap": overlap} for sp in asked.values("parallel.sp", [True, False])
            for overlap in (asked.values("parallel.overlap", ["nccl", *near, "none"]) if sp else [p.overlap])]


def contexts(asked: Search, config: Config) -> list[str]:
    """Ways to attend over cp ranks."""
    p = config.parallel
    return asked.values("parallel.context", ["all_to_all", "ring", "gather"]) if p.cp > 1 else [p.context]


def together(asked: Search, config: Config) -> bool:
    """Whether a layout's tp ranks share a node."""
    stride = comms.strides(config.parallel.order, {axis: getattr(config.parallel, axis) for axis in AXES})["tp"]
    return comms.together(((stride, config.parallel.tp),), asked.hardware, asked.gpus)


def orders(asked: Search, config: Config) -> list[str]:
    """Rank orders that differ in which ranks share a node: permutations of the axes that have several ranks."""
    p = config.parallel
    now = p.order.split("-")
    if asked.gpus <= asked.node:
        return [p.order]
    long = [axis for axis in now if getattr(p, axis) > 1]
    found = []
    for some in permutations(long):
        names = iter(some)
        found.append("-".join(next(names) if axis in long else axis for axis in now))
    return asked.values("parallel.order", found)


# ---- the search

def quickest(plan: Plan, gpus: int = 0, batch: int = 0) -> Layout | None:
    """The fastest layout of another request, with so many GPUs or such a global batch: of the few most promising ones. None where
    none fits."""
    config = changed(plan.config, {"train.global_batch": batch or plan.config.train.global_batch})
    hardware = seated(plan.whole, gpus or plan.gpus)
    asked = Search(config, hardware, gpus or plan.gpus, plan.fixed, plan.precisions or (config.precision,), plan.free)
    found = [one for one in firsts(asked, possible(asked)[0], FEW) if isinstance(one, Layout)]
    found.sort(key=lambda layout: layout.time.step)
    return min((refined(asked, one) for one in found[:FEW]), key=lambda layout: layout.time.step, default=None)


def firsts(asked: Search, starts: Sequence[Config], most: int) -> list[Layout | Misfit | None]:
    """`first` of each layout. With `most` those that promise the most come first, and what cannot be among so many fastest ones
    is None; 0: all are looked at."""
    promised = [promise(asked, start) if most else 0.0 for start in starts]
    found: list[Layout | Misfit | None] = [None] * len(starts)
    steps: list[float] = []                         # of the fastest
    for at in sorted(range(len(starts)), key=promised.__getitem__):
        limit = steps[-1] if most and len(steps) == most else math.inf
        if promised[at] >= limit:                   # and so do all that follow
            break
        one = found[at] = first(asked, starts[at], limit)
        if isinstance(one, Layout):
            steps = sorted([*steps, one.time.step])[:most or None]
    return found


def first(asked: Search, start: Config, limit: float = math.inf) -> Layout | Misfit | None:
    """The fastest variant of a layout over micro-batches and chunks, or any that fits; or why none does; None where they take
    `limit` seconds a step or more."""
    found = fastest(asked, start, limit)
    if found is None:
        fits = next((config for config in tight(asked, start) if memory.fits(config, asked.room)), None)
        if fits is None:
            return misfit(asked, start)
        if any(get(fits, key) != get(start, key) for key in WAYS):
            found = fastest(asked, fits, limit)
    return found


def fastest(asked: Search, config: Config, limit: float = math.inf) -> Layout | None:
    """The fastest that fits over all micro-batches and chunks, if it takes less than `limit` seconds a step."""
    found, work = None, {micro: work_of(asked, config, micro) for micro in micros(asked, config)}
    for chunks, micro in product(schedules(asked, config), work):
        if least(config, chunks.get("parallel.chunks", config.parallel.chunks), micro, work[micro]) < limit:
            candidate = changed(config, {**chunks, "train.micro_batch": micro})
            found = fitting(asked, candidate, limit) or found
            limit = found.time.step * (1 - MARGIN) if found else limit
    return found


def work_of(asked: Search, config: Config, micro: int) -> float:
    """Seconds of a block's forward and backward pass of a micro-batch, with the least recomputation."""
    again = asked.values("train.recompute", RECOMPUTE)[0]
    one = changed(config, {"train.micro_batch": micro, "train.recompute": again})
    block, _ = steptime.blocks_of(local_of(one, asked.hardware, asked.gpus), asked.known)
    return block["forward"] + block["backward"]


def least(config: Config, chunks: int, micro: int, work: float) -> float:
    """Seconds below which no step is in which a block's `work` is so many seconds a micro-batch: the blocks of the rank that has
    the most, and the bubble (`steptime.pipeline_time`)."""
    depth, pp = config.model.depth, config.parallel.pp
    if depth < pp * chunks:                         # refused, with a sentence
        return 0.0
    share = config.train.global_batch // config.parallel.dp
    most = max(steptime.shares(depth, pp, chunks))
    number = math.ceil(share / (micro or share))
    return work * ((number - 1 / chunks) * most + depth / chunks) * (1 - 1e-9)          # and rounding


def promise(asked: Search, start: Config) -> float:
    """Seconds below which no variant of a layout is: the work of the largest micro-batch, in parts as small as they may be."""
    sizes = micros(asked, start)
    work = SLACK * work_of(asked, start, sizes[-1]) / sizes[-1] * sizes[0] if sizes[-1] else work_of(asked, start, 0)
    return min(least(start, chunks.get("parallel.chunks", start.parallel.chunks), sizes[0], work)
               for chunks in schedules(asked, start))


def refined(asked: Search, layout: Layout) -> Layout:
    """The same layout, better: of few GPUs the best of everything, else one group of keys after the other, until nothing gets
    faster."""
    if asked.gpus <= FEW:
        return best(asked, everything(asked, layout.config), layout) or layout
    steps: list[Callable[[Config], Iterable[Config]]] = [
        lambda config: (changed(config, choice) for choice in rest(asked, config)),
        # together: which method is the best depends on whether cp's ranks share a node
        lambda config: reachable(asked, (changed(config, {"parallel.order": order, "parallel.context": context})
                                         for order, context in product(orders(asked, config), contexts(asked, config)))),
        # together: the host needs more for some ways to communicate, the less the larger micro-batches are
        lambda config: (changed(config, {**way, **chunks, "train.micro_batch": micro}) for way, chunks, micro
                        in product(ways(asked, config), schedules(asked, config), micros(asked, config)))]
    unchanged = 0                                   # steps in a row
    for step in cycle(steps):
        found = best(asked, step(layout.config), layout)
        unchanged = unchanged + 1 if found is layout else 1
        layout = found or layout
        if unchanged >= len(steps):
            return layout
    raise AssertionError("a cycle has no end")


def everything(asked: Search, config: Config) -> Iterator[Config]:
    """All that a layout can vary in, together: where the host is the limit, no single change may make a step faster."""
    for order in orders(asked, config):
        there = changed(config, {"parallel.order": order})
        yield from reachable(asked, (changed(there, {**choice, **chunks, "train.micro_batch": micro}) for choice, chunks, micro
                                     in product(rest(asked, there), schedules(asked, there), micros(asked, there))))


def reachable(asked: Search, candidates: Iterable[Config]) -> Iterator[Config]:
    """Those whose linears, where they go by symmetric memory, find it in their own node."""
    return (one for one in candidates if not out_of_reach(asked, one))


def best(asked: Search, candidates: Iterable[Config], found: Layout | None = None) -> Layout | None:
    """The fastest of these that fits, or `found`, if none is faster by more than `MARGIN`."""
    for candidate in candidates:
        found = fitting(asked, candidate, found.time.step * (1 - MARGIN) if found else math.inf) or found
    return found


def fitting(asked: Search, candidate: Config, limit: float) -> Layout | None:
    """A candidate with the recomputation with which it fits and is the fastest, if that is in less than `limit` seconds a step.

    None at all is the fastest; uncompiled, where the host is the limit, full may be faster than selective, which asks Python
    about every operator.
    """
    found = None
    for how in asked.values("train.recompute", RECOMPUTE):
        config = changed(candidate, {"train.recompute": how})
        if refusal(config):
            continue
        time = steptime.predict(config, asked.hardware, asked.gpus, asked.known)
        if time.step < limit and memory.fits(config, asked.room):
            found, limit = Layout(config, memory.predict(config), time), time.step
        if how == "none" and time.step >= limit:    # found, or too slow: with more it is slower still
            break
    return found


def tight(asked: Search, start: Config) -> Iterator[Config]:
    """Variants of a layout that need little memory: a sample at a time, as much computed again as can be. Of schedules 1f1b, if
    it may be, than which none keeps less; of overlaps one, which all need the same."""
    again = asked.values("train.recompute", RECOMPUTE)[::-1]
    some = schedules(asked, start)
    some = some[:1] if some[0].get("parallel.schedule") == "1f1b" else some
    alike: dict[Any, Choice] = {}
    for others in rest(asked, start):               # of those that need the same the first counts
        alike.setdefault(tuple(value != "none" if key == "parallel.overlap" else value for key, value in others.items()), others)
    micro = micros(asked, start)[0]
    for chunks, others in product(some, alike.values()):
        variants = (changed(start, {**chunks, **others, "train.micro_batch": micro, "train.recompute": how}) for how in again)
        config = next((one for one in variants if not refusal(one)), None)
        if config is not None:
            yield config


# ---- why not

TERMS = {"parameters": "parameters", "gradients": "gradients", "states": "optimizer states", "average": "the weights' average",
         "copies": "16-bit copies of weights", "activations": "activations", "logits": "logits", "batch": "the batch",
         "buffers": "communication buffers", "workspace": "workspace", "reserve": "CUDA and fragments"}


def misfit(asked: Search, start: Config) -> Misfit:
    """What a layout that does not fit needs at least, of which the most is what, and what would make it fit."""
    config, needs = min(((one, memory.predict(one)) for one in tight(asked, start)), key=lambda variant: variant[1].total)
    term = max(TERMS, key=lambda name: getattr(needs, name))
    return Misfit({axis: getattr(config.parallel, axis) for axis in AXES}, needs.total, TERMS[term], getattr(needs, term),
                  cure(asked, config))


def cure(asked: Search, config: Config) -> str:
    """The first of some changes with which a layout would fit: of what the user has fixed, then of an axis, in dp's place or with
    more GPUs."""
    p = config.parallel
    given: list[Choice] = [{"train.recompute": how} for how in RECOMPUTE]
    given += [{"train.micro_batch": 1}, {"parallel.zero": True}, {"parallel.sp": True}]
    given = [change for change in given if next(iter(change)) in asked.fixed]
    for k, axis in product((2, 4, 8, 16, 32, 64), ("tp", "pp", "cp")):
        given.append({f"parallel.{axis}": getattr(p, axis) * k} | ({"parallel.dp": p.dp // k} if p.dp % k == 0 else {}))
    for change in given:
        one = changed(config, change)
        if not refusal(one) and memory.fits(one, asked.room):
            gpus = one.parallel.pp * one.parallel.dp * one.parallel.cp * one.parallel.tp
            words = " ".join(f"{key}={plain(value)}" for key, value in change.items())
            return words if gpus == asked.gpus else f"{words} on {gpus} GPUs"
    return ""


def why_none(asked: Search, refused: dict[str, int]) -> str:
    """The sentence for a request of which no layout divides what it has to."""
    p = asked.config.parallel
    given = {axis: getattr(p, axis) for axis in AXES if f"parallel.{axis}" in asked.fixed and getattr(p, axis)}
    product_of = 1
    for size in given.values():
        product_of *= size
    if asked.gpus % product_of:
        words = " x ".join(f"parallel.{axis}={size}" for axis, size in given.items())
        return (f"{words} does not divide {asked.gpus} GPUs: choose sizes whose product is one of "
                f"{', '.join(map(str, divisors(asked.gpus)))}")
    if len(given) == len(AXES) and product_of != asked.gpus:
        return f"the axes that you give are a layout of {product_of} GPUs, and there are {asked.gpus}: leave one of them out"
    told = max(refused, key=lambda sentence: refused[sentence]) if refused else "nothing divides"
    ways = []
    for axis in given:
        others = replace(asked, fixed=asked.fixed - {f"parallel.{axis}"})
        if good := sorted({getattr(config.parallel, axis) for config in possible(others)[0]}):
            ways.append(f"parallel.{axis} can be {', '.join(map(str, good))}")
    for batch in multiples(asked.config.train.global_batch, asked.gpus):
        if possible(replace(asked, config=changed(asked.config, {"train.global_batch": batch})))[0]:
            ways.append(f"train.global_batch={batch} would do")
            break
    for count in range(asked.gpus - 1, 0 if not ways else asked.gpus, -1):
        if possible(replace(asked, gpus=count))[0]:
            ways.append(f"or take {count} GPUs")
            break
    return f"no layout of {asked.gpus} GPUs can be trained: {told}" + "".join(f"; {way}" for way in ways)


def multiples(batch: int, gpus: int) -> list[int]:
    """Batches near the wanted one that more layouts divide: powers of two, and multiples of the GPUs."""
    return sorted({*[2**k for k in range(24) if 2**k >= batch][:2], -(-batch // gpus) * gpus})


def nowhere(asked: Search, misfits: list[Misfit]) -> str:
    """The sentence for a model that fits no layout: the least that would hold it."""
    near = min(misfits, key=lambda one: one.needs)
    words = " ".join(f"{axis}={size}" for axis, size in near.sizes.items() if size > 1) or "one GPU"
    told = (f"no layout fits {asked.gpus} x {asked.hardware.name}: the nearest, {words}, needs {near.needs / 1e9:.0f} GB of "
            f"{offered(asked)}, of which {near.term} {near.bytes / 1e9:.0f}")
    fixed_cure = near.cure if near.cure.partition("=")[0] in asked.fixed else ""
    ways = [f"set {fixed_cure}"] if fixed_cure else []
    if near.needs <= asked.hardware.memory:
        ways.append("leave less memory free, with --free 0")
    if count := enough(asked):
        ways.append(f"take {count} GPUs")
    others = [load for name in hardware_presets.presets() if (load := hardware_presets.load(name)).memory > asked.hardware.memory
              and all(precision in load.peaks and not unable(changed(asked.config, {"precision": precision}), load)
                      for precision in asked.precisions)]
    for larger in sorted(others, key=lambda one: one.memory):
        if holds(replace(asked, hardware=larger)):
            ways.append(f"take {larger.name}, with {larger.memory / 1e9:.0f} GB each")
            break
    return f"{told}: {', or '.join(ways) or smaller(asked)}"


def smaller(asked: Search) -> str:
    """What to make smaller, where neither more nor larger GPUs would do: a GPT's samples, to the largest power of two of tokens
    that fits, or else the depth. Found by bisection."""
    m, powers = asked.config.model, list[int]()
    if isinstance(m, GPTConfig):
        powers = [2**k for k in range(7, m.context.bit_length()) if 2**k < m.context]

    def most(key: str, values: Sequence[int]) -> int:
        def fails(value: int) -> bool:
            return not holds(replace(asked, config=changed(asked.config, {key: value})))
        at = bisect_left(values, True, key=fails)
        return values[at - 1] if at else 0

    if tokens := most("model.context", powers):
        return f"set model.context={tokens}, the largest power of two that fits"
    if blocks := most("model.depth", range(1, m.depth)):
        return f"set model.depth={blocks}, the most blocks that fit"
    return "make the model smaller"


def offered(asked: Search) -> str:
    """GB that a layout may take of a GPU, and why not all."""
    less = f" ({asked.hardware.memory / 1e9:.0f} less the {asked.free:.0%} that --free keeps)" if asked.free else ""
    return f"{asked.room / 1e9:.0f}{less}"


def enough(asked: Search) -> int:
    """The least number of GPUs that would hold the model, of those that people have: up to a node any, then whole nodes, beyond
    16 nodes twice as many each time. 0 if 65,536 do not.

    Of nodes, halves and doubles it is found by bisection, as if what a number holds twice as many did, too; then the numbers
    below it are tried, one after another.
    """
    node = asked.node
    doubles = sorted({count for k in range(17) for count in (node >> k, node << k) if asked.gpus < count <= 65536 and count})
    if not doubles or not holds(replace(asked, gpus=doubles[-1])):
        return 0
    enough = doubles[bisect_left(doubles, True, hi=len(doubles) - 1, key=lambda count: holds(replace(asked, gpus=count)))]
    below = max([asked.gpus, *(count for count in doubles if count < enough)])
    between = [*range(below + 1, min(node, enough)), *(node * n for n in range(2, 17) if below < node * n < enough)]
    return next((count for count in between if holds(replace(asked, gpus=count))), enough)


def holds(asked: Search) -> bool:
    """Whether any layout fits."""
    return any(memory.fits(config, asked.room) for start in possible(asked)[0] for config in tight(asked, start))


# ---- configurations

def get(config: Config, key: str) -> Any:
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


def plain(value: Any) -> str:
    """A value as settings have it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def settings(config: Config, base: Config) -> list[str]:
    """key=value of all that the search chose and that differs from a configuration."""
    return [f"{key}={plain(get(config, key))}" for key in KEYS if get(config, key) != get(base, key)]


def as_plain(plan: Plan, top: int = 0) -> dict[str, Any]:
    """A plan as JSON takes it: bytes and seconds; the first `top` layouts, 0: all."""
    layouts = [{"settings": settings(one.config, plan.config), **one.sizes, "step_s": one.time.step,
                "samples_per_s": one.time.samples_per_s, "mfu": one.time.mfu, "parts_s": one.time.parts,
                "memory_bytes": one.memory.total, "memory": {entry.name: getattr(one.memory, entry.name)
                                                             for entry in fields(one.memory)}}
               for one in plan.layouts[:top or None]]
    misfits = [{entry.name: getattr(one, entry.name) for entry in fields(one)} for one in plan.misfits]
    return {"preset": plan.config.preset, "gpus": plan.gpus, "hardware": plan.hardware.name, "memory_bytes": plan.hardware.memory,
            "free": plan.free, "fits": len(plan.layouts), "layouts": layouts, "misfits": misfits, "refused": plan.refused,
            "slower": plan.slower}
