"""Validation rules for configurations: ranges of numbers, combinations of settings, divisibility of layouts.

    check(config)                        # raises `CourseError` with a cure; called when a configuration is loaded
    refusal(config)                      # "", or why no run accepts it, layout included; called when a run starts

These functions build no model, because the planner calls them for thousands of layouts. Surgery makes the same checks when it
splits a model of your own, which these rules do not know.
"""

import math
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from course.config.axes import AXES, check_ep, check_shard
from course.config.context_choice import context_method, efficient_refuses_groups
from course.models import DiTConfig, GPTConfig, ModelConfig, ViTConfig, family_of
from course.models.linears import linears_on_rank
from course.ops.number_formats import LOW_PRECISION
from course.utils.errors import CourseError

if TYPE_CHECKING:
    from course.config import FP8, Config, Parallel

TINY, PART = math.nextafter(0, 1), math.nextafter(1, 2)     # any number above 0; a fraction up to 1, included
# (least, included; end, excluded) -> keys. A tuple's numbers are checked one by one
NUMBERS = {
    (1, math.inf): "train.steps train.global_batch data.lead data.ahead parallel.pp "
                   "parallel.cp parallel.tp parallel.ep parallel.imbalance parallel.chunks model.top_k model.moe_every "
                   "model.vocab model.context model.dim model.depth model.heads "
                   "model.rope_factor model.rope_theta model.rope_context model.channels model.classes model.patch model.grid "
                   "model.latent",
    (0, math.inf): "log.every checkpoint.every checkpoint.keep "
                   "train.micro_batch train.eval_every train.stall_s train.threads parallel.dp parallel.bucket_mb data.workers "
                   "data.train_samples data.valid_samples optim.lr optim.min_lr optim.eps optim.momentum optim.weight_decay "
                   "optim.warmup optim.clip profile.steps profile.after model.kv_heads model.mlp_ratio model.mlp_width "
                   "model.loss_chunk model.vocab_used model.rope_low parallel.shard model.experts model.expert_width "
                   "model.head_dim model.shared_experts model.balance_loss model.z_loss model.balance_rate model.capacity_factor",
    (0, 1): "optim.betas optim.muon_momentum optim.ema model.dropout model.drop_path",
    (0, PART): "model.label_drop",                   # 1: every sample
    (TINY, math.inf): "model.norm_eps",
}


def check(config: "Config") -> "Config":
    """Raise `CourseError` for bad numbers or combinations. Returns the configuration, overlap=auto resolved for native FP8."""
    for key, name in (("preset", config.preset), ("log.name", config.log.name)):
        check_name(key, name)
    for section in ("data", "optim", "train", "parallel", "log", "profile", "checkpoint"):
        check_numbers(section, getattr(config, section))
    check_model(config.model)
    if not isinstance(config.model, ViTConfig) and config.data.source == "files" and config.data.loader != "native":
        what = {"gpt": "tokens", "dit": "latents"}[family_of(config.model)]
        raise CourseError(f"data.loader={config.data.loader} reads weather: for {what} set data.loader=native")
    if sorted(config.parallel.order.split("-")) != sorted(AXES):
        raise CourseError(f"parallel.order={config.parallel.order} must name {', '.join(AXES[:-1])} and "
                          f"{AXES[-1]} once each, such as {'-'.join(AXES)}")
    p = config.parallel
    if (p.chunks > 1) != (p.schedule == "interleaved" and p.pp > 1):
        raise CourseError(f"parallel.chunks={p.chunks} with parallel.schedule={p.schedule} and parallel.pp={p.pp}: interleaved "
                          "needs at least 2 chunks on each of several pipeline ranks, the other schedules 1")
    check_zero(config)
    check_experts(config)
    if isinstance(config.model, GPTConfig):
        check_groups(config.model, p)
        check_efficient(config.model, config)
    if config.precision == "fp8":
        if config.fp8.by == "native" and p.overlapped and p.overlap == "auto":
            config = replace(config, parallel=replace(p, overlap="none"))
        check_fp8(config)
    if config.stream == "narrow" and config.precision not in LOW_PRECISION:
        raise CourseError(f"stream=narrow is for 16-bit matmuls, and precision={config.precision} has none: use bf16, fp16 or "
                          "fp8, or stream=wide")
    if config.kernels == "triton" and config.precision == "fp8" and config.fp8.by == "te":
        raise CourseError("kernels=triton is for the course's own layers, and fp8.by=te puts Transformer Engine's in their "
                          "place, which have kernels of their own: use kernels=pytorch or fp8.by=native")
    if config.graphs:
        if p.pp > 1:
            raise CourseError("graphs=true cannot capture a pipeline, whose stages synchronize through the host: set "
                              "graphs=false or parallel.pp=1")
        if p.data == "ddp":
            raise CourseError("graphs=true captures the course's own data parallelism: use parallel.data=bucketed, not ddp")
    return config


