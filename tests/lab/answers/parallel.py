"""Answers to exercises of lessons 09 to 11 that are not the library's own."""

RIGHT = {
    "lay-out": '''
import itertools
import torch
from course.parallel.mesh import AXES

def lay_out(sizes, order):
    """One rank after the other, at its coordinates."""
    grid = torch.empty([sizes[name] for name in AXES], dtype=torch.int64)
    names = order.split("-")
    for rank, place in enumerate(itertools.product(*(range(sizes[name]) for name in names))):
        where = dict(zip(names, place))
        grid[tuple(where[name] for name in AXES)] = rank
    return grid
''',
    "groups": '''
import torch

def groups(grid, dim):
    return torch.stack(grid.unbind(dim), -1).flatten(0, -2)
''',
    "nodes-touched": '''
def nodes_touched(groups, per_node):
    most = 0
    for row in groups:
        most = max(most, len({rank.item() // per_node for rank in row}))
    return most
''',
    "bytes-sent": '''
def bytes_sent(sizes, work):
    pp, dp, cp, tp = (sizes[name] for name in ("pp", "dp", "cp", "tp"))
    tokens = work["samples"] * work["tokens"] // cp
    size = tokens * work["dim"] * work["itemsize"]
    passes = work["layers"] * work["micros"] / pp

    def ring(n, whole):
        return (n - 1) / n * whole

    return {"tp": passes * 4 * (ring(tp, size) + ring(tp, size)), "cp": passes * 4 * ring(cp, size * cp / tp),
            "pp": 2 * size * work["micros"] * (pp > 1), "dp": 2 * ring(dp * cp, work["parameters"] * work["itemsize"] / pp / tp)}
''',
    "qkv-rows": '''
import torch

def qkv_rows(heads, head_dim, size, rank):
    mine = range(rank * heads // size, (rank + 1) * heads // size)
    return torch.tensor([part * heads * head_dim + head * head_dim + row
                         for part in range(3) for head in mine for row in range(head_dim)])
''',
    "copy-reduce": '''
import torch
import torch.distributed as dist

def added(x, axis):
    everyone = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(axis.size)]
    dist.all_gather(everyone, x.contiguous(), group=axis.group)
    return torch.stack(everyone).sum(0)

class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return added(grad, ctx.axis), None

class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        return added(x, axis)

    @staticmethod
    def backward(ctx, grad):
        return grad.clone(), None
''',
    "column-row": '''
import torch
from torch import nn
from course.parallel.placement import cut, placement
from course.parallel.sequence import enter, leave, matmul_of

class ColumnLinear(nn.Module):
    def __init__(self, linear, axis, tokens=None):
        super().__init__()
        self.axis, self.tokens, self.matmul = axis, tokens, matmul_of(linear, axis)
        dim = 1 if len(placement(linear.bias).global_shape) == 3 else 0
        self.weight, self.bias = (cut(p, dim, axis) for p in (linear.weight, linear.bias))

    def forward(self, x):
        return self.bias + self.matmul(enter(x, self.axis, self.tokens), self.weight)

class RowLinear(nn.Module):
    def __init__(self, linear, axis, tokens=None):
        super().__init__()
        self.axis, self.tokens, self.matmul = axis, tokens, matmul_of(linear, axis)
        self.weight, self.bias = cut(linear.weight, len(placement(linear.bias).global_shape), axis), linear.bias

    def forward(self, x):
        whole = leave(self.matmul(x, self.weight, None), tokens=self.tokens, axis=self.axis)
        return torch.add(whole, self.bias.to(whole))
''',
    "gather-scatter": '''
import torch
import torch.distributed as dist
from course.parallel.mappings import bounds

def laid_in(x, dim, axis, n):
    """Every rank's piece among zeros, added up."""
    shape = list(x.shape)
    shape[dim] = n
    whole = x.new_zeros(shape)
    start, stop = bounds(n, axis.size, axis.rank)
    whole.narrow(dim, start, stop - start).copy_(x)
    dist.all_reduce(whole, group=axis.group)
    return whole

def taken_out(x, dim, axis):
    whole = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=axis.group)
    return whole.tensor_split(axis.size, dim)[axis.rank].clone()

class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, axis, n):
        ctx.given = dim, axis
        return laid_in(x, dim, axis, n)

    @staticmethod
    def backward(ctx, grad):
        return taken_out(grad, *ctx.given), None, None, None

class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, axis):
        ctx.given = dim, axis, x.shape[dim]
        return taken_out(x, dim, axis)

    @staticmethod
    def backward(ctx, grad):
        return laid_in(grad, *ctx.given), None, None
''',
    "gather-in-order": '''
import torch
from course.parallel import mappings

def gather_in_order(pairs, tokens):
    """Each row is put where it belongs; one gather for the keys, one for the values."""
    order = torch.cat(list(tokens.order(pairs.device)))
    found = [mappings.gather(x, 2, tokens.cp, n=order.numel()) for x in pairs]
    return torch.stack([torch.zeros_like(x).index_copy(2, order, x) for x in found])
''',
    "merge": '''
import torch

def merge(out, lse, new_out, new_lse):
    both = torch.stack([lse, new_lse])
    old, new = both.softmax(0).unsqueeze(-1)
    out[...] = old * out + new * new_out
    lse[...] = both.logsumexp(0)
''',
    "zigzag": '''
import torch

def zigzag(total, size, device):
    half = total // size // 2
    front = [torch.arange(half, device=device) + rank * half for rank in range(size)]
    return [torch.cat([piece, total - 1 - piece.flip(0)]) for piece in front]
''',
    "visible": '''
def visible(causal, rank, source, queries, keys):
    rows, columns = slice(0, queries), slice(0, keys)
    if causal and source > rank:
        rows = slice(queries - queries // 2, queries)
    elif causal:
        columns = slice(keys // 2)
    return rows, columns
''',
}
