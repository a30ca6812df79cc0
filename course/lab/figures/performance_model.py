"""Figures of lesson 17: predictions compared with measurements, a step's time by part, and a plan with sliders."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from typing import Any

from matplotlib.figure import Figure

from course.bench import recorded_steps
from course.config import Config, context_choice, load, validation
from course.lab.figures.style import MARKS, label, name_rows, panel
from course.models import DiTConfig, GPTConfig, ViTConfig
from course.planner import hardware as presets
from course.planner import peak_memory, step_time
from course.planner.hardware import Hardware
from course.planner.other_implementations import Workload16Bit, workload_as
from course.planner.peak_memory import Memory
from course.planner.search_space import FREE
from course.planner.step_time import Time
from course.utils.colors import AMBER, AXES, BLUE, GRAY, KERNELS, MEMORY, ORANGE, STEP
from course.utils.errors import CourseError

# pieces of a bar: label, attributes to add up, color, hatch
TIME = (("matmuls", ("matmul",), KERNELS["matmul"], ""), ("attention", ("attention",), KERNELS["attention"], ""),
        ("bound by memory", ("memory",), KERNELS["other"], ""), ("recomputed", ("recompute",), KERNELS["matmul"], "///"),
        ("optimizer", ("optimizer",), KERNELS["optimizer"], ""), ("tp", ("tensor",), AXES["tp"], ""),
        ("cp", ("context",), AXES["cp"], ""), ("dp", ("data",), AXES["dp"], ""), ("ep", ("dispatch",), AXES["ep"], "..."),
        ("pipeline", ("send", "bubble"), AXES["pp"], ""), ("host, loader", ("launch", "loading"), STEP["launch"], ""))
BYTES = (("weights", ("parameters", "copies"), MEMORY["weights"], ""), ("gradients", ("gradients",), MEMORY["gradients"], ""),
         ("optimizer states", ("states", "average"), MEMORY["optimizer states"], ""),
         ("activations", ("activations",), MEMORY["activations"], ""),
         ("logits, batch", ("logits", "batch"), MEMORY["logits"], ""),
         ("work space", ("buffers", "workspace"), MEMORY["workspace"], ""), ("reserve", ("reserve",), MEMORY["reserve"], ""))
Kinds = tuple[tuple[str, tuple[str, ...], str, str], ...]


# ---- predictions and measurements

def scatter(points: Mapping[str, Sequence[tuple[float, float]]], unit: str, title: str = "", band: float = 0.1) -> Figure:
    """Predicted / measured over measured, for groups of (measured, predicted). In the gray band errors are below `band`."""
    figure, axis = panel(7.5, 4.2)
    axis.axhspan(1 - band, 1 + band, color=GRAY, alpha=0.2, label=f"within {band:.0%}")
    axis.axhline(1, color=GRAY, linewidth=1)
    for (name, group), (mark, color) in zip(points.items(), cycle([*MARKS, ("X", AMBER), ("*", "black")])):
        axis.plot([x for x, _ in group], [y / x for x, y in group], mark, color=color, label=f"{name} ({len(group)})",
                  markersize=6, markeredgecolor="white", markeredgewidth=0.5)
    axis.set_xscale("log")
    label(axis, x=f"measured, {unit}", y="predicted / measured", grid="both")
    figure.legend(loc="outside lower center", ncol=4, fontsize=8)
    axis.set_title(title, fontsize=10)
    return figure


def errors(groups: Mapping[str, Mapping[str, float]], title: str = "", limit: float = 0.25) -> Figure:
    """Prediction errors, group -> case -> error, as dots; errors of `limit` or more are orange squares."""
    cases = [(group, name, error) for group, found in groups.items() for name, error in found.items()]
    figure, axis = panel(8.5, 0.2 * len(cases) + 1.3)
    axis.axvspan(-100 * limit, 100 * limit, color=GRAY, alpha=0.15)
    axis.axvline(0, color=GRAY, linewidth=1)
    for row, (_, _, error) in enumerate(cases):
        color, mark = (ORANGE, "s") if abs(error) >= limit else (BLUE, "o")
        axis.plot([0, 100 * error], [row, row], color=color, linewidth=1)
        axis.plot(100 * error, row, mark, color=color, markersize=5)
        axis.text(100 * error + (2 if error >= 0 else -2), row, f"{error:+.0%}", va="center", fontsize=7,
                  ha="left" if error >= 0 else "right")
    axis.set_yticks(range(len(cases)), [f"{group}: {name}" for group, name, _ in cases], fontsize=7)
    axis.set_ylim(len(cases) - 0.5, -0.5)
    widest = max(100 * limit, *(100 * abs(error) for *_, error in cases))
    axis.set_xlim(-1.2 * widest, 1.2 * widest)
    label(axis, x=f"predicted less measured, % of measured (gray: less than {limit:.0%})", title=title)
    return figure


def times(steps: Mapping[str, Time], measured: Mapping[str, float] | None = None, title: str = "") -> Figure:
    """A bar per predicted step, split by where the time goes; `measured` times in ms are diamonds."""
    figure, axis = panel(9, 0.5 * len(steps) + 1.9)
    bars(axis, {name: pieces(TIME, time, 1e3) for name, time in steps.items()}, TIME, "ms", title)
    for row, name in enumerate(steps):
        if measured and name in measured:
            axis.plot(measured[name], row, "D", color="black", markeredgecolor="white", label="measured" if not row else None)
    handles = {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}      # each label once
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncol=6, fontsize=8)
    return figure


def pieces(kinds: Kinds, found: Time | Memory, factor: float) -> dict[str, float]:
    """The pieces of a bar, label -> size, without pieces below 0.1% of the total."""
    sizes = {word: factor * sum(getattr(found, part) for part in parts) for word, parts, _, _ in kinds}
    least = 1e-3 * sum(sizes.values())
    return {word: size for word, size in sizes.items() if size > least}


def bars(axis: Any, found: Mapping[str, Mapping[str, float]], kinds: Kinds, unit: str, title: str = "") -> None:
    """A horizontal bar per name on an axis, in the colors of `kinds`, with its total."""
    looks = {word: (color, hatch) for word, _, color, hatch in kinds}
    for row, parts in enumerate(found.values()):
        start = 0.0
        for word, size in parts.items():
            color, hatch = looks[word]
            axis.barh(row, size, left=start, height=0.7, color=color, hatch=hatch, edgecolor="white", label=word)
            start += size
        axis.text(start, row, f" {start:,.3g} {unit}" if start < 1000 else f" {start:,.0f} {unit}", va="center", fontsize=9)
    name_rows(axis, found, size=9)
    axis.set_xlim(0, 1.2 * max(sum(parts.values()) for parts in found.values()))
    axis.set_xlabel(unit)
    axis.set_title(title, fontsize=10, loc="left")


# ---- the widget

@dataclass(frozen=True)
class Choice:
    """A model of the widget: a preset, settings, and the kind of recorded step to compare with."""

    preset: str
    settings: tuple[str, ...]
    kind: str = "step"


FAST = ("compile=true", "stream=narrow")
STACK = ("model.dim=4096", "model.heads=32", "model.vocab=128", "model.context=4096", "stream=narrow")
MODELS = {
    "GPT 1.3B": Choice("gpt-1.3b", FAST), "GPT 124M": Choice("gpt-124m", FAST), "GPT 350M": Choice("gpt-350m", FAST),
    "GPT 7B": Choice("gpt-7b", FAST),
    "ViT, width 1024": Choice("vit-mp", ("data.source=mock", "compile=true")),
    "ViT, width 384": Choice("vit-short", ("data.source=mock", *FAST)),
    "DiT-XL/2, 256 px": Choice("dit-xl", FAST), "DiT-XL/2, 512 px": Choice("dit-xl-512", FAST), "DiT 7B": Choice("dit-7b", FAST),
    "8 layers of 4096, no update": Choice("gpt-124m", ("model.depth=8", *STACK), "stack"),
    "16 layers of 4096, no update": Choice("gpt-124m", ("model.depth=16", *STACK), "stack")}
OWN = "its own"                                      # the preset's sequence length
SP = {"no": ["parallel.sp=false"], "sp": ["parallel.sp=true", "parallel.overlap=none"],
      "sp, overlapped": ["parallel.sp=true", "parallel.overlap=nccl"]}          # measured for more models than symmetric memory
SLIDERS: dict[str, list[Any]] = {
    "model": list(MODELS), "batch": [2**n for n in range(13)], "micro_batch": [2**n for n in range(9)],
    "sequence": [OWN, *(2**n for n in range(8, 18))], "gpus": [2**n for n in range(15)], "tp": [1, 2, 4, 8],
    "sp": list(SP), "cp": [1, 2, 4, 8], "pp": [1, 2, 4, 8, 16], "zero": [0, 1],
    "recompute": ["none", "selective", "full"], "precision": ["bf16", "fp8", "fp16", "tf32"], "hardware": presets.presets()}
START = {"batch": 8, "micro_batch": 8, "hardware": "h200"}


def config_of(model: str, batch: int, micro_batch: int, sequence: int | str, gpus: int, tp: int, sp: str, cp: int, pp: int,
              zero: int, recompute: str, precision: str) -> Config:
    """The configuration of the sliders, with dp from the other axes. Raises `CourseError` if a run would refuse it."""
    choice = MODELS[model]
    if gpus % (tp * cp * pp):
        raise CourseError(f"tp={tp} x cp={cp} x pp={pp} = {tp * cp * pp} does not divide {gpus} GPUs: choose smaller axes, or "
                          "more GPUs")
    dp = gpus // (tp * cp * pp)
    settings = [setting for setting in choice.settings if not (precision == "tf32" and setting == "stream=narrow")]
    config = load(choice.preset, [*settings, *tokens_of(choice, sequence), f"train.global_batch={batch}",
                                  f"train.micro_batch={micro_batch}", f"train.recompute={recompute}", f"precision={precision}",
                                  f"parallel.dp={dp}", f"parallel.tp={tp}", f"parallel.cp={cp}", f"parallel.pp={pp}",
                                  f"parallel.zero={zero * (dp * cp > 1)}", *(SP[sp] if tp > 1 else [])])
    if sentence := validation.refusal(config):
        raise CourseError(sentence)
    return config


def tokens_of(choice: Choice, sequence: int | str) -> list[str]:
    """Settings for a sequence of `sequence` tokens. Raises `CourseError` if no latent or field has that many patches."""
    if sequence == OWN:
        return []
    model, tokens = load(choice.preset, ["precision=bf16", *choice.settings]).model, int(sequence)
    if isinstance(model, GPTConfig):
        return [f"model.context={tokens}"]
    square = tokens if isinstance(model, DiTConfig) else tokens // 2    # latents are square, fields twice as wide as high
    side = round(square**0.5)
    if side * side != square:
        raise CourseError(f"{tokens} tokens are no {'square of' if isinstance(model, DiTConfig) else 'two squares of'} patches: "
                          "choose half or twice as many")
    high = side * model.patch
    if isinstance(model, DiTConfig):
        return [f"model.latent=[{model.latent[0]},{high},{high}]"]
    return [f"model.grid=[{high},{2 * high}]"]


def time_of(config: Config, chosen: Hardware, kind: str) -> Time:
    """The predicted step; for a stack, as `course bench` measures it: in 16 bits and without the optimizer."""
    if kind == "stack":
        return replace(step_time.time_of(workload_as(Workload16Bit, config, chosen)), optimizer=0.0)
    return step_time.predict(config, chosen)


@cache
def measured_steps() -> dict[tuple[Any, ...], list[recorded_steps.Step]]:
    """The recorded steps, by `signature`."""
    found: dict[tuple[Any, ...], list[recorded_steps.Step]] = {}
    for step in recorded_steps.steps():
        found.setdefault(signature(step.config, step.kind), []).append(step)
    return found


def signature(c: Config, kind: str) -> tuple[Any, ...]:
    """A key for configurations with the same step time: it leaves out settings without effect in their layout."""
    p, t = c.parallel, c.train
    share = t.global_batch // (p.dp or 1)
    return (kind, c.model, t.global_batch, min(t.micro_batch or share, share), t.recompute, c.precision, c.fp8.by, c.compile,
            c.graphs, c.kernels, c.attention, c.optim.ema > 0, c.stream if c.precision != "tf32" else "",
            c.data.source if isinstance(c.model, ViTConfig) else "", p.dp, p.tp, p.cp, p.pp,
            (p.sp, p.overlap if p.sp else "") if p.tp > 1 else "", context_choice.context_method(c) if p.cp > 1 else "",
            (p.schedule, p.chunks) if p.pp > 1 else "", (p.zero, p.data, p.bucket_mb) if p.dp * p.cp > 1 else "")


def explore_step(model: str, hardware: str, **values: Any) -> Figure:
    """The widget's figure: memory and time of a configuration by part, measurements if recorded, and scaling."""
    chosen = presets.load(hardware)
    choice, config = MODELS[model], config_of(model, **values)
    chosen.peak(config.precision)
    bytes_, seconds = peak_memory.predict(config), time_of(config, chosen, choice.kind)
    seen = measured_steps().get(signature(config, choice.kind), []) if hardware == "h200" else []
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1.35, 1])       # type: ignore[misc]
    upper, lower = left.subplots(2, 1)
    fits = bytes_.total <= chosen.room(FREE)            # the same rule as `course plan`
    bars(upper, {"": pieces(BYTES, bytes_, 1e-9)}, BYTES, "GB",
         f"memory of the fullest GPU: {'fits' if fits else 'DOES NOT FIT'} with {FREE:.0%} free (fullest: {bytes_.moment})")
    upper.axvline(chosen.room(FREE) / 1e9, color="black", linestyle="--",
                  label=f"{1 - FREE:.0%} of {chosen.memory / 1e9:.0f} GB")
    upper.set_xlim(0, 1.2 * max(bytes_.total, chosen.memory) / 1e9)
    bars(lower, {"": pieces(TIME, seconds, 1e3)}, TIME, "ms", f"time of a step: MFU {seconds.mfu:.0%}, "
         f"{seconds.samples_per_s:,.4g} samples/s")
    for axis, value in ((upper, "memory_gb"), (lower, "ms")):
        for number, step in enumerate(seen):
            axis.plot(getattr(step, value), 0, "D", color="black", markeredgecolor="white", markersize=8,
                      label="measured" if not number else None)
        axis.set_ylim(0.45, -1.0)                    # space for the legend above the bar
        axis.set_yticks([])
        axis.legend(loc="upper left", ncol=5, fontsize=8, frameon=False, columnspacing=1, handlelength=1.2)
    scaling(right.subplots(), model, chosen, choice.kind, values, seen)
    figure.suptitle(f"{model} on {values['gpus']} x {hardware}, dp {config.parallel.dp}"
                    + (f"; measured {', '.join(f'{step.ms:.0f} ms' for step in seen)}" if seen else ""), fontsize=10)
    return figure


