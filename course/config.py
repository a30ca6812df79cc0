"""Configuration: frozen dataclasses hold the defaults, YAML presets change some, `key=value` the rest.

    config = load("vit-short", ["train.steps=64", "optim.lr=1e-3"])

A preset is a file in `course/configs` or a path of your own; `base:` in it names one to start from: a preset by its name, or a
file by its path, seen from the folder of the file that names it.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import ConfigDict, Discriminator, Tag, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from course.errors import CourseError
from course.files import atomic
from course.models import DiTConfig, GPTConfig, ViTConfig
from course.precision import LOW

PRESETS = Path(__file__).parent / "configs"
KINDS: dict[str, type] = {"vit": ViTConfig, "gpt": GPTConfig, "dit": DiTConfig}
MOST = 100_000                                       # values in a YAML file that anybody writes
# which numbers, each one of a tuple, are from where, included, to where, not included
NUMBERS = {
    (1, math.inf): "train.steps train.global_batch data.lead data.ahead log.every checkpoint.every checkpoint.keep parallel.pp "
                   "parallel.cp parallel.tp parallel.chunks model.vocab model.context model.dim model.depth model.heads "
                   "model.rope_factor model.rope_context model.channels model.classes model.patch model.grid model.latent",
    (0, math.inf): "train.micro_batch train.eval_every train.stall_s train.threads parallel.dp parallel.bucket_mb data.workers "
                   "data.train_samples data.valid_samples optim.lr optim.min_lr optim.eps optim.momentum optim.weight_decay "
                   "optim.warmup optim.clip profile.steps profile.after model.kv_heads model.mlp_ratio model.mlp_width "
                   "model.loss_chunk model.vocab_used model.rope_low",
    (0, 1): "optim.betas optim.ema model.dropout model.drop_path",
}
T = TypeVar("T")


def kind_of(model: Any) -> str:
    """The kind of a model's configuration, of plain values or built: a ViT if it does not say."""
    return str(model.get("kind", "vit")) if isinstance(model, Mapping) else getattr(model, "kind", "vit")


Model = Annotated[Annotated[ViTConfig, Tag("vit")] | Annotated[GPTConfig, Tag("gpt")] | Annotated[DiTConfig, Tag("dit")],
                  Discriminator(kind_of)]


@dataclass(frozen=True)
class Data:
    """What a run learns from, and who reads it."""

    source: Literal["files", "mock"] = "files"      # mock: random batches made once on the device, to measure speed
    path: str = "data/era5"                         # a folder laid out as data/README.md says
    lead: int = 1                                   # forecast step, in entries of six hours
    loader: Literal["native", "threads", "dali", "dali_numpy"] = "native"   # what reads: the same samples, bit for bit
    workers: int = 4                                # processes (native, dali) or threads that read; native's 0: no other process
    ahead: int = 2                                  # batches that threads and DALI read before they are asked for
    train_samples: int = 0                          # use the first so many; 0: all
    valid_samples: int = 0


@dataclass(frozen=True)
class Optim:
    """The optimizer, its learning rate over the steps, and the average of the weights."""

    name: Literal["adam", "sgd"] = "adam"
    lr: float = 5e-4                                # the peak of the schedule
    betas: tuple[float, float] = (0.9, 0.999)       # adam's
    eps: float = 1e-8                               # adam's
    momentum: float = 0.0                           # sgd's
    weight_decay: float = 0.0                       # added to the gradient, as L2 regularisation
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup: int = 0                                 # steps of linear rise before the schedule
    min_lr: float = 0.0                             # where the cosine ends
    clip: float = 0.0                               # largest global gradient norm; 0: no clipping
    ema: float = 0.0                                # decay of the weights' moving average, such as 0.9999; 0: none


@dataclass(frozen=True)
class Train:
    """How long, in batches of what size, and what backward computes again."""

    steps: int = 22_000
    global_batch: int = 16                          # samples in one optimizer step, over all ranks
    micro_batch: int = 0                            # samples in one forward pass of one rank; 0: its whole share
    recompute: Literal["none", "selective", "full"] = "none"        # what of the forward pass backward computes again
    eval_every: int = 0                             # steps between validations; 0: only at the end
    seed: int = 0                                   # weights, data order, dropout
    device: Literal["auto", "cpu", "cuda"] = "auto"
    stall_s: float = 600.0                          # seconds that a step may take: then the run ends, and says which rank stalls;
                                                    # 0: never. Compiling, validating and saving may take 6 times that, or 60 s
    threads: int = 0                                # CPU threads for tensor operations; 0: PyTorch's choice


