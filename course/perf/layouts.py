"""Which layouts a run takes: every rule by which it refuses one, as arithmetic on the configuration.

    refusal(config)                      # "" or the sentence that says what does not fit
    unable(config, hardware)             # the same of what a GPU cannot do

A run finds the same while it cuts its model. A planner asks of thousands of layouts, so nothing is built here; the tests compare
these rules with the library's own refusals.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

from course import limits
from course.config import FP8, Config
from course.errors import CourseError
from course.models import DiTConfig, GPTConfig, Model
from course.models.dit import Time
from course.perf.hardware import Hardware
from course.perf.local import linears

MULTIPLE = 16                                       # what cuBLAS wants widths of FP8 to be divisible by (course/fp8.py)
AMPERE, HOPPER, BLACKWELL = 8.0, 9.0, 10.0          # compute capabilities
CHIPS = {AMPERE: "Ampere", HOPPER: "Hopper", BLACKWELL: "Blackwell"}
RECIPES = {"block": HOPPER, "mxfp8": BLACKWELL}     # Transformer Engine's that not all have that know FP8
AXES = ("pp", "dp", "cp", "tp")


def refusal(config: Config) -> str:
    """Why no run takes this configuration, in a sentence; "" if one does. parallel.dp=0 counts as 1."""
    try:
        limits.check(config)
    except CourseError as error:
        return str(error)
    return next((sentence for rule in (of_tensor, of_context, of_pipeline, of_batch, of_fp8) if (sentence := rule(config))), "")


def unable(c: Config, h: Hardware) -> str:
    """Why a GPU does not do what a configuration asks for, in a sentence, as a run finds when it tries; "" if it does.

    PyTorch's flash and cuDNN attention are for 16 bits, from compute capability 8.0 (aten/src/ATen/native/transformers/cuda/
    sdp_utils.cpp); Transformer Engine scales blocks from 9.0, and in MX formats from 10.0 (its fp8.py, `check_*_support`).
    Triton, of which the kernels by hand are, supports GPUs from 8.0 (its README, "Compatibility"): on older ones nobody tried.
    """
    if c.attention in ("flash", "cudnn"):
        if c.precision in ("fp32", "tf32"):
            return (f"attention={c.attention} multiplies in 16 bits on a GPU, and with precision={c.precision} attention is in "
                    "32: set attention=default, or precision=bf16")
        if h.capability < AMPERE:
            return too_old(f"attention={c.attention}", AMPERE, h, "attention=default or efficient")
    if c.kernels == "hand" and h.capability < AMPERE:
        return too_old("kernels=hand", AMPERE, h, "kernels=pytorch")
    least = RECIPES.get(c.fp8.recipe, 0.0)
    if c.precision == "fp8" and c.fp8.by == "te" and h.capability < least:
        return too_old(f"fp8.recipe={c.fp8.recipe}", least, h, "fp8.recipe=delayed or current")
    return ""


def too_old(what: str, least: float, h: Hardware, instead: str) -> str:
    """The sentence for a GPU that lacks something."""
    return (f"{what} needs a GPU of compute capability {least:.1f} ({CHIPS[least]}) or more, and {h.name} has "
            f"{h.capability:.1f}: set {instead}")


def hopeless(c: Config) -> str:
    """Why no run takes a layout's sizes, whatever else of it varies; "" if one may."""
    return of_tensor(c) or of_batch(c) or (of_pipeline(c) if c.model.depth < c.parallel.pp else "")


def of_tensor(c: Config) -> str:
    """tp shares out heads, of queries and of keys and values, hidden units and the vocabulary, whole ones each."""
    m, tp = c.model, c.parallel.tp
    counts = {"heads": m.groups if isinstance(m, GPTConfig) else m.heads, "hidden units": hidden(m)}
    for what, count in counts.items():
        if count % tp:
            return f"parallel.tp={tp} does not divide the {count} {what}: choose a divisor of {count}"
    if isinstance(m, GPTConfig) and m.vocab % tp:
        return (f"parallel.tp={tp} does not divide the vocabulary of {m.vocab} tokens: pad it, with "
                f"model.vocab={m.vocab + -m.vocab % tp}")
    return ""


