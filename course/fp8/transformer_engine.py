"""FP8 with Transformer Engine: replace a model's linears, norms, MLPs and attention by its modules, with the same weights.

    linear alone            te.Linear
    norm, then linear       te.LayerNormLinear          one kernel normalizes, scales and casts
    norm, then MLP          te.LayerNormMLP             and one applies GELU, scales and casts
    attention               te.DotProductAttention      cuDNN or flash; with cp > 1 the course's own attention stays

The modules are built after the model is sharded and initialized. They take its parameters, not copies. So the optimizer, data
parallelism, ZeRO-1 and checkpoints work unchanged, and training starts from the same weights. Over tp the modules communicate
themselves. Two things differ: te.LayerNormMLP uses the tanh approximation of GELU, within 0.0005 of ours. And the amax
histories of its delayed recipe are not in checkpoints, so a resumed run starts with empty ones.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from course.models import Model, layers
from course.models.layers import Attend, Linear
from course.parallel import Mesh
from course.utils.errors import CourseError

if TYPE_CHECKING:
    from course.config import FP8, Config

AVAILABLE = {"delayed": "is_fp8_available", "current": "is_fp8_available", "block": "is_fp8_block_scaling_available",
             "mxfp8": "is_mxfp8_available"}         # functions that say whether the GPU supports a recipe


def convert(model: Model, config: "Config", mesh: Mesh, enabled: bool = True) -> Model:
    """Put Transformer Engine's modules into a sharded, initialized model, if the configuration asks for them.

    enabled: if False, they multiply in bf16, to measure what FP8 itself gains. Raises `CourseError` if the package is missing or
    the GPU does not support the recipe.
    """
    if config.precision != "fp8" or config.fp8.by != "te":
        return model
    te = load(mesh.world.device, config.fp8.recipe)
    for name, block in model.blocks.items():
        def wanted(part: str, name: str = name) -> bool:
            return not config.fp8.keeps(f"blocks.{name}.{part}")

        convert_linears(te, block, wanted)
        if mesh.cp.size == 1:
            convert_attention(te, block)
    inside(model, te, recipe_of(config.fp8), enabled)
    return model


def load(device: torch.device, recipe: str) -> ModuleType:
    """Import Transformer Engine. Raises `CourseError` if it is missing or this GPU does not support the recipe."""
    if device.type != "cuda":
        raise CourseError("fp8.by=te needs a GPU: use fp8.by=native, which a CPU emulates")
    try:
        te = importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:         # OSError: a shared library is missing or has another version
        raise CourseError(f"fp8.by=te needs Transformer Engine, and importing it fails ({' '.join(str(error).split())[:160]}): "
                          "see `course doctor`, or use fp8.by=native") from error
    has, reason = getattr(te, AVAILABLE[recipe])(return_reason=True)
    if not has:
        raise CourseError(f"fp8.recipe={recipe} does not run on {torch.cuda.get_device_name(device)} ({reason}): choose another")
    return te


def recipe_of(settings: "FP8") -> Any:
    """Transformer Engine's recipe for our settings; always explicit, since its default depends on the GPU."""
    recipes = importlib.import_module("transformer_engine.common.recipe")
    kind = recipes.Format.HYBRID if settings.gradients == "e5m2" else recipes.Format.E4M3
    match settings.recipe:
        case "delayed":
            return recipes.DelayedScaling(margin=settings.margin, fp8_format=kind, amax_history_len=settings.history,
                                          amax_compute_algo=settings.amax)
        case "current":
            return recipes.Float8CurrentScaling(fp8_format=kind)
        case "block":
            return recipes.Float8BlockScaling()     # both use E4M3 everywhere: blocks are small enough for its range
        case _:
            return recipes.MXFP8BlockScaling()


def inside(model: nn.Module, te: ModuleType, recipe: Any, enabled: bool) -> None:
    """Run the model's whole forward pass under te.autocast with the recipe; on exit it updates the histories."""
    entered: list[Any] = []

    def enter(*_: Any) -> None:
        entered.append(te.autocast(enabled=enabled, recipe=recipe))         # amaxes are reduced over all ranks
        entered[-1].__enter__()

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(lambda *_: entered.pop().__exit__(None, None, None), always_call=True)


