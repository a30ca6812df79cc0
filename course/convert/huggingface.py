"""Convert GPT-2, Llama, Mixtral, Qwen3 and Qwen3-MoE, as `transformers` writes them, to ours and back.

    model = read(folder)                            a serial GPT with the weights of a Hugging Face folder

`TABLES` says what corresponds to what, one line for each of our parameters. These layouts differ:

    transposed  GPT-2 multiplies x W, we multiply x W'
    positions   ours have a leading dim of size 1, for the sample
    grouped     Llama has separate queries, keys and values, the query heads in groups; our fused projection has rows
                (queries of a group + 2, kv_heads, head_dim)
    stacked     Llama has separate gates and values in the gated MLP; ours stacks the gates above the values
    experts     Mixtral and Qwen3-MoE have a file entry for each matrix of each expert; ours stacks the experts
    padded      ours may have more rows than there are tokens (model.vocab=50304 for 50257, so that ranks can share them evenly)

Rotary positions rotate the same pairs in both: element i of a head's first half with element i of the second.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from course.config import schema, validation
from course.convert import weight_files
from course.convert.rules import SAME, Layout, Parts, Rule, Source, Table, both, fill, look_up
from course.data.text import end_tokens
from course.models import GPTConfig, build_model
from course.parallel.initialize import give_memory
from course.parallel.placement import serial_placements
from course.utils.errors import CourseError


def fuse(c: GPTConfig, parts: Parts) -> Tensor:
    """Fuse queries, keys and values: (heads · d, ...), 2 x (kv_heads · d, ...) -> ((G + 2) · kv_heads · d, ...)."""
    q, k, v = parts
    each = (c.groups, c.heads // c.groups, c.head_width)                # (g, G, d)
    queries = q.unflatten(0, each).transpose(0, 1)                      # (G, g, d, ...)
    return torch.cat([queries, *(x.unflatten(0, (1, each[0], each[2])) for x in (k, v))]).flatten(0, 2)


def unfuse(c: GPTConfig, x: Tensor) -> Parts:
    """The inverse of `fuse`."""
    group = c.heads // c.groups
    q, k, v = x.unflatten(0, (group + 2, c.groups, -1)).split([group, 1, 1])            # (G or 1, g, d, ...)
    return q.transpose(0, 1).flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2)


def pad(c: GPTConfig, parts: Parts) -> Tensor:
    """Give each token a row, (words, D) -> (vocab, D). Padding is the mean of all rows.

    A padding logit is then the mean of all logits. The exponential is convex, so padding takes at most an average token's share
    of the softmax: the loss grows by less than (vocab - words) / words. A row of zeros would have logit 0, more than any token if
    all logits are negative, as GPT-2's are. Training updates padding like any row, as in Megatron.
    """
    rows, = parts
    more = c.vocab - len(rows)
    if len(rows) != c.words or not more:
        return rows                                  # nothing to pad, or a wrong size, which `Source.part` refuses
    mean = rows.mean(0, keepdim=True, dtype=torch.promote_types(rows.dtype, torch.float32))
    return torch.cat([rows, mean.to(rows.dtype).expand(more, -1)])


TRANSPOSED = Layout(lambda c, parts: parts[0].T, lambda c, x: (x.T,))
PADDED = Layout(pad, lambda c, x: (x[:c.words],))
POSITIONS = Layout(lambda c, parts: parts[0][None], lambda c, x: (x[0],))
GROUPED = Layout(fuse, unfuse)
STACKED = Layout(lambda c, parts: torch.cat(parts), lambda c, x: x.chunk(2))
# all experts' gates, (H, D) each, then all their values <-> (E, 2, H, D)
GATED_EXPERTS = Layout(lambda c, parts: torch.stack(parts).unflatten(0, (2, -1)).transpose(0, 1),
                       lambda c, x: x.transpose(0, 1).flatten(0, 1).unbind())
EXPERTS = Layout(lambda c, parts: torch.stack(parts), lambda c, x: x.unbind())          # (D, H) each <-> (E, D, H)


HEAD = "lm_head.weight"
GPT2: Table = {
    "embed.token.weight": (PADDED, ("transformer.wte.weight",)),
    "embed.pos": (POSITIONS, ("transformer.wpe.weight",)),
    **both("blocks.*.norm1", SAME, "transformer.h.*.ln_1"),
    **both("blocks.*.attn.qkv", TRANSPOSED, "transformer.h.*.attn.c_attn", bias=SAME),
    **both("blocks.*.attn.out", TRANSPOSED, "transformer.h.*.attn.c_proj", bias=SAME),
    **both("blocks.*.norm2", SAME, "transformer.h.*.ln_2"),
    **both("blocks.*.mlp.up", TRANSPOSED, "transformer.h.*.mlp.c_fc", bias=SAME),
    **both("blocks.*.mlp.down", TRANSPOSED, "transformer.h.*.mlp.c_proj", bias=SAME),
    **both("head.norm", SAME, "transformer.ln_f"),
    "head.proj.weight": (PADDED, (HEAD,)),
}
ATTENTION = "model.layers.*.self_attn"
LLAMA: Table = {
    "embed.token.weight": (PADDED, ("model.embed_tokens.weight",)),
    **both("blocks.*.norm1", SAME, "model.layers.*.input_layernorm"),
    **both("blocks.*.attn.qkv", GROUPED, f"{ATTENTION}.q_proj", f"{ATTENTION}.k_proj", f"{ATTENTION}.v_proj"),
    **both("blocks.*.attn.out", SAME, f"{ATTENTION}.o_proj"),
    **both("blocks.*.norm2", SAME, "model.layers.*.post_attention_layernorm"),
    **both("blocks.*.mlp.up", STACKED, "model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"),
    **both("blocks.*.mlp.down", SAME, "model.layers.*.mlp.down_proj"),
    **both("head.norm", SAME, "model.norm"),
    "head.proj.weight": (PADDED, (HEAD,)),
}
MOE = "model.layers.*.block_sparse_moe"
MIXTRAL: Table = {                                   # {}: the number of each expert
    **{ours: theirs for ours, theirs in LLAMA.items() if ".mlp." not in ours},
    "blocks.*.mlp.router.weight": (SAME, (f"{MOE}.gate.weight",)),
    "blocks.*.mlp.experts.up": (GATED_EXPERTS, (f"{MOE}.experts.{{}}.w1.weight", f"{MOE}.experts.{{}}.w3.weight")),
    "blocks.*.mlp.experts.down": (EXPERTS, (f"{MOE}.experts.{{}}.w2.weight",)),
}
QWEN3: Table = LLAMA | {
    "blocks.*.attn.q_norm.weight": (SAME, (f"{ATTENTION}.q_norm.weight",)),
    "blocks.*.attn.k_norm.weight": (SAME, (f"{ATTENTION}.k_norm.weight",)),
}
EXPERT = "model.layers.*.mlp.experts.{}"
QWEN3_MOE: Table = QWEN3 | {                         # some blocks may have an MLP
    "blocks.*.mlp.router.weight": (SAME, ("model.layers.*.mlp.gate.weight",)),
    "blocks.*.mlp.experts.up": (GATED_EXPERTS, (f"{EXPERT}.gate_proj.weight", f"{EXPERT}.up_proj.weight")),
    "blocks.*.mlp.experts.down": (EXPERTS, (f"{EXPERT}.down_proj.weight",)),
}
TABLES = {"gpt2": GPT2, "llama": LLAMA, "mixtral": MIXTRAL, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE}
# in older files only: tables that follow from the configuration, and a second copy of a tied head
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", HEAD)
GELU = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}       # we write the first of several names

# our settings and config.json's names for them, by kind
OF_LLAMA = {"vocab": "vocab_size", "context": "max_position_embeddings", "dim": "hidden_size", "depth": "num_hidden_layers",
            "heads": "num_attention_heads", "mlp_width": "intermediate_size", "norm_eps": "rms_norm_eps"}
NAMES = {"gpt2": {"vocab": "vocab_size", "context": "n_positions", "dim": "n_embd", "depth": "n_layer", "heads": "n_head",
                  "norm_eps": "layer_norm_epsilon"},
         "llama": OF_LLAMA, "mixtral": OF_LLAMA | {"experts": "num_local_experts", "top_k": "num_experts_per_tok"},
         "qwen3": OF_LLAMA, "qwen3_moe": OF_LLAMA | {"experts": "num_experts", "top_k": "num_experts_per_tok",
                                                     "expert_width": "moe_intermediate_size"}}
OPTIONAL = {"moe_every": ("decoder_sparse_step", 1), "norm_topk": ("norm_topk_prob", False)}       # of a Qwen3-MoE, if absent
STRETCH = {"rope_factor": "factor", "rope_low": "low_freq_factor", "rope_high": "high_freq_factor",
           "rope_context": "original_max_position_embeddings"}           # of rope_type=llama3
# keys that must have this value, the only one that we support; an absent key counts as it
FIXED: dict[str, dict[str, Any]] = {
    "gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    "llama": {"hidden_act": "silu"}, "mixtral": {"hidden_act": "silu", "router_jitter_noise": 0.0},
    "qwen3": {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    "qwen3_moe": {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "mlp_only_layers": []}}
# the same for keys that we never write: they mark models, or formats of weights, that we lack
FOREIGN = {"partial_rotary_factor": 1, "sliding_window": None, "quantization_config": None, "auto_map": None}
PARTS = {"norm": "rms", "mlp": "swiglu", "position": "rotary", "qk_norm": False}        # of a Llama
NORMED = PARTS | {"qk_norm": True, "bias": False}            # of a Qwen3
ROUTED = {"bias": False, "shared_experts": 0, "routing": "softmax", "balance_rate": 0.0, "capacity_factor": 0.0}
KIND: dict[str, dict[str, Any]] = {
    "gpt2": {"norm": "layer", "position": "learned", "head_dim": 0, "qk_norm": False, "experts": 0},
    "llama": PARTS | {"experts": 0}, "mixtral": PARTS | ROUTED | {"moe_every": 1, "norm_topk": True},
    "qwen3": NORMED | {"experts": 0}, "qwen3_moe": NORMED | ROUTED}
# what config.json does not say
ROPE_THETA = {"llama": 10_000.0, "mixtral": 1_000_000.0, "qwen3": 10_000.0, "qwen3_moe": 10_000.0}
TIED = {"gpt2": True, "llama": False, "mixtral": False, "qwen3": False, "qwen3_moe": False}
HEAD_DIM = {"qwen3": 128}                                    # other models divide their width by their heads
CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM", "qwen3": "Qwen3ForCausalLM",
           "qwen3_moe": "Qwen3MoeForCausalLM"}


def config_of(found: Mapping[str, Any]) -> GPTConfig:
    """Our configuration for the values of a config.json. Raises `CourseError` for a model that our GPT cannot be."""
    kind = found.get("model_type")
    if not isinstance(kind, str) or kind not in TABLES:
        raise CourseError(f"config.json says model_type={kind}, and this command reads {', '.join(TABLES)}")
    found = of_qwen3(found) if kind.startswith("qwen3") else found
    for key, only in (FIXED[kind] | FOREIGN).items():
        if found.get(key, only) != only and not (key in FOREIGN and found[key] is None):
            raise refused(key, found[key], only)
    missing = [name for name in NAMES[kind].values() if name not in found]
    if missing:
        raise CourseError(f"config.json lacks {', '.join(missing)}: give a model's folder as it was published")
    values = {ours: found[theirs] for ours, theirs in NAMES[kind].items()} | KIND[kind]
    values["tied"] = found.get("tie_word_embeddings", TIED[kind])
    if kind == "qwen3_moe":
        values |= {ours: found.get(theirs, default) for ours, (theirs, default) in OPTIONAL.items()}
    if values.get("top_k") == 1 and values.get("norm_topk"):            # its gate is 1, and ours the probability
        raise refused(NAMES[kind]["top_k"], 1, "2 or more" + (" with norm_topk_prob=True" if kind == "qwen3_moe" else ""))
    c = schema.build(GPTConfig, values | (of_gpt2(found) if kind == "gpt2" else of_llama(found)), "config.json, as ours")
    validation.check_model(c)
    return c


def of_gpt2(found: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a GPT-2's config.json expresses differently from ours."""
    activation = found.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in GELU:
        raise refused("activation_function", activation, " or ".join(GELU))
    return {"mlp": GELU[activation], "mlp_width": found.get("n_inner") or 0}


