"""Which layout of a model on so many GPUs is the fastest that fits: predicted, not tried.

    plan = search(load("gpt-7b"), hardware.load("h100-80"), 64)
    plan.layouts[0].config               # ready to be trained; `.time` and `.memory` say what to expect
    plan.misfits                         # why others do not fit

Layouts and their many variants, which are near one another, are those of `search_space.py`; of each layout the fastest variant
stands in the list. `step_time.predict` gives its time, `memory.predict` its memory. What fits leaves a share of the GPU's memory
free (`FREE`): a run that is slower by a percent goes on, one without memory ends. What does not fit says why in `infeasible.py`.

What is searched. All layouts, and of each all micro-batches (divisors of a rank's samples) with all schedules and numbers of
chunks, each with the least recomputation that fits, which is the fastest: exhaustively. Then, of the most promising layouts, what
is left: for few GPUs (`FEW`) all of it together, for more greedily: sequence parallelism and its overlap, context method and
ZeRO-1, then the rank order, then micro-batches with that overlap again, as long as something gets faster. A layout that does not
fit is looked at in all variants of one sample and full recomputation before it is given up. A variant takes a simpler one's place
if it is faster by more than predictions can tell (`MARGIN`). Of more layouts than `MANY` those whose blocks alone take longer
(`lower_bound`) than the steps of the `REFINED` fastest are left out, and counted. The tests compare with all variants of all
layouts.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import cycle, product
from typing import Any

from course.config import Config
from course.config.axes import AXES
from course.config.validation import refusal
from course.planner import memory, step_time
from course.planner.hardware import Hardware, unsupported
from course.planner.infeasible import TooLarge, no_layout, nothing_fits, too_large
from course.planner.memory import Memory
from course.planner.rank_workload import workload_of
from course.planner.search_space import (
    FREE,
    RECOMPUTE,
    WAYS,
    SearchRequest,
    all_variants,
    changed,
    context_choices,
    get_value,
    least_memory_variants,
    micro_batch_sizes,
    other_choices,
    rank_orders,
    reachable,
    schedule_choices,
    settings,
    tensor_parallel_choices,
    trainable_layouts,
)
from course.planner.step_time import Time
from course.utils.errors import CourseError

FEW = 8                                             # GPUs of which all that a layout can vary in is tried together
MARGIN = 0.005                                      # of the time: no prediction is better than that
REFINED = 32                                        # layouts, the most promising ones, of which all that is greedy is searched
MANY = 256                                          # layouts, of more than which those that cannot be among these are left out
LEAST_SAMPLE_TIME = 0.8  # of a sample's time in the largest micro-batch: in no smaller one it is less


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
class Plan:
    """The answer of a search."""

    asked: SearchRequest
    layouts: tuple[Layout, ...]                     # that fit, the fastest first
    misfits: tuple[TooLarge, ...]                     # that do not, the one that comes nearest first
    refused: dict[str, int]                         # why the library would not take others, and how many
    slower: int = 0                                 # of many layouts those too slow for the list, fit or not

    @property
    def config(self) -> Config:
        """What was asked."""
        return self.asked.config

    @property
    def hardware(self) -> Hardware:
        """Its nodes as the GPUs fill them."""
        return self.asked.hardware

    @property
    def gpus(self) -> int:
        """How many there are."""
        return self.asked.gpus

    @property
    def room(self) -> float:
        """Bytes of a GPU that a layout may take."""
        return self.asked.room


def find_layouts(config: Config, hardware: Hardware, gpus: int, fixed: Iterable[str] = (), precisions: Iterable[str] = (),
           free: float = FREE, top: int = 0) -> Plan:
    """The layouts of a model on so many GPUs that fit their memory, the fastest first, and why others do not.

    fixed: keys whose values in `config` stay, such as "parallel.tp"; those of `KEYS` that it does not name are chosen here.
    precisions: formats to choose among, instead of the configuration's. free: the share of a GPU's memory that a layout leaves.
    top: of many layouts so many are in the plan at least, if they fit; without it the `REFINED` fastest.
    Raises `CourseError` if no layout divides what it has to, or none fits.
    """
    if gpus < 1:
        raise CourseError(f"--gpus {gpus}: a model needs one GPU at least")
    if not 0 <= free < 1:
        raise CourseError(f"--free {free:g}: a share of the memory is at least 0 and less than 1, such as {FREE}")
    for precision in precisions or [config.precision]:
        hardware.peak(precision)
        if sentence := unsupported(changed(config, {"precision": precision}), hardware):
            raise CourseError(sentence)
    asked = SearchRequest(config, hardware, gpus, frozenset(fixed), tuple(dict.fromkeys(precisions)) or (config.precision,), free)
    starts, refused = trainable_layouts(asked)
    if not starts:
        raise CourseError(no_layout(asked, refused))
    results = fastest_variants(asked, starts, max(REFINED, top) if len(starts) > MANY else 0)
    layouts = sorted((one for one in results if isinstance(one, Layout)), key=lambda layout: layout.time.step)
    misfits = sorted((one for one in results if isinstance(one, TooLarge)), key=lambda one: one.needs)
    if not layouts:
        raise CourseError(nothing_fits(asked, misfits))
    layouts = [refined(asked, layout) for layout in layouts[:REFINED]] + layouts[REFINED:]
    layouts.sort(key=lambda layout: layout.time.step)
    return Plan(asked, tuple(layouts), tuple(misfits), refused, results.count(None))


# ---- which layouts are looked at

def fastest_variants(asked: SearchRequest, starts: Sequence[Config], most: int) -> list[Layout | TooLarge | None]:
    """`fastest_or_reason` of each layout. With `most` those that promise the most come first, and what cannot be among so many
    fastest ones is None; 0: all are looked at."""
    bounds = [lower_bound(asked, start) if most else 0.0 for start in starts]
    results: list[Layout | TooLarge | None] = [None] * len(starts)
    steps: list[float] = []                         # of the fastest
    for at in sorted(range(len(starts)), key=bounds.__getitem__):
        limit = steps[-1] if most and len(steps) == most else math.inf
        if bounds[at] >= limit:                   # and so do all that follow
            break
        result = results[at] = fastest_or_reason(asked, starts[at], limit)
        if isinstance(result, Layout):
            steps = sorted([*steps, result.time.step])[:most or None]
    return results


def fastest_or_reason(asked: SearchRequest, start: Config, limit: float = math.inf) -> Layout | TooLarge | None:
    """The fastest variant of a layout over micro-batches and chunks, or any that fits; or why none does; None where they take
    `limit` seconds a step or more."""
    layout = fastest(asked, start, limit)
    if layout is None:
        fits = next((config for config in least_memory_variants(asked, start) if memory.fits(config, asked.room)), None)
        if fits is None:
            return too_large(asked, start)
        if any(get_value(fits, key) != get_value(start, key) for key in WAYS):
            layout = fastest(asked, fits, limit)
    return layout


def work_of(asked: SearchRequest, config: Config, micro: int) -> float:
    """Seconds of a block's forward and backward pass of a micro-batch, with the least recomputation."""
    again = asked.values("train.recompute", RECOMPUTE)[0]
    candidate = changed(config, {"train.micro_batch": micro, "train.recompute": again})
    block, _ = step_time.blocks_of(workload_of(candidate, asked.hardware, asked.gpus), asked.known)
    return block["forward"] + block["backward"]


