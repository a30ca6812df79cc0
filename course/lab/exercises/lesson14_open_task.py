"""Lesson 14's open task: writing text with a model whose vocabulary and heads are cut over ranks."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from course.lab.checks import random_inputs, return_values, tiny_training
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.instruments.bytes_sent import Traffic, within_budget
from course.lab.instruments.tensor_memory import MemoryMeter
from course.lab.sandbox.limits import Limits
from course.parallel.mappings import all_gather_single
from course.parallel.mesh import Axis
from course.utils import random

DEPTH, HEADS, SAMPLES = 2, 4, 2
CHOICE = 64                                          # bytes that a rank may send for the choice of one token
SPARE = 4096                                         # bytes that a rank may keep besides its part of the cache
CUT = {"token": 0, "qkv": 1, "out": 1, "up": 0, "down": 1}           # the dim of each weight that is cut over ranks


def gumbel(seed: int, position: int, samples: int, columns: Tensor) -> Tensor:
    """Gumbel noise for the token at a position, for each sample and these columns of the vocabulary, (samples, n) float64."""
    keys = random.fold(random.fold(random.key(seed, "gumbel"), torch.tensor(position)), torch.arange(samples))
    return -(-random.uniform(keys[:, None], columns, torch.float64).log()).log()        # (samples, n)


def rms(x: Tensor, gain: Tensor) -> Tensor:
    """RMSNorm, (..., D)."""
    return F.rms_norm(x, gain.shape, gain, 1e-5)


def write_alone(weights: Tensors, tokens: Tensor, count: int, words: int, temperature: float, seed: int) -> Tensor:
    """What one process writes after a prompt, (B, T) -> (B, T + count). It computes everything again for each token."""
    for _ in range(count):
        B, T = tokens.shape
        x = weights["token"][tokens] + weights["pos"][:T]                                   # (B, T, D)
        for i in range(DEPTH):
            q, k, v = torch.einsum("btD,shdD->sbhtd", rms(x, weights[f"{i}.norm1"]), weights[f"{i}.qkv"])
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)                     # (B, h, T, d)
            x = x + y.transpose(1, 2).flatten(2) @ weights[f"{i}.out"].T                    # (B, T, D)
            x = x + F.gelu(rms(x, weights[f"{i}.norm2"]) @ weights[f"{i}.up"].T) @ weights[f"{i}.down"].T
        logits = rms(x, weights["norm"]) @ weights["token"].T                               # (B, T, V)
        scores = logits[:, -1, :words]                                                      # the others are padding
        if temperature > 0:
            scores = scores / temperature + gumbel(seed, T, B, torch.arange(words))
        tokens = torch.cat([tokens, scores.argmax(-1, keepdim=True)], 1)
    return tokens


class Writer:
    """Writes with a model whose vocabulary, heads and hidden units are cut over an axis."""

    def __init__(self, weights: Tensors, most: int, words: int, temperature: float, seed: int, axis: Axis):
        """weights: this rank's part. most: the most tokens of a text. words: entries of the vocabulary that are tokens.

        axis: `size`, `rank`, `ranks`, `group`.
        """
        self.weights, self.words, self.temperature, self.seed, self.axis = weights, words, temperature, seed, axis
        self.most, self.past, self.cache = most, 0, torch.empty(0)      # (depth, 2, B, h / n, most, d)

    def next(self, tokens: Tensor) -> Tensor:
        """Take the next tokens of each text, (B, t): a prompt, a piece of it, or one. Returns the token that follows, (B,)."""
        w, axis, (B, t) = self.weights, self.axis, tokens.shape
        start, end, rows = self.past, self.past + t, len(w["token"])
        own = tokens - axis.rank * rows
        here = (own >= 0) & (own < rows)                                                    # (B, t)
        x = self.total(F.embedding(own * here, w["token"]) * here[..., None]) + w["pos"][start:end]     # (B, t, D)
        later = torch.arange(end) > torch.arange(start, end)[:, None]                       # (t, end)
        for i in range(DEPTH):
            q, k, v = torch.einsum("btD,shdD->sbhtd", rms(x, w[f"{i}.norm1"]), w[f"{i}.qkv"])
            if start == 0 and i == 0:
                self.cache = k.new_zeros(DEPTH, 2, B, k.shape[1], self.most, k.shape[3])
            keys, values = self.cache[i]
            keys[:, :, start:end], values[:, :, start:end] = k, v
            scores = q @ keys[:, :, :end].mT * q.shape[-1]**-0.5                            # (B, h / n, t, end)
            y = scores.masked_fill(later, -torch.inf).softmax(-1) @ values[:, :, :end]
            x = x + self.total(y.transpose(1, 2).flatten(2) @ w[f"{i}.out"].T)              # (B, t, D)
            x = x + self.total(F.gelu(rms(x, w[f"{i}.norm2"]) @ w[f"{i}.up"].T) @ w[f"{i}.down"].T)
        self.past = end
        columns = axis.rank * rows + torch.arange(rows)
        logits = rms(x[:, -1], w["norm"]) @ w["token"].T                                    # (B, V / n)
        if self.temperature > 0:
            logits = logits / self.temperature + gumbel(self.seed, end, B, columns)
        best, place = logits.masked_fill(columns >= self.words, -torch.inf).max(-1)         # 2 x (B,)
        pairs = best.new_empty(axis.size * 2, B)
        all_gather_single(pairs, torch.stack([best, columns[place].to(best.dtype)]), group=axis.group)
        bests, tokens_of = pairs.view(axis.size, 2, B).unbind(1)                            # 2 x (n, B)
        return tokens_of.gather(0, bests.argmax(0, keepdim=True))[0].long()                 # (B,)

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks."""
        dist.all_reduce(x, group=self.axis.group)
        return x


