"""Count the floating-point operations that a training step needs and executes, and look up a device's peak.

`step` counts the model's matmuls, forward and backward. MFU uses this count, so that recomputation cannot improve it. `executed`
adds what a run recomputes.
"""

from typing import Literal

import torch

from course.config import Config
from course.models import DiTConfig, GPTConfig, ModelConfig, ViTConfig
from course.models.dit import TimestepEmbedder
from course.planner import hardware


def step(c: ModelConfig, samples: int) -> int:
    """Model FLOPs of one training step: the matmuls of `samples` samples, forward and backward.

    A matmul of (m, k) by (k, n) counts 2·m·k·n, and its backward twice that, once for the gradient of each input.
    """
    match c:
        case GPTConfig():
            return gpt_step(c, samples)
        case DiTConfig():
            return dit_step(c, samples)
        case _:
            return vit_step(c, samples)


def blocks(tokens: int, dim: int, hidden: int, depth: int) -> int:
    """FLOPs of the transformer blocks, forward, for one sample: per block 2·T·D·(4·D + 2·M) for the linears and 4·T²·D for
    attention, where M is the width of the MLP.

    Causal attention counts in full, as in Chowdhery et al. 2022 (arXiv:2204.02311), appendix B, although kernels skip half.
    """
    return depth * (2 * tokens * dim * (4 * dim + 2 * hidden) + 4 * tokens * tokens * dim)


def vit_step(c: ViTConfig, samples: int) -> int:
    """Model FLOPs of one training step of the ViT: its matmuls, forward once and backward twice.

    With T tokens, width D and P = C·p² values per patch, embedding and head take 2·T·P·D each. The input of the embedding needs
    no gradient, so its backward is one matmul, not two.
    """
    edge = 2 * c.tokens * c.channels * c.patch**2 * c.dim
    return samples * (3 * forward_blocks(c) + 2 * edge + 3 * edge)


def gpt_step(c: GPTConfig, samples: int) -> int:
    """Model FLOPs of one training step of a GPT on whole contexts: blocks, and 2·T·D·V for the logits. Lookup is free."""
    return samples * 3 * (forward_blocks(c) + 2 * c.context * c.dim * c.vocab)


def dit_step(c: DiTConfig, samples: int) -> int:
    """Model FLOPs of one training step of a DiT, the sum of `dit_parts`."""
    return samples * sum(dit_parts(c).values())