@dataclass(frozen=True)
class Parallel:
    """Over how many ranks each axis goes, and how each communicates."""

    pp: int = 1                                     # pipeline stages
    dp: int = 0                                     # data-parallel ranks; 0: what the other axes leave
    cp: int = 1                                     # context-parallel ranks
    tp: int = 1                                     # tensor-parallel ranks
    order: str = "pp-dp-cp-tp"                      # slowest first: the last axis joins neighbouring ranks
    sp: bool = False                                # sequence parallel: norms and residuals cut by tokens over tp
    overlap: Literal["none", "nccl", "symmetric"] = "nccl"  # with sp: how linears communicate beside their matmuls; symmetric:
                                                    # by copies into each other's memory, which leave the multiprocessors alone
    context: Literal["gather", "ring", "all_to_all"] = "ring"       # how attention works over cp
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"      # of a pipeline's passes
    data: Literal["naive", "bucketed", "ddp", "none"] = "bucketed"      # how gradients are averaged; none: not at all
    bucket_mb: float = 25.0                         # of gradients in one collective
    zero: bool = False                              # ZeRO-1: optimizer states cut over dp x cp
    chunks: int = 1                                 # of blocks on each pipeline rank; interleaved needs 2 or more

    @property
    def overlapped(self) -> bool:
        """Whether linears communicate beside their matmuls."""
        return self.tp > 1 and self.sp and self.overlap != "none"

    @property
    def symmetric(self) -> bool:
        """Whether they do so through each other's memory, for which tp's ranks must share a node."""
        return self.overlapped and self.overlap == "symmetric"


@dataclass(frozen=True)
class FP8:
    """Which scales and formats eight bits have."""

    by: Literal["hand", "te"] = "hand"              # course/fp8.py, or Transformer Engine behind the same seam
    recipe: Literal["delayed", "current", "block", "mxfp8"] = "delayed"     # where scales come from; block and mxfp8 by te alone
    history: int = 1024                             # delayed: steps whose largest magnitude decides; Transformer Engine's advice.
                                                    # It costs 4 bytes a step and tensor, and no time; 16 follows a drift sooner
    amax: Literal["max", "most_recent"] = "max"     # delayed: which of the history's amaxes decides, the largest or the newest
    margin: int = 0                                 # powers of two left free above that
    gradients: Literal["e5m2", "e4m3"] = "e5m2"     # e5m2 is the hybrid format; e4m3 everywhere shows what its range is for
    # linears that stay in bf16, by pattern: the first and the last (their errors meet no norm after them), and DiT's modulation,
    # whose input has a row a sample, too few to be worth a cast
    keep: tuple[str, ...] = ("embed.*", "head.*", "*.ada")


@dataclass(frozen=True)
class Log:
    """Where a run tells of itself, and how often."""

    dir: str = "runs"                               # a run lives in dir/preset/name
    name: str = "default"
    every: int = 10                                 # steps between lines
    tensorboard: bool = True


@dataclass(frozen=True)
class Profile:
    """Which steps PyTorch's profiler looks into."""

    steps: int = 0                                  # to look into with PyTorch's profiler; 0: none
    after: int = 10                                 # steps before these
    memory: bool = False                            # also who allocated what on the GPU, for pytorch.org/memory_viz


@dataclass(frozen=True)
class Checkpoint:
    """When a run is written down, and whether the next one of its name goes on from there."""

    every: int = 1000                               # steps between checkpoints; one is always written at the end
    keep: int = 3                                   # how many of the newest stay
    resume: bool = True                             # go on where the run of this name stopped
    same_data: bool = True                          # and only if none of the data files that it learned from is missing


