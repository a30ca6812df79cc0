"""Convert checkpoints with the parameter names of facebookresearch/DiT to ours, and back.

    theirs                              ours                    what differs
    x_embedder.proj                     embed.proj              a convolution; ours is the equivalent linear map of patches
    t_embedder.mlp.0, .2                embed.time.up, .down
    y_embedder.embedding_table          embed.label             the last row is the unknown class; theirs lacks it
                                                                if no class was hidden in training
    blocks.N.attn.qkv, .proj            blocks.N.attn.qkv, .out
    blocks.N.mlp.fc1, .fc2              blocks.N.mlp.up, .down
    blocks.N.adaLN_modulation.1         blocks.N.ada
    final_layer.linear                  head.proj               outputs: (row, column, channel) there, (channel, row, column) here
    final_layer.adaLN_modulation.1      head.ada
    pos_embed                           (computed)              quarters: column sine, cosine, row sine, cosine; reversed here

Positions are added to the residual stream, so they fix the order of its features. Nothing else depends on that order: the norms
have no weights. We reverse the quarters of the residual stream in every weight that writes to it or reads from it, and the model
computes the same.

A model with learned variance has twice the channels: first the noise, then the variance. Reading takes the noise. Writing gives
zeros for the variance: the middle, on a logarithmic scale, between the smallest and the largest variance that the diffusion
allows. (Their training adjusts it; DDIM does not need it.)

Written only from the paper and from names and shapes in released files.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from course.convert.rules import Layout, Parts, Rule, Source
from course.convert.weight_files import Weights, model_in
from course.models import DiTConfig
from course.models.dit import grid_positions
from course.utils.errors import CourseError

State = Mapping[str, Tensor]
HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16}       # heads of the published widths; no shape shows them
PUBLISHED = 1000                                    # classes of all released models; their tables have one more row
# their name, our name, and the weight's side that is the residual stream: rows (or several groups of them), columns, or none
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
    """Reverse the quarters of the residual stream's `dim` features on a side of a weight: (k * dim, ...) for "rows", (n, dim) for
    "columns". With "" the weight stays as it is. `turned` is its own inverse."""
    if side == "rows":
        return x.unflatten(0, (-1, 4, dim // 4)).flip(1).flatten(0, 2)
    return x.unflatten(1, (4, dim // 4)).flip(1).flatten(1, 2) if side == "columns" else x


def settings(state: State, heads: int = 0, classes: int | None = None, label_drop: float | None = None,
             objective: Any = DiTConfig.objective) -> DiTConfig:
    """The model of such a checkpoint: its shapes show most of it, the arguments give the rest.

    The table of classes ends with a row for the unknown one only if classes were hidden in training: label_drop > 0. We assume
    that row if neither `classes` nor `label_drop` is given.
    """
    try:
        dim, channels, patch, _ = state["x_embedder.proj.weight"].shape
        side = math.isqrt(state["pos_embed"].shape[1]) * patch
        depth = sum(name.endswith("attn.qkv.weight") for name in state)
        rows = len(state["y_embedder.embedding_table.weight"])
        hidden = len(state["blocks.0.mlp.fc1.weight"])
        ratio = hidden / dim                         # 1952 / 448 is rounded: times 448 it is less than 1952
    except (KeyError, ValueError, IndexError, TypeError, ZeroDivisionError) as error:   # odd shapes
        raise CourseError(f"this is no checkpoint with the names of facebookresearch/DiT ({error}): give one of its .pt "
                          "files") from error
    heads = heads or HEADS.get(dim, 0)
    if not heads:
        raise CourseError(f"no published DiT has width {dim}, and nothing in the file shows its heads: give their number, "
                          "such as model.heads=6, or name a preset of this width with --like")
    classes, drop = labels(rows, classes, label_drop)
    return DiTConfig(latent=(channels, side, side), patch=patch, dim=dim, depth=depth, heads=heads,
                     mlp_ratio=ratio if int(dim * ratio) == hidden else math.nextafter(ratio, math.inf), classes=classes,
                     label_drop=drop, objective=objective)


def labels(rows: int, classes: int | None, drop: float | None) -> tuple[int, float]:
    """(classes, label_drop) of a table with `rows` rows; classes, drop: what is known of them, None: nothing."""
    if classes is None:
        classes = rows if drop == 0 else rows - 1
    if drop is None:
        drop = 0.0 if classes == rows else DiTConfig.label_drop
    if rows != classes + (drop > 0) and rows != classes + 1:          # a file may have the row even if it was never trained
        raise CourseError(f"the table of classes has {rows} rows, which is not one for each of {classes} classes"
                          f"{' and one for no class' if drop else ''}, as class dropout {drop:g} says: give model.classes and "
                          "model.label_drop as the model was trained")
    return classes, drop


# names of training scripts' arguments for what no shape shows; facebookresearch/DiT's own first
NAMED = {"heads": ("num_heads", "heads", "n_heads", "n_head", "num_attention_heads"),
         "classes": ("num_classes", "classes", "n_classes", "num_labels"),
         "label_drop": ("class_dropout_prob", "label_drop", "class_dropout", "class_drop_prob", "label_dropout")}
OBJECTIVES = ("objective", "prediction_type", "prediction", "parameterization")
EPSILON, FLOW = ("epsilon", "eps", "noise"), ("flow", "rectified_flow", "rectified-flow")
# other arguments about the diffusion, and the values that we support; SiT's path runs the other way, from noise at time 0
OTHERS: dict[str, tuple[Any, ...]] = {
    "predict_xstart": (False, None), "noise_schedule": ("linear", None), "diffusion_steps": (1000, None),
    "path_type": (None,)}


def arguments(says: Mapping[str, Any]) -> dict[str, Any]:
    """Our model's settings in a checkpoint's own arguments. An objective that we lack is kept as `key=value`."""
    found: dict[str, Any] = {}
    for ours, names in NAMED.items():
        value = next((says[name] for name in names if is_number(says.get(name))), None)
        if value is not None:
            found[ours] = float(value) if ours == "label_drop" else int(value)
    objective = next((key for key in OBJECTIVES if isinstance(says.get(key), str)), "")
    if objective:
        word = says[objective].lower()
        found["objective"] = "epsilon" if word in EPSILON else "flow" if word in FLOW else f"{objective}={says[objective]}"
    for key, known in OTHERS.items():
        if key in says and says[key] not in known:
            found["objective"] = f"{key}={says[key]}"
    return found


def is_number(value: Any) -> bool:
    """Whether an argument is a finite number; a boolean is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def completed(state: State, header: Any, says: Mapping[str, Any], like: DiTConfig | None, given: Mapping[str, Any]) -> DiTConfig:
    """The model of a checkpoint, most of which its shapes show. The rest comes from what the user has `given`, then the header,
    the checkpoint's arguments, and a model `like` it. Raises `CourseError` for an objective that we lack."""
    given = {key: value for key, value in given.items() if key == "objective" or (key in NAMED and is_number(value))}
    if isinstance(header, DiTConfig):
        return replace(header, heads=given.get("heads") or header.heads)
    dim = state["x_embedder.proj.weight"].shape[0] if "x_embedder.proj.weight" in state else 0
    known = {"label_drop": like.label_drop, "objective": like.objective} if like else {}
    if like and like.dim == dim:
        known["heads"] = like.heads
    said = arguments(says)
    if "classes" in said | given and "label_drop" not in said | given:
        known.pop("label_drop", None)                # the table's rows show it
    c = settings(state, **(known | said | given))
    if c.objective not in ("epsilon", "flow") and "objective" not in given:
        raise CourseError(f"this checkpoint names the objective {c.objective}, and this library's DiT learns the noise (epsilon, "
                          "by the paper's schedule) or rectified flow's velocity (flow): give model.objective if it is one of "
                          "these")
    return c


