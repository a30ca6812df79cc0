"""The steps between a block's matmuls, fused: what they compute, and blocks and whole trainings with them."""

from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import functional as F

from course import config, models
from course.ops import custom_op, fused_add_norm, fused_gelu
from course.parallel import build_mesh, join
from course.training import fuse_blocks
from course.training.assemble import assemble
from course.utils.errors import CourseError
from tests.training.test_compile import losses_and_graphs

torch.manual_seed(0)


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(("batch", "samples"), [(3, 1), (3, 3), (1, 1)])
@pytest.mark.parametrize("branch", ["none", "plain", "gated"])
def test_the_sum_and_its_norm_are_the_formulas_and_so_are_their_gradients(batch, samples, branch):
    x, weight, bias, offset = drawn(batch, 5, 8), drawn(samples, 8), drawn(samples, 8), float(samples == batch)
    y, gate = drawn(batch, 5, 8) if branch != "none" else None, drawn(batch, 8) if branch == "gated" and offset else None
    given = [t for t in (x, y, gate, weight, bias) if t is not None]
    whole = x if y is None else x + (y if gate is None else gate[:, None] * y)
    normed = F.layer_norm(whole, (8,), eps=1e-5) * (offset + weight[:, None]) + bias[:, None]
    before = torch.zeros(8, dtype=torch.float64, requires_grad=True)            # in y already
    if y is not None:
        whole, given = whole + before * (1 if gate is None else gate[:, None]), [*given, before]
        normed = F.layer_norm(whole, (8,), eps=1e-5) * (offset + weight[:, None]) + bias[:, None]
    z, n = fused_add_norm.add_norm(x, y, gate, weight, bias, 1e-5, offset, before if y is not None else None)
    torch.testing.assert_close((z, n), (whole, normed), rtol=1e-12, atol=1e-12)
    to_z, to_n = torch.randn_like(z), torch.randn_like(n)
    wanted = torch.autograd.grad((whole, normed), given, (to_z, to_n))
    torch.testing.assert_close(torch.autograd.grad((z, n), given, (to_z, to_n)), wanted, rtol=1e-11, atol=1e-12)


def test_the_last_sum_has_the_gradients_of_its_formula():
    x, y, gate, before = drawn(3, 5, 8), drawn(3, 5, 8), drawn(3, 8), torch.zeros(8, dtype=torch.float64, requires_grad=True)
    z, to_z = fused_add_norm.Add.apply(x, y, gate, before), torch.randn(3, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(z, x + gate[:, None] * y)
    wanted = torch.autograd.grad(x + gate[:, None] * (y + before), (x, y, gate, before), to_z)
    torch.testing.assert_close(torch.autograd.grad(z, (x, y, gate, before), to_z), wanted)


@pytest.mark.parametrize("step", [lambda x, w: fused_add_norm.add_norm(x, None, None, w, w, 1e-5, 0.0)[1],
                                  lambda x, w: fused_add_norm.Add.apply(x, x, w.expand(2, 8), None),
                                  lambda x, w: fused_gelu.Gelu.apply(x, None, True)], ids=["add_norm", "add", "gelu"])
def test_a_gradient_of_a_gradient_is_an_error(step):
    """And no number that lacks a part."""
    x, weight = drawn(2, 5, 8), drawn(1, 8)
    grad, = torch.autograd.grad(step(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.square().sum().backward()


def test_in_float64_a_gpu_computes_by_plain_operations():
    x, weight = drawn(2, 5, 8), drawn(1, 8)
    given = (x, None, None, weight, weight, 1e-5, 0.0, torch.float64)
    by_kernel = custom_op.with_kernel("add_norm", fused_add_norm.add_norm_plain, "between_kernel")
    torch.testing.assert_close(by_kernel(*given), fused_add_norm.add_norm_plain(*given))


def test_blocks_are_compiled_once_for_all_batches():
    """Once for the first number of samples, and once for any: one sample apart."""
    torch._dynamo.reset()
    counters.clear()
    c = config.load("dit-xl", ["model.latent=[4,8,8]", "model.dim=32", "model.depth=1", "model.heads=2"])
    model = fuse_blocks.fuse_blocks(models.build_model(c.model).to_empty(device="cpu"))
    block = torch.compile(model.blocks["0"], backend="aot_eager")
    for samples in (5, 4, 3, 6):
        block(torch.randn(samples, 9, 32, requires_grad=True), torch.randn(samples, 32)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 2


def test_the_norm_is_in_the_format_of_the_matmul_that_takes_it():
    x, weight = torch.randn(2, 3, 8), torch.ones(1, 8)
    with torch.autocast("cpu", torch.bfloat16):
        z, n = fused_add_norm.add_norm(x, x.bfloat16(), None, weight, weight, 1e-5, 0.0)
    assert z.dtype == torch.float32 and n.dtype == torch.bfloat16


SETTINGS = {"vit": ("vit-demo", "model.depth=3", "model.dropout=0.1", "model.drop_path=0.1"),
            "gpt": ("gpt-124m", "model.vocab=64", "model.context=16", "model.dim=32", "model.depth=3", "model.heads=2",
                    "model.dropout=0.1"),
            "dit": ("dit-xl", "model.latent=[4,8,8]", "model.dim=32", "model.depth=3", "model.heads=2", "optim.ema=0")}


def losses(kind, *settings):
    preset, *changes = SETTINGS[kind]
    c = config.load(preset, [*changes, "data.source=mock", "precision=fp64", "train.device=cpu", "train.global_batch=2",
                             "train.micro_batch=0", "optim.schedule=constant", "optim.warmup=0", "optim.lr=1e-2", *settings])
    with mock.patch("course.models.DiT.init_plan", lambda model: {"*": 0.2}):       # its zeros let few gradients through
        training = assemble(c, build_mesh(c.parallel, join("cpu")))
    batch = {name: x.double() if x.is_floating_point() else x
             for name, x in training.model.example(2, torch.device("cpu")).items()}
    return [training.step(batch)[0].item() for _ in range(4)]


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_training_is_the_same(kind, recompute):
    with mock.patch("course.training.fuse_blocks.add_norm", wraps=fused_add_norm.add_norm) as called:
        mine = losses(kind, "kernels=triton", f"train.recompute={recompute}")
    assert called.call_count >= 2 * 3 * 4           # two a block and step
    assert mine == pytest.approx(losses(kind), rel=1e-11) and mine[0] != pytest.approx(mine[-1], rel=1e-3)


def test_all_blocks_run_the_code_of_the_first_when_compiled():
    (eager, _), (compiled, graphs) = losses_and_graphs("kernels=triton"), losses_and_graphs("kernels=triton", "compile=true")
    assert compiled == pytest.approx(eager, rel=1e-12) and graphs == 4


def test_blocks_whose_norms_are_others_stay_as_they_are():
    c = config.load("gpt-124m", ["model.norm=rms", "model.depth=1", "model.dim=32", "model.heads=2", "model.vocab=64"])
    block = fuse_blocks.fuse_blocks(models.build_model(c.model)).blocks["0"]
    assert "forward" not in vars(block)


def test_a_gpu_that_triton_does_not_compile_for_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    with pytest.raises(CourseError, match=r"kernels=triton needs .*Tesla V100 has 7\.0: set kernels=pytorch"):
        fuse_blocks.check_device(torch.device("cuda"))
    fuse_blocks.check_device(torch.device("cpu"))