@dataclass(frozen=True)
class Config:
    """All of a run: what `load` makes of a preset and overrides."""

    preset: str = "custom"                          # set by `load`: names the folder of the run
    model: Model = field(default_factory=ViTConfig)     # model.kind says which
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    parallel: Parallel = field(default_factory=Parallel)
    precision: Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"] = "tf32"
    stream: Literal["wide", "narrow"] = "wide"      # what flows between blocks: float32, or the 16 bits of the matmuls
    fp8: FP8 = field(default_factory=FP8)           # with precision=fp8
    log: Log = field(default_factory=Log)
    profile: Profile = field(default_factory=Profile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    attention: Literal["default", "cudnn", "flash", "efficient", "math"] = "default"     # see course/attention.py
    # what blocks do between their matmuls, and Adam: as PyTorch or its compiler does it, or by kernels written here, which are
    # in course/between.py, course/packed.py and course/adam.py
    kernels: Literal["pytorch", "hand"] = "pytorch"
    compile: bool = False                           # torch.compile, see course/compilation.py
    graphs: bool = False                            # capture the step in a CUDA graph

    @property
    def masters(self) -> bool:
        """Whether one data-parallel rank may keep its weights in 16 bits (`course/parallel/masters.py`): the optimizer has to
        write them, and no gradient is added to another, which would take float32."""
        t = self.train
        once = self.parallel.pp == 1 and (t.micro_batch == 0 or t.micro_batch >= t.global_batch)
        return self.kernels == "hand" and self.optim.name == "adam" and once


def load(preset: str, overrides: Iterable[str] = ()) -> Config:
    """The configuration of a preset (its name, or the path of a YAML file) with `key=value` overrides.

    Raises `CourseError` for an unknown preset or key, naming the nearest right one, and for a wrong value.
    """
    path = preset_path(preset)
    values = {"preset": path.stem, **read_preset(path)}
    return check(build(Config, merge(values, parse(overrides)), f"preset {path.stem}"))


def presets() -> list[str]:
    """The names of the presets that come with the course."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def preset_path(preset: str, folder: Path = Path()) -> Path:
    """Where a preset lies: a file of the user's if it ends in .yaml, else one of the course's. `CourseError` if there is none.

    folder: where relative paths begin.
    """
    if preset.endswith((".yaml", ".yml")):
        path = folder / preset
        if path.is_file():
            return path
        raise CourseError(f"there is no file {path}: give the path of a YAML file, or a preset ({', '.join(presets())})")
    if preset not in presets():
        raise CourseError(f"there is no preset {preset!r}{nearest(preset, presets())}; the presets are {', '.join(presets())}")
    return PRESETS / f"{preset}.yaml"


def read_preset(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values of a YAML file on top of those of its `base`. above: the files that name this one as theirs.

    Raises `CourseError` if one of them is no YAML of names and values, or bases lead in a circle.
    """
    values = reading(read_yaml(path, "`section:` and `key: value` lines"))
    base = values.pop("base", None)
    if base is None:
        return values
    origin, above = preset_path(str(base), path.parent), (*above, path.resolve())
    if origin.resolve() in above:
        raise CourseError(f"{path} names {base} as its base, which leads back to it: remove that line")
    return merge(read_preset(origin, above), values)


def read_yaml(path: Path, wanted: str) -> dict[str, Any]:
    """The plain values of a YAML file. wanted: what it should hold, for the sentence if it does not."""
    try:
        values = plain_yaml(path.read_text()) or {}
    except (ValueError, OSError) as error:
        raise CourseError(f"{path} is not readable YAML ({' '.join(str(error).split())[:160]}): mend that line") from error
    if not isinstance(values, dict):
        raise CourseError(f"{path} holds a {type(values).__name__}, not {wanted}")
    return values


def plain_yaml(text: str) -> Any:
    """Numbers, texts, lists and dicts of YAML; nothing in it is run. Raises `ValueError` for what is not that, or too much."""
    try:
        values = yaml.safe_load(text)
    except Exception as error:                       # a tag such as !!int or a date raises whatever its own conversion does
        raise ValueError(str(error) or type(error).__name__) from error
    left, count = [values], 0
    while left:                                      # aliases make much of a short text, or a list that holds itself
        one, count = left.pop(), count + 1
        if count > MOST:
            raise ValueError(f"its aliases (*) make more than {MOST} values of it")
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple | set) else []
    return values


def parse(overrides: Iterable[str]) -> dict[str, Any]:
    """`["train.steps=5"]` as `{"train": {"steps": 5}}`; values are read as YAML. `CourseError` for what is neither."""
    values: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise CourseError(f"{override!r} is not of the form key=value, such as train.steps=100")
        try:
            value = plain_yaml(text)
        except ValueError as error:
            raise CourseError(f"the value in {override!r} cannot be read: quote it, as in '{key}=\"...\"'") from error
        for part in reversed(key.split(".")):
            value = {part: value}
        values = merge(values, value)
    return reading(values)


