"""Triton kernels behind `course.ops.fused_add_norm` and `fused_gelu`: forward and backward, each in one pass over memory.

A program processes some rows of one sample, one after another; a row stays in registers from load to store. A program loads
weight, bias and gate once. Their gradients are sums over tokens: each program writes a partial sum, and PyTorch adds the
partial sums in a fixed order.

For the same formulas, torch.compile generates one kernel for the rows and one per sum over tokens, which reads the rows'
tensors again. For a width that is no power of two, such as DiT's 1152, its kernels read a row twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from course.utils.errors import CourseError

# most rows per program, and how many of them are prefetched: the best of those tried on an H200 for widths of 768 to 1152
# (benchmark: `python -m experiments.fused_kernels`)
ROWS, STAGES = 32, 3
FORWARD_PROGRAMS, BACKWARD_PROGRAMS = 6, 1          # fewest programs for each multiprocessor: with fewer rows than that needs, a
                                                    # program takes less than ROWS. Backward sums up what each program has summed
MOST = 65535                                        # most programs of a launch in the second and third dim
TILE, COLUMNS, SPAN, GELU_WARPS = 4, 256, 64, 8     # GELU's backward: rows and columns per tile, rows and warps per program


@triton.jit
def forward(x, y, gate, weight, bias, z, n, mean, rstd, tokens, gate_step, weight_step, bias_step, eps,
            offset: tl.constexpr, add: tl.constexpr, gated: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
            rows: tl.constexpr, stages: tl.constexpr):
    """x, y, z, n (samples, tokens, width); mean, rstd (samples, tokens); gate, weight, bias: `step` is the sample stride."""
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
            value = value.to(z.dtype.element_ty)    # normalize the rounded value, from which backward recomputes
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
    """parts (1 to 4, samples, programs per sample, width): partial sums for the gradients of weight, bias and gate, and for the
    sum of dy, or of dx without a gate.

    norm: backpropagate dn through the norm. summed: add dz, the residual sum's own gradient; without `norm` it is the only one.
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
    """`course.ops.fused_add_norm.add_norm_plain` on a GPU."""
    samples, tokens, width = x.shape
    check(tokens)
    block = triton.next_power_of_2(width)
    x, weight, bias = x.contiguous(), last(weight), last(bias)
    y, gate = None if y is None else y.contiguous(), None if gate is None else last(gate)
    z = x.new_empty(0) if y is None else torch.empty_like(x, dtype=torch.promote_types(x.dtype, y.dtype))
    n = torch.empty_like(x, dtype=out)
    mean, rstd = (x.new_empty(samples, tokens, dtype=torch.float32) for _ in range(2))
    rows = rows_each(samples, tokens, FORWARD_PROGRAMS, x.device)
    forward[samples, triton.cdiv(tokens, rows)](
        x, y, gate, weight, bias, z, n, mean, rstd, tokens, step(gate), step(weight), step(bias), eps, offset, y is not None,
        gate is not None, width, block, rows, stages(x, block), num_warps=warps(block))
    return z, n, mean, rstd


