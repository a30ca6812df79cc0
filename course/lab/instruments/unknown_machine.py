"""Models, and machines whose rates nobody knows, for lesson 17's open task: what a step of a layout takes and needs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from course.lab.checks.return_values import InvalidReturn


@dataclass(frozen=True)
class Model:
    """A GPT, and the global batch that it is trained with."""

    tokens: int                                     # of a sample
    dim: int
    hidden: int                                     # of the MLP
    depth: int                                      # blocks
    vocab: int
    batch: int                                      # samples of a step


@dataclass(frozen=True)
class Machine:
    """What the data sheet says of a machine."""

    gpus: int
    node: int                                       # GPUs of a node
    memory: float                                   # bytes of a GPU
    latency: float                                  # seconds of one step of a ring


@dataclass(frozen=True)
class Speeds:
    """What a machine's kernels and links reach: what the data sheet does not say."""

    matmul: float                                   # FLOP/s of linear maps
    attention: float                                # FLOP/s
    memory: float                                   # bytes/s
    inside: float                                   # bytes/s of a link in a node
    between: float                                  # bytes/s of a link between nodes


@dataclass(frozen=True)
class Layout:
    """How a model is cut over dp x pp x tp GPUs, and how many samples a micro-batch has."""

    dp: int
    pp: int
    tp: int
    samples: int


def layouts(model: Model, machine: Machine) -> list[Layout]:
    """All layouts that the machine and the model allow, whether they fit into memory or not."""
    powers = [2**i for i in range(machine.gpus.bit_length())]
    cuts = [(machine.gpus // (pp * tp), pp, tp) for pp in powers for tp in powers[:5]
            if machine.gpus % (pp * tp) == 0 and model.depth % pp == 0]
    return [Layout(dp, pp, tp, samples) for dp, pp, tp in cuts for samples in (1, 2, 4, 8) if model.batch % (dp * samples) == 0]


def block_parameters(model: Model) -> int:
    """The parameters of a block's linear maps."""
    return 4 * model.dim**2 + 2 * model.dim * model.hidden


def parameters(model: Model) -> int:
    """The parameters that count: those of the blocks' linear maps and of the embedding."""
    return model.depth * block_parameters(model) + model.vocab * model.dim


def measurements(knowledge: tuple[list[list[tuple[Layout, float]]], int]) -> Callable[..., Any]:
    """What a hidden process knows of machines. (case, layout) asks for the layout's seconds. Without arguments: of each case the
    layouts with their seconds, and how often it was asked.

    knowledge: of each case its layouts with their seconds, infinite if they do not fit; and how many may be measured.
    """
    seconds, limit = [dict(case) for case in knowledge[0]], knowledge[1]
    calls = [0] * len(seconds)

    def answer(*question: Any) -> Any:
        if not question:
            return seconds, calls
        case, layout = question
        if layout not in seconds[case]:
            raise InvalidReturn("`measure` got something that is none of `layouts(model, machine)`",
                                "measure a layout of this list")
        if calls[case] == limit:
            raise InvalidReturn(f"`measure` was called more than {limit} times for one machine", "measure each layout once")
        calls[case] += 1
        return seconds[case][layout]

    return answer
