"""Answers to exercises of lesson 19 (copy, fused GELU, softmax, LayerNorm) that are not the library's own."""

from course.lab.checks.exercise import find, right

IMPORTS = '''
import torch

from course.ops.triton_language import tl, triton

'''

RIGHT = {
    "copy": IMPORTS + '''
@triton.jit
def copy_kernel(x, y, R, C, x_row, x_column, y_row, y_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Pointers of a tile moved on; programs in one dim; another program's order."""
    across = tl.cdiv(C, COLUMNS)
    row = ROWS * (tl.program_id(0) // across) + tl.arange(0, ROWS)
    column = COLUMNS * (tl.program_id(0) % across) + tl.arange(0, COLUMNS)
    below, beside = tl.expand_dims(row, 1), tl.expand_dims(column, 0)
    there = (below < R) & (beside < C)
    tl.store(y + below * y_row + beside * y_column, tl.load(x + (below * x_row + beside * x_column), there, 0.0), there)


def copy(x, y, rows=4, columns=512):
    tiles = -(-x.shape[0] // rows) * -(-x.shape[1] // columns)
    copy_kernel[(tiles,)](x, y, *x.shape, *x.stride(), *y.stride(), ROWS=rows, COLUMNS=columns, num_warps=4)
''',
    "fused-gelu": IMPORTS + '''
@triton.jit
def bias_gelu_kernel(x, bias, y, R, C, x_row, y_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """tanh from an exponential; one row after another."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    shift = tl.load(bias + column, mask=column < C, other=0.0).to(tl.float32)
    for i in range(ROWS):
        row = tl.program_id(1) * ROWS + i
        inside = (column < C) & (row < R)
        z = shift + tl.load(x + row * x_row + column, mask=inside, other=0.0)
        u = 0.7978845608028654 * (z + 0.044715 * z * (z * z))
        tanh = 1 - 2 / (tl.exp(2 * u) + 1)
        tl.store(y + row * y_row + column, 0.5 * z * (1 + tanh), mask=inside)


def bias_gelu(x, bias, y, rows=4, columns=512):
    bias_gelu_kernel[lambda constants: (triton.cdiv(x.shape[1], columns), triton.cdiv(x.shape[0], rows))](
        x, bias, y, x.shape[0], x.shape[1], x.stride(0), y.stride(0), rows, columns)
''',
    "row-softmax": IMPORTS + '''
@triton.jit
def softmax_kernel(x, y, C, x_row, y_row, BLOCK: tl.constexpr):
    """Powers of two; a product with the inverse; a large negative number for minus infinity."""
    column = tl.arange(0, BLOCK)
    numbers = tl.load(x + tl.program_id(0) * x_row + column, column < C, -1e30).to(tl.float32) * 1.4426950408889634
    powers = tl.exp2(numbers - tl.max(numbers, axis=0))
    tl.store(y + tl.program_id(0) * y_row + column, powers * (1 / tl.sum(powers, axis=0)), column < C)


def softmax(x, y):
    softmax_kernel[x.shape[:1]](x, y, x.shape[1], x.stride(0), y.stride(0), 1 << x.shape[1].bit_length(), num_warps=4)
''',
    "add-norm": IMPORTS + '''
@triton.jit
def add_norm_kernel(x, y, weight, bias, z, n, mean, rstd, T, C, x_row, y_row, z_row, n_row, eps, ROWS: tl.constexpr,
                    BLOCK: tl.constexpr):
    """A tile of all tokens at once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    rows = row[:, None]
    inside = (rows < T) & (column < C)
    total = tl.load(x + rows * x_row + column, inside, 0.0).to(tl.float32)
    total += tl.load(y + rows * y_row + column, inside, 0.0).to(tl.float32)
    total = total.to(z.dtype.element_ty).to(tl.float32)
    middle = tl.sum(total, 1) / C
    distance = (total - middle[:, None]) * inside
    inverse = 1 / tl.sqrt(tl.sum(distance * distance, 1) / C + eps)
    w = tl.load(weight + column, column < C, 0.0).to(tl.float32)
    b = tl.load(bias + column, column < C, 0.0).to(tl.float32)
    tl.store(z + rows * z_row + column, total, inside)
    tl.store(n + rows * n_row + column, b + w * (distance * inverse[:, None]), inside)
    tl.store(mean + row, middle, row < T)
    tl.store(rstd + row, inverse, row < T)


def add_norm(x, y, weight, bias, z, n, mean, rstd, eps=1e-5, rows=32):
    (T, C), strides = x.shape, [a.stride(0) for a in (x, y, z, n)]
    add_norm_kernel[(-(-T // rows), 1)](x, y, weight, bias, z, n, mean, rstd, T, C, *strides, eps, rows,
                                        triton.next_power_of_2(C))
''',
    "add-norm-backward": IMPORTS + '''
@triton.jit
def add_norm_backward_kernel(dz, dn, z, weight, mean, rstd, dx, parts, T, C, dz_row, dn_row, z_row, dx_row, ROWS: tl.constexpr,
                             BLOCK: tl.constexpr):
    """A tile of all tokens at once; the weight divided out of the formula."""
    program = tl.program_id(0)
    row = program * ROWS + tl.arange(0, ROWS)
    rows, column = row[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (rows < T) & (column < C)
    grad = tl.load(dn + rows * dn_row + column, inside, 0.0).to(tl.float32)
    total = tl.load(z + rows * z_row + column, inside, 0.0).to(tl.float32)
    scale = tl.load(rstd + row, row < T, 0.0)[:, None]
    unit = (total - tl.load(mean + row, row < T, 0.0)[:, None]) * scale
    columns = tl.arange(0, BLOCK)
    tl.store(parts + program * C + columns, tl.sum(grad * unit, 0), columns < C)
    tl.store(parts + (tl.num_programs(0) + program) * C + columns, tl.sum(grad, 0), columns < C)
    grad *= tl.load(weight + column, column < C, 0.0)
    shift = tl.sum(grad, 1)[:, None] + unit * tl.sum(grad * unit, 1)[:, None]
    back = scale * grad - scale * shift / C + tl.load(dz + rows * dz_row + column, inside, 0.0)
    tl.store(dx + rows * dx_row + column, back, inside)


def add_norm_backward(dz, dn, z, weight, mean, rstd, dx, parts, rows=32):
    add_norm_backward_kernel[parts.shape[1:2]](
        dz, dn, z, weight, mean, rstd, dx, parts, *z.shape, *(a.stride(0) for a in (dz, dn, z, dx)), rows,
        triton.next_power_of_2(z.shape[1]))
    return torch.sum(parts, dim=1)
''',
}