def add_norm_backward(dz: Tensor | None, dn: Tensor | None, z: Tensor | None, y: Tensor | None, gate: Tensor | None,
                      weight: Tensor | None, mean: Tensor | None, rstd: Tensor | None, offset: float, total: bool,
                      to_x: torch.dtype, to_y: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """`course.ops.fused_add_norm.add_norm_backward_plain` on a GPU."""
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
    rows = rows_each(samples, tokens, BACKWARD_PROGRAMS, given.device)
    parts = given.new_empty(2 * norm + gated + total, samples, triton.cdiv(tokens, rows), width, dtype=torch.float32)
    backward[parts.shape[1:3]](
        dz, dn, z, y, gate, weight, mean, rstd, dx, dy, parts, tokens, step(gate), step(weight), offset, norm, dz is not None,
        gated, total, width, block, rows, stages(given, block), num_warps=warps(block))
    one = weight is not None and len(weight) == 1   # one weight for all samples
    return dx, dy, parts.sum([1, 2], keepdim=True).squeeze(2) if one else parts.sum(2)


@triton.jit
def smooth_step(x, tanh: tl.constexpr):
    """(GELU(x) / x, its derivative): the normal distribution function, or its tanh approximation."""
    if tanh:                                        # (1 + tanh u) / 2 = sigmoid(2u), which is cheaper on a GPU
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        slope = share * (1 - share) * (1.5957691216057308 * (1 + 0.134145 * x * x))
    else:
        share = 0.5 * (1 + tl.erf(0.7071067811865476 * x))
        slope = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return share, slope


@triton.jit
def gelu_forward(x, y, count, tanh: tl.constexpr, block: tl.constexpr):
    """y = GELU(x), elementwise."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    share, _ = smooth_step(value, tanh)
    tl.store(y + at, (value * share).to(y.dtype.element_ty), mask=at < count)


@triton.jit
def gelu_gradient(x, dy, dx, parts, rows, width, tanh: tl.constexpr, tile: tl.constexpr,
                  columns: tl.constexpr, span: tl.constexpr):
    """x, dy, dx (rows, width); parts (spans, width): sums of dx over `span` rows. The programs of a span are consecutive."""
    across = tl.cdiv(width, columns)                # programs per span; a 1D grid, since only its first dim allows 2^31
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
        total += grad.to(tl.float32)                # sum rounded values, as in the weight gradient
    tl.store(parts + part.to(tl.int64) * width + at, tl.sum(total, 0)[None, :], mask=at < width)


def gelu(x: Tensor, tanh: bool) -> Tensor:
    """GELU(x) on a GPU. Any shape."""
    x = x.contiguous()
    y = torch.empty_like(x)
    gelu_forward[(triton.cdiv(x.numel(), 2048),)](x, y, x.numel(), tanh, 2048, num_warps=4)
    return y


def gelu_backward(x: Tensor, dy: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """(gradient of x (..., F), its sum over all but the last dim, (F,) in float32), from GELU's gradient dy."""
    x, dy = x.contiguous(), dy.contiguous()
    width = x.shape[-1]
    rows, dx = x.numel() // width, torch.empty_like(x)
    parts = x.new_empty(triton.cdiv(rows, SPAN), width, dtype=torch.float32)
    gelu_gradient[(triton.cdiv(width, COLUMNS) * len(parts),)](x, dy, dx, parts, rows, width, tanh, TILE, COLUMNS, SPAN,
                                                               num_warps=GELU_WARPS)
    return dx, parts.sum(0)


def check(tokens: int) -> None:
    """Raise `CourseError` if a sample needs more programs than the second dim of a launch allows."""
    if tokens > MOST * ROWS:
        raise CourseError(f"fused LayerNorm: a sample of {tokens} tokens, and {MOST * ROWS} are the most: use a shorter context "
                          "or kernels=pytorch")


def rows_each(samples: int, tokens: int, programs: int, device: torch.device) -> int:
    """Rows per program, a power of two up to `ROWS`, so that each multiprocessor has at least so many programs."""
    gpu, rows = device.type == "cuda", ROWS          # on a CPU, Triton's interpreter runs one program at a time
    fewest = programs * (torch.cuda.get_device_properties(device).multi_processor_count if gpu else 1)
    while rows > 1 and samples * triton.cdiv(tokens, rows) < fewest:
        rows //= 2
    return rows


def warps(block: int) -> int:
    """Warps per row, 2 to 16: each thread holds 32 elements, or fewer of a short row."""
    return min(max(block // 1024, 2), 16)


def stages(x: Tensor, block: int) -> int:
    """How many rows to prefetch: one for long rows, since a multiprocessor has no memory for more."""
    return STAGES if block * x.element_size() <= 16384 else 1


def last(x: Tensor) -> Tensor:
    """x with a contiguous last dim, as the kernels need; a slice of wider rows is not copied."""
    return x if x.stride(-1) == 1 else x.contiguous()


def step(x: Tensor | None) -> int:
    """The stride between samples in x, (B or 1, D): 0 if all samples share one row."""
    return 0 if x is None or len(x) == 1 else x.stride(0)
