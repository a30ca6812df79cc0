"""Checkpoints with the parameter names of facebookresearch/DiT: into ours, and back.

    theirs                              ours                    what differs
    x_embedder.proj                     embed.proj              a convolution; ours is the same as a linear map of patches
    t_embedder.mlp.0, .2                embed.time.up, .down
    y_embedder.embedding_table          embed.label             in both the last row is the unknown class
    blocks.N.attn.qkv, .proj            blocks.N.attn.qkv, .out
    blocks.N.mlp.fc1, .fc2              blocks.N.mlp.up, .down
    blocks.N.adaLN_modulation.1         blocks.N.ada
    final_layer.linear                  head.proj               outputs: (row, column, channel) there, (channel, row, column) here
    final_layer.adaLN_modulation.1      head.ada
    pos_embed                           (computed)              quarters: column sine, cosine, row sine, cosine; reversed here

Positions are added to the residual stream, so its features have their order there. Nothing else knows it: the norms have no
weights. With the quarters of the stream reversed in every weight that writes to it or reads from it, the model computes the same.

A model with learned variance has twice the channels: first the noise, then the variance. Reading takes the noise; writing gives
zeros for the variance, which stands for the middle, on a logarithmic scale, of the smallest and the largest that the diffusion
allows. (That model's own training adjusts it; who samples by DDIM needs none.)

Written from the paper and from the names and shapes in released files alone.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from course.convert.library import Layout, Parts, Rule, Source
from course.convert.weights import Weights, model_in
from course.errors import CourseError
from course.models import DiTConfig
from course.models.dit import places

State = Mapping[str, Tensor]
HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16}       # of the published widths; no shape shows them
# their name, ours, and which side of the weight is the residual stream: its rows, its columns, or rows in groups of (n, stream)
ENDS = [("x_embedder.proj", "embed.proj", "rows"), ("t_embedder.mlp.0", "embed.time.up", ""),
        ("t_embedder.mlp.2", "embed.time.down", ""), ("y_embedder.embedding_table", "embed.label", ""),
        ("final_layer.linear", "head.proj", "columns"), ("final_layer.adaLN_modulation.1", "head.ada", "rows")]
BLOCK = [("attn.qkv", "attn.qkv", "columns"), ("attn.proj", "attn.out", "rows"), ("mlp.fc1", "mlp.up", "columns"),
         ("mlp.fc2", "mlp.down", "rows"), ("adaLN_modulation.1", "ada", "rows")]


def names(depth: int) -> Iterator[tuple[str, str, str]]:
    """(their name, our name, side of the residual stream) of every parameter."""
    parts = ENDS + [(f"blocks.{i}.{a}", f"blocks.{i}.{b}", side) for i in range(depth) for a, b, side in BLOCK]
    for theirs, ours, side in parts:
        yield f"{theirs}.weight", f"{ours}.weight", side
        if not theirs.endswith("embedding_table"):
            yield f"{theirs}.bias", f"{ours}.bias", side if side == "rows" else ""


def turned(x: Tensor, side: str, dim: int) -> Tensor:
    """Reverse the quarters of the residual stream of `dim` features on a side of a weight, (k * dim, ...) for "rows" or (n, dim)
    for "columns"; at any other side nothing is. Twice is nothing."""
    if side == "rows":
        return x.unflatten(0, (-1, 4, dim // 4)).flip(1).flatten(0, 2)
    return x.unflatten(1, (4, dim // 4)).flip(1).flatten(1, 2) if side == "columns" else x


def settings(state: State, heads: int = 0) -> DiTConfig:
    """The model that such a checkpoint is of. heads: those of its attention, if its width is none of the published ones."""
    try:
        dim, channels, patch, _ = state["x_embedder.proj.weight"].shape
        side = math.isqrt(state["pos_embed"].shape[1]) * patch
        depth = sum(name.endswith("attn.qkv.weight") for name in state)
        classes = len(state["y_embedder.embedding_table.weight"]) - 1
        hidden = len(state["blocks.0.mlp.fc1.weight"])
        ratio = hidden / dim                         # 1952 / 448, rounded, times 448 is less than 1952
    except (KeyError, ValueError, IndexError, TypeError, ZeroDivisionError) as error:   # of odd shapes
        raise CourseError(f"this is no checkpoint with the names of facebookresearch/DiT ({error}): give one of its .pt "
                          "files") from error
    heads = heads or HEADS.get(dim, 0)
    if not heads:
        raise CourseError(f"a DiT of width {dim} is none of the published ones, and nothing in the file shows its heads: "
                          "give their number as model.heads=6, say, or --like a preset of this width")
    return DiTConfig(latent=(channels, side, side), patch=patch, dim=dim, depth=depth, heads=heads,
                     mlp_ratio=ratio if int(dim * ratio) == hidden else math.nextafter(ratio, math.inf), classes=classes)


def completed(state: State, heads: int, header: Any, like: DiTConfig | None) -> DiTConfig:
    """The model of a checkpoint: as its header says; else as its shapes show, and what they do not, as a model `like` it has."""
    if isinstance(header, DiTConfig):
        return replace(header, heads=heads or header.heads)
    if like is None:
        return settings(state, heads)
    dim = state["x_embedder.proj.weight"].shape[0] if "x_embedder.proj.weight" in state else 0
    c = settings(state, heads or (like.heads if like.dim == dim else 0))
    return replace(c, label_drop=like.label_drop, objective=like.objective)


def rule(c: DiTConfig, ours: str, variance: bool = True) -> Rule:
    """How one of our parameters is laid out there, and their name for it. variance: with outputs, all zero, for a learned one."""
    theirs, side = next((theirs, side) for theirs, mine, side in names(c.depth) if mine == ours)

    def take(c: DiTConfig, parts: Parts) -> Tensor:
        value, = parts
        if ours.startswith("head.proj"):             # (p·p·channels, ...), of the channels the first
            value = value.unflatten(0, (c.patch**2, -1))[:, :c.latent[0]].transpose(0, 1).flatten(0, 1)
        return turned(value.flatten(1) if value.dim() > 2 else value, side, c.dim).contiguous()

    def give(c: DiTConfig, value: Tensor) -> Parts:
        value = turned(value.flatten(0, -2) if ours.endswith("qkv.weight") else value, side, c.dim)
        if ours == "embed.proj.weight":
            value = value.unflatten(1, (c.latent[0], c.patch, c.patch))
        if ours.startswith("head.proj"):
            value = value.unflatten(0, (c.latent[0], c.patch**2)).transpose(0, 1)       # (p·p, channels, ...)
            value = (torch.cat([value, torch.zeros_like(value)], 1) if variance else value).flatten(0, 1)
        return value.contiguous(),

    return Layout(take, give), (theirs,)


def source(path: Path, heads: int = 0, state: State | None = None, like: DiTConfig | None = None) -> Source:
    """A file of theirs as a mapping from our names to tensors. Raises `CourseError` if it is not a whole DiT of the paper's.

    like: where to look for what no shape shows, if the header does not say it.
    """
    state = read(path) if state is None else state
    header = model_in(path, state.about()) if isinstance(state, Weights) else None
    c = completed(state, heads, header, like)
    if "pos_embed" in state and not same(state["pos_embed"], positions(c)):
        raise CourseError("the positions (pos_embed) in this checkpoint are not the fixed waves of DiT: it is of another model")
    return Source(path, c, state, lambda ours: rule(c, ours), f"a DiT of {c.depth} layers",
                  "its header says" if header else "its shapes say",
                  lambda name: name == "pos_embed")


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tables of positions are one, to float32's rounding."""
    return a.shape == b.shape and not a.is_complex() and torch.allclose(a.double(), b.double(), atol=1e-5)