def least_step_time(config: Config, chunks: int, micro: int, work: float) -> float:
    """Seconds below which no step is in which a block's `work` is so many seconds a micro-batch: the blocks of the rank that has
    the most, and the bubble (`step_time.pipeline_time`)."""
    depth, pp = config.model.depth, config.parallel.pp
    if depth < pp * chunks:                         # refused, with a sentence
        return 0.0
    share = config.train.global_batch // config.parallel.dp
    most = max(step_time.shares(depth, pp, chunks))
    number = math.ceil(share / (micro or share))
    return work * ((number - 1 / chunks) * most + depth / chunks) * (1 - 1e-9)          # and rounding


def lower_bound(asked: SearchRequest, start: Config) -> float:
    """Seconds below which no variant of a layout is: the work of the largest micro-batch, in parts as small as they may be."""
    sizes = micro_batch_sizes(asked, start)
    work = LEAST_SAMPLE_TIME * work_of(asked, start, sizes[-1]) / sizes[-1] * sizes[0] if sizes[-1] else work_of(asked, start, 0)
    return min(least_step_time(start, chunks.get("parallel.chunks", start.parallel.chunks), sizes[0], work)
               for chunks in schedule_choices(asked, start))


# ---- the fastest variant of one

def fastest(asked: SearchRequest, config: Config, limit: float = math.inf) -> Layout | None:
    """The fastest that fits over all micro-batches and chunks, if it takes less than `limit` seconds a step."""
    layout, work = None, {micro: work_of(asked, config, micro) for micro in micro_batch_sizes(asked, config)}
    for chunks, micro in product(schedule_choices(asked, config), work):
        if least_step_time(config, chunks.get("parallel.chunks", config.parallel.chunks), micro, work[micro]) < limit:
            candidate = changed(config, {**chunks, "train.micro_batch": micro})
            layout = with_recomputation(asked, candidate, limit) or layout
            limit = layout.time.step * (1 - MARGIN) if layout else limit
    return layout


