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
    """The linears of the serial model's blocks, each once: with experts in some of the blocks, those of both kinds."""
    if not isinstance(m, GPTConfig) or not m.experts:
        return block_linears(m)
    return list(dict.fromkeys([*(block_linears(m) if m.moe_every > 1 else []), *block_linears(m, True)]))


def block_linears(m: ModelConfig, mixture: bool = False) -> list[Linear]:
    """The linears of a block. mixture: of one with experts, whose stacked weights are no linears."""
    D, M, d, H = m.dim, m.hidden, m.head_width, m.attention_width
    gated = 2 if isinstance(m, GPTConfig) and m.mlp == "swiglu" else 1
    maps = [Linear("blocks.attn.qkv", D, H + 2 * m.groups * d, "column"), Linear("blocks.attn.out", H, D, "row"),
            Linear("blocks.mlp.up", D, gated * M, "column"), Linear("blocks.mlp.down", M, D, "row")]
    if mixture:
        assert isinstance(m, GPTConfig)
        S = m.shared_experts * m.expert_hidden
        shared = [Linear("blocks.mlp.shared.up", D, gated * S, "column"), Linear("blocks.mlp.shared.down", S, D, "row")]
        maps = maps[:2] + shared * (S > 0)
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