def check_zero(config: "Config") -> None:
    """Raise `CourseError` for settings that a ZeRO stage cannot be combined with."""
    p = config.parallel
    if p.zero not in (0, 1, 2, 3):
        raise CourseError(f"parallel.zero={p.zero}: ZeRO has stages 0 (nothing is sharded), 1 (optimizer states), 2 (gradients, "
                          "too) and 3 (weights, too): use one of them")
    if p.data == "ddp" and (p.pp > 1 or p.zero):
        raise CourseError("parallel.data=ddp wraps a whole model and keeps whole optimizer states: with parallel.pp > 1 or "
                          "parallel.zero use parallel.data=bucketed")
    if p.data != "bucketed" and p.zero:
        raise CourseError(f"parallel.zero={p.zero} reduces gradients itself: use parallel.data=bucketed, not {p.data}")
    if p.zero < 2 and (p.shard or p.reshard_after != "forward" or p.reduce_in != "float32"):
        key = "shard" if p.shard else "reshard_after" if p.reshard_after != "forward" else "reduce_in"
        raise CourseError(f"parallel.{key}={getattr(p, key)} is for sharded gradients and weights: set parallel.zero=2 or 3, or "
                          f"leave parallel.{key} out")
    if p.zero == 2 and p.reshard_after != "forward":
        raise CourseError(f"parallel.reshard_after={p.reshard_after} says when whole weights are freed, and parallel.zero=2 "
                          "keeps them: set parallel.zero=3, or leave it out")
    if p.dp:                                        # else known when the ranks are
        check_shard(p.shard, p.dp * p.cp)
    if p.zero == 3 and config.precision == "fp8" and config.fp8.by == "te":
        raise CourseError("fp8.by=te keeps copies of the weights that parallel.zero=3 frees: use parallel.zero=2, or "
                          "fp8.by=native")


def check_experts(config: "Config") -> None:
    """Raise `CourseError` for experts that a layout cannot spread, and for settings that they cannot be combined with."""
    m, p = config.model, config.parallel
    if not isinstance(m, GPTConfig) or not m.experts:
        if p.ep > 1:
            raise CourseError(f"parallel.ep={p.ep} spreads experts, and this model has none: set model.experts of a GPT, or "
                              "parallel.ep=1")
        return
    if m.experts % p.ep:
        raise CourseError(f"parallel.ep={p.ep} does not divide model.experts={m.experts}: choose a divisor of {m.experts}")
    if p.dp:                                        # else known when the ranks are
        check_ep(p.ep, p.dp * p.cp)
    if p.ep > 1 and p.data == "ddp":
        raise CourseError("parallel.data=ddp averages all gradients over the same ranks, and experts over fewer: use "
                          "parallel.data=bucketed")
    if p.dispatch == "gather" and p.cp > 1:
        raise CourseError("parallel.dispatch=gather gathers whole samples, and parallel.cp cuts them: use "
                          "parallel.dispatch=all_to_all")
    if config.graphs and ((p.ep > 1 and p.dispatch != "gather") or config.precision not in ("bf16", "fp8")):
        raise CourseError("graphs=true needs sizes that are known before the step, and tokens choose their experts during it: "
                          "set graphs=false, or parallel.dispatch=gather and precision=bf16, where they stay on the GPU")
    if config.kernels == "triton":
        raise CourseError("kernels=triton has no kernels for experts: use kernels=pytorch")
    if config.precision == "fp8" and config.fp8.by == "te":
        raise CourseError("fp8.by=te has no module for experts: use fp8.by=native, which leaves experts in bf16")


LARGEST = {"model": 2**26}                           # largest integer in a section; else 2**53: doubles skip integers above it


