"""Configuration: frozen dataclasses hold the defaults, and YAML presets and `key=value` overrides change them.

    config = load("vit-short", ["train.steps=64", "optim.lr=1e-3"])

A preset is a file in `course/config/presets`, or a YAML file of your own. Its `base:` names the preset or the file to start from;
relative paths start at the folder of the file that names them. `course/config/validation.py` checks numbers and combinations.
`course/config/schema.py` turns plain values into dataclasses.
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
    """What a run trains on, and which loader reads it."""

    source: Literal["files", "mock"] = "files"      # mock: one set of random batches on the device, to measure speed
    path: str = "data/era5"                         # a folder laid out as data/README.md says
    lead: int = 1                                   # forecast step, in entries of six hours
    loader: Literal["native", "threads", "dali", "dali_numpy"] = "native"   # all loaders give the same samples, bit for bit
    workers: int = 4                                # reader processes (native, dali) or threads; native with 0: the run itself
    ahead: int = 2                                  # batches that threads and DALI read ahead
    # pairs of a weather file with n entries. all: the n - lead possible ones; reference: n pairs, as NERSC's course counts them,
    # where no pair begins in the first `lead` entries, and the pairs that begin in the next `lead` entries count three times
    pairs: Literal["all", "reference"] = "all"
    train_samples: int = 0                          # use only this many, from the start; 0: all
    valid_samples: int = 0                          # the same for the validation split


@dataclass(frozen=True)
class Optim:
    """The optimizer, its learning-rate schedule, and the moving average of the weights."""

    # adam: the weight decay is added to the gradient (L2), which Adam then scales; adamw: it shrinks the weights directly
    # (decoupled), as most large models train; muon: course/ops/muon.py, with AdamW for what is no hidden matrix; sgd: SGD with
    # momentum
    name: Literal["adam", "adamw", "muon", "sgd"] = "adam"
    lr: float = 5e-4                                # peak learning rate of the schedule
    betas: tuple[float, float] = (0.9, 0.999)       # of Adam and AdamW
    eps: float = 1e-8                               # of Adam and AdamW
    muon_momentum: float = 0.95                     # of Muon
    momentum: float = 0.0                           # of SGD
    weight_decay: float = 0.0                       # adam, sgd: of the L2 term; adamw, muon: a step takes lr x this off a weight
    schedule: Literal["cosine", "constant"] = "cosine"     # learning rate after the warmup
    warmup: int = 0                                 # steps of linear warmup before the schedule
    min_lr: float = 0.0                             # learning rate at the end of the cosine
    clip: float = 0.0                               # largest global gradient norm; 0: no clipping
    ema: float = 0.0                                # decay of the weights' moving average, for example 0.9999; 0: none

    @property
    def adam(self) -> bool:
        """Whether the optimizer is Adam, with either kind of weight decay."""
        return self.name in ("adam", "adamw")


@dataclass(frozen=True)
class Train:
    """Length of the run, batch sizes, and what the backward pass recomputes."""

    steps: int = 22_000                             # optimizer steps of the whole run
    global_batch: int = 16                          # samples in one optimizer step, over all ranks
    micro_batch: int = 0                            # samples in one forward pass of one rank; 0: all samples of the rank
    recompute: Literal["none", "selective", "full"] = "none"        # what of the forward pass the backward pass recomputes
    eval_every: int = 0                             # steps between validations; 0: only at the end
    # validation RMSE of a forecast model: the root of the mean over all samples, or, as NERSC's course has it, the mean of the
    # roots of the samples
    rmse: Literal["root_of_mean", "mean_of_roots"] = "root_of_mean"
    seed: int = 0                                   # of weights, data order and dropout
    device: Literal["auto", "cpu", "cuda"] = "auto"     # where tensors live; auto: on a GPU if there is one
    stall_s: float = 600.0                          # seconds until a step counts as stalled, and the run ends and names the rank;
                                                    # 0: never. Compiling, validating and saving may take 6 times as long, or 60 s
    check_memory: bool = True                       # refuse a run that cannot fit the free memory; false: try anyway
    threads: int = 0                                # CPU threads for tensor operations; 0: PyTorch decides


@dataclass(frozen=True)
class Parallel:
    """The size of each mesh axis, and how its ranks communicate."""

    pp: int = 1                                     # pipeline stages
    dp: int = 0                                     # data-parallel ranks; 0: all ranks that the other axes leave
    cp: int = 1                                     # context-parallel ranks
    tp: int = 1                                     # tensor-parallel ranks
    ep: int = 1                                     # ranks of dp x cp over which experts are spread; no factor of the ranks
    # with ep: all_to_all sends tokens to the ranks of their experts, whose numbers the host waits for; gather sends them to all,
    # which a CUDA graph can hold
    dispatch: Literal["all_to_all", "gather"] = "all_to_all"
    # for predictions alone: rows that the experts of the fullest rank take, over the mean of the ep ranks. In the first step of
    # gpt-moe-8x350m on random tokens this is 1.1 with ep=2, 1.5 with ep=4 and 1.7 with ep=8, at most ep; balanced experts: 1
    imbalance: float = 1.1
    order: str = "-".join(AXES)                     # slowest first: ranks along the last axis are neighbors
    sp: bool = False                                # sequence parallelism: tp splits norms and residuals by tokens
    # with sp: how linears overlap communication with their matmuls. symmetric: ranks of one node write into each other's memory
    # over NVLink. auto: symmetric where the GPUs allow it, else nccl; none with native FP8, which multiplies whole tensors
    overlap: Literal["auto", "none", "nccl", "symmetric"] = "auto"
    # how attention works across cp. auto: the fastest that the heads allow (`course/config/context_choice.py`)
    context: Literal["auto", "gather", "ring", "all_to_all"] = "auto"
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"      # order of a pipeline's forward and backward passes
    data: Literal["naive", "bucketed", "ddp", "none"] = "bucketed"      # how gradients are averaged; none: they are not
    bucket_mb: float = 25.0                         # size of a gradient bucket in MiB; one collective each
    zero: int = 0                                   # ZeRO stage: sharded over dp x cp are with 1 the optimizer's states, with 2
                                                    # also the gradients, with 3 also the weights (fully sharded)
    shard: int = 0                                  # zero=2 or 3: ranks that share one copy of the parameters, 0: all of dp x cp;
                                                    # fewer: the rest of dp x cp holds further copies (hybrid sharding)
    # zero=3: when a unit's whole weights are freed. forward: after each pass (they are gathered again for the backward pass);
    # backward: after the backward pass; step: at the end of the step, gathered once for all micro-batches
    reshard_after: Literal["forward", "backward", "step"] = "forward"
    reduce_in: Literal["float32", "matmul"] = "float32"     # zero=2 or 3: the dtype in which the gradients of 16-bit weights are
                                                            # reduced; matmul: 16 bits, half the bytes, rounded sums
    chunks: int = 1                                 # model chunks on each pipeline rank; interleaved needs 2 or more

    @property
    def overlapped(self) -> bool:
        """Whether linears overlap communication with their matmuls."""
        return self.tp > 1 and self.sp and self.overlap != "none"

    @property
    def symmetric(self) -> bool:
        """Whether linears must overlap through symmetric memory, which requires the tp ranks to share a node. With `auto`, the
        GPUs decide (course/parallel/tensor_parallel/overlap_choice.py)."""
        return self.overlapped and self.overlap == "symmetric"


@dataclass(frozen=True)
class FP8:
    """Scaling recipe and number formats of FP8."""

    by: Literal["native", "te"] = "native"              # course/fp8/native.py, or Transformer Engine with the same interface
    recipe: Literal["delayed", "current", "block", "mxfp8"] = "delayed"     # where scales come from; block and mxfp8 only with te
    history: int = 1024                             # delayed: steps in the amax history; Transformer Engine advises 1024.
                                                    # It costs 4 bytes per step and tensor, and no time. 16 follows a drift sooner
    amax: Literal["max", "most_recent"] = "max"     # delayed: which amax of the history sets the scale, the largest or the newest
    margin: int = 0                                 # powers of two left free above the amax
    gradients: Literal["e5m2", "e4m3"] = "e5m2"     # e5m2: the hybrid format; e4m3 shows why gradients need e5m2's range
    # patterns of linears that stay in bf16: the first and the last, whose errors no later norm reduces, and DiT's modulation,
    # whose input has one row per sample, too few to pay for a cast
    keep: tuple[str, ...] = ("embed.*", "head.*", "*.ada")

    def keeps(self, name: str) -> bool:
        """Whether the linear with this name stays in bf16."""
        return any(fnmatchcase(name, pattern) for pattern in self.keep)


@dataclass(frozen=True)
class Log:
    """Where a run writes its logs, and how often."""

    dir: str = "runs"                               # a run writes to dir/preset/name
    name: str = "default"                           # name of the run; another name starts another run
    every: int = 10                                 # steps between log lines; 0: only at the end
    tensorboard: bool = True                        # also write curves for TensorBoard
    wandb: bool = False                             # also send numbers to Weights & Biases; WANDB_MODE=offline keeps them here
    mlflow: str = ""                                # also send numbers to MLflow there: an address, or sqlite:///FILE; "": do not


@dataclass(frozen=True)
class Profile:
    """Which steps a profiler records."""

    steps: int = 0                                  # steps that the profiler records; 0: none
    after: int = 10                                 # steps before the profiler starts
    tool: Literal["pytorch", "nsys"] = "pytorch"    # nsys: only marks these steps, for submit/profile.sh or your own nsys
    memory: bool = False                            # also record GPU allocations, for pytorch.org/memory_viz


@dataclass(frozen=True)
class Checkpoint:
    """When a run saves checkpoints, and whether the next run with its name resumes from them."""

    every: int = 1000                               # steps between checkpoints, besides the last one; 0: only at the end
    keep: int = 3                                   # how many of the newest checkpoints to keep; 0: all
    resume: bool = True                             # resume the run with this name where it stopped
    same_data: bool = True                          # resume only with the data files that the run was trained on


@dataclass(frozen=True)
class Config:
    """The complete configuration of a run, as `load` builds it from a preset and overrides."""

    preset: str = "custom"                          # set by `load`; names the folder of the run
    model: ModelConfig = field(default_factory=ViTConfig)     # model.kind chooses the class
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    parallel: Parallel = field(default_factory=Parallel)
    precision: Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"] = "tf32"     # number format of matmuls; lesson 04
    stream: Literal["wide", "narrow"] = "wide"      # residual stream between blocks: float32, or the matmuls' 16-bit format
    fp8: FP8 = field(default_factory=FP8)           # with precision=fp8
    log: Log = field(default_factory=Log)
    profile: Profile = field(default_factory=Profile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    attention: Literal["default", "cudnn", "flash", "efficient", "math"] = "default"     # backend; see course/ops/attention.py
    # operations between the matmuls of a block, and Adam: by PyTorch or its compiler, or by the course's Triton kernels in
    # course/ops/fused_add_norm.py, course/ops/packed_attention.py and course/ops/fused_adam.py
    kernels: Literal["pytorch", "triton"] = "pytorch"
    compile: bool = False                           # torch.compile, see course/training/compile.py
    graphs: bool = False                            # capture the step in a CUDA graph

    @property
    def masters(self) -> bool:
        """Whether a single data-parallel rank may keep 16-bit weights, which only the Triton Adam updates
        (`course/parallel/data_parallel/master_weights.py`)."""
        return self.kernels == "triton" and self.optim.adam


def load(preset: str, overrides: Iterable[str] = ()) -> Config:
    """Load a preset (its name, or the path of a YAML file) and apply `key=value` overrides.

    Raises `CourseError` for an unknown preset or key, with the most similar known one, and for a wrong value.
    """
    path = preset_path(preset)
    values = {"preset": path.stem, **read_preset(path)}
    return validation.check(build(Config, merge(values, parse(overrides)), f"preset {path.stem}"))


def presets() -> list[str]:
    """The names of the course's presets."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def preset_path(preset: str, folder: Path = Path()) -> Path:
    """The file of a preset: the user's own if the name ends in .yaml or .yml, else one of the course's.

    folder: where relative paths start. Raises `CourseError` if there is no such file or preset.
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
    """Read the values of a YAML file, merged onto those of its `base`. above: the files that led here through `base`.

    Raises `CourseError` if a file is not a YAML mapping, or if the bases form a cycle.
    """
    values = current(reading(read_yaml(path, "`section:` and `key: value` lines")))
    base = values.pop("base", None)
    if base is None:
        return values
    origin, above = preset_path(str(base), path.parent), (*above, path.resolve())
    if origin.resolve() in above:
        raise CourseError(f"{path} names {base} as its base, and {base} leads back to it: remove that line")
    return merge(read_preset(origin, above), values)


def save(config: Config, path: Path) -> None:
    """Write all values to a YAML file that `load` can read."""
    with atomic(path) as temporary:
        temporary.write_text(yaml.safe_dump(as_plain(config), sort_keys=False), encoding="utf-8")
