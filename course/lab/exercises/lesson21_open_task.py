"""Lesson 21's open task: which ranks hold which experts."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, permutations

import torch

from course.lab.checks.exercise import Exercise, Tensors
from course.lab.instruments.expert_placement import Placement, as_placement, rank_tokens, transfers
from course.lab.sandbox.limits import Limits

GOOD, NEAR, BALANCED = 1.25, 1.10, 1.05              # times the tokens of the busiest rank in the best placement
MOVED = 0.4                                          # of all slots may get another expert


def place_experts(tokens: Sequence[int], slots: int, before: Placement) -> list[list[int]]:
    """The experts of each rank, so that the busiest rank computes few tokens and few experts move.

    tokens: of each expert; its copies, on different ranks, share them equally. slots: experts that a rank holds at most.
    before: the experts of each rank so far.
    """
    ranks, mean = range(len(before)), sum(tokens) / len(before)
    holders = [{rank for rank in ranks if expert in before[rank]} for expert in range(len(tokens))]
    load = [sum(count / len(there) for count, there in zip(tokens, holders, strict=True) if rank in there) for rank in ranks]

    def changes() -> Iterator[dict[int, set[int]]]:
        """Rank `to` gets an expert of a busy rank, in a free slot or in the place of another: a copy, or the expert itself.

        A change is the new ranks of one or two experts."""
        held = [{expert for expert, there in enumerate(holders) if rank in there} for rank in ranks]
        for busy, to in permutations(ranks, 2):
            for expert in held[busy] - held[to] if load[busy] > mean else ():
                copied, moved = holders[expert] | {to}, holders[expert] ^ {busy, to}
                if len(held[to]) < slots:
                    yield from ({expert: copied}, {expert: moved})
                for other in held[to]:
                    rest = holders[other] - {to}
                    if rest:
                        yield from ({expert: copied, other: rest}, {expert: moved, other: rest})
                    if busy not in rest:
                        yield {expert: moved, other: rest | {busy}}

    def after(change: dict[int, set[int]]) -> list[float]:
        """The tokens of each rank after a change."""
        found = list(load)
        for expert, there in change.items():
            for rank in holders[expert]:
                found[rank] -= tokens[expert] / len(holders[expert])
            for rank in there:
                found[rank] += tokens[expert] / len(there)
        return found

    def gain(change: dict[int, set[int]]) -> float:
        """How much the sum of squares falls for each transfer."""
        sent = sum(len(there - holders[expert]) for expert, there in change.items())
        return sum(old * old - new * new for old, new in zip(load, after(change), strict=True)) / sent

    while max(load) > 1.03 * mean:
        best = max(changes(), key=gain, default={})
        if not best or gain(best) <= 0:
            break
        load = after(best)
        for expert, there in best.items():
            holders[expert] = there
    return [[expert for expert, there in enumerate(holders) if rank in there] for rank in ranks]


# ranks, slots, experts with two copies, copies of the hottest expert, experts without tokens, whether the second copies are new
Kind = tuple[int, int, int, int, int, bool]
VISIBLE: tuple[Kind, ...] = ((12, 3, 0, 0, 0, False), (12, 3, 5, 0, 0, True), (8, 5, 2, 4, 0, False), (6, 5, 2, 0, 6, False),
                             (16, 3, 3, 5, 3, False), (3, 8, 9, 0, 0, False))
HIDDEN: tuple[Kind, ...] = (*VISIBLE, (10, 4, 4, 3, 2, True), (4, 8, 12, 0, 4, False))
ENOUGH, FEW = 1.03, 4                                # what our own placement reaches in each case that is drawn


def draw_best(dice: random.Random, kind: Kind, mean: int) -> tuple[list[int], list[list[int]]] | None:
    """The tokens of each expert, and a placement in which each rank has exactly `mean`; None if an expert is too large."""
    ranks, slots, twice, hot, dead, _ = kind
    placement, shares = [list[int]() for _ in range(ranks)], list[int]()

    def add(share: float, where: Sequence[int]) -> None:
        for rank in where:
            placement[rank].append(len(shares))
        shares.append(int(share))

    if hot:
        add(dice.uniform(0.5, 0.6) * mean, dice.sample(range(ranks), hot))
    for number in range(twice + dead):
        emptiest = sorted(range(ranks), key=lambda rank: (len(placement[rank]), dice.random()))
        add(dice.uniform(0.45, 0.9) * mean / slots if number < twice else 0, emptiest[:2 if number < twice else 1])
    for rank, experts in enumerate(placement):
        left = mean - sum(shares[expert] for expert in experts)
        weights = [dice.lognormvariate(0, 0.9) for _ in range(slots - len(experts))]
        parts = [int(left * weight / sum(weights)) for weight in weights]
        parts[0] += left - sum(parts)
        if not 0 < min(parts) <= max(parts) <= 0.6 * mean:
            return None
        for part in parts:
            add(part, [rank])
    copies = Counter(chain.from_iterable(placement))
    return [share * copies[expert] for expert, share in enumerate(shares)], placement


def disturb(dice: random.Random, kind: Kind, tokens: Sequence[int], best: Placement) -> list[list[int]]:
    """A valid placement, a few transfers away from the best one: copies are missing, and a rank has large experts of others."""
    ranks, _, twice, hot, _, new_copies = kind
    before, copies = [list(experts) for experts in best], Counter(chain.from_iterable(best))
    if hot:                                          # it was cold: one copy is enough, and its slots hold copies of others
        for rank in [rank for rank in range(ranks) if 0 in best[rank]][1:]:
            before[rank][before[rank].index(0)] = dice.choice([e for e in range(len(tokens)) if e and e not in before[rank]])
    for expert in range(bool(hot), bool(hot) + twice) if new_copies else ():
        before[next(rank for rank in range(ranks) if expert in before[rank])].remove(expert)
    victim, *others = dice.sample(range(ranks), 2 if hot else 3)
    for other in others:
        large = max((e for e in before[other] if copies[e] == 1 and e not in before[victim]), key=lambda e: tokens[e])
        small = min((e for e in before[victim] if copies[e] == 1 and e not in before[other]), key=lambda e: tokens[e])
        before[other][before[other].index(large)], before[victim][before[victim].index(small)] = small, large
    return before


def draw_case(dice: random.Random, kind: Kind, place: Callable[..., list[list[int]]] = place_experts
              ) -> tuple[list[int], list[list[int]]]:
    """The tokens of each expert and a placement before; the best one has the mean on each rank, and ours comes near it."""
    mean, slots = dice.randint(8000, 12000), kind[1]
    while True:
        if not (found := draw_best(dice, kind, mean)):
            continue
        names = dice.sample(range(len(found[0])), len(found[0]))
        before = [dice.sample([names[e] for e in experts], len(experts)) for experts in disturb(dice, kind, *found)]
        tokens = [count for _, count in sorted(zip(names, found[0], strict=True))]
        if max(rank_tokens(tokens, before)) < 1.4 * mean:
            continue
        ours = place(tokens, slots, before)
        if max(rank_tokens(tokens, ours)) <= ENOUGH * mean and transfers(before, ours) <= len(before) * slots // FEW:
            return tokens, before


def draw(seed: int, hidden: bool) -> Tensors:
    """Of each case the ranks and slots, the tokens of the experts, and the experts of each slot before; -1 stands for none."""
    dice, kinds = random.Random(seed), HIDDEN if hidden else VISIBLE
    sizes = torch.tensor([kind[:2] for kind in kinds])
    tokens, before = torch.full((len(kinds), 48), -1), torch.full((len(kinds), 16, 8), -1)
    for case, kind in enumerate(kinds):
        counts, placement = draw_case(dice, kind)
        tokens[case, :len(counts)] = torch.tensor(counts)
        for rank, experts in enumerate(placement):
            before[case, rank, :len(experts)] = torch.tensor(experts)
    return {"sizes": sizes, "tokens": tokens, "before": before}


def unpacked(inputs: Tensors) -> list[tuple[list[int], int, list[list[int]]]]:
    """The arguments of each case."""
    return [([count for count in tokens if count >= 0], slots, [[e for e in row if e >= 0] for row in before[:ranks]])
            for (ranks, slots), tokens, before in zip(*(inputs[name].tolist() for name in ("sizes", "tokens", "before")),
                                                      strict=True)]


def run(inputs: Tensors) -> Tensors:
    """How often each rank holds each expert in the placement of each case."""
    cases = unpacked(inputs)
    held = torch.zeros(len(cases), 16, 48, dtype=torch.int64)
    for case, (tokens, slots, before) in enumerate(cases):
        returned = place_experts(list(tokens), slots, [list(experts) for experts in before])
        for rank, experts in enumerate(as_placement(returned, len(before), len(tokens), "place_experts")):
            for expert in experts:
                held[case, rank, expert] += 1
    return {"held": held}


def weigh(inputs: Tensors, transcript: Tensors) -> Tensors:
    """The tokens of the busiest rank and the transfers, or what is right where they are few enough; and what else is claimed."""
    cases, counts = unpacked(inputs), transcript["held"]
    if counts.shape != (len(cases), 16, 48) or counts.dtype != torch.int64 or not 0 <= counts.min() <= counts.max() <= 1000:
        raise ValueError("no transcript of placements")
    found: dict[str, list[float]] = {name: [] for name in EXERCISES[0].claims}
    for (tokens, slots, before), held in zip(cases, counts, strict=True):
        held = held[:len(before), :len(tokens)]
        after = [[e for e, times in enumerate(row) for _ in range(times)] for row in held.tolist()]
        busiest, best = max(rank_tokens(tokens, after)), sum(tokens) / len(before)      # no placement is below the mean
        allowed = int(MOVED * len(before) * slots)
        for name, value in (("missing", (held.sum(0) > 0).all()), ("twice", (held < 2).all()),
                            ("slots", (held.sum(1) <= slots).all()), ("busiest", best if busiest <= GOOD * best else busiest),
                            ("balanced", busiest <= BALANCED * best), ("near", busiest <= NEAR * best),
                            ("few", max(transfers(before, after), allowed))):
            found[name].append(float(value))
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


def asked(inputs: Tensors) -> list[str]:
    """Each case in words."""
    return [f"case {number}: {len(tokens)} experts, {tokens.count(0)} of them without tokens, on {len(before)} ranks with "
            f"{slots} slots" for number, (tokens, slots, before) in enumerate(unpacked(inputs))]


EXPLANATIONS = {
    "missing": "each expert's weights have to be somewhere, also if it got few tokens lately or none: keep one copy of "
               "each. Before you take an expert out of a slot, ask whether another rank holds it",
    "twice": "two copies on one rank halve nothing: their tokens meet again there. Before you put an expert on a rank, ask "
             "whether it is there",
    "slots": "a slot is memory for one expert's weights, also for a cold one. Where many cold experts follow a hot one, the rank "
             "with the fewest tokens may be full: skip it",
    "balanced": "the first placement is seldom the best. Take the busiest rank, and try each exchange of one of its experts "
                "for one of another rank, and each move or copy into a free slot. Repeat until none lowers the sum of "
                "squares",
    "few": "most experts may stay where they are: begin with `before`, and take one small change after another, each time the "
           "one that helps most for each transfer. Stop when the busiest rank is near the mean",
}


def explain(inputs: Tensors, expected: Tensors, got: Tensors) -> str:
    """What to say of the first claim that does not hold; "" if it is the busiest rank alone."""
    wrong = [name for name in expected if not torch.allclose(expected[name], got[name])]
    return EXPLANATIONS.get(wrong[0], "")


EXERCISES = [
    Exercise("place-experts", "21", (f"{__name__}.place_experts",), draw, run, {
        "missing": "every expert is on a rank, also one without tokens",
        "twice": "no rank holds two copies of an expert",
        "slots": "no rank holds more experts than it has slots",
        "busiest": f"the busiest rank has at most {GOOD - 1:.0%} more tokens than in the best placement",
        "balanced": f"the busiest rank has at most {BALANCED - 1:.0%} more tokens than in the best placement",
        "few": f"at most {MOVED:.0%} of the slots get another expert",
        "near": f"so the busiest rank has at most {NEAR - 1:.0%} more tokens"},
        flags={"missing": "an expert is missing", "twice": "a rank holds an expert twice", "slots": "a rank holds too many",
               "balanced": "it has more", "near": "it has more"},
        levels={"balanced": "balanced", "few": "few transfers", "near": "few transfers"},
        cases=asked, weigh=weigh, explain=explain,
        unknown="take the case that is named, and print `rank_tokens` of your placement beside the mean. What lies on the "
                "busiest rank: a hot expert with too few copies, or several experts that each have room elsewhere? Which "
                "exchange with another rank lowers it most? If too many experts move, begin with `before`",
        ladder=("Decide the copies first: give each spare slot to the expert with the most tokens for each copy. Then place all "
                "copies, the largest share first, each on the rank with the fewest tokens so far that has a free slot and does "
                "not hold this expert. Those without tokens come last, and need a slot too.",
                "The first placement is seldom the best. Look at the busiest rank, and try each exchange of one of its experts "
                "for one of another rank, and each move into a free slot. Keep the best change, and repeat until none helps. "
                "The sum of squares of the ranks' tokens tells more than the maximum: it also falls when the second busiest "
                "rank loses tokens.",
                "Begin with `before` instead of nothing. Three kinds of changes are enough: move an expert, copy it, or exchange "
                "two. A move or a copy goes into a free slot, or replaces an expert that has another copy; it costs one "
                "transfer, an exchange two. Take the change with the largest gain for each transfer, and stop when the busiest "
                "rank is near the mean."),
        limits=Limits(seconds=60)),
]