def refined(asked: SearchRequest, layout: Layout) -> Layout:
    """The same layout, better: of few GPUs the best of everything, else one group of keys after the other, until nothing gets
    faster."""
    if asked.gpus <= FEW:
        return best(asked, all_variants(asked, layout.config), layout) or layout
    steps: list[Callable[[Config], Iterable[Config]]] = [
        lambda config: (changed(config, choice) for choice in other_choices(asked, config)),
        # together: which method is the best depends on whether cp's ranks share a node
        lambda config: reachable(asked, (changed(config, {"parallel.order": order, "parallel.context": context})
                                         for order, context in product(rank_orders(asked, config),
                                                                       context_choices(asked, config)))),
        # together: the host needs more for some ways to communicate, the less the larger micro-batches are
        lambda config: (changed(config, {**way, **chunks, "train.micro_batch": micro}) for way, chunks, micro
                        in product(tensor_parallel_choices(asked, config), schedule_choices(asked, config),
                                   micro_batch_sizes(asked, config)))]
    unchanged = 0                                   # steps in a row
    for step in cycle(steps):
        faster = best(asked, step(layout.config), layout)
        unchanged = unchanged + 1 if faster is layout else 1
        layout = faster or layout
        if unchanged >= len(steps):
            return layout
    raise AssertionError("a cycle has no end")


def best(asked: SearchRequest, candidates: Iterable[Config], layout: Layout | None = None) -> Layout | None:
    """The fastest of these that fits, or `layout`, if none is faster by more than `MARGIN`."""
    for candidate in candidates:
        layout = with_recomputation(asked, candidate, layout.time.step * (1 - MARGIN) if layout else math.inf) or layout
    return layout


def with_recomputation(asked: SearchRequest, candidate: Config, limit: float) -> Layout | None:
    """A candidate with the recomputation with which it fits and is the fastest, if that is in less than `limit` seconds a step.

    None at all is the fastest; uncompiled, where the host is the limit, full may be faster than selective, which asks Python
    about every operator.
    """
    layout = None
    for how in asked.values("train.recompute", RECOMPUTE):
        config = changed(candidate, {"train.recompute": how})
        if refusal(config):
            continue
        time = step_time.predict(config, asked.hardware, asked.gpus, asked.known)
        if time.step < limit and memory.fits(config, asked.room):
            layout, limit = Layout(config, memory.predict(config), time), time.step
        if how == "none" and time.step >= limit:    # found, or too slow: with more it is slower still
            break
    return layout


def as_plain(plan: Plan) -> dict[str, Any]:
    """A plan as JSON takes it: bytes and seconds."""
    layouts = [{"settings": settings(one.config, plan.config), **one.sizes, "step_s": one.time.step,
                "samples_per_s": one.time.samples_per_s, "mfu": one.time.mfu, "parts_s": one.time.parts,
                "memory_bytes": one.memory.total, "memory": {entry.name: getattr(one.memory, entry.name)
                                                             for entry in fields(one.memory)}}
               for one in plan.layouts]
    misfits = [{entry.name: getattr(one, entry.name) for entry in fields(one)} for one in plan.misfits]
    return {"preset": plan.config.preset, "gpus": plan.gpus, "hardware": plan.hardware.name, "memory_bytes": plan.hardware.memory,
            "free": plan.asked.free, "fits": len(plan.layouts), "layouts": layouts, "misfits": misfits, "refused": plan.refused,
            "slower": plan.slower}
