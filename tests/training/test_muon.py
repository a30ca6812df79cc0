"""Muon: its update by formulas of its own, its checkpoints, and what it leaves alone."""

import math

import pytest
import torch
from torch import nn

from course import config
from course.models import build_model
from course.ops.muon import orthogonal_update, orthogonalize
from course.parallel import build_mesh, join
from course.training.assemble import assemble

SMALL = ["model.grid=[8,16]", "model.channels=3", "model.patch=4", "model.dim=16", "model.depth=2", "model.heads=4",
         "data.source=mock", "optim.name=muon", "optim.lr=0.01", "optim.weight_decay=0.1", "optim.warmup=0", "optim.clip=0",
         "optim.schedule=constant", "precision=fp64", "train.device=cpu", "train.global_batch=4", "train.steps=4"]


def polynomial(matrix):
    """The same by singular values: U p(p(p(p(p(S / |S|))))) Vᵀ, where p(s) = 3.4445 s - 4.775 s³ + 2.0315 s⁵."""
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vt


def build(*overrides):
    c = config.load("vit-demo", [*SMALL, *overrides])
    return assemble(c, build_mesh(c.parallel, join("cpu")), noise=0.02)                    # no gradient is zero


def batch():
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(4, 3, 8, 16, generator=generator, dtype=torch.float64) for name in ("input", "target")}
    return {**drawn, "sample": torch.arange(4)}


@pytest.mark.parametrize("shape", [(6, 6), (4, 11), (13, 5), (1, 7)])
def test_orthogonalization_is_the_polynomial_of_singular_values(shape):
    torch.manual_seed(0)
    matrix = 1e-3 * torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(orthogonalize(matrix), polynomial(matrix), rtol=0, atol=1e-12)
    assert torch.linalg.svdvals(orthogonalize(matrix)).sub(1).abs().max() < 0.4
    assert torch.equal(orthogonalize(0 * matrix), 0 * matrix)


def test_stacked_weights_are_matrices_of_their_own():
    torch.manual_seed(0)
    qkv = torch.randn(3, 4, 2, 8, dtype=torch.float64)
    expected = torch.stack([0.2 * math.sqrt(8) * polynomial(each.reshape(8, 8)).view(4, 2, 8) for each in qkv])
    torch.testing.assert_close(orthogonal_update(qkv), expected, rtol=0, atol=1e-12)


def test_two_steps_follow_the_formula_of_moonlight():
    """One linear of a block: momentum, Nesterov's look ahead, scale and decoupled decay, for gradients that the step computed."""
    training = build("optim.muon_momentum=0.9")
    weight = training.model.get_parameter("blocks.1.mlp.up.weight")
    expected, momentum, given = weight.detach().clone(), torch.zeros_like(weight), []
    weight.register_post_accumulate_grad_hook(lambda p: given.append(p.grad.clone()))
    for _ in range(2):
        training.step(batch())
        momentum = 0.9 * momentum + given[-1]
        rate = float(training.progress.lr)
        expected = expected * (1 - rate * 0.1)
        expected -= rate * 0.2 * math.sqrt(max(weight.shape)) * polynomial(given[-1] + 0.9 * momentum)
        torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-11)


def test_update_is_that_of_pytorchs_muon_in_bf16():
    """PyTorch's orthogonalizes in bf16 only; its momentum is an average, which changes the scale of the gradient alone."""
    torch.manual_seed(0)
    gradient = torch.randn(24, 40)
    weight = nn.Parameter(torch.zeros(24, 40))
    weight.grad = gradient.clone()
    torch.optim.Muon([weight], 1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    torch.testing.assert_close(-weight.detach(), orthogonal_update(gradient), rtol=0, atol=0.05)


def test_triton_kernels_leave_muon_and_its_adamw_as_they_are():
    """Only the blocks' operators change: AdamW of the other parameters is PyTorch's, and there are no 16-bit masters."""
    plain, fused = build(), build("kernels=triton")
    assert type(fused.optimizer.adamw) is torch.optim.AdamW and not build("kernels=triton", "precision=bf16").config.masters
    for _ in range(2):
        plain.step(batch())
        fused.step(batch())
    for ours, theirs in zip(fused.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_only_linears_of_blocks_are_orthogonalized():
    training = build()
    training.step(batch())
    linears = {f"blocks.{block}.{name}.weight" for block in range(2) for name in ("attn.qkv", "attn.out", "mlp.up", "mlp.down")}
    names = dict(training.model.named_parameters())
    assert {name for name, p in names.items() if "momentum" in training.optimizer.state[p]} == linears
    assert {name for name, p in names.items() if "exp_avg" in training.optimizer.state[p]} == names.keys() - linears


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_a_step_that_is_not_finite_leaves_muon_as_it_was(ema):
    training = build(f"optim.ema={ema}")
    training.step(batch())
    states = [value for p in training.model.parameters() for value in (p.detach(), *training.optimizer.state[p].values())]
    states += list(training.optimizer.average.values.values()) if ema else []
    before = [value.clone() for value in states]
    bad = batch()
    bad["target"][0, 0, 0, 0] = float("nan")
    training.step(bad)
    assert all(torch.equal(old, new) for old, new in zip(before, states, strict=True))
    training.step(batch())
    assert not any(torch.equal(old, new) for old, new in zip(before, states, strict=True))


def test_the_average_follows_hidden_weights():
    training = build("optim.ema=0.5")
    first = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    training.step(batch())
    for name, p in training.model.named_parameters():
        torch.testing.assert_close(training.optimizer.average.values[p], (first[name] + p.detach()) / 2)


def test_gpt_hidden_matrices_leave_embedding_and_head_to_adamw():
    from course.parallel import serial_placements
    from course.training.optimizer import is_hidden_matrix

    model = build_model(config.load("gpt-demo", ["model.tied=false", "model.mlp=swiglu", "model.kv_heads=2"]).model)
    hidden = {where.name for where in serial_placements(model).values() if is_hidden_matrix(where)}
    assert hidden and all(name.startswith("blocks.") and "norm" not in name for name in hidden)
