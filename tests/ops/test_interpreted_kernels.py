"""The library's Triton kernels under Triton's interpreter, on a CPU, beside the plain PyTorch versions in float64.

Tensors are small, and no block divides their shapes. `tests/gpu` runs the same kernels compiled. The FP8 cast is missing here:
it is in PTX, which no interpreter runs.
"""

import importlib

import pytest
import torch
from torch import nn

from course.ops import triton_language
from course.ops.fused_add_norm import add_norm_backward_plain, add_norm_plain
from course.ops.fused_gelu import gelu_backward_plain, gelu_plain
from course.ops.packed_attention import attention_backward_plain, attention_plain
from course.ops.permutation import sum_rows_backward_plain, sum_rows_plain

pytestmark = pytest.mark.skipif(not (triton_language.INSTALLED and triton_language.INTERPRETED),
                                reason="needs Triton and no GPU: pip install 'course[kernels]'")
BOUNDS = [(torch.float32, 2e-6), (torch.bfloat16, 2**-7)]


@pytest.fixture(autouse=True)
def fixed_numbers():
    torch.manual_seed(0)


def kernels(name: str):
    """A module of kernels, imported anew: other tests import it with a stand-in for Triton."""
    return importlib.import_module(f"course.ops.{name}_triton")


def double(*tensors):
    return [x if x is None else x.double() for x in tensors]


def check(found, wanted, bound):
    for mine, its in zip(found, wanted, strict=True):
        assert mine.shape == its.shape and (mine.double() - its).norm() <= bound * its.norm()


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("branch", ["none", "plain", "gated"])
@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
def test_sums_and_norms_match_float64(samples, branch, dtype, bound):
    x = torch.randn(2, 38, 20, dtype=dtype)[:, 1:]                      # 37 tokens: two programs a sample
    y = None if branch == "none" else torch.randn(2, 37, 20, dtype=dtype)
    gate = torch.randn(2, 20, dtype=dtype) if branch == "gated" and samples == 2 else None
    weight, bias = torch.randn(samples, 40, dtype=dtype).chunk(2, 1)    # rows of a wider tensor
    found = kernels("fused_add_norm").add_norm(x, y, gate, weight, bias, 1e-5, 1.0, dtype)
    check(found, add_norm_plain(*double(x, y, gate, weight, bias), 1e-5, 1.0, torch.float64), bound)
    dz, dn = torch.randn(2, 2, 37, 20, dtype=dtype)
    given = (dz, dn, x if y is None else found[0], y if gate is not None else None, gate, weight, *found[2:])
    found = kernels("fused_add_norm").add_norm_backward(*given, 1.0, True, dtype, dtype)
    check(found, add_norm_backward_plain(*double(*given), 1.0, True, torch.float64, torch.float64), bound)


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
def test_gelu_matches_float64(tanh, dtype, bound):
    x, dy = torch.randn(2, 70, 300, dtype=dtype)
    fused = kernels("fused_add_norm")
    check([fused.gelu(x, tanh)], [gelu_plain(x.double(), tanh)], bound)
    check(fused.gelu_backward(x, dy, tanh), gelu_backward_plain(*double(x, dy), tanh), bound)


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
def test_cross_entropy_matches_float64(dtype, bound):
    logits, target, weights = 3 * torch.randn(5, 301, dtype=dtype), torch.randint(0, 301, (5,)), torch.rand(5)
    exact = logits.double().requires_grad_()
    losses = nn.functional.cross_entropy(exact, target, reduction="none")
    wanted, = torch.autograd.grad((losses * weights).sum(), exact)
    gradients = logits.clone()
    check([kernels("cross_entropy").cross_entropy_(gradients, target, weights), gradients], [losses, wanted], bound)


def test_cross_entropy_in_two_readings_matches_float64():
    """The second piece of columns has no target, as on the other rank of two."""
    logits, target, weights = torch.randn(4, 50), torch.tensor([3, -1, 49, 0]), torch.rand(4)
    largest, total, aimed = kernels("cross_entropy").summarize(logits, target)
    logs = largest + total.log()
    torch.testing.assert_close(logs, logits.logsumexp(-1))
    torch.testing.assert_close(aimed, torch.where(target >= 0, logits[torch.arange(4), target], 0.0))
    wanted = logits.softmax(-1)
    wanted[[0, 2, 3], target[target >= 0]] -= 1
    kernels("cross_entropy").differentiate_(logits, target, weights, logs)
    torch.testing.assert_close(logits, wanted * weights[:, None])


def test_fused_adam_is_pytorchs_and_skips_a_step():
    weight, other = nn.Parameter(torch.randn(1500)), nn.Parameter(torch.empty(1500))
    other.data.copy_(weight.data)
    optimizer = torch.optim.Adam([other], lr=1e-2, weight_decay=0.1)
    first, second, average, copy = (torch.zeros(1500), torch.zeros(1500), weight.detach().clone(),
                                    torch.zeros(1500, dtype=torch.bfloat16))
    for number, skip in ((1, 0.0), (2, 0.0), (3, 1.0)):
        grad = torch.randn(1500)
        kernels("fused_adam").update(weight.data, 4 * grad, first, second, average, copy, torch.tensor(float(number)),
                                     torch.tensor(1e-2), torch.tensor(4.0), torch.tensor(skip), (0.9, 0.999), 1e-8, 0.1, 0.5)
        other.grad = grad
        if not skip:
            optimizer.step()
    torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-6)
    assert copy.equal(weight.to(torch.bfloat16)) and not average.equal(weight)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [16, 24])       # one tile of columns, or two
def test_packed_attention_matches_float64(causal, head_dim):
    qkv = torch.randn(1, 70, 3, 2, head_dim, dtype=torch.bfloat16)
    found = kernels("packed_attention").attention(qkv, causal)
    wanted = attention_plain(qkv.double(), causal)
    check(found[:1], wanted[:1], 2**-6)
    dy = torch.randn(1, 70, 2, head_dim, dtype=torch.bfloat16)
    gradients = kernels("packed_attention").attention_backward(dy, qkv, *found, causal)
    check(gradients, attention_backward_plain(dy.double(), qkv.double(), *wanted, causal), 2**-6)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
def test_sums_of_experts_rows_match_float64(gated, dtype, bound):
    """Rows that belong to no token are poisoned: nothing may read them."""
    order = torch.randperm(15).view(5, 3).masked_fill(torch.rand(5, 3) < 0.3, -1)
    rows, dy = torch.randn(15, 20, dtype=dtype), torch.randn(5, 20, dtype=dtype)
    spare = torch.ones(15, dtype=torch.bool).index_fill(0, order[order >= 0], False)
    gates = torch.rand(5, 3)
    found = kernels("permutation").sum_rows(rows.masked_fill(spare[:, None], torch.nan), order, gates if gated else None)
    check([found], [sum_rows_plain(*double(rows), order, gates.double() if gated else None)], bound)
    drows, dgates = kernels("permutation").sum_rows_backward(dy, rows, order, gates)
    its = sum_rows_backward_plain(*double(dy, rows), order, gates.double())
    check([drows[~spare], dgates], [its[0][~spare], its[1]], bound)
