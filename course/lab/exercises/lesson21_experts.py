"""Lesson 21: a router, its balance loss, and the all-to-alls that bring tokens to experts on other ranks and back.

The functions and classes here are the answers to the exercises of the lesson. The library's own are in `course/models/experts.py`
and `course/parallel/expert_parallel/experts.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from course.lab.checks import random_inputs, return_values
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn
from course.lab.exercises.lesson20_fully_sharded import axes_of
from course.lab.instruments.bytes_sent import Traffic, within_budget
from course.lab.sandbox.limits import Limits
from course.parallel import Axis, join

PATIENT = Limits(seconds=180)                        # most of it for starting 4 ranks on a machine with 2 cores
Compute = Callable[[Tensor, Tensor], Tensor]         # (rows, the expert of each row) -> outputs, in the rows' order


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:         # (N, E) -> 2 x (N, top_k)
    """The gates of each token's experts, and the experts' numbers: the `top_k` largest probabilities, scaled to sum to 1.

    With top_k=1 the gate is the probability itself.
    """
    gates, experts = logits.softmax(-1).topk(top_k)
    if top_k > 1:
        gates = gates / gates.sum(-1, keepdim=True)
    return gates, experts


def balance_loss(probabilities: Tensor, experts: Tensor) -> Tensor:     # (N, E), (N, k) -> ()
    """E times the sum over experts of f · P: f is an expert's share of all choices, P its mean probability."""
    number = probabilities.shape[-1]
    counts = torch.bincount(experts.flatten(), minlength=number)
    shares = counts / counts.sum()
    return number * (shares * probabilities.mean(0)).sum()


class ExchangeRows(Function):
    """Send the first sent[0] rows to rank 0 of the axis, the next sent[1] to rank 1, ...; return the received rows by sender.

    Backward: the gradient of each row returns to the rank that sent it.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
        ctx.sent, ctx.received, ctx.axis = sent, received, axis
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=axis.group)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        returned = grad.new_empty(sum(ctx.sent), *grad.shape[1:])
        dist.all_to_all_single(returned, grad.contiguous(), ctx.sent, ctx.received, group=ctx.axis.group)
        return returned, None, None, None


def through_experts(rows: Tensor, experts: Tensor, number: int, compute: Compute, axis: Axis) -> Tensor:   # (n, D), (n,)
    """Each row's output of its expert, in the order of `rows`. Rank r of the axis has the r-th of equal shares of the experts."""
    order = experts.argsort(stable=True)
    counts = torch.bincount(experts, minlength=number)                  # (E,)
    arriving = torch.empty_like(counts)                                 # (E,): from each rank, for each expert here
    dist.all_to_all_single(arriving, counts, group=axis.group)
    sent = counts.view(axis.size, -1).sum(1).tolist()
    received = arriving.view(axis.size, -1).sum(1).tolist()
    here = number // axis.size
    own = torch.arange(here).repeat(axis.size) + axis.rank * here       # (E,)
    arrived = ExchangeRows.apply(rows[order], sent, received, axis)
    outputs = compute(arrived, own.repeat_interleave(arriving))
    returned = ExchangeRows.apply(outputs, received, sent, axis)
    return returned[order.argsort()]


