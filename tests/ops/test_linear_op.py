"""The slots of a linear: each kind of product and of communication gives its weight's gradient at once or later, the same."""

import ast
from pathlib import Path

import pytest
import torch

from course.config import FP8
from course.fp8.native import Matmul, Scaling
from course.models.layers import Linear
from course.ops.linear_op import WeightGradients
from course.parallel import Axis, World, build_mesh
from course.parallel.tensor_parallel.linear import (
    ColumnParallel,
    GatheredColumn,
    OverlappedColumn,
    OverlappedRow,
    RowParallel,
    RowParallelFirstBias,
)
from course.parallel.token_split import SplitTokens
from course.ranks.notebook_ranks import ranks

CPU = torch.device("cpu")


def fp8_product(recipe):
    """Native FP8, with the scales of a history."""
    from course.config import Parallel

    settings = FP8(recipe=recipe, history=2)
    product = Matmul("linear", settings, CPU)
    scaling = Scaling({"linear": product}, settings, build_mesh(Parallel(), World()))
    for amax in product.amaxes:
        amax.fill_(4.0)
    scaling.update(torch.zeros(()))
    return product


def gradients(linear, x, later, autocast=False):
    """The output and the gradients of input, weight and bias; whether the weight's was missing until it was asked for.

    later: it is computed after the others.
    """
    linear.zero_grad()
    linear.weight_gradients = pending = WeightGradients() if later else None
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = linear(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
    missing = linear.weight.grad is None
    if pending is not None:
        pending.compute()
    bias = [] if linear.bias is None or linear.bias.grad is None else [linear.bias.grad]      # or another rank has it
    return [y.detach(), x.grad, linear.weight.grad, *bias], missing


def assert_same(linear, x, autocast=False, ulps=0):
    """ulps: where PyTorch multiplies what is not contiguous in another way than a flattened matrix."""
    at_once, there = gradients(linear, x, False, autocast)
    apart, missing = gradients(linear, x, True, autocast)
    assert missing and not there
    for one, other in zip(at_once, apart, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=ulps * 2**-23, atol=ulps * 2**-23)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("product", ["plain", "delayed", "current"])
def test_a_weights_gradient_later_is_that_at_once(product, autocast, bias):
    torch.manual_seed(0)
    linear = Linear(32, 3, 4, 4, bias=bias)
    if product != "plain":
        linear.product = fp8_product(product)
    assert_same(linear, torch.randn(2, 16, 32), autocast)


def test_it_is_added_and_whoever_waits_for_it_is_told():
    linear, told = Linear(4, 3), []
    linear.weight_gradients = WeightGradients()
    linear.weight.register_post_accumulate_grad_hook(lambda p: told.append(p.grad.clone()))
    x = torch.randn(2, 4)
    for _ in range(2):
        linear(x).sum().backward()
    assert not told
    linear.weight_gradients.compute()
    assert len(told) == 2 and torch.equal(told[1], 2 * told[0]) and not linear.weight_gradients.pending


@pytest.mark.parametrize("bias", [True, False])
def test_a_first_layers_weight_has_its_gradient_too(bias):
    """Whose input has none, so that autograd would have nothing to go back through."""
    linear, x = Linear(4, 3, bias=bias), torch.randn(2, 4)
    linear(x).sum().backward()
    wanted, linear.weight.grad, linear.weight_gradients = linear.weight.grad, None, WeightGradients()
    linear(x).sum().backward()
    linear.weight_gradients.compute()
    assert torch.equal(linear.weight.grad, wanted)


def test_a_frozen_weight_gets_none():
    linear = Linear(4, 3)
    linear.weight.requires_grad_(False)
    linear.weight_gradients = WeightGradients()
    linear(torch.randn(2, 4)).sum().backward()
    assert not linear.weight_gradients.pending and linear.bias.grad is not None


def in_parts(kind):
    """A linear whose tenant communicates, on this rank of two: its gradients at once and later."""
    import torch.distributed as dist

    axis = Axis("tp", 2, dist.get_rank(), (0, 1), dist.group.WORLD)
    tokens = SplitTokens({"position": "sequence"}, Axis("cp"), axis, zigzag=False, overlap="nccl")
    tokens.cut({"position": torch.zeros(2, 6)})
    torch.manual_seed(0)
    linear = Linear(8, 6)
    sequence = kind in ("column, sp", "row, sp", "overlapped column", "overlapped row")
    linear.communication = {
        "column": ColumnParallel, "row": RowParallel, "gathered": GatheredColumn, "first bias": RowParallelFirstBias,
        "column, sp": ColumnParallel, "row, sp": RowParallel, "overlapped column": OverlappedColumn,
        "overlapped row": OverlappedRow}[kind](axis, tokens if sequence else None)
    x = torch.randn(2, 3 if "column" in kind and sequence else 6, 8)
    if kind == "gathered":
        x = x[:, 0]
    assert_same(linear, x, ulps=8 * kind.endswith("sp"))
    return True


@pytest.mark.parametrize("kind", ["column", "row", "gathered", "first bias", "column, sp", "row, sp", "overlapped column",
                                  "overlapped row"])
def test_every_kind_of_communication_can_wait_too(kind):
    assert ranks(2)(in_parts, kind) == [True, True]


ROOMS = ("parallel", "models", "training", "checkpoint", "fp8", "ops", "inference", "convert")


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_is_bound_to_modules_or_parameters_from_outside(room):
    """No forward pass is re-bound, and nothing is planted on a parameter: slots, subclasses and the layout are there for it."""
    planted = {"forward", "matmul", "placement", "tokens", "chunks", "pipeline", "copy"}
    found = []
    for file in (Path(__file__).parents[2] / "course" / room).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) else ():
                for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                    own = isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
                    if isinstance(part, ast.Attribute) and part.attr in planted and not own:
                        found.append(f"{file.name}:{node.lineno}: {ast.unparse(part)}")
    assert not found
