"""Products whose algorithm is chosen: those of a linear, in every format, and which linears of a model have them."""

from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from course import between, config, gelu, models, products
from course.operators import BiasApart
from course.parallel import World, build_mesh, join
from course.reshard import pretended
from course.train import assemble
from tests.test_between import SETTINGS, losses


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 8), (7, 8), (2, 3, 4, 8)])
def test_a_linear_and_its_gradients_are_pytorchs(dtype, bias, shape):
    torch.manual_seed(0)
    given = [torch.randn(size).to(dtype).requires_grad_() for size in (shape, (6, 8), *[(6,)] * bias)]
    mine, its = products.linear(*given), F.linear(*given)
    dy = torch.randn_like(its)
    torch.testing.assert_close([mine, *torch.autograd.grad(mine, given, dy)], [its, *torch.autograd.grad(its, given, dy)])


def test_only_gradients_that_are_wanted_are_computed():
    x, weight, bias = torch.randn(4, 8), torch.randn(6, 8, requires_grad=True), torch.randn(6)
    with mock.patch("course.products.times", wraps=products.times) as times:
        products.linear(x, weight, bias).sum().backward()
    assert times.call_count == 1 and weight.grad is not None


def test_under_autocast_formats_are_those_of_linears():
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = products.linear(x, weight)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and x.grad.dtype == weight.grad.dtype == torch.float32


def test_a_gradient_of_a_gradient_is_an_error():
    x = torch.randn(4, 8, requires_grad=True)
    grad, = torch.autograd.grad(products.linear(x, torch.randn(6, 8)).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.square().sum().backward()


def test_it_is_compiled_without_a_break():
    x, weight = torch.randn(2, 4, 8, requires_grad=True), torch.randn(6, 8)
    compiled = torch.compile(products.linear, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight), F.linear(x, weight))




def chosen(model):
    """Of each linear whether its product is chosen, through what is around it."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "matmul") and not isinstance(module, BiasApart):
            matmul = module.matmul.matmul if isinstance(module.matmul, BiasApart) else module.matmul
            found[name.replace("blocks.0.", "")] = matmul is products.linear
    return found


@pytest.mark.parametrize(("preset", "settings", "others"), [
    ("gpt", (), {"head.proj"}), ("gpt", ("model.loss_chunk=0",), set()), ("dit", (), set()), ("vit", (), set())])
def test_all_linears_of_a_model_have_it(preset, settings, others):
    """A GPT's head computes logits chunk by chunk. The linear after GELU has its own way, through the same operator."""
    preset_name, *changes = SETTINGS[preset]
    model = between.fuse(models.build_model(config.load(preset_name, [*changes, *settings]).model), merged=False)
    found = chosen(model)
    assert {name for name, is_chosen in found.items() if not is_chosen} == others and len(found) >= 5
    if preset == "gpt":
        assert (model.head.of_chunk.product is torch.ops.course.product) == ("head.proj" in others)


@pytest.mark.parametrize(("overlap", "beside"), [("nccl", True), ("symmetric", True), ("none", False)])
def test_tensor_parallel_linears_have_it_too(overlap, beside):
    """Those with communication beside them are told to; that of an MLP's end is in `gelu_linear`, with its axis."""
    preset, *changes = SETTINGS["dit"]
    c = config.load(preset, [*changes, "data.source=mock", "train.device=cpu", "train.global_batch=2", "train.micro_batch=0",
                             "kernels=hand", "parallel.tp=2", "parallel.sp=true", f"parallel.overlap={overlap}"])
    with pretended(0, 2):
        block = assemble(c, build_mesh(c.parallel, World(0, 2, torch.device("cpu")))).model.blocks["0"]
    for linear in (block.attn.qkv, block.attn.out, block.mlp.up):
        matmul = linear.matmul.matmul               # without the bias whose gradient is computed elsewhere
        assert matmul.keywords["chosen"] if beside else matmul is products.linear
    end = block.mlp.down.matmul.matmul
    wanted = {"axis": block.mlp.down.axis, "direct": overlap == "symmetric"}
    assert end.keywords == wanted if beside else end is gelu.gelu_linear


def test_another_product_is_left_alone():
    model = models.build_model(config.load(SETTINGS["gpt"][0], SETTINGS["gpt"][1:]).model)
    mine = model.blocks["0"].attn.out.matmul = mock.Mock()
    assert products.choose_products(model).blocks["0"].attn.out.matmul is mine


@pytest.mark.parametrize("kind", ["gpt", "dit", "vit"])
def test_training_is_the_same(kind):
    with mock.patch("course.between.choose_products", lambda model: model):
        others = losses(kind, "kernels=hand")
    assert losses(kind, "kernels=hand") == pytest.approx(others, rel=1e-11)


@pytest.mark.parametrize(("how", "again"), [("none", 0), ("selective", 0), ("full", 4)])
def test_recomputation_keeps_what_they_put_out(how, again):
    """Selective: as PyTorch's own products. Of four linears in a block, forward and backward, and of the head backward; full:
    forward once more."""
    preset, *changes = SETTINGS["gpt"]
    c = config.load(preset, [*changes, "data.source=mock", "train.device=cpu", "kernels=hand", "train.global_batch=2",
                             "train.micro_batch=0", "model.depth=1", f"train.recompute={how}", "model.mlp=gelu"])
    training = assemble(c, build_mesh(c.parallel, join("cpu")))
    batch = training.model.example(2, torch.device("cpu"))
    count = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, given=(), options=None):
            nonlocal count
            count += operator is torch.ops.course.product.default
            return operator(*given, **(options or {}))

    with Count():
        training.step(batch)
    assert count == 9 + again