def gradients_of(result: Tensor, weights: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """The gradients of (result * weights).sum(); zeros where none arrives."""
    found = (torch.autograd.grad((result * weights).sum(), leaves, allow_unused=True) if result.requires_grad else
             (None,) * len(leaves))
    return tuple(torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in zip(leaves, found, strict=True))


def draw_logits(seed: int, hidden: bool) -> Tensors:
    """Router logits of some tokens; the gradient of the gates for each top_k."""
    generator = random_inputs.generator(seed)
    tokens, experts = (11, 6) if hidden else (7, 5)
    return {"logits": 2 * torch.randn(tokens, experts, generator=generator).double(),
            "grad": torch.randn(tokens, experts, generator=generator).double()}


TOP_KS = (1, 2, 3)


def run_route(inputs: Tensors) -> Tensors:
    """Route the tokens to one, two and three experts, and go back through the gates."""
    found: dict[str, list[Tensor]] = {"single": [], "gates": [], "experts": [], "gradient": []}
    for top_k in TOP_KS:
        logits = inputs["logits"].clone().requires_grad_()
        shape = (len(logits), top_k)
        returned = return_values.pair(route(logits, top_k), "route", "(gates, experts)")
        gates = return_values.tensor(returned[0], "route", shape, torch.float64, " as gates")
        experts = return_values.tensor(returned[1], "route", shape, torch.int64, " as experts")
        order = experts.argsort(-1)                  # the order of a token's experts does not matter
        found["single" if top_k == 1 else "gates"].append(gates.gather(-1, order).detach().flatten())
        found["experts"].append(experts.gather(-1, order).flatten().double())
        weights = inputs["grad"].gather(-1, experts.clamp(0, logits.shape[-1] - 1))
        found["gradient"].append(gradients_of(gates, weights, logits)[0].flatten())
    return {name: torch.cat(parts) for name, parts in found.items()}


def route_cases(inputs: Tensors) -> dict[str, list[str]]:
    """The question behind each number."""
    tokens, number = inputs["logits"].shape
    places = [(top_k, token, place) for top_k in TOP_KS for token in range(tokens) for place in range(top_k)]
    gates = [(top_k, f"top_k={top_k}: the gate of token {token} for its expert {place} by number")
             for top_k, token, place in places]
    return {"single": [text for top_k, text in gates if top_k == 1], "gates": [text for top_k, text in gates if top_k > 1],
            "experts": [f"top_k={top_k}: expert {place} by number of token {token}" for top_k, token, place in places],
            "gradient": [f"top_k={top_k}: the gradient of token {token}'s logit of expert {expert}"
                         for top_k in TOP_KS for token in range(tokens) for expert in range(number)]}


CHOICES = 3


def draw_probabilities(seed: int, hidden: bool) -> Tensors:
    """Logits of several batches of tokens: the last favors two experts so much that others get none."""
    generator = random_inputs.generator(seed)
    tokens, experts = (17, 7) if hidden else (12, 5)
    logits = torch.randn(CHOICES, tokens, experts, generator=generator).double()
    logits[-1, :, :2] += 20
    return {"logits": logits}


def run_balance_loss(inputs: Tensors) -> Tensors:
    """The loss of the router's own choices with one and two experts a token, and the gradient that reaches its logits."""
    losses, gradients = [], []
    for given in inputs["logits"]:
        for top_k in (1, 2):
            logits = given.clone().requires_grad_()
            probabilities = logits.softmax(-1)
            loss = return_values.tensor(balance_loss(probabilities, probabilities.topk(top_k).indices), "balance_loss", (),
                                        torch.float64)
            losses.append(loss.detach())
            gradients.append(gradients_of(loss, torch.ones_like(loss), logits)[0].flatten())
    return {"losses": torch.stack(losses), "gradient": torch.cat(gradients)}


def balance_loss_cases(inputs: Tensors) -> dict[str, list[str]]:
    """The question behind each number."""
    batches, tokens, number = inputs["logits"].shape
    tried = [f"batch {batch}, {top_k} expert{'s' * (top_k > 1)} a token" for batch in range(batches) for top_k in (1, 2)]
    return {"losses": tried, "gradient": [f"{which}: token {token}, expert {expert}" for which in tried for token in range(tokens)
                                          for expert in range(number)]}


def draw_rows(seed: int, hidden: bool) -> Tensors:
    """Rows of four ranks with the expert of each, weights of each expert, and the gradients of the outputs.

    Two experts, the last among them, get no row at all, and another gets many. The numbers of rows differ between ranks.
    """
    generator = random_inputs.generator(seed)
    number, width, rows = 8, 5 if hidden else 3, 13 if hidden else 9
    experts = torch.randint(number, (4, rows), generator=generator)
    experts[(experts == 3) | (experts == 7)] = 5
    return {"rows": torch.randn(4, rows, width, generator=generator).double(), "experts": experts,
            "weights": torch.randn(number, width, width, generator=generator).double(),
            "grads": torch.randn(4, rows, width, generator=generator).double(),
            "lengths": torch.tensor([rows, rows - 2, rows - 1, rows - 3])}


def counts_between(experts: Tensor, number: int, axis: Axis) -> tuple[list[int], list[int]]:
    """How many rows this rank sends to each rank of the axis, and receives from each."""
    sent = torch.bincount(experts * axis.size // number, minlength=axis.size)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)
    return sent.tolist(), received.tolist()


def run_exchange_rows(inputs: Tensors) -> Tensors:
    """Send rows to the ranks of their experts and, backward, the gradients back, along two axes."""
    world = join("cpu")
    found: Tensors = {}
    sent_bytes, number = [], len(inputs["weights"])
    for name, axis in axes_of(world).items():
        length = int(inputs["lengths"][world.rank])
        experts = inputs["experts"][world.rank, :length].sort().values
        rows = inputs["rows"][world.rank, :length].clone().requires_grad_()
        sent, received = counts_between(experts, number, axis)
        with Traffic() as traffic:
            arrived = return_values.tensor(ExchangeRows.apply(rows, sent, received, axis), "ExchangeRows.apply",
                                           (sum(received), rows.shape[1]), torch.float64)
        sent_bytes.append((traffic, float(rows.nbytes)))
        weights = torch.arange(1.0, arrived.numel() + 1).double().view_as(arrived)
        with Traffic() as traffic:
            gradient, = gradients_of(arrived, weights, rows)
        sent_bytes.append((traffic, float(arrived.nbytes)))
        found |= {name: arrived.detach(), f"{name}_gradient": gradient}
    dist.barrier()
    return found | {"sent": within_budget(*sent_bytes)}


class LinearExperts:
    """The experts of this rank, a matrix each. They count how many rows they compute in each call."""

    def __init__(self, weights: Tensor, first: int):
        self.weights, self.first = weights.clone().requires_grad_(), first
        self.calls: list[int] = []

    def __call__(self, rows: Tensor, experts: Tensor) -> Tensor:        # (n, D), (n,) -> (n, D)
        count, width = len(experts), self.weights.shape[1]
        rows = return_values.tensor(rows, "through_experts", (count, width), torch.float64, " to `compute` as rows")
        own = return_values.tensor(experts, "through_experts", (count,), torch.int64, " to `compute` as experts") - self.first
        if count and not 0 <= int(own.min()) <= int(own.max()) < len(self.weights):
            raise InvalidReturn("`compute` gets rows of experts that this rank does not have",
                                "rank r of the axis has number // size experts, from r * (number // size) on")
        self.calls.append(count)
        return (rows[:, None] @ self.weights[own])[:, 0]


def run_through_experts(inputs: Tensors) -> Tensors:
    """Rows through linear experts that are spread over ranks, along two axes: outputs and gradients of rows and weights."""
    world = join("cpu")
    found: Tensors = {}
    sent_bytes, computed, number = [], True, len(inputs["weights"])
    for name, axis in axes_of(world).items():
        length, here = int(inputs["lengths"][world.rank]), number // axis.size
        rows = inputs["rows"][world.rank, :length].clone().requires_grad_()
        experts = inputs["experts"][world.rank, :length]
        compute = LinearExperts(inputs["weights"][axis.rank * here:(axis.rank + 1) * here], axis.rank * here)
        with Traffic() as traffic:
            y = return_values.tensor(through_experts(rows, experts, number, compute, axis), "through_experts", tuple(rows.shape),
                                     torch.float64)
        _, received = counts_between(experts, number, axis)
        computed = computed and compute.calls == [sum(received)]
        outputs = sum(received) * rows.nbytes / length
        # a number for each expert and, at most, one for each row
        sent_bytes.append((traffic, rows.nbytes + outputs + 8 * (number + length)))
        gradients = gradients_of(y, inputs["grads"][world.rank, :length], rows, compute.weights)
        found |= {name: y.detach(), f"{name}_rows": gradients[0], f"{name}_weights": gradients[1]}
    dist.barrier()
    return found | {"computed": torch.tensor(float(computed)), "sent": within_budget(*sent_bytes)}


EXERCISES = [
    Exercise("route", "21", (f"{__name__}.route",), draw_logits, run_route, {
        "experts": "each token goes to the experts with the largest probabilities",
        "gates": "the gates of several experts are their probabilities, scaled to sum to 1",
        "single": "the gate of a single expert is its probability",
        "gradient": "the gradient of the gates reaches the logits"}, cases=route_cases, points=1),
    Exercise("balance-loss", "21", (f"{__name__}.balance_loss",), draw_probabilities, run_balance_loss, {
        "losses": "the loss is E times the sum of f times P, 1 when all experts get equally much",
        "gradient": "its gradient reaches the router through P alone"}, cases=balance_loss_cases, points=2,
        tolerance=1e-6),                             # counts divided by counts are float32
    Exercise("exchange-rows", "21", (f"{__name__}.ExchangeRows",), draw_rows, run_exchange_rows, {
        "all": "each rank gets the rows that are for it, ordered by sender",
        "all_gradient": "backward, each gradient returns to the row that it belongs to",
        "pair": "the rows are right along an axis of two ranks, too",
        "pair_gradient": "and so are the gradients",
        "sent": "each row is sent once, and each gradient once"}, flags={"sent": "it sends more"},
        sizes=(2, 4), points=2, limits=PATIENT),
    Exercise("through-experts", "21", (f"{__name__}.through_experts",), draw_rows, run_through_experts, {
        "all": "each row gets the output of its own expert, in its own place",
        "all_rows": "the gradients of the rows are those of a single process",
        "all_weights": "each expert's gradient counts the rows of all ranks",
        "pair": "the outputs are right along an axis of two ranks, too",
        "pair_rows": "and so are the gradients of the rows",
        "pair_weights": "and those of the experts",
        "computed": "each rank computes its experts' rows in one call, and no others",
        "sent": "each row and each output is sent once; besides them, only the numbers of rows are sent"}, flags={
            "computed": "`compute` gets other rows, or is called more than once", "sent": "it sends more"},
        sizes=(2, 4), points=3, limits=PATIENT),
]
