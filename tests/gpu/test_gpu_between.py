"""The kernels between a block's matmuls, and Adam's: they compute what PyTorch does, and so do trainings with them."""

from typing import Any

import pytest
import torch

from course import config
from course.ops import fused_adam, fused_add_norm, fused_gelu
from course.ops.ema import MovingAverage
from course.parallel import build_mesh, join
from course.training.assemble import assemble

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def drawn(*shape, dtype):
    return torch.randn(shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize(("samples", "shape"), [(3, (3, 37, 1152)), (1, (2, 50, 768)), (2, (2, 16, 100)), (1, (1, 5, 5000))])
@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-10)])
def test_sums_norms_and_their_gradients_are_those_of_float64(samples, shape, branch, dtype, bound):
    torch.manual_seed(0)
    x = drawn(shape[0], 1 + shape[1], shape[2], dtype=dtype)[:, 1:]              # a piece of the tokens, in several of memory
    y, gate = drawn(*shape, dtype=dtype), drawn(shape[0], shape[2], dtype=dtype)
    weight, bias = drawn(samples, 2 * shape[2], dtype=dtype).chunk(2, 1)        # rows of a wider tensor, as adaLN's are
    y, gate, offset = y if branch else None, gate if branch and samples == len(x) else None, float(samples > 1)
    exact = [t.double().cpu() if t is not None else None for t in (x, y, gate, weight, bias)]
    found = torch.ops.course.add_norm(x, y, gate, weight, bias, 1e-5, offset, dtype)
    wanted = fused_add_norm.add_norm_plain(*exact, 1e-5, offset, torch.float64)
    for mine, its in zip(found, wanted, strict=True):
        assert (mine.double().cpu() - its).norm() <= bound * its.norm()
    dz, dn, z = drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype), found[0] if branch else x
    for to_z in (dz, None):
        given = (to_z, dn, z, y if gate is not None else None, gate, weight, *found[2:])
        back = torch.ops.course.add_norm_backward(*given, offset, True, dtype, dtype)
        wanted = fused_add_norm.add_norm_backward_plain(*(t.double().cpu() if t is not None else None for t in given), offset,
                                                        True,
                                                 torch.float64, torch.float64)
        for mine, its in zip(back, wanted, strict=True):
            assert (mine.double().cpu() - its).norm() <= bound * its.norm()
    if gate is not None:
        _, dy, sums = torch.ops.course.add_norm_backward(dz, None, None, y, gate, None, None, None, 1.0, True, dtype, dtype)
        assert (dy.double() - dz.double() * gate.double()[:, None]).norm() <= bound * dy.double().norm()
        wanted = torch.stack([dz.double() * y.double(), dy.double()]).sum(2)
        torch.testing.assert_close(sums.double(), wanted, rtol=1e-4, atol=1e-4)


def test_float64_stays_float64():
    x, weight = drawn(2, 5, 100, dtype=torch.float64), drawn(1, 100, dtype=torch.float64)
    given = (x, None, None, weight, weight)
    found = *torch.ops.course.add_norm(*given, 1e-5, 0.0, x.dtype), torch.ops.course.gelu(x, True)
    wanted = *fused_add_norm.add_norm_plain(*given, 1e-5, 0.0, x.dtype), fused_gelu.gelu_plain(x, True)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_gelu_and_its_gradients_are_those_of_float64(tanh, dtype, bound):
    torch.manual_seed(0)
    x, dy = 3 * drawn(3, 77, 1000, dtype=dtype), drawn(3, 77, 1000, dtype=dtype)
    exact, to_y = x.double().cpu(), dy.double().cpu()
    y, (dx, dbias) = torch.ops.course.gelu(x, tanh), torch.ops.course.gelu_backward(x, dy, tanh)
    wanted = fused_gelu.gelu_backward_plain(exact, to_y, tanh)
    for mine, its in ((y, fused_gelu.gelu_plain(exact, tanh)), (dx, wanted[0])):
        assert (mine.double().cpu() - its).norm() <= bound * its.norm()
    torch.testing.assert_close(dbias.double(), dx.double().flatten(0, 1).sum(0), rtol=1e-4, atol=1e-4)