def of_qwen3(found: Mapping[str, Any]) -> dict[str, Any]:
    """A Qwen3's values as its published config.json has them. `transformers` 5 writes num_experts under another name.

    Raises `CourseError` for layers whose attention sees a window. sliding_window is the size of a window that none uses.
    """
    values = {key: value for key, value in found.items() if key != "sliding_window"}
    if "num_experts" not in values and "num_local_experts" in values:
        values["num_experts"] = values["num_local_experts"]
    values["mlp_only_layers"] = values.get("mlp_only_layers") or []
    kinds = values.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise refused("layer_types", kinds, "full_attention")
    return values


def of_llama(found: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the config.json of a Llama, Mixtral or Qwen3 expresses differently from ours."""
    rope = rope_of(found)
    sizes = {key: found.get(key) for key in ("num_attention_heads", "hidden_size", "num_key_value_heads", "head_dim")}
    if sizes["num_key_value_heads"] is None:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if sizes["head_dim"] is None:
        sizes["head_dim"] = HEAD_DIM.get(found["model_type"])
    for key, value in sizes.items():
        if (type(value) is not int or not 1 <= value <= validation.LARGEST["model"]) and (key, value) != ("head_dim", None):
            raise refused(key, value, "whole numbers from 1 on that a model can have")
    heads, dim, kv_heads, width = sizes.values()
    bias = found.get("attention_bias", False)
    if found.get("mlp_bias", False) != bias:
        raise refused("mlp_bias", found.get("mlp_bias", False), f"attention_bias, {bias}")
    shared = width is None or width * heads == dim   # the model's width
    return {"kv_heads": 0 if kv_heads == heads else kv_heads, "head_dim": 0 if shared else width, "bias": bias,
            "rope_theta": rope.get("rope_theta", found.get("rope_theta", ROPE_THETA[found["model_type"]])),
            **(of_llama3(rope) if rope.get("rope_type") == "llama3" else {})}


def rope_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """A Llama's rotary settings in config.json: `transformers` 4 calls them rope_scaling, 5 rope_parameters."""
    said: list[dict[str, Any]] = []
    for key in ("rope_parameters", "rope_scaling"):
        given = found.get(key) or {}
        if not isinstance(given, dict):
            raise refused(key, given, "names and values")
        rope = {"rope_type": given.get("rope_type", given.get("type", "default"))}
        rope |= {name: value for name, value in given.items() if name not in ("rope_type", "type")}
        if rope["rope_type"] not in ("default", "llama3"):
            raise refused("rope_type", rope["rope_type"], "default and llama3")
        if rope.pop("partial_rotary_factor", None) not in (None, 1):
            raise refused(f"{key}.partial_rotary_factor", given["partial_rotary_factor"], 1)
        known = ("rope_type", "rope_theta", *(STRETCH.values() if rope["rope_type"] == "llama3" else ()))
        if strange := next((name for name in rope if name not in known), ""):
            raise refused(f"{key}.{strange}", rope[strange], ", ".join(known))
        said += [rope] if given else []
    if len(said) > 1 and any(said[0].get(name, value) != value for name, value in said[1].items()):
        raise refused("rope_scaling", said[1], f"the same as in rope_parameters, {said[0]},")
    return {name: value for rope in reversed(said) for name, value in rope.items()}


def of_llama3(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of stretched rotary positions, as in Llama 3.1 and later."""
    if missing := [theirs for theirs in STRETCH.values() if theirs not in rope]:
        raise CourseError(f"config.json has rope_type=llama3 without {', '.join(missing)}: give a model's folder as it was "
                          "published")
    return {ours: rope[theirs] for ours, theirs in STRETCH.items()}


def rope_for(c: GPTConfig) -> dict[str, Any]:
    """A GPT's rotary settings, as a Llama's config.json has them."""
    if c.stretch is None:
        return {"rope_type": "default", "rope_theta": c.rope_theta}
    return {"rope_type": "llama3", "rope_theta": c.rope_theta} | {theirs: getattr(c, ours) for ours, theirs in STRETCH.items()}


def refused(key: str, value: Any, only: Any) -> CourseError:
    """The error for a value that we do not support."""
    return CourseError(f"config.json has {key}={value}, and this library's GPT supports only {only}: choose another model")


def kind_of(c: GPTConfig) -> str:
    """The `transformers` model that has a GPT's parts. Raises `CourseError` if there is none."""
    for kind, parts in KIND.items():
        plain = {"gpt2": c.mlp != "swiglu" and c.groups == c.heads and c.bias, "mixtral": c.experts and c.top_k > 1,
                 "qwen3_moe": c.experts}
        if plain.get(kind, True) and all(getattr(c, key) == value for key, value in parts.items()):
            return kind
    raise CourseError(f"a GPT with norm={c.norm}, mlp={c.mlp}, position={c.position}, bias={c.bias}, {c.groups} key-value heads "
                      f"for {c.heads} and {c.experts} experts is neither a GPT-2 (layer, gelu or gelu_tanh, learned, true, as "
                      "many, 0) nor a Llama (rms, swiglu, rotary, 0 experts) nor a Mixtral (as Llama, without bias, with softmax "
                      "routing to 2 or more experts in every block, no shared ones) nor a Qwen3 or Qwen3-MoE (as Llama, with "
                      "qk_norm, without bias and shared experts): this command has no name for it")


def config_for(c: GPTConfig, dtype: torch.dtype = torch.float32, last: Sequence[int] = ()) -> dict[str, Any]:
    """The values of a config.json. last: the tokens that end a text.

    Raises `CourseError` for a GPT that is none of these models.
    """
    kind = kind_of(c)
    values = {theirs: getattr(c, ours) for ours, theirs in NAMES[kind].items()} | FIXED[kind] | {"vocab_size": c.words}
    if kind == "gpt2":
        activation = next(theirs for theirs, ours in GELU.items() if ours == c.mlp)
        width = None if c.hidden == 4 * c.dim else c.hidden             # None: four times the model's
        values |= {"activation_function": activation, "n_inner": width, "attn_pdrop": 0.0, "embd_pdrop": c.dropout,
                   "resid_pdrop": c.dropout}
    else:
        values |= {"intermediate_size": c.expert_hidden if kind == "mixtral" else c.hidden, "num_key_value_heads": c.groups,
                   "head_dim": c.head_width, "rope_theta": c.rope_theta,                          # and from version 5 on:
                   "rope_parameters": rope_for(c)}
        values |= {"attention_bias": c.bias, "mlp_bias": c.bias} if kind == "llama" else {}
        # their balance loss is top_k, and ours 1, for balanced experts
        values |= {"router_aux_loss_coef": c.balance_loss / c.top_k} if c.experts else {}
        if kind == "qwen3_moe":
            values |= {"moe_intermediate_size": c.expert_hidden, "decoder_sparse_step": c.moe_every,
                       "norm_topk_prob": c.norm_topk and c.top_k > 1}
        if c.stretch is not None:                   # version 4 reads this; without it, it would assume plain positions
            values["rope_scaling"] = {key: value for key, value in rope_for(c).items() if key != "rope_theta"}
    return {"model_type": kind, "architectures": [CLASSES[kind]], "tie_word_embeddings": c.tied,
            "dtype": str(dtype).removeprefix("torch."), "bos_token_id": None, "eos_token_id": end_tokens.as_value(last),
            **values}


def rule(c: GPTConfig, ours: str, bare: bool = False) -> Rule:
    """The layout of one of our parameters there, and their names for it; bare: without "transformer." before them."""
    entry = look_up(TABLES[kind_of(c)], ours)
    assert entry is not None, ours
    names = [name.removeprefix("transformer.") if bare else name for name in entry[1]]
    return entry[0], tuple(name.format(expert) for name in names for expert in range(c.experts if "{}" in name else 1))


def completed(c: GPTConfig, header: Any, like: GPTConfig | None) -> GPTConfig:
    """The model of a config.json. What config.json cannot say comes from the header, else from a model `like` it."""
    if isinstance(header, GPTConfig) and config_of(config_for(header)) == c:
        return header
    return c if like is None else replace(c, dropout=like.dropout, loss_chunk=like.loss_chunk)


def source(folder: Path | str, like: GPTConfig | None = None) -> Source:
    """A Hugging Face folder as a mapping from our serial names to tensors, read one at a time.

    like: a model to look up what neither config.json nor the files' header says.
    """
    folder = Path(folder)
    c = config_of(weight_files.read_json(folder / "config.json"))
    kind, tensors = kind_of(c), weight_files.Weights(folder)
    c = completed(c, weight_files.model_in(folder, tensors.about()), like)
    # OpenAI's files of GPT-2 have names without "transformer."
    bare = kind == "gpt2" and not any(name.startswith("transformer.") for name in tensors)
    embedding = rule(c, "embed.token.weight", bare)[1][0]
    if c.tied and {HEAD, embedding} <= set(tensors) and not same(tensors[HEAD], tensors[embedding]):
        raise CourseError(f"{folder} has one weight for embedding and head by its config.json, and two that differ, {embedding} "
                          f"and {HEAD}, in its files: set tie_word_embeddings to false there if both were trained")
    return Source(folder, c, tensors, lambda ours: rule(c, ours, bare), f"a {kind} of its config.json", "its config.json says",
                  lambda name: name.endswith(BUFFERS))


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, compared in the smaller of their formats."""
    kind = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(a.to(kind), b.to(kind))


def read(folder: Path | str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """A serial GPT with the configuration and weights of a Hugging Face folder, in evaluation mode."""
    found = source(folder)
    model = build_model(found.c)
    placements = serial_placements(model)
    found.check(where.name for where in placements.values())
    for parameter in model.parameters():
        give_memory(parameter, torch.empty(parameter.shape, device=device, dtype=dtype))
    fill(model.parameters(), placements, found)
    return model.eval()


def beside(c: GPTConfig, dtype: torch.dtype, files: Mapping[str, list[weight_files.Entry]], last: Sequence[int]) -> dict[str,
                                                                                                                         str]:
    """The texts beside the weight files, by name."""
    found = {"config.json": json.dumps(config_for(c, dtype, last), indent=1) + "\n"}
    found |= {end_tokens.NOTE: end_tokens.as_text(last)} if last else {}
    return found | ({f"{weight_files.FILES[0]}.index.json": json.dumps(weight_files.index_of(files), indent=1)} if len(files) > 1
                    else {})