class LargestMeter(MemoryMeter):
    """Also remembers the largest new piece of memory since `largest` was set to 0, in bytes."""

    largest = 0

    def count(self, name: int, size: int) -> None:
        super().count(name, size)
        self.largest = max(self.largest, size)


def draw(seed: int, hidden: bool) -> Tensors:
    """A model's weights, with padding in the vocabulary, and prompts; how many tokens to write, and a seed for the noise."""
    generator = random_inputs.generator(seed)
    vocab, dim, prompt, count = (800, 20, 46, 5) if hidden else (640, 16, 45, 4)
    words, hidden_units = vocab - 7, 56 if hidden else 48

    def normal(*shape: int, width: float = 1.0) -> Tensor:
        return width * random_inputs.normal(generator, *shape)

    weights = {"token": normal(vocab, dim, width=0.6), "pos": normal(prompt + count, dim), "norm": 1 + 0.2 * normal(dim)}
    weights["token"][words:] *= 4                    # whoever draws padding, does so often
    for i in range(DEPTH):
        weights |= {f"{i}.norm1": 1 + 0.2 * normal(dim), f"{i}.norm2": 1 + 0.2 * normal(dim),
                    f"{i}.qkv": normal(3, HEADS, dim // HEADS, dim, width=1.5 * dim**-0.5),
                    f"{i}.out": normal(dim, dim, width=dim**-0.5),
                    f"{i}.up": normal(hidden_units, dim, width=dim**-0.5), f"{i}.down": normal(dim, hidden_units, width=0.3)}
    return weights | {"prompt": torch.randint(words, (SAMPLES, prompt), generator=generator), "count": torch.tensor(count),
                      "words": torch.tensor(words), "seed": torch.tensor(random_inputs.number(seed)),
                      "split": torch.randint(5, prompt - 5, (), generator=generator)}


def part_of(inputs: Tensors, axis: Axis) -> Tensors:
    """A rank's part of the weights."""
    weights = {name: value for name, value in inputs.items() if name not in ("prompt", "count", "words", "seed", "split")}
    return {name: value.tensor_split(axis.size, CUT[kind])[axis.rank].contiguous()
            if (kind := name.split(".")[-1]) in CUT else value.clone() for name, value in weights.items()}


def run(inputs: Tensors) -> Tensors:
    """What is written along the axis of all ranks, and along one of two: the most probable tokens, and drawn ones after a prompt
    that comes in two pieces; and what was counted meanwhile."""
    found: dict[str, list[Tensor]] = {"greedy": [], "drawn": []}
    sent, counts = list[tuple[Traffic, float]](), dict.fromkeys(("prompt", "small", "grows", "kept"), True)
    world, split = dist.get_world_size(), int(inputs["split"])
    pieces = [inputs["prompt"][:, :split], inputs["prompt"][:, split:]]
    for size in dict.fromkeys((world, 2)):
        axis = tiny_training.mesh(tiny_training.settings("parallel.dp=1", f"parallel.cp={world // size}", f"parallel.tp={size}",
                                                         "model.heads=4")).tp
        if size == world:
            found["greedy"].append(write(inputs, 0.0, [inputs["prompt"]], axis, sent, counts).flatten())
        found["drawn"].append(write(inputs, 1.5, pieces, axis, sent, counts).flatten())
    return {name: torch.cat(parts) for name, parts in found.items()} | {
        "sent": within_budget(*sent)} | {name: torch.tensor(float(holds)) for name, holds in counts.items()}


@torch.no_grad()
def write(inputs: Tensors, temperature: float, pieces: list[Tensor], axis: Axis, sent: list[tuple[Traffic, float]],
          counts: dict[str, bool]) -> Tensor:
    """The tokens that a `Writer` returns, (count, B); `sent` gets each call's traffic with its budget."""
    (vocab, D), (B, T), count, n = inputs["token"].shape, inputs["prompt"].shape, int(inputs["count"]), axis.size
    part, most = part_of(inputs, axis), T + count
    reduced = 8 * D * (2 * DEPTH + 1) * 2 * (n - 1) / n              # bytes of the sums, for one token of one text
    tokens, large = list[Tensor](), list[int]()
    with LargestMeter() as meter:
        with Traffic() as traffic:
            writer: Any = Writer(part, most, int(inputs["words"]), temperature, int(inputs["seed"]), axis)
        sent.append((traffic, 0))
        for call in range(len(pieces) + count - 1):
            given = pieces[call].clone() if call < len(pieces) else tokens[-1][:, None]
            meter.largest = 0
            with Traffic() as traffic:
                made = writer.next(given)
            made = return_values.tensor(made, "Writer.next", (B,), torch.int64)
            sent.append((traffic, B * (given.shape[1] * reduced + CHOICE)))
            if call < len(pieces):                   # scores, all heads' features, the cache
                t, past = given.shape[1], sum(piece.shape[1] for piece in pieces[:call + 1])
                counts["prompt"] &= meter.largest <= 8 * B * max(HEADS // n * t * past, 3 * t * D, 2 * DEPTH * D // n * most)
            else:
                large.append(meter.largest)
            if call >= len(pieces) - 1:
                tokens.append(made.clamp(0, vocab - 1))
        del made, given
        if max(large) > 8 * B * vocab // n:          # more than this rank's logits
            counts["grows" if large[-1] > large[-2] else "small"] = False
        counts["kept"] &= meter.now <= 2 * DEPTH * 8 * B * D // n * most + SPARE
    return torch.stack(tokens)


EXERCISES = [
    Exercise("write-text", "14", (f"{__name__}.Writer",), draw, run, {
        "greedy": "at temperature 0 all ranks write the most probable tokens, as one process does",
        "drawn": "at another temperature, after a prompt in two pieces, they draw what one process draws",
        "sent": "besides the sums over ranks, a rank sends at most 64 bytes for each token of a text",
        "prompt": "while it reads a prompt, no new tensor is larger than this rank's scores, its cache, or 3 B t D",
        "small": "for a single token, no new tensor is larger than this rank's logits, B V / n",
        "grows": "and none grows with the text",
        "kept": "between calls, a rank keeps its heads' keys and values only"},
        flags={"sent": "it sends more", "prompt": "it makes a larger one", "small": "it makes a larger one",
               "grows": "it makes a larger one, which grows", "kept": "it keeps more"},
        levels={"sent": "byte budget"} | dict.fromkeys(("prompt", "small", "grows", "kept"), "memory budget"),
        ladder=("Begin without a cache: keep all tokens, and go through `write_alone` with this rank's part. Sum over ranks "
                "after the embedding (zeros for tokens of other ranks), after attention and after the MLP. Gather the logits. "
                "That is correct, and the first level.",
                "A sum of Gumbel noise and logits has its largest entry on one rank. So each rank needs the largest entry of "
                "every rank and its place in the whole vocabulary: two numbers a text. The noise of a column depends on its "
                "place in the whole vocabulary, so each rank computes the noise of its own columns.",
                "Make the cache at the first call, (B, h / n, most, d) for each block, and write into it. In this order of dims, "
                "a slice of the first tokens can be multiplied as it is; in another, PyTorch copies it first. Multiply only the "
                "last token's features by the vocabulary. A second piece of a prompt needs a mask that begins at its place."),
        sizes=(2, 4), limits=Limits(seconds=120)),
]
