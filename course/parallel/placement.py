"""What a rank holds of a parameter. Clipping, checkpoints and `verify` read this and guess nothing from shapes."""

from dataclasses import dataclass

from torch import Tensor, nn

from course.parallel.mesh import Axis

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
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            rows = getattr(module, "rows", tuple(parameter.shape[:1]))
            shape = (*rows, *parameter.shape[1:])
            name = f"{prefix}.{leaf}" if prefix else leaf
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
