"""How long a collective takes: its steps times the latency, plus the bytes that the busiest link carries over its bandwidth.

For n ranks of which each holds or makes `size` bytes in all (Thakur, Rabenseifner and Gropp 2005, "Optimization of collective
communication operations in MPICH", sections 4.1 to 4.5):

    all-reduce                       2(n-1)/n · size    a ring's reduce-scatter, then its all-gather
    all-gather, reduce-scatter        (n-1)/n · size    size: of the whole, which each rank ends or begins with
    all-to-all                        (n-1)/n · size    size: what one rank holds
    send                                        size

Which links a group uses follows from its place in the rank order. A ring that goes through nodes crosses each node's border
once, and enters by one GPU and leaves by another: with g of the group's ranks in each node it has the network ports of g GPUs
for itself. So the border is g times as wide as the network's bandwidth per GPU, and the ring is as fast as its narrowest link.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from course.errors import CourseError
from course.perf.hardware import Hardware, Link

Curve = tuple[tuple[float, float], ...]              # measured: (bytes through a link, bytes/s), increasing

# What large messages reach of a link's data sheet. All-reduce of 512 MB on 4 H200s: 347 of 450 GB/s of NVLink
# (results/beginning_h200.json). Of a network the same is taken: protocol and the ends of a transfer cost there, too.
REACHED = 0.78
# Seconds from the call to the first byte, once for each collective: 1 MB among 2 and 4 H200s takes 28 and 25 us, of which 3 and 4
# are its bytes and the steps on NVLink 4 and 8 (the same file). NCCL's tuning model has 14 us (src/graph/tuning.cc, LL128).
CALL = 15e-6


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: their number, and what joins them."""

    size: int
    steps: float = 0.0                              # seconds of the latency of going once through all of them
    bandwidth: float = math.inf                     # bytes/s of the narrowest link of their ring, large messages
    apart: float = 0.0                              # seconds to exchange one byte with each other rank in turn, of all_to_all
    curve: Curve = ()

    def seconds(self, moved: float, rounds: int = 1) -> float:
        """`moved` bytes through every link, in so many rounds through all ranks."""
        if self.size == 1 or moved <= 0:
            return 0.0
        if self.curve:
            return moved / rate_at(self.curve, moved)
        return CALL + rounds * self.steps + moved / self.bandwidth


def all_reduce(size: float, group: Group) -> float:
    """Seconds of an all-reduce of `size` bytes."""
    return group.seconds(2 * size * (group.size - 1) / group.size, 2)


def all_gather(size: float, group: Group) -> float:
    """Seconds of an all-gather that ends with `size` bytes on each rank."""
    return group.seconds(size * (group.size - 1) / group.size)


def reduce_scatter(size: float, group: Group) -> float:
    """Seconds of a reduce-scatter of `size` bytes on each rank."""
    return all_gather(size, group)


def all_to_all(size: float, group: Group) -> float:
    """Seconds of an exchange in which each rank holds `size` bytes and keeps one part in n."""
    return 0.0 if group.size == 1 else CALL + group.steps + size / group.size * group.apart


def send(size: float, link: Link) -> float:
    """Seconds of one message from a rank to another."""
    return CALL + link.latency + size / (REACHED * link.bandwidth)


def group_of(dims: Sequence[tuple[int, int]], hardware: Hardware,
             curves: tuple[tuple[int, Curve], ...] = ()) -> Group:
    """The group of ranks along some axes, each (stride, size), innermost first; curves: measured ones by the number of ranks.

    A tree goes through n ranks of one level in log2 n steps, a ring in n - 1; NCCL takes what is faster, so the fewer count.
    Raises `CourseError` where the hardware's links do not join all of them.
    """
    total = math.prod(size for _, size in dims)
    if total == 1:
        return Group(1)
    steps, narrowest, apart, inside = 0.0, math.inf, 0.0, 1
    for link in hardware.links:
        reached = members(dims, link.span)
        if reached == inside:
            continue
        width = REACHED * link.bandwidth
        steps += math.ceil(math.log2(reached / inside)) * link.latency
        narrowest = min(narrowest, max(1, inside) * width)
        apart += (reached - inside) / width
        if link is hardware.links[0] and reached == total and curves:   # all on the innermost link, which was measured
            fewer = [curve for ranks, curve in curves if ranks <= total]
            return Group(total, steps, narrowest, apart, (fewer or [curves[0][1]])[-1])
        inside = reached
    if inside < total:
        raise CourseError(f"hardware {hardware.name}: its links join {hardware.links[-1].span} GPUs, which is not all of a group "
                          f"of {total} here: add an entry to links, of what joins more (span: 0 for any number)")
    return Group(total, steps, narrowest, apart)


def members(dims: Sequence[tuple[int, int]], span: int) -> int:
    """How many ranks of a group one `span` of neighbouring ranks holds (0: all), such as a node of 8."""
    if not span:
        return math.prod(size for _, size in dims)
    return math.prod(max(1, min(size, span // stride)) for stride, size in dims)


def send_along(size: float, stride: int, count: int, hardware: Hardware) -> float:
    """Seconds of one message between neighbours of `count` ranks, each `stride` after the one before: the mean, since some of
    them may be on different nodes and others not."""
    links = borders(stride, count, hardware)
    return sum(number * send(size, link) for link, number in links) / sum(number for _, number in links)


@cache
def borders(stride: int, count: int, hardware: Hardware) -> list[tuple[Link, int]]:
    """How many neighbours of such ranks each link joins, the first of which is rank 0."""
    found = dict.fromkeys(hardware.links, 0)
    for here in range(0, (count - 1) * stride, stride):
        joins = (link for link in hardware.links if not link.span or here // link.span == (here + stride) // link.span)
        found[next(joins, hardware.links[-1])] += 1
    return list(found.items())


def strides(order: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """How far apart neighbours along each axis are: `order` names the axes slowest first (course/parallel/mesh.py)."""
    found, stride = {}, 1
    for name in reversed(order.split("-")):
        found[name] = stride
        stride *= sizes[name]
    return found


@cache
def groups(order: str, pp: int, dp: int, cp: int, tp: int, hardware: Hardware,
           curves: tuple[tuple[int, Curve], ...] = ()) -> dict[str, Group]:
    """The groups of a layout: tp, cp, dp_cp and all."""
    sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
    step = strides(order, sizes)
    axes = {"tp": ("tp",), "cp": ("cp",), "dp_cp": ("dp", "cp"), "all": ("pp", "dp", "cp", "tp")}
    return {name: group_of(sorted((step[axis], sizes[axis]) for axis in parts), hardware, curves) for name, parts in axes.items()}


def rate_at(curve: Curve, moved: float) -> float:
    """bytes/s between measured points, linear in the logarithm of the bytes; beyond them the last; below, the same seconds."""
    if moved <= curve[0][0]:
        return curve[0][1] * moved / curve[0][0]
    at = bisect_right([x for x, _ in curve], moved)
    if at == len(curve):
        return curve[-1][1]
    (x0, y0), (x1, y1) = curve[at - 1], curve[at]
    return y0 + (y1 - y0) * math.log(moved / x0) / math.log(x1 / x0)