def convert_linears(te: ModuleType, block: Any, wanted: Callable[[str], bool]) -> None:
    """Replace the four linears of a block, fused with the norms before them where these have weights."""
    norms = [norm if norm.weight is not None else None for norm in (block.norm1, block.norm2)]
    if wanted("attn.qkv"):
        block.attn.qkv = linear(te, block.attn.qkv, norms[0])
        block.norm1 = nn.Identity() if norms[0] is not None else block.norm1
    if wanted("attn.out"):
        block.attn.out = linear(te, block.attn.out)
    if norms[1] is not None and wanted("mlp.up") and wanted("mlp.down"):
        block.mlp, block.norm2 = mlp(te, block.norm2, block.mlp.up, block.mlp.down), nn.Identity()
        return
    for part in ("up", "down"):
        if wanted(f"mlp.{part}"):
            setattr(block.mlp, part, linear(te, getattr(block.mlp, part)))


def convert_attention(te: ModuleType, block: Any) -> None:
    """Replace the attention of a block."""
    block.attn.core = Attention(te, block.attn)


def linear(te: ModuleType, old: Linear, norm: nn.LayerNorm | None = None) -> nn.Module:
    """te.Linear or te.LayerNormLinear with the parameters of a linear, which tp may have sharded."""
    style, axis = old.communication.mode, old.communication.axis
    rows, columns = old.weight.shape
    sizes = {"in_features": columns * (axis.size if style == "row" else 1),             # over all ranks
             "out_features": rows * (axis.size if style == "column" else 1)}
    common = {**sizes, "bias": old.bias is not None, "device": "meta", "params_dtype": old.weight.dtype,
              "parallel_mode": style, "tp_group": axis.group, "tp_size": axis.size}
    if norm is None:
        return take(te.Linear(**common), weight=old.weight, bias=old.bias)
    return take(te.LayerNormLinear(eps=norm.eps, **common), layer_norm_weight=norm.weight, layer_norm_bias=norm.bias,
                weight=old.weight, bias=old.bias)


def mlp(te: ModuleType, norm: nn.LayerNorm, up: Linear, down: Linear) -> nn.Module:
    """te.LayerNormMLP with the parameters of a norm and two linears."""
    style, axis = up.communication.mode, up.communication.axis
    rows, columns = up.weight.shape
    made = te.LayerNormMLP(hidden_size=columns, ffn_hidden_size=rows * axis.size, eps=norm.eps, activation="gelu",
                           set_parallel_mode=style is not None, tp_group=axis.group, tp_size=axis.size, device="meta",
                           params_dtype=up.weight.dtype)
    return take(made, layer_norm_weight=norm.weight, layer_norm_bias=norm.bias, fc1_weight=up.weight, fc1_bias=up.bias,
                fc2_weight=down.weight, fc2_bias=down.bias)


def take(made: nn.Module, **parameters: Tensor | None) -> nn.Module:
    """Give a module that was built on the meta device these parameters; their shapes must match."""
    for name, parameter in parameters.items():
        if parameter is not None:
            assert getattr(made, name).shape == parameter.shape, f"{type(made).__name__}.{name}"
            setattr(made, name, parameter)
    left = [name for name, parameter in made.named_parameters() if parameter.is_meta]
    assert not left, f"{type(made).__name__} has parameters of its own: {left}"
    return made


class Attention(nn.Module):
    """te.DotProductAttention with the interface of `Attend`: 3 x (B, h, T, d) -> (B, h, T, d)."""

    seam = Attend.seam

    def __init__(self, te: ModuleType, attention: layers.Attention | layers.GroupedAttention):
        super().__init__()
        d = attention.head_dim
        heads = attention.qkv.weight.shape[0] // (3 * d)                    # on this rank
        mask = "causal" if attention.core.causal else "no_mask"
        self.inner = te.DotProductAttention(heads, d, qkv_format="bshd", attn_mask_type=mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = self.inner(*(x.transpose(1, 2) for x in (q, k, v)))             # (B, T, h·d)
        return y.unflatten(-1, (q.shape[1], -1)).transpose(1, 2)
