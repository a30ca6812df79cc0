"""Answers to exercises of lesson 14 that are not the library's own."""

RIGHT = {
    "loss-in-chunks": '''
import torch
import torch.nn.functional as F

class LossInChunks(torch.autograd.Function):
    """Autograd itself, inside of each chunk."""

    @staticmethod
    def forward(ctx, x, weight, target, size):
        dx, dw, total = torch.empty_like(x), torch.zeros_like(weight), 0
        for start in range(0, len(x), size):
            rows = x[start:start + size].detach().requires_grad_()
            w = weight.detach().requires_grad_()
            with torch.enable_grad():
                loss = F.cross_entropy(rows @ w.T, target[start:start + size], reduction="sum")
            dx[start:start + size], grad = torch.autograd.grad(loss, [rows, w])
            dw += grad
            total = total + loss.detach()
        ctx.dx, ctx.dw = dx, dw
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.dx, grad * ctx.dw, None, None
''',
    "vocabulary-embedding": ['''
import torch
from torch import nn
from course.parallel.token_split import leave_region

def own(tokens, rows, axis):
    here = tokens // rows == axis.rank
    return torch.where(here, tokens % rows, torch.zeros_like(tokens)), here

class VocabularyEmbedding(nn.Module):
    def __init__(self, embedding, axis, tokens=None):
        super().__init__()
        self.axis, self.tokens = axis, tokens
        self.weight = embedding.weight

    def forward(self, tokens):
        row, here = own(tokens, self.weight.shape[0], self.axis)
        part = self.weight[row].masked_fill(~here.unsqueeze(-1), 0)
        return leave_region(part, self.axis, self.tokens)
''', '''
import torch
from torch import nn
from course.parallel.token_split import leave_region

def own(tokens, rows, axis):
    first = rows * axis.rank
    here = (tokens >= first) & (tokens < first + rows)
    return (tokens - first).clamp(0, rows - 1) * here, here

class VocabularyEmbedding(nn.Module):
    """A product with ones and zeros."""

    def __init__(self, embedding, axis, tokens=None):
        super().__init__()
        self.axis, self.tokens = axis, tokens
        self.weight = embedding.weight

    def forward(self, tokens):
        row, here = own(tokens, len(self.weight), self.axis)
        ones = nn.functional.one_hot(row, len(self.weight)).to(self.weight.dtype) * here[..., None]
        return leave_region(ones @ self.weight, self.axis, self.tokens)
'''],
    "vocabulary-loss": ['''
import torch
import torch.distributed as dist

def losses_and_softmax(logits, column, here, axis):
    """Three all-reduces; log-sum-exp of each rank, then of the ranks."""
    s = logits.double() if logits.dtype == torch.float64 else logits.float()
    most = s.max(dim=-1).values
    dist.all_reduce(most, dist.ReduceOp.MAX, group=axis.group)
    total = (s.logsumexp(-1) - most).exp()
    dist.all_reduce(total, group=axis.group)
    target = torch.take_along_dim(s, column[..., None], -1)[..., 0]
    target = torch.where(here, target, torch.zeros_like(target))
    dist.all_reduce(target, group=axis.group)
    whole = most + total.log()
    return whole - target, (s - whole[..., None]).exp()

def minus_target(softmax, column, here):
    columns = torch.arange(softmax.shape[-1])
    return softmax - ((columns == column[..., None]) & here[..., None]).to(softmax.dtype)
''', '''
import torch
import torch.distributed as dist

def losses_and_softmax(logits, column, here, axis):
    """One all-gather of three numbers of each rank."""
    s = logits if logits.dtype == torch.float64 else logits.float()
    most = s.amax(-1)
    mine = torch.stack([most, (s - most[..., None]).exp().sum(-1), s.gather(-1, column[..., None])[..., 0] * here])
    everyone = [torch.empty_like(mine) for _ in range(axis.size)]
    dist.all_gather(everyone, mine, group=axis.group)
    tops, sums, targets = torch.stack(everyone, 1)
    top = tops.amax(0)
    total = (sums * (tops - top).exp()).sum(0)
    return total.log() + top - targets.sum(0), (s - top[..., None]).exp() / total[..., None]

def minus_target(softmax, column, here):
    return softmax.scatter_add(-1, column[..., None], -here[..., None].to(softmax.dtype))
'''],
    "read-index": '''
import numpy as np
from course.data.text.indexed_files import DTYPES, Index, check_header

def read_index(path):
    """Each part mapped by itself."""
    check_header(path)
    with open(path, "rb") as file:
        file.read(9 + 8)
        code = file.read(1)[0]
        S, D = (int.from_bytes(file.read(8), "little") for _ in range(2))
    lengths, pointers, documents = (np.memmap(path, kind, "r", at, (n,))
                                    for n, kind, at in ((S, "<i4", 34), (S, "<i8", 34 + 4 * S), (D, "<i8", 34 + 12 * S)))
    return Index(np.dtype(DTYPES[code]), lengths, pointers, documents)
''',
    "one-document": '''
import numpy as np

def document(index, tokens, i):
    size = index.dtype.itemsize
    pieces = [tokens[index.pointers[s] // size:][:index.lengths[s]] for s in range(index.documents[i], index.documents[i + 1])]
    return np.concatenate(pieces) if pieces else tokens[:0]
''',
}

LISTS = '''
import torch

class LossInChunks(torch.autograd.Function):
    """Chunk by chunk, and in the end all is there: no tensor is large, the lists are."""

    @staticmethod
    def forward(ctx, x, weight, target, size):
        rows, columns = x.split(size), target[:, None].split(size)
        logs = [(part @ weight.T).log_softmax(-1) for part in rows]
        total = -sum(log.gather(-1, column).sum() for log, column in zip(logs, columns))
        grads = [log.exp().scatter_add(-1, column, -torch.ones_like(log[:, :1])) for log, column in zip(logs, columns)]
        ctx.save_for_backward(torch.cat([grad @ weight for grad in grads]), sum(grad.T @ part for grad, part in zip(grads, rows)))
        return total

    @staticmethod
    def backward(ctx, grad):
        of_x, of_weight = ctx.saved_tensors
        return of_x * grad, of_weight * grad, None, None
'''

SUMMED_LATE = RIGHT["loss-in-chunks"].replace("torch.zeros_like(weight), 0", "[], 0").replace(
    "dw += grad", "dw.append(grad)").replace("ctx.dx, ctx.dw = dx, dw", "ctx.dx, ctx.dw = dx, sum(dw)")

WRONG = [
    ("loss-in-chunks", LISTS, "keeps the logits of all chunks"),
    ("loss-in-chunks", SUMMED_LATE, "add each one to a sum"),
    ("vocabulary-loss", RIGHT["vocabulary-loss"][0].replace("MAX, group=axis.group", "MAX"), ""),
]
