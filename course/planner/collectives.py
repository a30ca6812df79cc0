"""How long a collective takes: its steps times the latency, plus the bytes that the busiest link carries over its bandwidth.

For n ranks of which each holds or makes `size` bytes in all (Thakur, Rabenseifner and Gropp 2005, "Optimization of collective
communication operations in MPICH", sections 4.1 to 4.5):

                                  bytes through a link    steps
    all-reduce                       2(n-1)/n · size      2(n-1) of a ring, or 2·log2(n) of a tree
    all-gather, reduce-scatter        (n-1)/n · size      n-1     size: of the whole, which each rank ends or begins with
    all-to-all                        (n-1)/n · size              size: what one rank holds
    send                                        size      1

NCCL has trees for all-reduce alone: gathers and scatters, which are all that ZeRO-1 uses, go round a ring, n - N steps within N
nodes and N - 1 between them (src/graph/tuning.cc). On thousands of GPUs these steps, not the bytes, are their time. (With one GPU
a node newer versions may take another way, PAT; its latency, too, grows with the ranks, and it is not counted here.)

Which links a group uses follows from where its ranks lie. A ring that goes through nodes crosses each node's border once, and
enters by one GPU and leaves by another: with g of the group's ranks in each node it has the network ports of g GPUs for itself.
So the border is g times as wide as the network's bandwidth per GPU, and the ring is as fast as its narrowest link. Groups of 3 on
nodes of 8 do not lie alike, some are cut by a border: the one that lies worst counts, since the others wait for it.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from course.planner.hardware import Hardware, Link
from course.utils.errors import CourseError

Curve = tuple[tuple[float, float], ...]              # measured: (bytes through a link, bytes/s), increasing

# What large messages reach of a link's data sheet. All-reduce of 512 MB on 4 H200s: 347 of 450 GB/s of NVLink
# (results/beginning_h200.json). Of a network the same is taken: protocol and the ends of a transfer cost there, too.
REACHED = 0.78
# Seconds from the call to the first byte, once for each collective: 1 MB among 2 and 4 H200s takes 28 and 25 us, of which 3 and 4
# are its bytes and a tree's steps on NVLink 4 and 8 (the same file). NCCL's tuning model has 14 us (src/graph/tuning.cc, LL128).
CALL = 15e-6


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: their number, and what joins them."""

    size: int
    ring: float = 0.0                               # seconds of the latency of going once through all of them, one after another
    tree: float = 0.0                               # the same from a tree's leaves to its root
    bandwidth: float = math.inf                     # bytes/s of the narrowest link of their ring, large messages
    apart: float = 0.0                              # seconds to exchange one byte with each other rank in turn, of all_to_all
    curve: Curve = ()

    def seconds(self, moved: float, latency: float) -> float:
        """`moved` bytes through every link, and the latency of all steps."""
        if self.size == 1 or moved <= 0:
            return 0.0
        if self.curve:
            return moved / rate_at(self.curve, moved)
        return CALL + latency + moved / self.bandwidth


def all_reduce(size: float, group: Group) -> float:
    """Seconds of an all-reduce of `size` bytes, by a ring or a tree: NCCL takes what is faster, and both move as many bytes."""
    return group.seconds(2 * size * (group.size - 1) / group.size, 2 * min(group.ring, group.tree))


def all_gather(size: float, group: Group) -> float:
    """Seconds of an all-gather that ends with `size` bytes on each rank, by a ring."""
    return group.seconds(size * (group.size - 1) / group.size, group.ring)


def reduce_scatter(size: float, group: Group) -> float:
    """Seconds of a reduce-scatter of `size` bytes on each rank."""
    return all_gather(size, group)


def all_to_all(size: float, group: Group) -> float:
    """Seconds of an exchange in which each rank holds `size` bytes and keeps one part in n; messages go side by side."""
    return 0.0 if group.size == 1 else CALL + group.tree + size / group.size * group.apart


def send(size: float, link: Link) -> float:
    """Seconds of one message from a rank to another."""
    return CALL + link.latency + size / (REACHED * link.bandwidth)


def group_of(dims: Sequence[tuple[int, int]], hardware: Hardware, curves: tuple[tuple[int, Curve], ...] = (),
             world: int = 0) -> Group:
    """The group of ranks along some axes, each (stride, size), innermost first, that lies worst of all such groups of a world.

    curves: measured ones by the number of ranks. world: how many ranks there are; 0: no more than the first group reaches over.
    Raises `CourseError` where the hardware's links do not join all of a group.
    """
    return joined(ranks_of(dims, world, hardware), hardware, curves)


def ranks_of(dims: Sequence[tuple[int, int]], world: int, hardware: Hardware) -> Any:
    """The ranks of every group along some axes, (groups, size), each row increasing; of groups that lie alike in nodes one."""
    stride, size = dims[-1]
    alike = math.lcm(stride * size, *(link.span for link in hardware.links if link.span))       # so many ranks on all is as here
    every = np.arange(min(world or stride * size, alike))
    first, others = np.ones(len(every), bool), np.zeros(1, int)
    for stride, size in dims:
        first &= every // stride % size == 0
        others = (np.arange(size)[:, None] * stride + others).ravel()
    return every[first][:, None] + others


