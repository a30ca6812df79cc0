"""Why a model has no layout on so many GPUs, or not this one, and what to change: what a search says that finds too little.

Every change that is named was tried: with it some variant is taken by a run, or fits.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from course.config import Config
from course.models import GPTConfig
from course.perf import hardware as hardware_presets
from course.perf import memory
from course.perf.layouts import AXES, divisors, refusal, unable
from course.perf.variants import RECOMPUTE, Choice, Search, changed, plain, possible, tight

TERMS = {"parameters": "parameters", "gradients": "gradients", "states": "optimizer states", "average": "the weights' average",
         "copies": "16-bit copies of weights", "activations": "activations", "logits": "logits", "batch": "the batch",
         "buffers": "communication buffers", "workspace": "workspace", "reserve": "CUDA and fragments"}


@dataclass(frozen=True)
class Misfit:
    """Layouts that do not fit, by their tightest variant."""

    sizes: dict[str, int]                           # pp, dp, cp and tp
    needs: int                                      # bytes
    term: str                                       # the largest part of them
    bytes: int                                      # that part
    cure: str                                       # what would make it fit, "" if the search has tried all that there is


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
    product_of = math.prod(given.values())
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
    told = (f"no layout fits {asked.gpus} x {asked.machine.name}: the nearest, {words}, needs {near.needs / 1e9:.0f} GB of "
            f"{offered(asked)}, of which {near.term} {near.bytes / 1e9:.0f}")
    fixed_cure = near.cure if near.cure.partition("=")[0] in asked.fixed else ""
    ways = [f"set {fixed_cure}"] if fixed_cure else []
    if near.needs <= asked.machine.memory:
        ways.append("leave less memory free, with --free 0")
    if count := enough(asked):
        ways.append(f"take {count} GPUs")
    others = [load for name in hardware_presets.presets() if (load := hardware_presets.load(name)).memory > asked.machine.memory
              and all(precision in load.peaks and not unable(changed(asked.config, {"precision": precision}), load)
                      for precision in asked.precisions)]
    for larger in sorted(others, key=lambda one: one.memory):
        if holds(replace(asked, machine=larger)):
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
    less = f" ({asked.machine.memory / 1e9:.0f} less the {asked.free:.0%} that --free keeps)" if asked.free else ""
    return f"{asked.room / 1e9:.0f}{less}"


def enough(asked: Search) -> int:
    """The least number of GPUs that would hold the model, of those that people have: up to a node any, then whole nodes, beyond
    16 nodes twice as many each time. 0 if 65,536 do not.

    Of nodes, halves and doubles it is found by bisection, as if what a number holds twice as many did, too; then the numbers
    below it are tried, one after another.
    """
    node = asked.machine.links[0].span or asked.gpus
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
