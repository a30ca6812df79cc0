"""Parallelism as surgery on a serial model: `parallelize(model, mesh, settings)` and the mesh it works on."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from course.parallel.context_parallel.attention import apply_context_parallel, check_attention, needs_zigzag
from course.parallel.data_parallel.gradients import METHODS, GradientSync
from course.parallel.data_parallel.master_weights import MasterWeights
from course.parallel.data_parallel.zero1 import ZeRO1
from course.parallel.mesh import Axis, Mesh, World, abandon, build_mesh, join, joined, leave
from course.parallel.pipeline_parallel.runtime import split_stages
from course.parallel.placement import Placement, place_serial, placement
from course.parallel.tensor_parallel.linear import apply_tensor_parallel
from course.parallel.tensor_parallel.sequence import mark_partial, require_seam, split_tokens
from course.utils.errors import CourseError

if TYPE_CHECKING:
    from course.config import Parallel

__all__ = [
    "Axis",
    "Mesh",
    "Placement",
    "World",
    "abandon",
    "build_gradient_sync",
    "build_mesh",
    "join",
    "joined",
    "leave",
    "parallelize",
    "place_serial",
    "placement",
]


def build_gradient_sync(model: nn.Module, mesh: Mesh, settings: "Parallel", low: torch.dtype | None = None,
                  masters: bool = False) -> GradientSync:
    """The gradient synchronization of a model over dp x cp. Comes after the parameters have got their values.

    low: the 16 bits of the matmuls, if they have fewer than the parameters: ZeRO-1 then computes with copies in these. masters:
    one rank alone does, too, with an optimizer that writes the copies (`Config.masters`).
    """
    if mesh.dp_cp.size == 1:
        return MasterWeights(model, mesh.dp_cp, low) if low and masters else GradientSync(model, mesh.dp_cp)
    if settings.zero:
        return ZeRO1(model, mesh.dp_cp, settings.bucket_mb, low)
    return METHODS[settings.data](model, mesh.dp_cp, settings.bucket_mb)


def parallelize(model: nn.Module, mesh: Mesh, settings: "Parallel") -> nn.Module:
    """Cut a serial model, on the meta device, along the axes of the mesh, and name each parameter's place in it.

    The data-parallel axis needs no surgery: gradients are averaged over it (`build_gradient_sync`). Raises `CourseError` if a
    parameter has a value, and where a seam is missing without which ranks would compute something else than one process does.
    """
    check_meta(model)
    model = place_serial(model, owner=settings.zero or mesh.dp_cp.rank == 0)             # with ZeRO each rank owns its segments
    tokens = None
    sp = mesh.tp if settings.sp else Axis("tp")
    if mesh.cp.size * sp.size > 1:
        check_seams(model, mesh.cp, sp)
        zigzag = mesh.cp.size > 1 and needs_zigzag(model, settings.context)
        tokens = split_tokens(model, mesh.cp, sp, zigzag, settings.overlap)
    model = apply_tensor_parallel(model, mesh.tp, tokens if sp.size > 1 else None)
    if sp.size > 1:
        mark_partial(model, sp)
    if tokens is not None:
        model = apply_context_parallel(model, tokens, settings.context)
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
        require_seam(model, "sum_over_tokens", "its loss would count the tokens of one rank alone; pass what it adds up over "
                     "tokens through course.models.layers.SumOverTokens")
    if cp.size > 1:
        require_seam(model, "attend", "queries would see the keys of one rank alone; attend in course.models.layers.Attend, or "
                     "use parallel.cp=1")
        check_attention(model)
