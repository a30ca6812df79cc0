"""Context parallelism pretended in one process is the real one, and serial training; each bug is where it should be."""

import pytest
import torch

from course import parallel
from course.lab.instruments import emulated_context_parallel as emulated
from course.models import build_model
from course.ranks.notebook_ranks import ranks
from course.training import assemble


def serial_gradients() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = parallel.initialize_serial(build_model(emulated.MODEL), 0,
                              emulated.CPU, torch.float64)
    batch = {name: x.double() if x.is_floating_point() else x for name, x in next(emulated.waves(1)).items()}
    ready = model.prepare(batch, torch.tensor(3))
    loss = model.loss(model(ready), ready)[0]
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters()}


def pretended_gradients(bug: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Gradients under serial names; those of two copies added up."""
    model = emulated.build(bug, torch.float64)
    batch = {name: x.double() if x.is_floating_point() else x for name, x in next(emulated.waves(1)).items()}
    ready = emulated.prepare(model, batch, 3, bug)
    loss = model.loss(model(ready), ready)[0]
    loss.backward()
    found: dict[str, torch.Tensor] = {}
    for name, p in model.named_parameters(remove_duplicate=True):
        name = name.replace(".each.0", "").replace(".each.1", "")
        found[name] = found.get(name, 0) + p.grad
    return loss, found


@pytest.mark.parametrize("bug", [emulated.RIGHT, emulated.NOT_AVERAGED,
                                 emulated.CONDITION])
def test_without_a_bug_all_is_as_in_one_process(bug):
    """Copies are equal at first, so their gradients add up to the serial ones: what is wrong is that nobody adds them."""
    (expected, wanted), (loss, found) = serial_gradients(), pretended_gradients(bug)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert set(found) == set(wanted)
    moved = [name for name, grad in wanted.items() if not torch.allclose(found[name], grad, rtol=1e-9, atol=1e-15)]
    assert not moved


def test_a_gradient_that_is_missing_changes_no_loss():
    (expected, wanted), (loss, found) = serial_gradients(), pretended_gradients(emulated.NO_GRADIENT)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert torch.allclose(found["head.proj.weight"], wanted["head.proj.weight"], rtol=1e-9)


@pytest.mark.parametrize("bug", emulated.BUGS)
def test_first_losses_tell_what_is_wrong_forward_if_weights_are_not_trivial(bug):
    """From fresh weights nothing that blocks compute reaches the loss."""
    def differs(shake: float) -> bool:
        return abs(emulated.first_loss(bug, shake)
                   / emulated.first_loss(shake=shake) - 1) > 1e-10

    assert differs(0.1) == (bug in (emulated.POSITIONS, emulated.OWN_NOISE,
                                    emulated.SAME_NOISE, emulated.OWN_HALF))
    assert differs(0.0) == (bug in (emulated.OWN_NOISE, emulated.SAME_NOISE))


def test_losses_of_both_loops_are_the_same():
    """The lesson compares FP8 in the library's loop, and candidates in the short one here: the same task."""
    torch.testing.assert_close(emulated.losses(6, "precision=fp32"),
                               emulated.loss_curve(6).to(torch.float32), rtol=2e-3, atol=0)


def two_ranks(bug: str) -> torch.Tensor:
    """Losses of the library's context parallelism on this task, with a bug."""
    from course import config
    from course.models import layers

    m = emulated.MODEL
    c = config.load("dit-demo", [
        f"model.latent={list(m.latent)}", f"model.dim={m.dim}", f"model.depth={m.depth}", "model.objective=flow", "parallel.cp=2",
        f"optim.lr={emulated.RATE}", f"optim.warmup={emulated.WARMUP}",
        "optim.schedule=constant", "optim.clip=0",
        f"train.global_batch={emulated.SAMPLES}", "train.device=cpu", "parallel.context=gather",
        f"parallel.data={'none' if bug == emulated.NOT_AVERAGED else 'naive'}"])
    training = assemble.assemble(c, parallel.build_mesh(c.parallel, parallel.join("cpu")))
    model, tokens = training.model, training.layout.tokens
    cut = tokens.cut
    if bug == emulated.POSITIONS:
        tokens.cut = lambda batch: (b := cut(batch)) | {"position": b["position"] - b["position"][:, :1]}
    if bug == emulated.OWN_HALF:
        for block in model.blocks.values():
            block.attn.core = layers.Attend()
    if bug == emulated.OWN_NOISE:
        model.seed = training.mesh.cp.rank
    return torch.stack([training.step(batch)[0] for batch in emulated.waves(8)])


@pytest.mark.slow
@pytest.mark.parametrize("bug", [emulated.RIGHT, emulated.POSITIONS, emulated.OWN_HALF, emulated.OWN_NOISE,
                                 emulated.NOT_AVERAGED])
def test_pretended_ranks_lose_what_two_ranks_lose(bug):
    """In float32, over steps that warm up: rounding grows, but a bug is far larger."""
    found = ranks(2)(two_ranks, bug)[0]
    torch.testing.assert_close(emulated.loss_curve(8, bug), found.float(), rtol=2e-3, atol=0)
