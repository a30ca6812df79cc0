"""How many floating-point operations a training step needs, and how many a device can do."""

import torch

from course.models import DiTConfig, GPTConfig, ViTConfig
from course.models.dit import Time

# Dense tensor-core peaks in TFLOP/s, from the vendor's data sheets: (16-bit, TF32).
PEAKS = {"V100": (125.0, 15.7), "A100": (312.0, 156.0), "H20": (148.0, 74.0), "H100": (989.0, 495.0),
         "H200": (989.0, 495.0), "B200": (2250.0, 1125.0)}


def step(c: ViTConfig | GPTConfig | DiTConfig, samples: int) -> int:
    """Model FLOPs of one training step, the matmuls of `samples` samples forward and backward."""
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

    A matmul of (m, k) by (k, n) counts 2·m·k·n. With T tokens, width D and patch values P = C·p², embedding and head
    have 2·T·P·D each. The embedding needs no gradient of its input: its backward is one matmul, not two.
    """
    edge = 2 * c.tokens * c.channels * c.patch**2 * c.dim
    return samples * (3 * blocks(c.tokens, c.dim, int(c.dim * c.mlp_ratio), c.depth) + 2 * edge + 3 * edge)


def gpt_step(c: GPTConfig, samples: int) -> int:
    """The same of GPT, samples of a whole context: the blocks and 2·T·D·V for the logits. Looking tokens up is no matmul.

    A gated MLP has three maps of D·M, not two; keys and values have D·D·kv_heads / heads each.
    """
    head = 2 * c.context * c.dim * c.vocab
    gates = 2 * c.context * c.dim * c.hidden * (c.mlp == "swiglu")
    shared = 2 * c.context * 2 * c.dim * (c.dim - c.groups * (c.dim // c.heads))        # heads that keys and values do not have
    return samples * 3 * (blocks(c.context, c.dim, c.hidden, c.depth) + c.depth * (gates - shared) + head)


def dit_step(c: DiTConfig, samples: int) -> int:
    """The same of DiT. The condition has no T: 2·D·6·D in each block and 2·D·2·D in the head make its modulation,
    2·D² and 2·256·D its embedding of time, of which the input needs no gradient."""
    D = c.dim
    edge = 2 * c.tokens * c.latent[0] * c.patch**2 * D
    condition = 2 * D * (6 * c.depth + 2 + 1) * D
    return samples * (3 * blocks(c.tokens, D, int(D * c.mlp_ratio), c.depth) + 2 * edge + 3 * edge
                      + 3 * condition + 2 * 2 * Time.WAVES * D)


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """The device's peak in TFLOP/s at this precision, None where it is not known (CPUs, new GPUs)."""
    if device.type != "cuda" or precision in ("fp32", "fp64"):
        return None
    name = torch.cuda.get_device_name(device)
    found = [peaks for model, peaks in PEAKS.items() if model in name]
    if not found:
        return None
    low, tf32 = found[-1]
    return {"bf16": low, "fp16": low, "fp8": 2 * low}.get(precision, tf32)      # FP8: twice the 16 bits on all that have it
