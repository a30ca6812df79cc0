"""What layouts, the step, the planner, converters and evaluation ask of a model.

A base class and no `typing.Protocol`: all of them need an `nn.Module` as well, and Python's types have no "both".
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from course.utils import random
from course.utils.errors import CourseError

Batch = dict[str, Tensor]
Stream = Tensor | tuple[Tensor, ...]                # what flows from block to block: dim 0 is the sample
Rule = float | str | random.Uniform                 # of first values: a standard deviation, "ones" or "zeros", or a range


class Loss(nn.Module):
    """What a model learns to make small: (output, prepared batch) -> (sum over this rank's samples, their weight), scalars.

    What it adds up over the tokens of a sample it passes through `layers.SumOverTokens`. Padding weighs nothing.
    """

    def weight(self, batch: Batch) -> Tensor:
        """What each sample weighs in the mean, (B,): the step divides the sum of the global batch by the sum of these."""
        raise NotImplementedError


class Model(nn.Module):
    """A serial model, which knows nothing of layouts: it names its parts, and what of them may be cut.

    embed, blocks, head: all parameters, in order of computation; a stage of a pipeline lacks some. Between them flows a `Stream`.
    Embedding and head alone may share parameters. There are no buffers. An auxiliary loss flows with the stream: blocks add to a
    tensor of it, (B,), which `loss` adds to its own.
    tensor_plan: the end of a module's name -> how tensor parallelism cuts it (`course/parallel/tensor_parallel/linear.py`).
    token_plan: what of a prepared batch has a token as dim 1 -> "sequence" or "context": whether both axes cut it, or cp alone.
    float32_sums: the parameters whose gradients the model itself adds up in float32, by name.
    """

    tensor_plan: ClassVar[Mapping[str, str]] = {}
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
        """Pattern of serial names -> first values; the first pattern that fits counts."""
        raise NotImplementedError

    def prepare(self, batch: Batch, step: Tensor) -> Batch:
        """A loader's batch as `forward` and `loss` take it: `sample` (B,), `position` (B, T), `target`, and inputs of its own.

        What is random in it depends on the seed, the step and the sample's id alone.
        """
        raise NotImplementedError

    def forward(self, batch: Batch, x: Any = None) -> Any:
        """The output for a prepared batch; of a stage without a head a `Stream`. x: what the stage before put out."""
        raise NotImplementedError

    def example(self, samples: int, device: Any, first: int = 0) -> Batch:
        """A loader's batch of random numbers in the right shapes: samples `first` and on, the same in every run."""
        raise NotImplementedError

    def fields(self, output: Tensor) -> Tensor:
        """The output of a model of fields laid out on their grid, (B, C, H, W)."""
        raise CourseError(f"{type(self).__name__} puts out no fields")

    def compiled_parts(self) -> list[Any]:
        """What torch.compile compiles one by one, beside the blocks."""
        return [part for part in (self.embed, self.head) if part is not None]

    def want_loss_alone(self, alone: bool) -> None:
        """In evaluation nobody looks at the output but the loss: a model that need not make all of it may make less."""
