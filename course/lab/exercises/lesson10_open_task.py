"""Lesson 10's open task: a transformer block that is tensor parallel and sequence parallel."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from course.lab.checks import random_inputs, return_values, tiny_training
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.instruments.bytes_sent import Traffic, piece_bytes
from course.lab.sandbox.limits import Limits
from course.parallel import mappings
from course.parallel.mesh import Axis

DIM, HEADS, HEAD_DIM, HIDDEN = 16, 4, 4, 48
COLUMN = ("qkv.weight", "qkv.bias", "up.weight", "up.bias")             # cut by rows
ROW = ("out.weight", "down.weight")                                     # cut by columns
SHARED = ("norm1.weight", "norm1.bias", "out.bias", "norm2.weight", "norm2.bias", "down.bias")


def parallel_block(x: Tensor, weights: dict[str, Tensor], head_dim: int, axis: Axis, tokens: int) -> Tensor:
    """A pre-norm transformer block, of which each rank computes its own heads and hidden units.

    x: this rank's tokens, (B, t, D), of `tokens` in all. Returns the block's output for these tokens.
    weights: this rank's part. "qkv.weight" (3 h d, D) with rows (3, h, d) for its h heads, "qkv.bias",
    "out.weight" (D, h d), "up.weight" (hidden / ranks, D), "up.bias", "down.weight" (D, hidden / ranks).
    Whole on every rank, (D,): "out.bias", "down.bias", "norm1.weight", "norm1.bias", "norm2.weight", ...
    """
    def shared(name: str) -> Tensor:
        return mappings.copy(weights[name], axis)     # each rank has the gradient of its own tokens

    def all_tokens(x: Tensor, norm: str) -> Tensor:
        y = F.layer_norm(x, x.shape[-1:], shared(f"{norm}.weight"), shared(f"{norm}.bias"))      # (B, t, D)
        return mappings.gather(y, 1, axis, tokens)                                               # (B, T, D)

    y = all_tokens(x, "norm1")
    qkv = F.linear(y, weights["qkv.weight"], weights["qkv.bias"]).unflatten(-1, (3, -1, head_dim))
    q, k, v = qkv.permute(2, 0, 3, 1, 4)              # 3 x (B, h, T, d)
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)                       # (B, T, h d)
    x = x + mappings.scatter(F.linear(y, weights["out.weight"]), 1, axis) + shared("out.bias")   # (B, t, D)
    y = all_tokens(x, "norm2")
    y = F.gelu(F.linear(y, weights["up.weight"], weights["up.bias"]))
    return x + mappings.scatter(F.linear(y, weights["down.weight"]), 1, axis) + shared("down.bias")


def draw(seed: int, hidden: bool) -> Tensors:
    """A block's whole weights, activations and their gradient; no number of ranks divides the tokens."""
    generator = random_inputs.generator(seed)
    shapes = {"qkv.weight": (3 * DIM, DIM), "qkv.bias": (3 * DIM,), "out.weight": (DIM, DIM), "up.weight": (HIDDEN, DIM),
              "up.bias": (HIDDEN,), "down.weight": (DIM, HIDDEN)} | dict.fromkeys(SHARED, (DIM,))
    activations = dict.fromkeys(("x", "grad"), (3 if hidden else 2, 13 if hidden else 7, DIM))
    return {name: random_inputs.normal(generator, *shape) / shape[-1]**0.5 for name, shape in (shapes | activations).items()}


def part_of(inputs: Tensors, axis: Axis) -> Tensors:
    """This rank's part of every weight."""
    qkv = {name: inputs[name].unflatten(0, (3, HEADS, HEAD_DIM)).tensor_split(axis.size, 1)[axis.rank].flatten(0, 2)
           for name in ("qkv.weight", "qkv.bias")}
    up = {name: inputs[name].tensor_split(axis.size, 0)[axis.rank] for name in ("up.weight", "up.bias")}
    down = {name: inputs[name].tensor_split(axis.size, 1)[axis.rank] for name in ROW}
    return {name: part.clone().requires_grad_() for name, part in
            (qkv | up | down | {name: inputs[name] for name in SHARED}).items()}


def run(inputs: Tensors) -> Tensors:
    """The block's output and gradients on this rank, what it sends, and how many whole activations it keeps."""
    axis = tiny_training.mesh(tiny_training.settings(f"parallel.tp={dist.get_world_size()}", "model.heads=4")).tp
    weights, tokens = part_of(inputs, axis), inputs["x"].shape[1]
    x = mappings.shard(inputs["x"], 1, axis).clone().requires_grad_()
    whole: set[int] = set()                           # addresses of saved tensors with all tokens and channels

    def note(saved: Tensor) -> Tensor:
        if saved.numel() == inputs["x"].numel():
            whole.add(saved.untyped_storage().data_ptr())
        return saved

    with Traffic() as traffic, torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        given = {name: weight.view_as(weight) for name, weight in weights.items()}
        y = return_values.tensor(parallel_block(x, given, HEAD_DIM, axis, tokens), "parallel_block", tuple(x.shape), x.dtype)
        y.backward(mappings.shard(inputs["grad"], 1, axis))
    gradients = {name: weight.grad if weight.grad is not None else torch.zeros_like(weight) for name, weight in weights.items()}
    vectors = 2 * (axis.size - 1) / axis.size * sum(inputs[name].nbytes for name in SHARED)
    budget = 8 * piece_bytes(inputs["x"], 1, axis.size) + vectors
    return {"value": y.detach(), "back": x.grad if x.grad is not None else torch.zeros_like(x),
            "cut": torch.cat([gradients[name].flatten() for name in (*COLUMN, *ROW)]),
            "shared": torch.cat([gradients[name] for name in SHARED]),
            "sent": torch.tensor(float(traffic.sent <= budget)), "lean": torch.tensor(float(len(whole) <= 2))}


EXERCISES = [
    Exercise("parallel-block", "10", (f"{__name__}.parallel_block",), draw, run, {
        "value": "each rank has the block's output for its own tokens",
        "back": "and the gradient of its own tokens",
        "cut": "the gradients of the weights that are cut are those of one process",
        "shared": "so are the gradients of norms and of row biases, on every rank",
        "sent": "it sends no more than four all-reduces of the activation, and one of each small weight",
        "lean": "it keeps two activations of all tokens and all channels for the backward pass, not more"},
        flags={"sent": "it sends more", "lean": "it keeps more"},
        levels={"sent": "byte budget", "lean": "memory budget"},
        ladder=("Write the block for one process first, with `F.layer_norm`, `F.linear` and `F.scaled_dot_product_attention`. "
                "Then ask of each activation: has this rank all its tokens? All its channels?",
                "A column linear needs all tokens, so a `gather` along dim 1 comes before it. A row linear gives partial sums "
                "for all tokens, so a `scatter` comes after it. Add the bias after the sum.",
                "Norms and row biases see only this rank's tokens, so each rank has a part of their gradient: "
                "`mappings.copy(weight, axis)` adds these parts up. Gather after the norm, not before it: then the norm "
                "keeps this rank's tokens only."),
        sizes=(2, 4), limits=Limits(seconds=120)),
]
