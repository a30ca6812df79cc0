import math

import pytest
import torch
import torch.nn.functional as F

from course import config
from course.models import ViTConfig, build_model
from course.parallel import initialize_serial
from course.utils import random

CONFIG = ViTConfig(grid=(8, 16), channels=3, patch=2, dim=24, depth=2, heads=3, mlp_ratio=2.0)


def make(**changes):
    import dataclasses

    return initialize_serial(build_model(dataclasses.replace(CONFIG, **changes)), 1, torch.device("cpu"), torch.float64)


def batch(n=2):
    x = torch.randn(n, 3, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return {"input": x, "target": x.flip(0), "sample": torch.arange(n)}


def fields(model, b):
    """The model's output for a loader's batch, on the grid."""
    return model.fields(model(model.prepare(b, torch.tensor(0))))


def by_hand(model, x):
    """The same formulas, written once more with nothing of the model but its weights."""
    w = dict(model.named_parameters())
    patches = F.unfold(x, 2, stride=2).transpose(1, 2)                  # (B, T, C·p·p), row by row
    h = patches @ w["embed.proj.weight"].T + w["embed.proj.bias"] + w["embed.pos"]
    for i in range(2):
        n = F.layer_norm(h, (24,), w[f"blocks.{i}.norm1.weight"], w[f"blocks.{i}.norm1.bias"])
        q, k, v = (n @ w[f"blocks.{i}.attn.qkv.weight"].T + w[f"blocks.{i}.attn.qkv.bias"]).split(24, -1)
        heads = []
        for s in (slice(0, 8), slice(8, 16), slice(16, 24)):
            heads.append(torch.softmax(q[..., s] @ k[..., s].transpose(1, 2) / math.sqrt(8), -1) @ v[..., s])
        h = h + torch.cat(heads, -1) @ w[f"blocks.{i}.attn.out.weight"].T + w[f"blocks.{i}.attn.out.bias"]
        n = F.layer_norm(h, (24,), w[f"blocks.{i}.norm2.weight"], w[f"blocks.{i}.norm2.bias"])
        up = F.gelu(n @ w[f"blocks.{i}.mlp.up.weight"].T + w[f"blocks.{i}.mlp.up.bias"])
        h = h + up @ w[f"blocks.{i}.mlp.down.weight"].T + w[f"blocks.{i}.mlp.down.bias"]
    h = F.layer_norm(h, (24,), w["head.norm.weight"], w["head.norm.bias"])
    h = h @ w["head.proj.weight"].T + w["head.proj.bias"]
    return F.fold(h.transpose(1, 2), (8, 16), 2, stride=2)


def test_output_equals_the_formulas_written_again():
    model, b = make(), batch()
    with torch.no_grad():
        for p in model.parameters():                                    # so that no bias or gain is trivial
            p += 0.3 * torch.randn_like(p)
        torch.testing.assert_close(fields(model, b), by_hand(model, b["input"]), rtol=1e-10, atol=1e-10)


def test_residual_starts_as_persistence():
    b = batch()
    assert torch.equal(fields(make(residual=True), b), b["input"])


def test_loss_is_the_sum_of_relative_errors():
    model, b = make(), batch(3)
    output = fields(model, b)
    expected = sum(((output[i] - b["target"][i]).norm() / b["target"][i].norm()).item() for i in range(3))
    ready = model.prepare(b, torch.tensor(0))
    total, weight = model.loss(model(ready), ready)
    assert total.item() == pytest.approx(expected) and weight.item() == 3


def test_dropout_keeps_the_mean_and_the_rate_and_is_off_in_evaluation():
    from course.models.layers import Dropout, DropPath

    x, keys = torch.ones(64, 50, 20), random.sample_keys(0, torch.tensor(3), torch.arange(64))
    b = {"keys": keys, "position": torch.arange(50).expand(64, 50)}
    for layer, rate in ((Dropout(0.3, "a"), 64 * 50 * 20), (DropPath(0.3, "b"), 64)):
        y = layer(x, b)
        assert (y == 0).float().mean().item() == pytest.approx(0.3, abs=3 * (0.21 / rate) ** 0.5)
        assert y.max().item() == pytest.approx(1 / 0.7)
        assert torch.equal(layer(x, {}), x)
    assert not torch.equal(Dropout(0.3, "a")(x, b), Dropout(0.3, "b")(x, b))
    model = make(dropout=0.5)
    assert "keys" in model.prepare(batch(), torch.tensor(0)) and "keys" not in model.eval().prepare(batch(), torch.tensor(0))


def test_the_reference_model_has_the_size_of_the_reference():
    model = build_model(ViTConfig())
    count = sum(p.numel() for p in model.parameters())
    blocks = 12 * (4 * 384**2 + 2 * 4 * 384**2 + 9 * 384 + 4 * 384)
    assert count == blocks + 2 * 1280 * 384 + 384 + 1280 + 4050 * 384 + 2 * 384
    assert ViTConfig().tokens == 4050


def test_example_has_the_shapes_of_a_batch():
    made = build_model(CONFIG).example(5, torch.device("cpu"))
    assert made["input"].shape == made["target"].shape == (5, 3, 8, 16) and made["sample"].tolist() == list(range(5))
    assert made["input"].std().item() == pytest.approx(1, abs=0.05) and not torch.equal(made["input"], made["target"])


# ---- the reference: NERSC's model, written here from its description ----

REFERENCE = ["model.grid=[8,16]", "model.channels=3", "model.patch=2", "model.dim=24", "model.depth=2", "model.heads=3",
             "model.mlp_ratio=2.0"]


class ReferenceBlock(torch.nn.Module):
    """Pre-norm attention and MLP, norms with 1e-6, exact GELU."""

    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(dim, eps=1e-6), torch.nn.LayerNorm(dim, eps=1e-6)
        self.attn = torch.nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(dim, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, dim))

    def forward(self, x):
        n = self.norm1(x)
        x = x + self.attn(n, n, n, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def reference_output(w, x, c):
    """Its forward pass, of a convolution, PyTorch's own attention and a head whose rows are (row, column, channel)."""
    p, (H, W) = c.patch, c.grid
    kernel = w["embed.proj.weight"].view(c.dim, c.channels, p, p)
    h = F.conv2d(x, kernel, w["embed.proj.bias"], stride=p).flatten(2).transpose(1, 2) + w["embed.pos"]
    names = {"attn.in_proj_weight": "attn.qkv.weight", "attn.in_proj_bias": "attn.qkv.bias", "attn.out_proj.weight":
             "attn.out.weight", "attn.out_proj.bias": "attn.out.bias", "mlp.0.weight": "mlp.up.weight",
             "mlp.0.bias": "mlp.up.bias", "mlp.2.weight": "mlp.down.weight", "mlp.2.bias": "mlp.down.bias"}
    for i in range(c.depth):
        block = ReferenceBlock(c.dim, c.heads, int(c.dim * c.mlp_ratio)).double()
        block.load_state_dict({name: w[f"blocks.{i}.{names.get(name, name)}"] for name in block.state_dict()})
        h = block(h)
    h = F.layer_norm(h, (c.dim,), w["head.norm.weight"], w["head.norm.bias"], eps=1e-6) @ w["head.proj.weight"].T
    return torch.einsum("nhwpqc->nchpwq", h.view(len(x), H // p, W // p, p, p, c.channels)).reshape(len(x), c.channels, H, W)


def test_the_reference_preset_equals_the_reference_with_its_weights():
    c = config.load("vit-reference", REFERENCE).model
    model = initialize_serial(build_model(c), 1, torch.device("cpu"), torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(p.numel()))
        x = 1e-3 * batch()["input"]                  # so small that norms feel their eps
        expected = reference_output(dict(model.named_parameters()), x, c)
        found = fields(model, {**batch(), "input": x})
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        plain = config.load("vit-base", REFERENCE).model
        other = initialize_serial(build_model(plain), 1, torch.device("cpu"), torch.float64)
        other.load_state_dict({**model.state_dict(), "head.proj.bias": torch.zeros_like(other.head.proj.bias)})
        assert (fields(other, {**batch(), "input": x}) - expected).abs().max() > 1e-3


def test_the_reference_preset_starts_and_trains_as_the_reference():
    c = config.load("vit-reference")
    assert (c.optim.betas, c.train.steps, c.train.rmse, c.data.pairs) == ((0.9, 0.95), 30_000, "mean_of_roots", "reference")
    c = config.load("vit-reference", [*REFERENCE, "model.dim=96"]).model
    model = initialize_serial(build_model(c), 1, torch.device("cpu"), torch.float64)
    bound = 1 / math.sqrt(3 * 2 * 2)                 # what nn.Conv2d draws from
    for x in (model.embed.proj.weight, model.embed.proj.bias):
        assert x.abs().max() < bound and x.abs().max() > 0.95 * bound
    torch.testing.assert_close(model.embed.proj.weight.std().item(), bound / math.sqrt(3), rtol=0.05, atol=0)
    torch.testing.assert_close(model.head.proj.weight.std().item(), 0.02, rtol=0.1, atol=0)
    assert model.head.proj.bias is None and model.head.norm.eps == model.blocks["1"].norm2.eps == 1e-6
