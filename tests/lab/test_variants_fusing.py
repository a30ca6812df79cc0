"""Right answers to the exercises of lesson 05, written in other ways than the library's, pass too; the class is a LayerNorm."""

import pytest
import torch
import torch.nn.functional as F

from course.lab import cells, check, present
from course.lab.exercise import find, known_mistakes
from course.lab.exercises.fusing import Modulate
from course.models.dit import modulate

VARIANTS = {
    "fused-bytes": '''
def fused_bytes(chain, sizes, kept):
    apart, inside, outside = 0, set(), set()
    for reads, written in chain:
        distinct = dict.fromkeys(reads)
        apart += sizes[written] + sum(map(sizes.get, distinct))
        outside.update(name for name in distinct if name not in inside)
        inside.add(written)
    fused = sum(sizes[name] for name in outside)
    for name in inside:
        if name in kept:
            fused += sizes[name]
    return apart, fused
''',
    "kernels": '''
import itertools

def kernels(operators):
    runs = itertools.groupby(operators, lambda kind: kind in {"matmul", "attention"})
    return sum(len(list(run)) if library else 1 for library, run in runs)
''',
    "fused-modulate": '''
import torch
import torch.nn.functional as F

class Modulate(torch.autograd.Function):
    """Keeps the inputs, and lets autograd do the chain again in the backward pass."""

    @staticmethod
    def chain(x, shift, scale, eps):
        return F.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)

    @staticmethod
    def forward(ctx, x, shift, scale, eps):
        ctx.save_for_backward(x, shift, scale)
        ctx.eps = eps
        return Modulate.chain(x, shift, scale, eps)

    @staticmethod
    def backward(ctx, grad):
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            y = Modulate.chain(*inputs, ctx.eps)
        return *torch.autograd.grad(y, inputs, grad), None
''',
    "graph-break": '''
import torch

def tame(x, sample, limit):
    with torch.no_grad():
        padding = sample.lt(0).view(-1, 1, 1)
        largest = torch.linalg.vector_norm(x.masked_fill(padding, 0), float("inf"))
        factor = (limit / largest).clamp(max=1)
    return factor * x, largest
''',
}
# what is kept may also be the normalised x, with which x itself is not needed
KEEPS_THE_NORM = '''
import torch

class Modulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shift, scale, eps):
        centred = x - x.mean(2, keepdim=True)
        r = 1 / (centred.pow(2).mean(2, keepdim=True) + eps).sqrt()
        n = centred * r
        ctx.save_for_backward(n, r, scale)
        return torch.addcmul(shift[:, None], n, 1 + scale[:, None])

    @staticmethod
    def backward(ctx, grad):
        n, r, scale = ctx.saved_tensors
        g = torch.einsum("btd,bd->btd", grad, 1 + scale)
        D = n.shape[2]
        dx = r / D * (D * g - g.sum(2, keepdim=True) - n * (g * n).sum(2, keepdim=True))
        return dx, grad.sum(dim=1), torch.einsum("btd,btd->bd", grad, n), None
'''
# a tensor too many is a tensor too many, whatever else is kept
KEEPS_BOTH = KEEPS_THE_NORM.replace("save_for_backward(n, r, scale)", "save_for_backward(n, r, scale, x)").replace(
    "n, r, scale = ctx", "n, r, scale, x = ctx")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "source"), [*VARIANTS.items(), ("fused-modulate", KEEPS_THE_NORM)])
def test_a_right_answer_written_differently_passes(name, source):
    found = check.examine(find(name), cells.whole(source), 5, hidden=True)
    assert found.passed, present.text(found, colour=False)


@pytest.mark.slow
def test_whoever_keeps_both_is_told_so_whatever_else_they_keep():
    hint = next(mistake.hint for mistake in known_mistakes(find("fused-modulate")) if mistake.name == "keeps more")
    found = check.examine(find("fused-modulate"), cells.whole(KEEPS_BOTH), 5)
    assert not found.passed and found.hint == hint, present.text(found, colour=False)


def test_modulate_is_what_the_library_computes():
    """Output and gradients are those of DiT's LayerNorm and `modulate`; gradcheck agrees."""
    generator = torch.Generator().manual_seed(0)
    x, shift, scale = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
                       for shape in ((2, 5, 6), (2, 6), (2, 6)))
    y, z = Modulate.apply(x, shift, scale, 1e-6), modulate(F.layer_norm(x, (6,), eps=1e-6), shift, scale)
    assert torch.allclose(y, z, rtol=1e-12)
    mine, its = (torch.autograd.grad(out.square().sum(), (x, shift, scale)) for out in (y, z))
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(mine, its, strict=True))
    assert torch.autograd.gradcheck(Modulate.apply, (x, shift, scale, 1e-3))
