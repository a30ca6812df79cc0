"""Mixture of experts: a router sends each token to `top_k` of many MLPs (Shazeer et al. 2017, arXiv:1701.06538).

    scores   softmax or sigmoid of the router's logits, one for each expert, in float32
    choice   the top_k experts with the largest scores; a bias may be added, for the choice alone
    gates    their scores divided by their sum, or with norm_topk=false the scores; with top_k=1 the score, or the router would
             have no gradient
    output   the sum of gate x expert(token), and the shared experts, which see every token

All balance terms belong to one sample, so they add up over samples: no layout, micro-batch or gradient accumulation changes them.

    balance loss   E · Σ f_e · P_e of each sample: f_e is expert e's share of the choices, P_e its mean score (Fedus et al. 2021,
                   arXiv:2101.03961, section 2.2; per sequence: DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2)
    z-loss         the mean square of logsumexp(logits) (Zoph et al. 2022, arXiv:2202.08906, section 3.2)
    bias           after each step, the bias of an expert with less than the mean load of the global batch grows by
                   `balance_rate`, that of one with more shrinks (Wang et al. 2024, arXiv:2408.15664)
    capacity       in training, an expert takes at most capacity_factor · T · top_k / E tokens of a sample, the first ones
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from course.models.interface import Batch
from course.models.layers import MLP, SumOverTokens, SwiGLU
from course.ops.autograd import Context
from course.ops.number_formats import matmul_dtype
from course.ops.permutation import permute, unpermute

if TYPE_CHECKING:
    from course.models.gpt import GPTConfig

Compute = Callable[[Tensor, Tensor], Tensor]        # (rows sorted by expert, rows of each expert) -> their outputs


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """A linear map of its own for each group of rows: (n, K), (E, N, K), (E,) -> (n, N). counts: rows of each group, in order.

    The results of rows after the last group are undefined. On a GPU in bf16 it is one kernel, without a wait for the counts.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    return split_linear(x, weight, counts)


@torch._disable_dynamo                              # the compiler would compile again for each number of rows
def split_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """`grouped_linear` by one matmul for each group, whose sizes the host waits for."""
    sizes = counts.tolist()
    *parts, rest = x.split([*sizes, len(x) - sum(sizes)])
    mapped = [F.linear(rows, matrix) for rows, matrix in zip(parts, weight.unbind(), strict=True)]
    return torch.cat([*mapped, rest.new_zeros(len(rest), weight.shape[1])])


class Route:
    """How tokens reach the experts: in a serial model all are here. Expert parallelism puts its own in its place."""

    def enter(self, x: Tensor) -> Tensor:                               # (B, T, ...)
        """Enter the region where a rank may compute parts of experts."""
        return x

    def leave(self, x: Tensor) -> Tensor:                               # (B, T, D)
        """Leave it: sum the parts."""
        return x

    def local(self, chosen: Tensor, number: int) -> tuple[Tensor, int]:
        """The choices of `number` experts as this rank numbers those that it computes, and how many these are."""
        return chosen, number

    def weight(self, weight: Tensor) -> Tensor:
        """A weight as the experts use it."""
        return weight

    def run(self, rows: Tensor, counts: Tensor, compute: Compute) -> Tensor:        # (n, D), (E,) -> (n, D)
        """Send rows, which are sorted by expert, to their experts; return the outputs in the same order. Rows that follow those
        of the last expert belong to none."""
        return compute(rows, counts)


# an operator: the compiler keeps its effect, and would drop a plain addition in a backward pass
torch.library.define("course::count_load", "(Tensor(a!) load, Tensor counts) -> ()")
torch.library.register_fake("course::count_load", lambda load, counts: None)


@torch.library.impl("course::count_load", "CompositeExplicitAutograd")
def _count_load(load: Tensor, counts: Tensor) -> None:
    load.add_(counts)