def dit_parts(c: DiTConfig) -> dict[str, int]:
    """Part -> model FLOPs of one DiT sample, forward and backward.

    T is the number of tokens, D the width, M the MLP's. The linears of attention and MLP, the scores and the patches count per
    token; the linears of the condition count per sample. The first linears of patches and time need no input gradient, so they
    have one matmul fewer.
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
    """The terms of a formula from notes on training DiT with Megatron-LM, by part as in `dit_parts`; lesson 15 checks it.

    Their sum times gbs·s·l·h² should be the FLOPs of a step, with s tokens, l layers, width h, MLP width h2 and patch size p:
    24 + 12·s/h + 12·h2/h + 36/s + (12 + 24·p²/h)/l + (512 + 2·h)/(s·h·l). A second version has 2·l instead of 2·h.

    2·h is right, since the linear is h x h. Both versions have errors. The head's modulation, 12/l, runs once per sample, not per
    token: 12/(s·l). The linear of patches in, (4·C)·p²/(h·l) with C channels, is missing; 24·p² is right for C = 4 out. The
    condition's two linears count forward only: 512 and 2·h instead of 1024 and 6·h.
    """
    s, layers, h, h2 = c.tokens, c.depth, c.dim, c.hidden
    return {"attention's maps": 24, "scores": 12 * s / h, "MLP": 12 * h2 / h, "modulation": 36 / s,
            "head's modulation": 12 / layers, "patches out": 24 * c.patch**2 / h / layers,
            "time, first map": 512 / (s * h * layers), "time, second map": 2 * (h if last == "h" else layers) / (s * h * layers)}


def forward_blocks(c: ModelConfig) -> int:
    """FLOPs of all blocks, forward, for one sample.

    GPT: a gated MLP has three linears of D·M, not two; queries and output take D·heads·head_dim each, keys and values
    D·kv_heads·head_dim. DiT: 2·D·6·D for the modulation, once per sample. Experts: a block with them has the router, top_k
    experts and the shared ones for an MLP.
    """
    H = c.attention_width
    gates = 2 * c.tokens * c.dim * c.hidden if isinstance(c, GPTConfig) and c.mlp == "swiglu" else 0
    heads = 2 * c.tokens * 2 * c.dim * (H + c.groups * c.head_width - 2 * c.dim)        # less, if keys and values have few
    heads += 4 * c.tokens * c.tokens * (H - c.dim)
    conditions = 2 * c.dim * 6 * c.dim if isinstance(c, DiTConfig) else 0
    return blocks(c.tokens, c.dim, c.hidden, c.depth) + c.depth * (gates + heads + conditions) + more_by_experts(c)


def more_by_experts(c: ModelConfig) -> int:
    """FLOPs by which the blocks with experts exceed dense ones, forward, for one sample."""
    if not isinstance(c, GPTConfig) or not c.experts:
        return 0
    width = (c.top_k + c.shared_experts) * c.expert_hidden - c.hidden   # of all MLPs that take a token, minus the dense one's
    return c.depth // c.moe_every * 2 * c.tokens * c.dim * (mlp_matrices(c) * width + c.experts)


def idle_parameters(c: ModelConfig) -> int:
    """The parameters of the experts that a token does not choose: the model's active parameters are all others."""
    if not isinstance(c, GPTConfig) or not c.experts:
        return 0
    return c.depth // c.moe_every * (c.experts - c.top_k) * mlp_matrices(c) * c.dim * c.expert_hidden


def mlp_matrices(c: GPTConfig) -> int:
    """The number of matrices of an MLP: three if it is gated."""
    return 3 if c.mlp == "swiglu" else 2


def executed(c: Config, samples: int) -> int:
    """FLOPs of the matmuls that one training step executes: those of `step`, and recomputed ones.

    - Fused attention keeps no scores: its backward recomputes queries times keys, 2·T²·H per block, where H is the width of all
      query heads. Only attention=math keeps them.
    - train.recompute=full recomputes each block's forward pass, up to the last output that backward needs. `selective` keeps the
      outputs of all matmuls, so none is recomputed (except those overlapped with communication: parallel.overlap).

    The chunked loss recomputes nothing. Causal attention counts in full. Padding and idle ranks do not count.
    """
    m = c.model
    tokens = m.tokens
    again = 0 if c.attention == "math" else m.depth * 2 * tokens * tokens * m.attention_width
    if c.train.recompute == "full":
        again += forward_blocks(m) - spared(c)
    return step(m, samples) + samples * again


def spared(c: Config) -> int:
    """FLOPs per sample that train.recompute=full saves: the last linear of each block, `mlp.down`, if backward does not need it.

    Backward needs its output where it is multiplied, by DiT's gate or a dropout mask. Native FP8 recomputes everything in its
    autograd function.
    """
    m = c.model
    if isinstance(m, DiTConfig) or (c.precision == "fp8" and c.fp8.by == "native"):
        return 0
    if isinstance(m, GPTConfig):
        dense = m.depth - m.depth // m.moe_every if m.experts else m.depth          # experts' outputs are multiplied by gates
        return 0 if m.dropout else dense * 2 * m.context * m.dim * m.hidden
    without = 0 if m.dropout else m.depth if not m.drop_path else 1     # stochastic depth starts at the second block
    return without * 2 * m.tokens * m.dim * m.hidden


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """The device's peak in TFLOP/s at this precision; None if unknown (CPUs, new GPUs)."""
    if device.type != "cuda" or precision in ("fp32", "fp64"):
        return None
    known = hardware.of_device(torch.cuda.get_device_name(device))
    # where bf16 has no peak (V100), use that of fp16
    peak = known and (known.peaks.get(precision) or known.peaks.get("fp16" if precision == "bf16" else ""))
    return peak / 1e12 if peak else None
