"""Answers to exercises of lesson 21 that are not the library's own: in other words, or wrong in other ways."""

ROUTE = '''
import torch

def route(logits, top_k):
    """Softmax over the chosen logits alone."""
    if top_k == 1:
        probabilities = torch.softmax(logits, 1)
        best = probabilities.max(1, keepdim=True)
        return best.values, best.indices
    order = logits.argsort(-1, descending=True)[:, :top_k]
    return logits.gather(-1, order).softmax(-1), order
'''

BALANCE = '''
import torch
import torch.nn.functional as F

def balance_loss(probabilities, experts):
    tokens, number = probabilities.shape
    chosen = F.one_hot(experts, number).to(probabilities.dtype)         # (N, k, E)
    f = chosen.sum(1).mean(0) / experts.shape[1]
    p = probabilities.sum(0) / tokens
    return number * f @ p
'''

EXCHANGE = '''
import torch
import torch.distributed as dist
from torch.autograd import Function

class ExchangeRows(Function):
    @staticmethod
    def forward(ctx, rows, sent, received, axis):
        ctx.counts = sent, received
        ctx.axis = axis
        return move(rows, sent, received, axis)

    @staticmethod
    def backward(ctx, grad):
        sent, received = ctx.counts
        return move(grad, received, sent, ctx.axis), None, None, None

def move(x, going, coming, axis):
    """Messages from rank to rank."""
    out = [part.contiguous() for part in x.split(going)]
    into = [x.new_empty(n, x.shape[1]) for n in coming]
    into[axis.rank] = out[axis.rank]
    others = [place for place in range(axis.size) if place != axis.rank]
    works = [dist.isend(out[place], axis.ranks[place], group=axis.group) for place in others]
    works += [dist.irecv(into[place], axis.ranks[place], group=axis.group) for place in others]
    for work in works:
        work.wait()
    return torch.cat(into)
'''

THROUGH = '''
import torch
import torch.distributed as dist
from course.lab.exercises.lesson21_experts import ExchangeRows

def through_experts(rows, experts, number, compute, axis):
    """The experts' numbers travel beside the rows."""
    rank_of = experts // (number // axis.size)
    order = rank_of.argsort(stable=True)
    sent = torch.bincount(rank_of, minlength=axis.size)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)
    sent, received = sent.tolist(), received.tolist()
    numbers = experts.new_empty(sum(received))
    dist.all_to_all_single(numbers, experts[order], received, sent, group=axis.group)
    outputs = compute(ExchangeRows.apply(rows[order], sent, received, axis), numbers)
    back = ExchangeRows.apply(outputs, received, sent, axis)
    result = torch.zeros_like(back)
    return result.index_copy(0, order, back)
'''

RIGHT = {"route": ROUTE, "balance-loss": BALANCE, "exchange-rows": EXCHANGE, "through-experts": THROUGH}

WRONG = [
    ("route", ROUTE.replace("if top_k == 1", "if top_k == 0"), "no gradient reaches the router"),
    ("route", ROUTE.replace("logits.gather(-1, order).softmax(-1), order", "logits.softmax(-1).gather(-1, order), order"),
     "sum to less than 1"),
    ("balance-loss", BALANCE.replace(" / experts.shape[1]", ""), "divide by the number of choices"),
    ("balance-loss", BALANCE.replace("number * f @ p", "f @ p"), "multiply by the number of experts"),
    ("balance-loss", BALANCE.replace("number * f @ p", "number * (f * torch.log(p)).sum()"), ""),
    ("exchange-rows", EXCHANGE.replace("move(grad, received, sent, ctx.axis)", "grad"), ""),
    ("through-experts", THROUGH.replace("result.index_copy(0, order, back)", "back[order]"), "in another order"),
    ("through-experts", THROUGH.replace("result.index_copy(0, order, back)", "back"), "in another order"),
]
