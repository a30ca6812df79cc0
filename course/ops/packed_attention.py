"""Attention on packed queries, keys and values: one tensor (B, T, 3, h, d), as the qkv linear outputs it.

PyTorch's attention returns three gradients. Another kernel then packs them, and a third sums them over tokens for the gradient
of the linear's bias. Here the kernels write the packed gradient directly and compute its sum in the same pass
(`packed_attention_triton.py`, GPUs). They also support head widths that are no power of two, such as DiT's 72, which cuDNN pads
to 128. This module has the plain PyTorch version, with all scores in memory. CPUs use it, except for long sequences.

    s = q · k / sqrt(d)    lse = log2 of the sum of exp s    p = exp s / sum    y = p · v
    dv = p^T · dy    ds = p · (dy · v - dy · y)    dq = ds · k / sqrt(d)    dk = ds^T · q / sqrt(d)

Forward saves only y and lse, from which backward recomputes p (Dao et al. 2022, arXiv:2205.14135, appendix B).
"""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.amp import is_autocast_available
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from course.ops.attention import attend
from course.ops.autograd import Context
from course.ops.custom_op import register_operator
from course.ops.number_formats import LOW_PRECISION

MOST = 2**28                                        # most scores of the plain version on a CPU: 1 GiB per copy, a few copies
# keys that a query sees on average, up to which the kernels are faster: for heads of at most this width
LONGEST = {64: 512, 80: 768, 128: 256}


def attention_plain(qkv: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(y (B, T, h, d), lse (B, h, T): log2 of the sum of exp(score) of each query, at least in float32)."""
    q, k, v = upcast(qkv).permute(2, 0, 3, 1, 4)                        # 3 x (B, h, T, d)
    with full_products(qkv):
        s = scores(q, k, causal)                                        # (B, h, T, T)
        y = s.softmax(-1) @ v                                           # (B, h, T, d)
    return y.transpose(1, 2).to(qkv.dtype).contiguous(), s.logsumexp(-1) * math.log2(math.e)


def attention_backward_plain(dy: Tensor, qkv: Tensor, y: Tensor, lse: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(gradient of qkv (B, T, 3, h, d), its sum over samples and tokens (3, h, d), at least in float32)."""
    q, k, v = upcast(qkv).permute(2, 0, 3, 1, 4)                        # 3 x (B, h, T, d)
    dy, y = (upcast(x).transpose(1, 2) for x in (dy, y))                # 2 x (B, h, T, d)
    with full_products(qkv):
        p = (scores(q, k, causal) - lse[..., None] / math.log2(math.e)).exp()           # (B, h, T, T)
        ds = p * (dy @ v.mT - (dy * y).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])  # (B, h, T, T)
        dqkv = torch.stack([ds @ k, ds.mT @ q, p.mT @ dy])              # (3, B, h, T, d)
    dqkv = dqkv.permute(1, 3, 0, 2, 4).to(qkv.dtype).contiguous()       # (B, T, 3, h, d)
    return dqkv, upcast(dqkv).sum((0, 1))


def upcast(x: Tensor) -> Tensor:
    """x in at least float32. Any shape."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def full_products(x: Tensor) -> AbstractContextManager:
    """A context without autocast, in which matmuls keep the dtype of their operands."""
    known = is_autocast_available(x.device.type)    # not on the meta device
    return torch.autocast(x.device.type, enabled=False) if known else nullcontext()


def scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """The scores, 2 x (B, h, T, d) -> (B, h, T, T); minus infinity where the causal mask applies."""
    s = q @ k.mT / math.sqrt(q.shape[-1])
    return s.masked_fill(torch.ones_like(s[0, 0], dtype=torch.bool).triu(1), -math.inf) if causal else s


register_operator("attention", "(Tensor qkv, bool causal) -> (Tensor, Tensor)", attention_plain, "ops.packed_attention_triton")
register_operator("attention_backward", "(Tensor dy, Tensor qkv, Tensor y, Tensor lse, bool causal) -> (Tensor, Tensor)",
                  attention_backward_plain, "ops.packed_attention_triton")


class PackedAttention(Function):
    """(B, T, 3, h, d) -> (B, T, h, d). Backward: the gradients of qkv and of a bias (3·h·d,) that is already in it."""

    @staticmethod
    def forward(ctx: Context, qkv: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
        y, lse = torch.ops.course.attention(qkv, causal)                # (B, T, h, d), (B, h, T)
        ctx.save_for_backward(qkv, y, lse)
        ctx.causal, ctx.bias = causal, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        qkv, y, lse = ctx.saved_tensors
        dqkv, sums = torch.ops.course.attention_backward(dy, qkv, y, lse, ctx.causal)
        return dqkv, sums.flatten().to(ctx.bias) if ctx.bias else None, None


def packed_attention(qkv: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    """Self-attention: (B, T, 3, h, d) -> (B, T, h, d). bias: the linear's, (3·h·d,), to compute its gradient here, or None.

    On a CPU it uses PyTorch's attention if there are more than `MOST` scores.
    """
    B, T, _, h, _ = qkv.shape
    if qkv.device.type == "cpu" and B * h * T * T > MOST:
        return unpacked_attention(qkv, bias, causal)
    return PackedAttention.apply(qkv, bias, causal)


def unpacked_attention(qkv: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    """The same with PyTorch's attention, which does not store all scores: (B, T, 3, h, d), (3·h·d,) -> (B, T, h, d)."""
    if bias is not None:                            # qkv already contains it: add 0, which routes the gradient
        qkv = qkv + (bias - bias.detach()).to(qkv.dtype).view(qkv.shape[2:])            # (B, T, 3, h, d)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)                                # 3 x (B, h, T, d)
    return attend(q, k, v, causal).transpose(1, 2)                      # (B, T, h, d)


def is_faster(head_dim: int, tokens: int, causal: bool) -> bool:
    """Whether the kernels support this head width, and beat PyTorch's attention over so many tokens.

    The kernels save a pass over each token's gradients. cuDNN needs less time for each score, so it wins where a query sees many
    keys (`LONGEST`). But it pads a width of 72 or 80 to 128, and then wins only where half of the scores are masked. Measured on
    an H200: results/packed_attention_h200.json.
    """
    supported = 16 <= head_dim < 128 and head_dim % 8 == 0              # a multiple of 16 bytes
    longest = next(keys for width, keys in LONGEST.items() if head_dim <= width) if supported else 0
    return supported and (tokens <= longest * (2 if causal else 1) or (head_dim in (72, 80) and not causal))


def supports_precision(precision: str, device: torch.device) -> bool:
    """Whether packed attention supports this device and precision. On a GPU, the kernels need 16 bits.

    They also need Ampere or later: older GPUs have 64 KB of shared memory, too little for most head widths.
    """
    if device.type == "cpu":
        return True
    return precision in LOW_PRECISION and torch.cuda.get_device_capability(device) >= (8, 0)
