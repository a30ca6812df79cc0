"""A small task for a DiT, with context parallelism emulated in one process and typical bugs to insert.

The task: sums of a few plane waves. Each noisy patch can be inferred from the others if the model knows their positions. So the
loss shows when patches cannot see one another. A step takes a hundredth of a second.

An emulated rank is a slice of the batch: rank r of two has entries r·B to r·B + B, each with half of a sample's tokens. Norms,
linear layers and the loss need no change; attention gathers keys and values from all slices. So the numbers equal those of two
ranks, and a bug can be inserted where two ranks would have it, such as a separate copy of weights for each slice.
"""

import copy
from collections.abc import Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course import config, parallel
from course.models import DiTConfig, build_model, layers
from course.models.dit import DiT
from course.models.layers import Batch
from course.training import assemble
from course.utils import random

RANKS, SAMPLES, WAVES = 2, 32, 4                     # emulated ranks; samples per batch; waves per sample
MODEL = DiTConfig(latent=(1, 8, 8), patch=2, dim=48, depth=2, heads=4, classes=10, objective="flow")
RATE, WARMUP = 3e-3, 20                              # Adam: learning rate, warm-up steps
CPU = torch.device("cpu")

RIGHT = "nothing wrong"
POSITIONS = "positions begin at 0 on each rank"
OWN_NOISE = "each rank draws its own noise and time"
SAME_NOISE = "each rank draws the same noise for its half"
OWN_HALF = "attention to its own half alone"
NO_GRADIENT = "no gradient through gathered keys and values"
NOT_AVERAGED = "gradients not averaged over cp"
CONDITION = "the condition's gradients not averaged over cp"
BUGS = (POSITIONS, OWN_NOISE, SAME_NOISE, OWN_HALF, NO_GRADIENT, NOT_AVERAGED, CONDITION)


def waves(steps: int, seed: int = 0) -> Iterator[Batch]:
    """Batches of random sums of waves for a seed: `latent` (B, 1, 8, 8), `label` and `sample` (B,)."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.linspace(0, 2 * torch.pi, 9)[:8, None], torch.linspace(0, 2 * torch.pi, 9)[None, :8]
    kinds = [torch.sin((a * y + b * x) / 2 + phase) for a, b in ((0, 1), (1, 0)) for phase in (0, torch.pi / 2)]
    each = torch.stack([kind.expand(8, 8) / kind.square().mean().sqrt() for kind in kinds])             # (waves, 8, 8)
    for step in range(steps):
        size = torch.randn(SAMPLES, WAVES, generator=generator) / WAVES**0.5                            # (B, waves)
        yield {"latent": torch.einsum("bw,wyx->byx", size, each)[:, None],
               "label": torch.randint(0, MODEL.classes, (SAMPLES,), generator=generator),
               "sample": torch.arange(SAMPLES) + step * SAMPLES}


def losses(steps: int, *overrides: str, seed: int = 0, frozen: bool = False) -> Tensor:
    """The loss of each step of the library's training on waves, (steps,). `frozen`: keep FP8's scales of the first step."""
    m = MODEL
    c = config.load("dit-demo", [
        f"model.latent={list(m.latent)}", f"model.dim={m.dim}", f"model.depth={m.depth}", f"model.objective={m.objective}",
        f"optim.lr={RATE}", f"optim.warmup={WARMUP}", "optim.schedule=constant", f"train.global_batch={SAMPLES}",
        f"train.steps={steps}", f"train.seed={seed}", "train.device=cpu", *overrides])
    training, losses_of_steps = assemble.assemble(c, parallel.build_mesh(c.parallel, parallel.World(device=CPU))), []
    for batch in waves(steps, seed):
        losses_of_steps.append(training.step(batch)[0])
        if frozen:
            training.scaling.update = lambda bad: None      # type: ignore[method-assign]
    return torch.stack(losses_of_steps)


class GatheredAttention(nn.Module):
    """Attention of each slice's queries with the keys and values of all slices, which are pieces of the same samples."""

    def __init__(self, gradient: bool = True):
        super().__init__()
        self.gradient = gradient                    # whether other slices' pieces get one

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:       # 3 x (R·B, h, T / R, d)
        k, v = (torch.cat([self.seen(x.chunk(RANKS), rank) for rank in range(RANKS)]) for x in (k, v))  # 2 x (R·B, h, T, d)
        return F.scaled_dot_product_attention(q, k, v)                  # (R·B, h, T / R, d)

    def seen(self, pieces: tuple[Tensor, ...], rank: int) -> Tensor:
        """What a rank has after gathering."""
        return torch.cat([piece if self.gradient or number == rank else piece.detach() for number, piece in enumerate(pieces)], 2)


