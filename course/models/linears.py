"""The sizes of a model's linear maps, from its configuration: for the layout rules and for predictions."""

from collections.abc import Iterator
from dataclasses import dataclass

from course.models import DiTConfig, GPTConfig, ModelConfig
from course.models.dit import TimestepEmbedder


@dataclass(frozen=True)
class Linear:
    """A linear map k -> n; tp cuts its output ("column"), its input ("row") or neither ("")."""

    name: str
    k: int
    n: int
    cut: str = ""
    rows: float = 1.0                               # rows per token: 1, or 1 / tokens for a map of whole samples


def linears(m: ModelConfig) -> list[Linear]:
    """The linears of a block of the serial model."""
    D, M = m.dim, m.hidden
    gated = 2 if isinstance(m, GPTConfig) and m.mlp == "swiglu" else 1
    maps = [Linear("blocks.attn.qkv", D, D + 2 * m.groups * (D // m.heads), "column"), Linear("blocks.attn.out", D, D, "row"),
            Linear("blocks.mlp.up", D, gated * M, "column"), Linear("blocks.mlp.down", M, D, "row")]
    if isinstance(m, GPTConfig) and m.experts:      # stacked weights are no linears
        S = m.shared_experts * m.expert_hidden
        maps = maps[:2 if m.moe_every == 1 else 4]
        if S:
            maps += [Linear("blocks.mlp.shared.up", D, gated * S, "column"), Linear("blocks.mlp.shared.down", S, D, "row")]
    if isinstance(m, DiTConfig):
        maps.append(Linear("blocks.ada", D, 6 * D, "column", rows=1 / m.tokens))
    return maps


def linears_on_rank(m: ModelConfig, tp: int) -> Iterator[tuple[str, int, int]]:
    """(name, inputs, outputs) of every linear on a rank; one block's linears, named without its number, stand for all blocks."""
    for one in linears(m):
        yield one.name, one.k // (tp if one.cut == "row" else 1), one.n // (tp if one.cut == "column" else 1)
    if isinstance(m, GPTConfig):
        yield "head.proj", m.dim, m.vocab // tp
        return
    patch = (m.latent[0] if isinstance(m, DiTConfig) else m.channels) * m.patch**2
    yield "embed.proj", patch, m.dim
    yield "head.proj", m.dim, patch
    if isinstance(m, DiTConfig):
        yield "embed.time.up", TimestepEmbedder.WAVES, m.dim
        yield "embed.time.down", m.dim, m.dim
        yield "head.ada", m.dim, 2 * m.dim // tp
