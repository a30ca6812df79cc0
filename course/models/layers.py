"""Layers that models share: the transformer block, patches, and the seams. They know nothing of parallelism: they infer the
number of heads from a tensor's width, so the same code runs on a shard."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course.models.interface import Batch
from course.ops.attention import attend
from course.ops.linear_op import Communication, Product, WeightGradients
from course.utils import random


def to_patches(x: Tensor, p: int) -> Tensor:
    """Cut fields into patches of p x p points, row by row: (B, C, H, W) -> (B, T, C·p·p)."""
    B, C, H, W = x.shape
    x = x.view(B, C, H // p, p, W // p, p).permute(0, 2, 4, 1, 3, 5)    # (B, H/p, W/p, C, p, p)
    return x.reshape(B, -1, C * p * p)


def to_fields(x: Tensor, grid: tuple[int, int], p: int) -> Tensor:
    """Lay patches out as fields again: (B, T, C·p·p) -> (B, C, H, W)."""
    H, W = grid
    x = x.view(len(x), H // p, W // p, -1, p, p)                        # (B, H/p, W/p, C, p, p)
    return x.permute(0, 3, 1, 4, 2, 5).reshape(len(x), -1, H, W)


class Dropout(nn.Module):
    """Zero each number with probability `p`, scale the others by 1/(1-p).

    The choice is a function of the sample's key, this layer's name, and the number's token and feature, so that
    every layout and every replay drops the same numbers. Without keys (in evaluation) it does nothing.
    """

    def __init__(self, p: float, site: str):
        super().__init__()
        self.p, self.site = p, random.key(site)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:               # (B, T, D)
        if self.p == 0 or "keys" not in batch:
            return x
        D = x.shape[-1]
        unit = batch["position"][:, :, None] * D + torch.arange(D, device=x.device)     # (B, T, D)
        site = random.fold(self.site, batch["keys"])[:, None, None]                     # (B, 1, 1)
        keep = random.uniform(site, unit) >= self.p                                     # (B, T, D)
        return x * keep / (1 - self.p)


class DropPath(Dropout):
    """Stochastic depth (Huang et al. 2016): drop a sample's whole residual branch with probability `p`."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:               # (B, T, D)
        if self.p == 0 or "keys" not in batch:
            return x
        keep = random.uniform(self.site, batch["keys"]) >= self.p       # (B,)
        return x * keep[:, None, None] / (1 - self.p)


class Attend(nn.Module):
    """Scaled dot-product attention per head: each query sees all keys or, if causal, the keys up to its own position.

    Keys and values may have fewer heads: then query head i uses their head i // (h / g).
    """

    seam = "attend"                                 # context parallelism puts its own attention here

    def __init__(self, causal: bool = False):
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:       # (B, h, T, d), 2 x (B, g, T, d)
        return attend(q, k, v, self.causal)                             # (B, h, T, d)


class Linear(nn.Linear):
    """A linear map whose output features have the logical shape `rows`, such as (3, heads, head_dim).

    Surgery fills its slots: number formats, tensor parallelism, fused operators and schedules each have one
    (`course/ops/linear_op.py`).
    """

    def __init__(self, inputs: int, *rows: int, bias: bool = True):
        super().__init__(inputs, math.prod(rows), bias)
        self.rows = rows
        self.product, self.communication = Product(), Communication()
        self.deferred_bias = False
        self.weight_gradients: WeightGradients | None = None

    def forward(self, x: Tensor) -> Tensor:                             # (..., K) -> (..., N)
        product, weight = self.product, self.weight
        bias: Tensor | None = self.bias
        if bias is not None and self.deferred_bias:
            bias = bias.detach()
        if self.weight_gradients is not None and weight.requires_grad:
            product = product.put_off(self.weight_gradients.of(weight))
            weight = weight.detach()                # or autograd would call its hooks before there is a gradient
            x = x if x.requires_grad else x.detach().requires_grad_()               # so that there is a backward pass
        return self.communication(product, x, weight, bias)


def as_linear(linear: nn.Linear) -> Linear:
    """A linear with slots: the same object or, for one of PyTorch's, a new one with its parameters."""
    if isinstance(linear, Linear):
        return linear
    with torch.device("meta"):
        made = Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    made.weight, made.bias = linear.weight, linear.bias
    return made


class Attention(nn.Module):
    """Multi-head self-attention. The rows of `qkv.weight` are (3, heads, head_dim)."""

    def __init__(self, dim: int, heads: int, causal: bool = False):
        super().__init__()
        self.head_dim = dim // heads
        self.qkv = Linear(dim, 3, heads, dim // heads)
        self.core = Attend(causal)
        self.out = Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:                             # (B, T, D)
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_dim))         # (B, T, 3, h, d)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                            # 3 x (B, h, T, d)
        y = self.core(q, k, v)                                          # (B, h, T, d)
        return self.out(y.transpose(1, 2).flatten(2))                   # (B, T, D)


