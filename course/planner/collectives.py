"""Predict the time of a collective: number of steps times latency, plus bytes on the busiest link over its bandwidth.

For n ranks that each hold or produce `size` bytes in all (Thakur, Rabenseifner and Gropp 2005, "Optimization of collective
communication operations in MPICH", sections 4.1 to 4.5):

                                  bytes through a link    steps
    all-reduce                       2(n-1)/n · size      2(n-1) of a ring, or 2·log2(n) of a tree
    all-gather, reduce-scatter        (n-1)/n · size      n-1     size: the full tensor, before or after
    all-to-all                        (n-1)/n · size              size: the tensor of one rank
    send                                        size      1

NCCL uses trees only for all-reduce. The gathers and scatters of ZeRO-1 go round a ring: n - N steps within N nodes and N - 1
between them (src/graph/tuning.cc). On thousands of GPUs these steps dominate, not the bytes. (With one GPU per node, newer
versions may use PAT, whose latency also grows with the ranks. This model ignores it.)

The placement of a group's ranks decides which links it uses. A ring across nodes crosses each node's border once, entering by one
GPU and leaving by another. With g ranks of the group on each node it has the network ports of g GPUs, so the border is g times as
wide as the network bandwidth per GPU. The ring is as fast as its narrowest link. Groups of 3 on nodes of 8 differ: some cross a
border. The slowest group counts, since the others wait for it.
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

Curve = tuple[tuple[float, float], ...]              # measured (bytes through a link, bytes/s), increasing

# share of a link's nominal bandwidth that large messages reach: an all-reduce of 512 MB on 4 H200s, 347 of NVLink's 450 GB/s
# (results/beginning_h200.json). The same share is assumed for networks, which have protocol overhead too
REACHED = 0.78
# seconds from the call to the first byte, once per collective. 1 MB among 2 and 4 H200s takes 28 and 25 us, of which its bytes
# take 3 and 4 us, and the tree's steps on NVLink 4 and 8 (same file). NCCL's tuning model has 14 us (src/graph/tuning.cc, LL128)
CALL = 15e-6


@dataclass(frozen=True)
class Group:
    """The number of ranks that communicate, and the links between them."""

    size: int
    ring: float = 0.0                               # latency in seconds of one pass through all ranks of a ring
    tree: float = 0.0                               # latency in seconds from a tree's leaves to its root
    bandwidth: float = math.inf                     # bytes/s of the ring's narrowest link, for large messages
    apart: float = 0.0                              # seconds of all_to_all per byte for each other rank
    curve: Curve = ()

    def seconds(self, moved: float, latency: float) -> float:
        """Seconds for `moved` bytes through every link. latency: of all steps, in seconds."""
        if self.size == 1 or moved <= 0:
            return 0.0
        if self.curve:
            return moved / rate_at(self.curve, moved)
        return CALL + latency + moved / self.bandwidth


def all_reduce(size: float, group: Group) -> float:
    """Seconds of an all-reduce of `size` bytes by ring or tree: NCCL picks the faster one, and both move equal bytes."""
    return group.seconds(2 * size * (group.size - 1) / group.size, 2 * min(group.ring, group.tree))


def all_gather(size: float, group: Group) -> float:
    """Seconds of a ring all-gather that ends with `size` bytes on each rank."""
    return group.seconds(size * (group.size - 1) / group.size, group.ring)


def reduce_scatter(size: float, group: Group) -> float:
    """Seconds of a ring reduce-scatter that starts with `size` bytes on each rank."""
    return all_gather(size, group)


def all_to_all(size: float, group: Group) -> float:
    """Seconds of an all-to-all in which each rank holds `size` bytes and keeps 1/n of them; messages overlap."""
    return 0.0 if group.size == 1 else CALL + group.tree + size / group.size * group.apart


def send(size: float, link: Link) -> float:
    """Seconds of one message between two ranks."""
    return CALL + link.latency + size / (REACHED * link.bandwidth)


def group_of(dims: Sequence[tuple[int, int]], hardware: Hardware, curves: tuple[tuple[int, Curve], ...] = (),
             world: int = 0) -> Group:
    """The slowest of all groups along some axes, each (stride, size), innermost first.

    curves: measured curves by number of ranks. world: the number of ranks; 0: those that the first group spans.
    Raises `CourseError` if the hardware's links do not join all ranks of a group.
    """
    return joined(ranks_of(dims, world, hardware), hardware, curves)


def ranks_of(dims: Sequence[tuple[int, int]], world: int, hardware: Hardware) -> Any:
    """The ranks of the groups along some axes, (groups, size), rows increasing. Only one of all groups with equal placement."""
    stride, size = dims[-1]
    alike = math.lcm(stride * size, *(link.span for link in hardware.links if link.span))       # placement repeats after these
    every = np.arange(min(world or stride * size, alike))
    first, others = np.ones(len(every), bool), np.zeros(1, int)
    for stride, size in dims:
        first &= every // stride % size == 0
        others = (np.arange(size)[:, None] * stride + others).ravel()
    return every[first][:, None] + others


def joined(ranks: Any, hardware: Hardware, curves: tuple[tuple[int, Curve], ...] = ()) -> Group:
    """The `Group` for the ranks of several groups, (groups, size): the worst value of each field."""
    total = apart = ranks.shape[1]                  # apart: parts (nodes, leaves ...) that the links so far do not join
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
        if link is hardware.links[0] and parts == 1 and curves:         # all ranks on the innermost link, which was measured
            fewer = [curve for number, curve in curves if number <= total]
            return Group(total, ring, tree, narrowest, others, (fewer or [curves[0][1]])[-1])
        apart, inside = parts, reached
    if apart > 1:
        raise CourseError(f"hardware {hardware.name}: its links join {hardware.links[-1].span} GPUs, fewer than the group of "
                          f"{total} here: add an entry to links for more GPUs (span: 0 for any number)")
    return Group(total, ring, tree, narrowest, others)


def nodes_of(ranks: Any, span: int) -> tuple[int, int]:
    """(the most nodes that a group spans, the fewest ranks of a group on one node). A node has `span` neighboring ranks.

    ranks: (groups, size), rows increasing. span 0: all ranks are on one node.
    """
    if not span:
        return 1, ranks.shape[1]
    begins = np.diff(ranks // span, axis=1, prepend=-1) > 0             # where a row enters the next node
    return int(begins.sum(1).max()), int(np.diff(np.flatnonzero(begins), append=begins.size).min())


@cache
def share_node(dims: tuple[tuple[int, int], ...], hardware: Hardware, world: int) -> bool:
    """Whether each group along some axes is on one node, which the innermost link joins."""
    return nodes_of(ranks_of(dims, world, hardware), hardware.links[0].span)[0] == 1


def send_along(size: float, stride: int, count: int, hardware: Hardware) -> float:
    """Mean seconds of one message between neighbors among `count` ranks, `stride` apart: some neighbors may be on different
    nodes."""
    links = borders(stride, count, hardware)
    return sum(number * send(size, link) for link, number in links) / sum(number for _, number in links)


@cache
def borders(stride: int, count: int, hardware: Hardware) -> list[tuple[Link, int]]:
    """How many neighbors among these ranks, starting at rank 0, each link joins."""
    counts = dict.fromkeys(hardware.links, 0)
    for here in range(0, (count - 1) * stride, stride):
        joins = (link for link in hardware.links if not link.span or here // link.span == (here + stride) // link.span)
        counts[next(joins, hardware.links[-1])] += 1
    return list(counts.items())


def strides(order: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Axis -> distance between neighboring ranks. `order` names the axes slowest first (course/parallel/mesh.py)."""
    steps, stride = {}, 1
    for name in reversed(order.split("-")):
        steps[name] = stride
        stride *= sizes[name]
    return steps


