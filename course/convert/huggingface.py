"""GPT-2 and Llama as `transformers` writes them, to ours and back.

    model = read(folder)                            a serial GPT with the weights of a Hugging Face folder
    write(folder, model.c, serial(model))           a folder that `transformers` loads

What corresponds to what is data: `TABLES`, one line for each of our parameters. Layouts that differ:

    transposed  GPT-2 multiplies x W, we multiply x W'
    positions   ours have a dim for the sample, of one
    grouped     Llama has queries, keys and values apart, heads of queries group by group; our fused projection has rows
                (queries of a group + 2, kv_heads, head_dim)
    stacked     Llama has the gated MLP's gates and values apart, we have one above the other

Rotary positions turn the same pairs in both: number i of a head's first half with number i of the second.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from course import config as configuration
from course import random
from course.convert import weights
from course.errors import CourseError
from course.files import atomic
from course.models import GPTConfig, build_model
from course.parallel.placement import place_serial, placement

Parts = tuple[Tensor, ...]


@dataclass(frozen=True)
class Layout:
    """How one of our tensors follows from theirs, and the other way round."""

    ours: Callable[[GPTConfig, Parts], Tensor]
    theirs: Callable[[GPTConfig, Tensor], Parts]


def fuse(c: GPTConfig, parts: Parts) -> Tensor:
    """(heads · d, ...), 2 x (kv_heads · d, ...) -> ((G + 2) · kv_heads · d, ...)."""
    q, k, v = parts
    each = (c.groups, c.heads // c.groups, c.dim // c.heads)            # (g, G, d)
    queries = q.unflatten(0, each).transpose(0, 1)                      # (G, g, d, ...)
    return torch.cat([queries, *(x.unflatten(0, (1, each[0], each[2])) for x in (k, v))]).flatten(0, 2)


def unfuse(c: GPTConfig, x: Tensor) -> Parts:
    """The inverse of `fuse`."""
    group = c.heads // c.groups
    q, k, v = x.unflatten(0, (group + 2, c.groups, -1)).split([group, 1, 1])            # (G or 1, g, d, ...)
    return q.transpose(0, 1).flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2)


SAME = Layout(lambda c, parts: parts[0], lambda c, x: (x,))
TRANSPOSED = Layout(lambda c, parts: parts[0].T, lambda c, x: (x.T,))
POSITIONS = Layout(lambda c, parts: parts[0][None], lambda c, x: (x[0],))
GROUPED = Layout(fuse, unfuse)
STACKED = Layout(lambda c, parts: torch.cat(parts), lambda c, x: x.chunk(2))

Table = dict[str, tuple[Layout, tuple[str, ...]]]    # our name -> how, and their names; * is the number of the block


def both(ours: str, layout: Layout, *theirs: str) -> Table:
    """The lines of a linear's weight and bias, which have the same layout unless the weight is transposed."""
    return {f"{ours}.weight": (layout, tuple(f"{name}.weight" for name in theirs)),
            f"{ours}.bias": (SAME if layout is TRANSPOSED else layout, tuple(f"{name}.bias" for name in theirs))}


GPT2: Table = {
    "embed.token.weight": (SAME, ("transformer.wte.weight",)),
    "embed.pos": (POSITIONS, ("transformer.wpe.weight",)),
    **both("blocks.*.norm1", SAME, "transformer.h.*.ln_1"),
    **both("blocks.*.attn.qkv", TRANSPOSED, "transformer.h.*.attn.c_attn"),
    **both("blocks.*.attn.out", TRANSPOSED, "transformer.h.*.attn.c_proj"),
    **both("blocks.*.norm2", SAME, "transformer.h.*.ln_2"),
    **both("blocks.*.mlp.up", TRANSPOSED, "transformer.h.*.mlp.c_fc"),
    **both("blocks.*.mlp.down", TRANSPOSED, "transformer.h.*.mlp.c_proj"),
    **both("head.norm", SAME, "transformer.ln_f"),
    "head.proj.weight": (SAME, ("lm_head.weight",)),
}
ATTENTION = "model.layers.*.self_attn"
LLAMA: Table = {
    "embed.token.weight": (SAME, ("model.embed_tokens.weight",)),
    **both("blocks.*.norm1", SAME, "model.layers.*.input_layernorm"),
    **both("blocks.*.attn.qkv", GROUPED, f"{ATTENTION}.q_proj", f"{ATTENTION}.k_proj", f"{ATTENTION}.v_proj"),
    **both("blocks.*.attn.out", SAME, f"{ATTENTION}.o_proj"),
    **both("blocks.*.norm2", SAME, "model.layers.*.post_attention_layernorm"),
    **both("blocks.*.mlp.up", STACKED, "model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"),
    **both("blocks.*.mlp.down", SAME, "model.layers.*.mlp.down_proj"),
    **both("head.norm", SAME, "model.norm"),
    "head.proj.weight": (SAME, ("lm_head.weight",)),
}
TABLES = {"gpt2": GPT2, "llama": LLAMA}
# what older files have besides: tables that follow from the configuration, and the head of tied weights once more
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", "lm_head.weight")
GELU = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}       # the first of several is written

