"""Answers to exercises of lesson 19 (online softmax and FlashAttention) that are not the library's own."""

from course.lab.checks.exercise import find, right

IMPORTS = '''
from course.lab.exercises.lesson19_flash_attention import head_offset, load_tile, online_softmax, store_tile
from course.ops.triton_language import tl, triton

'''

RIGHT = {
    "online-softmax": IMPORTS + '''
@triton.jit
def online_softmax(top, total, y, s, v, scale):
    """Scores scaled first; the product added afterwards."""
    s *= scale
    largest = tl.maximum(tl.max(s, axis=1), top)
    weights = tl.math.exp2(s - tl.expand_dims(largest, 1))
    old = tl.math.exp2(top - largest)
    y = y * old[:, None] + tl.dot(weights.to(v.dtype), v)
    return largest, tl.sum(weights, axis=1) + old * total, y
''',
    "flash-forward": IMPORTS + '''
@triton.jit
def key_range(block, T, causal: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    if causal:
        clear = block * ROWS - block * ROWS % COLUMNS
        end = tl.where(block * ROWS + ROWS < T, block * ROWS + ROWS, T)
    else:
        clear, end = T - T % COLUMNS, T
    return clear, end


@triton.jit
def attend_keys(top, total, y, q, k, v, k_step, v_step, row, begin, end, T, scale, causal: tl.constexpr, masked: tl.constexpr,
                D: tl.constexpr, COLUMNS: tl.constexpr):
    """Own pointers that move on; a large negative number for minus infinity."""
    column = begin + tl.arange(0, COLUMNS)
    keys = k + column[None, :] * k_step + tl.arange(0, D)[:, None]
    values = v + column[:, None] * v_step + tl.arange(0, D)[None, :]
    while begin < end:
        if masked:
            inside = column < T
            s = tl.dot(q, tl.load(keys, mask=inside[None, :], other=0.0))
            seen = inside[None, :] & ((column[None, :] <= row[:, None]) | (not causal))
            s += tl.where(seen, 0.0, -1e30)
            v_tile = tl.load(values, mask=inside[:, None], other=0.0)
        else:
            s, v_tile = tl.dot(q, tl.load(keys)), tl.load(values)
        top, total, y = online_softmax(top, total, y, s, v_tile, scale)
        begin += COLUMNS
        column += COLUMNS
        keys += COLUMNS * k_step
        values += COLUMNS * v_step
    return top, total, y


@triton.jit
def flash_forward_kernel(q, k, v, y, lse, q_steps, k_steps, v_steps, y_steps, H, T, scale, causal: tl.constexpr, D: tl.constexpr,
                         ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first block first; the division by a product with the inverse."""
    block = tl.program_id(0)
    sample = tl.program_id(1) // H
    head = tl.program_id(1) - sample * H
    row = tl.arange(0, ROWS) + block * ROWS
    tile = load_tile(q + head_offset(sample, head, q_steps), row, q_steps[2], T, D, True)
    k_head, v_head = k + head_offset(sample, head, k_steps), v + head_offset(sample, head, v_steps)
    top = tl.zeros((ROWS,), tl.float32) - float("inf")
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, D), tl.float32)
    clear, end = key_range(block, T, causal, ROWS, COLUMNS)
    for masked in tl.static_range(2):
        top, total, sums = attend_keys(top, total, sums, tile, k_head, v_head, k_steps[2], v_steps[2], row, masked * clear,
                                       tl.where(masked, end, clear), T, scale, causal, masked, D, COLUMNS)
    inverse = 1 / total
    store_tile(y + head_offset(sample, head, y_steps), sums * inverse[:, None], row, y_steps[2], T, D)
    tl.store(lse + (sample * H + head) * T + row, tl.log2(total) + top, mask=row < T)
''',
    "flash-backward": IMPORTS + '''
@triton.jit
def query_gradient(dq, q, dy, lse, delta, k, v, seen, scale):
    """The mask on dS; dS in two products."""
    p = tl.exp2(scale * tl.dot(q, k.T) - lse[:, None])
    dp = tl.dot(dy, v.T)
    ds = tl.where(seen, p * dp - p * delta[:, None], 0.0)
    dq += tl.dot(ds.to(q.dtype), k)
    return dq


@triton.jit
def key_gradients(dk, dv, k, v, q, dy, lse, delta, seen, scale):
    """Scores with a row for each query, transposed afterwards."""
    p = tl.trans(tl.exp2(scale * tl.dot(q, k.T) - lse[:, None]))
    p = tl.where(seen, p, 0.0)
    ds = tl.trans(tl.dot(dy, v.T) - delta[:, None]) * p
    return tl.dot(ds.to(k.dtype), q, dk), tl.dot(p.to(v.dtype), dy, dv)


@triton.jit
def query_range(block, T, causal: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    if causal:
        first, last = block * ROWS, block * ROWS + ROWS - 1
        begin, clear = first - first % COLUMNS, (last // COLUMNS + 1) * COLUMNS
    else:
        begin, clear = 0, 0
    return begin, clear
''',
}


