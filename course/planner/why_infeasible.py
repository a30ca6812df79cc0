"""Explain why a search finds no layout, or why a layout does not fit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from course.config import Config
from course.config.axes import AXES
from course.planner import peak_memory
from course.planner.search_space import SearchRequest, divisors, least_memory_variants

TERMS = {"parameters": "parameters", "gradients": "gradients", "states": "optimizer states", "average": "the weights' average",
         "copies": "16-bit copies of weights", "activations": "activations", "logits": "logits", "batch": "the batch",
         "buffers": "communication buffers", "workspace": "workspace", "reserve": "CUDA, NCCL and fragments"}


@dataclass(frozen=True)
class TooLarge:
    """A layout that does not fit, with the needs of its smallest variant."""

    sizes: dict[str, int]                           # axis -> ranks
    needs: int                                      # bytes in all
    term: str                                       # name of the largest part
    bytes: int                                      # of that part


def too_large(asked: SearchRequest, start: Config) -> TooLarge:
    """The least memory that a layout needs, and its largest part."""
    config, needs = min(((one, peak_memory.predict(one)) for one in least_memory_variants(asked, start)),
                        key=lambda variant: variant[1].total)
    term = max(TERMS, key=lambda name: getattr(needs, name))
    return TooLarge({axis: getattr(config.parallel, axis) for axis in AXES}, needs.total, TERMS[term], getattr(needs, term))


def no_layout(asked: SearchRequest, refused: dict[str, int]) -> str:
    """The error message if no layout divides model, batch and GPUs."""
    p = asked.config.parallel
    fixed = {axis: getattr(p, axis) for axis in AXES if f"parallel.{axis}" in asked.fixed and getattr(p, axis)}
    gpus = math.prod(fixed.values())
    if asked.gpus % gpus:
        words = " x ".join(f"parallel.{axis}={size}" for axis, size in fixed.items())
        return (f"{words} does not divide {asked.gpus} GPUs: choose sizes whose product is one of "
                f"{', '.join(map(str, divisors(asked.gpus)))}")
    if len(fixed) == len(AXES) and gpus != asked.gpus:
        return f"the axes that you give are a layout of {gpus} GPUs, and there are {asked.gpus}: leave one of them out"
    reason = max(refused, key=refused.__getitem__) if refused else "nothing divides"
    return f"no layout of {asked.gpus} GPUs can be trained: {reason}"


def nothing_fits(asked: SearchRequest, misfits: Sequence[TooLarge]) -> str:
    """The error message if no layout fits the memory."""
    return (f"no layout fits {asked.gpus} x {asked.machine.name}: {nearest(asked, misfits)}: take more or larger GPUs, or a "
            "smaller model")


def nearest(asked: SearchRequest, misfits: Sequence[TooLarge]) -> str:
    """Describe what the layout nearest to fitting needs."""
    near = min(misfits, key=lambda layout: layout.needs)
    words = " ".join(f"{axis}={size}" for axis, size in near.sizes.items() if size > 1) or "one GPU"
    less = f" ({asked.machine.memory / 1e9:.0f} less the {asked.free:.0%} that --free keeps)" if asked.free else ""
    return (f"the nearest, {words}, needs {near.needs / 1e9:.0f} GB of {asked.room / 1e9:.0f}{less}, of which {near.term} "
            f"{near.bytes / 1e9:.0f}")