def joined(ranks: Any, hardware: Hardware, curves: tuple[tuple[int, Curve], ...] = ()) -> Group:
    """What joins the ranks of groups, (groups, size): in each respect of the group that lies worst."""
    total = apart = ranks.shape[1]                  # apart: nodes, leaves and so on that the links so far have not joined
    if total == 1:
        return Group(1)
    ring = tree = others = 0.0
    narrowest, inside = math.inf, 1
    for link in hardware.links:
        parts, reached = nodes_of(ranks, link.span)
        if parts == apart:
            continue
        width = REACHED * link.bandwidth
        ring += (apart - parts) * link.latency
        tree += math.ceil(math.log2(apart / parts)) * link.latency
        narrowest = min(narrowest, inside * width)
        others += (reached - inside) / width
        if link is hardware.links[0] and parts == 1 and curves:         # all on the innermost link, which was measured
            fewer = [curve for number, curve in curves if number <= total]
            return Group(total, ring, tree, narrowest, others, (fewer or [curves[0][1]])[-1])
        apart, inside = parts, reached
    if apart > 1:
        raise CourseError(f"hardware {hardware.name}: its links join {hardware.links[-1].span} GPUs, which is not all of a group "
                          f"of {total} here: add an entry to links, of what joins more (span: 0 for any number)")
    return Group(total, ring, tree, narrowest, others)


def nodes_of(ranks: Any, span: int) -> tuple[int, int]:
    """(over how many nodes of `span` neighbouring ranks a group lies at most, how few of its ranks one of them holds at least).

    ranks: (groups, size), each row increasing. span 0: everything is one node.
    """
    if not span:
        return 1, ranks.shape[1]
    begins = np.diff(ranks // span, axis=1, prepend=-1) > 0             # where a row goes on to the next node
    return int(begins.sum(1).max()), int(np.diff(np.flatnonzero(begins), append=begins.size).min())


@cache
def share_node(dims: tuple[tuple[int, int], ...], hardware: Hardware, world: int) -> bool:
    """Whether each group along some axes lies on one node, which the innermost link joins."""
    return nodes_of(ranks_of(dims, world, hardware), hardware.links[0].span)[0] == 1


def send_along(size: float, stride: int, count: int, hardware: Hardware) -> float:
    """Seconds of one message between neighbours of `count` ranks, each `stride` after the one before: the mean, since some of
    them may be on different nodes and others not."""
    links = borders(stride, count, hardware)
    return sum(number * send(size, link) for link, number in links) / sum(number for _, number in links)


@cache
def borders(stride: int, count: int, hardware: Hardware) -> list[tuple[Link, int]]:
    """How many neighbours of such ranks each link joins, the first of which is rank 0."""
    counts = dict.fromkeys(hardware.links, 0)
    for here in range(0, (count - 1) * stride, stride):
        joins = (link for link in hardware.links if not link.span or here // link.span == (here + stride) // link.span)
        counts[next(joins, hardware.links[-1])] += 1
    return list(counts.items())


def strides(order: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """How far apart neighbours along each axis are: `order` names the axes slowest first (course/parallel/mesh.py)."""
    steps, stride = {}, 1
    for name in reversed(order.split("-")):
        steps[name] = stride
        stride *= sizes[name]
    return steps


@cache
def groups(order: str, pp: int, dp: int, cp: int, tp: int, hardware: Hardware,
           curves: tuple[tuple[int, Curve], ...] = ()) -> dict[str, Group]:
    """The groups of a layout: tp, cp, dp_cp and all; ends: the first and the last rank of each pipeline."""
    sizes, world = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}, pp * dp * cp * tp
    step = strides(order, sizes)
    axes = {"tp": ("tp",), "cp": ("cp",), "dp_cp": ("dp", "cp"), "all": ("pp", "dp", "cp", "tp")}
    by_axis = {name: group_of(sorted((step[axis], sizes[axis]) for axis in parts), hardware, curves, world)
             for name, parts in axes.items()}
    pipelines = ranks_of([(step["pp"], pp)], world, hardware)
    return by_axis | {"ends": joined(pipelines[:, [0, -1]] if pp > 1 else pipelines, hardware, curves)}


def rate_at(curve: Curve, moved: float) -> float:
    """bytes/s between measured points, linear in the logarithm of the bytes; beyond them the last; below, the same seconds."""
    if moved <= curve[0][0]:
        return curve[0][1] * moved / curve[0][0]
    at = bisect_right([x for x, _ in curve], moved)
    if at == len(curve):
        return curve[-1][1]
    (x0, y0), (x1, y1) = curve[at - 1], curve[at]
    return y0 + (y1 - y0) * math.log(moved / x0) / math.log(x1 / x0)
