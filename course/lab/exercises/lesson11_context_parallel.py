"""Lesson 11: keys and values gathered in order, answers merged, a zigzag of tokens, and what a ring's rounds have to compute."""

from contextlib import suppress
from functools import partial

import torch

from course.config import Parallel
from course.lab.checks import random_inputs, return_values, tiny_training
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn
from course.lab.exercises.lesson10_tensor_parallel import MORE, MOVES, RANKS, WRITES, measure
from course.lab.instruments.bytes_sent import piece_bytes, within_budget
from course.parallel import Axis, build_mesh, join, token_split
from course.parallel.context_parallel import attention, ring_attention
from course.parallel.token_split import SplitTokens


def tokens_of(total: int, zigzag: bool) -> SplitTokens:
    """How all ranks, as the context-parallel axis, share so many tokens."""
    world = join("cpu")
    tokens = SplitTokens({}, build_mesh(Parallel(dp=1, cp=world.size), world).cp, Axis("tp"), zigzag)
    tokens.cut({"position": torch.zeros(1, total)})
    return tokens


def train(inputs: Tensors, method: str) -> Tensors:
    """The library's training with all ranks as one context-parallel axis."""
    size = torch.distributed.get_world_size()
    trained = tiny_training.train(tiny_training.batches_of(inputs), int(inputs["seed"]), MOVES, f"parallel.cp={size}",
                                  f"parallel.context={method}")
    return {name: trained[name] for name in ("losses", "weights")}


def draw_pairs(seed: int, hidden: bool) -> Tensors:
    """What training draws; queries, keys and values, (3, B, h, T, d), and a gradient for each of up to four ranks."""
    generator = random_inputs.generator(seed)
    shape = (2, 2, 24 if hidden else 16, 3)
    return tiny_training.draw_inputs(seed, samples=6 if hidden else 4) | {
        "qkv": torch.randn(3, *shape, generator=generator, dtype=torch.float64) * 2,
        "grads": torch.randn(4, 2, *shape, generator=generator, dtype=torch.float64)}


def run_gather_in_order(inputs: Tensors) -> Tensors:
    """Keys and values gathered, from pieces of one kind and the other; and a model trained with them."""
    found: Tensors = {}
    kept, sent = [], []
    for name, zigzag, less in (("plain", False, 3), ("zigzag", True, 0)):           # 13 tokens cannot be cut evenly
        pairs = inputs["qkv"][1:, :, :, less:]                          # (2, B, h, T, d)
        tokens = tokens_of(pairs.shape[3], zigzag)
        mine = pairs.index_select(3, tokens.order(pairs.device)[tokens.cp.rank])
        grad = inputs["grads"][tokens.cp.rank][:, :, :, less:]
        passes = measure(partial(attention.gather_in_order, tokens=tokens), mine, grad)
        found |= {name: passes.value, f"{name}_back": passes.back}
        kept.append(passes.kept)
        most = piece_bytes(pairs, 3, tokens.cp.size)
        sent += [(passes.forward, most), (passes.backward, most)]
    return found | {"kept": torch.tensor(min(kept)), "sent": within_budget(*sent)} | train(inputs, "gather")


def draw_blocks(seed: int, hidden: bool) -> Tensors:
    """What training draws; scores of queries with four blocks of keys, and values."""
    generator = random_inputs.generator(seed)
    keys = 5 if hidden else 3
    return tiny_training.draw_inputs(seed, samples=6 if hidden else 4) | {
        "scores": torch.randn(4, 2, 3, 6, keys, generator=generator, dtype=torch.float64) * 3,
        "values": torch.randn(4, 2, 3, keys, 4, generator=generator, dtype=torch.float64)}


def run_merge(inputs: Tensors) -> Tensors:
    """Four blocks' answers merged, with scores of ordinary size and with large ones; and a model trained with a ring."""
    found: Tensors = {}
    kept = True
    for name, size in (("", 1.0), ("large_", 400.0)):
        scores = inputs["scores"] * size                                # (4, B, h, T, S)
        parts = scores.softmax(-1) @ inputs["values"]                   # (4, B, h, T, d)
        lses = scores.logsumexp(-1)                                     # (4, B, h, T)
        out, lse = parts[0].clone(), lses[0].clone()
        for part, other in zip(parts[1:], lses[1:], strict=True):
            given = part.clone(), other.clone()
            ring_attention.merge(out, lse, *given)
            kept = kept and torch.equal(given[0], part) and torch.equal(given[1], other)
        found |= {f"{name}out": out, f"{name}lse": lse}
    return found | {"kept": torch.tensor(float(kept))} | train(inputs, "ring")


def draw_sizes(seed: int, hidden: bool) -> Tensors:
    """Numbers of ranks, and of tokens in half of a rank's piece."""
    generator = random_inputs.generator(seed)
    sizes = torch.randint(2, 7, (6 if hidden else 3, 2), generator=generator)
    sizes[0] = torch.tensor([5, 2] if hidden else [4, 3])
    return {"sizes": sizes}