class MLP(nn.Module):
    """Two linear maps with GELU between them: exact, or its tanh approximation (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""

    def __init__(self, dim: int, hidden: int, bias: bool = True, approximate: str = "none"):
        super().__init__()
        self.up = Linear(dim, hidden, bias=bias)
        self.down = Linear(hidden, dim, bias=bias)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:                             # (B, T, D)
        return self.down(F.gelu(self.up(x), approximate=self.approximate))              # (B, T, D)


class RMSNorm(nn.RMSNorm):
    """Divide by the root of the mean square; unlike LayerNorm, subtract and add nothing (Zhang and Sennrich 2019,
    arXiv:1910.07467).

    It computes in the wider dtype of input and weight. Autocast does this for LayerNorm but not for RMSNorm, and PyTorch has no
    fused kernel for two dtypes.
    """

    def forward(self, x: Tensor) -> Tensor:                             # (..., D)
        kind = torch.promote_types(x.dtype, self.weight.dtype)
        return F.rms_norm(x.to(kind), self.normalized_shape, self.weight.to(kind), self.eps)


class HeadNorm(RMSNorm):
    """An RMSNorm of each head by itself, with one weight for all heads: (..., d) -> (..., d), in the input's format."""

    seam = "head_norm"                              # a rank with a part of the heads has a part of the weight's gradient

    def forward(self, x: Tensor) -> Tensor:                             # (..., d)
        return super().forward(x).to(x.dtype)


