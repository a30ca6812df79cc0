"""Parallelism as surgery on a serial model: `parallelize(model, mesh)` and the mesh it works on."""

from torch import nn

from course.errors import CourseError
from course.parallel.mesh import Axis, Mesh, World, build_mesh, join, leave
from course.parallel.placement import Placement, place_serial, placement
from course.parallel.tensor import tensor_parallel

__all__ = ["Axis", "Mesh", "Placement", "World", "build_mesh", "join", "leave", "parallelize", "place_serial", "placement"]


def parallelize(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Name every parameter's place, and split the model along the axes of the mesh.

    So far along tp; the data-parallel axis needs no surgery, since `train_step` averages gradients over it.
    """
    for axis in (mesh.pp, mesh.cp):
        if axis.size > 1:
            raise CourseError(f"parallel.{axis.name}={axis.size}: this version trains data- and tensor-parallel only; "
                              f"set parallel.{axis.name}=1")
    return tensor_parallel(place_serial(model, owner=mesh.dp_cp.rank == 0), mesh.tp)
