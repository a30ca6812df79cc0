"""One optimizer step against plain PyTorch."""

import dataclasses

import pytest
import torch

from course import config
from course.models import build_model
from course.parallel import Mesh, World, build_gradient_sync, build_mesh, initialize, parallelize
from course.training import step as stepping
from course.training.optimizer import build_optimizer, learning_rate
from course.training.step import Progress, eager, train_step

CPU = torch.device("cpu")
SMALL = ["model.grid=[8,16]", "model.dim=16", "model.depth=2", "model.heads=2", "model.channels=3", "train.global_batch=4",
         "model.residual=false",
         "train.steps=20", "precision=fp64", "optim.clip=0", "optim.lr=0.1"]


def assemble(*overrides, device=CPU):
    settings = config.load("vit-demo", [*SMALL, *overrides])
    mesh: Mesh = build_mesh(settings.parallel, World())
    model = build_model(settings.model, settings.train.seed)
    layout = parallelize(model, mesh, settings.parallel)
    dtype = torch.float64 if settings.precision == "fp64" else torch.float32
    initialize(model, layout.placements, settings.train.seed, device, dtype)
    progress = Progress.start(settings, device)
    gradients = build_gradient_sync(model, layout, settings.parallel)
    optimizer = build_optimizer(gradients.optimizer_parameters, progress.lr, settings)
    compute = eager(model, progress, settings, layout)
    return settings, model, progress, optimizer, train_step(compute, model, gradients, optimizer, progress, settings, layout)


def batches(count, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [{"input": torch.randn(4, 3, 8, 16, generator=generator, dtype=dtype),
             "target": torch.randn(4, 3, 8, 16, generator=generator, dtype=dtype),
             "sample": torch.arange(4) + 4 * k} for k in range(count)]


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plain_training(settings, count, clip=0.0):
    """The same training with nothing of ours but the model: textbook PyTorch."""
    _, model, *_ = assemble("precision=fp64")
    kind = torch.optim.SGD if settings.optim.name == "sgd" else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=settings.optim.lr)
    losses = []
    for number, batch in enumerate(batches(count)):
        optimizer.param_groups[0]["lr"] = learning_rate(torch.tensor(number), settings).item()
        output = model.fields(model(model.prepare(batch, torch.tensor(0))))
        error = torch.stack([(o - t).norm() / t.norm() for o, t in zip(output, batch["target"], strict=True)])
        error.mean().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(error.mean().item())
    return weights(model), losses


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("micro", [0, 1, 2, 3])
def test_steps_equal_plain_pytorch_whatever_the_micro_batch(name, micro):
    settings, model, _, _, step = assemble(f"optim.name={name}", f"train.micro_batch={micro}")
    losses = [step(batch)[0].item() for batch in batches(5)]
    expected, expected_losses = plain_training(settings, 5)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    torch.testing.assert_close(weights(model), expected, rtol=0, atol=1e-9)       # lr is float32 in ours and in theirs


@pytest.mark.parametrize("clip", [1e-3, 0.05, 1e6])
def test_clipping_equals_plain_pytorch(clip):
    settings, model, _, _, step = assemble("optim.name=sgd", f"optim.clip={clip}")
    for batch in batches(5):
        step(batch)
    expected, _ = plain_training(settings, 5, clip)
    torch.testing.assert_close(weights(model), expected, rtol=0, atol=1e-8)


def test_padding_weighs_nothing():
    _, model, *_ = assemble()
    batch = batches(1)[0]
    padded = {name: torch.cat([value, torch.zeros_like(value[:2])]) for name, value in batch.items()}
    padded["sample"][-2:] = -1
    batch, padded = (model.prepare(b, torch.tensor(0)) for b in (batch, padded))
    whole, padding = model.loss(model(batch), batch), model.loss(model(padded), padded)
    assert whole[1] == padding[1] == 4
    torch.testing.assert_close(whole[0], padding[0])


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(name, poison):
    _, model, progress, optimizer, step = assemble(f"optim.name={name}", "optim.momentum=0.9")
    good = batches(3)
    step(good[0])
    before = weights(model).clone()
    states = [{k: v.clone() for k, v in optimizer.state[p].items() if v is not None} for p in model.parameters()]
    bad = {**good[1], "target": good[1]["target"].clone()}
    bad["target"][2, 1, 3, 3] = poison
    step(bad)
    assert torch.equal(weights(model), before)
    for p, state in zip(model.parameters(), states, strict=True):
        assert all(torch.equal(optimizer.state[p][key], value) for key, value in state.items())
    assert (progress.skipped_steps, progress.nan_steps, progress.streak, progress.step) == (1, 1, 1, 2)
    step(good[2])
    assert not torch.equal(weights(model), before)
    assert (progress.streak.item(), progress.longest_streak.item()) == (0, 1)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_first_step_that_is_not_finite_leaves_no_trace_in_the_others(name):
    """Memory that PyTorch takes and does not fill has anything in it; here it is poisoned."""
    torch.use_deterministic_algorithms(True)                            # fills `torch.empty` with NaN
    try:
        same = (f"optim.name={name}", "optim.momentum=0.9", "optim.schedule=constant", "optim.warmup=0")
        (_, model, _, _, step), (_, other, _, _, right) = assemble(*same), assemble(*same)
        first, *good = batches(4)
        step({**first, "target": first["target"] * float("nan")})
        for batch in good:
            step(batch)
            right(batch)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(weights(model), weights(other))


