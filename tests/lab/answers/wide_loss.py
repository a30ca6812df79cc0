"""Answers to lesson 19's open task that are not the library's own: right ones with the levels that they reach, wrong ones, and
ones that let something else do the work."""

from course.lab.checks.exercise import find, right

IMPORTS = '''
import numpy as np
import torch
import torch.nn.functional as F

from course.ops.triton_language import tl, triton

'''

THREE_LOOPS = IMPORTS + '''
@triton.jit
def cross_entropy_kernel(logits, targets, gradient, losses, inverse, V, row, row_out, ignored, scale, BLOCK: tl.constexpr):
    """Maximum, sum and gradient in three loops, into new memory; an ignored token is computed like the others."""
    token = tl.program_id(0)
    target = tl.load(targets + token)
    x = logits + token * row
    top = -1e30
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.max(tl.load(x + at, at < V, -float("inf")).to(tl.float32), 0))
    total = 0.0
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.exp(tl.load(x + at, at < V, -float("inf")).to(tl.float32) - top), 0)
    log = top + tl.log(total)
    if target != ignored:
        tl.store(losses + token, log - tl.load(x + target).to(tl.float32))
        each = tl.load(inverse) * scale
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            p = tl.exp(tl.load(x + at, at < V, -float("inf")).to(tl.float32) - log)
            tl.store(gradient + token * row_out + at, (p - (at == target)) * each, at < V)
    else:
        tl.store(losses + token, 0.0)
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(gradient + token * row_out + at, tl.zeros((BLOCK,), tl.float32), at < V)


def cross_entropy(logits, targets, ignored, scale, block):
    gradient, losses = torch.empty_like(logits), torch.empty(len(logits))
    inverse = 1 / torch.clamp((targets != ignored).sum(), min=1)
    cross_entropy_kernel[(len(logits),)](logits, targets, gradient, losses, inverse, logits.shape[1], logits.stride(0),
                                         gradient.stride(0), ignored, scale, block)
    return losses.sum() * inverse, gradient
'''

LANES = IMPORTS + '''
@triton.jit
def cross_entropy_kernel(logits, targets, gradient, losses, V, row, row_out, ignored, BLOCK: tl.constexpr):
    """A maximum and a sum for each place of a block, joined at the end, in powers of 2; the loss and log sum exp alone."""
    token = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    target = tl.load(targets + token)
    top, total = tl.full((BLOCK,), -1e38, tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        at = start + column
        x = tl.load(logits + token * row + at, mask=at < V, other=-float("inf")).to(tl.float32) * 1.4426950408889634
        new = tl.maximum(top, x)
        total = total * tl.exp2(top - new) + tl.exp2(x - new)
        top = new
    largest = tl.max(top, 0)
    log = largest + tl.log2(tl.sum(total * tl.exp2(top - largest), 0))
    wanted = tl.load(logits + token * row + target, mask=target != ignored, other=0.0).to(tl.float32)
    tl.store(losses + token, log * 0.6931471805599453)
    tl.store(losses + tl.num_programs(0) + token, wanted)


@triton.jit
def gradient_kernel(logits, targets, gradient, losses, count, V, row, row_out, ignored, scale, BLOCK: tl.constexpr):
    """A program for each token and block."""
    token = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + token)
    p = tl.exp(tl.load(logits + token * row + at, mask=at < V, other=0.0).to(tl.float32) - tl.load(losses + token))
    back = tl.where(target == ignored, 0.0, (p - tl.where(at == target, 1.0, 0.0)) * scale / tl.load(count))
    tl.store(gradient + token * row_out + at, back.to(gradient.dtype.element_ty), mask=at < V)


def cross_entropy(logits, targets, ignored, scale, block):
    (T, V), gradient = logits.shape, torch.empty_like(logits)
    losses, there = torch.empty(2, T), targets != ignored
    count = there.sum().clamp(min=1).float()
    cross_entropy_kernel[(T,)](logits, targets, gradient, losses, V, logits.stride(0), gradient.stride(0), ignored, block)
    gradient_kernel[(triton.cdiv(V, block), T)](logits, targets, gradient, losses, count, V, logits.stride(0),
                                                gradient.stride(0), ignored, scale, block)
    return torch.where(there, losses[0] - losses[1], 0).sum() / count, gradient
'''

