"""What converting from and to any library has in common: a rule for each of our parameters, and tensors read one at a time.

A rule says which of their tensors one of ours is, and how it is laid out there: `Layout`, two functions that undo each other.
They are rearrangements, so they also work on tensors of the meta device, which have a shape and no numbers: so the shape of
everything that will be written is known before anything is read.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from course.convert.weight_files import Entry
from course.parallel.placement import Placement, Placements
from course.utils.errors import CourseError

Parts = tuple[Tensor, ...]


@dataclass(frozen=True)
class Layout:
    """How one of our tensors follows from theirs, and the other way round; the first argument is our model's configuration."""

    ours: Callable[[Any, Parts], Tensor]
    theirs: Callable[[Any, Tensor], Parts]


SAME = Layout(lambda c, parts: parts[0], lambda c, x: (x,))
Rule = tuple[Layout, tuple[str, ...]]                # how, and their names
Table = dict[str, Rule]                              # our name -> its rule; * is the number of the block


def both(ours: str, layout: Layout, *theirs: str, bias: Layout | None = None) -> Table:
    """The lines of a linear's weight and bias, which have the same layout unless `bias` is another."""
    return {f"{ours}.weight": (layout, tuple(f"{name}.weight" for name in theirs)),
            f"{ours}.bias": (bias or layout, tuple(f"{name}.bias" for name in theirs))}


def look_up(table: Table, ours: str) -> Rule | None:
    """The rule for one of our parameters, if the table has one."""
    number = next((part for part in ours.split(".") if part.isdigit()), "")
    rule = table.get(".".join("*" if part == number else part for part in ours.split(".")))
    return rule and (rule[0], tuple(name.replace("*", number) for name in rule[1]))


class Source:
    """Their weights as a mapping from our serial names to tensors, one read at a time; `CourseError` for one that is not there.

    where: what to call them in a sentence. what, says: "a gpt2 of its config.json", "its config.json says".
    """

    def __init__(self, where: Path, c: Any, tensors: Mapping[str, Tensor], rule: Callable[[str], Rule], what: str, says: str,
                 ignored: Callable[[str], bool] = lambda name: False):
        self.where, self.c, self.tensors, self.rule, self.ignored = where, c, tensors, rule, ignored
        self.what, self.says = what, says
        self.note = ""                               # what was assumed, as nothing says it

    def __getitem__(self, ours: str) -> Tensor:
        layout, names = self.rule(ours)
        for name in names:
            if name not in self.tensors:
                raise CourseError(f"{self.where} lacks the tensor {name}, for {ours}: it is not {self.what}")
        theirs = tuple(self.tensors[name] for name in names)
        try:
            return layout.ours(self.c, theirs)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:     # rows of no whole heads, dims that are not there
            shapes = ", ".join(f"{name} as {list(x.shape)}" for name, x in zip(names, theirs, strict=True))
            raise CourseError(f"{self.where} has {shapes}, of which no {ours} can be made: it is not {self.what}, or the "
                              "settings are those of another") from error

    def check(self, ours: Iterable[str]) -> None:
        """Raise `CourseError` if there is a tensor that none of our names stands for."""
        known = {name for one in ours for name in self.rule(one)[1]}
        left = [name for name in self.tensors if name not in known and not self.ignored(name)]
        if left:
            raise CourseError(f"{self.where} has {len(left)} tensors that {self.what} has not, such as {left[0]}: it is of "
                              "another model")

    def part(self, name: str, where: Placement) -> Tensor:
        """The box of one of our parameters, or the flat range of it; `CourseError` if theirs is of another size."""
        whole, shape = self[name], torch.Size(where.global_shape)
        turned = whole.dim() > 1 and whole.shape[-1] != shape[-1]       # as many numbers, but in another order
        if whole.numel() != shape.numel() or turned:
            raise CourseError(f"{self.where} has {name} as {list(whole.shape)}, and {self.says} {list(where.global_shape)}: "
                              "give the settings of that model, or download both again")
        box = whole.reshape(where.global_shape)[tuple(slice(*side) for side in where.box)]
        return box if where.flat is None else box.flatten()[slice(*where.flat)]


@torch.no_grad()
def fill(parameters: Iterable[nn.Parameter], placements: Placements, source: Source) -> None:
    """Give parameters their values, in whatever layout they are: each rank takes its boxes.

    Raises `CourseError` where a tensor is missing or of another shape.
    """
    for parameter in parameters:
        where = placements[parameter]
        parameter.copy_(source.part(where.name, where).reshape(parameter.shape))


def entries(c: Any, rule: Callable[[str], Rule], ours: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> list[Entry]:
    """What will be written for our parameters, name -> format and shape. Nothing is read: meta tensors have shapes."""
    listed = []
    for name, (dtype, shape) in ours.items():
        layout, names = rule(name)
        made = layout.theirs(c, torch.empty(shape, dtype=dtype, device="meta"))
        listed += [Entry(one, dtype, tuple(x.shape), name, i) for i, (one, x) in enumerate(zip(names, made, strict=True))]
    return listed
