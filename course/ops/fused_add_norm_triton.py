"""The kernels behind `course.ops.fused_add_norm` on a GPU: a residual sum, the norm of it, and both backwards, each in one pass
over memory.

A program has some rows of one sample, one after another; a row is in registers from its reading to its writing. What is the
same for all rows of a sample, or for all samples, is read once. The gradients of these are sums over tokens: each program
writes its part, and PyTorch adds the parts up, always in the same order.

torch.compile writes kernels for the same formulas, one for the rows and one for each sum over tokens, which reads the rows'
tensors again; and for a width that is no power of two, such as DiT's 1152, kernels that read a row twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from course.utils.errors import CourseError

# rows of a program, and of how many the reading has begun before they are needed: the best of those tried on an H200, for widths
# of 768 to 1152 (`python -m experiments.fused_kernels` measures what came of it)
ROWS, STAGES = 32, 3
MOST = 65535                                        # programs of a launch in any dim but the first
TILE, COLUMNS, SPAN, GELU_WARPS = 4, 256, 64, 8     # GELU's backward: rows and columns of a tile, rows of a program, its warps


@triton.jit
def forward(x, y, gate, weight, bias, z, n, mean, rstd, tokens, gate_step, weight_step, bias_step, eps,
            offset: tl.constexpr, add: tl.constexpr, gated: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
            rows: tl.constexpr, stages: tl.constexpr):
    """x, y, z, n (samples, tokens, width); mean, rstd (samples, tokens); gate, weight, bias: samples' rows are `step` apart."""
    sample, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * rows
    at = tl.arange(0, block)
    inside = at < width
    w = offset + tl.load(weight + sample * weight_step + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + sample * bias_step + at, mask=inside, other=0.0).to(tl.float32)
    if gated:
        g = tl.load(gate + sample * gate_step + at, mask=inside, other=0.0).to(tl.float32)
    for token in tl.range(first, tl.minimum(first + rows, tokens), num_stages=stages):
        row = sample * tokens + token
        value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
        if add:
            branch = tl.load(y + row * width + at, mask=inside, other=0.0).to(tl.float32)
            value += g * branch if gated else branch
            value = value.to(z.dtype.element_ty)    # the norm is of what is kept, of which backward computes it again
            tl.store(z + row * width + at, value, mask=inside)
            value = value.to(tl.float32)
        middle = tl.sum(value, 0) / width
        value = tl.where(inside, value - middle, 0.0)
        inverse = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        tl.store(n + row * width + at, (value * inverse * w + b).to(n.dtype.element_ty), mask=inside)
        tl.store(mean + row, middle)
        tl.store(rstd + row, inverse)


