"""What surgery has decided: where each parameter is, how samples are cut, and which stages of a pipeline are here."""

from dataclasses import dataclass

from course.models import Model
from course.parallel.mesh import Mesh, World, single
from course.parallel.pipeline_parallel.runtime import Pipeline
from course.parallel.placement import Placements, serial_placements
from course.parallel.tensor_parallel.sequence import WholeTokens


@dataclass(frozen=True)
class Layout:
    """A model's layout on this rank, as a value: whoever needs to know takes it as an argument.

    placements: of each parameter of the model here, and of what the optimizer has in the place of one. tokens: which tokens of
    a sample are here. stages: the model, or, in a pipeline, a model of each of this rank's stages, which share its modules.
    pipeline: what runs them, if there are several ranks of stages.
    """

    mesh: Mesh
    placements: Placements
    tokens: WholeTokens
    stages: tuple[Model, ...]
    pipeline: Pipeline | None = None


def serial_layout(model: Model, world: World | None = None) -> Layout:
    """The layout of a model that one process has whole."""
    return Layout(single(world or World()), serial_placements(model), WholeTokens(), (model,))