def rule(c: DiTConfig, ours: str) -> Rule:
    """The layout of one of our parameters there, and their name for it. Outputs for a learned variance are written as zeros."""
    theirs, side = next((theirs, side) for theirs, mine, side in names(c.depth) if mine == ours)

    def take(c: DiTConfig, parts: Parts) -> Tensor:
        value, = parts
        if ours.startswith("head.proj"):             # (p·p·channels, ...): keep the first channels
            value = value.unflatten(0, (c.patch**2, -1))[:, :c.latent[0]].transpose(0, 1).flatten(0, 1)
        if ours == "embed.label.weight" and len(value) == c.classes:    # add the row for the unknown class, which ours has
            value = torch.cat([value, torch.zeros_like(value[:1])])
        return turned(value.flatten(1) if value.dim() > 2 else value, side, c.dim).contiguous()

    def give(c: DiTConfig, value: Tensor) -> Parts:
        value = turned(value.flatten(0, -2) if ours.endswith("qkv.weight") else value, side, c.dim)
        if ours == "embed.label.weight" and not c.label_drop:           # the unknown class's row was never trained
            value = value[:c.classes]
        if ours == "embed.proj.weight":
            value = value.unflatten(1, (c.latent[0], c.patch, c.patch))
        if ours.startswith("head.proj"):
            value = value.unflatten(0, (c.latent[0], c.patch**2)).transpose(0, 1)       # (p·p, channels, ...)
            value = torch.cat([value, torch.zeros_like(value)], 1).flatten(0, 1)
        return value.contiguous(),

    return Layout(take, give), (theirs,)


def source(path: Path, given: Mapping[str, Any], like: DiTConfig | None = None) -> Source:
    """A file of theirs as a mapping from our names to tensors. Raises `CourseError` if it is not a complete DiT as in the paper.

    given: model settings that the user gave. like: a model to look up what neither the shapes nor the file say.
    """
    state = Weights(path)
    header, says = model_in(path, state.about()), state.says()
    c = completed(state, header, says, like, given)
    if "pos_embed" in state and not close(state["pos_embed"], positions(c)):
        raise CourseError("the positions (pos_embed) in this checkpoint are not the fixed waves of DiT: it belongs to another "
                          "model")
    found = Source(path, c, state, lambda ours: rule(c, ours), f"a DiT of {c.depth} layers",
                   "its header says" if header else "its shapes say",
                   lambda name: name == "pos_embed")
    told = header or like or {"classes", "label_drop"} & {*arguments(says), *given} or c.classes == PUBLISHED
    if not told:
        found.note = (f"{path} does not say how many classes it has: the last of {c.classes + 1} rows in their table is taken "
                      f"for 'no class'; if it is a class, give model.classes={c.classes + 1} model.label_drop=0")
    return found


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors with values from -1 to 1 agree up to bf16 rounding, the coarsest format that they come in."""
    return a.shape == b.shape and torch.allclose(a.double(), b, rtol=0, atol=torch.finfo(torch.bfloat16).eps)


def positions(c: DiTConfig) -> Tensor:
    """Their fixed position vectors of patches, (1, T, D) float64."""
    return turned(grid_positions(torch.arange(c.tokens), c.latent[2] // c.patch, c.dim), "columns", c.dim)[None]
