"""The interface of a model for layouts, the training step, the planner, converters and evaluation.

It is a base class, not a `typing.Protocol`: all of them also need an `nn.Module`, and Python has no intersection types.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from course.utils import random
from course.utils.errors import CourseError

Batch = dict[str, Tensor]
Stream = Tensor | tuple[Tensor, ...]                # passes from block to block: dim 0 is the sample
Rule = float | str | random.Uniform                 # of initial values: a standard deviation, "ones" or "zeros", or a range


class Loss(nn.Module):
    """The training loss: (output, prepared batch) -> (sum over this rank's samples, their weight), two scalars.

    Every sum over the tokens of a sample passes through `layers.SumOverTokens`. Padding weighs nothing.
    """

    def weight(self, batch: Batch) -> Tensor:
        """Each sample's weight in the mean, (B,): the step divides the global batch's loss sum by the sum of these weights."""
        raise NotImplementedError


class Model(nn.Module):
    """A serial model, which knows nothing of layouts: it names its parts and says what may be cut.

    embed, blocks, head: hold all parameters, in order of computation; a pipeline stage lacks some. They pass on a `Stream`. Only
    embed and head may share parameters. There are no buffers. An auxiliary loss is part of the stream: blocks add to one of its
    tensors, (B,), which `loss` adds to its own sum.
    tensor_plan: the end of a module's name -> how tensor parallelism cuts it (`course/parallel/tensor_parallel/linear.py`).
    token_plan: a tensor of a prepared batch with tokens as dim 1 -> "sequence", if cp and tp cut it, or "context", if cp alone.
    float32_sums: the names of parameters whose gradients the model itself sums in float32.
    """

    tensor_plan: Mapping[str, str] = {}             # of the class, or of one model
    token_plan: ClassVar[Mapping[str, str]] = {}
    float32_sums: tuple[str, ...] = ()
    embed: nn.Module | None
    blocks: nn.ModuleDict
    head: nn.Module | None
    loss: Loss

    def __init__(self, c: Any, seed: int = 0):
        super().__init__()
        self.c, self.seed = c, seed                 # its configuration; the seed of its dropout and noise

    def init_plan(self) -> Mapping[str, Rule]:
        """Pattern of serial names -> initial values; the first match counts."""
        raise NotImplementedError

    def prepare(self, batch: Batch, step: Tensor) -> Batch:
        """Prepare a loader's batch for `forward` and `loss`: `sample` (B,), `position` (B, T), `target`, and the model's inputs.

        Random values in it depend on the seed, the step and the sample's id alone.
        """
        raise NotImplementedError

    def forward(self, batch: Batch, x: Any = None) -> Any:
        """The output for a prepared batch; a stage without a head returns a `Stream`. x: the previous stage's output."""
        raise NotImplementedError

    def example(self, samples: int, device: Any, first: int = 0) -> Batch:
        """A random batch in the shapes of a loader's: samples `first` and on, the same in every run."""
        raise NotImplementedError

    def fields(self, output: Tensor) -> Tensor:
        """The output as fields on their grid, (B, C, H, W). Raises `CourseError` if the model has no fields."""
        raise CourseError(f"{type(self).__name__} puts out no fields")

    def compiled_parts(self) -> list[Any]:
        """The parts that torch.compile compiles one by one, beside the blocks."""
        return [part for part in (self.embed, self.head) if part is not None]

    def want_loss_alone(self, alone: bool) -> None:
        """Tell the model whether evaluation uses the output for the loss alone; it may then compute less of it."""
