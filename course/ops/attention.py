"""PyTorch's scaled dot-product attention, and the choice of its backend.

    default     PyTorch's order of preference: cuDNN on Hopper, else flash
    cudnn       cuDNN's fused attention, 16 bits
    flash       FlashAttention-2 (Dao 2023, arXiv:2307.08691), 16 bits; on a CPU, PyTorch's own flash kernel, any dtype
    efficient   memory-efficient attention (Rabe and Staats 2021, arXiv:2112.05682), GPUs only; no grouped heads in 16 bits
    math        plain matmuls and a softmax, with the scores (B, h, T, T) in memory
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from course.ops.number_formats import autocast, parameter_dtype
from course.utils.errors import CourseError

SWITCHES: dict[str, Callable[[bool], None]] = {
    "cudnn": torch.backends.cuda.enable_cudnn_sdp, "flash": torch.backends.cuda.enable_flash_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp, "math": torch.backends.cuda.enable_math_sdp}


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention: (B, h, T, d), 2 x (B, g, S, d) -> (B, h, T, d).

    g divides h: each key-value head serves a group of query heads. causal: query i sees keys up to i.

    PyTorch's fused kernels support groups only in 16 bits. In float32 on a GPU it would use plain matmuls with the scores in
    memory: a GPT of 24 blocks took 66 GB in TF32 (results/heldout_h200.json, "1-04"). So keys and values are repeated there.
    """
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and q.dtype == torch.float32:
        k, v, grouped = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1]), False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


def repeat_kv(x: Tensor, heads: int) -> Tensor:
    """Repeat each head for the query heads that it serves: (B, g, S, d) -> (B, h, S, d)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def set_attention_backend(backend: str, head_dim: int, precision: str, device: torch.device) -> None:
    """Restrict attention to one backend; "default" allows all. Process-wide, because PyTorch's switches are.

    Tries a forward and backward pass, and raises `CourseError` if the backend does not support this head size and precision here.
    """
    for name, switch in SWITCHES.items():
        switch(backend in ("default", name))
    if backend == "default":
        return
    try:
        q = torch.zeros(1, 1, 16, head_dim, device=device, dtype=parameter_dtype(precision), requires_grad=True)
        with autocast(precision, device):
            F.scaled_dot_product_attention(q, q, q).sum().backward()
    except RuntimeError as error:
        for switch in SWITCHES.values():
            switch(True)
        raise CourseError(f"attention={backend} does not run on this {device.type} device with heads of {head_dim} in "
                          f"{precision} ({str(error).splitlines()[0]}): choose another, or attention=default") from error
