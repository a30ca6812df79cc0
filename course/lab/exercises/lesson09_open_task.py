"""Lesson 09's open task: which GPU each rank takes."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import product

import torch

from course.lab.checks import random_inputs
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.figures.fabric import CUBE_MESH
from course.lab.instruments.gpu_paths import (
    PATHS,
    Axis,
    Case,
    Speed,
    as_placement,
    benchmarks,
    neighbors,
    slowest_paths,
    step_seconds,
)
from course.lab.instruments.hidden_process import HiddenProcess
from course.lab.sandbox.limits import Limits
from course.parallel.mesh import AXES

LIMIT, SOME, FEW = 3000, 200, 15                     # benchmarks of one machine: at most, and for the two budgets
GOOD, BEST = 1.25, 1.02                               # times the best placement's seconds


def place_ranks(axes: Sequence[Axis], paths: Sequence[Sequence[int]], measure: Callable[[Sequence[int]], float]) -> list[int]:
    """The GPU of each rank, so that a step's messages take the least time.

    axes: the layout's axes, slowest first. paths[a][b]: how GPUs a and b are connected, an index into `PATHS`, which lists the
    fastest first. measure(placement): the seconds of a step on this machine.
    """
    ranks, links = range(len(paths)), neighbors(axes)

    def placed(limits: Sequence[int]) -> list[int] | None:
        """A placement in which no axis uses a slower path than its limit; None if there is none."""
        allowed = [[sum(1 << b for b in ranks if b != a and paths[a][b] <= limit) for a in ranks] for limit in limits]      # bits
        strict = sorted(range(len(axes)), key=lambda axis: -limits[axis])       # ranks that must be close follow each other
        place = torch.arange(len(ranks)).view([axis.size for axis in axes]).permute(strict).flatten().tolist()
        turn = {rank: i for i, rank in enumerate(place)}
        earlier: list[list[tuple[int, int]]] = [[] for _ in ranks]      # of each turn: axis, the other's turn
        for axis, pairs in enumerate(links):
            for pair in pairs:
                first, second = sorted(turn[rank] for rank in pair)
                earlier[second].append((axis, first))
        chosen: list[int] = []

        def choose(free: int) -> bool:
            options = free
            for axis, i in earlier[len(chosen)] if free else []:
                options &= allowed[axis][chosen[i]]
            while options:
                bit = options & -options
                chosen.append(bit.bit_length() - 1)
                if choose(free - bit):
                    return True
                chosen.pop()
                options -= bit
            return not free

        return [chosen[turn[rank]] for rank in ranks] if choose((1 << len(ranks)) - 1) else None

    kinds = sorted({paths[a][b] for a in ranks for b in ranks if a != b})
    possible, candidates = list[Sequence[int]](), list[list[int]]()
    for limits in sorted(product(kinds, repeat=len(axes)), key=sum):
        if any(all(a <= b for a, b in zip(other, limits, strict=True)) for other in possible):
            continue                                 # that one is at least as fast, whatever the speeds are
        if placement := placed(limits):
            possible.append(limits)
            candidates.append(placement)
    return min(candidates, key=measure)


def joined_in_node(kind: str, a: int, b: int) -> int:
    """How two GPUs of a node are joined: by the lesson's `cube`, or in NVLink `pairs` on PCIe switches of four."""
    if kind == "pairs":
        return PATHS.index("NV2" if a // 2 == b // 2 else "PIX" if a // 4 == b // 4 else "SYS")
    return PATHS.index([line.split()[1:] for line in CUBE_MESH.splitlines()[1:]][a][b])


VISIBLE = (("cube", 8, (0,), (2, 4)), ("pairs", 8, (0,), (2, 2, 2)), ("cube", 4, (0, 0, 1, 1), (2, 4, 2)),
           ("pairs", 8, (0, 0), (2, 2, 4)), ("cube", 8, (0, 0), (2, 2, 4)))         # kind, GPUs of a node, racks of nodes, sizes
HIDDEN = (*VISIBLE, ("pairs", 8, (0, 1), (4, 2, 2)), ("cube", 8, (0, 1), (2, 2, 2, 2)), ("cube", 4, (0, 1, 0, 1), (4, 2, 2)))
GREEDY, ALIKE = 2, 3                                 # where it is wrong to serve the axis that sends most, and to count paths
RATIOS = {(GREEDY, "RACK"): (0.85, 0.95), (ALIKE, "PIX"): (0.2, 0.25), (ALIKE, "SYS"): (0.85, 0.95)}    # the next bandwidth's


def draw(seed: int, hidden: bool) -> Tensors:
    """Machines whose GPUs are numbered in any order, layouts and speeds. What a machine or a layout lacks is -1."""
    generator = random_inputs.generator(seed)

    def between(low: float, high: float) -> float:
        return low * (high / low) ** float(torch.rand((), generator=generator, dtype=torch.float64))

    cases = HIDDEN if hidden else VISIBLE
    paths, axes = torch.full((len(cases), 16, 16), -1), torch.full((len(cases), 4, 4), -1)
    speeds, sent = (torch.zeros(len(cases), *shape, dtype=torch.float64) for shape in ((len(PATHS), 2), (4,)))
    for case, (kind, per_node, racks, sizes) in enumerate(cases):
        gpus = torch.randperm(per_node * len(racks), generator=generator).tolist()
        for i, a in enumerate(gpus):
            for j, b in enumerate(gpus):
                one, other = a // per_node, b // per_node
                inside = joined_in_node(kind, a % per_node, b % per_node) if one == other and a != b else -1
                between_nodes = PATHS.index("RACK" if racks[one] == racks[other] else "CORE")
                paths[case, i, j] = inside if one == other else between_nodes
        order = range(3) if case in (GREEDY, ALIKE) else torch.randperm(len(sizes), generator=generator).tolist()
        names = {2: ("dp", "tp"), 3: ("pp", "dp", "tp"), 4: AXES}[len(sizes)]
        for i, (name, place) in enumerate(zip(names, order, strict=True)):
            axes[case, i] = torch.tensor([AXES.index(name), sizes[place], name != "pp", int(between(20, 2000))])
            sent[case, i] = between(5e8, 5e9)
        latency, bandwidth = between(3e-6, 5e-6), between(40e9, 50e9)
        for number in range(len(PATHS)):
            speeds[case, number] = torch.tensor([latency, bandwidth])
            latency, bandwidth = latency * between(1.2, 2), bandwidth * between(*RATIOS.get((case, PATHS[number]), (0.2, 0.7)))
        if case == GREEDY:                           # dp sends most; if it has the fast paths, pp and tp need both slow ones
            sent[case, :3] = torch.tensor([between(3.8e9, 4e9), between(4.1e9, 4.4e9), between(3.8e9, 4e9)])
        elif case == ALIKE:                          # tp within a switch is worth a slow path for both others
            sent[case, :3] = torch.tensor([between(1e9, 1.05e9), between(1e9, 1.05e9), between(2.3e9, 2.7e9)])
    return {"paths": paths, "axes": axes, "bytes": sent, "speeds": speeds}


def unpacked(inputs: Tensors) -> list[Case]:
    """The axes, paths and speeds of each case."""
    found = []
    for paths, axes, sent, speeds in zip(*(inputs[name].tolist() for name in ("paths", "axes", "bytes", "speeds")), strict=True):
        layout = [Axis(AXES[name], size, bool(ring), messages, each) for (name, size, ring, messages), each
                  in zip(axes, sent, strict=True) if name >= 0]
        gpus = sum(path != -1 for path in paths[0]) + 1
        found.append((layout, [row[:gpus] for row in paths[:gpus]], [Speed(*speed) for speed in speeds]))
    return found


def run(inputs: Tensors) -> Tensors:
    """The placement for each machine, and how often it was measured. Nothing here knows the speeds while `place_ranks` runs."""
    cases = unpacked(inputs)
    placements = torch.full((len(cases), 16), -1)
    with HiddenProcess(benchmarks, (cases, LIMIT)) as hidden:
        cases = [(axes, paths, []) for axes, paths, _ in cases]
        inputs["speeds"].zero_()
        for case, (axes, paths, _) in enumerate(cases):
            given = list(axes), [list(row) for row in paths], partial(benchmark, hidden, case, len(paths))
            chosen = as_placement(place_ranks(*given), len(paths), "`place_ranks` returned")
            placements[case, :len(chosen)] = torch.tensor(chosen)
        calls = torch.tensor([hidden.ask(case) for case in range(len(cases))])
        inputs["speeds"].copy_(torch.tensor(hidden.ask(), dtype=torch.float64))
    return {"placements": placements, "calls": calls}


def benchmark(hidden: HiddenProcess, case: int, gpus: int, placement: Sequence[int]) -> float:
    """What `measure` is: the seconds of a step, from the process that knows the speeds."""
    return float(hidden.ask(case, as_placement(placement, gpus, "`measure` got")))


Hashable = tuple[tuple[Axis, ...], tuple[tuple[int, ...], ...], tuple[Speed, ...]]


@lru_cache(64)
def least_seconds(case: Hashable, place: Callable[..., list[int]] = place_ranks) -> float:
    """The seconds of the best placement: of the library's `place_ranks`, whatever stands in its place now."""
    axes, paths, speeds = case

    def measure(placement: Sequence[int]) -> float:
        return step_seconds(axes, slowest_paths(axes, paths, placement), speeds)

    return measure(place(axes, paths, measure))


def weigh(inputs: Tensors, transcript: Tensors) -> Tensors:
    """The seconds of each placement, those of the best one where they are near; and what else is claimed."""
    cases, placements, calls = unpacked(inputs), transcript["placements"], transcript["calls"]
    found, least, default = list[float](), list[float](), list[float]()
    if placements.shape != (len(cases), 16) or calls.shape != (len(cases),):
        raise ValueError("no transcript of placements")
    for (axes, paths, speeds), row in zip(cases, placements.tolist(), strict=True):
        ranks = list(range(len(paths)))
        for several, placement in ((found, as_placement(row[:len(ranks)], len(ranks), "")), (default, ranks)):
            several.append(step_seconds(axes, slowest_paths(axes, paths, placement), speeds))
        least.append(least_seconds((tuple(axes), tuple(map(tuple, paths)), tuple(speeds))))
    seconds, best, usual = (torch.tensor(each, dtype=torch.float64) for each in (found, least, default))
    flags = {"default": (seconds <= usual).all(), "best": (seconds <= BEST * best).all(),
             "some": (calls <= SOME).all(), "few": (calls <= FEW).all()}
    return {"seconds": torch.where(seconds <= GOOD * best, best, seconds)} | {name: holds.double()
                                                                             for name, holds in flags.items()}


def asked(inputs: Tensors) -> list[str]:
    """Each case in words."""
    return [f"the layout {' '.join(f'{axis.name}={axis.size}' for axis in axes)} on machine {number} with its {len(paths)} GPUs"
            for number, (axes, paths, _) in enumerate(unpacked(inputs))]


EXERCISES = [
    Exercise("place-ranks", "09", (f"{__name__}.place_ranks",), draw, run, {
        "seconds": f"on each machine the step takes at most {GOOD - 1:.0%} longer than with the best placement",
        "default": "it takes no longer than with rank r on GPU r",
        "best": f"on each machine it takes at most {BEST - 1:.0%} longer than with the best placement",
        "some": f"it measures at most {SOME} placements of a machine",
        "few": f"it measures at most {FEW} placements of a machine"},
        flags={"default": "some step takes longer", "best": "some step takes longer",
               "some": "it measures more on some machine", "few": "it measures more on some machine"},
        levels={"best": "best placement", "some": f"{SOME} measurements", "few": f"{FEW} measurements"}, cases=asked, weigh=weigh,
        unknown="take the case named above: `slowest_paths` says which path each axis waits for with your placement. All "
                "groups of an axis wait for its slowest pair, so one swap seldom changes the time, and a search by swaps gets "
                "stuck. A sum of path numbers is no time either: look for placements that keep to a slowest path for each axis",
        ladder=("The time depends on the slowest path of each axis alone, so a swap of two GPUs seldom changes it. Search with a "
                "sum over all pairs of `neighbors(axes)`, in which slower paths cost more: it goes down with every pair that "
                "comes closer. Begin from many random orders, with several weights of the axes, and measure what comes out.",
                "If no axis uses a slower path in A than in B, A is at least as fast as B, whatever the speeds are. So few "
                "combinations of slowest paths can be the best. `slowest_paths` is free: measure one placement of each.",
                "Turn it around: go through all combinations of limits, a path for each axis, from the strictest on, and ask "
                "whether a placement keeps them. Give each rank in turn a free GPU that is connected well enough to the GPUs of "
                "its neighbors. If none is left, go back. Skip limits if some placement keeps stricter ones."),
        limits=Limits(seconds=120)),
]