class GroupedAttention(nn.Module):
    """Causal self-attention in which each head of keys and values serves a group of query heads (Ainslie et al. 2023,
    arXiv:2305.13245); with a group of one, `Attention`.

    head_dim: the width of a head; 0: dim / heads. eps: if given, queries and keys are normed, and this is added to their mean
    squares (Henry et al. 2020, arXiv:2010.04245; with weights: Dehghani et al. 2023, arXiv:2302.05442, section 2).

    The rows of `qkv.weight` are (G + 2, kv_heads, head_dim): the first query head of every group, the second and so on, then
    all keys and all values. So a range of groups is a box. In the input of `out`, the heads of a group are side by side.
    """

    def __init__(self, dim: int, heads: int, kv_heads: int, bias: bool = True, head_dim: int = 0, eps: float | None = None):
        super().__init__()
        self.head_dim, self.group = head_dim or dim // heads, heads // kv_heads
        self.qkv = Linear(dim, self.group + 2, kv_heads, self.head_dim, bias=bias)
        self.q_norm, self.k_norm = (None if eps is None else HeadNorm(self.head_dim, eps) for _ in range(2))
        self.core = Attend(causal=True)
        self.out = Linear(heads * self.head_dim, dim, bias=bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:               # (B, T, D)
        qkv = self.qkv(x).unflatten(-1, (self.group + 2, -1, self.head_dim))            # (B, T, G + 2, g, d)
        q, k, v = qkv.permute(0, 3, 2, 1, 4).split([self.group, 1, 1], 2)               # (B, g, G, T, d), 2 x (B, g, 1, T, d)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)                       # (B, g, G, T, d), (B, g, 1, T, d)
        q, k, v = q.flatten(1, 2), k.squeeze(2), v.squeeze(2)           # (B, h, T, d), 2 x (B, g, T, d)
        if "rope" in batch:
            q, k = apply_rope(q, batch["rope"]), apply_rope(k, batch["rope"])
        y = self.core(q, k, v)                                          # (B, h, T, d)
        return self.out(y.transpose(1, 2).flatten(2))                   # (B, T, D)


@dataclass(frozen=True)
class RopeScaling:
    """Stretch the rotary positions of a model trained on short texts for longer ones, as Llama 3.1 does
    (Grattafiori et al. 2024, arXiv:2407.21783; its numbers are in the models' config.json)."""

    factor: float                                   # how many times slower slow pairs turn
    low: float                                      # slow pairs turn at most so many times in the old context
    high: float                                     # fast pairs, left as they are, turn at least so many times
    context: int                                    # tokens of the old context

    def __call__(self, speed: Tensor) -> Tensor:                        # (d / 2,), radians a token -> the same
        kept = ((speed * self.context / (2 * math.pi) - self.low) / (self.high - self.low)).clamp(0, 1)
        return speed * (kept + (1 - kept) / self.factor)


def rope_cos_sin(position: Tensor, head_dim: int, theta: float, dtype: torch.dtype, stretch: RopeScaling | None = None) -> Tensor:
    """Cosine and sine of the angles by which rotary positions turn each pair of features: (T,) -> (2, T, head_dim / 2).

    Pair i turns by position · theta^(-2i / head_dim) (Su et al. 2021, arXiv:2104.09864, section 3.4.2). Angles are computed in
    float64, so that far positions are as exact as near ones.
    """
    pair = torch.arange(0, head_dim, 2, device=position.device, dtype=torch.float64)
    speed = theta ** (-pair / head_dim)                                 # (d / 2,)
    angle = position[:, None] * (stretch(speed) if stretch else speed)  # (T, d / 2)
    return torch.stack([angle.cos(), angle.sin()]).to(dtype)


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:                   # (B, h, T, d), (2, T, d / 2)
    """Turn each pair of features, one from the first half of a head and one from the second."""
    a, b = x.chunk(2, -1)                                               # 2 x (B, h, T, d / 2)
    cos, sin = cos_sin
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class SwiGLU(nn.Module):
    """An MLP in which each hidden unit is a value times SiLU of a gate (Shazeer 2020, arXiv:2002.05202).

    The rows of `up.weight` are (2, hidden, 1), gates and values: tensor parallelism cuts a unit like a head of one number.
    """

    def __init__(self, dim: int, hidden: int, bias: bool):
        super().__init__()
        self.up = Linear(dim, 2, hidden, 1, bias=bias)
        self.down = Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:                             # (B, T, D)
        gate, value = self.up(x).chunk(2, -1)                           # 2 x (B, T, M)
        return self.down(F.silu(gate) * value)                          # (B, T, D)


# how tensor parallelism cuts a block's linears: by output features (heads, hidden units) or by input features
TENSOR_PLAN = {"attn.qkv": "column", "attn.out": "row", "mlp.up": "column", "mlp.down": "row"}
# the tensors of a prepared batch of patches that have tokens as dim 1, and are cut with them
TOKEN_PLAN = {"input": "sequence", "target": "sequence", "position": "sequence"}


class Block(nn.Module):
    """A pre-norm transformer block: attention, then MLP, each added to its input. Its name is the site of its dropout."""

    def __init__(self, dim: int, heads: int, hidden: int, name: str, dropout: float = 0.0, drop_path: float = 0.0,
                 causal: bool = False, norm_eps: float = 1e-5):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, norm_eps)
        self.attn = Attention(dim, heads, causal)
        self.drop1, self.path1 = Dropout(dropout, f"{name}.drop1"), DropPath(drop_path, f"{name}.path1")
        self.norm2 = nn.LayerNorm(dim, norm_eps)
        self.mlp = MLP(dim, hidden)
        self.drop2, self.path2 = Dropout(dropout, f"{name}.drop2"), DropPath(drop_path, f"{name}.path2")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:               # (B, T, D)
        x = x + self.path1(self.drop1(self.attn(self.norm1(x)), batch), batch)          # (B, T, D)
        return x + self.path2(self.drop2(self.mlp(self.norm2(x)), batch), batch)        # (B, T, D)


class PatchShape:
    """Shared by the configurations of patch models: the MLP's width as a ratio, and heads that share the model's width."""

    dim: int
    heads: int
    mlp_ratio: float

    @property
    def hidden(self) -> int:
        """The MLP's width."""
        return int(self.dim * self.mlp_ratio)

    @property
    def groups(self) -> int:
        """The number of key and value heads: as many as query heads."""
        return self.heads

    @property
    def head_width(self) -> int:
        """The width of a head."""
        return self.dim // self.heads

    @property
    def attention_width(self) -> int:
        """The width of all query heads together: the model's."""
        return self.dim


class SumOverTokens(nn.Module):
    """A loss passes its sums over tokens through here. In a serial model they are complete; surgery adds other ranks' tokens.

    of: the tensor of the batch whose tokens are summed; the model's `token_plan` says how it is cut.
    """

    seam = "sum_over_tokens"

    def __init__(self, of: str = "target"):
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:                             # any shape
        return x


class SampleNorm(nn.Module):
    """The 2-norm of each sample over all its tokens and values, (B, T, P) -> (B,). Its gradient at 0 is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.sum_over_tokens = SumOverTokens()

    def forward(self, x: Tensor) -> Tensor:                             # (B, T, P)
        squares = self.sum_over_tokens(x.square().flatten(1).sum(1))    # (B,)
        zero = squares == 0                                             # sqrt has no slope there
        return squares.where(~zero, 1.0).sqrt().where(~zero, 0.0)       # (B,)
