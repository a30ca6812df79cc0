"""What a rank holds of a parameter. Clipping, checkpoints and `verify` read this and guess nothing from shapes."""

from dataclasses import dataclass, replace

from torch import Tensor, nn

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
    whole. partial_over: the axis over which its gradient is a partial sum. owner: whether this rank speaks
    for it where several hold the same box (in the gradient norm and in checkpoints). flat: with ZeRO-1, first and one past
    the last of the box's elements, in order, that this tensor has; None for all of them.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    axis: Axis | None = None
    partial_over: Axis | None = None
    owner: bool = True
    flat: tuple[int, int] | None = None


def place_serial(model: nn.Module, owner: bool = True) -> nn.Module:
    """Attach to every parameter the placement of a whole, unsharded tensor; surgery then changes what it splits."""
    for name, parameter in model.named_parameters():                    # a tied one once, by its first name
        module = model.get_submodule(name.rpartition(".")[0])
        rows = getattr(module, "rows", tuple(parameter.shape[:1]))
        shape = (*rows, *parameter.shape[1:])
        place(parameter, Placement(name, shape, tuple((0, n) for n in shape), owner=owner))
    return model


def place(parameter: nn.Parameter, where: Placement) -> nn.Parameter:
    """Attach a placement to a parameter."""
    parameter.placement = where                    # type: ignore[attr-defined]
    return parameter


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of what is in a box."""
    return tuple(stop - start for start, stop in box)


def placement(parameter: Tensor) -> Placement:
    """The placement attached to a parameter."""
    return parameter.placement                     # type: ignore[attr-defined]


def cut(parameter: Tensor, dim: int, axis: Axis) -> nn.Parameter:
    """This rank's part of a parameter along a dim of its logical shape, which the axis must divide (`CourseError`)."""
    where = placement(parameter)
    size = where.global_shape[dim]
    if size % axis.size:
        raise CourseError(f"parallel.{axis.name}={axis.size} does not divide the {size} heads or features of {where.name}: "
                          f"choose a divisor of {size}")
    box = tuple(mappings.bounds(size, axis.size, axis.rank) if d == dim else side for d, side in enumerate(where.box))
    shape = box_shape(box)
    part = parameter.new_empty(shape).reshape(-1, *shape[len(shape) + 1 - parameter.dim():])        # rows are one dim of it
    return place(nn.Parameter(part, parameter.requires_grad), replace(where, box=box, axis=axis))
