"""Configuration: frozen dataclasses hold the defaults, YAML presets change some, `key=value` the rest.

    config = load("vit-short", ["train.steps=64", "optim.lr=1e-3"])

A preset is a file in `course/config/presets` or a path of your own; `base:` in it names one to start from: a preset by its name,
or a file by its path, seen from the folder of the file that names it. What numbers may be and what goes together is in
`course/config/validation.py`, how plain values become dataclasses in `course/config/schema.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import yaml

from course.config import validation
from course.config.axes import AXES
from course.config.schema import as_plain, build, current, merge, parse, read_yaml, reading
from course.models import ModelConfig, ViTConfig
from course.utils.atomic_files import atomic
from course.utils.errors import CourseError, did_you_mean

PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class Data:
    """What a run learns from, and who reads it."""

    source: Literal["files", "mock"] = "files"      # mock: random batches made once on the device, to measure speed
    path: str = "data/era5"                         # a folder laid out as data/README.md says
    lead: int = 1                                   # forecast step, in entries of six hours
    loader: Literal["native", "threads", "dali", "dali_numpy"] = "native"   # what reads: the same samples, bit for bit
    workers: int = 4                                # processes (native, dali) or threads that read; native's 0: no other process
    ahead: int = 2                                  # batches that threads and DALI read before they are asked for
    # which pairs of a weather file: all, n - lead of n entries; or the reference's: n, none from its first `lead` entries, for
    # which, and for the last ones, later ones and the first of these are taken once more
    pairs: Literal["all", "reference"] = "all"
    train_samples: int = 0                          # use the first so many; 0: all
    valid_samples: int = 0                          # the same of the validation split


@dataclass(frozen=True)
class Optim:
    """The optimizer, its learning rate over the steps, and the average of the weights."""

    name: Literal["adam", "sgd"] = "adam"           # Adam, or SGD with momentum
    lr: float = 5e-4                                # the peak of the schedule
    betas: tuple[float, float] = (0.9, 0.999)       # adam's
    eps: float = 1e-8                               # adam's
    momentum: float = 0.0                           # sgd's
    weight_decay: float = 0.0                       # added to the gradient, as L2 regularisation
    schedule: Literal["cosine", "constant"] = "cosine"     # of the learning rate after the warm-up
    warmup: int = 0                                 # steps of linear rise before the schedule
    min_lr: float = 0.0                             # where the cosine ends
    clip: float = 0.0                               # largest global gradient norm; 0: no clipping
    ema: float = 0.0                                # decay of the weights' moving average, such as 0.9999; 0: none


@dataclass(frozen=True)
class Train:
    """How long, in batches of what size, and what backward computes again."""

    steps: int = 22_000                             # optimizer steps of the whole run
    global_batch: int = 16                          # samples in one optimizer step, over all ranks
    micro_batch: int = 0                            # samples in one forward pass of one rank; 0: its whole share
    recompute: Literal["none", "selective", "full"] = "none"        # what of the forward pass backward computes again
    eval_every: int = 0                             # steps between validations; 0: only at the end
    # of a forecast model's validation: the root of the mean over all samples, or the reference's mean of each sample's root
    rmse: Literal["root_of_mean", "mean_of_roots"] = "root_of_mean"
    seed: int = 0                                   # weights, data order, dropout
    device: Literal["auto", "cpu", "cuda"] = "auto"     # where tensors are; auto: on a GPU if there is one
    stall_s: float = 600.0                          # seconds that a step may take: then the run ends, and says which rank stalls;
                                                    # 0: never. Compiling, validating and saving may take 6 times that, or 60 s
    check_memory: bool = True                       # refuse what cannot fit the memory that is free; false: try anyway
    threads: int = 0                                # CPU threads for tensor operations; 0: PyTorch's choice


@dataclass(frozen=True)
class Parallel:
    """Over how many ranks each axis goes, and how each communicates."""

    pp: int = 1                                     # pipeline stages
    dp: int = 0                                     # data-parallel ranks; 0: what the other axes leave
    cp: int = 1                                     # context-parallel ranks
    tp: int = 1                                     # tensor-parallel ranks
    order: str = "-".join(AXES)                     # slowest first: the last axis joins neighbouring ranks
    sp: bool = False                                # sequence parallel: norms and residuals cut by tokens over tp
    # with sp: how linears communicate beside their matmuls. auto: nccl, or none where native FP8 multiplies whole tensors;
    # symmetric: ranks write into each other's memory, over NVLink and in one node, which is faster
    overlap: Literal["auto", "none", "nccl", "symmetric"] = "auto"
    context: Literal["gather", "ring", "all_to_all"] = "ring"       # how attention works over cp
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"      # of a pipeline's passes
    data: Literal["naive", "bucketed", "ddp", "none"] = "bucketed"      # how gradients are averaged; none: not at all
    bucket_mb: float = 25.0                         # of gradients in one collective
    zero: int = 0                                   # stage of ZeRO; 1: optimizer states cut over dp x cp
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

    by: Literal["native", "te"] = "native"              # course/fp8/native.py, or Transformer Engine behind the same seam
    recipe: Literal["delayed", "current", "block", "mxfp8"] = "delayed"     # where scales come from; block and mxfp8 by te alone
    history: int = 1024                             # delayed: steps whose largest magnitude decides; Transformer Engine's advice.
                                                    # It costs 4 bytes a step and tensor, and no time; 16 follows a drift sooner
    amax: Literal["max", "most_recent"] = "max"     # delayed: which of the history's amaxes decides, the largest or the newest
    margin: int = 0                                 # powers of two left free above that
    gradients: Literal["e5m2", "e4m3"] = "e5m2"     # e5m2 is the hybrid format; e4m3 everywhere shows what its range is for
    # linears that stay in bf16, by pattern: the first and the last (their errors meet no norm after them), and DiT's modulation,
    # whose input has a row a sample, too few to be worth a cast
    keep: tuple[str, ...] = ("embed.*", "head.*", "*.ada")

    def keeps(self, name: str) -> bool:
        """Whether a linear of this name stays in bf16."""
        return any(fnmatchcase(name, pattern) for pattern in self.keep)


@dataclass(frozen=True)
class Log:
    """Where a run tells of itself, and how often."""

    dir: str = "runs"                               # a run lives in dir/preset/name
    name: str = "default"                           # of the run: another name is another run
    every: int = 10                                 # steps between lines; 0: only at the end
    tensorboard: bool = True                        # also write curves for TensorBoard


@dataclass(frozen=True)
class Profile:
    """Which steps PyTorch's profiler looks into."""

    steps: int = 0                                  # to look into with PyTorch's profiler; 0: none
    after: int = 10                                 # steps before these
    memory: bool = False                            # also who allocated what on the GPU, for pytorch.org/memory_viz


