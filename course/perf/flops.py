"""How many floating-point operations a training step needs, and how many a device can do."""

import torch

from course.models.vit import ViTConfig

# Dense tensor-core peaks in TFLOP/s, from the vendor's data sheets: (16-bit, TF32).
PEAKS = {"V100": (125.0, 15.7), "A100": (312.0, 156.0), "H20": (148.0, 74.0), "H100": (989.0, 495.0),
         "H200": (989.0, 495.0), "B200": (2250.0, 1125.0)}


def vit_step(c: ViTConfig, samples: int) -> int:
    """Model FLOPs of one training step of the ViT: its matmuls, forward once and backward twice.

    A matmul of (m, k) by (k, n) counts 2·m·k·n. With T tokens, width D, MLP width M, patch values P = C·p²:
    a block has 2·T·D·(4·D + 2·M) for the linear maps and 4·T²·D for attention; embedding and head have
    2·T·P·D each. The embedding needs no gradient of its input: its backward is one matmul, not two.
    """
    T, D, M, P = c.tokens, c.dim, int(c.dim * c.mlp_ratio), c.channels * c.patch**2
    blocks = c.depth * (2 * T * D * (4 * D + 2 * M) + 4 * T * T * D)
    edge = 2 * T * P * D
    return samples * (3 * blocks + 2 * edge + 3 * edge)


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """The device's peak in TFLOP/s at this precision, None where it is not known (CPUs, new GPUs)."""
    if device.type != "cuda" or precision in ("fp32", "fp64"):
        return None
    name = torch.cuda.get_device_name(device)
    found = [peaks for model, peaks in PEAKS.items() if model in name]
    return found[-1][0 if precision in ("bf16", "fp16") else 1] if found else None
