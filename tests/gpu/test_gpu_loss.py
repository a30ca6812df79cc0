"""The loss in chunks on a GPU, where a kernel of ours turns logits into their gradient."""

import pytest
import torch

from course.models import gpt
from course.ops.number_formats import set_matmul_precision
from course.training.compile import compile_parts
from tests.models.test_gpt import batch, prepared, shaken

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(("tokens", "vocab"), [(64, 50304), (33, 1000), (7, 8193), (5, 3)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 2**-11), (torch.bfloat16, 2**-8)])
def test_the_kernel_gives_losses_and_gradients_of_float64(tokens, vocab, dtype, bound):
    """Up to the rounding of each gradient, in float32 to that of the GPU's quick exponentials; large logits, a weight of zero,
    the first and the last column as targets."""
    from course.ops.cross_entropy_triton import cross_entropy_

    make = torch.Generator("cuda").manual_seed(0)
    logits = (torch.randn(tokens, vocab, device="cuda", generator=make) * 20).to(dtype)
    target = torch.randint(vocab, (tokens,), device="cuda", generator=make)
    target[0], target[1] = 0, vocab - 1
    weights = torch.rand(tokens, device="cuda", dtype=torch.float64, generator=make)
    weights[2] = 0
    losses, grad = gpt.CrossEntropy().with_gradient(logits.double(), target)
    found = cross_entropy_(logits, target, weights)
    torch.testing.assert_close(found.double(), losses, rtol=1e-6, atol=1e-5)
    wanted = grad * weights[:, None]
    assert (logits.double() - wanted).norm() <= bound * wanted.norm()
    assert (logits[2] == 0).all()


def test_a_logit_that_is_no_number_makes_the_loss_none():
    from course.ops.cross_entropy_triton import cross_entropy_

    for bad in (float("nan"), float("inf")):
        logits = torch.zeros(2, 100, device="cuda")
        logits[1, 7] = bad
        losses = cross_entropy_(logits, torch.zeros(2, dtype=torch.long, device="cuda"), torch.ones(2, device="cuda"))
        assert losses[0].isfinite() and not losses[1].isfinite() and not logits[1].isfinite().all()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_chunks_on_a_gpu_are_the_loss_on_a_cpu_in_float64(tied, compiled):
    set_matmul_precision("fp32")                    # other tests of this process may have let it round
    found = []
    for device in ("cpu", "cuda"):
        model, b = shaken(loss_chunk=7, tied=tied), batch(3)
        b["sample"][2] = -1
        model = model.to(device) if device == "cpu" else model.float().to(device)
        if compiled and device == "cuda":
            compile_parts([model])
        ready = {key: value.to(device) for key, value in prepared(model, b).items()}
        total, weight = model.loss(model(ready), ready)
        (total / weight).backward()
        found.append([total, weight, *(p.grad for p in model.parameters())])
    for exact, on_gpu in zip(*found, strict=True):
        assert (on_gpu.cpu().double() - exact).norm() <= 2e-5 * exact.norm() + 1e-9


@pytest.mark.parametrize(("tokens", "vocab"), [(64, 25152), (33, 500), (5, 3)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 2**-11), (torch.bfloat16, 2**-8)])
def test_the_kernels_of_a_vocabulary_in_pieces(tokens, vocab, dtype, bound):
    """Two ranks' columns, put together here as `VocabularyCrossEntropy.in_place` has its ranks do."""
    from course.ops import cross_entropy_triton

    make = torch.Generator("cuda").manual_seed(0)
    whole = (torch.randn(tokens, 2 * vocab, device="cuda", generator=make) * 20).to(dtype)
    target = torch.randint(2 * vocab, (tokens,), device="cuda", generator=make)
    target[0], target[1] = vocab - 1, vocab
    weights = torch.rand(tokens, device="cuda", dtype=torch.float64, generator=make)
    losses, grad = gpt.CrossEntropy().with_gradient(whole.double(), target)
    pieces = [piece.contiguous() for piece in whole.chunk(2, 1)]
    columns = [torch.where(target // vocab == rank, target % vocab, -1) for rank in range(2)]
    found = torch.stack([cross_entropy_triton.summarize(*given) for given in zip(pieces, columns, strict=True)])     # (2, 3, N)
    largest = found[:, 0].amax(0)
    logs = (found[:, 1] * (found[:, 0] - largest).exp()).sum(0).log() + largest
    torch.testing.assert_close((logs - found[:, 2].sum(0)).double(), losses, rtol=1e-6, atol=1e-5)
    for piece, column in zip(pieces, columns, strict=True):
        cross_entropy_triton.differentiate_(piece, column, weights, logs)
    wanted = grad * weights[:, None]
    assert (torch.cat(pieces, 1).double() - wanted).norm() <= bound * wanted.norm()


def test_grouped_heads_in_32_bits_keep_no_scores():
    from course.ops.attention import attend

    q, k, v = (torch.randn(1, heads, 4096, 64, device="cuda", requires_grad=True) for heads in (8, 2, 2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(q, k, v, True).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 4 * 8 * 4096 ** 2       # the scores, in bytes
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attend(q, k, v, True).double(), exact, rtol=1e-3, atol=1e-3)