@lru_cache(maxsize=1024)                            # the planner checks thousands of configurations that share sections
def check_numbers(section: str, values: Any) -> None:
    """Raise `CourseError` if a number of a section is outside its `NUMBERS` range, or NaN."""
    for name, least, end in limits(section):
        value = getattr(values, name, ())           # no kind of model has all keys of `model`
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and number > LARGEST.get(section, 2**53):
                raise CourseError(f"{section}.{name}={number} is too large: use a smaller number")
            if number < 0 == least:
                raise CourseError(f"{section}.{name}={number} is negative: use 0 or more")
            if math.isnan(number) or number == math.inf:
                what = "infinite" if number == math.inf else "not a number"
                raise CourseError(f"{section}.{name}={number} is {what}: use a finite number")
            if not least <= number < end:
                lowest = "more than 0" if least == TINY else f"at least {least}"
                highest = {1: " and less than 1", PART: " and at most 1"}.get(end, "")
                raise CourseError(f"{section}.{name}={number} must be {lowest}{highest}")


@cache
def limits(section: str) -> list[tuple[str, float, float]]:
    """(name, least, end) of each limited number in a section."""
    keys = [(key.split("."), least, end) for (least, end), words in NUMBERS.items() for key in words.split()]
    return [(name, least, end) for (owner, name), least, end in keys if owner == section]


def check_name(key: str, name: str) -> None:
    """Raise `CourseError` if a name is not the name of a single folder."""
    if not name:
        raise CourseError(f"{key} is empty, and it names a folder: give a name, such as {key}=first")
    if name in (".", "..") or "/" in name or "\\" in name:
        raise CourseError(f"{key}={name} cannot name a folder: leave out slashes, and use more than dots; "
                          "log.dir says where runs are")


MODULATION = ("embed.time.up", "embed.time.down", "blocks.0.ada", "head.ada")      # DiT linears with one row per sample


def check_fp8(config: "Config") -> None:
    """Raise `CourseError` for settings that FP8 cannot be combined with."""
    f, p = config.fp8, config.parallel
    if f.history < 1 or f.margin < 0:
        raise CourseError(f"fp8.history={f.history} must be at least 1, fp8.margin={f.margin} at least 0")
    if f.by == "native" and f.recipe not in ("delayed", "current"):
        raise CourseError(f"fp8.recipe={f.recipe} is Transformer Engine's: set fp8.by=te, or fp8.recipe=delayed or current")
    if f.by == "native" and p.overlapped:
        raise CourseError(f"precision=fp8 multiplies whole tensors, not the pieces of parallel.overlap={p.overlap}: "
                          "set parallel.overlap=none")
    if f.by == "te" and p.tp > 1 and p.sp:
        raise CourseError("fp8.by=te gathers along a tensor's first dim, and tokens are the second here: set parallel.sp=false, "
                          "or fp8.by=native")
    if f.by == "te" and p.pp > 1:
        raise CourseError(f"fp8.by=te does not support pipelines: use fp8.by=native with parallel.pp={p.pp}")
    if f.by == "te" and config.train.recompute != "none":
        raise CourseError(f"fp8.by=te would record its scales twice with train.recompute={config.train.recompute}: "
                          "use fp8.by=native, or train.recompute=none")
    m = config.model
    how = context_method(config)
    if isinstance(m, GPTConfig) and p.cp > 1 and how != "all_to_all" and m.context % (2 * p.cp):
        raise CourseError(f"model.context={m.context} is padded to a multiple of {2 * p.cp} with parallel.cp={p.cp} and "
                          f"parallel.context={how}, and padding would change FP8's scales: change model.context, or set "
                          "parallel.context=all_to_all")
    cast = [name for name in MODULATION if not f.keeps(name)]
    if isinstance(m, DiTConfig) and p.cp > 1 and cast:
        raise CourseError(f"fp8.keep must name {cast[0]} with parallel.cp={p.cp}: it acts once per sample, so each rank has a "
                          "part of its gradient, and parts rounded to FP8 do not add up to the whole")
    if f.by == "te" and isinstance(m, GPTConfig) and (m.norm == "rms" or m.mlp == "swiglu" or m.groups != m.heads or not m.bias
                                                      or m.head_dim or m.qk_norm):
        raise CourseError("fp8.by=te supports only GPT-2's block: with model.norm=rms, mlp=swiglu, kv_heads, head_dim, "
                          "qk_norm or bias=false use fp8.by=native")
    if f.by == "te" and f.recipe == "delayed" and config.compile:
        raise CourseError("Transformer Engine's delayed recipe does not work inside torch.compile: set compile=false, "
                          "fp8.recipe=current or fp8.by=native")