def changed(exercise: str, old: str, new: str) -> str:
    """The library's answer with a piece replaced."""
    source = right(find(exercise))
    assert old in source
    return source.replace(old, new)


WRONG = [
    ("copy", changed("copy", "(row < R) & (column < C)", "(row < R) and (column < C)"), "not by Python's `and`"),
    ("copy", changed("copy", "(row < R) & (column < C)", "(row < C) & (column < R)"), ""),
    ("copy", changed("copy", "(row < R) & (column < C)", "(row < R - 1) & (column < C)"), ""),
    ("fused-gelu", changed("fused-gelu", "tl.sigmoid(2 * u)", "(1 + 2 * tl.sigmoid(2 * u)) / 2"), ""),
    ("fused-gelu", changed("fused-gelu", ".to(tl.float32)", ""), "this computes in bf16"),
    ("fused-gelu", "FACTOR = 0.7978845608028654\n" + changed("fused-gelu", "0.7978845608028654", "FACTOR"),
     "no numbers of the notebook"),
    ("row-softmax", changed("row-softmax", "softmax_kernel[(R,)]", "softmax_kernel[(triton.next_power_of_2(R),)]"), ""),
    ("row-softmax", changed("row-softmax", "tl.max(numbers, 0)", "tl.sum(tl.where(inside, numbers, 0.0), 0) / C"), ""),
    ("row-softmax", changed("row-softmax", "weights = tl.exp(", "weights = tl.sigmoid("), ""),
    ("add-norm", changed("add-norm", "tl.sum(centered * centered, 0) / C + eps",
                         "(tl.sum(centered * centered, 0) + eps) / C"), ""),
    ("add-norm", changed("add-norm", "middle = tl.sum(value, 0) / C",
                         "middle = (tl.sum(value, 0) / C).to(z.dtype.element_ty).to(tl.float32)"), ""),
    ("add-norm", changed("add-norm", "middle = tl.sum(value, 0) / C", "middle = tl.max(value, 0)"), ""),
    ("add-norm-backward", changed("add-norm-backward", "dweight = tl.zeros((BLOCK,), tl.float32)",
                                  "dweight = tl.zeros((BLOCK,), dx.dtype.element_ty)"), "add up in float32"),
    ("add-norm-backward", changed("add-norm-backward", "grad *= w\n", "grad = grad / w\n"), ""),
    ("add-norm-backward", changed("add-norm-backward", "back = inverse * (grad", "back = inverse * inverse * (grad"), ""),
    ("copy", changed("copy", "    tl.store(y",
                     "    tile = tl.load(x + row * x_row + column * x_column, mask=inside)\n    tl.store(y"), ""),
    ("copy", changed("copy", "tile, mask=inside)", "tile * 0.5, mask=inside)"), ""),
    ("fused-gelu", changed("fused-gelu", "tl.sigmoid(2 * u)", "tl.sigmoid(1.702 * z)"), ""),
    ("fused-gelu", changed("fused-gelu", "0.7978845608028654", "0.8"), ""),
    ("fused-gelu", changed("fused-gelu", "    bias_gelu_kernel[grid](x, bias, y",
                           "    y.copy_(x)\n    bias_gelu_kernel[grid](y, bias, y"), ""),
    ("row-softmax", changed("row-softmax", "weights / tl.sum(weights, 0)", "weights / (tl.sum(weights, 0) + 1e-3)"),
     "look for an epsilon"),
    ("row-softmax", changed("row-softmax", "numbers - tl.max(numbers, 0)", "tl.minimum(numbers, 80.0)"), ""),
    ("row-softmax", changed("row-softmax", "    softmax_kernel[(R,)](x, y, C",
                            "    y.copy_(x)\n    softmax_kernel[(R,)](y, y, C"), ""),
    ("add-norm", changed("add-norm", "C + eps)", "C + 1e-5)"), ""),
    ("add-norm", changed("add-norm", "(triton.cdiv(T, rows),)](x, y, weight, bias, z, n, mean, rstd, T, C, x.stride(0)",
                         "(1,)](x, y, weight, bias, z, n, mean, rstd, T, C, x.stride(0)").replace(
        "first + ROWS, T)", "first + T, T)"), ""),          # one program for all
    ("add-norm-backward", changed("add-norm-backward", "return parts.sum(1)", "return parts.flip(1).sum(1)"), ""),
    ("add-norm-backward", changed("add-norm-backward", "    tl.store(part, dweight", "    dweight = dweight.to(tl.bfloat16)\n"
                                  "    tl.store(part, dweight"), ""),
    ("add-norm-backward", changed("add-norm-backward", "part = parts + tl.program_id(0) * C",
                                  "part = parts + (tl.num_programs(0) - 1 - tl.program_id(0)) * C"), ""),
]
