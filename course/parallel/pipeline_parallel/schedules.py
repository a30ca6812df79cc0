"""Pipeline schedules: each rank's order of forward and backward passes, and when they run.

A schedule is, for each rank, a list of `Pass(kind, chunk, micro)`. A rank has one chunk of layers or, interleaved, v of them:
chunk c of rank r is stage c·p + r of p·v. A pass starts when the rank is free and its input has arrived: activations from the
previous stage for "F", gradients from the next stage for "B". A "B" also needs its own forward pass.

    gpipe        all forward, then all backward: activations of all micro-batches are alive (Huang et al. 2018, arXiv:1811.06965)
    1f1b         as few forward passes ahead as keep the others busy: activations of up to p - r micro-batches are alive on rank r
                 (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)
    interleaved  1f1b over v chunks per rank: v times shorter passes, so a v times smaller bubble, and v times more messages

The bubble, idle over total time, is (p - 1) / (p - 1 + v·m) for m micro-batches; for interleaved only if p divides m.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from course.utils.errors import CourseError


@dataclass(frozen=True)
class Pass:
    """One forward ("F") or backward ("B") pass of a micro-batch through a chunk of this rank."""

    kind: Literal["F", "B"]
    chunk: int
    micro: int


def gpipe(p: int, rank: int, m: int, v: int = 1) -> list[Pass]:
    """All forward passes, then all backward passes, the first micro-batch first."""
    return [Pass("F", 0, i) for i in range(m)] + [Pass("B", 0, i) for i in range(m)]


def one_forward_one_backward(p: int, rank: int, m: int, v: int = 1) -> list[Pass]:
    """Fill the pipeline, then one forward and one backward pass in turn, then drain it."""
    forward, backward = ([Pass(kind, 0, i) for i in range(m)] for kind in ("F", "B"))
    return alternate(forward, backward, ahead=min(p - rank - 1, m))


def interleaved(p: int, rank: int, m: int, v: int) -> list[Pass]:
    """1F1B in which rounds of micro-batches go through chunk 0 of every rank, then through chunk 1, ... (section 2.2).

    A round has p micro-batches, or a few more if p does not divide m. So m must be at least p.
    """
    count = m // p
    sizes = [m // count + (i < m % count) for i in range(count)]
    rounds = [range(sum(sizes[:i]), sum(sizes[:i + 1])) for i in range(count)]
    forward = [Pass("F", chunk, micro) for round in rounds for chunk in range(v) for micro in round]
    backward = [Pass("B", chunk, micro) for round in rounds for chunk in reversed(range(v)) for micro in round]
    return alternate(forward, backward, ahead=min(2 * (p - rank - 1) + (v - 1) * sizes[0], m * v))


def alternate(forward: list[Pass], backward: list[Pass], ahead: int) -> list[Pass]:
    """`ahead` forward passes, then forward and backward in turn, then the remaining backward passes."""
    turns = [both for pair in zip(forward[ahead:], backward, strict=False) for both in pair]
    return forward[:ahead] + turns + backward[len(forward) - ahead:]


def passes_of(name: str, p: int, rank: int, m: int, v: int = 1) -> list[Pass]:
    """The passes of a rank in the named schedule. Raises `CourseError` if there are too few micro-batches to interleave."""
    if name == "interleaved" and m < p:
        raise CourseError(f"parallel.schedule=interleaved needs as many micro-batches as parallel.pp={p}, and there are {m}: "
                          "choose a smaller train.micro_batch, or parallel.schedule=1f1b")
    schedules = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "interleaved": interleaved}      # looked up at each call
    return schedules[name](p, rank, m, v)


def bubble(p: int, m: int, v: int = 1) -> float:
    """The theoretical share of time that a rank is idle."""
    return (p - 1) / (p - 1 + v * m)


def before(work: Pass, rank: int, p: int, v: int) -> tuple[int, Pass] | None:
    """(rank, pass) whose result this pass needs from another stage; None for the first forward and last backward pass."""
    stage = work.chunk * p + rank
    other = stage - 1 if work.kind == "F" else stage + 1
    return (other % p, Pass(work.kind, other // p, work.micro)) if 0 <= other < p * v else None


def after(work: Pass, rank: int, p: int, v: int) -> int | None:
    """The rank that needs this pass's result; None for the last forward and first backward pass."""
    other = work.chunk * p + rank + (1 if work.kind == "F" else -1)
    return other % p if 0 <= other < p * v else None


def crossed(schedule: list[list[Pass]], v: int = 1) -> int:
    """How many messages are received in another order than they are sent; a wire cannot tell them apart."""
    p = len(schedule)
    sent: dict[tuple[int, int, str], list[Pass]] = {}
    awaited: dict[tuple[int, int, str], list[Pass]] = {}
    for rank, passes in enumerate(schedule):
        for work in passes:
            if source := before(work, rank, p, v):
                awaited.setdefault((source[0], rank, work.kind), []).append(source[1])
            if (target := after(work, rank, p, v)) is not None:
                sent.setdefault((rank, target, work.kind), []).append(work)
    return sum(a != b for wire in awaited for a, b in zip(awaited[wire], sent.get(wire, []), strict=False))


def timeline(schedule: list[list[Pass]], v: int = 1, forward: float = 1.0, backward: float = 2.0,
             send: float = 0.0) -> dict[tuple[int, Pass], tuple[float, float]]:
    """(start, end) of every pass of every rank, given how long a pass through all chunks of a rank and a message take.

    Raises `ValueError` if the ranks wait for each other in a circle.
    """
    p = len(schedule)
    when: dict[tuple[int, Pass], tuple[float, float]] = {}
    lasts = {"F": forward / v, "B": backward / v}
    free, todo = [0.0] * p, [list(reversed(passes)) for passes in schedule]
    while any(todo):
        progress = False
        for rank in range(p):
            while todo[rank]:
                work = todo[rank][-1]
                needs = [source] if (source := before(work, rank, p, v)) else []
                if work.kind == "B":
                    needs.append((rank, Pass("F", work.chunk, work.micro)))
                if not all(need in when for need in needs):
                    break
                ready = [when[need][1] + (send if need[0] != rank else 0.0) for need in needs]
                start = max([free[rank], *ready])
                free[rank] = start + lasts[work.kind]
                when[rank, todo[rank].pop()] = (start, free[rank])
                progress = True
        if not progress:
            raise ValueError(f"the ranks wait in a circle, rank 0 for {before(todo[0][-1], 0, p, v) if todo[0] else None}")
    return when


def idle_share(when: Mapping[tuple[int, Pass], tuple[float, float]], p: int) -> float:
    """The average share of the total time, from the first pass to the last, that the ranks are idle."""
    total = max(end for _, end in when.values())
    busy = sum(end - start for start, end in when.values())
    return 1 - busy / (p * total)


def alive(passes: list[Pass]) -> int:
    """The most forward passes that wait for their backward pass at one time; a rank must keep their activations."""
    counts, now = [0], 0
    for work in passes:
        now += 1 if work.kind == "F" else -1
        counts.append(now)
    return max(counts)
