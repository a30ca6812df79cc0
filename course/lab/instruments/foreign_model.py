"""A language model of a library that nobody has seen, for lesson 16's open task: its checkpoint, and a function that runs it.

    with ForeignModels([(3, 0, False, 6)]) as models:
        checkpoint, run = models.checkpoint(0), models.runner(0)
        checkpoint.index                              # {name of a tensor: its file}
        checkpoint.read(file, name)
        run(tokens)                                   # the logits, (T, V) float64
        models.calls(0)                               # 1

Weights, names and the layout of the files come from the case's seed. They exist in the other process only (`hidden_process.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from course.lab.checks import random_inputs
from course.lab.checks.return_values import InvalidReturn, describe_value
from course.lab.instruments.hidden_process import HiddenProcess
from course.models import build_model
from course.models.gpt import GPTConfig

LIMIT = 1000                                         # calls of one model
Case = tuple[int, int, bool, int]                    # a seed; which of `LAYOUTS`, or any; whether it is larger; its depth
Raw = tuple[bytearray, str, tuple[int, ...]]             # a tensor's bytes, format and shape, as they go through a pipe


@dataclass(frozen=True)
class ForeignLayout:
    """How a library lays out what our GPT has in its own way."""

    transposed: bool                                 # linear maps are (in, out)
    order: tuple[int, ...]                           # of queries 0, keys 1 and values 2 in their fused matrix
    fused: bool                                      # one matrix for all three; else one for each
    by_head: bool                                    # the fused matrix goes head by head
    interleaved: bool                                # rotary turns elements 2i and 2i + 1, not i and i + d / 2
    gates_first: bool                                # in the fused matrix of gates and values
    fused_gates: bool                                # one matrix for both
    tied: bool                                       # the head is the embedding


def draw_config(generator: torch.Generator, larger: bool, depth: int) -> GPTConfig:
    """A small Llama whose sizes are all different."""
    def pick(*values: int) -> int:
        return values[int(torch.randint(len(values), (), generator=generator))]

    heads = pick(3, 4, 5) if larger else pick(2, 3)
    dim = heads * pick(8, 12)
    return GPTConfig(vocab=pick(53, 59, 61), context=11, dim=dim, depth=depth, heads=heads,
                     mlp_width=2 * dim + pick(4, 6), mlp="swiglu", norm="rms", position="rotary", bias=False, tied=False)


# four layouts which have each choice both ways; the order of queries, keys and values is drawn
FLAGS = ("transposed", "fused", "by_head", "interleaved", "gates_first", "fused_gates", "tied")
LAYOUTS = ((False, True, False, True, False, True, False), (True, True, True, False, True, False, True),
           (False, False, False, False, True, True, False), (True, False, False, True, False, False, False))


def draw_layout(generator: torch.Generator, which: int) -> ForeignLayout:
    """One of `LAYOUTS`, or any, with any order that is not ours."""
    drawn = torch.randint(2, (len(FLAGS),), generator=generator).bool().tolist()
    flags = dict(zip(FLAGS, LAYOUTS[which] if which < len(LAYOUTS) else drawn, strict=True))
    orders = [order for order in permutations(range(3)) if order != (0, 1, 2)]
    order = orders[int(torch.randint(len(orders), (), generator=generator))]
    return ForeignLayout(order=order, **flags)


def draw_case(seed: int, which: int, larger: bool, depth: int) -> tuple[torch.Generator, GPTConfig, ForeignLayout]:
    """What a model is, and how it is laid out; and the generator of its weights."""
    generator = random_inputs.generator(seed)
    return generator, draw_config(generator, larger, depth), draw_layout(generator, which)


def in_words(layout: ForeignLayout) -> str:
    """A layout, for a person who may know it."""
    order = ", ".join("qkv"[which] for which in layout.order)
    return "; ".join((
        f"linear maps are ({'in, out' if layout.transposed else 'out, in'})",
        f"{order} fused {'head by head' if layout.by_head else 'part by part'}" if layout.fused else "q, k, v are three matrices",
        f"rotary turns {'(2i, 2i + 1)' if layout.interleaved else '(i, i + d/2)'}",
        f"{'gate, value' if layout.gates_first else 'value, gate'} fused" if layout.fused_gates else
        "gate and value are two matrices",
        "the head is the embedding" if layout.tied else "the head has a matrix"))


def draw_words(generator: torch.Generator, count: int) -> list[str]:
    """Different words that say nothing."""
    words: dict[str, None] = {}
    while len(words) < count:
        letters = torch.randint(5, (6,), generator=generator).tolist()
        words["".join(("bdklmnprst"[2 * c:2 * c + 2] if i % 4 == 0 else "ptkms"[c] if i % 2 == 0 else "aeiou"[c])
                      for i, c in enumerate(letters[:5]))] = None
    return list(words)


def foreign_tensors(c: GPTConfig, ours: dict[str, Tensor], layout: ForeignLayout, words: Sequence[str]) -> dict[str, Tensor]:
    """Our weights by the other library's names, in its layout."""
    blocks, embed, norm, head, norm1, norm2, qkv, *three, out, up, gate, value, down = words
    theirs = {f"{embed}.weight": ours["embed.token.weight"], f"{norm}.weight": ours["head.norm.weight"]}

    def linear(x: Tensor) -> Tensor:
        return x.T if layout.transposed else x

    if not layout.tied:
        theirs[f"{head}.weight"] = linear(ours["head.proj.weight"])
    for i in range(c.depth):
        of = {name.removeprefix(f"blocks.{i}."): x for name, x in ours.items() if name.startswith(f"blocks.{i}.")}
        parts = [x.unflatten(0, (c.heads, -1)) for x in of["attn.qkv.weight"].chunk(3)]                 # (h, d, D)
        if layout.interleaved:
            parts[:2] = [x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) for x in parts[:2]]
        parts = [parts[which] for which in layout.order]
        matrices = {out: of["attn.out.weight"], down: of["mlp.down.weight"]}
        if layout.fused:
            matrices[qkv] = torch.stack(parts, 1 if layout.by_head else 0).flatten(0, 2)
        else:
            matrices |= {name: x.flatten(0, 1) for name, x in zip(three, parts, strict=True)}
        halves = of["mlp.up.weight"].chunk(2)
        if layout.fused_gates:
            matrices[up] = torch.cat(halves if layout.gates_first else halves[::-1])
        else:
            matrices |= {gate: halves[0], value: halves[1]}
        theirs |= {f"{blocks}.{i}.{name}.weight": linear(x) for name, x in matrices.items()}
        theirs |= {f"{blocks}.{i}.{norm1}.weight": of["norm1.weight"], f"{blocks}.{i}.{norm2}.weight": of["norm2.weight"]}
    return theirs


