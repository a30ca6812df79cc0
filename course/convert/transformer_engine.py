"""Convert the blocks of a ViT or a GPT to the parameters of `te.TransformerLayer` (Transformer Engine), and back.

    theirs, in blocks.N.                        ours, in blocks.N.
    self_attention.layernorm_qkv.layer_norm_*   norm1.*             a norm and the linear after it are one module there
    self_attention.layernorm_qkv.weight, bias   attn.qkv.*
    self_attention.proj.*                       attn.out.*
    layernorm_mlp.layer_norm_*                  norm2.*
    layernorm_mlp.fc1_*, fc2_*                  mlp.up.*, mlp.down.*        SwiGLU: gates above values in both

Transformer Engine has layers, not models: parameters outside the blocks keep our names. The rows of the fused projection have one
of three orders. G = heads / kv_heads is the number of query heads that share a key-value head:

    ours            (G + 2, kv_heads, head_dim)     the first query of every group, the second ..., all keys, all values
    interleaved     (kv_heads, G + 2, head_dim)     group by group: its queries, its key, its value
    stacked         all heads of queries in order, then all keys, then all values; ours too, if G is 1
    separate        the same as three parameters, query_weight, key_weight and value_weight

In its constructor these are `fuse_qkv_params=True, qkv_weight_interleaved=True`; `True, False`; and `False`, its default. The
source is `transformer_engine/pytorch/attention/multi_head_attention.py` of NVIDIA/TransformerEngine. (Its forward pass views the
projection's output as one of the first two shapes, and lets query i attend to the keys i // G.) Interleaved and stacked rows have
the same shape, so the tensors cannot tell them apart. The header of a file that we write says which it is, `course.qkv`.

FP8: the delayed recipe keeps its scales and amax histories in `_extra_state`, a pickle, which we neither read nor write.
`course.convert.command.rebuild` rebuilds them.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from course.convert import weight_files
from course.convert.huggingface import fuse, unfuse
from course.convert.rules import SAME, Layout, Parts, Rule, Source, Table, both, look_up
from course.models import GPTConfig, ViTConfig
from course.utils.errors import CourseError

ROWS = ("interleaved", "stacked", "separate")
ABOUT = "course.qkv"                                 # the key of a file's header for the order of the rows


def groups(c: Any) -> tuple[int, int]:
    """(number of key-value heads, number of query heads that share one)."""
    kv_heads = getattr(c, "groups", c.heads)
    return kv_heads, c.heads // kv_heads


def interleave(c: Any, x: Tensor) -> Parts:
    """((G + 2) · kv_heads · d, ...) -> (kv_heads · (G + 2) · d, ...)."""
    kv_heads, group = groups(c)
    return x.unflatten(0, (group + 2, kv_heads, -1)).transpose(0, 1).flatten(0, 2),


def deinterleave(c: Any, parts: Parts) -> Tensor:
    """The inverse of `interleave`."""
    kv_heads, group = groups(c)
    return parts[0].unflatten(0, (kv_heads, group + 2, -1)).transpose(0, 1).flatten(0, 2)


def apart(c: Any, x: Tensor) -> Parts:
    """Split into queries in the order of their heads, keys, values."""
    return unfuse(c, x) if isinstance(c, GPTConfig) else x.chunk(3)


def together(c: Any, parts: Parts) -> Tensor:
    """The inverse of `apart`."""
    return fuse(c, parts) if isinstance(c, GPTConfig) else torch.cat(parts)


def unstack(c: Any, parts: Parts) -> Tensor:
    """Stacked rows in our order: ((G + 2) · kv_heads · d, ...)."""
    kv_heads, group = groups(c)
    return together(c, parts[0].split([n * c.head_width for n in (kv_heads * group, kv_heads, kv_heads)]))


QKV = {"interleaved": Layout(deinterleave, interleave), "stacked": Layout(unstack, lambda c, x: (torch.cat(apart(c, x)),)),
       "separate": Layout(together, apart)}
PROJECTION = "blocks.*.self_attention.layernorm_qkv"
MLP = "blocks.*.layernorm_mlp"


def fields(ours: str, theirs: str) -> Table:
    """The table lines of a weight and a bias that are parameters of one module there, theirs_weight and theirs_bias."""
    return {f"{ours}.{leaf}": (SAME, (f"{theirs}_{leaf}",)) for leaf in ("weight", "bias")}


def table(rows: str) -> Table:
    """The rule of every parameter in the blocks, with the rows of the fused projection in one of the orders `ROWS`."""
    parts = [f"{PROJECTION}.{part}_" for part in ("query", "key", "value")] if rows == "separate" else [f"{PROJECTION}."]
    return {**fields("blocks.*.norm1", f"{PROJECTION}.layer_norm"),
            **{f"blocks.*.attn.qkv.{leaf}": (QKV[rows], tuple(part + leaf for part in parts)) for leaf in ("weight", "bias")},
            **both("blocks.*.attn.out", SAME, "blocks.*.self_attention.proj"),
            **fields("blocks.*.norm2", f"{MLP}.layer_norm"),
            **fields("blocks.*.mlp.up", f"{MLP}.fc1"), **fields("blocks.*.mlp.down", f"{MLP}.fc2")}


def rule(ours: str, rows: str) -> Rule:
    """The layout of one of our parameters there, and their names for it."""
    return look_up(table(rows), ours) or (SAME, (ours,))


def check_model(c: Any) -> None:
    """Raise `CourseError` for a model whose blocks are not `te.TransformerLayer`s."""
    if not isinstance(c, GPTConfig | ViTConfig):
        raise CourseError("the blocks of a DiT are not Transformer Engine layers, because the condition scales and shifts "
                          "between norms and linears: convert a ViT or a GPT; fp8.by=te trains a DiT with its single modules")
    if isinstance(c, GPTConfig) and c.qk_norm:
        raise CourseError("model.qk_norm=true norms queries and keys, and this command writes no Transformer Engine layers that "
                          "do so: convert it to Hugging Face, with --to hf")


def rows_of(path: Path, tensors: weight_files.Weights, told: str = "") -> str:
    """The order of a file's rows: from its names or header, else what the user `told` us, else the first of `ROWS`.

    Raises `CourseError` if the file and the user disagree, or the header names an unknown order.
    """
    separate = any(name.endswith("layernorm_qkv.query_weight") for name in tensors)
    says = "separate" if separate else tensors.about().get(ABOUT, "")
    if says and told and says != told:
        raise CourseError(f"--qkv {told}: {path} states that its rows are {says}; leave out --qkv")
    found = says or told or ROWS[0]
    if found not in ROWS:
        raise CourseError(f"the header of {path} says {ABOUT}={found}, which is none of {', '.join(ROWS)}: give --qkv after "
                          "writing the file again")
    return found


# names of training scripts' arguments for what no shape of a layer shows; Megatron-LM's first
NAMED = {"heads": ("num_attention_heads", "num_heads", "n_head", "heads"),
         "kv_heads": ("num_query_groups", "num_gqa_groups", "num_key_value_heads", "kv_heads"),
         "norm_eps": ("layernorm_epsilon", "norm_epsilon", "layer_norm_eps", "norm_eps"),
         "rope_theta": ("rotary_base", "rope_theta")}


def completed(like: Any, says: Mapping[str, Any]) -> Any:
    """A model `like` this one, updated from a checkpoint's own arguments: the heads decide the order of the rows."""
    found: dict[str, Any] = {}
    for ours, names in NAMED.items():
        value = next((says[name] for name in names if type(says.get(name)) in (int, float)), None)
        if value is not None and hasattr(like, ours):
            found[ours] = value
    if says.get("group_query_attention") is False or found.get("kv_heads") == found.get("heads", like.heads):
        found.pop("kv_heads", None)
        found |= {"kv_heads": 0} if hasattr(like, "kv_heads") else {}
    return replace(like, **found)


def source(path: Path, c: Any, rows: str = "") -> Source:
    """A state dict of such layers as a mapping from our names to tensors. c: its model's configuration. rows: as in `rows_of`."""
    check_model(c)
    tensors = weight_files.Weights(path)
    order = rows_of(path, tensors, rows)
    return Source(path, c, tensors, lambda ours: rule(ours, order),
                  f"a {c.kind} of these settings in Transformer Engine's layers", "the settings say",
                  lambda name: name.endswith("_extra_state"))


def about(c: Any, rows: str) -> dict[str, str]:
    """The header of a file: the model, and the order of the rows."""
    return weight_files.about(c) | {ABOUT: rows}
