"""Bytes of weights and gradients of a rank in ZeRO's stages 2 and 3 (`course/parallel/data_parallel/fsdp.py`), moment by moment.

A unit is the embedding, a block or the head. Its weights are whole, in the matmuls' format, while it computes; the next unit's
are gathered meanwhile. Its gradients are whole from its backward pass until they are copied into one flat tensor, which the
reduce-scatter sends; the flat tensor of the unit before is in flight until then. A tied weight belongs to two units: it stays
whole for a whole pass, and is reduced last.
"""

from dataclasses import dataclass

from course.config import Config
from course.models import GPTConfig
from course.planner.parameter_memory import (
    Rank,
    block_parameters,
    block_weights,
    embedding,
    head,
    modulation,
    narrow_weights,
    over_blocks,
    per_share,
    shard_size,
    small_weights,
    wide,
)

MOMENTS = ("reduce", "embedding")                   # at which only these stages may peak


@dataclass(frozen=True)
class Unit:
    """The numbers of a unit's parameters: those of 16 bits, if the matmuls have 16 bits, all others, and those of 8 bits."""

    narrow: float = 0
    others: float = 0
    small: float = 0

    def weights(self, rank: Rank) -> float:
        """Bytes of the gathered weights."""
        return self.gradients(rank) - self.small * (wide(rank.config) - 1)

    def gradients(self, rank: Rank) -> float:
        """Bytes of the gradients until they are reduced: in the format of the weights, in float32 for those of 8 bits."""
        low = 2 if narrow_weights(rank.config) else wide(rank.config)
        return self.narrow * low + (self.others + self.small) * wide(rank.config)

    def flat(self, rank: Rank) -> float:
        """Bytes of the flat gradients that a reduce-scatter sends."""
        c = rank.config
        low = 2 if c.parallel.reduce_in == "matmul" and narrow_weights(c) else wide(c)
        return self.narrow * low + (self.others + self.small) * wide(c)


def units(rank: Rank) -> dict[str, Unit]:
    """This rank's units by name: embed, block (the largest), beside (the block next to it, which may have no experts), head, and
    shared, a tied weight whose uses are on this rank."""
    c = rank.config
    found = {"block": block_unit(c, rank.mixtures > 0), "beside": block_unit(c, rank.mixtures == rank.blocks),
             "embed": Unit(), "head": Unit(), "shared": Unit()}
    gpt = isinstance(c.model, GPTConfig)
    partial = c.parallel.sp and c.parallel.tp > 1 and not gpt           # what tp does not split has partial gradients: float32
    if rank.first:
        weights, others = embedding(c)
        found["embed"] = Unit(0, weights + others) if partial else Unit(weights, others)
    if rank.last:
        weights, others = head(c)
        cut = c.model.dim * modulation(c, 2) if partial else weights
        found["head"] = Unit(cut, weights - cut + others)
        if isinstance(c.model, GPTConfig) and (c.model.tied or c.model.loss_chunk):
            found["head"] = Unit(0, weights + others)
            if rank.first and c.model.tied:
                found["shared"], found["head"] = Unit(0, weights), Unit(0, others)
                found["embed"] = Unit(0, found["embed"].others - weights)
    return found


def block_unit(c: Config, mixture: bool) -> Unit:
    """A block, with experts or without."""
    linear, others = block_weights(c, mixture)
    rest = block_parameters(c, mixture) - linear - others
    # DiT's modulation, which fp8.keep has, and experts do not have 8 bits
    return Unit(others, rest, linear) if small_weights(c) else Unit(linear + others, rest)


def weights(rank: Rank, moment: str) -> float:
    """Bytes of the weights that are whole on a rank at a moment: with the whole pass's, those of two units."""
    c = rank.config
    parts = {name: unit.weights(rank) for name, unit in units(rank).items()}
    every = (over_blocks(rank, lambda mixture: block_unit(c, mixture).weights(rank)) + parts["embed"] + parts["head"]
             + parts["shared"])
    if c.parallel.zero == 2 or (c.parallel.reshard_after == "step" and moment != "optimizer"):
        return every
    match moment:
        case "optimizer" | "embedding":
            return 0.0
        case "reduce":                              # the block's own are freed, the embedding's are there
            return parts["embed"] + parts["shared"]
        case "loss" | "rehearsal" if c.parallel.reshard_after == "backward":
            return every
        case "backward" if c.parallel.reshard_after == "backward":
            return every - parts["head"]
        case "backward" | "end":
            return parts["block"] + parts["beside"] + parts["shared"]
        case _:
            return max(parts["head"] + parts["shared"], parts["block"] + parts["beside"])


def gradients(rank: Rank, moment: str) -> float:
    """Bytes of gradients on a rank at a moment: its share of this step's mean, and what is not yet reduced."""
    c, found = rank.config, units(rank)
    ranks, block, shared = shard_size(c), found["block"], found["shared"]
    several = rank.micros > 1
    share = per_share(rank, sum(rank.weights), rank.experts) * wide(c) * (several or moment in ("end", "optimizer", *MOMENTS))
    tied = shared.gradients(rank) * (moment in ("backward", "end", "reduce"))
    match moment:
        case "backward":                            # the head's are on their way
            return share + tied + found["head"].flat(rank) * (1 + 1 / ranks)
        case "end":                                 # those of the block after it
            return share + tied + block.flat(rank) * (1 + several / ranks)
        case "reduce":
            return share + tied + block.gradients(rank) + block.flat(rank)
        case "embedding":
            last = shared if shared.others else found["embed"]
            return share + last.gradients(rank) + last.flat(rank)
        case _:
            return share