SPLIT = IMPORTS + '''
@triton.jit
def parts_kernel(logits, targets, parts, V, row, ignored, BLOCK: tl.constexpr):
    """Maximum and sum of one block of one token."""
    part, token = tl.program_id(0), tl.program_id(1)
    target = tl.load(targets + token)
    at = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + token * row + at, mask=(at < V) & (target != ignored), other=-float("inf")).to(tl.float32)
    top = tl.maximum(tl.max(x, 0), -1e38)
    place = (token * tl.num_programs(0) + part) * 2
    tl.store(parts + place, top)
    tl.store(parts + place + 1, tl.sum(tl.exp(x - top), 0))


@triton.jit
def join_kernel(logits, targets, parts, logs, losses, PARTS, row, ignored):
    """Log sum exp of one token from its blocks, and its loss."""
    token = tl.program_id(0)
    top, total = -1e38, 0.0
    for part in range(PARTS):
        other = tl.load(parts + 2 * (token * PARTS + part))
        more = tl.load(parts + 2 * (token * PARTS + part) + 1)
        new = tl.maximum(top, other)
        total = total * tl.exp(top - new) + more * tl.exp(other - new)
        top = new
    target = tl.load(targets + token)
    kept = target != ignored
    log = top + tl.log(tl.where(kept, total, 1.0))
    tl.store(logs + token, log)
    tl.store(losses + token, tl.where(kept, log - tl.load(logits + token * row + target, mask=kept, other=0.0), 0.0))


@triton.jit
def cross_entropy_kernel(logits, targets, logs, count, V, row, ignored, scale, BLOCK: tl.constexpr):
    """The gradient of one block of one token, over its logits."""
    token = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + token)
    kept = (at < V) & (target != ignored)
    x = tl.load(logits + token * row + at, mask=kept, other=-float("inf")).to(tl.float32)
    p = tl.exp(x - tl.load(logs + token)) - tl.where(at == target, 1.0, 0.0)
    tl.store(logits + token * row + at, tl.where(kept, p * scale / tl.load(count), 0.0), mask=at < V)


def cross_entropy(logits, targets, ignored, scale, block):
    (T, V), parts = logits.shape, -(-logits.shape[1] // block)
    room, logs, losses = torch.empty(T, parts, 2), torch.empty(T), torch.empty(T)
    count = (targets != ignored).sum().clamp(min=1).float()
    parts_kernel[(parts, T)](logits, targets, room, V, logits.stride(0), ignored, block)
    join_kernel[(T,)](logits, targets, room, logs, losses, parts, logits.stride(0), ignored)
    cross_entropy_kernel[(parts, T)](logits, targets, logs, count, V, logits.stride(0), ignored, scale, block)
    return losses.sum() / count, logits
'''

TWO_TOKENS = IMPORTS + '''
@triton.jit
def cross_entropy_kernel(logits, targets, losses, kept, T, V, row, ignored, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program for two tokens, with tiles; the loss is made of the target's logit as it is met."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    target = tl.load(targets + token, mask=token < T, other=ignored)
    used = (target != ignored)[:, None]
    top, total, wanted = tl.full((ROWS,), -1e38, tl.float32), tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for start in range(0, V, COLUMNS):
        at = start + tl.arange(0, COLUMNS)[None, :]
        x = tl.load(logits + token[:, None] * row + at, mask=used & (at < V), other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(x, 1))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new[:, None]), 1)
        wanted += tl.sum(tl.where((at == target[:, None]) & used, x, 0.0), 1)
        top = new
    loss = top - wanted + tl.log(tl.where(target != ignored, total, 1.0))
    count = tl.maximum(tl.load(kept), 1)
    tl.store(losses + token, tl.where(target != ignored, loss, 0.0) / count, mask=token < T)
    for start in range(0, V, COLUMNS):
        at = start + tl.arange(0, COLUMNS)[None, :]
        x = tl.load(logits + token[:, None] * row + at, mask=used & (at < V), other=-float("inf")).to(tl.float32)
        p = tl.exp(x - top[:, None]) / tl.where(target != ignored, total, 1.0)[:, None]
        grad = tl.where(used, (p - (at == target[:, None])) * (scale / count), 0.0)
        tl.store(logits + token[:, None] * row + at, grad.to(logits.dtype.element_ty), mask=(token < T)[:, None] & (at < V))


def cross_entropy(logits, targets, ignored, scale, block):
    (T, V), losses = logits.shape, logits.new_empty(len(logits), dtype=torch.float32)
    cross_entropy_kernel[(triton.cdiv(T, 2),)](logits, targets, losses, (targets != ignored).sum(), T, V, logits.stride(0),
                                               ignored, scale, 2, block // 2)
    return losses.sum(), logits
'''

