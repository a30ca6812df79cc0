"""Figures of lesson 09: which ranks of a process mesh communicate, and over which link."""

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course.parallel.mesh import AXES, groups, lay_out
from course.utils.colors import GRAY, RANKS

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def links(sizes: Mapping[str, int], order: str, per_node: int) -> dict[str, str]:
    """The link of each mesh axis: "NVLink" if all its groups are within a node, else "network"; "" for size 1."""
    grid = lay_out(sizes, order)
    found = {}
    for dim, axis in enumerate(AXES):
        nodes = groups(grid, dim) // per_node
        found[axis] = "" if sizes[axis] == 1 else "NVLink" if (nodes == nodes[:, :1]).all() else "network"
    return found


def mesh(sizes: Mapping[str, int], order: str, per_node: int, axis: str) -> Figure:
    """The GPUs, a row per node, each with its rank and the letter of its group along `axis`; below, the link of every axis."""
    grid = lay_out(sizes, order)
    rows = groups(grid, AXES.index(axis)).tolist()
    letter = {rank: number for number, row in enumerate(rows) for rank in row}
    nodes = -(-grid.numel() // per_node)
    figure = Figure(figsize=(max(5.0, 0.75 * per_node + 1.5), 0.8 * nodes + 1.6), layout="constrained")
    picture = figure.subplots()
    for rank in range(grid.numel()):
        node, place = divmod(rank, per_node)
        color = RANKS[letter[rank] % len(RANKS)]
        picture.add_patch(Rectangle((place + 0.05, -node + 0.1), 0.9, 0.75, facecolor=color, alpha=0.35, edgecolor=color))
        picture.text(place + 0.5, -node + 0.6, LETTERS[letter[rank] % len(LETTERS)], ha="center", va="center", weight="bold")
        picture.text(place + 0.5, -node + 0.27, f"rank {rank}", ha="center", va="center", fontsize=8)
    for node in range(nodes):
        picture.add_patch(Rectangle((-0.05, -node), per_node + 0.1, 0.95, fill=False, edgecolor=GRAY, linewidth=1.5))
        picture.text(-0.15, -node + 0.47, f"node {node}", ha="right", va="center")
    picture.set_xlim(-1.2, per_node + 0.1)
    picture.set_ylim(-nodes + 0.9, 1.05)
    picture.set_axis_off()
    told = links(sizes, order, per_node)
    picture.set_title(f"{axis}: {len(rows)} groups of {sizes[axis]} (same letter: same group), order {order}", fontsize=10)
    figure.supxlabel("     ".join(f"{name}={sizes[name]}: {told[name] or 'alone'}" for name in order.split("-")), fontsize=10)
    return figure
