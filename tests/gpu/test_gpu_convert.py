"""Converted weights in real te.TransformerLayer modules compute what our blocks compute; and theirs in ours.

Where they are not equal: TE's kernels add in another order, and its GELU is the tanh approximation, which is what these models
have. "fp32" is TF32 on both sides there, as TE has no other.
"""

import importlib.util

import pytest
import torch
from safetensors.torch import load_file, save_file

from course import config
from course.checkpoint import checkpoint
from course.config import schema
from course.convert import command, transformer_engine
from course.inference.forecast_scores import load_model
from course.models import build_model
from course.models.layers import rope_cos_sin
from course.parallel import World, initialize_serial, serial_layout

HAS = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
pytestmark = pytest.mark.skipif(not HAS, reason="needs a GPU and Transformer Engine")
GPU = torch.device("cuda")
SIZES = ["model.vocab=512", "model.context=128", "model.dim=256", "model.depth=2", "model.heads=4", "model.mlp=gelu_tanh"]
LLAMA = ["model.norm=rms", "model.mlp=swiglu", "model.position=rotary", "model.bias=false", "model.tied=false",
         "model.mlp_width=512"]
MODELS = {"gpt": SIZES, "grouped": [*SIZES, "model.kv_heads=2"], "llama": [*SIZES, *LLAMA],
          "llama grouped": [*SIZES, *LLAMA, "model.kv_heads=2"]}
# relative, in the 2-norm over all outputs. bf16 rounds to 2^-9 at each of about ten operations of a layer, on both sides; TF32's
# products have 11 bits
BOUNDS = {torch.bfloat16: 2**-6, torch.float32: 2**-9}


def layers(c, rows, dtype):
    """Real modules for a model's blocks."""
    import transformer_engine.pytorch as real

    llama = c.norm == "rms"
    return [real.TransformerLayer(
        c.dim, c.hidden, c.heads, num_gqa_groups=c.groups, layernorm_epsilon=c.norm_eps, hidden_dropout=0.0,
        attention_dropout=0.0, self_attn_mask_type="causal", normalization="RMSNorm" if llama else "LayerNorm",
        activation="swiglu" if llama else "gelu", bias=c.bias, fuse_qkv_params=rows != "separate",
        qkv_weight_interleaved=rows == "interleaved", attn_input_format="bshd", layer_number=i + 1, params_dtype=dtype,
        device="cuda") for i in range(c.depth)]


def through_theirs(modules, c, x):
    """(B, T, D) through real layers."""
    import transformer_engine.pytorch as real

    angles = real.RotaryPositionEmbedding(c.dim // c.heads, rotary_base=c.rope_theta)(x.shape[1]).to(GPU) \
        if c.position == "rotary" else None
    with torch.no_grad():
        for module in modules:
            x = module(x, rotary_pos_emb=angles)
    return x


def through_ours(run, x):
    """The same through the blocks of a run."""
    model, _ = load_model(run, config.load(str(run / "config.yaml"), ["precision=tf32"]), GPU)
    model = model.to(x.dtype)
    c, batch = model.c, {}
    if c.position == "rotary":
        batch["rope"] = rope_cos_sin(torch.arange(x.shape[1], device=GPU), c.dim // c.heads, c.rope_theta, torch.float32)
    with torch.no_grad():
        for block in model.blocks.values():
            x = block(x, batch)
    return x


def fresh(folder, name):
    """A run at step 0 of weights none of which is trivial."""
    made = config.load("gpt-demo", [*MODELS[name], "train.device=cpu"])
    model = initialize_serial(build_model(made.model), 0, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn(p.shape, generator=generator)
    state = {**command.Progress.start(made, torch.device("cpu")).state(), "samples": 0}
    checkpoint.save(folder / "checkpoints", torch.optim.SGD(model.parameters()), state, schema.as_plain(made),
                    serial_layout(model))
    config.save(made, folder / "config.yaml")
    return folder, made


def difference(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("rows", transformer_engine.ROWS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_ours_in_theirs(name, rows, dtype, tmp_path, record_property):
    run, made = fresh(tmp_path / "runs" / "x" / "first", name)
    command.convert(World(), run, tmp_path / "te.safetensors", to="te", rows=rows)
    state, c = load_file(tmp_path / "te.safetensors"), made.model
    modules = layers(c, rows, dtype)
    for i, module in enumerate(modules):
        mine = {key.removeprefix(f"blocks.{i}."): value for key, value in state.items() if key.startswith(f"blocks.{i}.")}
        missing, unexpected = module.load_state_dict(mine, strict=False)
        assert not unexpected and all(key.endswith("_extra_state") for key in missing), (missing, unexpected)
    torch.backends.cuda.matmul.allow_tf32 = True
    x = torch.randn(2, 128, c.dim, device=GPU, generator=torch.Generator(GPU).manual_seed(1)).to(dtype)
    found = difference(through_ours(run, x), through_theirs(modules, c, x))
    record_property(f"{name} {rows} {dtype}", found)
    print(f"{name}, {rows}, {dtype}: {found:.2g}")
    assert found < BOUNDS[dtype]


@pytest.mark.parametrize("rows", transformer_engine.ROWS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_theirs_in_ours(name, rows, dtype, tmp_path, record_property):
    """Layers as TE initializes them, with norms and biases that are not trivial; the rest of the model is of no account."""
    run, made = fresh(tmp_path / "runs" / "x" / "first", name)
    c = made.model
    command.convert(World(), run, tmp_path / "rest.safetensors", to="te", rows=rows)
    state = {key: value for key, value in load_file(tmp_path / "rest.safetensors").items() if not key.startswith("blocks.")}
    modules = layers(c, rows, torch.float32)
    with torch.no_grad():
        for p in (p for module in modules for p in module.parameters()):
            p += 0.05 * torch.randn(p.shape, device=GPU)
    for i, module in enumerate(modules):
        state |= {f"blocks.{i}.{key}": value.detach().cpu() for key, value in module.state_dict().items()
                  if isinstance(value, torch.Tensor)}                   # an _extra_state among them, as bytes: it is left out
    save_file({key: value.contiguous() for key, value in state.items()}, tmp_path / "te.safetensors")
    command.convert(World(), tmp_path / "te.safetensors", tmp_path / "runs" / "x" / "back", [*MODELS[name]], like="gpt-demo",
                    rows=rows)
    torch.backends.cuda.matmul.allow_tf32 = True
    x = torch.randn(2, 128, c.dim, device=GPU, generator=torch.Generator(GPU).manual_seed(1)).to(dtype)
    found = difference(through_ours(tmp_path / "runs" / "x" / "back", x), through_theirs([m.to(dtype) for m in modules], c, x))
    record_property(f"{name} {rows} {dtype}", found)
    print(f"{name}, {rows}, {dtype}: {found:.2g}")
    assert found < BOUNDS[dtype]