def reading(values: dict[str, Any]) -> dict[str, Any]:
    """Who names data.path wants it to be read: data.source=files, unless the same values say otherwise."""
    data = values.get("data")
    named = isinstance(data, Mapping) and "path" in data and "source" not in data
    return merge(values, {"data": {"source": "files"}}) if named else values


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `old` with the leaves of `new` in place of its own."""
    merged = dict(old)
    for key, value in new.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def build(kind: type[T], values: Mapping[str, Any], what: str) -> T:
    """A dataclass from nested plain values; wrong ones are a `CourseError` that names the key and the cure."""
    try:
        return TypeAdapter(strict(kind)).validate_python(values)
    except ValidationError as error:
        raise CourseError(f"{what}: " + "; ".join(_explain(kind, found) for found in error.errors())) from error


def strict(kind: Any) -> Any:
    """The dataclass itself, set up so that an unknown key is an error in it and its sections; a run may be called 7."""
    kind.__pydantic_config__ = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
    for entry in dataclasses.fields(kind):
        for section in sections(entry.type):
            strict(section)
    return kind


def sections(annotation: Any) -> list[type]:
    """The dataclasses that a field of this type may hold: a section of the configuration."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections(part)]


def flat_keys(kind: type, prefix: str = "") -> list[str]:
    """Every dotted key of a dataclass, sections included, each once."""
    keys = []
    for entry in dataclasses.fields(kind):
        keys.append(prefix + entry.name)
        for section in sections(entry.type):
            keys += flat_keys(section, f"{prefix}{entry.name}.")
    return list(dict.fromkeys(keys))


def save(config: Config, path: Path) -> None:
    """Write every value to a YAML file that `load` reads back."""
    with atomic(path) as temporary:
        temporary.write_text(yaml.safe_dump(as_plain(config), sort_keys=False))


def as_plain(config: Any) -> dict[str, Any]:
    """A configuration as nested dicts of lists, numbers and strings."""
    return TypeAdapter(type(config)).dump_python(config, mode="json")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Lines such as `train.steps: 10 -> 20` for the leaves in which two plain configurations differ."""
    lines = []
    for key in {**old, **new}:
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key}: {a} -> {b}")
    return lines


def check(config: Config) -> Config:
    """Refuse numbers that mean nothing, and settings that do not go together."""
    for key, name in (("preset", config.preset), ("log.name", config.log.name)):
        check_name(key, name)
    for section in ("data", "optim", "train", "parallel", "log", "profile", "checkpoint"):
        check_numbers(section, getattr(config, section))
    check_model(config.model)
    if config.model.kind != "vit" and config.data.source == "files" and config.data.loader != "native":
        what = {"gpt": "tokens", "dit": "latents"}[config.model.kind]
        raise CourseError(f"data.loader={config.data.loader} reads weather: for {what} set data.loader=native")
    if sorted(config.parallel.order.split("-")) != ["cp", "dp", "pp", "tp"]:
        raise CourseError(f"parallel.order={config.parallel.order} must name pp, dp, cp and tp once each, such as pp-dp-cp-tp")
    p = config.parallel
    if (p.chunks > 1) != (p.schedule == "interleaved" and p.pp > 1):
        raise CourseError(f"parallel.chunks={p.chunks} with parallel.schedule={p.schedule} and parallel.pp={p.pp}: interleaved "
                          "needs at least 2 chunks on each of several pipeline ranks, the other schedules 1")
    if p.data == "ddp" and (p.pp > 1 or p.zero):
        raise CourseError("parallel.data=ddp wraps a whole model and keeps whole optimizer states: with parallel.pp > 1 or "
                          "parallel.zero=true use parallel.data=bucketed")
    if p.data != "bucketed" and p.zero:
        raise CourseError(f"parallel.zero=true has buckets of its own: use parallel.data=bucketed, not {p.data}")
    if config.model.kind == "gpt":
        check_groups(config.model, p)
        check_efficient(config.model, config)
    if config.precision == "fp8":
        check_fp8(config)
    if config.stream == "narrow" and config.precision not in LOW:
        raise CourseError(f"stream=narrow is for 16-bit matmuls, and precision={config.precision} has none: use bf16, fp16 or "
                          "fp8, or stream=wide")
    if config.kernels == "hand" and config.precision == "fp8" and config.fp8.by == "te":
        raise CourseError("kernels=hand is for the course's own layers, and fp8.by=te puts Transformer Engine's in their place, "
                          "which have kernels of their own: use kernels=pytorch or fp8.by=hand")
    if config.graphs:
        if p.pp > 1:
            raise CourseError("graphs=true cannot capture a pipeline, whose stages meet on the host: set graphs=false or "
                              "parallel.pp=1")
        if p.data == "ddp":
            raise CourseError("graphs=true captures the course's own data parallelism: use parallel.data=bucketed, not ddp")
    return config


def check_numbers(section: str, values: Any) -> None:
    """Refuse numbers of a section that `NUMBERS` leaves out, NaN among them."""
    for name, least, end in limits(section):
        value = getattr(values, name, ())           # no model has all of a model's
        for number in value if isinstance(value, tuple) else (value,):
            if number < 0 == least:
                raise CourseError(f"{section}.{name}={number} is negative: use 0 or more")
            if not least <= number < end:
                raise CourseError(f"{section}.{name}={number} must be at least {least}" + (f" and less than {end}" * (end == 1)))


@cache
def limits(section: str) -> list[tuple[str, float, float]]:
    """Of a section's numbers that have limits: name, least, end. A planner checks thousands of configurations."""
    keys = [(key.split("."), least, end) for (least, end), words in NUMBERS.items() for key in words.split()]
    return [(name, least, end) for (owner, name), least, end in keys if owner == section]