@cache
def groups(order: str, pp: int, dp: int, cp: int, tp: int, hardware: Hardware,
           curves: tuple[tuple[int, Curve], ...] = (), shard: int = 0, ep: int = 1) -> dict[str, Group]:
    """The groups of a layout: tp, cp, dp_cp, all, and ends, which are the first and the last rank of a pipeline.

    shard: ranks of dp x cp that share one copy of the parameters (0: all); they are the group shard, and those that hold the same
    share the group replicate. ep: ranks of dp x cp over which experts are spread; they are the group ep, and those that hold the
    same experts the group expert_dp.
    """
    sizes, world = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}, pp * dp * cp * tp
    step = strides(order, sizes)
    axes = {"tp": ("tp",), "cp": ("cp",), "dp_cp": ("dp", "cp"), "all": ("pp", "dp", "cp", "tp")}
    by_axis = {name: group_of(sorted((step[axis], sizes[axis]) for axis in parts), hardware, curves, world)
             for name, parts in axes.items()}
    for size, near, far in ((shard or dp * cp, "shard", "replicate"), (ep, "ep", "expert_dp")):
        inner = math.gcd(size, cp)                  # of the neighbors in a group, along cp; the rest of them is along dp
        outer = size // inner
        split = {near: [(step["cp"], inner), (step["dp"], outer)],
                 far: [(step["cp"] * inner, cp // inner), (step["dp"] * outer, dp // outer or 1)]}
        by_axis |= {name: group_of(sorted(dims), hardware, curves, world) for name, dims in split.items()}
    pipelines = ranks_of([(step["pp"], pp)], world, hardware)
    return by_axis | {"ends": joined(pipelines[:, [0, -1]] if pp > 1 else pipelines, hardware, curves)}


def rate_at(curve: Curve, moved: float) -> float:
    """bytes/s, linear in the logarithm of the bytes between measured points; above them constant; below, constant seconds."""
    if moved <= curve[0][0]:
        return curve[0][1] * moved / curve[0][0]
    at = bisect_right([x for x, _ in curve], moved)
    if at == len(curve):
        return curve[-1][1]
    (x0, y0), (x1, y1) = curve[at - 1], curve[at]
    return y0 + (y1 - y0) * math.log(moved / x0) / math.log(x1 / x0)