def check_gpt(c: GPTConfig) -> None:
    """Raise `CourseError` if a GPT's heads, vocabulary, rotary settings or experts are inconsistent."""
    if c.heads % c.groups:
        raise CourseError(f"model.heads={c.heads} is not divisible by model.kv_heads={c.kv_heads}, each of which serves as many "
                          "queries: change one of them")
    if c.vocab_used > c.vocab:
        raise CourseError(f"model.vocab_used={c.vocab_used} is more than model.vocab={c.vocab}, which includes padding: make "
                          "model.vocab larger")
    if not c.rope_low < c.rope_high < math.inf:
        raise CourseError(f"model.rope_high={c.rope_high} must be more than model.rope_low={c.rope_low}: pairs that turn more "
                          "often than the first are fast, and those below the second are slow")
    if c.position == "rotary" and c.head_width % 2:
        raise CourseError(f"model.position=rotary turns pairs of features, and heads of {c.head_width} have one left over: "
                          f"change {'model.head_dim' if c.head_dim else 'model.dim or model.heads'}")
    if c.experts and c.top_k > c.experts:
        raise CourseError(f"model.top_k={c.top_k} is more than model.experts={c.experts}: choose at most {c.experts}")
    if c.experts and c.moe_every > c.depth:
        raise CourseError(f"model.moe_every={c.moe_every} is more than model.depth={c.depth}, so no block has experts: choose at "
                          f"most {c.depth}")


def check_groups(c: GPTConfig, p: "Parallel") -> None:
    """Raise `CourseError` if the ranks that share key-value heads do not divide their number."""
    ulysses = p.cp if p.context == "all_to_all" else 1
    if c.kv_heads and c.kv_heads % (p.tp * ulysses):
        who = f"parallel.tp={p.tp}" + (f" times parallel.cp={p.cp} of context=all_to_all" if ulysses > 1 else "")
        raise CourseError(f"{who} does not divide model.kv_heads={c.kv_heads} (of model.heads={c.heads}), and each rank needs "
                          f"whole ones: choose divisors of {c.kv_heads}" + (", or parallel.context=ring" if ulysses > 1 else ""))


def check_efficient(c: GPTConfig, config: "Config") -> None:
    """Raise `CourseError` for attention=efficient with grouped heads in 16 bits.

    PyTorch's kernel does not support groups, and in 16 bits `attend` does not expand them. Ring attention uses other kernels
    (course/parallel/context_parallel/block_attention.py).
    """
    p = config.parallel
    if efficient_refuses_groups(config) and not (p.cp > 1 and context_method(config) == "ring"):
        raise CourseError(f"attention=efficient does not support grouped heads in {config.precision}, and model.kv_heads="
                          f"{c.kv_heads} with model.heads={c.heads} groups them: use attention=default, cudnn or flash")


def check_model(c: ModelConfig) -> None:
    """Raise `CourseError` if a model's numbers are out of range, or its widths and sides do not divide."""
    check_numbers("model", c)
    own = isinstance(c, GPTConfig) and c.head_dim    # heads that do not share the model's width
    if c.dim % c.heads and not own:
        raise CourseError(f"model.dim={c.dim} is not divisible by model.heads={c.heads}: change one of them"
                          + (", or set model.head_dim" if isinstance(c, GPTConfig) else ""))
    if isinstance(c, DiTConfig) and c.dim % 4:
        raise CourseError(f"model.dim={c.dim} is not divisible by 4, for cosine and sine of row and column: choose one that is")
    if isinstance(c, GPTConfig):
        check_gpt(c)
        return
    what, (height, width) = ("grid", c.grid) if isinstance(c, ViTConfig) else ("latent", c.latent[1:])
    if height % c.patch or width % c.patch:
        raise CourseError(f"the {what} {height}x{width} is not divisible by model.patch={c.patch}: "
                          "choose a patch that divides both sides")