@dataclass(frozen=True)
class Checkpoint:
    """When a run is written down, and whether the next one of its name goes on from there."""

    every: int = 1000                               # steps between checkpoints; one is always written at the end; 0: only then
    keep: int = 3                                   # how many of the newest stay; 0: all
    resume: bool = True                             # go on where the run of this name stopped
    same_data: bool = True                          # and only with the data files that it learned from


@dataclass(frozen=True)
class Config:
    """All of a run: what `load` makes of a preset and overrides."""

    preset: str = "custom"                          # set by `load`: names the folder of the run
    model: ModelConfig = field(default_factory=ViTConfig)     # model.kind says which
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    parallel: Parallel = field(default_factory=Parallel)
    precision: Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"] = "tf32"     # number format of matmuls; lesson 04
    stream: Literal["wide", "narrow"] = "wide"      # what flows between blocks: float32, or the 16 bits of the matmuls
    fp8: FP8 = field(default_factory=FP8)           # with precision=fp8
    log: Log = field(default_factory=Log)
    profile: Profile = field(default_factory=Profile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    attention: Literal["default", "cudnn", "flash", "efficient", "math"] = "default"     # see course/ops/attention.py
    # what blocks do between their matmuls, and Adam: as PyTorch or its compiler does it, or by kernels written here, which are
    # in course/ops/fused_add_norm.py, course/ops/packed_attention.py and course/ops/fused_adam.py
    kernels: Literal["pytorch", "triton"] = "pytorch"
    compile: bool = False                           # torch.compile, see course/training/compile.py
    graphs: bool = False                            # capture the step in a CUDA graph

    @property
    def masters(self) -> bool:
        """Whether one data-parallel rank may keep its weights in 16 bits (`course/parallel/data_parallel/master_weights.py`): the
        optimizer has to write them."""
        return self.kernels == "triton" and self.optim.name == "adam"


def load(preset: str, overrides: Iterable[str] = ()) -> Config:
    """The configuration of a preset (its name, or the path of a YAML file) with `key=value` overrides.

    Raises `CourseError` for an unknown preset or key, naming the nearest right one, and for a wrong value.
    """
    path = preset_path(preset)
    values = {"preset": path.stem, **read_preset(path)}
    return validation.check(build(Config, merge(values, parse(overrides)), f"preset {path.stem}"))


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
        raise CourseError(f"there is no preset {preset!r}{did_you_mean(preset, presets())}; the presets are "
                          f"{', '.join(presets())}")
    return PRESETS / f"{preset}.yaml"


def read_preset(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values of a YAML file on top of those of its `base`. above: the files that name this one as theirs.

    Raises `CourseError` if one of them is no YAML of names and values, or bases lead in a circle.
    """
    values = current(reading(read_yaml(path, "`section:` and `key: value` lines")))
    base = values.pop("base", None)
    if base is None:
        return values
    origin, above = preset_path(str(base), path.parent), (*above, path.resolve())
    if origin.resolve() in above:
        raise CourseError(f"{path} names {base} as its base, which leads back to it: remove that line")
    return merge(read_preset(origin, above), values)


def save(config: Config, path: Path) -> None:
    """Write every value to a YAML file that `load` reads back."""
    with atomic(path) as temporary:
        temporary.write_text(yaml.safe_dump(as_plain(config), sort_keys=False), encoding="utf-8")
