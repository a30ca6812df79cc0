"""GELU in the matmuls of an MLP: what is computed, what is left alone, and that a training is the same."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course import between, config, gelu, models
from course.models import layers
from course.parallel import World, build_mesh
from course.perf import hardware
from course.perf.local import local_of
from course.reshard import pretended
from course.train import assemble
from tests.test_between import SETTINGS, losses


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


class Apart(nn.Module):
    """The formula, with the weights of another."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        up, down = self.mlp.up, self.mlp.down
        return F.linear(F.gelu(F.linear(x, up.weight, up.bias), approximate="tanh"), down.weight, down.bias)


def two_ways(bias=True):
    torch.manual_seed(0)
    mlp = layers.GeluMLP(8, 24, bias, "tanh").double()
    apart = Apart(layers.GeluMLP(8, 24, bias, "tanh").double())
    apart.mlp.load_state_dict(mlp.state_dict())
    return mlp, apart


@pytest.mark.parametrize("frozen", ["", "up.weight", "up.bias", "down.weight", "down.bias"])
def test_an_mlp_and_all_its_gradients_are_those_of_the_formula(frozen):
    mlp, apart = two_ways()
    gelu.fuse_mlp(mlp, True)
    assert mlp.down.matmul is gelu.gelu_linear
    for model in (mlp, apart.mlp):
        if frozen:
            model.get_parameter(frozen).requires_grad_(False)
    x, dy = drawn(2, 5, 8), torch.randn(2, 5, 8, dtype=torch.float64)
    found, wanted = mlp(x), apart(x)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    given = [[x, *(p for p in model.parameters() if p.requires_grad)] for model in (mlp, apart.mlp)]
    torch.testing.assert_close(torch.autograd.grad(found, given[0], dy), torch.autograd.grad(wanted, given[1], dy),
                               rtol=1e-11, atol=1e-12)
    assert len(given[0]) == 5 - bool(frozen)


def test_a_gradient_of_a_gradient_is_an_error():
    mlp, _ = two_ways()
    gelu.fuse_mlp(mlp, True)
    x = drawn(1, 3, 8)
    grad, = torch.autograd.grad(mlp(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.square().sum().backward()


def test_under_autocast_formats_are_those_of_linears():
    mlp = layers.GeluMLP(8, 24, True, "tanh")
    gelu.fuse_mlp(mlp, True)
    x = torch.randn(2, 5, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = mlp(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in mlp.parameters())


def test_what_has_another_product_stays_apart():
    mlp, _ = two_ways()
    mlp.down.matmul = nn.Identity()
    gelu.fuse_mlp(mlp, True)
    assert type(mlp.down.matmul) is nn.Identity and mlp.forward.__func__ is gelu.apart_forward


def test_without_biases_it_is_merged_too():
    mlp, apart = two_ways(bias=False)
    gelu.fuse_mlp(mlp, True)
    x = drawn(2, 5, 8)
    torch.testing.assert_close(torch.autograd.grad(mlp(x).sum(), [x, *mlp.parameters()]),
                               torch.autograd.grad(apart(x).sum(), [x, *apart.mlp.parameters()]), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("settings", "merged"), [((), True), (("train.recompute=selective",), False),
                                                  (("train.recompute=full",), False), (("model.mlp=gelu",), False),
                                                  (("model.mlp=swiglu",), False), (("precision=fp8",), False),
                                                  (("precision=fp8", "fp8.keep=[blocks.*.mlp.down]"), True),
                                                  (("parallel.tp=2",), True), (("parallel.tp=2", "model.bias=false"), True),
                                                  (("parallel.tp=2", "parallel.sp=true"), True),
                                                  (("parallel.tp=2", "parallel.sp=true", "parallel.overlap=symmetric"), True),
                                                  (("parallel.tp=2", "parallel.sp=true", "parallel.overlap=none"), True)])
def test_which_trainings_have_it(settings, merged):
    """Recomputation ends before the linear after GELU, whose result nobody needs; what is ours it would compute again. The model
    of a step's time says the same."""
    preset, *changes = SETTINGS["gpt"]
    c = config.load(preset, [*changes, "data.source=mock", "train.device=cpu", "kernels=hand", "train.global_batch=2",
                             "train.micro_batch=0", "precision=bf16", *settings])
    size = c.parallel.tp
    with pretended(0, size):
        model = assemble(c, build_mesh(c.parallel, World(0, size, torch.device("cpu")))).model
    matmul = model.blocks["0"].mlp.down.matmul
    assert (getattr(matmul, "func", matmul) is gelu.gelu_linear) == merged              # a partial, where it knows an axis
    assert local_of(c, hardware.load("h200"), size).merged == merged


@pytest.mark.parametrize("kind", ["gpt", "dit"])
def test_training_is_the_same(kind):
    with mock.patch("course.gelu.can_merge", return_value=False):
        apart = losses(kind, "kernels=hand")
    assert losses(kind, "kernels=hand") == pytest.approx(apart, rel=1e-11) and apart[0] != pytest.approx(apart[-1], rel=1e-3)


def test_a_compiled_block_is_one_graph_with_both_operators():
    torch._dynamo.reset()
    c = config.load("dit-xl", ["model.latent=[4,8,8]", "model.dim=32", "model.depth=1", "model.heads=2"])
    block = between.fuse(models.build_model(c.model).to_empty(device="cpu")).blocks["0"]
    for p in block.parameters():
        nn.init.normal_(p, std=0.2)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    x, given = torch.randn(2, 9, 32), torch.randn(2, 32)
    grads = []
    for run in (block, compiled):
        block.zero_grad()
        run(x, given).square().sum().backward()
        grads.append([p.grad.clone() for p in block.parameters()])
    torch.testing.assert_close(*grads)