# ---- layouts

MULTIPLE = 16                                       # cuBLAS needs FP8 widths divisible by this (course/fp8/native.py)


def refusal(config: "Config") -> str:
    """A sentence that says why no run accepts this configuration, or "". parallel.dp=0 counts as 1."""
    try:
        check(config)
    except CourseError as error:
        return str(error)
    rules = tensor_rule, context_rule, pipeline_rule, batch_rule, fp8_rule
    return next((sentence for rule in rules if (sentence := rule(config))), "")


def tensor_rule(c: "Config") -> str:
    """tp must divide the key-value heads, the hidden units and a GPT's vocabulary. Returns a sentence, or ""."""
    m, tp = c.model, c.parallel.tp
    counts = {"heads": m.groups, "hidden units": m.hidden}
    if isinstance(m, GPTConfig) and m.experts:
        counts["hidden units of an expert"] = m.expert_hidden
    for what, count in counts.items():
        if count % tp:
            return f"parallel.tp={tp} does not divide the {count} {what}: choose a divisor of {count}"
    if isinstance(m, GPTConfig) and m.vocab % tp:
        return (f"parallel.tp={tp} does not divide the vocabulary of {m.vocab} tokens: pad it, with "
                f"model.vocab={m.vocab + -m.vocab % tp}")
    return ""


def context_rule(c: "Config") -> str:
    """With all_to_all, cp must divide the heads of a tp rank. The other methods split any number of tokens."""
    m, p = c.model, c.parallel
    heads = m.groups // p.tp
    if p.cp > 1 and p.context == "all_to_all" and heads % p.cp:
        return (f"parallel.context=all_to_all shares the {heads} heads that tp leaves over parallel.cp={p.cp}, which does not "
                "divide them: choose a divisor, or parallel.context=ring")
    return ""


def pipeline_rule(c: "Config") -> str:
    """Each chunk of each pipeline rank needs a block. The interleaved schedule needs at least pp micro-batches."""
    p, depth = c.parallel, c.model.depth
    if depth < p.pp * p.chunks:
        return (f"parallel.pp={p.pp} with parallel.chunks={p.chunks} needs {p.pp * p.chunks} blocks, but the model has {depth}: "
                "choose fewer")
    if p.chunks > 1 and micro_batches(c) < p.pp:
        return (f"parallel.schedule=interleaved needs as many micro-batches as parallel.pp={p.pp}, and there are "
                f"{micro_batches(c)}: choose a smaller train.micro_batch, or parallel.schedule=1f1b")
    return ""


def batch_rule(c: "Config") -> str:
    """dp must divide the global batch."""
    batch, dp = c.train.global_batch, max(c.parallel.dp, 1)
    if batch % dp:
        return f"parallel.dp={dp} does not divide train.global_batch={batch}: choose a divisor, or a multiple of {dp}"
    return ""


def fp8_rule(c: "Config") -> str:
    """With native FP8, both widths of a linear on a rank must be multiples of 16."""
    if c.precision != "fp8" or c.fp8.by != "native":
        return ""
    return odd_width(c.model, c.fp8, c.parallel.tp)


@lru_cache(maxsize=1024)
def odd_width(m: ModelConfig, fp8: "FP8", tp: int) -> str:
    """The sentence for the first FP8 linear with a width on a rank that FP8 cannot multiply, or ""."""
    for linear, k, n in linears_on_rank(m, tp):
        if not (k % MULTIPLE or n % MULTIPLE):
            continue
        names = (linear.replace("blocks.", f"blocks.{block}.") for block in range(m.depth)) if "blocks." in linear else [linear]
        if name := next((name for name in names if not fp8.keeps(name)), ""):
            return (f"precision=fp8 needs widths divisible by {MULTIPLE}, and with parallel.tp={tp} {name} maps {k} features to "
                    f"{n} on each rank: choose a smaller tp, or bf16")
    return ""


def micro_batches(c: "Config") -> int:
    """Micro-batches per step on each data-parallel rank."""
    share = c.train.global_batch // max(c.parallel.dp, 1)
    return num_microbatches(share, c.train.micro_batch) if share else 0


def num_microbatches(samples: int, size: int) -> int:
    """How many micro-batches of `size` samples (0: all) hold this many samples."""
    return -(-samples // (size or samples))