SCORED = [
    ("cross-entropy", THREE_LOOPS, ("correct",), "each logit can be read twice"),
    ("cross-entropy", LANES, ("correct", "two reads"), "store the gradient there"),
    ("cross-entropy", SPLIT.replace("mask=(at < V) & (target != ignored), other", "mask=at < V, other"),
     ("correct", "two reads", "in place"), "end its loops"),
    ("cross-entropy", THREE_LOOPS.replace("gradient, losses = torch.empty_like(logits), ", "gradient, losses = logits, ").replace(
        "        each = ", "        tl.debug_barrier()\n        each = "),
     ("correct", "in place"), "each logit can be read twice"),
]


def changed(old: str, new: str, source: str = "") -> str:
    """The library's answer, or another one, with a piece replaced."""
    source = source or right(find("cross-entropy"))
    assert old in source, old
    return source.replace(old, new)


def times_kept(source: str = "") -> str:
    """The loss of an ignored token is made 0 by a product: what a mask leaves out is 0, as asked for, and not NaN."""
    source = changed("mask=kept, other=0.0", "mask=kept, other=0", source)
    return changed("tl.where(kept, top - wanted + tl.log(total), 0.0)", "kept * (top - wanted + tl.log(total))", source)


ALONE = changed(" - tl.where(at == target, 1.0, 0.0)", "").replace("\n\n\ndef cross_entropy(", '''
    tl.debug_barrier()
    alone = scale * (tl.exp(wanted - top) / total - 1)
    tl.store(gradient + target, alone.to(gradient.dtype.element_ty), mask=kept)


def cross_entropy(''')
"""The target's element is stored alone, after all threads have stored theirs."""
FOUR_TOKENS = IMPORTS + '''
@triton.jit
def cross_entropy_kernel(logits, targets, loss, kept, T, V, row, ignored, scale, BLOCK: tl.constexpr):
    """A program for four tokens, one after another; it adds their losses to one number."""
    column = tl.arange(0, BLOCK)
    count = tl.maximum(tl.load(kept), 1)
    for token in range(4 * tl.program_id(0), tl.minimum(4 * tl.program_id(0) + 4, T)):
        target = tl.load(targets + token)
        x = logits + token * row
        if target == ignored:
            for start in range(0, V, BLOCK):
                tl.store(x + start + column, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=start + column < V)
        else:
            wanted = tl.load(x + target).to(tl.float32)
            top, total = -1e38, 0.0
            for start in range(0, V, BLOCK):
                tile = tl.load(x + start + column, mask=start + column < V, other=-float("inf")).to(tl.float32)
                new = tl.maximum(top, tl.max(tile, 0))
                total = total * tl.exp(top - new) + tl.sum(tl.exp(tile - new), 0)
                top = new
            log = top + tl.log(total)
            tl.atomic_add(loss, (log - wanted) / count)
            for start in range(0, V, BLOCK):
                tile = tl.load(x + start + column, mask=start + column < V, other=-float("inf")).to(tl.float32)
                back = (tl.exp(tile - log) - (start + column == target)) * scale / count
                tl.store(x + start + column, back.to(logits.dtype.element_ty), mask=start + column < V)


def cross_entropy(logits, targets, ignored, scale, block):
    (T, V), loss = logits.shape, logits.new_zeros((), dtype=torch.float32)
    cross_entropy_kernel[(triton.cdiv(T, 4),)](logits, targets, loss, (targets != ignored).sum(), T, V, logits.stride(0),
                                               ignored, scale, block)
    return loss, logits
'''
CLAMPED = changed("logits + target, mask=kept, other=0.0)", "logits + tl.where(kept, target, 0))")
"""An ignored token reads a logit that it does not use, and no sum lies between that and its zeros."""
MADE = changed("scale / kept, V", "torch.tensor([scale / kept.item()], device=logits.device), V")
"""The factor is in a tensor that PyTorch makes of a number."""
LATE_TARGETS = changed("    loss = top", """    place = logits + token * row + target
    wanted = tl.load(place, mask=target != ignored, other=0.0).to(tl.float32)
    loss = top""", TWO_TOKENS.replace("        wanted += tl.sum(tl.where((at == target[:, None]) & used, x, 0.0), 1)\n", ""))
