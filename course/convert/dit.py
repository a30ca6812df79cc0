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

import torch
from safetensors.torch import load_file
from torch import Tensor

from course import checkpoint, config, random
from course.errors import CourseError
from course.evaluate import load_model, read_config
from course.files import atomic
from course.models import DiTConfig, build_model
from course.models.dit import places
from course.parallel import Axis, place_serial
from course.step import Progress

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
    """Reverse the quarters of the residual stream of `dim` features on a side of a weight; twice is nothing."""
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
    except (KeyError, ValueError) as error:
        raise CourseError(f"this is no checkpoint with the names of facebookresearch/DiT ({error}): give one of its .pt "
                          "files") from error
    heads = heads or HEADS.get(dim, 0)
    if not heads:
        raise CourseError(f"a DiT of width {dim} is none of the published ones, and nothing in the file shows its heads: "
                          "give their number")
    return DiTConfig(latent=(channels, side, side), patch=patch, dim=dim, depth=depth, heads=heads, mlp_ratio=hidden / dim,
                     classes=classes)


def from_theirs(state: State, c: DiTConfig) -> dict[str, Tensor]:
    """Our parameters by name, of a state dict of theirs; of a learned variance nothing.

    Raises `CourseError` if a parameter is missing, one is left over, or the positions are not those of the paper's code.
    """
    wanted = {theirs for theirs, _, _ in names(c.depth)} | {"pos_embed"}
    if wanted != set(state):
        one = min(wanted ^ set(state))
        raise CourseError(f"this is no DiT of {c.depth} layers: {one} is {'missing' if one in wanted else 'not a part of one'}; "
                          "give a whole checkpoint of that model")
    if not torch.allclose(state["pos_embed"].double(), positions(c), atol=1e-5):
        raise CourseError("the positions (pos_embed) in this checkpoint are not the fixed waves of DiT: it is of another model")
    found = {}
    for theirs, ours, side in names(c.depth):
        value = state[theirs]
        if ours.startswith("head.proj"):            # (p·p·channels, ...), of the channels the first
            value = value.unflatten(0, (c.patch**2, -1))[:, :c.latent[0]].transpose(0, 1).flatten(0, 1)
        found[ours] = turned(value.flatten(1) if value.dim() > 2 else value, side, c.dim).contiguous()
    return found


def to_theirs(parameters: State, c: DiTConfig, variance: bool = True) -> dict[str, Tensor]:
    """A state dict of theirs, of our parameters by name. variance: with outputs, all zero, for a learned one."""
    found = {}
    for theirs, ours, side in names(c.depth):
        value = turned(parameters[ours].flatten(0, -2) if ours.endswith("qkv.weight") else parameters[ours], side, c.dim)
        if ours == "embed.proj.weight":
            value = value.unflatten(1, (c.latent[0], c.patch, c.patch))
        if ours.startswith("head.proj"):
            value = value.unflatten(0, (c.latent[0], c.patch**2)).transpose(0, 1)       # (p·p, channels, ...)
            value = (torch.cat([value, torch.zeros_like(value)], 1) if variance else value).flatten(0, 1)
        found[theirs] = value.contiguous()
    return found | {"pos_embed": positions(c).to(found["x_embedder.proj.weight"].dtype)}


def positions(c: DiTConfig) -> Tensor:
    """Their fixed vectors of patches, (1, T, D) float64."""
    return turned(places(torch.arange(c.tokens), c.latent[2] // c.patch, c.dim), "columns", c.dim)[None]


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a .pt or .safetensors file, in host memory; of a training checkpoint the moving average."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise CourseError(f"there is no file {path}: give a checkpoint of facebookresearch/DiT") from error
    except Exception as error:                      # weights_only raises what the bytes suggest, RuntimeError to KeyError
        why = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise CourseError(f"{path} is damaged, or holds more than tensors, which is not read ({why}): give a file of "
                          "weights alone, such as DiT-XL-2-256x256.pt") from error
    found = found.get("ema", found.get("model", found)) if isinstance(found, dict) else found
    if not isinstance(found, dict) or not all(torch.is_tensor(value) for value in found.values()):
        raise CourseError(f"{path} holds no weights by name: give a checkpoint of facebookresearch/DiT")
    return found


def to_run(path: Path, run: Path, heads: int = 0) -> Path:
    """Make the folder of a run, at step 0, of a file of theirs: for `course generate`, or to train on. Returns its checkpoint."""
    if run.exists():
        raise CourseError(f"{run} exists already: choose another folder, or remove it")
    state = read(path)
    c = settings(state, heads)
    made = config.load("dit-xl")
    log = replace(made.log, dir=str(run.parent.parent), name=run.name)
    made = replace(made, preset=run.parent.name or "dit", model=c, log=log)
    model = random.initialize(place_serial(build_model(c)), 0, torch.device("cpu"))
    model.load_state_dict(from_theirs(state, c))
    progress = {**Progress.start(made, torch.device("cpu")).state(), "samples": 0}
    holder = torch.optim.SGD(model.parameters())    # without states
    written = checkpoint.save(run / "checkpoints", holder, progress, config.as_plain(made), Axis("all"))
    config.save(made, run / "config.yaml")
    return written


def from_run(run: Path, path: Path, average: bool = False) -> None:
    """Write the weights of a run, or their moving average, with their names: a .safetensors file, nothing pickled."""
    made = read_config(run)
    if not isinstance(made.model, DiTConfig):
        raise CourseError(f"{run} is of a model of kind {made.model.kind}: only a DiT has DiT's names")
    if path.suffix != ".safetensors":
        raise CourseError(f"{path}: weights are written as .safetensors, never pickled; choose that ending")
    model, _ = load_model(run, made, torch.device("cpu"), average)
    with atomic(path) as temporary:
        checkpoint.save_tensors(to_theirs({name: p.detach() for name, p in model.named_parameters()}, made.model), temporary)
