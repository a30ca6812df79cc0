"""cuBLASLt's epilogue computes what the formula says, whichever algorithm does; what it is not for goes its old way."""

import pytest
import torch

from course import cublaslt, gelu
from course.models import layers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
                                reason="needs a GPU from Hopper on")
SHAPES = [(2, 2048, 768, 3072), (1, 4096, 1024, 4096), (4, 100, 136, 264), (1, 1, 64, 256)]         # B, T, M, N


def drawn(shape, dtype):
    """dy, the weight of the linear after GELU, and what GELU is of."""
    B, T, M, N = shape
    make = torch.Generator().manual_seed(0)
    sizes = (B, T, M), (M, N), (B, T, N)
    dy, weight, a = (torch.randn(size, generator=make) for size in sizes)
    return [x.to("cuda", dtype) for x in (dy, weight / M**0.5, a)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_the_gradient_is_that_of_float64(shape, dtype, bound):
    """Up to one rounding of the result."""
    dy, weight, a = drawn(shape, dtype)
    da, total = torch.ops.course.gelu_linear_backward(dy, weight, a, True)
    wanted, _ = gelu.gelu_linear_backward_plain(dy.double(), weight.double(), a.double(), True)
    assert (da.double() - wanted).norm() <= bound * wanted.norm()
    without, empty = torch.ops.course.gelu_linear_backward(dy, weight, a, False)
    assert torch.equal(without, da) and empty.numel() == 0
    torch.testing.assert_close(total.double(), da.double().flatten(0, -2).sum(0), rtol=1e-4, atol=1e-4)


def described(tokens, wide, narrow):
    return cublaslt.matmul(tokens, wide, narrow, torch.bfloat16, 256, 0, "", cublaslt.DGELU)


@pytest.mark.parametrize("shape", SHAPES)
def test_all_algorithms_give_the_same_bits(shape):
    """All that are offered, where they are fast; and all that are borrowed, where they are not."""
    dy, weight, a = drawn(shape, torch.bfloat16)
    product = described(shape[0] * shape[1], shape[3], shape[2])
    assert product.offered and all(by.workspace <= cublaslt.WORKSPACE for by in product.offered)
    fast = product.offered[0].waves <= 1
    found = [product.run(by, dy, weight, a, out=torch.empty_like(a)) for by in cublaslt.in_one_wave(product) or product.offered]
    found += [product.run(by, dy, weight, a, out=torch.empty_like(a)) for by in product.offered if fast]
    assert all(torch.equal(da, found[0]) for da in found)


def test_it_is_used_where_it_is_fast():
    """GPT's shapes from 124M to 2.7B, and DiT-XL's, in one wave of programs."""
    for tokens, width in ((65536, 768), (32768, 768), (32768, 1024), (16384, 1152), (32768, 1152), (16384, 1280), (16384, 2048),
                          (16384, 2560)):
        assert cublaslt.in_one_wave(described(tokens, 4 * width, width))


@pytest.mark.parametrize("bytes_on", [16, 128])
def test_tensors_that_begin_anywhere_are_computed_as_well(bytes_on):
    """As views of a flat buffer do: cuBLASLt is told of their alignment."""
    dy, weight, a = drawn((2, 2048, 768, 3072), torch.bfloat16)

    def moved(x):
        flat = torch.empty(x.numel() + bytes_on, dtype=x.dtype, device=x.device)
        return flat[bytes_on // 2:][:x.numel()].view_as(x).copy_(x)

    da, total = torch.ops.course.gelu_linear_backward(moved(dy), moved(weight), moved(a), True)
    wanted, sums = torch.ops.course.gelu_linear_backward(dy, weight, a, True)
    assert (da.float() - wanted.float()).norm() <= 2**-8 * wanted.float().norm()
    assert (total - sums).norm() <= 2**-8 * sums.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_other_formats_and_widths_go_the_plain_way(dtype):
    given = *drawn((2, 5, 20, 44), dtype), True
    torch.testing.assert_close(torch.ops.course.gelu_linear_backward(*given), gelu.gelu_linear_backward_plain(*given))


def test_a_graph_replays_it():
    make = torch.Generator().manual_seed(0)
    mlp = layers.GeluMLP(256, 1024, True, "tanh").to("cuda", torch.bfloat16)
    gelu.fuse_mlp(mlp, True)
    assert mlp.down.matmul is gelu.gelu_linear
    x = torch.randn(2, 2048, 256, generator=make).to("cuda", torch.bfloat16).requires_grad_()

    def step():
        return torch.autograd.grad(mlp(x).float().square().sum(), [x, *mlp.parameters()])

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        x.mul_(-1)
    graph.replay()
    torch.cuda.synchronize()
    for mine, its in zip(found, step(), strict=True):
        torch.testing.assert_close(mine, its)