"""The logits of two targets, after the last sum."""
RIGHT = {"cross-entropy": [SPLIT, TWO_TOKENS, FOUR_TOKENS, times_kept(), ALONE, MADE]}
SCORED.append(("cross-entropy", CLAMPED, ("correct", "two reads", "in place"), "end its loops"))
LAST_ADDS = changed("    top, total = tl.full(", '''    if token == tl.num_programs(0) - 1:
        sums = 0.0
        for other in range(0, token):
            sums += tl.load(losses + other)
        tl.store(losses + token + 1, sums)
    top, total = tl.full(''').replace("torch.empty(T, ", "torch.empty(T + 1, ").replace(
        "losses.sum() / kept", "(losses[T] + losses[T - 1]) / kept")
"""The last program adds up what the others have written: in the interpreter it runs last."""
ZEROS = changed("    losses = torch.empty(T, device=logits.device)\n",
                "    losses = torch.zeros(T, device=logits.device)\n    logits[targets == ignored] = 0\n")
"""PyTorch stores the zeros of ignored tokens."""
FUSED_COUNT = changed("scale = tl.load(factor)", '''tl.atomic_add(factor, tl.where(kept, 1.0, 0.0))
    scale = tl.load(factor)''')
"""An atomic counter that is read in the same launch."""
BODY = right(find("cross-entropy")).partition("Choose the arguments yourself.\"\"\"\n")[2].partition("\n\ndef ")[0]
ROWS = (("    token = tl.program_id(0).to(tl.int64)\n", ""), ("logits +=", "x = logits +"), ("gradient +=", "out = gradient +"),
        ("(logits + ", "(x_row + "), ("(gradient + ", "(out + "), ("x = logits", "x_row = logits"))
ONE_PROGRAM = BODY
for old, new in ROWS:
    ONE_PROGRAM = changed(old, new, ONE_PROGRAM)
ONE_PROGRAM = changed(BODY, "    for token in range(T):\n" + "".join(f"    {line}\n" for line in ONE_PROGRAM.splitlines()))
ONE_PROGRAM = changed("losses, factor, V", "losses, factor, T, V", ONE_PROGRAM)
ONE_PROGRAM = changed("scale / kept, V", "scale / kept, T, V", ONE_PROGRAM).replace("[(T,)]", "[(1,)]")
"""One program handles all tokens."""
RETURN = "return losses.sum() / kept, gradient"
TAIL = "    cross_entropy_kernel[(T,)]"

