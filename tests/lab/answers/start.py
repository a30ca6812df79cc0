"""Answers to exercises of lessons 00, 01, 06, 07, 12 and 13 that are not the library's own."""

RIGHT = {
    "matmul-cost": ['''
def matmul_cost(m, k, n, itemsize):
    return 2.0 * n * k * m, itemsize * sum(rows * columns for rows, columns in [(m, k), (k, n), (m, n)])
''', '''
import numpy as np

def matmul_cost(m, k, n, itemsize):
    m, k, n = map(np.int64, (m, k, n))
    multiplications = additions = m * n * k
    read = m * k * itemsize + k * n * itemsize
    return [multiplications + additions, read + m * n * itemsize]
''', '''
import torch

def matmul_cost(m, k, n, itemsize):
    a, b = torch.empty(m, k, device="meta"), torch.empty(k, n, device="meta")
    numbers = a.numel() + b.numel() + (a @ b).numel()
    return 2 * (a @ b).numel() * k, numbers * itemsize
'''],
    "roofline": ['''
def roofline_seconds(flops, moved, peak_flops, peak_bytes):
    if flops / moved > peak_flops / peak_bytes:
        return flops / peak_flops
    return moved / peak_bytes
''', '''
import torch

def roofline_seconds(flops, moved, peak_flops, peak_bytes):
    return torch.tensor([flops / peak_flops, moved / peak_bytes]).max()
''', '''
def roofline_seconds(flops, moved, peak_flops, peak_bytes):
    intensity = flops / moved
    return flops / min(peak_flops, intensity * peak_bytes)
'''],
    "relative-l2": ['''
import torch
from torch import nn

class RelativeL2(nn.Module):
    def forward(self, output, batch):
        target = batch["target"]
        dims = tuple(range(1, target.ndim))
        error = torch.linalg.vector_norm(output - target, dim=dims)
        size = torch.sqrt((target ** 2).sum(dim=dims))
        weight = self.weight(batch)
        size = torch.where(weight > 0, size, torch.ones_like(size))
        return torch.sum(weight * error / size), torch.sum(weight)

    def weight(self, batch):
        return torch.where(batch["sample"] >= 0, 1.0, 0.0).to(batch["target"])
''', '''
from torch import nn

class RelativeL2(nn.Module):
    """Only the real samples are looked at."""
    def forward(self, output, batch):
        real = batch["sample"] != -1
        y, t = output[real], batch["target"][real]
        losses = (y - t).flatten(1).norm(dim=1) / t.flatten(1).norm(dim=1)
        return losses.sum(), self.weight(batch).sum()

    def weight(self, batch):
        return (batch["sample"] != -1).type_as(batch["target"])
''', '''
import torch
from torch import nn

class RelativeL2(nn.Module):
    """One sample after another, and a norm of padding that is tiny instead of zero."""
    def forward(self, output, batch):
        total = output.new_zeros(())
        for y, t, w in zip(output, batch["target"], self.weight(batch)):
            total = total + w * torch.linalg.vector_norm(y - t) / torch.linalg.vector_norm(t).clamp(min=1e-12)
        return total, self.weight(batch).sum()

    def weight(self, batch):
        ones = torch.ones(len(batch["sample"]), dtype=batch["target"].dtype)
        return ones.masked_fill(batch["sample"] < 0, 0)
'''],
    "training-step": ['''
def training_step(model, optimizer, batch):
    optimizer.zero_grad(set_to_none=False)
    sum_, count = model.loss(model(batch), batch)
    mean = sum_ / count
    mean.backward()
    optimizer.step()
    return mean.data.clone()
''', '''
import torch

def training_step(model, optimizer, batch):
    with torch.enable_grad():
        loss = torch.div(*model.loss(model(batch), batch))
    loss.backward()
    optimizer.step()
    for p in model.parameters():
        p.grad = None
    with torch.no_grad():
        return loss * 1
''', '''
import torch

def training_step(model, optimizer, batch):
    total, weight = model.loss(model(batch), batch)
    parameters = list(model.parameters())
    for p, gradient in zip(parameters, torch.autograd.grad(total, parameters)):
        p.grad = gradient / weight
    optimizer.step()
    return (total / weight).detach()
'''],
    "accumulate": ['''
from course.training.step import autocast, global_weight, split_microbatches

def eager(model, progress, config, layout):
    mesh = layout.mesh
    def compute(batch):
        W = global_weight(model, batch, mesh.dp)
        factor = mesh.dp.size / W * progress.loss_scale
        share = 0
        for micro in list(split_microbatches(batch, config.train.micro_batch)):
            with autocast(config.precision, W.device):
                total, _ = model.loss(model(micro), micro)
            (factor * total).backward()
            share = share + (total / W).detach()
        return share
    return compute
''', '''
import torch
from course.training import step

def eager(model, progress, config, layout):
    mesh = layout.mesh
    def one(micro, weight):
        with step.autocast(config.precision, weight.device):
            output = model(micro)
        share = model.loss(output, micro)[0] / weight
        torch.autograd.backward(share * progress.loss_scale * mesh.dp.size)
        return share.detach()

    def compute(batch):
        weight = step.global_weight(model, batch, mesh.dp)
        return torch.stack([one(micro, weight) for micro in step.split_microbatches(batch, config.train.micro_batch)]).sum()

    return compute
'''],
    "average-gradients": ['''
import torch
import torch.distributed as dist

def average_gradients(parameters, axis):
    with_gradient = [p for p in parameters if p.grad is not None]
    if axis.size > 1 and with_gradient:
        together = torch.cat([p.grad.flatten() for p in with_gradient]) / axis.size
        dist.all_reduce(together, group=axis.group)
        for p, mean in zip(with_gradient, together.split([p.numel() for p in with_gradient])):
            p.grad = mean.view_as(p)
'''],
    "gpipe": ['''
from course.parallel.pipeline_parallel.schedules import Pass

def gpipe(p, rank, m, v=1):
    passes = []
    for kind in "FB":
        for micro in range(m):
            passes.append(Pass(kind, chunk=0, micro=micro))
    return passes
''', '''
from course.parallel.pipeline_parallel.schedules import Pass

def gpipe(p, rank, m, v=1):
    there = [Pass("F", 0, i) for i in range(m)]
    return tuple(there + [Pass("B", work.chunk, work.micro) for work in there])
'''],
    "1f1b": ['''
from course.parallel.pipeline_parallel.schedules import Pass

def alternate(forward, backward, ahead):
    order, back = [], iter(backward)
    for number, work in enumerate(forward):
        order.append(work)
        if number >= ahead:
            order.append(next(back))
    return order + list(back)

def one_forward_one_backward(p, rank, m, v=1):
    behind = p - 1 - rank
    return alternate([Pass("F", 0, i) for i in range(m)], [Pass("B", 0, i) for i in range(m)], behind if behind < m else m)
'''],
    "training-bytes": ['''
def training_bytes(parameters, ranks, stage):
    shares = [ranks if stage >= first else 1 for first in (3, 2, 1)]
    return [bytes * parameters / share for bytes, share in zip((4, 4, 8), shares)]
'''],
    "zero-optimizer": ['''
import torch
import torch.distributed as dist
from torch import nn
from course.parallel.mappings import reduce_scatter_single

class ZeroOptimizer:
    def __init__(self, weights, axis, make):
        self.weights, self.axis = weights, axis
        self.share = nn.Parameter(weights.chunk(axis.size)[axis.rank].detach().clone())
        self.adam = make([self.share])

    def step(self, gradient):
        own = torch.empty_like(self.share)
        reduce_scatter_single(own, gradient, group=self.axis.group)
        self.share.grad = own / self.axis.size
        self.adam.step()
        parts = [torch.empty_like(self.share) for _ in range(self.axis.size)]
        dist.all_gather(parts, self.share.detach(), group=self.axis.group)
        self.weights.copy_(torch.cat(parts))
''', '''
from torch import nn
from course.parallel.mappings import all_gather_single, reduce_scatter_single

class ZeroOptimizer:
    def __init__(self, weights, axis, make):
        self.weights, self.axis = weights, axis
        self.mine = nn.Parameter(weights.view(axis.size, -1)[axis.rank])              # a view
        self.optimizer = make([self.mine])

    def step(self, gradient):
        self.optimizer.zero_grad()
        self.mine.grad = self.mine.new_empty(len(self.mine))
        reduce_scatter_single(self.mine.grad, gradient / self.axis.size, group=self.axis.group)
        self.optimizer.step()
        all_gather_single(self.weights, self.mine.data.clone(), group=self.axis.group)
''', '''
import torch
from torch import nn
from course.parallel.mappings import all_gather_single, reduce_scatter_single

class ZeroOptimizer:
    def __init__(self, weights, axis, make):
        self.weights, self.axis = weights, axis
        self.mine = nn.Parameter(weights.view(axis.size, -1)[axis.rank].clone())
        self.total = torch.empty_like(self.mine)                                      # received into, step after step
        self.optimizer = make([self.mine])

    def step(self, gradient):
        reduce_scatter_single(self.total, gradient, group=self.axis.group)
        self.mine.grad = self.total / self.axis.size
        self.optimizer.step()
        all_gather_single(self.weights, self.mine.detach(), group=self.axis.group)
'''],
    "recompute": ['''
import torch

class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x):
        ctx.block, ctx.x = block, x
        with torch.no_grad():
            return block(x)

    @staticmethod
    @torch.enable_grad()
    def backward(ctx, grad):
        x = ctx.x.clone().detach()
        x.requires_grad = True
        parameters = list(ctx.block.parameters())
        first, *rest = torch.autograd.grad(ctx.block(x), [x, *parameters], grad)
        for parameter, gradient in zip(parameters, rest):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return None, first
'''],
}

