"""Parallelism as surgery on a serial model: `parallelize(model, mesh)` and the mesh it works on."""

from torch import nn

from course.errors import CourseError
from course.parallel.mesh import Axis, Mesh, World, build_mesh, join, leave
from course.parallel.placement import Placement, place_serial, placement

__all__ = ["Axis", "Mesh", "Placement", "World", "build_mesh", "join", "leave", "parallelize", "place_serial", "placement"]


def parallelize(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Name every parameter's place, and split the model along the axes of the mesh.

    So far the data-parallel axis alone: its surgery is none, since `train_step` averages gradients over it.
    """
    for axis in (mesh.pp, mesh.cp, mesh.tp):
        if axis.size > 1:
            raise CourseError(f"parallel.{axis.name}={axis.size}: this version trains data-parallel only; "
                              f"set parallel.{axis.name}=1")
    return place_serial(model, owner=mesh.dp_cp.rank == 0)