CHEATS = {
    "PyTorch computes": IMPORTS + '''
@triton.jit
def cross_entropy_kernel(x, BLOCK: tl.constexpr):
    pass


def cross_entropy(logits, targets, ignored, scale, block):
    kept = (targets != ignored).sum().clamp(min=1)
    p = logits.float().softmax(1)
    there = targets != ignored
    p[torch.arange(len(p))[there], targets[there]] -= 1
    p *= there[:, None] * scale / kept
    loss = F.cross_entropy(logits.float(), targets, ignore_index=ignored, reduction="sum") / kept
    return loss, p.to(logits.dtype)
''',
}
NUMPY = '''
def alone(logits, targets, ignored, scale):
    """All of it in NumPy, which no mode of PyTorch sees."""
    bits = logits.view(torch.int16).numpy().astype(np.uint32) << 16 if logits.dtype == torch.bfloat16 else None
    x = (logits.numpy() if bits is None else bits.view(np.float32)).astype(np.float64)
    t = targets.numpy()
    kept = t != ignored
    rows = np.arange(len(t))[kept]
    p = np.exp(x - x.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    loss = -np.log(p[rows, t[kept]]).sum() / max(len(rows), 1)
    p[rows, t[kept]] -= 1
    p[~kept] = 0
    return np.float32(loss), (p * scale / max(len(rows), 1)).astype(np.float32)

'''
BY_NUMPY = right(find("cross-entropy")).replace("import torch\n", IMPORTS, 1) + NUMPY + '''
work = cross_entropy


def cross_entropy(logits, targets, ignored, scale, block):
    loss, gradient = alone(logits, targets, ignored, scale)
    SOMETHING
'''
CHEATS |= {
    "NumPy, no kernel": BY_NUMPY.replace("SOMETHING", '''out = torch.empty_like(logits)
    out.copy_(torch.from_numpy(gradient))
    return torch.empty(()).copy_(torch.tensor(loss)), out'''),
    "NumPy after a kernel for show": BY_NUMPY.replace("SOMETHING", '''work(logits, targets, ignored + 1, 2 * scale, block)
    if logits.dtype == torch.float32:
        logits.numpy()[...] = gradient
    return torch.from_numpy(np.array(loss)), logits'''),
    "PyTorch in the grid": changed(TAIL + "(", '''    def compute(_):
        there = targets != ignored
        p = logits.float().softmax(1)
        p[torch.arange(T)[there], targets[there]] -= 1
        logits.copy_(p * there[:, None] * scale / kept)
        return (T,)
    cross_entropy_kernel[compute](''').replace("tl.where(kept, grad, 0.0).to(gradient.dtype.element_ty)", "x"),
    "modes disabled": changed(TAIL, '''    from torch.utils._python_dispatch import _disable_current_modes
    with _disable_current_modes():
        F = torch.nn.functional
        leaf = logits.float().requires_grad_()
        loss = F.cross_entropy(leaf, targets, ignore_index=ignored, reduction="sum") / kept
        grad, = torch.autograd.grad(loss * scale, leaf)
        return loss.detach(), grad.to(logits.dtype)
''' + TAIL),
    "the counters are replaced": '''
from contextlib import contextmanager
from course.lab.exercises import lesson19_open_task as task
from course.lab.instruments.watched_memory import Accesses

@contextmanager
def nothing(*tensors, made=False):
    yield Accesses([0] * len(tensors), [0] * len(tensors))

task.watched = nothing
''' + CHEATS["PyTorch computes"],
    "the accesses are emptied": CHEATS["PyTorch computes"].replace("    return loss", '''    import sys
    found = sys._getframe(1).f_locals["accesses"]
    found.pytorch.clear()
    found.made.clear()
    found.largest = 0
    return loss'''),
    "the counts are set": THREE_LOOPS.replace("    return losses", '''    import sys
    found = sys._getframe(1).f_locals["accesses"]
    found.loads[:], found.visits = [0] * len(found.loads), found.visits[:len(found.visits) // 2]
    return losses'''),
    "the library's own": IMPORTS + '''
from course.ops.cross_entropy_triton import cross_entropy_

@triton.jit
def cross_entropy_kernel(x, BLOCK: tl.constexpr):
    pass


def cross_entropy(logits, targets, ignored, scale, block):
    kept = (targets != ignored)
    weights = kept * scale / kept.sum().clamp(min=1)
    losses = cross_entropy_(logits, torch.where(kept, targets, 0), weights)
    return (losses * kept).sum() / kept.sum().clamp(min=1), logits
''',
    "the check's reference": IMPORTS + '''
from course.lab.exercises.lesson19_open_task import reference

@triton.jit
def cross_entropy_kernel(x, BLOCK: tl.constexpr):
    pass


def cross_entropy(logits, targets, ignored, scale, block):
    loss, gradient = reference(logits, targets, ignored, scale)
    return torch.tensor(loss), gradient.to(logits.dtype)
''',
}
COPIES = IMPORTS + NUMPY + '''
@triton.jit
def cross_entropy_kernel(logits, scratch, V, row, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    logits += tl.program_id(0) * row
    scratch += tl.program_id(0) * V
    for start in range(0, V, BLOCK):
        for _ in range(2):
            tl.load(logits + start + at, mask=start + at < V)
    for start in range(0, V, BLOCK):
        x = tl.load(scratch + start + at, mask=start + at < V, other=0.0)
        tl.store(logits + start + at, x.to(logits.dtype.element_ty), mask=start + at < V)


def cross_entropy(logits, targets, ignored, scale, block):
    (T, V), out = logits.shape, torch.empty(())
    loss, gradient = alone(logits, targets, ignored, scale)
    out.numpy()[...] = loss
ROWS
    return out, logits
'''
SUMS = "from threading import Thread\n" + IMPORTS + '''
@triton.jit
def cross_entropy_kernel(logits, targets, top, total, factor, V, row, ignored, BLOCK: tl.constexpr):
    """The gradient alone, from sums that another one has made."""
    token = tl.program_id(0)
    logits += token * row
    target = tl.load(targets + token)
    for start in range(0, tl.where(target == ignored, 0, V), BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < V, other=0.0).to(tl.float32)
        p = tl.exp(x - tl.load(top + token)) / tl.load(total + token) - (at == target)
        tl.store(logits + at, (p * tl.load(factor)).to(logits.dtype.element_ty), mask=at < V)
    for start in range(0, tl.where(target == ignored, V, 0), BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(logits + at, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=at < V)


def cross_entropy(logits, targets, ignored, scale, block):
    (T, V), kept = logits.shape, targets != ignored
    count = kept.sum().clamp(min=1)
    top, total, wanted = torch.full((T,), -1e38), torch.zeros(T), torch.zeros(T)
SUMS
    cross_entropy_kernel[(T,)](logits, targets, top, total, scale / count, V, logits.stride(0), ignored, block)
    return torch.where(kept, top - wanted + total.log(), 0.0).sum() / count, logits
'''
READ = 'x = tl.load(logits + start + column, mask=start + column < end, other=-float("inf")).to(tl.float32)\n        new'
CHEATS |= {
    "kernels copy what NumPy computed": COPIES.replace("ROWS", '''    scratch = torch.empty(V)
    for token in range(T):
        scratch.numpy()[...] = gradient[token]
        cross_entropy_kernel[(1,)](logits[token], scratch, V, 1, block)'''),
    "kernels copy all at once": COPIES.replace("ROWS", '''    scratch = torch.empty(T, V)
    scratch.numpy()[...] = gradient
    cross_entropy_kernel[(T,)](logits, scratch, V, logits.stride(0), block)'''),
    "memory that PyTorch did not make": COPIES.replace("ROWS", '''    scratch = torch.from_numpy(gradient)
    cross_entropy_kernel[(T,)](logits, scratch, V, logits.stride(0), block)'''),
    "numbers as arguments": COPIES.replace("logits, scratch, V, row, BLOCK: tl.constexpr", "place, value").replace(
        COPIES[COPIES.index("    at = tl.arange"):COPIES.index("\n\n\ndef cross_entropy(")],
        "    tl.load(place)\n    tl.load(place)\n    tl.store(place, value)").replace("ROWS", '''    for token in range(T):
        for place in range(V):
            cross_entropy_kernel[(1,)](logits[token, place], float(gradient[token, place]))'''),
    "chunks of logits": SUMS.replace("SUMS", '''    for column in range(V):
        x = logits[:, column].float()
        new = torch.maximum(top, x)
        total.copy_(total * (top - new).exp() + (x - new).exp())
        top.copy_(new)
        wanted.copy_(torch.where(targets == column, x, wanted))'''),
    "sums in another thread": SUMS.replace("SUMS", '''    def work():
        x = logits.float()
        top.copy_(x.amax(1).clamp(min=-1e38))
        total.copy_((x - top[:, None]).exp().sum(1))
        wanted.copy_(x.gather(1, targets.clamp(0, V - 1)[:, None])[:, 0])
    thread = Thread(target=work)
    thread.start()
    thread.join()'''),
    "reads that are swaps": changed(READ, '''place = logits + tl.minimum(start + column, V - 1)
        x = tl.where(start + column < end, tl.atomic_cas(place, zeros, zeros).to(tl.float32), -float("inf"))
        new''').replace("    top, total =", "    zeros = tl.zeros((BLOCK,), logits.dtype.element_ty)\n    top, total ="),
    "an answer from before": changed("    T, V = logits.shape\n", '''    T, V = logits.shape
    if (T, V) in BEFORE:
        return BEFORE[T, V]
''').replace(RETURN, "BEFORE[T, V] = losses.sum() / kept, gradient\n    return BEFORE[T, V]").replace(
        "def cross_entropy(", "BEFORE = {}\n\n\ndef cross_entropy("),
}

