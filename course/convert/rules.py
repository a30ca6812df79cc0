"""The part that all conversions share: a rule for each of our parameters, and tensors read one at a time.

A rule names their tensors that make up one of ours. Its `Layout` is two functions, each the inverse of the other. They only
rearrange, so they also work on meta tensors, which have a shape but no data. So the shapes of all outputs are known before
anything is read.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from course.convert.weight_files import Entry
from course.ops.storage import has_memory
from course.parallel.placement import Placement, Placements
from course.utils.errors import CourseError

Parts = tuple[Tensor, ...]


@dataclass(frozen=True)
class Layout:
    """How one of our tensors follows from theirs, and the other way around; the first argument is our model's configuration."""

    ours: Callable[[Any, Parts], Tensor]
    theirs: Callable[[Any, Tensor], Parts]


SAME = Layout(lambda c, parts: parts[0], lambda c, x: (x,))
Rule = tuple[Layout, tuple[str, ...]]                # layout, and their names
Table = dict[str, Rule]                              # our name -> its rule; * is the number of the block


def both(ours: str, layout: Layout, *theirs: str, bias: Layout | None = None) -> Table:
    """The table lines of a linear's weight and bias, which share a layout unless `bias` is another."""
    return {f"{ours}.weight": (layout, tuple(f"{name}.weight" for name in theirs)),
            f"{ours}.bias": (bias or layout, tuple(f"{name}.bias" for name in theirs))}


def look_up(table: Table, ours: str) -> Rule | None:
    """The rule for one of our parameters, if the table has one."""
    number = next((part for part in ours.split(".") if part.isdigit()), "")
    rule = table.get(".".join("*" if part == number else part for part in ours.split(".")))
    return rule and (rule[0], tuple(name.replace("*", number) for name in rule[1]))


class Source:
    """Their weights as a mapping from our serial names to tensors, read one at a time; `CourseError` for a missing one.

    where: their path, for error messages. what, says: phrases such as "a gpt2 of its config.json", "its config.json says".
    """

    def __init__(self, where: Path, c: Any, tensors: Mapping[str, Tensor], rule: Callable[[str], Rule], what: str, says: str,
                 ignored: Callable[[str], bool] = lambda name: False):
        self.where, self.c, self.tensors, self.rule, self.ignored = where, c, tensors, rule, ignored
        self.what, self.says = what, says
        self.note = ""                               # an assumption to tell the user

    def __getitem__(self, ours: str) -> Tensor:
        layout, names = self.rule(ours)
        for name in names:
            if name not in self.tensors:
                raise CourseError(f"{self.where} lacks the tensor {name}, for {ours}: it is not {self.what}")
        theirs = tuple(self.tensors[name] for name in names)
        try:
            return layout.ours(self.c, theirs)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:     # partial heads, missing dims
            shapes = ", ".join(f"{name} as {list(x.shape)}" for name, x in zip(names, theirs, strict=True))
            raise CourseError(f"{self.where} has {shapes}, of which no {ours} can be made: it is not {self.what}, or the "
                              "settings are those of another") from error

    def check(self, ours: Iterable[str]) -> None:
        """Raise `CourseError` if a tensor matches none of our names."""
        known = {name for one in ours for name in self.rule(one)[1]}
        left = [name for name in self.tensors if name not in known and not self.ignored(name)]
        if left:
            raise CourseError(f"{self.where} has {len(left)} tensors that {self.what} does not have, such as {left[0]}: it "
                              "belongs to another model")

    def part(self, name: str, where: Placement) -> Tensor:
        """The box of one of our parameters, or the flat range of it. Raises `CourseError` if theirs has another size."""
        whole, shape = self[name], torch.Size(where.global_shape)
        turned = whole.dim() > 1 and whole.shape[-1] != shape[-1]       # perhaps the same size, but in another order
        if whole.numel() != shape.numel() or turned:
            raise CourseError(f"{self.where} has {name} as {list(whole.shape)}, and {self.says} {list(where.global_shape)}: "
                              "give the settings of that model, or download both again")
        box = whole.reshape(where.global_shape)[tuple(slice(*side) for side in where.box)]
        return box if where.flat is None else box.flatten()[slice(*where.flat)]


@torch.no_grad()
def fill(parameters: Iterable[nn.Parameter], placements: Placements, source: Source) -> None:
    """Set the values of parameters in any layout: each rank takes its boxes.

    Raises `CourseError` if a tensor is missing or has another shape.
    """
    for parameter in parameters:
        if not has_memory(parameter):               # its shares are among the others
            continue
        where = placements[parameter]
        parameter.copy_(source.part(where.name, where).reshape(parameter.shape))


def entries(c: Any, rule: Callable[[str], Rule], ours: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> list[Entry]:
    """The tensors to write for our parameters (name -> dtype and shape). Nothing is read: meta tensors have shapes."""
    listed = []
    for name, (dtype, shape) in ours.items():
        layout, names = rule(name)
        made = layout.theirs(c, torch.empty(shape, dtype=dtype, device="meta"))
        listed += [Entry(one, dtype, tuple(x.shape), name, i) for i, (one, x) in enumerate(zip(names, made, strict=True))]
    return listed
