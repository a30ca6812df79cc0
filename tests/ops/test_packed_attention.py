"""Attention over packed queries, keys and values: what it computes, whose attention it takes the place of, and whose not."""

import pytest
import torch
from torch.nn import functional as F

from course import config, models
from course.bench import results
from course.ops.packed_attention import is_faster, packed_attention, supports_precision
from course.parallel import build_mesh, join
from course.planner import hardware
from course.planner.rank_workload import workload_of
from course.training import fuse_blocks
from course.training.assemble import assemble

SMALL = {"vit": ("vit-demo", "model.depth=1"),
         "gpt": ("gpt-124m", "model.vocab=64", "model.context=16", "model.dim=32", "model.depth=1", "model.heads=2"),
         "dit": ("dit-xl", "model.latent=[4,8,8]", "model.dim=32", "model.depth=1", "model.heads=2")}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 3, 2, 4), (1, 1, 3, 1, 3), (3, 7, 3, 1, 9)])
def test_it_is_pytorchs_attention_and_so_are_its_gradients(shape, causal):
    torch.manual_seed(0)
    bias = torch.zeros(shape[2:], dtype=torch.float64, requires_grad=True)
    qkv = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    mine = packed_attention(qkv, bias.flatten(), causal)
    wanted = F.scaled_dot_product_attention(*(qkv + bias).permute(2, 0, 3, 1, 4), is_causal=causal).transpose(1, 2)
    torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)
    to_y = torch.randn_like(mine)
    torch.testing.assert_close(torch.autograd.grad(mine, (qkv, bias), to_y), torch.autograd.grad(wanted, (qkv, bias), to_y),
                               rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [None, torch.float64, torch.float32])
def test_with_more_scores_than_have_room_a_cpu_takes_pytorchs_attention(bias, causal, monkeypatch):
    """The same answers and gradients."""
    torch.manual_seed(0)
    qkv = torch.randn(2, 16, 3, 3, 4, dtype=torch.float64, requires_grad=True)
    given = [qkv, torch.randn(36, dtype=bias, requires_grad=True)] if bias else [qkv]

    def run():
        y = packed_attention(qkv, given[1] if bias else None, causal)
        assert y.shape == (2, 16, 3, 4)
        return y, *torch.autograd.grad(y.square().sum(), given)

    monkeypatch.setattr("course.ops.packed_attention.MOST", 2 * 3 * 16 * 16)
    formula = run()
    monkeypatch.setattr("course.ops.packed_attention.PackedAttention", None)
    with pytest.raises(AttributeError):             # what has room is computed by the formula
        run()
    monkeypatch.setattr("course.ops.packed_attention.MOST", 2 * 3 * 16 * 16 - 1)
    torch.testing.assert_close(run(), formula, rtol=0, atol=1e-5 if bias == torch.float32 else 1e-12)


def test_a_gradient_of_a_gradient_is_an_error():
    qkv = torch.randn(1, 4, 3, 1, 4, requires_grad=True)
    grad, = torch.autograd.grad(packed_attention(qkv, None, False).square().sum(), qkv, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.square().sum().backward()


@pytest.mark.parametrize("cast", [False, True])
def test_in_16_bits_it_computes_in_32_and_rounds_once(cast):
    """Also under autocast, as in a model; there backward, too, where a block is computed again."""
    torch.manual_seed(0)
    qkv, dy = (torch.randn(shape).bfloat16() for shape in ((2, 16, 3, 2, 8), (2, 16, 2, 8)))
    with torch.autocast("cpu", torch.bfloat16, cast):
        y, lse = torch.ops.course.attention(qkv, True)
        dqkv, sums = torch.ops.course.attention_backward(dy, qkv, y, lse, True)
    exact, top = torch.ops.course.attention(qkv.double(), True)
    wanted = torch.ops.course.attention_backward(dy.double(), qkv.double(), y.double(), top, True)[0]
    assert lse.dtype == sums.dtype == torch.float32
    for mine, its in ((y, exact), (dqkv, wanted)):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.double(), its.bfloat16().double(), rtol=2**-8, atol=1e-6)
    assert torch.equal(y.double(), exact.bfloat16().double())
    torch.testing.assert_close(lse.double(), top, rtol=1e-6, atol=1e-6)