def of_context(c: Config) -> str:
    """all_to_all shares out over cp the heads that tp leaves; the other methods cut any number of tokens."""
    m, p = c.model, c.parallel
    heads = (m.groups if isinstance(m, GPTConfig) else m.heads) // p.tp
    if p.cp > 1 and p.context == "all_to_all" and heads % p.cp:
        return (f"parallel.context=all_to_all shares the {heads} heads that tp leaves over parallel.cp={p.cp}, which does not "
                "divide them: choose a divisor, or parallel.context=ring")
    return ""


def of_pipeline(c: Config) -> str:
    """Each chunk of each pipeline rank has a block at least; interleaved, a round has a micro-batch for each rank."""
    p, depth = c.parallel, c.model.depth
    if depth < p.pp * p.chunks:
        return (f"parallel.pp={p.pp} with parallel.chunks={p.chunks} needs {p.pp * p.chunks} blocks, but the model has {depth}: "
                "choose fewer")
    if p.chunks > 1 and micro_batches(c) < p.pp:
        return (f"parallel.schedule=interleaved needs as many micro-batches as parallel.pp={p.pp}, and there are "
                f"{micro_batches(c)}: choose a smaller train.micro_batch, or parallel.schedule=1f1b")
    return ""


def of_batch(c: Config) -> str:
    """Each data-parallel rank has equally many samples."""
    batch, dp = c.train.global_batch, max(c.parallel.dp, 1)
    if batch % dp:
        return f"parallel.dp={dp} does not divide train.global_batch={batch}: choose a divisor, or a multiple of {dp}"
    return ""


def of_fp8(c: Config) -> str:
    """A linear's two widths on a rank are multiples of 16."""
    if c.precision != "fp8" or c.fp8.by != "hand":
        return ""
    return odd_width(c.model, c.fp8, c.parallel.tp)


@lru_cache(maxsize=1024)
def odd_width(m: Model, fp8: FP8, tp: int) -> str:
    """The sentence for the first linear, of those not kept in bf16, that has a width on a rank which FP8 cannot multiply."""
    for linear, k, n in all_linears(m, tp):
        if not (k % MULTIPLE or n % MULTIPLE):
            continue
        names = (linear.replace("blocks.", f"blocks.{block}.") for block in range(m.depth)) if "blocks." in linear else [linear]
        if name := next((name for name in names if not fp8.keeps(name)), ""):
            return (f"precision=fp8 needs widths divisible by {MULTIPLE}, and with parallel.tp={tp} {name} maps {k} features to "
                    f"{n} on each rank: choose a smaller tp, or bf16")
    return ""


def all_linears(m: Model, tp: int) -> Iterator[tuple[str, int, int]]:
    """(name, inputs, outputs) on a rank of every linear of a model; those of a block, whose name has no number, stand for all."""
    for one in linears(m):
        yield one.name, one.k // (tp if one.cut == "row" else 1), one.n // (tp if one.cut == "column" else 1)
    if isinstance(m, GPTConfig):
        yield "head.proj", m.dim, m.vocab // tp
        return
    patch = (m.latent[0] if isinstance(m, DiTConfig) else m.channels) * m.patch**2
    yield "embed.proj", patch, m.dim
    yield "head.proj", m.dim, patch
    if isinstance(m, DiTConfig):
        yield "embed.time.up", Time.WAVES, m.dim
        yield "embed.time.down", m.dim, m.dim
        yield "head.ada", m.dim, 2 * m.dim // tp


def hidden(m: Model) -> int:
    """The MLP's width."""
    return m.hidden if isinstance(m, GPTConfig) else int(m.dim * m.mlp_ratio)


def micro_batches(c: Config) -> int:
    """Micro-batches of a step on each data-parallel rank."""
    share = c.train.global_batch // max(c.parallel.dp, 1)
    return math.ceil(share / (c.train.micro_batch or share)) if share else 0


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
