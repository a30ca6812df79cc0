"""Surgery that puts fused operators into a model's blocks, with `kernels=triton`.

A block has three steps between its matmuls: a norm; a sum and a norm; a sum (`ops/fused_add_norm.py`). Between the matmuls of its
MLP comes GELU (`ops/fused_gelu.py`), between those of attention the attention itself (`ops/packed_attention.py`). A fused module
stays the same object with the same parts; its class becomes a subclass.
"""


import torch
from torch import Tensor, nn

from course.models import Model, gpt, layers
from course.models.dit import AdaLNBlock
from course.models.layers import Batch, Block, Linear
from course.ops.fused_add_norm import Add, add_norm
from course.ops.fused_gelu import Gelu
from course.ops.number_formats import check_capability
from course.ops.packed_attention import is_faster, packed_attention


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
    """Attention directly on the QKV linear's output; backward also computes the gradient of that linear's bias."""

    def forward(self, x: Tensor) -> Tensor:                             # (B, T, D)
        return packed(self, x)


class PackedGroupedAttention(layers.GroupedAttention):
    """The same for GPT. In text generation another `core` supplies past keys and values: then the module's own forward runs."""

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
    """Attention directly on the queries, keys and values that `attn.qkv` returns."""
    qkv = attn.qkv(x).unflatten(-1, (3, -1, attn.head_dim))             # (B, T, 3, h, d)
    return attn.out(packed_attention(qkv, deferred_bias(attn.qkv), attn.core.causal).flatten(2))        # (B, T, D)


def add_layer_norm(x: Tensor, y: Tensor | None, norm: nn.Module, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`add_norm` with a LayerNorm: (B, T, D) twice -> (B, T, D) twice."""
    assert isinstance(norm, nn.LayerNorm)
    return add_norm(x, y, None, norm.weight[None], norm.bias[None], norm.eps, 0.0, before)


def check_device(device: torch.device) -> None:
    """Raise `CourseError` on a GPU that the kernels do not support: Triton compiles for Ampere (8.0) and later."""
    check_capability(device, (8, 0), "kernels=triton", "Ampere and later", "set kernels=pytorch")


def fuse_blocks(model: Model, attention: bool = True, tokens: int = 1) -> Model:
    """Fuse the blocks of a model, after it is cut and before they are compiled or checkpointed. Returns the model.

    tokens: of a sample. Other kinds of blocks and MLPs, and blocks with other norms than LayerNorm, stay as they are. So does
    attention unless `attention` is true; also attention over split samples, with rotary positions, shared or normed keys, or
    where PyTorch's is faster.
    """
    attention = attention and not (isinstance(model, gpt.GPT) and model.c.position == "rotary")
    for module in [*model.blocks.modules()]:
        if isinstance(module, (layers.Attention, layers.GroupedAttention)) and attention and can_pack(module, tokens):
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
    """Fuse an MLP with GELU."""
    defer_bias_gradient(mlp.up)
    fuse(mlp)


def fuse(module: nn.Module) -> None:
    """Change a module's class to its subclass in `FUSED`."""
    module.__class__ = FUSED[type(module)]


def can_pack(attn: layers.Attention | layers.GroupedAttention, tokens: int) -> bool:
    """Whether attention sees all tokens of a sample, each head has its own keys, not normed, and packed kernels are faster."""
    grouped = isinstance(attn, layers.GroupedAttention) and (attn.group > 1 or attn.q_norm is not None)
    own = type(attn) in (layers.Attention, layers.GroupedAttention) and not grouped
    return own and type(attn.core) is layers.Attend and is_faster(attn.head_dim, tokens, attn.core.causal)


def can_fuse(block: Block | gpt.Block | AdaLNBlock) -> bool:
    """Whether a block's class is itself in `FUSED`, not a subclass that may compute otherwise, and its norms are LayerNorms."""
    return type(block) in FUSED and all(type(norm) is nn.LayerNorm for norm in (block.norm1, block.norm2))


def linears_before_sums(block: Block | gpt.Block | AdaLNBlock) -> list[nn.Module]:
    """The linears whose output goes straight into a fused sum, which then computes their bias gradients."""
    if isinstance(block, AdaLNBlock):
        return [block.attn.out, block.mlp.down]
    dropped = block.drop1.p or (isinstance(block, Block) and block.path1.p)
    return [] if dropped else [block.attn.out]


def defer_bias_gradient(linear: nn.Module) -> None:
    """Let another operator compute the gradient of a linear's bias, if it has a bias."""
    if isinstance(linear, Linear) and linear.bias is not None:
        linear.deferred_bias = True
        linear.communication = linear.communication.deferred or linear.communication


def deferred_bias(linear: nn.Module) -> Tensor | None:
    """A linear's bias if its gradient is computed elsewhere, else None."""
    return linear.bias if isinstance(linear, Linear) and linear.deferred_bias else None
