"""What a rank holds of each parameter. Clipping, checkpoints and `verify` read this and guess nothing from shapes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor, nn

from course.models.layers import Linear
from course.parallel import mappings
from course.parallel.mesh import Axis
from course.utils.errors import CourseError

Box = tuple[tuple[int, int], ...]                  # for each dim: first row, one past the last


@dataclass(frozen=True)
class Placement:
    """Where one parameter of this rank's model sits in the serial model.

    name: its name in the serial model. global_shape: its logical shape there, (3, heads, head_dim, dim) for a
    fused QKV weight, so that a part of its heads is a box. box: which part of it is here; the tensor
    itself has the box's elements in order. axis: the mesh axis along which it is sharded, None where it is
    whole. partial_over: the axis over which its gradient is a partial sum. average_over: the axis over which its gradient is
    averaged; None: not at all. owner: whether this rank speaks for it where several hold the same box (in the gradient norm and
    in checkpoints). flat: with ZeRO-1, first and one past the last of the box's elements, in order, that this tensor has; None
    for all of them.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    axis: Axis | None = None
    partial_over: Axis | None = None
    average_over: Axis | None = None
    owner: bool = True
    flat: tuple[int, int] | None = None


Placements = dict[Tensor, Placement]               # of a rank's model, and of what its optimizer has in the place of parameters


def serial_placements(model: nn.Module, owner: bool = True, average_over: Axis | None = None) -> Placements:
    """The placement of every parameter of a serial model, whole and unsharded; surgery then changes those of what it cuts."""
    placements: Placements = {}
    for name, parameter in model.named_parameters():                    # a tied one once, by its first name
        module = model.get_submodule(name.rpartition(".")[0])
        rows = module.rows if isinstance(module, Linear) else tuple(parameter.shape[:1])
        shape = (*rows, *parameter.shape[1:])
        box = tuple((0, n) for n in shape)
        placements[parameter] = Placement(name, shape, box, average_over=average_over, owner=owner)
    return placements


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of what is in a box."""
    return tuple(stop - start for start, stop in box)


def cut(placements: Placements, parameter: Tensor, dim: int, axis: Axis) -> None:
    """Leave this rank's part of a parameter on the meta device: along a dim of its logical shape, counted from either end.

    One that has been cut so already, for another use of a tied weight, stays as it is. Raises `CourseError` where the axis does
    not divide the dim, and where two uses of a weight need different parts of it.
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
    parameter.data = parameter.new_empty(shape).reshape(-1, *shape[len(shape) + 1 - parameter.dim():])  # rows are one dim of it
    placements[parameter] = replace(where, box=box, axis=axis)


def owned_by_first(placements: Placements, parameters: Iterable[Tensor], axis: Axis) -> None:
    """Of parameters that all ranks of an axis have alike, the first speaks for them."""
    for parameter in parameters:
        where = placements[parameter]
        if where.axis is None:
            placements[parameter] = replace(where, owner=where.owner and axis.rank == 0)


def two_parts(name: str) -> CourseError:
    """What to say of a weight whose uses need different parts of it."""
    return CourseError(f"{name} has several uses that need different parts of it: give all of them the same style in the model's "
                       "tensor_plan, or use parallel.tp=1")