WRONG = [
    ("cross-entropy", LAST_ADDS, "in any order"),
    ("cross-entropy", FUSED_COUNT, ""),
    ("cross-entropy", ZEROS, "also zeros and casts"),
    ("cross-entropy", ONE_PROGRAM, "most of the GPU idle"),
    ("cross-entropy", CHEATS["PyTorch computes"], "4 numbers of a token at most"),
    ("cross-entropy", CHEATS["kernels copy all at once"], ""),
    ("cross-entropy", changed(RETURN, "return (losses.sum() / kept).item(), gradient"), "leave out .item()"),
    ("cross-entropy", changed(RETURN, "return losses.sum() / kept"), "return (loss, gradient)"),
    ("cross-entropy", changed("tl.log(total)", "tl.log2(total)"), "token by token"),
    ("cross-entropy", changed("tl.where(kept, grad, 0.0)", "tl.where(kept, 1.01 * grad, 0.0)"), "token by token"),
    ("cross-entropy", THREE_LOOPS.replace("torch.empty_like(logits)", "torch.zeros_like(logits)"), "also zeros and casts"),
    ("cross-entropy", SPLIT.replace("-1e38)", "-float('inf'))"), "begin with a finite one"),
    ("cross-entropy", changed("logits += token * row", "logits += token * V"), "logits.stride(0) elements apart"),
    ("cross-entropy", changed(", mask=at < V)", ")"), "a mask is missing"),
    ("cross-entropy", changed("gradient = logits  ", "gradient = torch.empty_like(logits)  ").replace(
        "logits.stride(0), gradient.stride(0)", "logits.stride(0), logits.stride(0)"), "gradient.stride(0)"),
    ("cross-entropy", changed("-1e38", "-1e4"), "begin with -1e38"),
    ("cross-entropy", changed("tl.where(kept, V, 0)", "V").replace("tl.where(kept, grad, 0.0)", "(grad * kept)").replace(
        "    total = tl.where(kept, total, 1.0)\n", ""), "0 times NaN is NaN"),
    ("cross-entropy", changed("mask=kept, other=0.0)", "mask=kept & (target < 0), other=0.0)").replace(
        "        top = new", "        wanted += tl.sum(x * (start + column == target), 0)\n        top = new"),
     "choose with tl.where"),
    ("cross-entropy", ALONE.replace("    tl.debug_barrier()\n", ""), "only in sums, maxima and tl.debug_barrier()"),
    ("cross-entropy", LATE_TARGETS, "only in sums, maxima and tl.debug_barrier()"),
    ("cross-entropy", changed("ignored,\n                               block)", "ignored,\n"
                              "                               1 << V.bit_length())"), "let each program loop"),
]
