import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from course import random
from course.errors import CourseError
from course.models import GPTConfig, build_model
from course.parallel import place_serial

CONFIG = GPTConfig(vocab=37, context=11, dim=24, depth=2, heads=3, mlp_ratio=2.0)


def make(**changes):
    model = place_serial(build_model(dataclasses.replace(CONFIG, **changes), 1))
    return random.initialize(model, 1, torch.device("cpu"), torch.float64)


def batch(n=2, length=12):
    tokens = torch.randint(37, (n, length), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens, "sample": torch.arange(n)}


def prepared(model, b):
    return model.prepare(b, torch.tensor(0))


def by_hand(model, tokens):
    """The same formulas, written once more with nothing of the model but its weights."""
    w = dict(model.named_parameters(remove_duplicate=False))
    T = tokens.shape[1]
    h = w["embed.token.weight"][tokens] + w["embed.pos"][:, :T]
    future = torch.arange(T)[None] > torch.arange(T)[:, None]
    for i in range(2):
        n = F.layer_norm(h, (24,), w[f"blocks.{i}.norm1.weight"], w[f"blocks.{i}.norm1.bias"])
        q, k, v = (n @ w[f"blocks.{i}.attn.qkv.weight"].T + w[f"blocks.{i}.attn.qkv.bias"]).split(24, -1)
        heads = []
        for s in (slice(0, 8), slice(8, 16), slice(16, 24)):
            scores = (q[..., s] @ k[..., s].transpose(1, 2) / math.sqrt(8)).masked_fill(future, -math.inf)
            heads.append(torch.softmax(scores, -1) @ v[..., s])
        h = h + torch.cat(heads, -1) @ w[f"blocks.{i}.attn.out.weight"].T + w[f"blocks.{i}.attn.out.bias"]
        n = F.layer_norm(h, (24,), w[f"blocks.{i}.norm2.weight"], w[f"blocks.{i}.norm2.bias"])
        up = F.gelu(n @ w[f"blocks.{i}.mlp.up.weight"].T + w[f"blocks.{i}.mlp.up.bias"])
        h = h + up @ w[f"blocks.{i}.mlp.down.weight"].T + w[f"blocks.{i}.mlp.down.bias"]
    return F.layer_norm(h, (24,), w["head.norm.weight"], w["head.norm.bias"]) @ w["head.proj.weight"].T


def shaken(**changes):
    """A model in which no bias or gain is trivial."""
    model = make(**changes)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(p.numel()))
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("length", [12, 8])
def test_logits_equal_the_formulas_written_again(tied, length):
    model, b = shaken(tied=tied), batch(length=length)
    torch.testing.assert_close(model(prepared(model, b)), by_hand(model, b["tokens"][:, :-1]), rtol=1e-10, atol=1e-10)


def test_later_tokens_change_nothing_before_them():
    model, b = shaken(), batch()
    other = {**b, "tokens": b["tokens"].clone()}
    other["tokens"][:, 6] = (b["tokens"][:, 6] + 1) % 37
    gap = (model(prepared(model, b)) - model(prepared(model, other))).abs().amax((0, 2))
    assert (gap[:6] == 0).all() and (gap[6:] > 1e-6).all()


def test_loss_is_the_sum_over_tokens_and_padding_weighs_nothing():
    model, b = shaken(), batch(3)
    b["sample"][2] = -1
    ready = prepared(model, b)
    ready["target"] = ready["target"].clone()
    ready["target"][0, -2:] = -1
    total, weight = model.loss(model(ready), ready)
    logp = model(ready).log_softmax(-1)
    expected = -sum(logp[i, t, b["tokens"][i, t + 1]] for i, T in ((0, 9), (1, 11)) for t in range(T))
    assert total.item() == pytest.approx(expected.item(), rel=1e-12) and weight.item() == 20
    assert model.loss.weight(ready).tolist() == [9, 11, 0]


def test_the_loss_of_bf16_logits_is_taken_in_float32():
    model, b = make(), batch()
    ready = prepared(model, b)
    assert model.loss.cross_entropy(model(ready).bfloat16(), ready["target"]).dtype == torch.float32


def test_a_tied_weight_is_one_parameter_with_both_gradients():
    model, b = shaken(), batch()
    weight = model.embed.token.weight
    assert weight is model.head.proj.weight and weight.placement.name == "embed.token.weight"
    assert sum(p is weight for p in model.parameters()) == 1
    model.loss(model(prepared(model, b)), prepared(model, b))[0].backward()
    used = torch.zeros(37, dtype=torch.bool).index_fill(0, b["tokens"][:, :-1].flatten(), True)
    apart = shaken(tied=False)
    with torch.no_grad():
        for name, p in apart.named_parameters():
            p.copy_(dict(model.named_parameters(remove_duplicate=False))[name])
    apart.loss(apart(prepared(apart, b)), prepared(apart, b))[0].backward()
    assert (apart.embed.token.weight.grad[used] != 0).any(1).all() and (apart.embed.token.weight.grad[~used] == 0).all()
    torch.testing.assert_close(weight.grad, apart.embed.token.weight.grad + apart.head.proj.weight.grad, rtol=1e-12, atol=1e-12)


def test_weights_start_as_gpt2s():
    model = make(dim=96, depth=3)
    w = dict(model.named_parameters())
    for name, std in (("embed.token.weight", 0.02), ("embed.pos", 0.02), ("blocks.1.attn.qkv.weight", 0.02),
                      ("blocks.1.attn.out.weight", 0.02 / 6**0.5), ("blocks.2.mlp.down.weight", 0.02 / 6**0.5)):
        assert w[name].std().item() == pytest.approx(std, rel=0.1)
    assert (w["head.norm.weight"] == 1).all() and (w["blocks.0.attn.out.bias"] == 0).all()


def test_gpt2_has_the_size_of_gpt2():
    assert sum(p.numel() for p in build_model(GPTConfig(vocab=50257)).parameters()) == 124_439_808


def test_dropout_is_off_in_evaluation():
    model = make(dropout=0.5)
    assert "keys" in prepared(model, batch()) and "keys" not in prepared(model.eval(), batch())


def test_too_long_a_sample_is_a_sentence():
    with pytest.raises(CourseError, match=r"12 tokens is longer than model.context=11"):
        prepared(make(), batch(length=13))


def test_example_has_the_shapes_of_a_batch():
    made = build_model(CONFIG).example(50, torch.device("cpu"))
    assert made["tokens"].shape == (50, 12) and made["sample"].tolist() == list(range(50))
    assert made["tokens"].unique().tolist() == list(range(37))