class CopyPerRank(nn.Module):
    """A module with a copy per slice: equal at first, then trained independently."""

    def __init__(self, one: nn.Module):
        super().__init__()
        self.each = nn.ModuleList(copy.deepcopy(one) for _ in range(RANKS))

    def forward(self, x: Tensor) -> Tensor:                             # (R·B, ...)
        return torch.cat([one(piece) for one, piece in zip(self.each, x.chunk(RANKS), strict=True)])


class EmbeddingPerRank(nn.Module):
    """Embed each slice separately, since its tokens have their own positions."""

    def __init__(self, embed: nn.Module, bug: str):
        super().__init__()
        other = copy.deepcopy(embed) if bug in (NOT_AVERAGED, CONDITION) else embed
        if bug == CONDITION:
            other.proj = embed.proj                 # share the token projection, not the condition
        self.each = nn.ModuleList([embed, other])

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        slices = [{name: x.chunk(RANKS)[rank] for name, x in batch.items()} for rank in range(RANKS)]
        x, c = zip(*(embed(part) for embed, part in zip(self.each, slices, strict=True)), strict=True)
        return torch.cat(x), torch.cat(c)                               # (R·B, T / R, D), (R·B, D)


def build(bug: str = RIGHT, dtype: torch.dtype = torch.float32, shake: float = 0.0) -> DiT:
    """The model whose ranks are slices of the batch, with a bug. `shake`: standard deviation of noise added to all weights."""
    model = parallel.initialize_serial(build_model(MODEL), 0, CPU, dtype)
    assert isinstance(model, DiT)
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters() if shake else ():
        p.data += shake * torch.randn(p.shape, generator=generator, dtype=dtype)
    for block in model.blocks.values():
        block.attn.core = layers.Attend() if bug == OWN_HALF else GatheredAttention(bug != NO_GRADIENT)          # type: ignore[union-attr]
    for name, module in list(model.named_modules()):
        own = bug == NOT_AVERAGED or (bug == CONDITION and name.endswith(".ada"))
        if own and isinstance(module, nn.Linear) and not name.startswith("embed."):
            model.set_submodule(name, CopyPerRank(module))
    assert model.embed is not None
    model.embed = EmbeddingPerRank(model.embed, bug)
    return model


def prepare(model: DiT, batch: Batch, step: int, bug: str = RIGHT) -> Batch:
    """A loader's batch as consecutive slices, one per emulated rank, with half of each sample's tokens."""
    pieces, normal = [], random.normal
    half = batch["latent"][0].numel() // RANKS
    for rank in range(RANKS):
        model.seed = rank if bug == OWN_NOISE else 0
        with mock.patch.object(random, "normal", (lambda k, v, d: normal(k, v % half, d)) if bug == SAME_NOISE else normal):
            ready = model.prepare(batch, torch.tensor(step))
        piece = {name: x.chunk(RANKS, 1)[rank] if name in model.token_plan else x for name, x in ready.items()}
        if bug == POSITIONS:
            piece["position"] = piece["position"] - piece["position"][:, :1]
        pieces.append(piece)
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def loss_curve(steps: int, bug: str = RIGHT) -> Tensor:
    """The losses of a training on waves with a bug, (steps,), with Adam and warm-up only."""
    model = build(bug)
    optimizer = torch.optim.Adam(model.parameters(), RATE, fused=True)
    losses_of_steps = []
    for step, batch in enumerate(waves(steps)):
        total, _ = model.loss(model(ready := prepare(model, batch, step, bug)), ready)
        loss = total / len(batch["sample"])         # the mean over whole samples, as in one process
        loss.backward()
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / WARMUP)
        optimizer.step()
        optimizer.zero_grad()
        losses_of_steps.append(loss.detach())
    return torch.stack(losses_of_steps)


def first_loss(bug: str = RIGHT, shake: float = 0.0) -> float:
    """The loss of the first step, in float64."""
    model = build(bug, torch.float64, shake)
    batch = next(waves(1))
    ready = prepare(model, batch | {"latent": batch["latent"].double()}, 0, bug)
    with torch.no_grad():
        return (model.loss(model(ready), ready)[0] / SAMPLES).item()
