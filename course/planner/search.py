"""Find the fastest layout of a model that fits a number of GPUs, from predictions alone.

    plan = find_layouts(load("gpt-7b"), hardware.load("h100-80"), 64)
    plan.layouts[0].config               # ready for training; `.time` and `.memory` hold the predictions
    plan.misfits                         # why other layouts do not fit

`search_space.py` lists layouts and their variants; the plan holds the fastest variant of each layout. `step_time.predict` gives
its time and `peak_memory.predict` its memory. A variant must leave a share of the GPU's memory free (`FREE`): a run that is
slower than predicted goes on, but one that lacks memory ends. `why_infeasible.py` explains what does not fit.

The search has two stages. First, for every layout, it tries all micro-batches (divisors of a rank's samples), schedules and
numbers of chunks, each with the least recomputation that fits, which is usually the fastest. Then it refines the most promising
layouts. On few GPUs (`FEW`) it tries all remaining choices together. On more GPUs it is greedy: sequence parallelism, overlap,
context method and ZeRO-1; the rank order; micro-batches and overlap; and again, as long as a step gets faster.

Before it rejects a layout, it tries the variants that need the least memory. A variant replaces a simpler one only if it is
faster by more than the predictions can resolve (`MARGIN`). With more than `MANY` layouts, it skips and counts those whose blocks
alone take longer (`lower_bound`) than a step of the `REFINED` fastest. Tests compare with a search of all variants.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import cycle, product
from typing import Any

from course.config import Config
from course.config.axes import AXES
from course.config.validation import refusal
from course.planner import peak_memory, step_time
from course.planner.hardware import Hardware, unsupported
from course.planner.peak_memory import Memory
from course.planner.rank_workload import workload_of
from course.planner.search_space import (
    FREE,
    RECOMPUTE,
    WAYS,
    SearchRequest,
    all_variants,
    changed,
    context_choices,
    expert_choices,
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
from course.planner.why_infeasible import TooLarge, no_layout, nothing_fits, too_large
from course.utils.errors import CourseError

FEW = 8                                             # GPUs up to which all choices are tried together
MARGIN = 0.005                                      # of the time: the resolution of predictions
REFINED = 32                                        # most promising layouts that are refined
MANY = 256                                          # layouts above which hopeless ones are skipped
LEAST_SAMPLE_TIME = 0.8  # lower bound of a sample's time in any micro-batch, over its time in the largest one


@dataclass(frozen=True)
class Layout:
    """A configuration with its predicted memory and time."""

    config: Config
    memory: Memory
    time: Time

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of pp, dp, cp and tp."""
        return {axis: getattr(self.config.parallel, axis) for axis in AXES}


@dataclass(frozen=True)
class Plan:
    """The result of a search."""

    asked: SearchRequest
    layouts: tuple[Layout, ...]                     # layouts that fit, fastest first
    misfits: tuple[TooLarge, ...]                   # layouts that do not, the nearest to fitting first
    refused: dict[str, int]                         # why the library refuses others -> how many
    slower: int = 0                                 # layouts skipped as too slow, fitting or not

    @property
    def config(self) -> Config:
        """The configuration that was asked for."""
        return self.asked.config

    @property
    def hardware(self) -> Hardware:
        """The hardware, with nodes as full as the job makes them."""
        return self.asked.hardware

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.asked.gpus

    @property
    def room(self) -> float:
        """Bytes that a layout may use on a GPU."""
        return self.asked.room


