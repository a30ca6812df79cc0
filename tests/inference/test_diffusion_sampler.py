"""Samplers against distributions whose best predictor is known in closed form."""

import dataclasses
from itertools import pairwise

import pytest
import torch

from course.inference import diffusion_sampler
from course.inference.diffusion_sampler import SamplerSettings, ddim, euler, guided, sample_latents
from course.models import DiTConfig, build_model, diffusion
from course.parallel import initialize_serial
from course.utils.errors import CourseError

MEAN, SPREAD = 2.0, 0.5                             # of the data, Gaussian
CONFIG = DiTConfig(latent=(4, 4, 4), patch=2, dim=16, depth=2, heads=2, classes=3)


def best_noise(x, time):
    """E[noise | x_t] for Gaussian data: linear regression of the noise on x_t."""
    a = diffusion.signal_variance(torch.device("cpu"))[time].view(-1, 1, 1, 1)
    return (1 - a).sqrt() * (x - a.sqrt() * MEAN) / (a * SPREAD**2 + 1 - a)


def best_velocity(x, time):
    """E[noise - x0 | x_t], in the same way."""
    t = (time / 1000).view(-1, 1, 1, 1)
    rest = (x - (1 - t) * MEAN) / ((1 - t) ** 2 * SPREAD**2 + t**2)
    return t * rest - (MEAN + (1 - t) * SPREAD**2 * rest)


def line_of(sampler):
    """A sampler of Gaussian data is a line, x -> slope·x + offset: of standard normal noise it makes N(offset, slope²)."""
    zero, one = sampler(torch.tensor([0.0, 1.0], dtype=torch.float64).view(2, 1, 1, 1)).flatten().tolist()
    return zero, one - zero


@pytest.mark.parametrize(("name", "bound"), [("ddim", 2.0), ("euler", 1.5)])
def test_mean_and_spread_are_those_of_the_data_and_more_steps_come_closer(name, bound):
    errors = []
    for steps in (10, 20, 40, 80, 160):
        run = (lambda x, n=steps: ddim(best_noise, x, n)) if name == "ddim" else lambda x, n=steps: euler(best_velocity, x, n)
        mean, spread = line_of(run)
        errors.append(max(abs(mean - MEAN), abs(spread - SPREAD)))
    assert all(error < bound / steps for error, steps in zip(errors, (10, 20, 40, 80, 160), strict=True)), errors
    assert all(later < 0.7 * earlier for earlier, later in pairwise(errors)), errors


def test_one_step_of_ddim_is_the_predicted_sample_and_of_euler_a_whole_walk():
    x = torch.randn(3, 1, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a = diffusion.signal_variance(torch.device("cpu"))[999]
    e = best_noise(x, torch.full((3,), 999))
    torch.testing.assert_close(ddim(best_noise, x, 1), (x - (1 - a).sqrt() * e) / a.sqrt(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(euler(best_velocity, x, 1), x - best_velocity(x, torch.full((3,), 1000.0)), rtol=0, atol=0)


@pytest.mark.parametrize(("eta", "start"), [(0.5, 0.25), (1.0, 0.05)])
def test_fresh_noise_keeps_the_distribution(eta, start):
    """With eta a sampler is a line plus independent noise: its variance is that of all parts together, exactly."""
    steps = 200
    offset, slope = line_of(lambda x: ddim(best_noise, x, steps, eta, lambda step: torch.zeros_like(x)))
    impulses = torch.eye(steps, dtype=torch.float64).view(steps, steps, 1, 1, 1)        # step k's noise reaches sample k alone
    zero = torch.zeros(steps, 1, 1, 1, dtype=torch.float64)
    weights = ddim(best_noise, zero, steps, eta, lambda step: impulses[step]).flatten() - offset
    assert offset == pytest.approx(MEAN, abs=0.02)
    assert (slope**2 + weights.square().sum().item()) ** 0.5 == pytest.approx(SPREAD, abs=0.02)
    assert slope < start * SPREAD                   # the start is forgotten, the more the larger eta


def make(**changes):
    """A model in which no weight is trivial."""
    model = initialize_serial(build_model(dataclasses.replace(CONFIG, **changes)), 1, torch.device("cpu"), torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(p.numel()))
    return model


@pytest.mark.parametrize(("objective", "eta"), [("epsilon", 0.0), ("epsilon", 1.0), ("flow", 0.0)])
def test_a_sample_does_not_depend_on_its_batch(objective, eta):
    model, labels = make(objective=objective), torch.arange(7) % 3
    whole = sample_latents(model, labels, SamplerSettings(steps=5, eta=eta, batch=7, seed=3), "fp64")
    parts = sample_latents(model, labels, SamplerSettings(steps=5, eta=eta, batch=2, seed=3), "fp64")
    assert whole.shape == (7, 4, 4, 4) and whole.dtype == torch.float64
    torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(whole, sample_latents(model, labels, SamplerSettings(steps=5, eta=eta, seed=4), "fp64"))
    assert not torch.allclose(whole[0], whole[3])   # of the same class


def test_guidance_leads_away_from_the_unknown_class():
    model, x = make(), torch.randn(2, 4, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels, time = torch.tensor([2, 0]), torch.tensor([7, 900])
    known, unknown = (guided(model, y, 1.0)(x, time) for y in (labels, torch.tensor([3, 3])))
    assert not torch.allclose(known, unknown)
    torch.testing.assert_close(guided(model, labels, 4.0)(x, time), unknown + 4 * (known - unknown), rtol=1e-10, atol=1e-10)
    first = guided(model, labels, 4.0, channels=3)(x, time)
    torch.testing.assert_close(first[:, :3], (unknown + 4 * (known - unknown))[:, :3], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(first[:, 3:], known[:, 3:], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("label_drop", "scale"), [(0.1, 4.0), (0.0, 1.0)])
def test_guidance_is_usual_where_it_was_trained(label_drop, scale):
    model, labels = make(label_drop=label_drop), torch.tensor([0, 1])
    found = [sample_latents(model, labels, SamplerSettings(steps=2, **how), "fp64") for how in ({}, {"guidance": scale})]
    assert torch.equal(*found)


def test_guidance_is_one_batch_and_scale_1_needs_no_second_half():
    sizes = []
    model = make()
    model.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0]["input"])))
    sample_latents(model, torch.tensor([0, 1, 2]), SamplerSettings(steps=2, guidance=4.0), "fp64")
    sample_latents(model, torch.tensor([0, 1, 2]), SamplerSettings(steps=2, guidance=1.0), "fp64")
    assert sizes == [6, 6, 3, 3]


@pytest.mark.parametrize(("changes", "words"), [
    ({"sampler": "euler"}, "euler does not fit a model with model.objective=epsilon: use ddim"),
    ({"steps": 0}, "0 steps: a sampler takes 1 to 1000"), ({"steps": 1001}, "1001 steps"),
    ({"channels": 5}, "guidance of 5 channels: the model has 4")])
def test_what_cannot_be_drawn_is_a_sentence(changes, words):
    with pytest.raises(CourseError, match=words):
        sample_latents(make(), torch.tensor([0]), SamplerSettings(**changes))
    with pytest.raises(CourseError, match=r"guidance=4\.0 needs .* model\.label_drop=0 hides none: use 1"):
        diffusion_sampler.choose_sampler(SamplerSettings(guidance=4.0), dataclasses.replace(CONFIG, label_drop=0.0))
    with pytest.raises(CourseError, match="euler adds none"):
        diffusion_sampler.choose_sampler(SamplerSettings(eta=1.0), dataclasses.replace(CONFIG, objective="flow"))
