"""Lesson 19's open task: cross-entropy and its gradient as Triton kernels, for a vocabulary that is wider than a block.

Every logit is read twice: once for a running maximum and sum, once for the gradient, which overwrites it. Liger Kernel does the
same (Hsu et al. 2024, arXiv:2410.10989).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from course.lab.checks import random_inputs, return_values
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.exercises.lesson19_flash_attention import GUARD, guards_kept
from course.lab.exercises.lesson19_kernels import guarded
from course.lab.instruments.watched_memory import Accesses, address, watched
from course.lab.sandbox.limits import Limits
from course.ops.triton_language import tl, triton


@triton.jit
def cross_entropy_kernel(logits, targets, gradient, losses, factor, V, row, gradient_row, ignored, BLOCK: tl.constexpr):
    """The loss of one token, and the gradient of its logits. Choose the arguments yourself."""
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + token)
    kept = target != ignored
    logits += token * row
    gradient += token * gradient_row
    # threads wait for each other in the sums below: when one of them stores the gradient, all have read the target's logit
    wanted = tl.load(logits + target, mask=kept, other=0.0).to(tl.float32)
    end = tl.where(kept, V, 0)                       # the logits of an ignored token are not read
    column = tl.arange(0, BLOCK)
    top, total = tl.full((), -1e38, tl.float32), tl.full((), 0.0, tl.float32)           # finite: -inf - -inf is NaN
    for start in range(0, end, BLOCK):
        x = tl.load(logits + start + column, mask=start + column < end, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0)
        top = new
    total = tl.where(kept, total, 1.0)
    tl.store(losses + token, tl.where(kept, top - wanted + tl.log(total), 0.0))
    scale = tl.load(factor)
    for start in range(0, V, BLOCK):
        at = start + column
        x = tl.load(logits + at, mask=at < end, other=-float("inf")).to(tl.float32)
        grad = scale * (tl.exp(x - top) / total - tl.where(at == target, 1.0, 0.0))
        tl.store(gradient + at, tl.where(kept, grad, 0.0).to(gradient.dtype.element_ty), mask=at < V)


def cross_entropy(logits: Tensor, targets: Tensor, ignored: int, scale: float, block: int) -> tuple[Tensor, Tensor]:
    """The mean loss of the tokens whose target is not `ignored`, and the gradient of `scale` times that loss for the logits.

    logits (T, V), with adjacent columns, may be overwritten. targets (T,). The loss is () in float32, the gradient (T, V) in the
    format of the logits. A kernel loads or stores at most `block` numbers at once, a power of two.
    """
    T, V = logits.shape
    gradient = logits                                # in their place
    losses = torch.empty(T, device=logits.device)
    kept = (targets != ignored).sum().clamp(min=1)
    cross_entropy_kernel[(T,)](logits, targets, gradient, losses, scale / kept, V, logits.stride(0), gradient.stride(0), ignored,
                               block)
    return losses.sum() / kept, gradient


@dataclass(frozen=True)
class Case:
    """One call: `tokens` tokens with `words` logits, in blocks of `block`. kind: see `draw_case`."""

    tokens: int
    words: int
    block: int
    dtype: torch.dtype
    ignored: int
    scale: float
    kind: str = "plain"


VISIBLE = (Case(5, 149, 32, torch.float32, -100, 1.0), Case(5, 40, 64, torch.float32, 0, 64.0),
           Case(5, 96, 32, torch.bfloat16, -100, 3.0), Case(5, 75, 32, torch.float32, -100, 2.0, "large"),
           Case(3, 70, 32, torch.float32, -1, 0.25, "masked"), Case(3, 70, 32, torch.float32, -100, 1.0, "none"))
HIDDEN = (*VISIBLE, Case(5, 67, 16, torch.bfloat16, 7, 5.0), Case(6, 97, 64, torch.float32, 3, 0.5))
LARGE = 1e4
SURE = (3.0, 4.0)                                    # log of the odds of a target, about: probabilities of 0.95 and 0.98


def draw_case(generator: torch.Generator, case: Case) -> tuple[Tensor, Tensor]:
    """Logits that rise from block to block for some tokens and fall for others, and targets in several blocks, some ignored.

    kind large: the logits of tokens 0 and 1 are times 10,000, with the largest in the first and in the last block, and those of 2
    and 3 are moved up and down by as much or more. masked: those of token 0 are -inf in the first block, those of 1 in the last
    one, and all of an ignored token. none: no token is kept. In bf16, a token that is kept is almost sure of its target.
    """
    T, V, block = case.tokens, case.words, case.block
    slope, place = torch.linspace(-3, 3, T, dtype=torch.float64), torch.linspace(-1, 1, V, dtype=torch.float64)
    logits = 2 * random_inputs.normal(generator, T, V) + slope[torch.randperm(T, generator=generator), None] * place
    first = torch.randperm(T, generator=generator) % math.ceil(V / block) * block
    targets = first + (torch.rand(T, generator=generator) * (V - first).clamp(max=block)).long()
    ignored = torch.randperm(T, generator=generator)[:2] if case.kind == "plain" else T - 1
    if case.kind == "large":
        logits[0, 1] = logits[1, -1] = logits.max() + 1
        targets[:2] = torch.tensor([1, V - 1])
        logits[:2] *= LARGE
        logits[2:4] += torch.tensor([[LARGE], [-1.5 * LARGE]])
    elif case.kind == "masked":
        last = (V - 1) // block * block
        logits[0, :block], logits[1, last:] = -torch.inf, -torch.inf
        targets[:2] = torch.randint(block, last, (2,), generator=generator)
        logits[ignored] = -torch.inf
    targets[targets == case.ignored] += 1
    targets[ignored if case.kind != "none" else slice(None)] = case.ignored
    if case.dtype == torch.bfloat16:
        sure = int((targets != case.ignored).nonzero()[0])
        logits[sure, targets[sure]] = sure_logit(logits[sure], int(targets[sure]))
    return logits.to(case.dtype), targets


def sure_logit(logits: Tensor, target: int) -> Tensor:
    """A logit in bf16 for the target that makes a token almost sure of it, so that bf16 rounds its probability by much."""
    rows = logits.repeat(9, 1)
    rows[:, target] = logits.logsumexp(0) + torch.linspace(*SURE, 9, dtype=torch.float64)
    p = rows.bfloat16().double().softmax(1)[:, target]
    return rows[(p - p.bfloat16().double()).abs().argmax(), target]


def draw(seed: int, hidden: bool) -> Tensors:
    """Of each case logits and targets, and what else the function is given: the ignored target, the scale and the block."""
    generator, cases = random_inputs.generator(seed), HIDDEN if hidden else VISIBLE
    found = {"settings": torch.tensor([(case.ignored, case.scale, case.block) for case in cases], dtype=torch.float64)}
    for number, case in enumerate(cases):
        found[f"logits{number}"], found[f"targets{number}"] = draw_case(generator, case)
    return found


def unpacked(inputs: Tensors) -> list[tuple[Tensor, Tensor, int, float, int]]:
    """The arguments of each case."""
    return [(inputs[f"logits{number}"], inputs[f"targets{number}"], int(ignored), scale, int(block))
            for number, (ignored, scale, block) in enumerate(inputs["settings"].tolist())]


GIVEN = 2                                            # tensors that are watched from the beginning: logits and targets
LOGITS, GRADIENT, OTHERS = 0, 1, 2                   # whose memory an access is in; the gradient's, if it has memory of its own


def places(x: Tensor) -> np.ndarray:
    """For each element of a matrix's memory, its place in the matrix, row by row; -1 if it has none."""
    found = np.full(x.untyped_storage().nbytes() // x.element_size(), -1)
    inside = np.lib.stride_tricks.as_strided(found[x.storage_offset():], x.shape, [8 * step for step in x.stride()])
    inside[...] = np.arange(x.numel()).reshape(x.shape)
    return found


def as_numbers(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """What a kernel loaded or stored, in float32: the interpreter holds the bits of bfloat16."""
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == torch.bfloat16 else values.astype(np.float32)


def recorded(case: int, accesses: Accesses, logits: Tensor, gradient: Tensor) -> Tensors:
    """The accesses of a case in order. events: case, launch, program, memory, whether it was a store, how many numbers.

    places, values: of each number, with its place in the matrix if it is the logits' or the gradient's, else in memory. own: case
    and memory of each other tensor that only kernels fill.
    """
    known = {GIVEN + number: x for number, x in enumerate(accesses.made)}
    memories, at = {0: LOGITS}, {LOGITS: places(logits)}
    if address(gradient) != address(logits):
        memories |= {number: GRADIENT for number, x in known.items() if address(x) == address(gradient)}
        at[GRADIENT] = places(gradient)
    own = [(case, OTHERS + number) for number, x in known.items()
           if number not in memories and address(x) not in accesses.computed]
    events, where, values = [], [np.zeros(0)], [np.zeros(0)]
    for visit in accesses.visits:
        memory, (x, y, z) = memories.get(visit.tensor, OTHERS + visit.tensor), visit.program
        events.append((case, visit.launch, x + (y << 16) + (z << 32), memory, visit.stored, visit.elements.size))
        where.append(at[memory][visit.elements] if memory in at else visit.elements)
        dtype = logits.dtype if memory in at else known[visit.tensor].dtype if visit.tensor in known else torch.int64
        values.append(as_numbers(visit.values, dtype))
    return {"events": torch.tensor(events, dtype=torch.int64).view(-1, 6),
            "own": torch.tensor(own, dtype=torch.int64).view(-1, 2),
            "places": torch.from_numpy(np.concatenate(where).astype(np.int64)),
            "values": torch.from_numpy(np.concatenate(values).astype(np.float32))}


def raced_tokens(accesses: Accesses, logits: Tensor, gradient: Tensor) -> list[int]:
    """Tokens with a logit, or an element of the gradient, that raced."""
    where = {0: places(logits)} | {GIVEN + number: places(gradient) for number, x in enumerate(accesses.made)
                                   if address(x) == address(gradient)}
    found = [int(where[tensor][element]) for tensor, element in accesses.raced if tensor in where]
    return [place // logits.shape[1] for place in found if place >= 0]


def run(inputs: Tensors) -> Tensors:
    """A transcript: what kernels loaded and stored, losses and gradients, and what was made and computed beside."""
    found: list[Tensors] = []
    for number, (logits, targets, ignored, scale, block) in enumerate(unpacked(inputs)):
        x, t = guarded(logits, extra=40), torch.full((len(targets) + GUARD,), 1)[:len(targets)].copy_(targets)
        with watched(x, t, made=True) as accesses:
            returned = cross_entropy(x, t, ignored, scale, block)
        loss, gradient = return_values.pair(returned, "cross_entropy", "(loss, gradient)")
        loss = return_values.tensor(loss, "cross_entropy", (), torch.float32, " as the loss")
        gradient = return_values.tensor(gradient, "cross_entropy", tuple(x.shape), x.dtype, " as the gradient")
        beside = sum(made.numel() for made in accesses.made if address(made) != address(gradient))
        inside = accesses.inside and guards_kept(x) and torch.equal(t, targets)
        found.append(recorded(number, accesses, x, gradient) | {
            "losses": loss.double().view(1), "gradients": gradient.flatten().float(),
            "beside": torch.tensor([[address(gradient) == address(x), beside, accesses.largest, inside,
                                     bool((targets[raced_tokens(accesses, x, gradient)] != ignored).any()),
                                     not accesses.used.isdisjoint({address(x), address(gradient)})]])})
    return {name: torch.cat([one[name] for one in found]) for name in found[0]}


MANY = 4                                             # tokens of a program; numbers of a token with which PyTorch may compute
LAUNCHES = 8                                         # of a call
MOST = 10**8                                         # numbers of a transcript's memories


def reference(logits: Tensor, targets: Tensor, ignored: int, scale: float) -> tuple[float, Tensor]:
    """Loss and gradient in float64, by PyTorch; both are 0 if no token is kept."""
    leaf, kept = logits.double().requires_grad_(), targets != ignored
    loss = F.cross_entropy(leaf[kept], targets[kept], reduction="sum") / kept.sum().clamp(min=1)
    gradient, = torch.autograd.grad(scale * loss, leaf)
    return loss.item(), gradient


def distance(gradient: Tensor, wanted: Tensor, tolerance: float) -> float:
    """1.0 if a gradient is near the one wanted, 0.0 if it is not finite; else its length along that one, or 1 + its error."""
    size = wanted.norm().item() or 1.0
    error, along = (gradient - wanted).norm().item() / size, (gradient * wanted).sum().item() / size**2
    if not math.isfinite(error):
        return 0.0
    return 1.0 if error <= tolerance else 1 + error if abs(along - 1) < 1e-3 else abs(along)


@dataclass(frozen=True)
class Replay:
    """What a case's accesses did: loads and stores of each logit, and whether the transcript agrees with the tensors."""

    loads: np.ndarray                                # (T, V)
    stores: np.ndarray                               # (T, V)
    early: np.ndarray                                # (T,): whether its gradient was stored before all its logits were loaded
    real: bool                                       # each load found what was there, and the gradient is what kernels stored
    largest: int                                     # numbers of one load or store
    tokens: int                                      # of a program
    launches: int
    apart: bool                                      # no program read what another one of the launch wrote


def replay(logits: Tensor, events: np.ndarray, own: set[int], places: np.ndarray, values: np.ndarray, gradient: np.ndarray,
           over: bool) -> Replay:
    """Go through a case's accesses in order. own: memories that only kernels fill. over: the gradient is in the logits' memory.

    Raises ValueError if this is no transcript.
    """
    size, home = logits.numel(), LOGITS if over else GRADIENT
    memory = {room: np.full(places.max(initial=0) + 1, np.nan, np.float32) for room in own}
    memory |= {LOGITS: logits.float().numpy().flatten(), GRADIENT: np.full(size, np.nan, np.float32)}
    loads, stores, real, begin = np.zeros(size), np.zeros(size), True, 0
    loaded, final = np.full(size, np.inf), np.full(size, -np.inf)       # which event was a logit's first load, or its last store
    tokens: dict[tuple[int, int], set[int]] = {}
    users: dict[tuple[int, int, int], tuple[set[int], set[int]]] = {}
    for moment, (_, launch, program, room, stored, count) in enumerate(events.tolist()):
        at, found, begin = places[begin:begin + count], values[begin:begin + count], begin + count
        for place in at.tolist():
            users.setdefault((launch, room, place), (set(), set()))[stored].add(program)
        if room < OTHERS:
            if not ((at >= -1) & (at < size)).all():
                raise ValueError("there is no such place in the matrix")
            at, found = at[at >= 0], found[at >= 0]  # others lie between rows, which a claim of its own forbids
            tokens.setdefault((launch, program), set()).update((at // logits.shape[1]).tolist())
            (stores if stored else loads)[at] += stored == 0 or room == home
            if stored and room == home:
                final[at] = moment
            elif room == LOGITS and not stored:
                loaded[at] = np.minimum(loaded[at], moment)
        if stored and room in memory:
            memory[room][at] = found
        elif room in memory:
            real &= np.array_equal(memory[room][at], found, equal_nan=True)
    real &= bool(stores.all()) and np.array_equal(memory[home], gradient, equal_nan=True)
    apart = not any(readers and writers and len(readers | writers) > 1 for readers, writers in users.values())
    early = final.reshape(logits.shape).min(1) < loaded.reshape(logits.shape).max(1)
    return Replay(loads.reshape(logits.shape), stores.reshape(logits.shape), early, real, int(events[:, 5].max(initial=0)),
                  max(map(len, tokens.values()), default=0), len(set(events[:, 1].tolist())), apart)


def weigh(inputs: Tensors, transcript: Tensors) -> Tensors:
    """What the claims are about, case by case, from the transcript."""
    cases = unpacked(inputs)
    events, places, values = (transcript[name].numpy() for name in ("events", "places", "values"))
    if (events.dtype, places.dtype, events.shape[1:], values.shape) != (np.int64, np.int64, (6,), places.shape) or \
            events[:, 5].min(initial=0) < 0 or events[:, 5].sum() != len(places) or (np.diff(events[:, 0]) < 0).any() or \
            places.max(initial=0) * (1 + len(transcript["own"])) > MOST:
        raise ValueError("no transcript of loads and stores")
    gradients = transcript["gradients"].split([logits.numel() for logits, *_ in cases])
    begin, found = 0, dict[str, list[float]]()
    for number, (case, gradient, loss, beside) in enumerate(
            zip(cases, gradients, transcript["losses"].tolist(), transcript["beside"].tolist(), strict=True)):
        mine = events[events[:, 0] == number]
        own = {memory for where, memory in transcript["own"].tolist() if where == number}
        end = begin + int(mine[:, 5].sum())
        went = replay(case[0], mine, own, places[begin:end], values[begin:end], gradient.numpy(), bool(beside[0]))
        begin = end
        for name, value in {"loss": loss, **judged(case, loss, gradient), **counted(case, went, *beside)}.items():
            found.setdefault(name, []).append(float(value))
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}


def counted(case: tuple[Tensor, Tensor, int, float, int], went: Replay, over: int, beside: int, largest: int, inside: int,
            raced: int, used: int) -> dict[str, float]:
    """What a case's kernels and PyTorch did: 1.0 for each claim that holds. reads: else the reads of each logit.

    over: whether the gradient is in the logits' memory. beside: numbers of all tensors that were made, without the gradient.
    largest: numbers of the largest one with which PyTorch computed. inside: whether all accesses were. raced: whether a
    logit of a kept token, or its gradient, did. used: whether PyTorch computed with the logits or the gradient.
    """
    logits, targets, ignored, _, block = case
    (T, V), kept = logits.shape, (targets != ignored).numpy()
    reads = went.loads.sum(1).max() / V
    once = reads <= 2 + 2 / V and went.stores.sum(1).max() <= V + 1     # the target's logit may be read and stored alone
    return {"stored": went.real and bool((went.loads[kept] > 0).all()) and not went.early[kept].any(),
            "block": went.largest <= block, "spread": went.tokens <= MANY and went.launches <= LAUNCHES, "apart": went.apart,
            "threads": not raced, "alone": largest <= MANY * T and not used, "beside": 2 * beside <= T * V, "guards": inside,
            "reads": 1.0 if once else max(round(reads), 2), "over": over, "skipped": not went.loads[~kept].any()}


def judged(case: tuple[Tensor, Tensor, int, float, int], loss: float, gradient: Tensor) -> dict[str, float]:
    """How near the gradient is to the one wanted, and whether the loss has the digits of sums in float32.

    In bf16 the gradient of each token has to be near. Where a token is sure of its target, softmax - 1 is small, and a softmax
    that has been rounded before leaves it few digits.
    """
    logits, targets, ignored, scale, _ = case
    wanted_loss, wanted = reference(logits, targets, ignored, scale)
    large = bool(logits[logits.isfinite()].abs().max() > LARGE / 2)
    fine = 1e-3 if large else 1e-5
    error = abs(loss - wanted_loss) / max(abs(wanted_loss), 1.0)
    half = logits.dtype == torch.bfloat16
    parts = zip(*(x.split(1 if half else len(logits)) for x in (gradient.double().view_as(wanted), wanted)), strict=True)
    near = [distance(mine, right, 0.005 if half else fine) for mine, right in parts]
    return {"gradient": next((value for value in near if value != 1), 1.0),
            "digits": not fine < error < 0.03}


def asked(inputs: Tensors) -> list[str]:
    """Each case in words."""
    words = []
    for number, (logits, targets, ignored, scale, block) in enumerate(unpacked(inputs)):
        (T, V), dtype = logits.shape, str(logits.dtype).removeprefix("torch.")
        more = " beyond 10,000" if logits.max() > LARGE / 2 else "" if logits.isfinite().all() else ", some -inf,"
        words.append(f"case {number}: {T} tokens, {int((targets != ignored).sum())} kept, {V} logits{more} in {dtype}, "
                     f"ignored={ignored}, scale={scale:g}, block={block}")
    return words


EXPLANATIONS = {
    "guards": "a mask is missing, or a step between rows is wrong: rows of logits lie logits.stride(0) elements apart, and those "
              "of a gradient with memory of its own gradient.stride(0). An ignored target can be -100, and logits + target then "
              "lies before the row. The targets stay as they are",
    "block": "the vocabulary is wider than a block: let each program loop over blocks, `for start in range(0, V, BLOCK)`",
    "alone": "PyTorch may count targets and add up losses, 4 numbers of a token at most. What it has to do with logits or their "
             "gradient, kernels compute and store: also zeros and casts",
    "beside": "you make more tensors than the task needs. Besides the gradient, a few numbers of each token are enough",
    "stored": "kernels load all logits of a kept token, and then store each element of the gradient that you return. One is left "
              "out, or it is not a kernel that stored it",
    "spread": "launch one program for each token, all in one launch: a program for many tokens leaves most of the GPU idle, and "
              "many launches keep the host busy",
    "apart": "one program reads what another one of the same launch writes. On a GPU they run at the same time, in any order: "
             "launch a second kernel, or add up with PyTorch",
    "threads": "threads of a program wait for each other only in sums, maxima and tl.debug_barrier(). Two lines touch the same "
               "number, one of them stores it, and none of these lies between: read the target's logit before the first loop, "
               "and store the gradient of a block at once",
    "loss": "take the case that is named, and compare with F.cross_entropy, token by token: is it one of several blocks, one "
            "without a kept token, one with large logits, one whose ignored target is a word? Where a logit is -inf, a product "
            "with 0 is NaN: choose with tl.where",
    "gradient": "scale / kept * (softmax - 1 at the target), and 0 for an ignored token, by tl.where: 0 times NaN is NaN. If the "
                "case is in bf16, round once, when you store. Compare with autograd, token by token",
    "digits": "the loss loses digits: add up in float32, whatever the logits' format, and cast only what you store",
    "reads": "each logit can be read twice: once for maximum and sum together, once for the gradient. A new maximum rescales the "
             "sum so far, as in the exercise on online softmax",
    "over": "the logits' memory is free after the second reading: store the gradient there, and return `logits`. What else needs "
            "a logit has to read it before",
    "skipped": "the gradient of an ignored token is 0, whatever its logits: end its loops that read before they begin, and store "
               "zeros",
}


def explain(inputs: Tensors, expected: Tensors, got: Tensors) -> str:
    """What to say of the first claim that does not hold."""
    return EXPLANATIONS[next(name for name in EXPLANATIONS if not torch.allclose(expected[name], got[name], 1e-4))]


EXERCISES = [
    Exercise("cross-entropy", "19", (f"{__name__}.cross_entropy_kernel", f"{__name__}.cross_entropy"), draw, run, {
        "loss": "the loss is the mean over kept tokens, and 0 if there is none",
        "gradient": "the gradient is that of scale times the loss, and 0 for ignored tokens",
        "digits": "the loss has the digits of float32, also for logits in bf16",
        "stored": "kernels load the logits, and store the gradient that you return",
        "block": "no load or store touches more than `block` numbers",
        "spread": f"there are at most {LAUNCHES} launches, and no program handles more than {MANY} tokens",
        "apart": "no program reads what another one of the same launch writes",
        "threads": "threads of a program wait for each other before one stores what another reads or stores",
        "alone": f"PyTorch computes with at most {MANY} numbers of each token, and with none of its logits",
        "beside": "besides the gradient you make at most half as many numbers as there are logits",
        "guards": "nothing is read or written outside of the tensors",
        "reads": "each logit is read at most twice, and each element of the gradient is stored once",
        "over": "the gradient overwrites the logits",
        "skipped": "no logit of an ignored token is read"},
        flags={"gradient": "it is another", "digits": "some are lost", "stored": "not all, or something else",
               "block": "one is wider", "spread": "there are more, or one does", "apart": "one does", "threads": "they do not",
               "alone": "it computes with more", "beside": "you make more", "guards": "something is, or memory has changed",
               "reads": "some more often", "over": "it has memory of its own", "skipped": "some are read"},
        levels={"reads": "two reads", "over": "in place", "skipped": "ignored tokens unread"}, cases=asked, weigh=weigh,
        explain=explain, tolerance=1e-4,
        unknown="take the case that is named, and compare with F.cross_entropy, token by token: the maximum, the sum, the loss, "
                "the gradient",
        ladder=("Begin with one program for each token and three loops over blocks: the maximum, the sum of exp(x - maximum), "
                "the gradient. PyTorch counts kept tokens before the launch and adds up the losses after it. Masked loads give "
                "-inf, which neither a maximum nor a sum of exponentials notices.",
                "The first two loops become one: keep a maximum and a sum, and multiply the sum by exp(old - new maximum) at "
                "each block. Begin with a finite maximum, such as -1e38: a first block of -inf would give exp(-inf + inf), NaN.",
                "Read the target's logit before the first loop, since the gradient overwrites it: threads of a program wait for "
                "each other only in sums and maxima. For an ignored token let the loops that read end at 0 in place of V, and "
                "choose zeros with tl.where before you store."),
        limits=Limits(seconds=120)),
]