def scaling(axis: Any, model: str, chosen: Hardware, kind: str, values: Mapping[str, Any],
            seen: Sequence[recorded_steps.Step]) -> None:
    """Draw strong scaling: samples/s of the same batch on 1, 2, 4, ... GPUs, with dp from the other axes."""
    rates: dict[int, tuple[float, bool]] = {}
    for gpus in [2**n for n in range(15)]:
        try:
            config = config_of(model, **{**values, "gpus": gpus})
        except CourseError:
            continue
        fits = peak_memory.predict(config).total <= chosen.room(FREE)
        rates[gpus] = time_of(config, chosen, kind).samples_per_s, fits
    first = min(rates)
    counts = list(rates)
    axis.loglog(counts, [rates[first][0] * n / first for n in counts], color=GRAY, linestyle=":", label="ideal")
    axis.loglog(counts, [rates[n][0] for n in counts], color=BLUE, label="predicted")
    for fits, face, word in ((True, BLUE, "fits"), (False, "white", "does not fit")):
        some = [n for n in counts if rates[n][1] == fits]
        axis.plot(some, [rates[n][0] for n in some], "o", color=BLUE, markerfacecolor=face, label=word if some else None)
    now = values["gpus"]
    axis.plot(now, rates[now][0], "o", markersize=14, markerfacecolor="none", color=ORANGE, label="chosen")
    for number, step in enumerate(seen):
        axis.plot(now, 1e3 * step.config.train.global_batch / step.ms, "D", color="black", markeredgecolor="white",
                  label="measured" if not number else None)
    axis.set_xticks(counts, [str(n) for n in counts], fontsize=8)
    axis.minorticks_off()
    label(axis, x="GPUs", y="samples/s")
    axis.set_title("the same batch on more GPUs", fontsize=10, loc="left")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
