"""Attention of some queries with a block of keys, by each kernel that `course/parallel/context_parallel/block_attention.py` has
on a GPU, against its formulas in float64: alone, and as a ring puts blocks together; lengths that no kernel has as its tile, and
groups of queries."""

import pytest
import torch

from course.parallel.context_parallel import block_attention
from course.parallel.context_parallel.ring_attention import merge

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KERNELS = {torch.float32: ("efficient", 2e-5), torch.bfloat16: ("cudnn", 2e-2), torch.float64: ("plain", 1e-12)}


def made(heads, keys, tokens, width, dtype):
    """(q, k, v, grad) with numbers that the format has."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, tokens, width), (2, keys, tokens, width), (2, keys, tokens, width), (2, heads, tokens, width))
    return [torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes]


def ringed(q, k, v, grad, pieces):
    """(out, dq, dk, dv) by blocks of keys, one after the other."""
    cuts = list(zip(k.chunk(pieces, 2), v.chunk(pieces, 2), strict=True))
    out, lse = block_attention.forward(q, *cuts[0], False)
    out, lse = out.to(lse.dtype), lse.clone()
    for cut in cuts[1:]:
        merge(out, lse, *block_attention.forward(q, *cut, False))
    answers = [block_attention.backward(grad, q, *cut, out.to(q.dtype), lse, False) for cut in cuts]
    return out, sum(a[0] for a in answers), torch.cat([a[1] for a in answers], 2), torch.cat([a[2] for a in answers], 2)


def straight(q, k, v, grad, causal):
    """The same by PyTorch's attention in float64."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), is_causal=causal)
    return out, *torch.autograd.grad(out, (q, k, v), grad.double())


def near(found, wanted, bound):
    """Each is within the bound of the largest number."""
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.shape == theirs.shape
        assert (mine.double() - theirs).abs().max() < bound * theirs.abs().max()


@needs_gpu
@pytest.mark.parametrize("dtype", KERNELS, ids=str)
@pytest.mark.parametrize(("heads", "keys", "tokens", "width"), [(4, 4, 64, 64), (4, 2, 1026, 72), (2, 2, 90, 128)])
def test_blocks_give_what_attention_gives(dtype, heads, keys, tokens, width):
    kernel, bound = KERNELS[dtype]
    q, k, v, grad = made(heads, keys, tokens, width, dtype)
    assert block_attention.kernel(q) == kernel
    near(ringed(q, k, v, grad, 2), straight(q, k, v, grad, False), bound)
    for causal in (False, True):
        out, lse = block_attention.forward(q, k, v, causal)
        assert lse.shape == q.shape[:3]
        near((out, *block_attention.backward(grad, q, k, v, out, lse, causal)), straight(q, k, v, grad, causal), bound)


@needs_gpu
def test_float32_keeps_no_scores():
    q, k, v, grad = made(8, 8, 4096, 64, torch.float32)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = block_attention.forward(q, k, v, True)
    block_attention.backward(grad, q, k, v, out, lse, True)
    assert torch.cuda.max_memory_allocated() - before < 12 * q.nbytes < 2 * 8 * 4096 * 4096 * 4


@needs_gpu
def test_a_width_that_it_does_not_take_is_computed_plainly():
    assert block_attention.kernel(torch.empty(1, 1, 4, 30, device="cuda")) == "plain"