def test_fp16_scale_halves_after_overflow_and_doubles_after_many_good_steps():
    _, _, progress, _, step = assemble("precision=fp16", "optim.lr=0")
    good = batches(1, torch.float32)[0]
    bad = {**good, "target": good["target"] * float("inf")}
    start = progress.loss_scale.item()
    step(bad)
    assert progress.loss_scale.item() == start / 2
    progress.good_steps.fill_(1999)
    step(good)
    assert (progress.loss_scale.item(), progress.good_steps.item()) == (start, 0)


def test_loss_scale_does_not_reach_the_update():
    _, model, _, _, step = assemble("optim.name=sgd")
    _, other, scaled, _, step_scaled = assemble("optim.name=sgd")
    scaled.loss_scale.fill_(1024.0)
    for batch in batches(3):
        (_, norm), (_, norm_scaled) = step(batch), step_scaled(batch)
        assert norm.item() == pytest.approx(norm_scaled.item())
    torch.testing.assert_close(weights(model), weights(other), rtol=0, atol=1e-12)


def test_learning_rate_warms_up_then_follows_half_a_cosine():
    settings = config.load("vit-demo", ["train.steps=110", "optim.warmup=10", "optim.lr=1", "optim.min_lr=0.1"])
    rates = [learning_rate(torch.tensor(n), settings).item() for n in range(110)]
    assert rates[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    assert rates[60] == pytest.approx(0.55) and rates[109] == pytest.approx(0.1, abs=1e-3)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    constant = config.load("vit-demo", ["optim.schedule=constant", "optim.warmup=0", "optim.lr=0.3"])
    assert learning_rate(torch.tensor(77), constant).item() == pytest.approx(0.3)


def test_no_step_waits_for_the_device(monkeypatch):
    """`.item()` and its kin are how a host waits; a step must not call them."""
    _, _, _, _, step = assemble("train.micro_batch=2", "optim.clip=1")
    step(batches(1)[0])                                                 # states are made

    def refuse(*_):
        raise AssertionError("the step read a tensor on the host")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    step(batches(1)[0])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_follows_fp32(precision):
    """16-bit matmuls have 8 or 11 bits; over ten steps the loss stays within 2%."""
    losses = {}
    for name in ("fp32", precision):
        _, _, _, _, step = assemble(f"precision={name}", "optim.lr=1e-2")
        losses[name] = [step(batch)[0].item() for batch in batches(1, torch.float32) * 10]
    assert losses["fp32"][-1] < 0.95 * losses["fp32"][0]
    assert losses[precision] == pytest.approx(losses["fp32"], rel=0.02)


def test_dropout_is_a_function_of_step_and_sample_not_of_the_split():
    dropping = ["model.dropout=0.3", "model.drop_path=0.3", "optim.name=sgd"]
    whole, split = (assemble(*dropping, f"train.micro_batch={m}")[1:] for m in (0, 1))
    for batch in batches(3):
        whole[-1](batch)
        split[-1](batch)
    torch.testing.assert_close(weights(whole[0]), weights(split[0]), rtol=0, atol=1e-12)
    none = assemble("optim.name=sgd")[1:]
    for batch in batches(3):
        none[-1](batch)
    assert (weights(whole[0]) - weights(none[0])).abs().max() > 1e-4


def test_state_and_restore_are_inverse():
    progress = Progress.start(config.load("vit-demo"), CPU)
    progress.step += 5
    progress.loss_scale *= 3
    other = Progress.start(config.load("vit-demo"), CPU)
    other.restore(progress.state())
    assert other.state() == progress.state()
    assert {f.name for f in dataclasses.fields(stepping.Progress)} == set(progress.state())
