"""Answers to exercises of lesson 19 (copy, fused GELU, softmax, LayerNorm) that are not the library's own."""

from course.lab.checks.exercise import find, right

IMPORTS = '''
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
}


def changed(exercise: str, old: str, new: str) -> str:
    """The library's answer with a piece replaced."""
    source = right(find(exercise))
    assert old in source
    return source.replace(old, new)


WRONG = [
    ("copy", changed("copy", "    tl.store(y",
                     "    tile = tl.load(x + row * x_row + column * x_column, mask=inside)\n    tl.store(y"), ""),
    ("copy", changed("copy", "tile, mask=inside)", "tile * 0.5, mask=inside)"), ""),
    ("fused-gelu", changed("fused-gelu", "tl.sigmoid(2 * u)", "tl.sigmoid(1.702 * z)"), ""),
    ("fused-gelu", changed("fused-gelu", "0.7978845608028654", "0.8"), ""),
    ("fused-gelu", changed("fused-gelu", "    bias_gelu_kernel[grid](x, bias, y",
                           "    y.copy_(x)\n    bias_gelu_kernel[grid](y, bias, y"), ""),
]
