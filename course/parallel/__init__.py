"""Parallelism as surgery on a serial model: `parallelize(model, mesh, settings)`, the mesh it works on, the layout it returns."""

from typing import TYPE_CHECKING

from torch import nn

from course.config.context_choice import shared_heads
from course.models import Model
from course.parallel.context_parallel.attention import apply_context_parallel, check_attention, needs_zigzag
from course.parallel.data_parallel import build_gradient_sync
from course.parallel.expert_parallel.experts import apply_expert_parallel
from course.parallel.initialize import initialize, initialize_serial
from course.parallel.layout import Layout, serial_layout
from course.parallel.mesh import Axis, Mesh, World, abandon, build_mesh, join, joined, leave
from course.parallel.pipeline_parallel.runtime import Pipeline, split_stages
from course.parallel.placement import Placement, Placements, serial_placements
from course.parallel.tensor_parallel.linear import apply_tensor_parallel
from course.parallel.tensor_parallel.overlap_choice import choose_overlap
from course.parallel.token_split import SplitTokens, WholeTokens, mark_partial, require_seam, split_tokens
from course.utils.errors import CourseError

if TYPE_CHECKING:
    from course.config import Parallel

__all__ = [
    "Axis",
    "Layout",
    "Mesh",
    "Placement",
    "Placements",
    "World",
    "abandon",
    "build_gradient_sync",
    "build_mesh",
    "initialize",
    "initialize_serial",
    "join",
    "joined",
    "leave",
    "parallelize",
    "serial_layout",
    "serial_placements",
]


def parallelize(model: Model, mesh: Mesh, settings: "Parallel") -> Layout:
    """Cut a serial model on the meta device, in place, along the axes of the mesh. Returns its `Layout`.

    The data-parallel axis needs no surgery: gradients are averaged over it (`build_gradient_sync`). Raises `CourseError` if a
    parameter already has a value, or if a seam is missing without which the ranks would not compute what one process does.
    """
    check_meta(model)
    own_parts = ("pp", "tp", "dp", "cp") if settings.zero else ("pp", "tp")             # ZeRO gives each rank its own segments
    placements = serial_placements(model, mesh.first_along_all_but(*own_parts), mesh.dp_cp)
    tokens: WholeTokens | SplitTokens = WholeTokens()
    sp = mesh.tp if settings.sp else Axis("tp")
    split, overlap = None, choose_overlap(mesh, settings)
    context: str = settings.context
    if mesh.cp.size > 1 and context == "auto":
        context, _ = shared_heads(model.c, settings)
    if mesh.cp.size * sp.size > 1:
        check_seams(model, mesh.cp, sp)
        zigzag = mesh.cp.size > 1 and needs_zigzag(model, context)
        tokens = split = split_tokens(model, mesh.cp, sp, zigzag, overlap.how)
    apply_tensor_parallel(model, placements, mesh.tp, split if sp.size > 1 else None)
    apply_expert_parallel(model, placements, mesh, settings, split if sp.size > 1 else None)
    if sp.size > 1:
        mark_partial(placements, sp)
    if split is not None:
        apply_context_parallel(model, placements, split, context)
    if mesh.pp.size == 1:
        return Layout(mesh, placements, tokens, (model,), overlap=overlap)
    stages = split_stages(model, placements, mesh, settings.chunks)
    return Layout(mesh, placements, tokens, stages, Pipeline(mesh, settings.schedule, settings.chunks), overlap)


def check_meta(model: nn.Module) -> None:
    """Raise `CourseError` if a parameter has a value: cutting the parameter would lose it."""
    name = next((name for name, parameter in model.named_parameters() if not parameter.is_meta), None)
    if name is not None:
        raise CourseError(f"{name} has a value already, and parallelize would lose it: build the model on the meta device "
                          "(`with torch.device(\"meta\"):`); values come after, by random.initialize or checkpoint.load")


def check_seams(model: Model, cp: Axis, sp: Axis) -> None:
    """Raise `CourseError` if tokens are cut and the model has no seam for what must span all of them: loss sums, attention."""
    cut = {"context": cp.size > 1, "sequence": cp.size * sp.size > 1}
    if cut[model.token_plan.get("target", "context")]:
        require_seam(model, "sum_over_tokens", "its loss would count the tokens of one rank alone; pass what it adds up over "
                     "tokens through course.models.layers.SumOverTokens")
    if cp.size > 1:
        require_seam(model, "attend", "queries would see the keys of one rank alone; attend in course.models.layers.Attend, or "
                     "use parallel.cp=1")
        check_attention(model)
