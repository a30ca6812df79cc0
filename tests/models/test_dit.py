import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from course import config
from course.models import DiTConfig, build_model, diffusion
from course.parallel import initialize_serial

CONFIG = DiTConfig(latent=(3, 8, 4), patch=2, dim=24, depth=2, heads=3, mlp_ratio=2.0, classes=5)


def make(**changes):
    return initialize_serial(build_model(dataclasses.replace(CONFIG, **changes), 1), 1, torch.device("cpu"), torch.float64)


def shaken(**changes):
    """A model in which no weight is trivial: not even the gates, which start at zero."""
    model = make(**changes)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(p.numel()))
    return model


def batch(n=2, shape=(3, 8, 4)):
    x = torch.randn(n, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return {"latent": x, "label": torch.arange(n) % 5, "sample": torch.arange(n) + 10}


def by_hand(model, x, time, label):
    """The same formulas, written once more with nothing of the model but its weights: noised latents in, noise out."""
    w = dict(model.named_parameters())

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def modulated(x, shift, scale):
        return F.layer_norm(x, (24,), eps=1e-6) * (1 + scale[:, None, :]) + shift[:, None, :]

    def wave(t, dim):
        return [f(t / 10000 ** (2 * i / dim)) for f in (math.cos, math.sin) for i in range(dim // 2)]

    def gelu(x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    place = torch.tensor([wave(row, 12) + wave(column, 12) for row in range(4) for column in range(2)], dtype=torch.float64)
    h = linear("embed.proj", F.unfold(x, 2, stride=2).transpose(1, 2)) + place
    times = torch.tensor([wave(t, 256) for t in time.tolist()], dtype=torch.float64)
    c = linear("embed.time.down", F.silu(linear("embed.time.up", times))) + w["embed.label.weight"][label]
    for i in range(2):
        b = f"blocks.{i}"
        shift1, scale1, gate1, shift2, scale2, gate2 = linear(f"{b}.ada", F.silu(c)).split(24, -1)
        q, k, v = linear(f"{b}.attn.qkv", modulated(h, shift1, scale1)).split(24, -1)
        heads = []
        for s in (slice(0, 8), slice(8, 16), slice(16, 24)):
            heads.append(torch.softmax(q[..., s] @ k[..., s].transpose(1, 2) / math.sqrt(8), -1) @ v[..., s])
        h = h + gate1[:, None, :] * linear(f"{b}.attn.out", torch.cat(heads, -1))
        h = h + gate2[:, None, :] * linear(f"{b}.mlp.down", gelu(linear(f"{b}.mlp.up", modulated(h, shift2, scale2))))
    shift, scale = linear("head.ada", F.silu(c)).split(24, -1)
    return F.fold(linear("head.proj", modulated(h, shift, scale)).transpose(1, 2), (8, 4), 2, stride=2)


@pytest.mark.parametrize("objective", ["epsilon", "flow"])
def test_output_equals_the_formulas_written_again(objective):
    model, b = shaken(objective=objective), batch(3)
    ready = model.prepare(b, torch.tensor(4))
    expected = by_hand(model, model.fields(ready["input"]), ready["time"], ready["label"])
    torch.testing.assert_close(model.fields(model(ready)), expected, rtol=1e-10, atol=1e-10)


def test_blocks_start_as_the_identity_and_the_output_as_zero():
    model, b = make(), batch()
    ready = model.prepare(b, torch.tensor(0))
    x, c = model.embed(ready)
    assert all(torch.equal(block(x, c), x) for block in model.blocks.values())
    assert (model(ready) == 0).all()
    assert not torch.equal(shaken().blocks["0"](x, c), x)


def test_stages_hand_on_tokens_and_condition():
    whole, first, last = shaken(), shaken(), shaken()
    ready = whole.prepare(batch(), torch.tensor(0))
    del first.blocks["1"], last.blocks["0"]
    first.head = last.embed = None
    x, c = first(ready)
    assert x.shape == (2, 8, 24) and c.shape == (2, 24)
    assert torch.equal(last(ready, (x, c)), whole(ready))


def test_loss_is_the_sum_of_mean_squares_and_padding_weighs_nothing():
    model, b = shaken(), batch(3)
    b["sample"][1] = -1
    ready = model.prepare(b, torch.tensor(0))
    total, weight = model.loss(model(ready), ready)
    squares = (model.fields(model(ready)) - model.fields(ready["target"])).square().mean((1, 2, 3))
    assert total.item() == pytest.approx((squares[0] + squares[2]).item(), rel=1e-12) and weight.item() == 2
    assert model.loss.weight(ready).tolist() == [1, 0, 1]


def test_input_is_the_latent_noised_with_the_target():
    model, b = make(), batch(4)
    ready = model.prepare(b, torch.tensor(0))
    kept = [math.prod(1 - (1e-4 + (0.02 - 1e-4) * i / 999) for i in range(t + 1)) for t in ready["time"].tolist()]
    a = torch.tensor(kept, dtype=torch.float64)[:, None, None, None]
    expected = a.sqrt() * b["latent"] + (1 - a).sqrt() * model.fields(ready["target"])
    torch.testing.assert_close(model.fields(ready["input"]), expected, rtol=1e-10, atol=1e-10)


def test_flow_walks_from_the_latent_to_the_noise():
    """At time 0 the input is the latent, at STEPS the noise, and the target is the difference."""
    model, b = make(objective="flow"), batch(4)
    ready = model.prepare(b, torch.tensor(0))
    t = (ready["time"].double() / 1000)[:, None, None, None]
    velocity = model.fields(ready["target"])
    torch.testing.assert_close(model.fields(ready["input"]), b["latent"] + t * velocity, rtol=1e-10, atol=1e-10)
    noise = model.fields(make().prepare(b, torch.tensor(0))["target"])     # epsilon's target, from the same draw
    torch.testing.assert_close(velocity, noise - b["latent"], rtol=1e-10, atol=1e-10)
    ends = torch.tensor([0.0, 1000.0]).repeat(2)
    noise = torch.ones_like(b["latent"])
    seen, target = diffusion.noisy_example("flow", b["latent"], noise, ends)
    assert torch.equal(seen[0::2], b["latent"][0::2]) and torch.equal(seen[1::2], noise[1::2])
    assert torch.equal(target, noise - b["latent"])


def test_flow_times_are_uniform():
    n = 20_000
    b = {"latent": torch.zeros(n, 1, 4, 4), "label": torch.zeros(n, dtype=torch.int64), "sample": torch.arange(n)}
    time = make(latent=(1, 4, 4), objective="flow").prepare(b, torch.tensor(7))["time"].double()
    assert 0 < time.min() < 1 and 999 < time.max() < 1000
    assert time.mean().item() == pytest.approx(500, abs=4 * 1000 / (12 * n) ** 0.5)
    assert (time / 1000).var().item() == pytest.approx(1 / 12, rel=0.02)


def test_the_schedule_goes_from_almost_all_signal_to_almost_none():
    a = diffusion.signal_variance(torch.device("cpu"))
    assert len(a) == 1000 and (a.diff() < 0).all()
    assert a[0].item() == pytest.approx(1 - 1e-4, rel=1e-12) and a[-1].item() == pytest.approx(4.04e-5, rel=1e-2)


def test_draws_have_the_right_statistics():
    n = 20_000
    model = make(latent=(1, 4, 4), label_drop=0.25)
    b = {"latent": torch.zeros(n, 1, 4, 4, dtype=torch.float64), "label": torch.zeros(n, dtype=torch.int64),
         "sample": torch.arange(n)}
    ready = model.prepare(b, torch.tensor(7))
    noise, time, label = ready["target"].flatten(1), ready["time"], ready["label"]
    deviations = 4                                  # a draw of this seed, not of chance: it passes always or never
    assert abs(noise.mean().item()) < deviations / (16 * n) ** 0.5
    assert noise.var().item() == pytest.approx(1, abs=deviations * (2 / (16 * n)) ** 0.5)
    assert (noise.T @ noise / n - torch.eye(16)).abs().max().item() < 1.3 * deviations / n**0.5      # 120 pairs, all small
    assert time.min() == 0 and time.max() == 999
    assert time.double().mean().item() == pytest.approx(499.5, abs=deviations * 1000 / (12 * n) ** 0.5)
    assert label.unique().tolist() == [0, 5]
    assert (label == 5).double().mean().item() == pytest.approx(0.25, abs=deviations * (0.1875 / n) ** 0.5)
    seen = torch.stack([noise[:, 0], time.double(), (label == 5).double()])
    assert (torch.corrcoef(seen) - torch.eye(3)).abs().max().item() < deviations / n**0.5


def test_draws_depend_on_seed_step_and_sample_alone():
    model, b = make(), batch(4)
    ready = model.prepare(b, torch.tensor(3))
    part = model.prepare({name: tensor[[2, 1]] for name, tensor in b.items()}, torch.tensor(3))
    assert all(torch.equal(part[name], ready[name][[2, 1]]) for name in ready)
    assert not torch.equal(model.prepare(b, torch.tensor(4))["target"], ready["target"])
    other = build_model(CONFIG, seed=2).prepare(b, torch.tensor(3))
    assert not torch.equal(other["target"], ready["target"]) and not torch.equal(other["time"], ready["time"])


def test_evaluation_draws_the_same_at_every_step_and_drops_no_label():
    model, b = make(label_drop=1.0), batch(4)
    assert (model.prepare(b, torch.tensor(0))["label"] == 5).all()
    early, late = (model.eval().prepare(b, torch.tensor(step)) for step in (0, 9))
    assert torch.equal(early["label"], b["label"]) and early["target"].std() > 0.5
    assert all(torch.equal(early[name], late[name]) for name in early)


def test_xl_has_the_size_of_the_papers():
    """675 million parameters with the learned variance, twice as many outputs, and fixed positions (table 4)."""
    model = build_model(DiTConfig())
    count = sum(p.numel() for p in model.parameters()) + 16 * (1152 + 1)
    assert count == pytest.approx(675e6, rel=1e-3)


@pytest.mark.parametrize(("size", "millions"), [("s", 33), ("b", 130), ("l", 458), ("xl", 675)])
def test_presets_have_the_sizes_of_the_papers_table(size, millions):
    """Table 4, without the learned variance's outputs; patch 4 and 8 differ in the first and last layer alone."""
    for patch in (2, 4, 8):
        c = config.load(f"dit-{size}{patch}" if (size, patch) != ("xl", 2) else "dit-xl").model
        count = sum(p.numel() for p in build_model(c).parameters())
        assert c.patch == patch and c.tokens == (32 // patch) ** 2
        assert count - 2 * 4 * (patch**2 - 4) * c.dim == pytest.approx(millions * 1e6, rel=0.01)


@pytest.mark.parametrize(("name", "billions"), [("dit-3b", 3.04), ("dit-7b", 6.83)])
def test_wide_presets_have_their_sizes_and_divide_over_eight_ranks(name, billions):
    c = config.load(name).model
    assert sum(p.numel() for p in build_model(c).parameters()) / 1e9 == pytest.approx(billions, abs=0.005)
    assert c.heads % 8 == c.depth % 8 == 0 and c.dim == 128 * c.heads and c.tokens == 1024


def test_example_has_the_shapes_of_a_batch():
    made = build_model(CONFIG).example(50, torch.device("cpu"))
    assert made["latent"].shape == (50, 3, 8, 4) and made["sample"].tolist() == list(range(50))
    assert made["label"].unique().tolist() == list(range(5))
