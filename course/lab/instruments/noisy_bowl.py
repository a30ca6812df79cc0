"""A bowl with noisy gradients, for lesson 08's open task: what a plan of batches and learning rates reaches in a given time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from course.lab.checks.return_values import InvalidReturn, describe_value

DIRECTIONS = 40
EVEN = np.linspace(0, 1, DIRECTIONS)
MOST_PHASES = 200


@dataclass(frozen=True)
class Bowl:
    """A loss of `DIRECTIONS` weights: half the sum of curvature · weight². At first each weight has an equal part of a loss of 1.

    Curvatures have equal ratios, from `steepest` to `flattest`. A sample's gradient has the variance noise · curvature.
    """

    steepest: float
    flattest: float
    noise: float


@dataclass(frozen=True)
class Job:
    """The time that a training run has, and what its steps take."""

    latency: float                                   # seconds of a step without its samples
    per_sample: float                                # seconds
    seconds: float                                   # of the whole run

    def step_seconds(self, batch: int) -> float:
        """Seconds of a step with this many samples."""
        return self.latency + batch * self.per_sample


class Phase(NamedTuple):
    """Steps with one batch size and one learning rate."""

    batch: int
    rate: float
    steps: int


def plan_seconds(job: Job, plan: Sequence[Phase]) -> float:
    """Seconds of all phases."""
    return sum(steps * job.step_seconds(batch) for batch, _, steps in plan)


def expected_losses(bowl: Bowl, plan: Sequence[Phase]) -> list[float]:
    """The loss after each phase, as a mean over many runs; infinity from a rate of 2 / steepest on, which diverges."""
    return [float(sum(parts)) for parts in loss_parts(bowl, plan)]


def loss_parts(bowl: Bowl, plan: Sequence[Phase]) -> list[tuple[float, float]]:
    """After each phase, the part of the loss that is left of the first one, and the part that noise has added."""
    added, found = np.zeros(DIRECTIONS), list[tuple[float, float]]()
    kept, more = factors(bowl, before_divergence(bowl, plan))
    left = np.square(np.cumprod(kept, 0)).sum(1) / DIRECTIONS
    for part, shrink, new in zip(left, np.square(kept), more, strict=True):
        added = added * shrink + new
        found.append((float(part), float(added.sum())))
    return found + [(math.inf, math.inf)] * (len(plan) - len(found))


def before_divergence(bowl: Bowl, plan: Sequence[Phase]) -> Sequence[Phase]:
    """The phases before the first whose rate lies beyond the cliff. There, steps overshoot the steepest direction ever more."""
    return plan[:next((number for number, phase in enumerate(plan) if phase[1] * bowl.steepest >= 2), len(plan))]


def factors(bowl: Bowl, plan: Sequence[Phase]) -> tuple[np.ndarray, np.ndarray]:
    """What each phase leaves of a weight in each direction, and the loss that its noise adds there on average: (P, D) each."""
    batch, rate, steps = np.array(plan, dtype=float).reshape(-1, 3).T[:, :, None]
    curvature = bowl.steepest * (bowl.flattest / bowl.steepest) ** EVEN
    shrink = 1 - rate * curvature                    # a step: weight = shrink · weight - rate · noise
    kept, each = shrink**steps, 0.5 * (rate * curvature) ** 2 * bowl.noise / batch
    return kept, each * (1 - kept**2) / (1 - shrink**2)


def training_run(bowl: Bowl, plan: Sequence[Phase], generator: np.random.Generator) -> list[float]:
    """The loss after each phase of one run; NaN once it has diverged."""
    roots = np.full(DIRECTIONS, DIRECTIONS**-0.5)    # the root of each direction's loss, with the weight's sign
    found = list[float]()
    for kept, more in zip(*factors(bowl, before_divergence(bowl, plan)), strict=True):
        roots = kept * roots + np.sqrt(more) * generator.standard_normal(DIRECTIONS)
        found.append(float(np.square(roots).sum()))
    return found + [math.nan] * (len(plan) - len(found))


def as_plan(value: Any, who: str) -> list[Phase]:
    """A plan with Python's numbers. Raises `InvalidReturn` if it is none."""
    cure = ("a plan is a list of phases: Phase(batch, rate, steps), or (batch, rate, steps), with whole numbers from 1 on for "
            "batch and steps, and a rate above 0")
    try:
        plan = [Phase(int(batch), float(rate), int(steps)) for batch, rate, steps in value]
        whole = all(phase.batch == batch and phase.steps == steps for phase, (batch, _, steps) in zip(plan, value, strict=True))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InvalidReturn(f"{who} {describe_value(value)} instead of a plan", cure) from None
    wrong = [phase for phase in plan if not (1 <= phase.batch < 2**40 and 0 < phase.rate < math.inf and 1 <= phase.steps < 2**40)]
    if wrong:
        raise InvalidReturn(f"{who} a plan with {wrong[0]}", cure)
    if not (whole and 0 < len(plan) <= MOST_PHASES):
        raise InvalidReturn(f"{who} something else than a plan of 1 to {MOST_PHASES} phases with whole numbers", cure)
    return plan


def runs(knowledge: tuple[list[Bowl], list[Job], int, float]) -> Callable[..., Any]:
    """What a hidden process knows of bowls. It is asked one of three things:

    (case, plan): the losses of a run. (case,): the seconds of all runs so far. (): the bowls, and the seed.

    knowledge: a bowl and a job for each case, the seed of the noise, and for how many times the job's seconds one may train.
    """
    bowls, jobs, seed, most = knowledge
    spent, calls = [0.0] * len(bowls), [0] * len(bowls)

    def answer(case: int | None = None, plan: Sequence[Phase] | None = None) -> Any:
        if case is None:
            return [(bowl.steepest, bowl.flattest, bowl.noise) for bowl in bowls], seed
        if plan is None:
            return spent[case]
        seconds = plan_seconds(jobs[case], plan)
        if spent[case] + seconds > most * jobs[case].seconds:
            raise InvalidReturn(f"`train` was asked for more than {most:.0f} times the job's time",
                                "try fewer plans, or shorter ones")
        spent[case] += seconds
        calls[case] += 1
        return training_run(bowls[case], plan, np.random.default_rng([seed, case, calls[case]]))

    return answer