@triton.jit
def backward(dz, dn, z, y, gate, weight, mean, rstd, dx, dy, parts, tokens, gate_step, weight_step,
             offset: tl.constexpr, norm: tl.constexpr, summed: tl.constexpr, gated: tl.constexpr, total: tl.constexpr,
             width: tl.constexpr, block: tl.constexpr, rows: tl.constexpr, stages: tl.constexpr):
    """parts (1 to 4, samples, programs of a sample, width): the program's share of the gradients of weight, bias and gate, and
    of the sum of dy, or of dx without a gate.

    norm: dn goes through the norm; summed: dz is added, the gradient of the sum from elsewhere, without `norm` all there is.
    """
    sample, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * rows
    at = tl.arange(0, block)
    inside = at < width
    if norm:
        w = offset + tl.load(weight + sample * weight_step + at, mask=inside, other=0.0).to(tl.float32)
    if gated:
        g = tl.load(gate + sample * gate_step + at, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((block,), tl.float32)
    dbias = tl.zeros((block,), tl.float32)
    dgate = tl.zeros((block,), tl.float32)
    sums = tl.zeros((block,), tl.float32)
    for token in tl.range(first, tl.minimum(first + rows, tokens), num_stages=stages):
        row = sample * tokens + token
        grad = tl.zeros((block,), tl.float32)
        if summed:
            grad += tl.load(dz + row * width + at, mask=inside, other=0.0).to(tl.float32)
        if norm:
            out = tl.load(dn + row * width + at, mask=inside, other=0.0).to(tl.float32)
            value = tl.load(z + row * width + at, mask=inside, other=0.0).to(tl.float32)
            inverse = tl.load(rstd + row)
            unit = tl.where(inside, (value - tl.load(mean + row)) * inverse, 0.0)
            dweight += out * unit
            dbias += out
            out *= w
            grad += inverse * (out - tl.sum(out, 0) / width - unit * (tl.sum(out * unit, 0) / width))
        if norm:
            back = grad.to(dx.dtype.element_ty)
            tl.store(dx + row * width + at, back, mask=inside)
        if gated:
            dgate += grad * tl.load(y + row * width + at, mask=inside, other=0.0).to(tl.float32)
            back = (grad * g).to(dy.dtype.element_ty)
            tl.store(dy + row * width + at, back, mask=inside)
        if total:
            sums += back.to(tl.float32)
    part = parts + (sample * tl.num_programs(1) + tl.program_id(1)) * width + at
    size = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * width
    if norm:
        tl.store(part, dweight, mask=inside)
        tl.store(part + size, dbias, mask=inside)
        part += 2 * size
    if gated:
        tl.store(part, dgate, mask=inside)
        part += size
    if total:
        tl.store(part, sums, mask=inside)


def add_norm(x: Tensor, y: Tensor | None, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float, offset: float,
             out: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `course.ops.fused_add_norm.add_norm_plain` says, on a GPU."""
    samples, tokens, width = x.shape
    check(tokens)
    block = triton.next_power_of_2(width)
    x, weight, bias = x.contiguous(), last(weight), last(bias)
    y, gate = None if y is None else y.contiguous(), None if gate is None else last(gate)
    z = x.new_empty(0) if y is None else torch.empty_like(x, dtype=torch.promote_types(x.dtype, y.dtype))
    n = torch.empty_like(x, dtype=out)
    mean, rstd = (x.new_empty(samples, tokens, dtype=torch.float32) for _ in range(2))
    forward[samples, triton.cdiv(tokens, ROWS)](
        x, y, gate, weight, bias, z, n, mean, rstd, tokens, step(gate), step(weight), step(bias), eps, offset, y is not None,
        gate is not None, width, block, ROWS, stages(x, block), num_warps=warps(block))
    return z, n, mean, rstd


def add_norm_backward(dz: Tensor | None, dn: Tensor | None, z: Tensor | None, y: Tensor | None, gate: Tensor | None,
                      weight: Tensor | None, mean: Tensor | None, rstd: Tensor | None, offset: float, total: bool,
                      to_x: torch.dtype, to_y: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """As `course.ops.fused_add_norm.add_norm_backward_plain` says, on a GPU."""
    given = dn if dn is not None else dz
    assert given is not None
    samples, tokens, width = given.shape
    check(tokens)
    block = triton.next_power_of_2(width)
    dz, dn, z, y = (None if t is None else t.contiguous() for t in (dz, dn, z, y))
    gate, weight = None if gate is None else last(gate), None if weight is None else last(weight)
    norm, gated = dn is not None, gate is not None
    dx = torch.empty_like(given, dtype=to_x, memory_format=torch.contiguous_format) if norm else given.new_empty(0)
    dy = torch.empty_like(given, dtype=to_y, memory_format=torch.contiguous_format) if gated else given.new_empty(0)
    parts = given.new_empty(2 * norm + gated + total, samples, triton.cdiv(tokens, ROWS), width, dtype=torch.float32)
    backward[parts.shape[1:3]](
        dz, dn, z, y, gate, weight, mean, rstd, dx, dy, parts, tokens, step(gate), step(weight), offset, norm, dz is not None,
        gated, total, width, block, ROWS, stages(given, block), num_warps=warps(block))
    one = weight is not None and len(weight) == 1   # for all samples
    return dx, dy, parts.sum([1, 2], keepdim=True).squeeze(2) if one else parts.sum(2)


@triton.jit
def smooth_step(x, tanh: tl.constexpr):
    """What GELU multiplies x with, the normal distribution's function or its approximation through tanh; and its slope."""
    if tanh:                                        # (1 + tanh u) / 2 is the logistic function of 2u, which costs a GPU less
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        slope = share * (1 - share) * (1.5957691216057308 * (1 + 0.134145 * x * x))
    else:
        share = 0.5 * (1 + tl.erf(0.7071067811865476 * x))
        slope = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return share, slope


@triton.jit
def gelu_forward(x, y, count, tanh: tl.constexpr, block: tl.constexpr):
    """y = GELU(x), number by number."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    share, _ = smooth_step(value, tanh)
    tl.store(y + at, (value * share).to(y.dtype.element_ty), mask=at < count)


@triton.jit
def gelu_gradient(x, dy, dx, parts, rows, width, tanh: tl.constexpr, tile: tl.constexpr,
                  columns: tl.constexpr, span: tl.constexpr):
    """x, dy, dx (rows, width); parts (spans, width): sums of dx over `span` rows each. A span's programs follow each other."""
    across = tl.cdiv(width, columns)                # programs side by side: in one dim, of which alone there may be 2^31
    part = tl.program_id(0) // across
    at = tl.program_id(0) % across * columns + tl.arange(0, columns)[None, :]
    first = part * span
    total = tl.zeros((tile, columns), tl.float32)
    for start in range(first, first + span, tile):
        row = start + tl.arange(0, tile)[:, None]
        inside = (row < rows) & (at < width)
        place = row.to(tl.int64) * width + at
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        share, slope = smooth_step(value, tanh)
        grad = (grad * (share + value * slope)).to(dx.dtype.element_ty)
        tl.store(dx + place, grad, mask=inside)
        total += grad.to(tl.float32)                # as rounded: what the weight's gradient is of
    tl.store(parts + part.to(tl.int64) * width + at, tl.sum(total, 0)[None, :], mask=at < width)


def gelu(x: Tensor, tanh: bool) -> Tensor:
    """GELU(x), on a GPU. Any shape."""
    x = x.contiguous()
    y = torch.empty_like(x)
    gelu_forward[(triton.cdiv(x.numel(), 2048),)](x, y, x.numel(), tanh, 2048, num_warps=4)
    return y


def gelu_backward(x: Tensor, dy: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """The gradient of x, (..., F), from that of GELU(x), and its sum over all but the last dim, (F,) in float32."""
    x, dy = x.contiguous(), dy.contiguous()
    width = x.shape[-1]
    rows, dx = x.numel() // width, torch.empty_like(x)
    parts = x.new_empty(triton.cdiv(rows, SPAN), width, dtype=torch.float32)
    gelu_gradient[(triton.cdiv(width, COLUMNS) * len(parts),)](x, dy, dx, parts, rows, width, tanh, TILE, COLUMNS, SPAN,
                                                               num_warps=GELU_WARPS)
    return dx, parts.sum(0)


def check(tokens: int) -> None:
    """Raise `CourseError` for longer samples than a launch has programs for, which its second dim counts."""
    if tokens > MOST * ROWS:
        raise CourseError(f"fused LayerNorm: a sample of {tokens} tokens, and {MOST * ROWS} are the most: use a shorter context "
                          "or kernels=pytorch")


def warps(block: int) -> int:
    """How many warps work on a row: each thread has 32 numbers of it, of a short row fewer."""
    return min(max(block // 1024, 2), 16)


def stages(x: Tensor, block: int) -> int:
    """Of how many rows the reading has begun: of long ones of one, since a multiprocessor holds no more."""
    return STAGES if block * x.element_size() <= 16384 else 1


def last(x: Tensor) -> Tensor:
    """The same with its last dim in one piece of memory, as kernels read rows; parts of a wider row stay where they are."""
    return x if x.stride(-1) == 1 else x.contiguous()


def step(x: Tensor | None) -> int:
    """How many numbers apart the rows of two samples are in x, (B or 1, D): 0 where all have one."""
    return 0 if x is None or len(x) == 1 else x.stride(0)
