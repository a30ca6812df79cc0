"""Answers to exercises of lesson 05 that are not the library's own."""

from course.lab.checks.exercise import find, known_mistakes

RIGHT = {
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
# what is kept may also be the normalized x, with which x itself is not needed
KEEPS_THE_NORM = '''
import torch

class Modulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shift, scale, eps):
        centered = x - x.mean(2, keepdim=True)
        r = 1 / (centered.pow(2).mean(2, keepdim=True) + eps).sqrt()
        n = centered * r
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

RIGHT["fused-modulate"] = KEEPS_THE_NORM
WRONG = [("fused-modulate", KEEPS_BOTH, next(m.hint for m in known_mistakes(find("fused-modulate")) if m.name == "keeps more"))]
