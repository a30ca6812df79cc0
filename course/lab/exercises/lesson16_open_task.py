"""Lesson 16's open task: a converter for a model of a library that nobody has seen."""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import permutations, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from course.lab.checks import random_inputs, return_values
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn, choose_cure, describe_value
from course.lab.instruments.foreign_model import LIMIT, Case, Checkpoint, ForeignModels, draw_case, in_words
from course.lab.instruments.tensor_memory import MemoryMeter
from course.lab.sandbox.limits import Limits
from course.models import build_model
from course.models.gpt import GPTConfig
from course.models.layers import apply_rope, rope_cos_sin

COPIES = 2                                           # bytes of tensors at once, over those of the checkpoint: fewer
Matrix = Callable[[int], Tensor]                     # the rows of a linear map, (out, in), of the block of this number


def logits(c: GPTConfig, get: Callable[[str], Tensor], tokens: Tensor) -> Tensor:
    """The logits of our GPT, (T, V) float64, for the tokens of one text, (T,).

    get(name): a parameter by its serial name, in any format. It is called where the parameter is needed; nothing is kept.
    """
    def weight(name: str) -> Tensor:
        return get(f"{name}.weight").double()

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (c.dim,), weight(name), c.norm_eps)

    rope = rope_cos_sin(torch.arange(len(tokens)), c.dim // c.heads, c.rope_theta, torch.float64)       # (2, T, d / 2)
    x = get("embed.token.weight")[tokens].double()                      # (T, D)
    for block in (f"blocks.{i}" for i in range(c.depth)):
        qkv = F.linear(norm(x, f"{block}.norm1"), weight(f"{block}.attn.qkv"))
        q, k, v = qkv.unflatten(1, (3, c.heads, -1)).permute(1, 2, 0, 3)                                # 3 x (h, T, d)
        y = F.scaled_dot_product_attention(apply_rope(q, rope), apply_rope(k, rope), v, is_causal=True)
        x = x + F.linear(y.transpose(0, 1).flatten(1), weight(f"{block}.attn.out"))                     # (T, D)
        gate, value = F.linear(norm(x, f"{block}.norm2"), weight(f"{block}.mlp.up")).chunk(2, 1)        # 2 x (T, H)
        x = x + F.linear(F.silu(gate) * value, weight(f"{block}.mlp.down"))                             # (T, D)
    return F.linear(norm(x, "head.norm"), weight("head.proj"))          # (T, V)


def convert_foreign(checkpoint: Checkpoint, run: Callable[[Tensor], Tensor], c: GPTConfig) -> dict[str, Tensor]:
    """Return the weights of another library's model under the serial names of our GPT, with the dtypes of its files.

    checkpoint.index: {name of a tensor: its file}. checkpoint.shapes(file): {name: shape}. checkpoint.read(file,
    name): a tensor. run(tokens): the model's logits (T, V) float64, for tokens (T,). c: our configuration of it.
    """
    D, V, H = c.dim, c.vocab, c.hidden
    parts = {re.sub(r"\d+", "{}", name): checkpoint.shapes(file)[name] for name, file in checkpoint.index.items()}
    transposed = (D, H) not in parts.values() or list(parts.values()).count((D, H)) == 2

    def parts_of(*shape: int, inside: bool = True) -> list[str]:
        return [part for part, found in parts.items() if found == shape and ("{}" in part) == inside]

    def read(part: str, i: int) -> Tensor:
        name = part.format(i)
        return checkpoint.read(checkpoint.index[name], name)

    def linears(out: int, into: int, cut: Callable[[Tensor], Tensor] = lambda x: x, inside: bool = True) -> list[Matrix]:
        def rows(part: str, i: int) -> Tensor:
            return cut(read(part, i).T if transposed else read(part, i))

        return [partial(rows, part) for part in parts_of(*((into, out) if transposed else (out, into)), inside=inside)]

    def third(j: int, by_head: bool, x: Tensor) -> Tensor:              # (3D, D) -> (D, D)
        return x.unflatten(0, (c.heads, 3, -1) if by_head else (3, c.heads, -1)).select(1 if by_head else 0, j).flatten(0, 1)

    def half(j: int, x: Tensor) -> Tensor:                              # (2H, D) -> (H, D)
        return x.chunk(2)[j]

    squares = linears(D, D)
    attentions = list(permutations(squares)) if len(squares) == 4 else [       # q, k, v, out
        (*qkv, squares[0]) for by_head in (False, True)
        for qkv in permutations(linears(3 * D, D, partial(third, j, by_head))[0] for j in range(3))]
    halves = linears(H, D) or [linears(2 * H, D, partial(half, j))[0] for j in range(2)]
    down, = linears(D, H)
    final, = parts_of(D, inside=False)
    tables: list[Matrix] = [partial(read, part) for part in parts_of(V, D, inside=False)]
    heads = linears(V, D, inside=False) if transposed else []
    ends = [(tables[0], heads[0])] if heads else list(permutations(tables)) if len(tables) == 2 else [(tables[0], tables[0])]

    def reader(end: Sequence[Matrix], norms: Sequence[str], gates: Sequence[Matrix], attention: Sequence[Matrix],
               interleaved: bool) -> Callable[[str], Tensor]:
        """Our parameters by name, if the other library's are laid out like this."""
        def turned(x: Tensor) -> Tensor:                                # (D, D)
            return x.unflatten(0, (c.heads, -1, 2)).transpose(1, 2).flatten(0, 2) if interleaved else x

        q, k, v, out = attention
        makers: dict[str, Matrix] = {
            "embed.token.weight": end[0], "head.proj.weight": end[1], "head.norm.weight": partial(read, final),
            "norm1.weight": partial(read, norms[0]), "norm2.weight": partial(read, norms[1]),
            "attn.qkv.weight": lambda i: torch.cat([turned(q(i)), turned(k(i)), v(i)]), "attn.out.weight": out,
            "mlp.up.weight": lambda i: torch.cat([gate(i) for gate in gates]), "mlp.down.weight": down}

        def get(name: str) -> Tensor:
            block = re.match(r"blocks\.(\d+)\.", name)
            return makers[name[block.end():]](int(block[1])) if block else makers[name](0)

        return get

    tokens = 7 * torch.arange(c.context) % V
    theirs = run(tokens)

    def error(layout: Any, count: int) -> float:
        """How far our logits of the first so many tokens are from theirs."""
        return float((logits(c, reader(*layout), tokens[:count]) - theirs[:count]).norm())

    def start(layout: Any) -> Any:
        """What the first token's logits depend on: it attends to itself alone, so not on queries, keys and rotary positions."""
        return *layout[:3], layout[3][2:]

    layouts = list(product(ends, permutations(parts_of(D)), permutations(halves), attentions, (False, True)))
    begins = min({start(layout): layout for layout in layouts}.values(), key=lambda layout: error(layout, 1))
    found = min((layout for layout in layouts if start(layout) == start(begins)), key=lambda layout: error(layout, len(tokens)))
    get = reader(*found)
    return {name: get(name).contiguous() for name in build_model(c).state_dict()}


def draw(seed: int, hidden: bool) -> Tensors:
    """Each model's seed and which layout it has; hidden ones are larger, and one more has any layout. And a text for them."""
    generator = random_inputs.generator(seed)
    which = torch.randperm(4, generator=generator).tolist() + [4] * hidden
    seeds = torch.randint(2**62, (len(which),), generator=generator)
    return {"seeds": seeds, "layouts": torch.tensor(which), "larger": torch.tensor(hidden),
            "text": torch.randint(53, (9,), generator=generator), "weights": random_inputs.normal(generator, 9, 53)}


def cases(inputs: Tensors) -> list[Case]:
    """The models of a draw. The first is deep, so that one tensor of it is little memory."""
    return [(seed, which, bool(inputs["larger"]), 2 if number else 6)
            for number, (seed, which) in enumerate(zip(inputs["seeds"].tolist(), inputs["layouts"].tolist(), strict=True))]


def checked_weights(value: Any, c: GPTConfig) -> dict[str, Tensor]:
    """The weights that somebody returned."""
    wanted = {name: p.shape for name, p in build_model(c).state_dict().items()}
    if not isinstance(value, dict):
        raise InvalidReturn(f"`convert_foreign` returned {describe_value(value)}; expected a dict",
                            choose_cure(value, "return a dict with the serial names of our parameters"))
    for name in [*wanted, *value]:
        if name not in value or name not in wanted:
            raise InvalidReturn(f"`convert_foreign` returned {'no' if name in wanted else 'a tensor with the name'} {name}",
                                "the names are those of `build_model(c).state_dict()`, the head's among them")
        return_values.tensor(value[name], "convert_foreign", tuple(wanted[name]), getattr(value[name], "dtype", torch.float64),
                             f" as {name}")
    return value


def run(inputs: Tensors) -> Tensors:
    """A number of each model's logits with the weights that come back, and what it took. Nothing here knows the layouts."""
    text, weights = inputs["text"].clone(), inputs["weights"].clone()
    values, formats, once, kept = [], True, True, True
    with ForeignModels(cases(inputs)) as models:
        count = len(inputs["seeds"])
        for tensor in inputs.values():
            tensor.zero_()
        for case in range(count):
            c, checkpoint, runner = models.config(case), models.checkpoint(case), models.runner(case)
            with MemoryMeter() if case == 0 else nullcontext() as meter:        # it is slow: one model is enough
                made = convert_foreign(checkpoint, runner, c)
            ours = checked_weights(made, c)
            formats = formats and all(ours[name].dtype == kind for name, kind in models.formats(case).items())
            once = once and models.calls(case) <= 1
            kept = kept and (meter is None or meter.peak < COPIES * models.bytes(case))
            values.append((logits(c, ours.__getitem__, text)[:, :53] * weights).sum())
    return {"logits": torch.stack(values), "formats": torch.tensor(float(formats)), "once": torch.tensor(float(once)),
            "copies": torch.tensor(float(kept))}


def explain(inputs: Tensors, expected: Tensors, got: Tensors) -> str:
    """What all models that are wrong have in common, and no other has."""
    layouts = [set(in_words(draw_case(*case)[2]).split("; ")) for case in cases(inputs)]
    if got["logits"].shape != expected["logits"].shape:
        return ""
    wrong = [abs(a - b) > 1e-9 * abs(b) for a, b in zip(got["logits"].tolist(), expected["logits"].tolist(), strict=True)]
    theirs = [layout for layout, off in zip(layouts, wrong, strict=True) if off]
    others = set[str]().union(*(layout for layout, off in zip(layouts, wrong, strict=True) if not off))
    alike = sorted(set.intersection(*theirs) - others) if theirs and others else []
    return f"exactly these models are wrong: {'; '.join(alike)}" if alike else ""


EXERCISES = [
    Exercise("convert-foreign", "16", (f"{__name__}.convert_foreign",), draw, run, {
        "logits": f"our GPT computes every model's logits, with at most {LIMIT} calls of `run` each",
        "formats": "each tensor keeps its dtype from the files",
        "once": "no model is run more than once",
        "copies": "two copies of the weights are never in memory at once"},
        flags={"formats": "some have another dtype", "once": "some model is run more often",
               "copies": "tensors of twice the checkpoint's bytes are alive at once"},
        levels={"once": "one call", "copies": "memory budget"},
        cases=lambda inputs: ["a sum of the logits, where " + in_words(draw_case(*case)[2]) for case in cases(inputs)],
        ladder=("Most of a layout shows in the shapes: D, 2D, 3D, H, 2H and V all differ. Write down what is left open: which "
                "of several tensors with one shape is which, in which order parts are stacked, which elements rotary positions "
                "rotate. Try all combinations, and keep the one with the model's logits.",
                "The logits of the first token do not depend on queries, keys or rotary positions: it attends to itself alone. "
                "So the choices can be made in two stages, both with the logits of a single call, since attention is causal.",
                "`logits` asks for each tensor when it needs it. Pass it a function that reads the tensor from the files and "
                "lays it out for the combination that you try. Make the dict once, when you have found the combination."),
        explain=explain,
        unknown="take the case named above, and print how far its best combination is from the model's logits. If none matches "
                "up to rounding, you do not try the right one, or you read a stale tensor: the index says which file counts. If "
                "several match, the text is too short: the first token says nothing about queries, keys and rotary positions",
        limits=Limits(seconds=120)),
]
