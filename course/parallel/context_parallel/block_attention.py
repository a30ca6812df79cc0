"""Attention with one block of keys: output and log-sum-exp of each query. Backward takes those of all blocks together.

    s = q k' / sqrt(d),  lse = log sum exp s,  p = exp(s - lse),  out = p v

Backward needs the other blocks only through `out` and `lse` (Dao 2023, arXiv:2307.08691, section 3.1):

    p = exp(s - lse),  dv = p' g,  ds = p * (g v' - rowsum(g * out)),  dq = ds k / sqrt(d),  dk = ds' q / sqrt(d)

`plain` implements these formulas for any device and dtype. `cudnn` and `flash` are PyTorch's fused GPU kernels for 16 bits,
`efficient` the one for float32; they keep no scores in memory (Rabe and Staats 2021, arXiv:2112.05682).
All tensors are (B, h, T, d), lse is (B, h, T). Keys and values may have fewer heads, each for a group of query heads. causal:
query i sees keys up to i; queries and keys then have the same length.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from course.ops.attention import repeat_kv

aten: Any = torch.ops.aten
ROWS = 32                                           # `efficient` pads log-sum-exps to a multiple of so many queries
Grads = tuple[Tensor, Tensor, Tensor]


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) of the queries for these keys, (B, h, T, d) and (B, h, T); lse in float32 or float64."""
    kind = kernel(q)
    k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])           # (B, h, S, d)
    if kind == "cudnn":
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
        return out, lse.view(out.shape[:3])
    if kind == "flash":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, lse
    if kind == "efficient":
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
        return out, lse[..., :q.shape[2]]
    s = scores(q, k, causal)                                            # (B, h, T, S)
    lse = s.logsumexp(-1)                                               # (B, h, T)
    return (s - lse[..., None]).exp().to(v.dtype) @ v, lse


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Grads:
    """(dq, dk, dv), shaped like q, k and v, through these keys, given output and log-sum-exp over all keys."""
    kind, groups = kernel(q), k.shape[1]
    if groups != q.shape[1]:                                            # per query head, then summed over each group
        dq, dk, dv = backward(grad, q, repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1]), out, lse, causal)
        return dq, dk.unflatten(1, (groups, -1)).sum(2), dv.unflatten(1, (groups, -1)).sum(2)
    if kind != "plain":
        none = torch.empty(0, dtype=torch.uint64 if kind == "flash" else torch.int64, device=q.device)    # no dropout: no seed
        q, k, v, out, grad, lse = (x.contiguous() for x in (q, k, v, out, grad, lse))
        T, S = q.shape[2], k.shape[2]
        if kind == "cudnn":
            return aten._scaled_dot_product_cudnn_attention_backward(
                grad, q, k, v, out, lse[..., None], none, none, None, None, None, T, S, 0.0, causal)
        if kind == "efficient":
            lse = F.pad(lse, (0, -T % ROWS), value=math.inf)            # padding queries weigh nothing
            return aten._scaled_dot_product_efficient_attention_backward(
                grad, q, k, v, None, out, lse, none, none, 0.0, (True, True, True, False), causal)[:3]
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, T, S, 0.0, causal, none, none)
    p = (scores(q, k, causal) - lse[..., None]).exp()                   # (B, h, T, S)
    g, k, v, q = (x.to(p.dtype) for x in (grad, k, v, q))
    ds = p * (g @ v.mT - (g * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    return ds @ k, ds.mT @ q, p.mT @ g


def scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:               # (..., T, d), (..., S, d) -> (..., T, S)
    """q k' / sqrt(d) in float32 or float64, -inf where a query may not look."""
    s = (q @ k.mT).to(torch.float64 if q.dtype == torch.float64 else torch.float32) / math.sqrt(q.shape[-1])
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return s


def kernel(q: Tensor) -> str:
    """The implementation for these queries. In 16 bits, cuDNN's is the fastest on Hopper."""
    cuda, width = torch.backends.cuda, q.shape[-1]
    if q.device.type != "cuda":
        return "plain"
    if q.dtype == torch.float32:
        return "efficient" if cuda.mem_efficient_sdp_enabled() and width % 4 == 0 else "plain"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return "plain"
    if cuda.cudnn_sdp_enabled() and width % 8 == 0 and width <= 128:
        return "cudnn"
    return "flash" if cuda.flash_sdp_enabled() else "plain"
