"""Attention's kernels: they compute what the formula says, in tiles that fit the tokens and in such that do not, and repeat."""

import pytest
import torch

from course.ops import packed_attention as packed
from course.ops.packed_attention import attention_backward_plain, attention_plain, packed_attention
from course.utils.errors import CourseError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 256, 3, 2, 72), (1, 1024, 3, 2, 72), (2, 128, 3, 12, 64), (1, 1000, 3, 3, 48),
                                   (3, 37, 3, 1, 96), (1, 1, 3, 1, 16), (1, 520, 3, 2, 40), (2, 577, 3, 2, 120),
                                   (2, 1000, 3, 2, 104)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_attention_and_its_gradients_are_those_of_float64(shape, causal, dtype, bound):
    """bf16's weights and their gradients are rounded to 2^-9, and what comes of them once more."""
    torch.manual_seed(0)
    qkv, dy = torch.randn(shape, device="cuda").to(dtype), torch.randn(*shape[:2], *shape[3:], device="cuda").to(dtype)
    y, lse = torch.ops.course.attention(qkv, causal)
    dqkv, sums = torch.ops.course.attention_backward(dy, qkv, y, lse, causal)
    exact = attention_plain(qkv.double().cpu(), causal)
    wanted = attention_backward_plain(dy.double().cpu(), qkv.double().cpu(), *exact, causal)[0]
    for mine, its in ((y, exact[0]), (lse, exact[1]), *zip(dqkv.unbind(2), wanted.unbind(2), strict=True)):
        assert (mine.double().cpu() - its).norm() <= bound * its.norm() + 1e-6
    torch.testing.assert_close(sums.double(), dqkv.double().sum((0, 1)), rtol=1e-4, atol=1e-4)
    again = torch.ops.course.attention_backward(dy, qkv, y, lse, causal)
    assert torch.equal(again[0], dqkv) and torch.equal(again[1], sums)


def test_more_heads_than_a_launch_can_have_get_a_sentence():
    qkv = torch.zeros(2**15, 1, 3, 3, 16, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(CourseError, match="98304 heads at a time, and 65535 is the most"):
        torch.ops.course.attention(qkv, False)


def test_a_longer_sample_than_32_bit_places_reach_gets_a_sentence():
    """On the meta device, where it takes no memory."""
    from course.ops.packed_attention_triton import Tile

    tile, most = Tile(64, 64, 2), 2**31 // (3 * 8 * 64)
    qkv = torch.empty(1, most + 1, 3, 8, 64, device="meta", dtype=torch.bfloat16)
    assert tile.grid(qkv[:, :most]) == (-(-most // 64), 8)
    with pytest.raises(CourseError, match=f"{most + 1} tokens of 8 heads of 64 are 21474.* numbers in a sample, and 2147483647"):
        tile.grid(qkv)


@pytest.mark.parametrize(("width", "capability", "small"), [(120, (12, 0), True), (104, (12, 1), True), (96, (12, 0), False),
                                                            (120, (8, 9), False), (120, (9, 0), False)])
def test_wide_heads_have_small_tiles_where_there_is_little_shared_memory(width, capability, small, monkeypatch):
    from course.ops.packed_attention_triton import cramped

    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    assert cramped(torch.empty(1, 1, 3, 1, width, device="meta")) == small


def test_it_is_one_operator_of_a_compiled_graph():
    qkv = torch.randn(2, 64, 3, 2, 72, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(lambda x: packed_attention(2 * x, None, True), fullgraph=True)
    y, wanted = compiled(qkv), packed.packed_attention(2 * qkv, None, True)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(out.float().square().sum(), qkv)[0] for out in (y, wanted)))
