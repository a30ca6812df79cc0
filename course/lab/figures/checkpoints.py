"""Figures of lesson 16: a tensor's shards in an old and a new layout, and which old shards a new rank has to read."""

from collections.abc import Mapping, Sequence
from itertools import cycle

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course.checkpoint.shards import overlap
from course.lab.figures.style import label, panel
from course.parallel.mappings import bounds
from course.parallel.placement import Box
from course.utils.colors import BLUE, GRAY, GREEN, ORANGE, PURPLE, RANKS, SKY

FILLS = (SKY, *RANKS[1:4], BLUE, GRAY)
HATCHES = ("", "//", "..", "\\\\", "xx", "--")       # the same information without color
Curves = Mapping[str, tuple[Sequence[float], Sequence[float]]]
ROWS, COLUMNS = 24, 16                               # size of the matrix in the widget


def grid_boxes(rows: int, columns: int) -> list[Box]:
    """Cut the matrix into `rows` x `columns` boxes, row by row."""
    return [(bounds(ROWS, rows, i), bounds(COLUMNS, columns, j)) for i in range(rows) for j in range(columns)]


def pieces_needed(pieces: Sequence[Box], wanted: Box) -> dict[int, int]:
    """Which pieces a box overlaps: piece number -> number of shared elements."""
    found = {}
    for number, piece in enumerate(pieces):
        shared = overlap(wanted, piece)
        if shared is not None:
            rows, columns = (part.stop - part.start for part in shared[1])
            found[number] = rows * columns
    return found


def boxes(pieces: Sequence[Box], wanted: Sequence[Box], mine: int, title: str = "") -> Figure:
    """The matrix in the pieces of an old layout, colored by file, and the dashed boxes of a new one; box `mine` is bold."""
    figure, axis = panel(6.4, 4.6)
    for number, (((top, bottom), (left, right)), color, hatch) in enumerate(zip(pieces, cycle(FILLS), cycle(HATCHES))):
        axis.add_patch(Rectangle((left, top), right - left, bottom - top, facecolor=color, edgecolor="white", alpha=0.45,
                                 hatch=hatch, label=f"rank{number:05d}"))
    for number, ((top, bottom), (left, right)) in enumerate(wanted):
        thick = number == mine
        axis.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor="black",
                                 linestyle="-" if thick else "--", linewidth=3.5 if thick else 1.2, zorder=3 + thick))
        axis.text((left + right) / 2, (top + bottom) / 2, f"new {number}", ha="center", va="center", zorder=6,
                  weight="bold" if thick else "normal", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})
    axis.set_xlim(-0.3, COLUMNS + 0.3)
    axis.set_ylim(ROWS + 0.3, -0.3)
    label(axis, x="columns", y="rows", title=title)
    figure.legend(loc="outside right upper", title="old pieces", fontsize=9)
    told = ", ".join(f"{count} of rank{number:05d}" for number, count in pieces_needed(pieces, wanted[mine]).items())
    figure.supxlabel(f"new {mine} needs {told}", fontsize=9)
    return figure


def layouts(old_rows: int, old_columns: int, new_rows: int, new_columns: int, rank: int) -> Figure:
    """`boxes` for two grids, for a widget; `rank` is clipped to the last box."""
    new = grid_boxes(new_rows, new_columns)
    return boxes(grid_boxes(old_rows, old_columns), new, min(rank, len(new) - 1),
                 f"{old_rows} x {old_columns} pieces on the disk, {new_rows} x {new_columns} boxes wanted")


def lines_and_dots(lines: Curves, dots: Curves, y: str, title: str = "") -> Figure:
    """Lines over steps, name -> (xs, ys), with dots on top, so that both stay visible where they coincide."""
    figure, axis = panel(6.5, 3.8)
    for (name, (xs, ys)), color, dash in zip(lines.items(), (GRAY, ORANGE, BLUE), ("-", "--", "-."), strict=False):
        axis.plot(xs, ys, color=color, linestyle=dash, label=name)
    for (name, (xs, ys)), (mark, color) in zip(dots.items(), (("o", GREEN), ("s", PURPLE)), strict=False):
        axis.plot(xs, ys, mark, color=color, markersize=6, label=name)
    label(axis, x="step", y=y, title=title, grid="major")
    axis.legend()
    return figure
