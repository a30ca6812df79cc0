"""Published step times of other libraries on other GPUs, with the planner's predictions. Nothing is fitted to them.

    for case in CASES:
        print(case.name, case.value, predicted(case), case.unit)

Each group names its source. `why` explains an error of 25% or more.
"""

from dataclasses import dataclass

from course.bench import megatron_grid
from course.config import Config, load
from course.planner import hardware, step_time
from course.planner.other_implementations import MegatronWorkload, workload_as
from course.planner.step_time import Time


@dataclass(frozen=True)
class Published:
    """A published measurement, with the nearest configuration of the course."""

    group: str                                      # library and GPU
    name: str
    value: float                                    # as published
    unit: str                                       # ms, samples/s, tokens/s/GPU or TFLOP/s
    hardware: str                                   # a preset of hardware.yaml
    gpus: int
    preset: str
    settings: tuple[str, ...]
    why: str = ""                                   # reason for an error of 25% or more

    @property
    def config(self) -> Config:
        """The preset with these settings. Raises `CourseError` if one of them is invalid."""
        return load(self.preset, list(self.settings))

    @property
    def time(self) -> Time:
        """The predicted step; for Megatron-LM of 2021, with the kernels of that version."""
        if self.group == MEGATRON:
            return step_time.time_of(workload_as(MegatronWorkload, self.config, hardware.load(self.hardware), self.gpus))
        return step_time.predict(self.config, hardware.load(self.hardware), self.gpus)


def predicted(case: Published) -> float:
    """The prediction in the unit of the measurement."""
    time = case.time
    match case.unit:
        case "ms":
            return time.step * 1e3
        case "TFLOP/s":
            return time.flops / time.step / 1e12
        case "tokens/s/GPU":
            return time.samples_per_s * case.config.model.tokens / case.gpus
        case _:
            return time.samples_per_s


def error(case: Published) -> float:
    """Relative error of the prediction, in the unit of the measurement: 0.1 is 10% too much."""
    return predicted(case) / case.value - 1


MEGATRON, VIT, DIT = "Megatron-LM, V100, 2021", "weather ViT, A100", "DiT, H20"
MEGATRON_H100, TORCHTITAN, LLMC = "Megatron-LM, H100", "torchtitan, H100", "llm.c, H100"

# OneFlow's reproduction (megatron_grid.py), in fp16 with full recomputation: otherwise 768 x 12 in micro-batches of 8 would not
# fit 16 GB (scores alone take 2 GB per layer). It averages gradients after the backward pass.
THEN = ("precision=fp16", "compile=true", "stream=narrow", "train.recompute=full", "model.loss_chunk=0", "parallel.data=naive")
OVER_NODES = ("tp goes over four nodes: 6 all-reduces a layer of 200 MB through one port of 12.5 GB/s. They reached 6 of it; 78% "
              "are taken here, as on NVLink")
V100 = [Published(MEGATRON, case.name, case.ms, "ms", "v100-16", case.gpus, "gpt-124m", (*case.settings, *THEN),
                  OVER_NODES if case.name == "1x32x1_16_3072x32" else "") for case in megatron_grid.CASES]


def a100(name: str, value: float, preset: str, gpus: int, *settings: str, why: str = "") -> Published:
    """A case of NERSC's weather ViT on Perlmutter."""
    return Published(VIT, name, value, "samples/s", "perlmutter", gpus, preset, ("data.source=mock", *settings), why)


A100 = [a100("width 1024, dp 4, global batch 64", 93, "vit-mp", 4, "precision=fp16"),
        a100("width 1024, tp 4, dp 4", 125, "vit-mp", 16, "precision=fp16", "parallel.tp=4",
             why="without tp the same model is predicted too slow, so it is what tp adds that takes longer there: 78 of 389 ms "
                 "are predicted for all-reduces, over links between pairs of GPUs, as if these were a switch. Of the 512 ms that "
                 "were measured this does not explain all"),
        a100("width 384, fp16", 53.4, "vit-short", 1, "precision=fp16"),
        a100("width 384, fp16, compiled", 55.0, "vit-short", 1, "precision=fp16", "compile=true"),
        a100("width 384, TF32", 13.2, "vit-short", 1, "precision=tf32",
             why="attention in float32: PyTorch's kernel for it is made for Ampere, and its rate here is that of an H200, which "
                 "has not as much more of it than an A100 as its peak says")]