def test_shapes_alone_are_known_on_the_meta_device():
    qkv = torch.empty(2, 16, 3, 2, 8, device="meta", dtype=torch.bfloat16)
    assert packed_attention(qkv, None, True).shape == (2, 16, 2, 8)


def is_packed(attn):
    """Whether attention computes over what the linear before it puts out."""
    return isinstance(attn, fuse_blocks.PackedAttention | fuse_blocks.PackedGroupedAttention)


def packed(preset, *settings):
    """Whether the attention of the first block is."""
    c = config.load(preset, settings).model
    return is_packed(fuse_blocks.fuse_blocks(models.build_model(c), tokens=c.tokens).blocks["0"].attn)


@pytest.mark.parametrize("kind", SMALL)
def test_all_models_have_it(kind):
    assert packed(*SMALL[kind])


@pytest.mark.parametrize("setting", ["model.position=rotary", "model.kv_heads=1", "model.dim=256", "model.dim=24",
                                     "model.qk_norm=true"])
def test_attention_of_another_kind_stays_as_it_is(setting):
    """Turned or normed queries, shared keys, heads of 128, for which PyTorch's is faster, and of 12, which no kernel takes."""
    assert not packed(*SMALL["gpt"], setting)


@pytest.mark.parametrize(("preset", "settings", "wanted"), [
    ("vit-short", (), False), ("gpt-124m", (), True), ("gpt-124m", ("model.context=2048",), False), ("dit-xl", (), True),
    ("dit-xl", ("model.latent=[4,64,64]",), True), ("dit-b2", (), True), ("dit-b2", ("model.latent=[4,64,64]",), False)])
def test_long_samples_keep_pytorchs_attention_unless_it_pads_their_heads(preset, settings, wanted):
    c = config.load(preset, (*settings, "kernels=triton", "precision=bf16"))
    assert packed(preset, "model.depth=1", *settings) == wanted
    assert workload_of(c, hardware.load("h200"), 1).packed == wanted                   # the planner expects the same


def test_the_faster_attention_is_the_one_that_was_measured_as_faster():
    for row in results.load("packed_attention_h200")["rows"]:
        share = row["packed_ms"] / (row["pytorch_ms"] + row["packing_ms"])
        if abs(share - 1) > 0.02:
            assert is_faster(row["head_dim"], row["tokens"], row["causal"]) == (share < 1), row


def test_a_bias_of_attention_that_stays_keeps_its_gradient():
    preset, *settings = SMALL["gpt"]
    attn = fuse_blocks.fuse_blocks(models.build_model(config.load(preset,
                                                                  [*settings, "model.position=rotary"]).model)).blocks["0"].attn
    assert fuse_blocks.deferred_bias(attn.qkv) is None


@pytest.mark.parametrize(("settings", "wanted"), [((), True), (("attention=math",), False), (("kernels=pytorch",), False)])
def test_a_backend_that_is_named_is_taken(settings, wanted):
    preset, *small = SMALL["dit"]
    c = config.load(preset, [*small, "kernels=triton", "train.device=cpu", "precision=fp32", *settings])
    attn = assemble(c, build_mesh(c.parallel, join("cpu"))).model.blocks["0"].attn
    assert is_packed(attn) == wanted


@pytest.mark.parametrize(("precision", "capability", "can"), [
    ("bf16", (9, 0), True), ("fp8", (9, 0), True), ("tf32", (9, 0), False), ("fp64", (9, 0), False), ("bf16", (8, 0), True),
    ("fp16", (7, 5), False), ("fp64", None, True)])
def test_on_gpus_it_is_for_16_bits_and_from_ampere_on(precision, capability, can, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    assert supports_precision(precision, torch.device("cuda" if capability else "cpu")) == can
