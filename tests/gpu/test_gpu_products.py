"""Products whose algorithm is chosen: PyTorch's bits, whatever is chosen, also in a CUDA graph and in a training."""

from unittest import mock

import pytest
import torch

from course import cublaslt, products, trial
from course.products import product_plain, weight_gradient_plain
from tests.gpu.test_gpu_between import trained

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
                                reason="needs a GPU from Hopper on")
SHAPES = [(65536, 768, 2304), (4096, 768, 50304), (32768, 1024, 4096), (16384, 4608, 1152), (1024, 128, 256), (72, 264, 136)]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Which way wins does not matter here."""
    monkeypatch.setattr(trial, "SETTLED", 1e-3)


def drawn(n, k, m, turned, bias, dtype=torch.bfloat16):
    make = torch.Generator("cuda").manual_seed(1)
    shapes = [(n, k), (m, k) if turned else (k, m)] + [(m,)] * bias
    return [torch.randn(shape, generator=make, device="cuda").to(dtype) for shape in shapes]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("turned", "bias"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bits_are_those_of_pytorchs_choice(shape, turned, bias, dtype):
    x, weight, *more = drawn(*shape, turned, bias, dtype)
    with mock.patch.object(cublaslt, "WORK", 0):
        found = torch.ops.course.product(x, weight, turned, more[0] if more else None)
    assert torch.equal(found, product_plain(x, weight, turned, *more))
    one = cublaslt.matmul(shape[0], shape[2], shape[1], dtype, 256, 0, "weight" if turned else "",
                          cublaslt.BIAS if bias else cublaslt.NOTHING)
    assert one.chosen is not None and one.offered


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [
    (65536, 2304, 768), (16384, 1152, 4608), (4096, 1024, 1024), (72, 264, 136)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weights_gradient_is_pytorchs_to_the_bit(rows, outputs, inputs, dtype):
    dy, x = (drawn(rows, width, 1, True, False, dtype)[0] for width in (outputs, inputs))
    with mock.patch.object(cublaslt, "WORK", 0):
        found = torch.ops.course.weight_gradient(dy, x)
    assert torch.equal(found, weight_gradient_plain(dy, x))
    assert cublaslt.matmul(outputs, inputs, rows, dtype, 256, 0, "x", cublaslt.NOTHING).chosen is not None


def test_more_than_is_offered_is_accepted():
    """What the trials gain beyond cuBLASLt's own list: it must know these tiles, clusters and options."""
    for shape, turned in (((16384, 3456, 1152), "weight"), ((16384, 1152, 3456), ""), ((4608, 1152, 16384), "x")):
        others = cublaslt.matmul(*shape, torch.bfloat16, 256, 0, turned, cublaslt.NOTHING).others()
        assert len(others) >= len(cublaslt.TILES) and all(by.workspace <= cublaslt.WORKSPACE for by in others)


@pytest.mark.parametrize("turned", ["weight", "", "x"])
def test_each_algorithm_that_is_tried_computes_the_product(turned):
    """One that is left out may be of other bits, and yet is right: layouts are told as they are."""
    x, weight, *more = drawn(1000, 520, 264, turned == "weight", turned == "weight")
    one = cublaslt.matmul(1000, 264, 520, torch.bfloat16, 256, 0, turned, cublaslt.BIAS if more else cublaslt.NOTHING)
    wanted = product_plain(x.double(), weight.double(), turned == "weight", *(b.double() for b in more))
    if turned == "x":
        x = x.T.contiguous()
    for by in [*one.offered, *one.others()]:
        found = one.run(by, x, weight, *more, out=x.new_empty(1000, 264))
        assert (found.double() - wanted).norm() <= 2**-8 * wanted.norm()


def test_what_is_not_for_it_goes_pytorchs_way():
    """Rows that are not aligned, another format, a view that begins anywhere."""
    with mock.patch.object(cublaslt, "WORK", 0):
        for x, weight in (drawn(100, 36, 44, True, False), drawn(64, 32, 32, True, False, torch.float32),
                          [t.flatten()[1:1025].view(32, 32) for t in drawn(64, 32, 64, True, False)]):
            torch.testing.assert_close(torch.ops.course.product(x, weight, True, None), product_plain(x, weight, True))


def test_nothing_is_tried_while_a_graph_is_captured():
    x, weight = drawn(3072, 1160, 1544, True, False)
    wanted = product_plain(x, weight, True)                             # and cuBLAS has its workspace
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.ops.course.product(x, weight, True, None)
    one = cublaslt.matmul(3072, 1544, 1160, torch.bfloat16, 256, 0, "weight", cublaslt.NOTHING)
    assert one.chosen is None
    graph.replay()
    assert torch.equal(found, wanted)
    torch.ops.course.product(x, weight, True, None)
    assert one.chosen is not None


def test_gradients_are_those_of_a_linear():
    x, weight, bias = (t.requires_grad_() for t in drawn(2048, 1024, 3072, True, True))
    dy = torch.randn(2048, 3072, device="cuda", dtype=torch.bfloat16)
    mine = torch.autograd.grad(products.linear(x, weight, bias), (x, weight, bias), dy)
    its = torch.autograd.grad(torch.nn.functional.linear(x, weight, bias), (x, weight, bias), dy)
    assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))


@pytest.mark.parametrize("kind", ["gpt", "dit"])
def test_training_is_the_same_to_the_bit(kind):
    with mock.patch.object(cublaslt, "WORK", 0):
        losses, weights = trained(kind, True, "precision=bf16")
    with (mock.patch.object(cublaslt, "product", product_plain),
          mock.patch.object(cublaslt, "weight_gradient", weight_gradient_plain)):
        others, theirs = trained(kind, True, "precision=bf16")
    assert losses == others and all(torch.equal(a, b) for a, b in zip(weights, theirs, strict=True))