def find_layouts(config: Config, hardware: Hardware, gpus: int, fixed: Iterable[str] = (), precisions: Iterable[str] = (),
           free: float = FREE, top: int = 0) -> Plan:
    """Find the layouts of a model that fit the memory of `gpus` GPUs, fastest first, and explain why others do not fit.

    fixed: keys that keep their value in `config`, such as "parallel.tp"; the search chooses the other `KEYS`.
    precisions: formats to choose from, instead of the configuration's. free: the share of a GPU's memory that stays free.
    top: when slow layouts are skipped, keep at least this many that fit; 0: the `REFINED` fastest.
    Raises `CourseError` for a wrong argument or unsupported format, or if no layout divides model and batch, or none fits.
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


# ---- choose layouts

def fastest_variants(asked: SearchRequest, starts: Sequence[Config], most: int) -> list[Layout | TooLarge | None]:
    """`fastest_or_reason` for each layout. With `most`, try the most promising layouts first, and give None for each layout that
    cannot be among the `most` fastest. 0: try all."""
    bounds = [lower_bound(asked, start) if most else 0.0 for start in starts]
    results: list[Layout | TooLarge | None] = [None] * len(starts)
    steps: list[float] = []                         # step times of the fastest
    for at in sorted(range(len(starts)), key=bounds.__getitem__):
        limit = steps[-1] if most and len(steps) == most else math.inf
        if bounds[at] >= limit:                   # and so are all later ones
            break
        result = results[at] = fastest_or_reason(asked, starts[at], limit)
        if isinstance(result, Layout):
            steps = sorted([*steps, result.time.step])[:most or None]
    return results


def fastest_or_reason(asked: SearchRequest, start: Config, limit: float = math.inf) -> Layout | TooLarge | None:
    """The fastest variant of a layout over micro-batches and chunks, or the reason why none fits. None if every variant takes
    `limit` seconds per step or more."""
    layout = fastest(asked, start, limit)
    if layout is None:
        fits = next((config for config in least_memory_variants(asked, start) if peak_memory.fits(config, asked.room)), None)
        if fits is None:
            return too_large(asked, start)
        if any(get_value(fits, key) != get_value(start, key) for key in WAYS):
            layout = fastest(asked, fits, limit)
    return layout


def work_of(asked: SearchRequest, config: Config, micro: int) -> float:
    """Seconds of one block and micro-batch, forward and backward, with the least recomputation."""
    again = asked.values("train.recompute", RECOMPUTE)[0]
    candidate = changed(config, {"train.micro_batch": micro, "train.recompute": again})
    block, _ = step_time.blocks_of(workload_of(candidate, asked.hardware, asked.gpus), asked.known)
    return block["forward"] + block["backward"]


def least_step_time(config: Config, chunks: int, micro: int, work: float) -> float:
    """A lower bound on a step's seconds, from the blocks of the fullest rank and the pipeline bubble (`step_time.pipeline_time`).

    work: seconds of one block and micro-batch."""
    depth, pp = config.model.depth, config.parallel.pp
    if depth < pp * chunks:                         # `refusal` rejects it
        return 0.0
    share = config.train.global_batch // config.parallel.dp
    most = max(step_time.shares(depth, pp, chunks))
    number = math.ceil(share / (micro or share))
    return work * ((number - 1 / chunks) * most + depth / chunks) * (1 - 1e-9)          # allow for rounding


def lower_bound(asked: SearchRequest, start: Config) -> float:
    """A lower bound on the step time of every variant of a layout, from the work of its largest micro-batch."""
    sizes = micro_batch_sizes(asked, start)
    work = min(work_of(asked, changed(start, spread), sizes[-1]) for spread in expert_choices(asked, start))
    work *= LEAST_SAMPLE_TIME / sizes[-1] * sizes[0] if sizes[-1] else 1.0
    return min(least_step_time(start, chunks.get("parallel.chunks", start.parallel.chunks), sizes[0], work)
               for chunks in schedule_choices(asked, start))


# ---- find the fastest variant of a layout

def fastest(asked: SearchRequest, config: Config, limit: float = math.inf) -> Layout | None:
    """The fastest variant that fits, over micro-batches and chunks, or None if none takes less than `limit` seconds per step."""
    layout, work = None, {micro: work_of(asked, config, micro) for micro in micro_batch_sizes(asked, config)}
    for chunks, micro in product(schedule_choices(asked, config), work):
        if least_step_time(config, chunks.get("parallel.chunks", config.parallel.chunks), micro, work[micro]) < limit:
            candidate = changed(config, {**chunks, "train.micro_batch": micro})
            layout = with_recomputation(asked, candidate, limit) or layout
            limit = layout.time.step * (1 - MARGIN) if layout else limit
    return layout


def refined(asked: SearchRequest, layout: Layout) -> Layout:
    """Improve a layout: on few GPUs over all choices together, else over one group of keys after another until no step is
    faster."""
    if asked.gpus <= FEW:
        return best(asked, all_variants(asked, layout.config), layout) or layout
    steps: list[Callable[[Config], Iterable[Config]]] = [
        lambda config: (changed(config, choice) for choice in other_choices(asked, config)),
        # together: the best context method depends on whether the cp ranks share a node
        lambda config: reachable(asked, (changed(config, {"parallel.order": order, "parallel.context": context})
                                         for order, context in product(rank_orders(asked, config),
                                                                       context_choices(asked, config)))),
        # together: some communication methods cost host time, which matters less with large micro-batches
        lambda config: (changed(config, {**way, **chunks, "train.micro_batch": micro}) for way, chunks, micro
                        in product(tensor_parallel_choices(asked, config), schedule_choices(asked, config),
                                   micro_batch_sizes(asked, config)))]
    unchanged = 0                                   # consecutive steps without gain
    for step in cycle(steps):
        faster = best(asked, step(layout.config), layout)
        unchanged = unchanged + 1 if faster is layout else 1
        layout = faster or layout
        if unchanged >= len(steps):
            return layout
    raise AssertionError("a cycle has no end")


def best(asked: SearchRequest, candidates: Iterable[Config], layout: Layout | None = None) -> Layout | None:
    """The fastest candidate that fits, or `layout` if none is faster by more than `MARGIN`."""
    for candidate in candidates:
        layout = with_recomputation(asked, candidate, layout.time.step * (1 - MARGIN) if layout else math.inf) or layout
    return layout


def with_recomputation(asked: SearchRequest, candidate: Config, limit: float) -> Layout | None:
    """A candidate with the fastest recomputation that fits, or None if it takes `limit` seconds per step or more.

    No recomputation is fastest. For a host-bound eager model, full may be faster than selective, which calls Python for every
    operator.
    """
    layout = None
    for how in asked.values("train.recompute", RECOMPUTE):
        config = changed(candidate, {"train.recompute": how})
        if refusal(config):
            continue
        time = step_time.predict(config, asked.hardware, asked.gpus, asked.known)
        if time.step < limit and peak_memory.fits(config, asked.room):
            layout, limit = Layout(config, peak_memory.predict(config), time), time.step
        if how == "none" and time.step >= limit:    # found, or too slow: more recomputation is slower
            break
    return layout


def as_plain(plan: Plan) -> dict[str, Any]:
    """Convert a plan to values for JSON, in bytes and seconds."""
    layouts = [{"settings": settings(one.config, plan.config), **one.sizes, "step_s": one.time.step,
                "samples_per_s": one.time.samples_per_s, "mfu": one.time.mfu, "parts_s": one.time.parts,
                "memory_bytes": one.memory.total, "memory": {entry.name: getattr(one.memory, entry.name)
                                                             for entry in fields(one.memory)}}
               for one in plan.layouts]
    misfits = [{entry.name: getattr(one, entry.name) for entry in fields(one)} for one in plan.misfits]
    return {"preset": plan.config.preset, "gpus": plan.gpus, "hardware": plan.hardware.name, "memory_bytes": plan.hardware.memory,
            "free": plan.asked.free, "fits": len(plan.layouts), "layouts": layouts, "misfits": misfits, "refused": plan.refused,
            "slower": plan.slower}