# config.json's keys that are ours under another name, by kind
NAMES = {"gpt2": {"vocab": "vocab_size", "context": "n_positions", "dim": "n_embd", "depth": "n_layer", "heads": "n_head",
                  "norm_eps": "layer_norm_epsilon"},
         "llama": {"vocab": "vocab_size", "context": "max_position_embeddings", "dim": "hidden_size",
                   "depth": "num_hidden_layers", "heads": "num_attention_heads", "mlp_width": "intermediate_size",
                   "norm_eps": "rms_norm_eps"}}
# and those that have to have one value, since we have no other; absent is that value
FIXED: dict[str, dict[str, Any]] = {
    "gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    "llama": {"hidden_act": "silu"}}
KIND = {"gpt2": {"norm": "layer", "position": "learned"}, "llama": {"norm": "rms", "mlp": "swiglu", "position": "rotary"}}
TIED = {"gpt2": True, "llama": False}                # where config.json does not say
CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}


def config_of(found: Mapping[str, Any]) -> GPTConfig:
    """Our configuration for the values of a config.json. Raises `CourseError` for what a GPT here cannot be."""
    kind = found.get("model_type")
    if kind not in TABLES:
        raise CourseError(f"config.json says model_type={kind}, and what can be read is {' and '.join(TABLES)}")
    for key, only in FIXED[kind].items():
        if found.get(key, only) != only:
            raise refused(key, found[key], only)
    missing = [name for name in NAMES[kind].values() if name not in found]
    if missing:
        raise CourseError(f"config.json lacks {', '.join(missing)}: give a model's folder as it was published")
    values = {ours: found[theirs] for ours, theirs in NAMES[kind].items()} | KIND[kind]
    values["tied"] = found.get("tie_word_embeddings", TIED[kind])
    c = configuration.build(GPTConfig, values | (of_gpt2(found) if kind == "gpt2" else of_llama(found)), "config.json, as ours")
    configuration.check_model(c)
    return c