class CountLoad(Function):
    """Forward: identity. Backward: identity, and the tokens of each expert are added to `load`.

    A backward pass runs once for each training pass; forward passes also rehearse, recompute and evaluate.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, load: Tensor, counts: Tensor) -> Tensor:      # any shape, 2 x (E,)
        ctx.save_for_backward(load, counts)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        torch.ops.course.count_load(*ctx.saved_tensors)
        return grad, None, None


class Experts(nn.Module):
    """The experts' MLPs, without biases, their weights stacked. A choice of E, one past the last expert, is no expert.

    up: (E, 1, H, D), or (E, 2, H, D) for gates and values of SwiGLU. down: (E, D, H).
    """

    seam = "experts"                                # expert parallelism cuts the weights and sets `route`

    def __init__(self, c: "GPTConfig"):
        super().__init__()
        self.number, self.mlp = c.experts, c.mlp
        self.up = nn.Parameter(torch.empty(c.experts, 2 if c.mlp == "swiglu" else 1, c.expert_hidden, c.dim))
        self.down = nn.Parameter(torch.empty(c.experts, c.dim, c.expert_hidden))
        self.route = Route()

    def forward(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:          # (B, T, D), 2 x (B, T, k)
        x, gates, chosen = (self.route.enter(part) for part in (x.to(matmul_dtype(x)), gates, chosen))
        k, (chosen, number) = chosen.shape[-1], self.route.local(chosen, self.number)
        expert, choice = chosen.flatten().sort(stable=True)             # 2 x (N·k,)
        ends = torch.searchsorted(expert, torch.arange(number, device=x.device), right=True)            # (E,)
        rank = torch.empty_like(choice).scatter_(0, choice, torch.arange(len(choice), device=x.device)) # (N·k,)
        order = torch.where(rank < ends[-1], rank, -1).view(-1, k)      # (N, k): the row of each choice
        rows = permute(x.flatten(0, 1), choice // k, order)             # (N·k, D), by expert
        rows = self.route.run(rows, ends.diff(prepend=ends.new_zeros(1)), self.compute)                 # (N·k, D)
        return self.route.leave(unpermute(rows, order, gates.flatten(0, 1)).view_as(x))                 # (B, T, D)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:          # (n, D), (E,)
        """The outputs of rows that are sorted by expert, (n, D). counts: the rows of each expert that is here."""
        up, down = (self.route.weight(weight).to(rows.dtype) for weight in (self.up, self.down))
        h = grouped_linear(rows, up.flatten(1, 2), counts)      # (n, H) or (n, 2·H)
        if self.mlp == "swiglu":
            gate, value = h.chunk(2, -1)                                # 2 x (n, H)
            h = F.silu(gate) * value                                    # (n, H)
        else:
            h = F.gelu(h, approximate="tanh" if self.mlp == "gelu_tanh" else "none")
        return grouped_linear(h, down, counts)                          # (n, D)


class EarlierChoices(nn.Module):
    """For each choice of a token, how many earlier tokens of the sample have chosen the same expert."""

    seam = "earlier_choices"                        # with cut tokens, surgery counts those of other ranks, too

    def __init__(self, number: int):
        super().__init__()
        self.number = number

    def forward(self, chosen: Tensor) -> Tensor:                        # (B, T, k), values up to E
        one_hot = F.one_hot(chosen, self.number + 1).sum(2)             # (B, T, E + 1)
        return (one_hot.cumsum(1) - one_hot).gather(-1, chosen)         # (B, T, k)


class Router(nn.Module):
    """A logit of each expert for each token, in float32 or float64. bias: added to scores for the choice alone, or None."""

    def __init__(self, c: "GPTConfig"):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.experts, c.dim))
        self.bias = nn.Parameter(torch.empty(c.experts), requires_grad=False) if c.balance_rate else None
        self.load: Any = None                       # (E,) the tokens of this step, where biases are balanced

    def forward(self, x: Tensor) -> Tensor:                             # (B, T, D)
        kind = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(kind), self.weight.to(kind))           # (B, T, E)


class MoE(nn.Module):
    """Router, experts and shared experts in the place of an MLP; also returns the auxiliary loss of each sample, (B,)."""

    def __init__(self, c: "GPTConfig"):
        super().__init__()
        self.c = c
        self.router, self.experts = Router(c), Experts(c)
        width = c.shared_experts * c.expert_hidden
        self.shared: nn.Module | None = None
        if width:
            self.shared = (SwiGLU(c.dim, width, c.bias) if c.mlp == "swiglu" else
                           MLP(c.dim, width, c.bias, "tanh" if c.mlp == "gelu_tanh" else "none"))
        self.sum_over_tokens = SumOverTokens("real")
        self.earlier_choices = EarlierChoices(c.experts)

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:                # (B, T, D)
        logits = self.router(x)                                         # (B, T, E)
        scores = logits.softmax(-1) if self.c.routing == "softmax" else logits.sigmoid()
        ranked = scores.detach() if self.router.bias is None else scores.detach() + self.router.bias
        chosen = ranked.topk(self.c.top_k).indices                      # (B, T, k)
        gates = scores.gather(-1, chosen)                               # (B, T, k)
        if self.c.top_k > 1 and self.c.norm_topk:
            gates = gates / gates.sum(-1, keepdim=True)
        real = batch["real"]                                            # (B, T)
        chosen = chosen.masked_fill(~real[..., None], self.c.experts)
        counts, probabilities, square, tokens = self.sums(logits, scores, chosen, real)
        penalty = auxiliary_loss(self.c, counts, probabilities, square, tokens)         # (B,)
        if self.router.load is not None:
            gates = CountLoad.apply(gates, self.router.load, counts.detach().sum(0))
        if self.c.capacity_factor and self.training:
            most = (self.c.capacity_factor * tokens * self.c.top_k / self.c.experts).ceil()             # (B,)
            chosen = chosen.masked_fill(self.earlier_choices(chosen) >= most[:, None, None], self.c.experts)
        y = self.experts(x, gates, chosen)                              # (B, T, D)
        return y if self.shared is None else y + self.shared(x), penalty

    def sums(self, logits: Tensor, scores: Tensor, chosen: Tensor, real: Tensor) -> list[Tensor]:
        """Sums over the tokens of each sample: choices of each expert and its probabilities, (B, E) each; the squares of
        logsumexp(logits), and the number of tokens, (B,) each."""
        weight = real[..., None].to(scores.dtype)                       # (B, T, 1)
        expert = torch.arange(self.c.experts, device=chosen.device)
        counts = (chosen[..., None] == expert).sum((1, 2), dtype=scores.dtype)          # (B, E)
        probabilities = (scores / scores.sum(-1, keepdim=True) * weight).sum(1)         # (B, E)
        squares = (logits.logsumexp(-1, keepdim=True).square() * weight).sum(1)         # (B, 1)
        sums = self.sum_over_tokens(torch.cat([counts, probabilities, squares, weight.sum(1)], 1))      # (B, 2·E + 2)
        counts, probabilities, squares, tokens = sums.split([self.c.experts, self.c.experts, 1, 1], 1)
        return [counts, probabilities, squares.squeeze(1), tokens.squeeze(1).detach().clamp(min=1)]


def auxiliary_loss(c: "GPTConfig", counts: Tensor, probabilities: Tensor, squares: Tensor, tokens: Tensor) -> Tensor:
    """The weighted balance loss and z-loss of each sample, from the sums of `MoE.sums`: 2 x (B, E), 2 x (B,) -> (B,)."""
    shares = counts.detach() * (c.experts / c.top_k) / tokens[:, None]  # (B, E): 1 for each expert when balanced
    balance = (shares * probabilities).sum(1) / tokens                  # (B,)
    return c.balance_loss * balance + c.z_loss * squares / tokens