def test_gelu_of_more_tokens_than_a_launch_has_programs_in_its_second_dim():
    x, dy = (drawn(65536 * 64 + 1, 8, dtype=torch.bfloat16) for _ in range(2))
    dx, sums = torch.ops.course.gelu_backward(x, dy, True)
    wanted, _ = fused_gelu.gelu_backward_plain(x[-100:].double(), dy[-100:].double(), True)
    assert (dx[-100:].double() - wanted).norm() <= 5e-3 * wanted.norm()
    torch.testing.assert_close(sums.double(), dx.double().sum(0), rtol=1e-3, atol=1.0)


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_updates_as_pytorchs_does_and_the_average_follows(ema, betas, decoupled):
    """Large and small parameters, a step that is skipped, a gradient with a scale; states and averages, too."""
    found = []
    for kind in (torch.optim.Adam, fused_adam.Adam):
        torch.manual_seed(0)
        held = [torch.nn.Parameter(drawn(*shape, dtype=torch.float32)) for shape in ((1024, 1000), (7,), (512, 513))]
        assert [fused_adam.has_own_kernel(p) for p in held] == [True, False, True]
        lr = torch.tensor(1e-2, device="cuda")
        optimizer: Any = kind(held, lr, betas, 1e-8, 0.1, fused=True, capturable=True, decoupled_weight_decay=decoupled)
        average = MovingAverage(optimizer, ema) if ema else None
        for number in range(5):
            for p in held:
                p.grad = drawn(*p.shape, dtype=torch.float32) * 4
            optimizer.grad_scale = torch.tensor(4.0, device="cuda")
            optimizer.found_inf = torch.tensor(float(number == 2), device="cuda")
            optimizer.step()
        states = [optimizer.state[p][name] for p in held for name in ("exp_avg", "exp_avg_sq", "step")]
        found.append([*(p.detach() for p in held), *states, *(average.values[p] for p in held if average)])
    for its, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_adam_reads_gradients_and_writes_copies_in_16_bits(low, ema):
    """To the bit what it makes of the same gradients in float32, large and small; a skipped step leaves the copies alone, too."""
    found = []
    for narrow in (True, False):
        torch.manual_seed(0)
        held = [torch.nn.Parameter(drawn(*shape, dtype=torch.float32)) for shape in ((1024, 1000), (7, 9), (512, 513))]
        copies = {p: p.detach().to(low) for p in held if narrow}
        for p in copies:
            p.grad_dtype = low
        optimizer = fused_adam.Adam(held, torch.tensor(1e-2, device=held[0].device), (0.9, 0.999), 1e-8, 0.1, fused=True)
        optimizer.copies = copies
        average = MovingAverage(optimizer, ema) if ema else None
        for number in range(5):
            before = [copy.clone() for copy in copies.values()]
            for p in held:
                given = (drawn(*p.shape, dtype=torch.float32) * 4).to(low)
                p.grad = given if narrow else given.float()
            optimizer.grad_scale = torch.tensor(4.0, device=held[0].device)
            optimizer.found_inf = torch.tensor(float(number == 2), device=held[0].device)
            optimizer.step()
            for (p, copy), old in zip(copies.items(), before, strict=True):
                assert torch.equal(copy, p.detach().to(low))
                assert torch.equal(copy, old) == (number == 2)
        states = [optimizer.state[p][name] for p in held for name in ("exp_avg", "exp_avg_sq", "step")]
        found.append([*(p.detach() for p in held), *states, *(average.values[p] for p in held if average)])
    for its, mine in zip(*found, strict=True):
        assert torch.equal(mine, its)


SETTINGS = {"vit": ("vit-demo", "model.depth=3"),
            "gpt": ("gpt-124m", "model.vocab=512", "model.context=64", "model.dim=128", "model.depth=3", "model.heads=2"),
            "dit": ("dit-xl", "model.latent=[4,16,16]", "model.dim=144", "model.depth=3", "model.heads=2", "optim.ema=0.9")}


def losses(kind, *settings):
    torch._dynamo.reset()
    preset, *changes = SETTINGS[kind]
    c = config.load(preset, [*changes, "data.source=mock", "train.global_batch=4", "train.micro_batch=0", "optim.warmup=0",
                             "optim.schedule=constant", "optim.lr=1e-3", *settings])
    training = assemble(c, build_mesh(c.parallel, join("cuda")))
    batch = training.model.example(4, torch.device("cuda"))
    return [training.step(batch)[0].item() for _ in range(8)]


@pytest.mark.parametrize("kind", SETTINGS)
def test_training_in_float32_is_the_same(kind):
    assert losses(kind, "kernels=triton", "precision=fp32") == pytest.approx(losses(kind, "precision=fp32"), rel=1e-4)


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("settings", [("precision=bf16",), ("precision=bf16", "train.recompute=selective"), ("precision=fp8",)],
                         ids=["bf16", "selective", "fp8"])
def test_training_compiled_and_in_a_graph_is_close(kind, settings):
    fast = losses(kind, "stream=narrow", "kernels=triton", "compile=true", "graphs=true", *settings)
    assert fast == pytest.approx(losses(kind, "stream=narrow", *settings), rel=2e-2) and fast[-1] < fast[0]


def trained(kind, masters, *settings):
    """Losses, and what the optimizer updates, of eight steps in 16 bits, with float32 masters or without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_adam, "LARGE", 2**14)         # so that the kernel updates some
        if not masters:
            patch.setattr(config.Config, "masters", False)
        preset, *changes = SETTINGS[kind]
        c = config.load(preset, [*changes, "data.source=mock", "train.global_batch=4", "train.micro_batch=0", "optim.warmup=0",
                                 "optim.schedule=constant", "optim.lr=1e-3", "kernels=triton", "attention=math", *settings])
        training = assemble(c, build_mesh(c.parallel, join("cuda")))
        assert bool(training.gradients.full_master_weights()) == masters
        batch = training.model.example(4, torch.device("cuda"))
        found = [x.item() for _ in range(8) for x in training.step(batch)]
    for copy, master in training.gradients.full_master_weights().items():
        assert torch.equal(copy, master.to(copy.dtype))
    return found, [p.detach() for p in training.gradients.optimizer_parameters]


@pytest.mark.parametrize("settings", [("precision=bf16",), ("precision=bf16", "graphs=true"), ("precision=fp16", "graphs=true"),
                                      ("precision=bf16", "train.micro_batch=2"),
                                      ("precision=bf16", "train.micro_batch=1", "graphs=true")])
@pytest.mark.parametrize("kind", SETTINGS)
def test_training_with_masters_is_the_same_to_the_bit(kind, settings):
    (losses, weights), (others, theirs) = (trained(kind, masters, *settings) for masters in (True, False))
    assert losses == others
    assert all(torch.equal(mine, its) for mine, its in zip(weights, theirs, strict=True))