def changed(exercise: str, old: str, new: str) -> str:
    """The library's answer with a piece replaced."""
    source = right(find(exercise))
    assert old in source
    return source.replace(old, new)


WRONG = [
    ("online-softmax", changed("online-softmax", "y = tl.dot(p.to(v.dtype), v, y * shrink[:, None])",
                               "y = (y * shrink[:, None] + tl.dot(p.to(v.dtype), v)).to(v.dtype)"), "add up in float32"),
    ("online-softmax", changed("online-softmax", "return new, total, y", "return tl.maximum(new, 0.0), total, y"), ""),
    ("flash-forward", changed("flash-forward", "load_tile(k, column, k_step, T, D, masked)",
                              "load_tile(k, column, k_step, T, D, True)"), "need no mask"),
    ("flash-forward", changed("flash-forward", "row, 0, clear", "row, COLUMNS, clear"), ""),
    ("flash-forward", changed("flash-forward", "first = block * ROWS", "first = block * ROWS + ROWS // 2"), ""),
    ("flash-backward", changed("flash-backward", "begin = block * ROWS // COLUMNS * COLUMNS", "begin = block * COLUMNS"), ""),
    ("flash-backward", changed("flash-backward", "return tl.dot(ds.to(k.dtype), k, dq)",
                               "return tl.dot(tl.trans(ds).to(k.dtype), k, dq)"), "line of your code"),
    ("flash-backward", changed("flash-backward", "dv = tl.dot(p.to(dy.dtype), dy, dv)",
                               "dv = tl.dot((p * scale).to(dy.dtype), dy, dv)"), ""),
    ("online-softmax", changed("online-softmax", "total = total * shrink + tl.sum(p, 1)",
                               "total = total * shrink + tl.sum(p, 1) + 1e-3"), "look for an epsilon"),
    ("online-softmax", changed("online-softmax", "new = tl.maximum(top, tl.max(s, 1) * scale)",
                               "new = tl.zeros_like(top) + tl.max(s * scale)"), ""),
    ("flash-forward", changed("flash-forward", "return first // COLUMNS * COLUMNS, end",
                              "return first // COLUMNS * COLUMNS, tl.minimum(end, 37)"), None),
    ("flash-forward", changed("flash-forward", "queries, k, v, k_steps[2], v_steps[2], row, 0, clear",
                              "queries, k, v, k_steps[2], k_steps[2], row, 0, clear"), ""),
    ("flash-forward", changed("flash-forward", "top, total, out = attend_keys(top, total, out, queries, k, v, k_steps[2], "
                              "v_steps[2], row, clear", "attend_keys(top, total, out, queries, k, v, k_steps[2], v_steps[2], "
                              "row, clear"), ""),
    ("flash-backward", changed("flash-backward", "dv = tl.dot(p.to(dy.dtype), dy, dv)",
                               "dv = tl.dot(p.to(dy.dtype), dy, dv) * 0.5"), ""),
    ("flash-backward", changed("flash-backward", "ds = p * (dp - delta[:, None])",
                               "ds = p * (dp - tl.sum(p * dp, 1)[:, None])"), ""),        # right for one tile alone
]
