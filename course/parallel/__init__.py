"""Parallelism as surgery on a serial model: `parallelize(model, mesh, settings)` and the mesh it works on."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from course.errors import CourseError
from course.parallel.context import check_attention, context_parallel, needs_zigzag
from course.parallel.data import METHODS, Naive
from course.parallel.masters import Masters
from course.parallel.mesh import Axis, Mesh, World, abandon, build_mesh, join, joined, leave
from course.parallel.pipeline import split_stages
from course.parallel.placement import Placement, place_serial, placement
from course.parallel.sequence import mark_partial, require, split_tokens
from course.parallel.tensor import tensor_parallel
from course.parallel.zero import Zero

if TYPE_CHECKING:
    from course.config import Parallel

__all__ = ["Axis", "Mesh", "Placement", "World", "abandon", "build_mesh", "data_parallel", "join", "joined", "leave",
           "parallelize", "place_serial", "placement"]


def data_parallel(model: nn.Module, mesh: Mesh, settings: "Parallel", low: torch.dtype | None = None,
                  masters: bool = False) -> Naive:
    """What averages a model's gradients over dp x cp. Comes after the parameters have got their values.

    low: the 16 bits of the matmuls, if they have fewer than the parameters: ZeRO-1 then computes with copies in these. masters:
    one rank alone does, too, with an optimizer that writes the copies (`Config.masters`).
    """
    if mesh.dp_cp.size == 1:
        return Masters(model, mesh.dp_cp, low) if low and masters else Naive(model, mesh.dp_cp)
    if settings.zero:
        return Zero(model, mesh.dp_cp, settings.bucket_mb, low)
    return METHODS[settings.data](model, mesh.dp_cp, settings.bucket_mb)


def parallelize(model: nn.Module, mesh: Mesh, settings: "Parallel") -> nn.Module:
    """Cut a serial model, on the meta device, along the axes of the mesh, and name each parameter's place in it.

    The data-parallel axis needs no surgery: gradients are averaged over it (`data_parallel`). Raises `CourseError` if a parameter
    has a value, and where a seam is missing without which ranks would compute something else than one process does.
    """
    check_meta(model)
    model = place_serial(model, owner=settings.zero or mesh.dp_cp.rank == 0)             # with ZeRO each rank owns its segments
    tokens = None
    sp = mesh.tp if settings.sp else Axis("tp")
    if mesh.cp.size * sp.size > 1:
        check_seams(model, mesh.cp, sp)
        zigzag = mesh.cp.size > 1 and needs_zigzag(model, settings.context)
        tokens = split_tokens(model, mesh.cp, sp, zigzag, settings.overlap)
    model = tensor_parallel(model, mesh.tp, tokens if sp.size > 1 else None)
    if sp.size > 1:
        mark_partial(model, sp)
    if tokens is not None:
        model = context_parallel(model, tokens, settings.context)
    if mesh.pp.size > 1:
        model = split_stages(model, mesh, settings.schedule, settings.chunks)
    return model


def check_meta(model: nn.Module) -> None:
    """Raise `CourseError` if a parameter has a value: it would be lost where the parameter is cut."""
    name = next((name for name, parameter in model.named_parameters() if not parameter.is_meta), None)
    if name is not None:
        raise CourseError(f"{name} has a value already, and parallelize would lose it: build the model on the meta device "
                          "(`with torch.device(\"meta\"):`); values come after, by random.initialize or checkpoint.load")


def check_seams(model: nn.Module, cp: Axis, sp: Axis) -> None:
    """Raise `CourseError` if tokens are cut and what has to reach over all of them cannot be found."""
    cut = {"context": cp.size > 1, "sequence": cp.size * sp.size > 1}
    if cut[model.token_plan.get("target", "context")]:                  # type: ignore[union-attr, operator]
        require(model, "total", "its loss would count the tokens of one rank alone; pass what it adds up over tokens through "
                "course.models.layers.Total")
    if cp.size > 1:
        require(model, "attend", "queries would see the keys of one rank alone; attend in course.models.layers.Attend, or use "
                "parallel.cp=1")
        check_attention(model)