def h20(name: str, value: float, *settings: str, why: str = "") -> Published:
    """A case from notes that do not name the model: 1024 tokens suggest DiT-XL/2 at 512 pixels."""
    return Published(DIT, name, value, "ms", "h20", 8, "dit-xl-512",
                     ("train.global_batch=256", "train.micro_batch=32", "stream=narrow", "optim.ema=0", *settings), why)


H20 = [h20("bf16", 1316), h20("FP8", 1093, "precision=fp8", "fp8.by=te"),
       h20("flash attention", 1522.4, "attention=flash"), h20("fused attention", 1482.9),
       h20("fused attention, cp 2", 2187, "parallel.cp=2", "parallel.context=ring",
           why="their context parallelism takes 700 ms more for 50 ms of communication; by their own losses it does not train as "
               "well, either")]

FAST = ("precision=bf16", "stream=narrow", "compile=true")
LONG = (*FAST, "model.context=4096", "model.vocab=131072", "model.tied=false", "model.position=rotary", "train.global_batch=64",
        "train.micro_batch=2")


def megatron(name: str, value: float, *settings: str) -> Published:
    """A case on a node of 8. The source gives the number of parameters; widths are the usual ones for that size."""
    return Published(MEGATRON_H100, name, value, "TFLOP/s", "h100-80", 8, "gpt-124m", (*LONG, *settings))


H100 = [megatron("1.7B", 409, "model.dim=2048", "model.depth=24", "model.heads=16", "parallel.dp=8"),
        megatron("7.1B, tp 2", 466, "model.dim=4096", "model.depth=32", "model.heads=32", "parallel.tp=2", "parallel.sp=true",
                 "parallel.overlap=nccl", "parallel.zero=1"),
        megatron("16B, tp 4", 489, "model.dim=6144", "model.depth=32", "model.heads=48", "parallel.tp=4", "parallel.sp=true",
                 "parallel.overlap=nccl", "parallel.zero=1")]

# attention=flash: PyTorch's default when this was measured
LLAMA = (*FAST, "model.context=8192", "model.vocab=128256", "model.dim=4096", "model.depth=32", "model.heads=32",
         "model.kv_heads=8", "model.mlp=swiglu", "model.mlp_width=14336", "model.norm=rms", "model.position=rotary",
         "model.bias=false", "model.tied=false", "parallel.zero=1", "train.global_batch=8", "train.micro_batch=1",
         "train.recompute=selective", "attention=flash")
FSDP = ("FSDP gathers all weights twice a step, and its recomputation takes every second matmul, too: here stand ZeRO-1 and the "
        "recomputation of what is cheap. That is 0.1 s of the 0.24 that are missing compiled; the rest is not explained")


def torchtitan(name: str, value: float, *settings: str, why: str = "") -> Published:
    """A case of Llama 3 8B on a node of 8."""
    return Published(TORCHTITAN, name, value, "tokens/s/GPU", "h100-80", 8, "gpt-124m", (*LLAMA, *settings), why)


TITAN = [torchtitan("8B", 5762, "compile=false", why=FSDP), torchtitan("8B, compiled", 6667, why=FSDP),
         torchtitan("8B, compiled, float8", 8532, "precision=fp8", "fp8.recipe=current", why=FSDP)]
OTHERS = [Published(LLMC, "GPT-2 124M", 468e3, "tokens/s/GPU", "h100-80", 1, "gpt-124m", FAST)]

CASES = [*V100, *A100, *H20, *H100, *TITAN, *OTHERS]