def from_theirs(state: State, c: DiTConfig) -> dict[str, Tensor]:
    """Our parameters by name, of a state dict of theirs; of a learned variance nothing.

    Raises `CourseError` if a parameter is missing, one is left over, or the positions are not those of the paper's code.
    """
    found, ours = source(Path("the checkpoint"), c.heads, state), [mine for _, mine, _ in names(c.depth)]
    found.check(ours)
    return {name: found[name] for name in ours}


def to_theirs(parameters: State, c: DiTConfig, variance: bool = True) -> dict[str, Tensor]:
    """A state dict of theirs, of our parameters by name. variance: with outputs, all zero, for a learned one."""
    found = {}
    for name in (mine for _, mine, _ in names(c.depth)):
        layout, (theirs,) = rule(c, name, variance)
        found[theirs], = layout.theirs(c, parameters[name])
    return found | {"pos_embed": positions(c).to(found["x_embedder.proj.weight"].dtype)}


def positions(c: DiTConfig) -> Tensor:
    """Their fixed vectors of patches, (1, T, D) float64."""
    return turned(places(torch.arange(c.tokens), c.latent[2] // c.patch, c.dim), "columns", c.dim)[None]


def read(path: Path) -> Weights:
    """The tensors of a .pt or .safetensors file, or of a folder that we wrote, each read when it is asked for; of a training
    checkpoint the moving average."""
    if not path.exists():
        raise CourseError(f"there is no file {path}: give a checkpoint of facebookresearch/DiT")
    return Weights(path)
