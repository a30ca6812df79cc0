"""The benchmark configurations of `course bench vit`, `gpt` and `dit`, from a plain training loop to a fast one.

A benchmark configuration is a preset with settings, so anybody can train with it. "On the device" means random batches in GPU
memory, which show the speed of the model alone. Files hold noise, and are in the page cache after the first pass.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BenchmarkConfig:
    """A preset with settings, or its model and batch in another library."""

    preset: str
    settings: tuple[str, ...]
    by: str = "course"                               # or a function of `baselines`, by name


@dataclass(frozen=True)
class Benchmark:
    """The configurations of a model by name, the meaning of their numbers, and settings that make all of them tiny."""

    configs: dict[str, BenchmarkConfig]
    meaning: str
    tiny: tuple[str, ...]


MOCK = ("data.source=mock",)
FAST = ("precision=bf16", "compile=true")
NARROW = (*FAST, "stream=narrow")
TRITON = ("kernels=triton", "graphs=true")
FP8 = ("precision=fp8", "compile=true", "stream=narrow")
TE = ("precision=fp8", "fp8.by=te", "stream=narrow")
# one sample, 12 layers of width 768, 256 tokens: hundreds of kernels, each shorter than its launch
SMALL = ("model.grid=[128,128]", "model.dim=768", "model.heads=12", "train.global_batch=1", "precision=bf16", *MOCK)
WIDE = ("model.dim=1024", "train.global_batch=16", *MOCK)

# changes to vit-short (width 384, depth 12, 360 x 720, batch 16); configurations that read files run one at a time
VIT: dict[str, tuple[str, ...]] = {
    "tf32, read by the training process": ("data.workers=0",),
    "tf32, 8 loader processes": ("data.workers=8",),
    "tf32, on the device": MOCK,
    "fp32, on the device": ("precision=fp32", *MOCK),
    "fp16, on the device": ("precision=fp16", *MOCK),
    "bf16, on the device": ("precision=bf16", *MOCK),
    "bf16, compiled": (*FAST, *MOCK),
    "bf16, compiled, narrow stream": (*NARROW, *MOCK),
    "bf16, compiled, narrow stream, Triton kernels": (*NARROW, "kernels=triton", *MOCK),
    "bf16, compiled, in a graph": (*FAST, "graphs=true", *MOCK),
    "bf16, compiled, flash attention": (*FAST, "attention=flash", *MOCK),
    "fp8, compiled": ("precision=fp8", "compile=true", *MOCK),
    "bf16, compiled, 8 loader processes": (*FAST, "data.workers=8"),
    "bf16, compiled, threads": (*FAST, "data.loader=threads", "data.workers=12"),
    "bf16, compiled, DALI": (*FAST, "data.loader=dali", "data.workers=12"),
    "bf16, compiled, DALI on .npy files": (*FAST, "data.loader=dali_numpy", "data.workers=12"),
    "width 1024: bf16": ("precision=bf16", *WIDE),
    "width 1024: bf16, compiled": (*FAST, *WIDE),
    "width 1024: bf16, compiled, narrow stream": (*NARROW, *WIDE),
    "width 1024: bf16, compiled, narrow stream, Triton kernels": (*NARROW, "kernels=triton", *WIDE),
    "width 1024: fp8, compiled": ("precision=fp8", "compile=true", *WIDE),
    "width 1024: fp8, compiled, narrow stream": (*FP8, *WIDE),
    "width 1024: fp8, compiled, narrow stream, Triton kernels": (*FP8, "kernels=triton", *WIDE),
    "width 1024: fp8 by Transformer Engine": (*TE, *WIDE),
    "one sample: eager": SMALL,
    "one sample: in a graph": (*SMALL, "graphs=true"),
    "one sample: compiled": (*SMALL, "compile=true"),
    "one sample: compiled, in a graph": (*SMALL, "compile=true", "graphs=true"),
}

# arguments of `BenchmarkConfig`
GPT: dict[str, tuple[Any, ...]] = {}
for words, preset, batch in (("124M", "gpt-124m", 64), ("350M", "gpt-350m", 32), ("1.3B", "gpt-1.3b", 8)):
    whole = (f"train.global_batch={batch}", "train.micro_batch=0")
    GPT |= {f"{words}: bf16": (preset, ("precision=bf16", *whole)),
            f"{words}: bf16, compiled": (preset, (*FAST, *whole)),
            f"{words}: bf16, compiled, narrow stream": (preset, (*NARROW, *whole)),
            f"{words}: bf16, compiled, narrow stream, Triton kernels, in a graph": (preset, (*NARROW, *TRITON, *whole)),
            f"{words}: fp8, compiled, narrow stream": (preset, (*FP8, *whole)),
            f"{words}: fp8, compiled, narrow stream, Triton kernels, in a graph": (preset, (*FP8, *TRITON, *whole)),
            f"{words}: Hugging Face's GPT-2, bf16, compiled": (preset, whole, "transformers")}
WHOLE, ONE = (("train.global_batch=64", "train.micro_batch=0"), ("train.global_batch=1", "train.micro_batch=0"))
GPT |= {"124M: bf16, compiled, narrow stream, in a graph": ("gpt-124m", (*NARROW, "graphs=true", *WHOLE)),
        "124M: bf16, compiled, narrow stream, all logits": ("gpt-124m", (*NARROW, "model.loss_chunk=0", *WHOLE)),
        "124M: bf16, compiled, narrow stream, selective recomputation": (
            "gpt-124m", (*NARROW, "train.recompute=selective", *WHOLE)),
        "124M: bf16, compiled, narrow stream, selective recomputation, Triton kernels, in a graph": (
            "gpt-124m", (*NARROW, *TRITON, "train.recompute=selective", "model.loss_chunk=2048", *WHOLE)),
        "124M: bf16, compiled, narrow stream, Triton kernels, in a graph, two micro-batches": (
            "gpt-124m", (*NARROW, *TRITON, "train.global_batch=64", "train.micro_batch=32")),
        "124M: bf16, compiled, narrow stream, full recomputation": ("gpt-124m", (*NARROW, "train.recompute=full", *WHOLE)),
        "124M, one sample: bf16, compiled, narrow stream": ("gpt-124m", (*NARROW, *ONE)),
        "124M, one sample: bf16, compiled, narrow stream, in a graph": ("gpt-124m", (*NARROW, "graphs=true", *ONE)),
        "124M, one sample: bf16, compiled, narrow stream, Triton kernels, in a graph": ("gpt-124m", (*NARROW, *TRITON, *ONE)),
        "124M, one sample: Hugging Face's GPT-2, bf16, compiled": ("gpt-124m", ONE, "transformers"),
        "1.3B: fp8 by Transformer Engine": ("gpt-1.3b", (*TE, "train.global_batch=8", "train.micro_batch=0"))}

DIT: dict[str, tuple[Any, ...]] = {}
for words, preset, batch in (("256 px", "dit-xl", 64), ("512 px", "dit-xl-512", 32)):
    whole = (f"train.global_batch={batch}", "train.micro_batch=0")
    DIT |= {f"{words}: bf16": (preset, ("precision=bf16", *whole)),
            f"{words}: bf16, compiled": (preset, (*FAST, *whole)),
            f"{words}: bf16, compiled, narrow stream": (preset, (*NARROW, *whole)),
            f"{words}: bf16, compiled, narrow stream, flash attention": (preset, (*NARROW, "attention=flash", *whole)),
            f"{words}: bf16, compiled, narrow stream, Triton kernels, in a graph": (preset, (*NARROW, *TRITON, *whole)),
            f"{words}: fp8, compiled, narrow stream": (preset, (*FP8, *whole)),
            f"{words}: fp8, compiled, narrow stream, Triton kernels, in a graph": (preset, (*FP8, *TRITON, *whole)),
            f"{words}: fp8, current scaling, compiled, narrow stream": (preset, (*FP8, "fp8.recipe=current", *whole)),
            f"{words}: fp8 by Transformer Engine": (preset, (*TE, *whole))}
DIT |= {"256 px: bf16, compiled, narrow stream, no moving average": ("dit-xl", (*NARROW, "optim.ema=0", *WHOLE)),
        "256 px: bf16, compiled, narrow stream, in a graph": ("dit-xl", (*NARROW, "graphs=true", *WHOLE))}


def named(choices: dict[str, tuple[Any, ...]]) -> dict[str, BenchmarkConfig]:
    """Build the configurations, by name."""
    return {name: BenchmarkConfig(*choice) for name, choice in choices.items()}


BENCHMARKS = {
    "vit": Benchmark({name: BenchmarkConfig("vit-short", settings) for name, settings in VIT.items()},
                  "whole training steps of vit-short (360 x 720, patch 8, depth 12, width 384, batch 16) with changed settings",
                  ("model.grid=[16,32]", "model.channels=3", "model.dim=32", "model.depth=2", "model.heads=2",
                   "train.global_batch=2")),
    "gpt": Benchmark(named(GPT),
                     "whole training steps of GPT-2's architecture, 64 (350M: 32) times 1024 tokens, 8 times 2048 for 1.3B",
                  ("model.vocab=64", "model.context=32", "model.dim=32", "model.depth=2", "model.heads=2",
                   "train.global_batch=2")),
    "dit": Benchmark(named(DIT),
                     "whole training steps of DiT-XL/2 with the weights' moving average, batches of 64 images of 256 px and "
                     "32 of 512 px",
                  ("model.latent=[4,8,8]", "model.dim=32", "model.depth=2", "model.heads=2", "train.global_batch=2")),
}
