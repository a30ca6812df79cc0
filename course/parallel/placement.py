"""What a rank holds of a parameter. Clipping, checkpoints and `verify` read this and guess nothing from shapes."""

from dataclasses import dataclass

from torch import nn

from course.parallel.mesh import Axis

Box = tuple[tuple[int, int], ...]                  # for each dim: first row, one past the last


@dataclass(frozen=True)
class Placement:
    """Where one parameter of this rank's model sits in the serial model.

    name: its name in the serial model. global_shape: its shape there. box: which part of it is here.
    axis: the mesh axis along which it is sharded, None where it is whole. partial_over: the axis over
    which its gradient is a partial sum. owner: whether this rank speaks for it where several hold the
    same box (in the gradient norm and in checkpoints).
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    axis: Axis | None = None
    partial_over: Axis | None = None
    owner: bool = True


def place_serial(model: nn.Module, owner: bool = True) -> nn.Module:
    """Attach to every parameter the placement of a whole, unsharded tensor; surgery then changes what it splits."""
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        parameter.placement = Placement(name, shape, tuple((0, n) for n in shape), owner=owner)  # type: ignore[attr-defined]
    return model


def placement(parameter: nn.Parameter) -> Placement:
    """The placement attached to a parameter."""
    return parameter.placement                     # type: ignore[attr-defined]
