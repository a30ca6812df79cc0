"""Answers to exercises of lessons 09 to 11 that are not the library's own."""

TWO = '''
import torch
import torch.distributed as dist
from course.parallel.mappings import bounds
{}
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, axis, n):
        ctx.given = dim, axis
        return joined(x, dim, axis, n)

    @staticmethod
    def backward(ctx, grad):
        return cut(grad, *ctx.given), None, None, None

class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, axis):
        ctx.given = dim, axis, x.shape[dim]
        return cut(x, dim, axis)

    @staticmethod
    def backward(ctx, grad):
        return joined(grad, *ctx.given), None, None
'''

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
    "narrowest-link": '''
import re

def narrowest_link(topology, group):
    lines = topology.strip().splitlines()
    names = re.findall(r"GPU\\d+", lines[0])
    width = {}
    for line in lines[1:]:
        name, *words = line.split()
        for other, word in zip(names, words):
            width[name, other] = int(word.removeprefix("NV")) if word[:2] == "NV" else 0

    def best(path, left, least):
        """Of all ways to go on from a path through the GPUs that are left."""
        here = f"GPU{path[-1]}"
        if not left:
            return min(least, width[here, f"GPU{path[0]}"])
        return max(best([*path, gpu], [g for g in left if g != gpu], min(least, width[here, f"GPU{gpu}"])) for gpu in left)

    return best([group[0]], group[1:], 10**6)
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
    "copy-reduce": ['''
import torch
import torch.distributed as dist

def added(x, axis):
    """An all-reduce that is waited for later, of a copy."""
    total = x.clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(total, group=axis.group, async_op=True)
    work.wait()
    return total

class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x

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
''', '''
import torch
from torch.distributed import _functional_collectives as functional

class Copy(torch.autograd.Function):
    """By collectives that give a new tensor."""

    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return functional.wait_tensor(functional.all_reduce(grad.contiguous(), "sum", ctx.axis.group)), None

class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", axis.group))

    @staticmethod
    def backward(ctx, grad):
        return grad, None
''', '''
import torch
import torch.distributed as dist
from torch.nn.functional import pad
from course.parallel.mappings import all_gather_single, reduce_scatter_single

def added(x, axis):
    """What an all-reduce is: a reduce-scatter and an all-gather."""
    flat = x.flatten()
    flat = pad(flat, (0, -len(flat) % axis.size))
    piece = flat.new_empty(len(flat) // axis.size)
    reduce_scatter_single(piece, flat, group=axis.group)
    all_gather_single(flat, piece, group=axis.group)
    return flat[:x.numel()].view(x.shape)

class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

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
'''],
    "column-row": ['''
import torch
from course.parallel.tensor_parallel.linear import TensorParallel
from course.parallel.token_split import enter_region, leave_region

class ColumnParallel(TensorParallel):
    mode = "column"

    def __call__(self, multiply, x, weight, bias):
        return bias + multiply(enter_region(x, self.axis, self.tokens), weight)

class RowParallel(TensorParallel):
    mode = "row"

    def __call__(self, multiply, x, weight, bias):
        whole = leave_region(multiply(x, weight, None), tokens=self.tokens, axis=self.axis)
        return torch.add(whole, bias.to(whole))
''', '''
from course.parallel import mappings
from course.parallel.tensor_parallel.linear import TensorParallel

class ColumnParallel(TensorParallel):
    """With the mappings themselves."""

    mode = "column"

    def __call__(self, multiply, x, weight, bias):
        x = mappings.gather(x, 1, self.axis, self.tokens.local_len) if self.tokens is not None else mappings.copy(x, self.axis)
        return multiply(x, weight, bias)

class RowParallel(TensorParallel):
    mode = "row"

    def __call__(self, multiply, x, weight, bias):
        y = multiply(x, weight)
        y = mappings.scatter(y, 1, self.axis) if self.tokens is not None else mappings.reduce(y, self.axis)
        return y + bias.type_as(y)
'''],
    "gather-scatter": [TWO.format('''
def joined(x, dim, axis, n):
    """Into a list of tensors, as long as the longest piece."""
    most, rows = -(-n // axis.size), x.movedim(dim, 0)
    rows = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
    pieces = [torch.empty_like(rows) for _ in range(axis.size)]
    dist.all_gather(pieces, rows, group=axis.group)
    counts = [stop - start for start, stop in (bounds(n, axis.size, rank) for rank in range(axis.size))]
    return torch.cat([piece[:count] for piece, count in zip(pieces, counts)]).movedim(0, dim)

def cut(x, dim, axis):
    """From a list of tensors."""
    parts = [part.contiguous() for part in x.movedim(dim, 0).tensor_split(axis.size)]
    most = len(parts[0])
    padded = [torch.cat([part, part.new_zeros(most - len(part), *part.shape[1:])]) for part in parts]
    mine = torch.empty_like(padded[0])
    dist.reduce_scatter(mine, padded, group=axis.group)
    return mine[:len(parts[axis.rank])].movedim(0, dim)
'''), TWO.format('''
def joined(x, dim, axis, n):
    """A broadcast of each rank's piece."""
    pieces = []
    for rank in range(axis.size):
        start, stop = bounds(n, axis.size, rank)
        shape = list(x.shape)
        shape[dim] = stop - start
        piece = x.clone(memory_format=torch.contiguous_format) if rank == axis.rank else x.new_empty(shape)
        dist.broadcast(piece, axis.ranks[rank], group=axis.group)
        pieces.append(piece)
    return torch.cat(pieces, dim)

def cut(x, dim, axis):
    """A sum of each piece, on the rank whose it is."""
    parts = [part.clone(memory_format=torch.contiguous_format) for part in x.tensor_split(axis.size, dim)]
    for rank, part in enumerate(parts):
        dist.reduce(part, axis.ranks[rank], group=axis.group)
    return parts[axis.rank]
'''), TWO.format('''
def joined(x, dim, axis, n):
    """By messages, to each of the others and from each."""
    pieces, works = [], []
    mine = x.contiguous()
    for rank in range(axis.size):
        start, stop = bounds(n, axis.size, rank)
        shape = list(x.shape)
        shape[dim] = stop - start
        pieces.append(mine if rank == axis.rank else x.new_empty(shape))
        if rank != axis.rank:
            works += [dist.isend(mine, axis.ranks[rank]), dist.irecv(pieces[-1], axis.ranks[rank])]
    for work in works:
        work.wait()
    return torch.cat(pieces, dim)

def cut(x, dim, axis):
    """Everybody's part of this rank's piece, by an all-to-all, added up here."""
    parts = [part.contiguous() for part in x.movedim(dim, 0).tensor_split(axis.size)]
    got = parts[axis.rank].new_empty(axis.size, *parts[axis.rank].shape)
    counts = [len(part) for part in parts]
    dist.all_to_all_single(got.flatten(0, 1), torch.cat(parts), [counts[axis.rank]] * axis.size, counts, group=axis.group)
    return got.sum(0).movedim(0, dim)
''')],
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