class ForeignModel:
    """A model of the other library, with the files of its checkpoint."""

    def __init__(self, *case: Any):
        generator, self.config, layout = draw_case(*case)
        c, formats = self.config, (torch.bfloat16, torch.float16)
        kind = formats[int(torch.randint(2, (), generator=generator))]
        self.model = build_model(c).to_empty(device="cpu").double()
        ours = {}
        for name, p in self.model.named_parameters():
            gain = "norm" in name                    # gains differ much, so that no two norms are alike
            x = (0.5 + torch.rand(p.shape, generator=generator, dtype=torch.float64) if gain else
                 p.shape[-1] ** -0.5 * 1.5 * random_inputs.normal(generator, *p.shape))
            ours[name] = x.to(torch.float32 if gain else kind)
        if layout.tied:
            ours["head.proj.weight"] = ours["embed.token.weight"]
        self.formats = {name: str(x.dtype).removeprefix("torch.") for name, x in ours.items()}
        self.model.load_state_dict({name: x.double() for name, x in ours.items()})
        *words, angles, mask = draw_words(generator, 17)
        theirs = foreign_tensors(c, ours, layout, words)
        theirs |= {f"{words[0]}.{i}.{mask}": torch.ones(c.context, c.context).tril() for i in range(c.depth)}
        theirs[angles] = c.rope_theta ** (-torch.arange(0, c.dim // c.heads, 2) * c.heads / c.dim)
        names = [list(theirs)[i] for i in torch.randperm(len(theirs), generator=generator).tolist()]
        self.index = {name: f"model-0000{number * 3 // len(names) + 1}-of-00003.safetensors" for number, name in enumerate(names)}
        self.files: dict[str, dict[str, Tensor]] = {file: {} for file in sorted(set(self.index.values()))}
        for name, file in self.index.items():
            self.files[file][name] = theirs[name].contiguous()
        self.bytes = sum(x.nbytes for x in theirs.values())
        matrices = [name for name in names if theirs[name].numel() > c.context**2]
        for name in matrices[:4]:                     # left over from an earlier save: the index names another file
            other = next(file for file in self.files if file != self.index[name])
            self.files[other][name] = (2 * theirs[name].roll(1, -1)).contiguous()
        self.calls = 0

    def run(self, tokens: list[int]) -> Any:
        """The logits of a text, as an array."""
        if self.calls == LIMIT:
            raise InvalidReturn(f"`run` was called more than {LIMIT} times for one model",
                                "keep the logits, and compare with them")
        self.calls += 1
        batch = {"tokens": torch.tensor([[*tokens, 0]]), "sample": torch.zeros(1, dtype=torch.int64)}
        with torch.no_grad():
            return self.model.eval()(self.model.prepare(batch, torch.zeros((), dtype=torch.int64)))[0].numpy()


class Checkpoint:
    """A checkpoint in several files, with an index. What is read from it is in memory, nothing else."""

    def __init__(self, index: dict[str, str], files: dict[str, dict[str, Raw]]):
        self.index = index                           # name of a tensor -> the file that has it
        self._files = files

    def shapes(self, file: str) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor that lies in a file."""
        return {name: shape for name, (_, _, shape) in self._files[file].items()}

    def read(self, file: str, name: str) -> Tensor:
        """A tensor of a file, in new memory."""
        if name not in self._files.get(file, {}):
            raise InvalidReturn(f"there is no tensor {name!r} in a file {file!r}", "`index` says which file has a tensor")
        data, kind, shape = self._files[file][name]
        return torch.frombuffer(data, dtype=getattr(torch, kind)).view(shape).clone()


class ForeignModels(HiddenProcess):
    """Models in another process, one for each case."""

    def __init__(self, cases: Sequence[Case]):
        super().__init__(foreign_models, list(cases))

    def checkpoint(self, case: int) -> Checkpoint:
        """The checkpoint of a model."""
        return Checkpoint(*self.ask("checkpoint", case))

    def config(self, case: int) -> GPTConfig:
        """What our GPT must be to be that model."""
        return GPTConfig(**self.ask("config", case))

    def runner(self, case: int) -> Callable[[Tensor], Tensor]:
        """A function that runs a model."""
        ask, c = self.ask, self.config(case)

        def run(tokens: Tensor) -> Tensor:
            if not isinstance(tokens, Tensor) or tokens.dim() != 1 or tokens.is_floating_point():
                raise InvalidReturn(f"`run` got {describe_value(tokens)}", "it takes the tokens of one text, (T,) int64")
            if not 0 < len(tokens) <= c.context or tokens.min() < 0 or tokens.max() >= c.vocab:
                raise InvalidReturn(f"`run` got tokens that the model does not have, or {len(tokens)} of them",
                                    f"it takes 1 to {c.context} tokens from 0 to {c.vocab - 1}")
            return torch.from_numpy(ask("run", case, tokens.tolist()))

        return run

    def calls(self, case: int) -> int:
        """How often a model was run."""
        return int(self.ask("calls", case))

    def formats(self, case: int) -> dict[str, torch.dtype]:
        """The format that each of our weights has in the checkpoint."""
        return {name: getattr(torch, kind) for name, kind in self.ask("formats", case).items()}

    def bytes(self, case: int) -> int:
        """The bytes of a checkpoint's tensors."""
        return int(self.ask("bytes", case))


def foreign_models(cases: list[Case]) -> Callable[..., Any]:
    """What the other process does: answers (what, case, ...)."""
    models = [ForeignModel(*case) for case in cases]

    def raw(x: Tensor) -> Raw:
        return bytearray(x.view(torch.uint8).numpy().tobytes()), str(x.dtype).removeprefix("torch."), tuple(x.shape)

    def answer(what: str, case: int, *more: Any) -> Any:
        model = models[case]
        match what:
            case "run":
                return model.run(*more)
            case "checkpoint":
                return model.index, {file: {name: raw(x) for name, x in held.items()} for file, held in model.files.items()}
            case "config":
                return vars(model.config)
        return getattr(model, what)                  # calls, bytes, formats

    return answer
