"""Surgery that puts fused operators into the blocks of a model, with `kernels=triton`.

A block has three steps between its matmuls: a norm; a sum and a norm; a sum (`ops/fused_add_norm.py`). Between the matmuls of its
MLP lies GELU (`ops/fused_gelu.py`), and between those of attention, attention (`ops/packed_attention.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from course.models import dit, gpt, layers
from course.models.dit import AdaLNBlock
from course.models.layers import Batch, Block
from course.ops.custom_op import DeferredBias, deferred_bias
from course.ops.fused_add_norm import Add, add_norm
from course.ops.fused_gelu import Gelu
from course.ops.number_formats import check_capability
from course.ops.packed_attention import packed_attention, supports_head_dim
from course.parallel.tensor_parallel.linear import ColumnLinear, RowLinear, with_first_bias


def ada_forward(block: AdaLNBlock, x: Tensor, c: Tensor) -> Tensor:     # (B, T, D), (B, D)
    """`AdaLNBlock.forward` with its steps fused."""
    shift1, scale1, gate1, shift2, scale2, gate2 = block.ada(nn.functional.silu(c)).chunk(6, 1)         # 6 x (B, D)
    x, n = add_norm(x, None, None, scale1, shift1, block.norm1.eps, 1.0)                # (B, T, D) twice
    x, n = add_norm(x, block.attn(n), gate1, scale2, shift2, block.norm2.eps, 1.0, deferred_bias(block.attn.out))
    return Add.apply(x, block.mlp(n), gate2, deferred_bias(block.mlp.down))             # (B, T, D)


def add_layer_norm(x: Tensor, y: Tensor | None, norm: Any, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`add_norm` with a LayerNorm: (B, T, D) twice -> (B, T, D) twice."""
    return add_norm(x, y, None, norm.weight[None], norm.bias[None], norm.eps, 0.0, before)


def vit_forward(block: Block, x: Tensor, batch: Batch) -> Tensor:       # (B, T, D)
    """`layers.Block.forward` with its norms fused with what is around them."""
    x, n = add_layer_norm(x, None, block.norm1)                                         # (B, T, D) twice
    x, n = add_layer_norm(x, block.path1(block.drop1(block.attn(n), batch), batch), block.norm2, deferred_bias(block.attn.out))
    return x + block.path2(block.drop2(block.mlp(n), batch), batch)                     # (B, T, D)


def gpt_forward(block: gpt.Block, x: Tensor, batch: Batch) -> Tensor:   # (B, T, D)
    """`gpt.Block.forward` with its norms fused with what is around them."""
    x, n = add_layer_norm(x, None, block.norm1)                                         # (B, T, D) twice
    x, n = add_layer_norm(x, block.drop1(block.attn(n, batch), batch), block.norm2, deferred_bias(block.attn.out))
    return x + block.drop2(block.mlp(n), batch)                                         # (B, T, D)


def attention_forward(attn: Any, x: Tensor, batch: Batch | None = None) -> Tensor:      # (B, T, D)
    """Attention over what the linear before it puts out, as it is; backward also gives the gradient of that linear's bias.

    While text is generated, keys and values of past tokens come from elsewhere: then the module's own.
    """
    if type(attn.core) is not layers.Attend:
        return type(attn).forward(attn, x, *[batch] * (batch is not None))
    qkv = attn.qkv(x).unflatten(-1, (3, -1, attn.head_dim))             # (B, T, 3, h, d)
    return attn.out(packed_attention(qkv, deferred_bias(attn.qkv), attn.core.causal).flatten(2))    # (B, T, D)


FUSED: dict[type, Callable[..., Tensor]] = {AdaLNBlock: ada_forward, Block: vit_forward, gpt.Block: gpt_forward}


def check_device(device: torch.device) -> None:
    """Raise `CourseError` on a GPU that the kernels are not for: Triton compiles for Ampere (8.0) and later."""
    check_capability(device, (8, 0), "kernels=triton", "Ampere and later", "set kernels=pytorch")


def fuse_blocks(model: Any, attention: bool = True) -> nn.Module:
    """Let the blocks of a model compute so, after it is cut and before they are compiled or checkpointed.

    Blocks of other kinds, those whose norms are no LayerNorms, and MLPs of other kinds stay as they are; attention, too, unless
    `attention`, where it is not of whole samples, turns queries and keys or shares keys, and for heads of a size that it does not
    support.
    """
    for block in model.blocks.values():
        attn: Any = getattr(block, "attn", None)
        mlp: Any = getattr(block, "mlp", None)
        if attention and can_pack(attn) and getattr(model.c, "position", "learned") == "learned":
            defer_bias_gradient(attn.qkv)
            attn.forward = attention_forward.__get__(attn)
        if type(mlp) in (layers.MLP, dit.MLP, layers.GeluMLP):
            fuse_mlp(mlp)
        forward = FUSED.get(type(block))
        if forward is not None and all(type(norm) is nn.LayerNorm for norm in (block.norm1, block.norm2)):
            block.forward = forward.__get__(block)
            for linear in linears_before_sums(block):
                defer_bias_gradient(linear)
    return model


def can_pack(attn: Any) -> bool:
    """Whether attention is over all tokens of a sample, with keys of each head's own."""
    own = type(attn) is layers.Attention or (type(attn) is layers.GroupedAttention and attn.group == 1)
    return own and type(attn.core) is layers.Attend and supports_head_dim(attn.head_dim)


def linears_before_sums(block: Any) -> list[Any]:
    """The linears at whose end a fused sum begins, so that it has the gradients of their biases."""
    dropped = any(getattr(block, name).p for name in ("drop1", "path1") if hasattr(block, name))
    return [block.attn.out] * (not dropped) + [block.mlp.down] * isinstance(block, AdaLNBlock)


def fuse_mlp(mlp: Any) -> None:
    """Let an MLP with GELU compute so."""
    defer_bias_gradient(mlp.up)
    mlp.forward = mlp_forward.__get__(mlp)


def defer_bias_gradient(linear: Any) -> None:
    """Let the gradient of a linear's bias be computed elsewhere, if it has one."""
    if isinstance(linear, layers.Linear | ColumnLinear | RowLinear) and linear.bias is not None:
        linear.matmul = DeferredBias(linear.matmul)
        if type(linear) is RowLinear:
            linear.forward = with_first_bias.__get__(linear)            # type: ignore[method-assign]


def mlp_forward(mlp: Any, x: Tensor) -> Tensor:                         # (B, T, D)
    """`forward` of an MLP with GELU fused."""
    tanh = isinstance(mlp, dit.MLP) or getattr(mlp, "approximate", "") == "tanh"
    return mlp.down(Gelu.apply(mlp.up(x), deferred_bias(mlp.up), tanh)) # (B, T, D)
