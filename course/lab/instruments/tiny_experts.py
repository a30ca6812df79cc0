"""A language model of one block, small enough to train in seconds, with experts whose router is the learner's.

    model = TinyExperts(route, experts=8, top_k=2)
    record = train(model, samples, steps=200, balance=balance_loss)
    record.loads[-1]                                 # the share of the last step's choices that each expert got
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course.data.text.sequences import Sequences

Route = Callable[[Tensor, int], tuple[Tensor, Tensor]]       # (logits (N, E), top_k) -> gates, experts, (N, top_k) each
Balance = Callable[[Tensor, Tensor], Tensor]                 # (probabilities (N, E), experts (N, top_k)) -> ()


class TinyExperts(nn.Module):
    """Embedding, causal attention, a mixture of experts, and a head. With one expert it is a dense model."""

    def __init__(self, route: Route, experts: int = 8, top_k: int = 2, width: int = 64, vocab: int = 512, context: int = 64,
                 dim: int = 64, heads: int = 4, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.route, self.number, self.top_k, self.heads = route, experts, top_k, heads
        self.token, self.position = nn.Embedding(vocab, dim), nn.Embedding(context, dim)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.router = nn.Linear(dim, experts)        # its bias lets a lesson favor experts on purpose
        nn.init.zeros_(self.router.bias)
        self.up = nn.Parameter(torch.randn(experts, width, dim) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(experts, dim, width) * width**-0.5)
        self.head = nn.Linear(dim, vocab)

    def attention(self, x: Tensor) -> Tensor:                           # (B, T, D)
        """Causal self-attention."""
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)      # (B, heads, T, d)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)     # (B, heads, T, d)
        return self.out(y.transpose(1, 2).reshape(B, T, D))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:                 # (B, T)
        """Logits (B, T, V), and what `mixture` says of the router."""
        x = self.token(tokens) + self.position.weight[:tokens.shape[1]]                 # (B, T, D)
        x = x + self.attention(self.norm1(x))                           # (B, T, D)
        y, probabilities, experts = mixture(self, self.norm2(x).flatten(0, 1))
        return self.head(self.norm3(x + y.view_as(x))), probabilities, experts


def mixture(model: TinyExperts, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:      # (N, D)
    """The experts' output, (N, D), the router's probabilities, (N, E), and each token's experts, (N, k)."""
    if model.number == 1:
        one = torch.zeros(len(x), 1, dtype=torch.long)
        return F.gelu(x @ model.up[0].T) @ model.down[0].T, torch.ones(len(x), 1), one
    logits = model.router(x)                                         # (N, E)
    gates, experts = model.route(logits, model.top_k)                 # 2 x (N, k)
    y = torch.zeros_like(x)                                         # (N, D)
    for expert in range(model.number):
        rows, choice = (experts == expert).nonzero(as_tuple=True)   # 2 x (n,)
        out = F.gelu(x[rows] @ model.up[expert].T) @ model.down[expert].T             # (n, D)
        y = y.index_add(0, rows, out * gates[rows, choice, None])   # (N, D)
    return y, logits.softmax(-1), experts


@dataclass
class Record:
    """What training saw, step by step."""

    losses: list[float] = field(default_factory=list)
    loads: list[list[float]] = field(default_factory=list)      # each expert's share of the choices; they sum to 1


def train(model: TinyExperts, samples: Sequences, steps: int, balance: Balance | None = None, weight: float = 0.01,
          batch: int = 16, lr: float = 3e-3) -> Record:
    """Train with Adam on random samples. balance: added to the loss with this weight."""
    optimizer = torch.optim.Adam(model.parameters(), lr)
    generator, record = torch.Generator().manual_seed(0), Record()
    for _ in range(steps):
        tokens = samples.__getitems__(torch.randint(len(samples), (batch,), generator=generator).tolist())["tokens"]
        logits, probabilities, experts = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        total = loss if balance is None else loss + weight * balance(probabilities, experts)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        record.losses.append(loss.item())
        counts = torch.bincount(experts.flatten(), minlength=model.number)
        record.loads.append((counts / counts.sum()).tolist())
    return record


@torch.no_grad()
def evaluate(model: TinyExperts, samples: Sequences, batches: int = 20, batch: int = 16) -> float:
    """The mean cross-entropy of the first samples of a split."""
    losses = []
    for first in range(0, batches * batch, batch):
        tokens = samples.__getitems__(list(range(first, first + batch)))["tokens"]
        losses.append(F.cross_entropy(model(tokens[:, :-1])[0].flatten(0, 1), tokens[:, 1:].flatten()).item())
    return sum(losses) / len(losses)
