"""Data for lesson 17: a run as numbers, the rates that a GPU reaches, and three recorded runs to predict.

    run = runs()["pipeline"]                      # its numbers, without its time
    compare_predictions({"pipeline": 700.0})      # the recorded time, a prediction, and the library's prediction
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from course.bench import recorded_steps
from course.lab.notebook import number
from course.models import GPTConfig
from course.models.linears import linears
from course.planner import block_time, step_time
from course.planner.other_implementations import Workload16Bit, workload_as
from course.planner.rank_workload import workload_of
from course.utils.errors import CourseError


@dataclass(frozen=True)
class Run:
    """A training step of a model with one kind of block, cut over tp x pp GPUs, as the numbers that determine its time."""

    samples: int                                    # of a micro-batch
    micros: int                                     # micro-batches of a step
    tokens: int                                     # of a sample
    dim: int                                        # D
    hidden: int                                     # M, of the MLP
    depth: int                                      # blocks of the whole model
    vocab: int                                      # V, logits of a token; 0: there are none
    causal: bool                                    # whether attention is causal
    tp: int
    pp: int
    moved: float                                    # bytes that a block's norms, activations, sums move, per rank and micro-batch
    update: float                                   # bytes that the optimizer moves on a rank, once a step


@dataclass(frozen=True)
class Rates:
    """What the kernels of a run reach: their efficiency times the data sheet's number."""

    matmul: float                                   # FLOP/s of the linear maps
    attention: float                                # FLOP/s
    memory: float                                   # bytes/s of kernels that are bound by memory
    latency: float                                  # seconds of one step of a ring
    bandwidth: float                                # bytes/s through a link


# (file, name) of recorded steps: on one GPU, with tensor parallelism, with pipeline parallelism
RECORDED = {"one GPU": ("gpt_", "gpt: 1.3B: bf16, compiled, narrow stream"), "tensor parallel": ("tp_", "tp 2: plain"),
          "pipeline": ("pp_", "pp 4: 1f1b")}


@cache
def recorded_run_steps() -> dict[str, recorded_steps.Step]:
    """The three recorded steps, with their measurements."""
    steps = {(step.file, step.name): step for part in (recorded_steps.one_gpu, recorded_steps.tensor, recorded_steps.pipelines)
             for step in part()}
    return {name: steps[key] for name, key in RECORDED.items()}


def runs() -> dict[str, Run]:
    """The three recorded runs as numbers, without their times."""
    return {name: run_of(step) for name, step in recorded_run_steps().items()}


def run_of(step: recorded_steps.Step) -> Run:
    """Convert a recorded GPT step to a `Run`."""
    c = step.config
    local = workload_of(c, recorded_steps.h200(), 0)
    if step.kind == "stack":
        local = workload_as(Workload16Bit, c, recorded_steps.h200())
    m = c.model
    assert isinstance(m, GPTConfig)
    weights = sum(linear.k * linear.n for linear in linears(m)) / c.parallel.tp
    moved = sum(size for _, size in [*block_time.forward_bytes(local), *block_time.backward_bytes(local)])
    moved += 12 * weights * (local.casts + (local.micros > 1))          # autocast's casts; accumulated gradients
    update = 32 * step_time.parameters_of_rank(local, m.depth, True) if step.kind == "step" else 0.0
    return Run(local.micro, local.micros, m.context, m.dim, m.hidden, m.depth, m.vocab if step.kind == "step" else 0, True,
               c.parallel.tp, c.parallel.pp, moved, update)


def compare_predictions(predicted_ms: Mapping[str, float]) -> None:
    """Print predictions, run -> ms, with recorded times and the library's predictions. Raises `CourseError` for other runs."""
    steps = recorded_run_steps()
    for name, ms in predicted_ms.items():
        if name not in steps:
            raise CourseError(f"there is no run {name!r}: predict {', '.join(steps)}")
        if not ms > 0:
            raise CourseError(f"{name}: you predict {ms} ms; a step takes more than 0 ms")
    print(f"{'':16} {'recorded':>11} {'you':>11} {'error':>6} {'the library':>13} {'error':>6}")
    for name, ms in predicted_ms.items():
        step = steps[name]
        print(f"{name:16} {number(step.ms):>8} ms {number(float(ms)):>8} ms {float(ms) / step.ms - 1:>+6.0%} "
              f"{number(step.time.step * 1e3):>10} ms {step.error:>+6.0%}")
