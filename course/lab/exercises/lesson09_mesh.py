"""Lesson 09: ranks laid out along axes, the groups of an axis, the nodes that they touch, and the bytes that they send.

The last three functions here are the answers to the exercises written inside a cell of the lesson.
"""

from itertools import pairwise, permutations

import torch
import torch.distributed as dist
from torch import Tensor

from course.config import Parallel
from course.lab.checks import random_inputs, return_values
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.sandbox.limits import Limits
from course.parallel import mesh

CHANGED = "it changes some numbers"
QUICK = Limits(seconds=30)                           # far more than it takes, for machines that are busy


def nodes_touched(groups: Tensor, per_node: int) -> int:
    """The most nodes that one group of an axis touches; `groups` has a row of ranks for each group."""
    return max(len(set(row)) for row in (groups // per_node).tolist())


def bytes_sent(sizes: dict[str, int], work: dict[str, int]) -> dict[str, float]:
    """The bytes that one GPU sends along each axis in a training step: {"tp": ..., "cp": ..., "pp": ..., "dp": ...}."""
    tp, cp, pp, copies = sizes["tp"], sizes["cp"], sizes["pp"], sizes["dp"] * sizes["cp"]
    activation = work["itemsize"] * work["samples"] * work["tokens"] / cp * work["dim"]
    layers = work["layers"] / pp * work["micros"]                       # that pass here in a step
    gradients = work["itemsize"] * work["parameters"] / (tp * pp)
    return {"tp": layers * 4 * 2 * (tp - 1) / tp * activation,
            "cp": layers * 2 * (cp - 1) * 2 * activation / tp,
            "pp": work["micros"] * 2 * activation if pp > 1 else 0.0,
            "dp": 2 * (copies - 1) / copies * gradients}


def narrowest_link(topology: str, group: list[int]) -> int:
    """The number of NVLinks between the worst neighbors of the best ring through a group's GPUs; 0: no ring uses NVLink alone.

    topology: the table of `nvidia-smi topo -m`.
    """
    rows = [line.split()[1:] for line in topology.splitlines() if line.startswith("GPU")]
    links = [[int(word[2:]) if word.startswith("NV") else 0 for word in row] for row in rows]
    first, *others = group
    rings = [(first, *order, first) for order in permutations(others)]
    return max(min(links[a][b] for a, b in pairwise(ring)) for ring in rings)


def draw_layouts(seed: int, hidden: bool) -> Tensors:
    """Sizes of pp, dp, cp and tp, and orders as the axes' numbers in `AXES`; the first has sizes that all differ."""
    generator = random_inputs.generator(seed)
    sizes = torch.randint(1, 5, (9 if hidden else 5, 4), generator=generator)
    sizes[0] = 1 + torch.randperm(5 if hidden else 4, generator=generator)[:4]
    orders = torch.stack([torch.randperm(4, generator=generator) for _ in sizes])
    orders[0] = torch.tensor([1, 3, 0, 2] if hidden else [2, 0, 3, 1])  # neither reversed nor its own inverse
    return {"sizes": sizes, "orders": orders}


def boxes(inputs: Tensors) -> list[tuple[Tensor, int]]:
    """The drawn layouts, each with every of its dims; and with dp and cp as one dim, which has three in all."""
    grids = [mesh.lay_out(sizes, order) for sizes, order in layouts(inputs)]
    return [(grid, dim) for grid in grids for dim in range(4)] + [(grid.flatten(1, 2), 1) for grid in grids]


def layouts(inputs: Tensors) -> list[tuple[dict[str, int], str]]:
    """The drawn sizes by name, and orders such as "pp-dp-cp-tp"."""
    return [(dict(zip(mesh.AXES, sizes, strict=True)), "-".join(mesh.AXES[number] for number in order))
            for sizes, order in zip(inputs["sizes"].tolist(), inputs["orders"].tolist(), strict=True)]


def run_lay_out(inputs: Tensors) -> Tensors:
    """The drawn layouts; and what comes of adding up the ranks' numbers along each axis of a real mesh."""
    grids = [return_values.some(mesh.lay_out(sizes, order), "lay_out", torch.int64) for sizes, order in layouts(inputs)]
    found = {"shapes": torch.tensor([list(grid.shape) for grid in grids]), "ranks": torch.cat([grid.flatten() for grid in grids])}
    sums = []
    if dist.is_initialized():
        for _, order in layouts(inputs)[:2]:
            built = mesh.build_mesh(Parallel(pp=1, dp=2, cp=1, tp=dist.get_world_size() // 2, order=order), mesh.join("cpu"))
            for axis in (built.dp, built.tp):
                mine = torch.tensor([float(built.world.rank)])
                dist.all_reduce(mine, group=axis.group)
                sums.append(mine)
    return found | {"sums": torch.cat(sums) if sums else torch.zeros(1)}


def run_groups(inputs: Tensors) -> Tensors:
    """The groups of every axis of the drawn layouts, and those of dp and cp together."""
    found = [return_values.some(mesh.groups(*box), "groups", torch.int64) for box in boxes(inputs)]
    return {"shapes": torch.tensor([list(rows.shape) for rows in found]), "ranks": torch.cat([rows.flatten() for rows in found])}


def draw_nodes(seed: int, hidden: bool) -> Tensors:
    """Layouts, and how many GPUs a node has. In the second, one group of three lies within a node of four and the next across
    two, so that the most spread group is not the first, nor the least spread."""
    layouts = draw_layouts(seed, hidden)
    layouts["sizes"][1], layouts["orders"][1] = torch.tensor([1, 2, 1, 3]), torch.arange(4)
    return layouts | {"per_node": torch.tensor([2, 3, 4, 6, 8] if hidden else [4, 8])}


def run_nodes_touched(inputs: Tensors) -> Tensors:
    """For every axis of the drawn layouts, and every kind of node, how many nodes a group touches."""
    found = [return_values.number(nodes_touched(mesh.groups(*box), per_node), "nodes_touched")
             for box in boxes(inputs) for per_node in inputs["per_node"].tolist()]
    return {"nodes": torch.tensor(found)}


WORK = ("layers", "dim", "tokens", "samples", "micros", "parameters", "itemsize")


def draw_work(seed: int, hidden: bool) -> Tensors:
    """Layouts, and models: numbers that the axes divide. In the second layout only pp is 1, in the third no axis is 1 or 2."""
    generator = random_inputs.generator(seed)
    inputs = draw_layouts(seed, hidden)
    inputs["sizes"][1] = torch.tensor([1, 2, 3, 4])
    inputs["sizes"][2] = torch.randint(3, 5, (4,), generator=generator)
    work = 12 * torch.randint(1, 9, (len(inputs["sizes"]), len(WORK)), generator=generator)
    work[:, WORK.index("parameters")] *= 10**7
    work[:, WORK.index("layers")] *= 5                                  # up to five stages
    work[:, WORK.index("tokens")] *= 60
    work[:, WORK.index("itemsize")] = 2 ** torch.randint(1, 4, (len(work),), generator=generator)
    work[0, WORK.index("itemsize")] = 4
    return inputs | {"work": work}


NO_NVLINK = ("PIX", "PXB", "PHB", "NODE", "SYS")


def draw_fabric(seed: int, hidden: bool) -> Tensors:
    """Nodes of seven GPUs: the NVLinks of each pair, 0 of many, and groups, the first numbers of each row: sizes[i] of them.

    In the first node the ring 0-2-1-3 has 12 links everywhere, and neighbors by number have 1. In the second, GPU 0 has one
    neighbor only. The group of the third is a pair. In the fourth, only the ring 0-1-2-3-4 uses NVLink alone.
    """
    generator = random_inputs.generator(seed)
    nodes = 14 if hidden else 6
    counts = torch.tensor([0, 0, 1, 2, 4, 6, 12, 18])[torch.randint(8, (nodes, 7, 7), generator=generator)].triu(1)
    groups = torch.stack([torch.randperm(7, generator=generator) for _ in range(nodes)])
    sizes = torch.randint(2, 6, (nodes,), generator=generator)
    counts[0, :4, :4] = torch.tensor([[0, 1, 12, 12], [0, 0, 12, 12], [0, 0, 0, 1], [0, 0, 0, 0]])
    groups[0], sizes[0] = torch.arange(7), 4
    counts[1, 0], sizes[1], groups[1] = torch.tensor([0, 4, 0, 0, 0, 0, 0]), 3, torch.arange(7)
    counts[1, 1, 2], sizes[2] = 6, 2
    counts[2][tuple(groups[2, :2].sort().values)] = 18 if hidden else 12
    counts[3, :5, :5], groups[3], sizes[3] = 0, torch.arange(7), 5
    counts[3, [0, 1, 2, 3, 0], [1, 2, 3, 4, 4]] = 12 if hidden else 4
    return {"counts": counts + counts.transpose(1, 2), "groups": groups, "sizes": sizes,
            "other": torch.randint(len(NO_NVLINK), (nodes, 7, 7), generator=generator)}


def fabrics(inputs: Tensors) -> list[tuple[str, list[int]]]:
    """The drawn nodes as `nvidia-smi topo -m` shows them, with a network card and a column for CPUs, and a group of each."""
    found, columns = [], (inputs[key].tolist() for key in ("counts", "other", "groups", "sizes"))
    for counts, other, group, size in zip(*columns, strict=True):
        lines = ["\t" + "\t".join(f"GPU{gpu}" for gpu in range(7)) + "\tNIC0\tCPU Affinity"]
        for a in range(7):
            row = ["X" if a == b else f"NV{counts[a][b]}" if counts[a][b] else NO_NVLINK[other[min(a, b)][max(a, b)]]
                   for b in range(7)]
            lines.append("\t".join([f"GPU{a}", *row, "NODE", "0-31"]))
        found.append(("\n".join([*lines, "\t".join(["NIC0", *["NODE"] * 7, "X"])]) + "\n", group[:size]))
    return found


def run_narrowest_link(inputs: Tensors) -> Tensors:
    """The narrowest link of the best ring in each node, for its group; pairs apart, as a ring of two has one link."""
    found = [(len(group), return_values.number(narrowest_link(topology, group.copy()), "narrowest_link"))
             for topology, group in fabrics(inputs)]
    return {"pairs": torch.tensor([links for size, links in found if size == 2]),
            "rings": torch.tensor([links for size, links in found if size > 2])}


def fabric_cases(inputs: Tensors) -> dict[str, list[str]]:
    """Each case as a call, with a node to try by hand."""
    calls = [(len(group), f"narrowest_link({topology!r}, {group})") for topology, group in fabrics(inputs)]
    return {"pairs": [call for size, call in calls if size == 2], "rings": [call for size, call in calls if size > 2]}


def run_bytes_sent(inputs: Tensors) -> Tensors:
    """The bytes along each axis, for each layout and model."""
    found, kept = [], True
    for (sizes, _), numbers in zip(layouts(inputs), inputs["work"].tolist(), strict=True):
        work = dict(zip(WORK, numbers, strict=True))
        given = sizes.copy(), work.copy()
        found.append(return_values.named(bytes_sent(*given), "bytes_sent", mesh.AXES))
        kept = kept and given == (sizes, work)
    return {axis: return_values.numbers((sent[axis] for sent in found), "bytes_sent")
            for axis in mesh.AXES} | {"kept": torch.tensor(float(kept))}


def bytes_sent_cases(inputs: Tensors) -> list[str]:
    """Each case as a call, with numbers to try by hand."""
    return [f"bytes_sent({sizes}, {dict(zip(WORK, work, strict=True))})"
            for (sizes, _), work in zip(layouts(inputs), inputs["work"].tolist(), strict=True)]


EXERCISES = [
    Exercise("lay-out", "09", ("course.parallel.mesh.lay_out",), draw_layouts, run_lay_out, {
        "shapes": "the dims of the grid are pp, dp, cp and tp, whatever the order",
        "ranks": "every rank is in its place",
        "sums": "in a mesh that the library builds with it, each rank talks to the right ranks"},
        sizes=(1, 4), limits=Limits(seconds=120), points=2),
    Exercise("groups", "09", ("course.parallel.mesh.groups",), draw_layouts, run_groups, {
        "shapes": "there is a row for each group, as long as the axis",
        "ranks": "the groups of every axis, and those of dp x cp, are right, in the right order"}, limits=QUICK),
    Exercise("nodes-touched", "09", (f"{__name__}.nodes_touched",), draw_nodes, run_nodes_touched, {
        "nodes": "it counts the most nodes that one group of an axis touches"}, limits=QUICK),
    Exercise("bytes-sent", "09", (f"{__name__}.bytes_sent",), draw_work, run_bytes_sent, {
        "tp": "tensor parallel: the all-reduces of activations",
        "cp": "context parallel: the keys and values, and their gradients",
        "pp": "pipeline parallel: one activation forward and one gradient back for each micro-batch",
        "dp": "data parallel: one all-reduce of the gradients that this GPU has",
        "kept": "it does not change `sizes` and `work`"}, flags={"kept": CHANGED}, cases=bytes_sent_cases, limits=QUICK,
             points=2),
    Exercise("narrowest-link", "09", (f"{__name__}.narrowest_link",), draw_fabric, run_narrowest_link, {
        "pairs": "for two GPUs it is the number of NVLinks that the table shows, or 0",
        "rings": "for more GPUs it is the narrowest link of the best ring"}, cases=fabric_cases, limits=QUICK),
]