def check_name(key: str, name: str) -> None:
    """Refuse a name that would not be one folder among a preset's runs."""
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise CourseError(f"{key}={name} is no name of a folder: leave out slashes and dots alone; where runs lie, log.dir says")


def check_fp8(config: Config) -> None:
    """Refuse what FP8 cannot be combined with."""
    f, p = config.fp8, config.parallel
    if f.history < 1 or f.margin < 0:
        raise CourseError(f"fp8.history={f.history} must be at least 1, fp8.margin={f.margin} at least 0")
    if f.by == "hand" and f.recipe not in ("delayed", "current"):
        raise CourseError(f"fp8.recipe={f.recipe} is Transformer Engine's: set fp8.by=te, or fp8.recipe=delayed or current")
    if f.by == "hand" and p.overlapped:
        raise CourseError(f"precision=fp8 multiplies whole tensors, not the pieces of parallel.overlap={p.overlap}: "
                          "set parallel.overlap=none")
    if f.by == "te" and p.tp > 1 and p.sp:
        raise CourseError("fp8.by=te gathers along a tensor's first dim, and tokens are the second here: set parallel.sp=false, "
                          "or fp8.by=hand")
    if f.by == "te" and p.pp > 1:
        raise CourseError(f"fp8.by=te does not know pipelines here: use fp8.by=hand with parallel.pp={p.pp}")
    if f.by == "te" and config.train.recompute != "none":
        raise CourseError(f"fp8.by=te would record its scales twice with train.recompute={config.train.recompute}: "
                          "use fp8.by=hand, or train.recompute=none")
    m = config.model
    if f.by == "te" and isinstance(m, GPTConfig) and (m.norm == "rms" or m.mlp == "swiglu" or m.groups != m.heads or not m.bias):
        raise CourseError("fp8.by=te knows GPT-2's kind of block here: with model.norm=rms, mlp=swiglu, kv_heads or bias=false "
                          "use fp8.by=hand")
    if f.by == "te" and f.recipe == "delayed" and config.compile:
        raise CourseError("Transformer Engine's delayed recipe does not work inside torch.compile: set compile=false, "
                          "fp8.recipe=current or fp8.by=hand")


def check_gpt(c: GPTConfig) -> None:
    """Refuse heads and widths that do not fit each other."""
    if c.heads % c.groups:
        raise CourseError(f"model.heads={c.heads} is not divisible by model.kv_heads={c.kv_heads}, each of which serves as many "
                          "queries: change one of them")
    if c.vocab_used > c.vocab:
        raise CourseError(f"model.vocab_used={c.vocab_used} is more than model.vocab={c.vocab}, which has padding besides: make "
                          "model.vocab larger")
    if not c.rope_low < c.rope_high < math.inf:
        raise CourseError(f"model.rope_high={c.rope_high} must be more than model.rope_low={c.rope_low}: pairs that turn oftener "
                          "than the former are fast, than the latter not slow")
    if c.position == "rotary" and c.dim // c.heads % 2:
        raise CourseError(f"model.position=rotary turns pairs of numbers, and heads of {c.dim // c.heads} have an odd one: "
                          "change model.dim or model.heads")