def of_gpt2(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a GPT-2's config.json says in another way than we do."""
    activation = found.get("activation_function", "gelu_new")
    if activation not in GELU:
        raise refused("activation_function", activation, " or ".join(GELU))
    return {"mlp": GELU[activation], "mlp_width": found.get("n_inner") or 0}


def of_llama(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a Llama's config.json says in another way than we do."""
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise refused("rope_type", rope_type, "default")
    heads, dim = found["num_attention_heads"], found["hidden_size"]
    if (found.get("head_dim") or dim // heads) * heads != dim:
        raise refused("head_dim", found["head_dim"], f"hidden_size / num_attention_heads, {dim // heads}")
    bias = found.get("attention_bias", False)
    if found.get("mlp_bias", False) != bias:
        raise refused("mlp_bias", found.get("mlp_bias", False), f"attention_bias, {bias}")
    kv_heads = found.get("num_key_value_heads") or heads
    return {"kv_heads": 0 if kv_heads == heads else kv_heads, "bias": bias,
            "rope_theta": float(rope.get("rope_theta", found.get("rope_theta", 10_000.0)))}


def refused(key: str, value: Any, only: Any) -> CourseError:
    """The sentence for a value that we have not."""
    return CourseError(f"config.json has {key}={value}, and this library's GPT knows only {only} there: choose another model")


def kind_of(c: GPTConfig) -> str:
    """Which of their models has a GPT's parts. Raises `CourseError` if none has."""
    for kind, parts in KIND.items():
        plain = kind == "llama" or (c.mlp != "swiglu" and c.groups == c.heads and c.bias)
        if plain and all(getattr(c, key) == value for key, value in parts.items()):
            return kind
    raise CourseError(f"a GPT with norm={c.norm}, mlp={c.mlp}, position={c.position}, bias={c.bias} and {c.groups} key-value "
                      f"heads for {c.heads} is neither a GPT-2 (layer, gelu or gelu_tanh, learned, true, as many) nor a Llama "
                      "(rms, swiglu, rotary): transformers has no name for it")


def config_for(c: GPTConfig, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The values of a config.json. Raises `CourseError` for a GPT that is neither a GPT-2 nor a Llama."""
    kind = kind_of(c)
    values = {theirs: getattr(c, ours) for ours, theirs in NAMES[kind].items()} | FIXED[kind]
    if kind == "gpt2":
        activation = next(theirs for theirs, ours in GELU.items() if ours == c.mlp)
        width = None if c.hidden == 4 * c.dim else c.hidden             # None: four times the model's
        values |= {"activation_function": activation, "n_inner": width, "attn_pdrop": 0.0, "embd_pdrop": c.dropout,
                   "resid_pdrop": c.dropout}
    else:
        values |= {"intermediate_size": c.hidden, "num_key_value_heads": c.groups, "head_dim": c.dim // c.heads,
                   "attention_bias": c.bias, "mlp_bias": c.bias, "rope_theta": c.rope_theta,      # and for version 5 on:
                   "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta}}
    return {"model_type": kind, "architectures": [CLASSES[kind]], "tie_word_embeddings": c.tied,
            "dtype": str(dtype).removeprefix("torch."), "bos_token_id": None, "eos_token_id": None, **values}


def rule(kind: str, ours: str) -> tuple[Layout, tuple[str, ...]]:
    """How one of our parameters is laid out there, and their names for it."""
    number = next((part for part in ours.split(".") if part.isdigit()), "")
    layout, theirs = TABLES[kind][".".join("*" if part == number else part for part in ours.split("."))]
    return layout, tuple(name.replace("*", number) for name in theirs)


class Source:
    """A Hugging Face folder as a mapping from our serial names to tensors, one read at a time."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self.c = config_of(weights.read_json(self.folder / "config.json"))
        self.kind = kind_of(self.c)
        self.tensors = weights.Weights(self.folder)
        # GPT-2 as OpenAI's files have it: the names without "transformer."
        self.bare = self.kind == "gpt2" and not any(name.startswith("transformer.") for name in self.tensors)

    def __getitem__(self, ours: str) -> Tensor:
        layout, names = rule(self.kind, ours)
        names = tuple(self._there(name) for name in names)
        for name in names:
            if name not in self.tensors:
                raise CourseError(f"{self.folder} lacks the tensor {name}, for {ours}: its config.json is of another model")
        return layout.ours(self.c, tuple(self.tensors[name] for name in names))

    def _there(self, name: str) -> str:
        return name.removeprefix("transformer.") if self.bare else name

    def check(self, ours: Iterable[str]) -> None:
        """Raise `CourseError` if the folder has a tensor that none of our names stands for."""
        known = {self._there(name) for one in ours for name in rule(self.kind, one)[1]}
        left = [name for name in self.tensors if name not in known and not name.endswith(BUFFERS)]
        if left:
            raise CourseError(f"{self.folder} has {len(left)} tensors that a {self.kind} of its config.json has not, such as "
                              f"{left[0]}: it is of another model")


@torch.no_grad()
def fill(model: nn.Module, source: Source) -> None:
    """Give a model the weights of a folder, in whatever layout it is: each rank takes its boxes.

    Raises `CourseError` where a tensor is missing, left over or of another shape.
    """
    for parameter in model.parameters():
        where = placement(parameter)
        whole = source[where.name]
        if whole.numel() != torch.Size(where.global_shape).numel():
            raise CourseError(f"{source.folder} has {where.name} as {list(whole.shape)}, and its config.json says "
                              f"{list(where.global_shape)}: download both again")
        box = tuple(slice(*side) for side in where.box)
        part = whole.reshape(where.global_shape)[box].flatten()
        parameter.copy_((part if where.flat is None else part[slice(*where.flat)]).view(parameter.shape))


def read(folder: Path | str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """A serial GPT with the configuration and weights of a Hugging Face folder, in evaluation mode."""
    source = Source(folder)
    model = place_serial(build_model(source.c))
    source.check(placement(parameter).name for parameter in model.parameters())
    model.init_plan = lambda: {"*": "zeros"}        # type: ignore[assignment] # drawing what is read over takes long
    random.initialize(model, 0, torch.device(device), dtype)
    del model.init_plan
    fill(model, source)
    return model.eval()


def write(folder: Path | str, c: GPTConfig, tensors: Iterable[tuple[str, Tensor]], shard: int = weights.SHARD) -> None:
    """Write our serial parameters, (name, tensor), tied ones once, as a folder that `transformers` loads.

    Raises `CourseError` if it is there already, or the model is neither a GPT-2 nor a Llama.
    """
    folder, kind = Path(folder), kind_of(c)
    if folder.exists():
        raise CourseError(f"{folder} exists: name a folder that does not")
    dtypes: list[torch.dtype] = []

    def theirs() -> Iterator[tuple[str, Tensor]]:
        for ours, tensor in tensors:
            dtypes.append(tensor.dtype)
            layout, names = rule(kind, ours)
            yield from zip(names, layout.theirs(c, tensor), strict=True)

    with atomic(folder) as temporary:
        temporary.mkdir()
        weights.write(temporary, theirs(), shard)
        (temporary / "config.json").write_text(json.dumps(config_for(c, dtypes[0]), indent=1) + "\n")


def serial(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a serial model as `write` takes them."""
    for parameter in model.parameters():
        yield placement(parameter).name, parameter.detach()
