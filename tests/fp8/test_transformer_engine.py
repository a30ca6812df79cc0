"""Transformer Engine's modules from the plan, with a stand-in for the package; the real one is tested in tests/gpu."""

import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from course import config
from course.fp8 import transformer_engine
from course.parallel import World, build_mesh
from course.training.assemble import assemble as assemble_training
from course.utils.errors import CourseError

SMALL = ["model.dim=32", "model.depth=2", "model.heads=2", "train.device=cpu", "train.global_batch=4", "train.steps=4",
         "optim.warmup=0", "optim.lr=0.01"]


class Linear(nn.Module):
    """te.Linear and te.LayerNormLinear, as far as they matter here: the names and shapes of parameters, and what they compute."""

    def __init__(self, in_features: int, out_features: int, bias: bool, device: str, params_dtype: torch.dtype,
                 parallel_mode: str | None, tp_group: Any, tp_size: int):
        super().__init__()
        rows = out_features // (tp_size if parallel_mode == "column" else 1)
        columns = in_features // (tp_size if parallel_mode == "row" else 1)
        self.weight = nn.Parameter(torch.empty(rows, columns, device=device, dtype=params_dtype))
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=params_dtype)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.layer_norm_weight, self.layer_norm_bias = (nn.Parameter(torch.empty(width, device="meta")) for _ in range(2))

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.eps)


class LayerNormLinear(Norm):
    def __init__(self, eps: float, **rest: Any):
        super().__init__(rest["in_features"], eps)
        inner = Linear(**rest)
        self.weight, self.bias = inner.weight, inner.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(x), self.weight, self.bias)


class LayerNormMLP(Norm):
    def __init__(self, hidden_size: int, ffn_hidden_size: int, eps: float, activation: str, set_parallel_mode: bool,
                 tp_group: Any, tp_size: int, device: str, params_dtype: torch.dtype):
        super().__init__(hidden_size, eps)
        width = ffn_hidden_size // tp_size
        for name, shape in (("fc1_weight", (width, hidden_size)), ("fc1_bias", (width,)), ("fc2_weight", (hidden_size, width)),
                            ("fc2_bias", (hidden_size,))):
            setattr(self, name, nn.Parameter(torch.empty(shape, device=device, dtype=params_dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(self.norm(x), self.fc1_weight, self.fc1_bias)), self.fc2_weight, self.fc2_bias)


class DotProductAttention(nn.Module):
    def __init__(self, heads: int, width: int, qkv_format: str, attn_mask_type: str):
        super().__init__()
        assert qkv_format == "bshd"
        self.heads, self.causal = heads, attn_mask_type == "causal"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:       # (B, T, h, d)
        assert q.shape[2] == self.heads
        y = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=self.causal)
        return y.transpose(1, 2).flatten(2)


class Recipe:
    def __init__(self, **settings: Any):
        self.settings = settings


@pytest.fixture
def stand_in(monkeypatch):
    """Modules of Transformer Engine's names; the list of recipes in use."""
    pytorch, recipes, entered = ModuleType("transformer_engine.pytorch"), ModuleType("transformer_engine.common.recipe"), []

    def autocast(enabled: bool, recipe: Recipe) -> Any:
        entered.append(recipe)
        return nullcontext()

    for kind in (Linear, LayerNormLinear, LayerNormMLP, DotProductAttention):
        setattr(pytorch, kind.__name__, kind)
    pytorch.autocast = autocast
    pytorch.is_fp8_available = lambda return_reason: (True, "")
    pytorch.is_mxfp8_available = lambda return_reason: (False, "Device compute capability 10.0 or higher required")
    for name in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"):
        setattr(recipes, name, type(name, (Recipe,), {}))
    recipes.Format = mock.Mock(HYBRID="hybrid", E4M3="e4m3")
    for module in (pytorch, recipes):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return entered


def assemble(preset: str, *overrides: str) -> Any:
    c = config.load(preset, [*SMALL, "data.source=mock", *overrides])
    with mock.patch("course.fp8.transformer_engine.load", lambda device, recipe: sys.modules.get("transformer_engine.pytorch")):
        return assemble_training(c, build_mesh(c.parallel, World()))


@pytest.mark.parametrize("preset", ["vit-demo", "gpt-demo", "dit-demo"])
def test_the_same_weights_train_the_same(stand_in, preset):
    """The stand-in computes in bf16: so losses and parameters are those of bf16, under their own names."""
    plain, other = assemble(preset, "precision=bf16"), assemble(preset, "precision=fp8", "fp8.by=te", "fp8.history=8")
    batch = plain.model.example(4, torch.device("cpu"))
    for _ in range(3):
        assert other.step(batch)[0].item() == pytest.approx(plain.step(batch)[0].item(), rel=1e-3)
    mine, theirs = ({training.layout.placements[p].name: p for p in training.model.parameters()} for training in (plain, other))
    assert mine.keys() == theirs.keys()
    for name, parameter in mine.items():
        assert (parameter - theirs[name]).norm() <= 0.02 * parameter.norm() + 1e-3, name
    kinds = {type(module) for module in other.model.modules()}
    assert {Linear, DotProductAttention} <= kinds and ({LayerNormLinear, LayerNormMLP} <= kinds) == (preset != "dit-demo")
    assert stand_in[0].settings["amax_history_len"] == 8 and stand_in[0].settings["fp8_format"] == "hybrid"


def test_what_stays_in_bf16_is_data(stand_in):
    training = assemble("gpt-demo", "precision=fp8", "fp8.by=te", "fp8.recipe=current", "fp8.keep=['blocks.0.*','*.mlp.down']")
    first, second = training.model.blocks.values()
    assert not any(isinstance(module, Linear | Norm) for module in first.modules())
    assert isinstance(second.attn.qkv, LayerNormLinear) and isinstance(second.mlp.up, Linear)
    assert isinstance(second.mlp.down, nn.Linear) and isinstance(second.norm2, nn.LayerNorm)


def test_what_is_missing_is_a_sentence(stand_in, monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    with pytest.raises(CourseError, match=r"needs a GPU: use fp8\.by=native"):
        transformer_engine.load(torch.device("cpu"), "delayed")
    with pytest.raises(CourseError, match=r"recipe=mxfp8 does not run on NVIDIA H200 \(Device compute capability 10.0"):
        transformer_engine.load(gpu, "mxfp8")
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(CourseError, match="needs Transformer Engine, and importing it fails"):
        transformer_engine.load(gpu, "delayed")
