"""Which part of each parameter a rank holds. Clipping, checkpoints and `verify` read this and infer nothing from shapes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor, nn

from course.models.layers import Linear
from course.parallel import mappings
from course.parallel.mesh import Axis
from course.utils.errors import CourseError

Box = tuple[tuple[int, int], ...]                  # for each dim: first index, one past the last


@dataclass(frozen=True)
class Placement:
    """Where one parameter of this rank's model sits in the serial model.

    name: its name in the serial model. global_shape: its logical shape there, (3, heads, head_dim, dim) for a fused QKV
    weight, so that a range of heads is a box. box: the part on this rank; the tensor holds the box's elements in order.
    axis: the mesh axis along which it is sharded; None if it is whole. partial_over: the axis over which its gradient is a
    partial sum. average_over: the axis over which its gradient is averaged; None: not at all. owner: whether this rank counts
    and saves it if several hold the same box (in the gradient norm and in checkpoints). flat: with ZeRO-1, the range of the
    box's elements, in order, that this tensor holds, as (first, one past the last); None: all of them.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    axis: Axis | None = None
    partial_over: Axis | None = None
    average_over: Axis | None = None
    owner: bool = True
    flat: tuple[int, int] | None = None


Placements = dict[Tensor, Placement]               # of a rank's parameters, and of tensors that its optimizer updates instead


def serial_placements(model: nn.Module, owner: bool = True, average_over: Axis | None = None) -> Placements:
    """The placements of a serial model's parameters, all whole; surgery then changes those of the parameters that it cuts."""
    placements: Placements = {}
    for name, parameter in model.named_parameters():                    # a tied one once, under its first name
        module = model.get_submodule(name.rpartition(".")[0])
        rows = module.rows if isinstance(module, Linear) else tuple(parameter.shape[:1])
        shape = (*rows, *parameter.shape[1:])
        box = tuple((0, n) for n in shape)
        placements[parameter] = Placement(name, shape, box, average_over=average_over, owner=owner)
    return placements


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def cut(placements: Placements, parameter: Tensor, dim: int, axis: Axis) -> None:
    """Keep only this rank's part of a parameter on the meta device, along a dim of its logical shape, counted from either end.

    A tied weight that another use has already cut in the same way stays as it is. Raises `CourseError` if the axis does not
    divide the dim, or if two uses of a weight need different parts of it.
    """
    where = placements[parameter]
    dim %= len(where.global_shape)
    size = where.global_shape[dim]
    if size % axis.size:
        raise CourseError(f"parallel.{axis.name}={axis.size} does not divide the {size} heads or features of {where.name}: "
                          f"choose a divisor of {size}")
    part = mappings.bounds(size, axis.size, axis.rank)
    if where.axis is not None:
        if where.box[dim] != part:
            raise two_parts(where.name)
        return
    box = tuple(part if d == dim else side for d, side in enumerate(where.box))
    shape = box_shape(box)
    parameter.data = parameter.new_empty(shape).reshape(-1, *shape[len(shape) + 1 - parameter.dim():])  # in it, rows are one dim
    placements[parameter] = replace(where, box=box, axis=axis)


def owned_by_first(placements: Placements, parameters: Iterable[Tensor], axis: Axis) -> None:
    """Leave the ownership of uncut parameters to the axis's first rank: all its ranks hold the same."""
    for parameter in parameters:
        where = placements[parameter]
        if where.axis is None:
            placements[parameter] = replace(where, owner=where.owner and axis.rank == 0)


def two_parts(name: str) -> CourseError:
    """The error for a weight whose uses need different parts of it."""
    return CourseError(f"{name} has several uses that need different parts of it: give all of them the same style in the model's "
                       "tensor_plan, or use parallel.tp=1")
