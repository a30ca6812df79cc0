"""Surgery that puts fused operators into the blocks of a model, with `kernels=triton`.

A block has three steps between its matmuls: a norm; a sum and a norm; a sum (`ops/fused_add_norm.py`). Between the matmuls of its
MLP lies GELU (`ops/fused_gelu.py`), and between those of attention, attention (`ops/packed_attention.py`). A module that computes
so is the same object with the same parts and a subclass of its class.
"""


import torch
from torch import Tensor, nn

from course.models import Model, gpt, layers
from course.models.dit import AdaLNBlock
from course.models.layers import Batch, Block, Linear
from course.ops.fused_add_norm import Add, add_norm
from course.ops.fused_gelu import Gelu
from course.ops.number_formats import check_capability
from course.ops.packed_attention import packed_attention, supports_head_dim


class FusedAdaLNBlock(AdaLNBlock):
    """`AdaLNBlock` with its steps fused."""

    def forward(self, x: Tensor, c: Tensor) -> Tensor:                  # (B, T, D), (B, D)
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(nn.functional.silu(c)).chunk(6, 1)      # 6 x (B, D)
        x, n = add_norm(x, None, None, scale1, shift1, self.norm1.eps, 1.0)             # (B, T, D) twice
        x, n = add_norm(x, self.attn(n), gate1, scale2, shift2, self.norm2.eps, 1.0, deferred_bias(self.attn.out))
        return Add.apply(x, self.mlp(n), gate2, deferred_bias(self.mlp.down))           # (B, T, D)


class FusedBlock(Block):
    """`layers.Block` with its norms fused with what is around them."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:               # (B, T, D)
        x, n = add_layer_norm(x, None, self.norm1)                      # (B, T, D) twice
        x, n = add_layer_norm(x, self.path1(self.drop1(self.attn(n), batch), batch), self.norm2, deferred_bias(self.attn.out))
        return x + self.path2(self.drop2(self.mlp(n), batch), batch)    # (B, T, D)


class FusedGPTBlock(gpt.Block):
    """`gpt.Block` with its norms fused with what is around them."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:               # (B, T, D)
        x, n = add_layer_norm(x, None, self.norm1)                      # (B, T, D) twice
        x, n = add_layer_norm(x, self.drop1(self.attn(n, batch), batch), self.norm2, deferred_bias(self.attn.out))
        return x + self.drop2(self.mlp(n), batch)                       # (B, T, D)


class PackedAttention(layers.Attention):
    """Attention over what the linear before it puts out, as it is; backward also gives the gradient of that linear's bias."""

    def forward(self, x: Tensor) -> Tensor:                             # (B, T, D)
        return packed(self, x)


class PackedGroupedAttention(layers.GroupedAttention):
    """The same of GPT. While text is generated, keys and values of past tokens come from elsewhere: then the module's own."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:               # (B, T, D)
        return packed(self, x) if type(self.core) is layers.Attend else super().forward(x, batch)


class FusedMLP(layers.MLP):
    """An MLP with GELU fused with the gradient of the bias before it."""

    def forward(self, x: Tensor) -> Tensor:                             # (B, T, D)
        return self.down(Gelu.apply(self.up(x), deferred_bias(self.up), self.approximate == "tanh"))    # (B, T, D)


FUSED: dict[type, type] = {
    AdaLNBlock: FusedAdaLNBlock, Block: FusedBlock, gpt.Block: FusedGPTBlock, layers.MLP: FusedMLP,
    layers.Attention: PackedAttention, layers.GroupedAttention: PackedGroupedAttention}


def packed(attn: layers.Attention | layers.GroupedAttention, x: Tensor) -> Tensor:                             # (B, T, D)
    """Attention over queries, keys and values as `attn.qkv` puts them out."""
    qkv = attn.qkv(x).unflatten(-1, (3, -1, attn.head_dim))             # (B, T, 3, h, d)
    return attn.out(packed_attention(qkv, deferred_bias(attn.qkv), attn.core.causal).flatten(2))        # (B, T, D)


def add_layer_norm(x: Tensor, y: Tensor | None, norm: nn.Module, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`add_norm` with a LayerNorm: (B, T, D) twice -> (B, T, D) twice."""
    assert isinstance(norm, nn.LayerNorm)
    return add_norm(x, y, None, norm.weight[None], norm.bias[None], norm.eps, 0.0, before)


def check_device(device: torch.device) -> None:
    """Raise `CourseError` on a GPU that the kernels are not for: Triton compiles for Ampere (8.0) and later."""
    check_capability(device, (8, 0), "kernels=triton", "Ampere and later", "set kernels=pytorch")


def fuse_blocks(model: Model, attention: bool = True) -> Model:
    """Let the blocks of a model compute so, after it is cut and before they are compiled or checkpointed.

    Blocks of other kinds, those whose norms are no LayerNorms, and MLPs of other kinds stay as they are; attention, too, unless
    `attention`, where it is not of whole samples, turns queries and keys or shares keys, and for heads of a size that it does not
    support.
    """
    turned = isinstance(model, gpt.GPT) and model.c.position == "rotary"
    for module in [*model.blocks.modules()]:
        if isinstance(module, (layers.Attention, layers.GroupedAttention)) and attention and not turned and can_pack(module):
            defer_bias_gradient(module.qkv)
            fuse(module)
        if type(module) is layers.MLP:
            fuse_mlp(module)
        if isinstance(module, (Block, gpt.Block, AdaLNBlock)) and can_fuse(module):
            for linear in linears_before_sums(module):
                defer_bias_gradient(linear)
            fuse(module)
    return model


def fuse_mlp(mlp: layers.MLP) -> None:
    """Let an MLP with GELU compute so."""
    defer_bias_gradient(mlp.up)
    fuse(mlp)


def fuse(module: nn.Module) -> None:
    """Let a module compute as the subclass of its class in `FUSED` does."""
    module.__class__ = FUSED[type(module)]


def can_pack(attn: layers.Attention | layers.GroupedAttention) -> bool:
    """Whether attention is over all tokens of a sample, with keys of each head's own."""
    own = type(attn) is layers.Attention or (type(attn) is layers.GroupedAttention and attn.group == 1)
    return own and type(attn.core) is layers.Attend and supports_head_dim(attn.head_dim)


def can_fuse(block: Block | gpt.Block | AdaLNBlock) -> bool:
    """Whether it is one of these, not of a class that computes otherwise, and its norms are LayerNorms."""
    return type(block) in FUSED and all(type(norm) is nn.LayerNorm for norm in (block.norm1, block.norm2))


def linears_before_sums(block: Block | gpt.Block | AdaLNBlock) -> list[nn.Module]:
    """The linears at whose end a fused sum begins, so that it has the gradients of their biases."""
    if isinstance(block, AdaLNBlock):
        return [block.attn.out, block.mlp.down]
    dropped = block.drop1.p or (isinstance(block, Block) and block.path1.p)
    return [] if dropped else [block.attn.out]


def defer_bias_gradient(linear: nn.Module) -> None:
    """Let the gradient of a linear's bias be computed elsewhere, if it has one."""
    if isinstance(linear, Linear) and linear.bias is not None:
        linear.deferred_bias = True
        linear.communication = linear.communication.deferred or linear.communication


def deferred_bias(linear: nn.Module) -> Tensor | None:
    """The bias of a linear whose gradient is computed elsewhere."""
    return linear.bias if isinstance(linear, Linear) and linear.deferred_bias else None
