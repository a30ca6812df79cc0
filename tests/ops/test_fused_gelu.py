"""GELU of an MLP as one operator: what is computed, in which formats, and that a compiled block keeps it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course import config, models
from course.models import layers
from course.training import fuse_blocks


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
    mlp = layers.MLP(8, 24, bias, "tanh").double()
    apart = Apart(layers.MLP(8, 24, bias, "tanh").double())
    apart.mlp.load_state_dict(mlp.state_dict())
    return mlp, apart


@pytest.mark.parametrize("frozen", ["", "up.weight", "up.bias", "down.weight", "down.bias"])
def test_an_mlp_and_all_its_gradients_are_those_of_the_formula(frozen):
    mlp, apart = two_ways()
    fuse_blocks.fuse_mlp(mlp)
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
    fuse_blocks.fuse_mlp(mlp)
    x = drawn(1, 3, 8)
    grad, = torch.autograd.grad(mlp(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.square().sum().backward()


def test_under_autocast_formats_are_those_of_linears():
    mlp = layers.MLP(8, 24, True, "tanh")
    fuse_blocks.fuse_mlp(mlp)
    x = torch.randn(2, 5, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = mlp(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in mlp.parameters())


def test_without_biases_it_is_the_formula_too():
    mlp, apart = two_ways(bias=False)
    fuse_blocks.fuse_mlp(mlp)
    x = drawn(2, 5, 8)
    torch.testing.assert_close(torch.autograd.grad(mlp(x).sum(), [x, *mlp.parameters()]),
                               torch.autograd.grad(apart(x).sum(), [x, *apart.mlp.parameters()]), rtol=1e-11, atol=1e-12)


def test_a_compiled_block_is_one_graph_with_both_operators():
    torch._dynamo.reset()
    c = config.load("dit-xl", ["model.latent=[4,8,8]", "model.dim=32", "model.depth=1", "model.heads=2"])
    block = fuse_blocks.fuse_blocks(models.build_model(c.model).to_empty(device="cpu")).blocks["0"]
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
