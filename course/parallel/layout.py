"""The result of surgery: where each parameter is, how samples are cut, and which pipeline stages this rank runs."""

from dataclasses import dataclass

from course.models import Model
from course.parallel.mesh import Mesh, World, single
from course.parallel.pipeline_parallel.runtime import Pipeline
from course.parallel.placement import Placements, serial_placements
from course.parallel.tensor_parallel.overlap_choice import NO_OVERLAP, Overlap
from course.parallel.token_split import WholeTokens


@dataclass(frozen=True)
class Layout:
    """A model's layout on this rank, a value that is passed as an argument.

    placements: one for each parameter of the model on this rank, and for each tensor that the optimizer updates in its place.
    tokens: which tokens of a sample this rank holds. stages: the model or, in a pipeline, one model for each of this rank's
    stages; these share its modules. pipeline: the runtime of the stages if parallel.pp > 1. overlap: how the linears of sequence
    parallelism communicate.
    """

    mesh: Mesh
    placements: Placements
    tokens: WholeTokens
    stages: tuple[Model, ...]
    pipeline: Pipeline | None = None
    overlap: Overlap = NO_OVERLAP


def serial_layout(model: Model, world: World | None = None) -> Layout:
    """The layout of a model that one process holds whole."""
    return Layout(single(world or World()), serial_placements(model), WholeTokens(), (model,))
