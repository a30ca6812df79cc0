"""How many floating-point operations a training step needs, how many it executes, and how many a device can do.

`step` counts what the model needs, its matmuls forward and backward: of these MFU is made, so that nobody looks better by
computing more. `executed` adds what a run computes again.
"""

from typing import Literal

import torch

from course.config import Config
from course.models import DiTConfig, GPTConfig, ModelConfig, ViTConfig
from course.models.dit import TimestepEmbedder
from course.planner import hardware


def step(c: ModelConfig, samples: int) -> int:
    """Model FLOPs of one training step, the matmuls of `samples` samples forward and backward.

    A matmul of (m, k) by (k, n) counts 2·m·k·n, and its backward twice that: one gradient for each of its inputs.
    """
    match c:
        case GPTConfig():
            return gpt_step(c, samples)
        case DiTConfig():
            return dit_step(c, samples)
        case _:
            return vit_step(c, samples)


def blocks(tokens: int, dim: int, hidden: int, depth: int) -> int:
    """FLOPs of the transformer blocks, forward, for one sample: in each 2·T·D·(4·D + 2·M) for the linear maps and 4·T²·D
    for attention, with M the width of the MLP.

    Causal attention counts whole, as in Chowdhery et al. 2022 (arXiv:2204.02311), appendix B, although kernels skip half.
    """
    return depth * (2 * tokens * dim * (4 * dim + 2 * hidden) + 4 * tokens * tokens * dim)


def vit_step(c: ViTConfig, samples: int) -> int:
    """Model FLOPs of one training step of the ViT: its matmuls, forward once and backward twice.

    With T tokens, width D and patch values P = C·p², embedding and head have 2·T·P·D each. The embedding needs no gradient of
    its input: its backward is one matmul, not two.
    """
    edge = 2 * c.tokens * c.channels * c.patch**2 * c.dim
    return samples * (3 * forward_blocks(c) + 2 * edge + 3 * edge)


def gpt_step(c: GPTConfig, samples: int) -> int:
    """The same of GPT, samples of a whole context: the blocks and 2·T·D·V for the logits. Looking tokens up is no matmul."""
    return samples * 3 * (forward_blocks(c) + 2 * c.context * c.dim * c.vocab)


def dit_step(c: DiTConfig, samples: int) -> int:
    """The same of DiT, the sum of `dit_parts`."""
    return samples * sum(dit_parts(c).values())


def dit_parts(c: DiTConfig) -> dict[str, int]:
    """Model FLOPs of one sample of DiT, forward and backward, part by part.

    With T tokens, width D and M of the MLP. Of each token: the maps of attention and MLP, scores, patches in and out. Of each
    sample, whatever T is: the maps of the condition. Patches and waves of the time need no gradient, so that the map behind
    them has one matmul less.
    """
    T, D, M = c.tokens, c.dim, c.hidden
    patch = c.latent[0] * c.patch**2                                    # values of a patch
    return {"attention's maps": c.depth * 3 * 2 * T * D * 4 * D,        # qkv, out
            "scores": c.depth * 3 * 2 * 2 * T * T * D,                  # queries with keys, weights with values
            "MLP": c.depth * 3 * 2 * T * D * 2 * M,                     # up, down
            "modulation": c.depth * 3 * 2 * D * 6 * D,                  # ada of each block
            "head's modulation": 3 * 2 * D * 2 * D,
            "patches in": 2 * 2 * T * patch * D,
            "patches out": 3 * 2 * T * patch * D,
            "time, first map": 2 * 2 * TimestepEmbedder.WAVES * D,
            "time, second map": 3 * 2 * D * D}