def run_zigzag(inputs: Tensors) -> Tensors:
    """The positions of all ranks, end to end."""
    found, there = [], True
    for size, half in inputs["sizes"].tolist():
        pieces = token_split.zigzag(2 * size * half, size, torch.device("cpu"))
        if not isinstance(pieces, tuple | list) or len(pieces) != size:
            raise InvalidReturn(f"`zigzag` returned {return_values.describe_value(pieces)}; expected a tuple of {size} tensors",
                                    "return one tensor of positions for each rank")
        found += [return_values.tensor(piece, "zigzag", (2 * half,), torch.int64, " for a rank") for piece in pieces]
        with suppress(Exception):                    # on "meta" there are no numbers, which some answers look at
            there = there and all(piece.is_meta for piece in token_split.zigzag(2 * size * half, size, torch.device("meta")))
    return {"positions": torch.cat(found).double(), "there": torch.tensor(float(there))}


def positions_asked(inputs: Tensors) -> dict[str, list[str]]:
    """Each position as a call, and its place in what that returns."""
    return {"positions": [f"zigzag({2 * size * half}, {size}, device)[{rank}][{place}]" for size, half in inputs["sizes"].tolist()
                          for rank in range(size) for place in range(2 * half)], "there": ["zigzag on another device"]}


def run_visible(inputs: Tensors) -> Tensors:
    """Ring attention of this rank's queries, causal and not, with its gradients; and how many scores each round computes."""
    found: Tensors = {}
    for name, causal in (("causal", True), ("all", False)):
        qkv, less = inputs["qkv"], 0 if causal else 3                   # 13 tokens cannot be cut evenly, which a zigzag has to
        tokens = tokens_of(qkv.shape[3] - less, causal)
        cp, order = tokens.cp, tokens.order(qkv.device)
        mine = qkv[:, :, :, less:].index_select(3, order[cp.rank]).requires_grad_()             # (3, B, h, T / cp, d)
        out = ring_attention.RingAttend(causal, tokens)(*mine)
        back, = torch.autograd.grad(out, mine, inputs["grads"][0][0][:, :, less:].index_select(2, order[cp.rank]))
        work = []
        for other in range(cp.size):
            if other != cp.rank:
                queries, keys = order[cp.rank], order[other]
                rows, columns = ring_attention.visible(causal, cp.rank, other, len(queries), len(keys))
                work.append(float(len(queries[rows]) * len(keys[columns])))
        found |= {f"{name}_out": out, f"{name}_back": back, f"{name}_work": torch.tensor(work)}
    return found


EXERCISES = [
    Exercise("gather-in-order", "11", ("course.parallel.context_parallel.attention.gather_in_order",), draw_pairs,
             run_gather_in_order, {
        "plain": "every rank gets all keys and values, even from pieces of unequal length",
        "plain_back": "backward, every rank gets the sum of all ranks' gradients of its own keys and values",
        "zigzag": "from a zigzag, they come in time order",
        "zigzag_back": "and backward, their gradients return to their owners",
        "kept": "it changes neither its input nor its gradient",
        "sent": "it sends each piece once to every other rank, and as many bytes backward",
        "losses": "the library trains a context-parallel model with it: the losses are those of one process",
        "weights": "and so are the weights"}, flags={"kept": WRITES, "sent": MORE}, sizes=(2, 4), limits=RANKS,
        points=2),
    Exercise("merge", "11", ("course.parallel.context_parallel.ring_attention.merge",), draw_blocks, run_merge, {
        "out": "four blocks' answers merge into the answer for all keys",
        "lse": "and so do their log-sum-exps",
        "large_out": "they merge for scores of a thousand too, whose exponential overflows",
        "large_lse": "and so do the log-sum-exps of these",
        "kept": "it does not change the new block's answer",
        "losses": "the library trains with a ring: the losses are those of one process",
        "weights": "and so are the weights"}, flags={"kept": WRITES}, sizes=(2, 4), limits=RANKS, points=2),
    Exercise("zigzag", "11", ("course.parallel.token_split.zigzag",), draw_sizes, run_zigzag, {
        "positions": "every rank has a piece from the front and one from the back, in order",
        "there": "the positions are on the device that it is given"}, flags={"there": "they are on another one"},
        cases=positions_asked),
    Exercise("visible", "11", ("course.parallel.context_parallel.ring_attention.visible",), draw_pairs, run_visible, {
        "causal_out": "causal ring attention over a zigzag gives every query its answer",
        "causal_back": "and its gradients are right",
        "causal_work": "each round computes half of the square, on every rank",
        "all_out": "without causality, every query gets its answer, even with pieces of unequal length",
        "all_back": "and its gradients are right",
        "all_work": "each such round computes the whole square"}, sizes=(2, 4), limits=RANKS, points=2),
]