def check_groups(c: GPTConfig, p: Parallel) -> None:
    """Refuse layouts that share out key-value heads which do not divide."""
    ulysses = p.cp if p.context == "all_to_all" else 1
    if c.kv_heads and c.kv_heads % (p.tp * ulysses):
        who = f"parallel.tp={p.tp}" + (f" times parallel.cp={p.cp} of context=all_to_all" if ulysses > 1 else "")
        raise CourseError(f"{who} does not divide model.kv_heads={c.kv_heads} (of model.heads={c.heads}), and each rank needs "
                          f"whole ones: choose divisors of {c.kv_heads}" + (", or parallel.context=ring" if ulysses > 1 else ""))


def check_efficient(c: GPTConfig, config: Config) -> None:
    """Refuse PyTorch's memory-efficient attention of grouped heads: it knows none, and in 16 bits `attend` spreads none.

    A ring computes its blocks by other kernels (course/parallel/blocks.py).
    """
    p = config.parallel
    ring = p.cp > 1 and p.context == "ring"
    if config.attention == "efficient" and c.groups != c.heads and config.precision in LOW and not ring:
        raise CourseError(f"attention=efficient knows no groups of heads in {config.precision}, and model.kv_heads={c.kv_heads} "
                          f"of model.heads={c.heads} makes some: use attention=default, cudnn or flash")


def check_model(c: ViTConfig | GPTConfig | DiTConfig) -> None:
    """Refuse numbers that mean nothing, and widths and sides that do not divide."""
    check_numbers("model", c)
    if c.dim % c.heads:
        raise CourseError(f"model.dim={c.dim} is not divisible by model.heads={c.heads}: change one of them")
    if c.kind == "dit" and c.dim % 4:
        raise CourseError(f"model.dim={c.dim} is not divisible by 4, for cosine and sine of row and column: choose one that is")
    if c.kind == "gpt":
        check_gpt(c)
        return
    what, (height, width) = ("grid", c.grid) if c.kind == "vit" else ("latent", c.latent[1:])
    if height % c.patch or width % c.patch:
        raise CourseError(f"the {what} {height}x{width} is not divisible by model.patch={c.patch}: "
                          "choose a patch that divides both sides")


def nearest(word: str, candidates: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the most similar candidate, or nothing: the shortest that begins so, else the most alike."""
    known = list(candidates)
    begun = sorted((name for name in known if len(word) > 2 and name.startswith(word)), key=len)
    found = begun or difflib.get_close_matches(word, known, 1, cutoff=0.5)
    return f" (did you mean {found[0]!r}?)" if found else ""


def _explain(kind: type, found: ErrorDetails) -> str:
    path = [str(part) for part in found["loc"]]
    if found["type"] == "union_tag_invalid":
        tag = kind_of(found["input"])
        return f"there is no model.kind={tag}{nearest(tag, KINDS)}; the kinds are {', '.join(KINDS)}"
    model = path.pop(1) if path[0] == "model" and len(path) > 1 and path[1] in KINDS else ""       # the kind that was tried
    key = ".".join(path)
    if found["type"] == "unexpected_keyword_argument":
        return f"there is no key {key!r}" + (_other_model(model, key) or _similar(key, flat_keys(kind)))
    given = str(found["input"])
    return f"{key}={given[:60]}: {found['msg'][0].lower()}{found['msg'][1:]}"


def _other_model(model: str, key: str) -> str:
    """A key that models of another kind have, or one like those that this one has."""
    owners = [name for name, section in KINDS.items() if key in flat_keys(section, "model.")]
    if owners:
        return f" in a model of kind {model}: it is one of kind {' and '.join(owners)}"
    return nearest(key, flat_keys(KINDS[model], "model.")) if model else ""


def _similar(key: str, keys: list[str]) -> str:
    return nearest(key, keys) or _same_leaf(key, keys)


def _same_leaf(key: str, keys: list[str]) -> str:
    """`steps` alone means `train.steps`."""
    leaf = key.rsplit(".", 1)[-1]
    return nearest(next((k for k in keys if k.endswith(f".{leaf}")), key), keys)