ACCUMULATE = '''
import torch
from course.training.step import autocast, global_weight, split_microbatches

def eager(model, progress, config, layout):
    mesh = layout.mesh
    def compute(batch):
        weight = global_weight(model, batch, mesh.dp)
        loss = torch.zeros((), device=weight.device, dtype=weight.dtype)
        for micro in split_microbatches(batch, config.train.micro_batch):
            with autocast(config.precision, weight.device):
                output = model(micro)
            total, own = model.loss(output, micro)
            (total / weight * mesh.dp.size * progress.loss_scale).backward()
            loss += (total / weight).detach()
        return loss
    return compute
'''

ON_CTX = """
import torch

class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x):
        ctx.block = block
        ctx.save_for_backward(x)
        y = block(x)
        ctx.y = y.clone()
        return y

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.block(x).backward(grad)
        return None, x.grad
"""

WRONG = [
    ("recompute", ON_CTX, "put on ctx stays in memory"),
    ("zero-optimizer", RIGHT["zero-optimizer"][0].replace(
        "reduce_scatter_single(own, gradient, group=self.axis.group)",
        "whole = gradient.clone()\n        dist.all_reduce(whole, group=self.axis.group)\n"
        "        own = whole.chunk(self.axis.size)[self.axis.rank]"), "half as much"),
    ("zero-optimizer", RIGHT["zero-optimizer"][0].replace(
        "reduce_scatter_single(own, gradient, group=self.axis.group)",
        "parts = [torch.empty_like(gradient) for _ in range(self.axis.size)]\n"
        "        dist.all_gather(parts, gradient, group=self.axis.group)\n"
        "        own = sum(parts).chunk(self.axis.size)[self.axis.rank]"), "this gathers whole gradients from all ranks"),
    ("zero-optimizer", RIGHT["zero-optimizer"][0].replace(
        "reduce_scatter_single(own, gradient, group=self.axis.group)",
        "own = 0\n        for rank in self.axis.ranks:\n            other = gradient.clone()\n"
        "            dist.broadcast(other, rank, group=self.axis.group)\n"
        "            own = own + other.chunk(self.axis.size)[self.axis.rank]"), "it sends more by all-gather and broadcast"),
    ("zero-optimizer", RIGHT["zero-optimizer"][0].replace(
        "        own =", "        self.gradient = gradient.clone()\n        own ="), "keep none between steps"),
    ("accumulate", ACCUMULATE.replace("(total / weight * mesh", "(total / own * mesh"), "the mean of each micro-batch"),
    ("accumulate", ACCUMULATE.replace("(total / weight).detach()", "(total / weight * mesh.dp.size).detach()"),
     "this rank's share"),
    ("accumulate", ACCUMULATE.replace(", dtype=weight.dtype", ""), "start from 0"),
    ("gpipe", RIGHT["gpipe"][0].replace('"FB"', '"fb"'), '"F" or "B"'),
    ("gpipe", '''
from course.parallel.pipeline_parallel.schedules import Pass

def gpipe(p, rank, m, v=1):
    there = [Pass("F", 0, i) for i in range(m)]
    return there + [Pass("B", 0, m - 1 - i) for i in range(m)]
''', "the first micro-batch comes first both times"),
    ("average-gradients", '''
import torch
import torch.distributed as dist

def average_gradients(parameters, axis):
    """Right, and as many messages as there are parameters, each n times as large as it need be."""
    if axis.size == 1:
        return
    for p in parameters:
        if p.grad is not None:
            everyone = [torch.empty_like(p.grad) for _ in range(axis.size)]
            dist.all_gather(everyone, p.grad.contiguous(), group=axis.group)
            p.grad = sum(everyone) / axis.size
''', "concatenate all gradients"),
]