def source_terms(c: DiTConfig, last: Literal["h", "l"] = "h") -> dict[str, float]:
    """The terms of a formula from notes on training DiT with Megatron-LM, part by part as in `dit_parts`; lesson 15 settles it.

    Their sum times gbs·s·l·h² is meant to be the FLOPs of a step, with s tokens, l layers, width h, h2 of the MLP, patch p:
    24 + 12·s/h + 12·h2/h + 36/s + (12 + 24·p²/h)/l + (512 + 2·h)/(s·h·l), where a second version has 2·l for 2·h.

    2·h is right: it is a map of h·h. Both versions miss some: the head's modulation, 12/l, works once a sample, not once a
    token, 12/(s·l); the map of patches in is missing, (4·C)·p²/(h·l) of C channels; 24·p² is right for C = 4 out; and the
    condition's two maps are counted forward alone, 512 and 2·h for 1024 and 6·h.
    """
    s, layers, h, h2 = c.tokens, c.depth, c.dim, c.hidden
    return {"attention's maps": 24, "scores": 12 * s / h, "MLP": 12 * h2 / h, "modulation": 36 / s,
            "head's modulation": 12 / layers, "patches out": 24 * c.patch**2 / h / layers,
            "time, first map": 512 / (s * h * layers), "time, second map": 2 * (h if last == "h" else layers) / (s * h * layers)}


def forward_blocks(c: ModelConfig) -> int:
    """FLOPs of all blocks, forward, for one sample.

    GPT: a gated MLP has three maps of D·M, not two; keys and values have D·D·kv_heads / heads each. DiT: 2·D·6·D for the
    modulation, once for a sample.
    """
    gates = 2 * c.tokens * c.dim * c.hidden if isinstance(c, GPTConfig) and c.mlp == "swiglu" else 0
    shared = 2 * c.tokens * 2 * c.dim * (c.dim - c.groups * (c.dim // c.heads))     # heads that keys and values do not have
    conditions = 2 * c.dim * 6 * c.dim if isinstance(c, DiTConfig) else 0
    return blocks(c.tokens, c.dim, c.hidden, c.depth) + c.depth * (gates - shared + conditions)


def executed(c: Config, samples: int) -> int:
    """FLOPs of the matmuls that one training step really computes: those of `step`, and those done again.

    - Fused attention keeps no scores: its backward computes queries times keys again, 2·T²·D in each block. Only
      attention=math keeps them.
    - train.recompute=full computes each block forward again, up to the last result that backward needs. `selective` keeps the
      results of all matmuls, so that none is done again (those beside communication are: parallel.overlap).

    The chunked loss computes nothing twice. Causal attention counts whole here too. Padding and idle ranks do not count.
    """
    m = c.model
    tokens = m.tokens
    again = 0 if c.attention == "math" else m.depth * 2 * tokens * tokens * m.dim
    if c.train.recompute == "full":
        again += forward_blocks(m) - spared(c)
    return step(m, samples) + samples * again


def spared(c: Config) -> int:
    """FLOPs of one sample that train.recompute=full spares: the last map of each block, `mlp.down`, if nobody needs its result.

    Backward needs it where something is multiplied with it, DiT's gate or dropout's mask, and native FP8 asks for all that its
    own function computes.
    """
    m = c.model
    if isinstance(m, DiTConfig) or (c.precision == "fp8" and c.fp8.by == "native"):
        return 0
    if isinstance(m, GPTConfig):
        return 0 if m.dropout else m.depth * 2 * m.context * m.dim * m.hidden
    without = 0 if m.dropout else m.depth if not m.drop_path else 1     # stochastic depth begins at the second block
    return without * 2 * m.tokens * m.dim * m.hidden


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """The device's peak in TFLOP/s at this precision, None where it is not known (CPUs, new GPUs)."""
    if device.type != "cuda" or precision in ("fp32", "fp64"):
        return None
    known = hardware.of_device(torch.cuda.get_device_name(device))
    # what a format does not have (V100's bf16) is counted by the other one of 16 bits
    peak = known and (known.peaks.get(precision) or known.peaks.get("fp16" if precision == "bf16" else ""))
    return peak / 1e12 if peak else None
