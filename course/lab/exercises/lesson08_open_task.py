"""Lesson 08's open task: the batches and learning rates of a run that has a given time."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
import torch

from course.lab.checks import random_inputs
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn
from course.lab.instruments.hidden_process import HiddenProcess
from course.lab.instruments.noisy_bowl import (
    MOST_PHASES,
    Bowl,
    Job,
    Phase,
    as_plan,
    expected_losses,
    loss_parts,
    plan_seconds,
    runs,
)

MOST, FEW = 200, 5                                   # times the job's seconds that runs may take: at most, and for a level
GOOD, HALF = 1.5, 0.5                                # of the best constant plan's loss
NEAR = 1.3                                           # of the loss of a plan that was searched for on the bowl itself


def plan_training(job: Job, train: Callable[[Sequence[Phase]], list[float]]) -> list[Phase]:
    """Return the phases of a run that takes at most `job.seconds` and ends at a small loss.

    train(plan): the loss after each phase of one run on a hidden bowl; NaN once it has diverged.
    """
    loaded = job.latency / job.per_sample            # the batch whose samples take as long as the rest of its step
    phases = 10                                      # of the plan, and of each run that is measured

    def descend(function: Callable[[np.ndarray], float], start: Sequence[float]) -> np.ndarray:
        """Where the function is small: try random steps, and keep what is better."""
        generator, at, step = np.random.default_rng(0), np.array(start), 0.5
        least = function(at)
        for _ in range(500):
            other = at + step * generator.standard_normal(len(at))
            if (value := function(other)) < least:
                at, least, step = other, value, min(1.5, 1.5 * step)
            else:
                step = max(0.02, 0.93 * step)
        return at

    low, high = 1e-4, 1e4                            # rates
    for _ in range(24):
        rate = math.sqrt(low * high)
        low, high = (low, rate) if math.isnan(train([Phase(1, rate, 1)])[-1]) else (rate, high)
    cliff = low

    seen = []                                        # runs with much noise and with little
    for batch in sorted({1, math.ceil(loaded), math.ceil(8 * loaded)}):
        curve = [Phase(batch, cliff / 4, max(1, int(job.seconds / phases / job.step_seconds(batch))))] * phases
        seen.append((curve, np.array(train(curve))))

    def bowl_of(x: np.ndarray) -> Bowl:
        return Bowl(2 / cliff, 2 / cliff / math.exp(x[0]), math.exp(x[1]))

    def misfit(x: np.ndarray) -> float:
        """Least where the expected losses are nearest to those that were seen."""
        pairs = [(np.array(expected_losses(bowl_of(x), curve)), losses) for curve, losses in seen]
        return float(sum((np.log(mean) + losses / mean).sum() for mean, losses in pairs))

    def plan_of(x: np.ndarray) -> list[Phase]:
        """Phases of equal time: logarithms of the first batch, its growth, the first rate over the cliff, its growth."""
        plan = []
        for number in range(phases):
            batch = max(1, round(math.exp(min(x[0] + number * x[1], 20))))
            rate = cliff * math.exp(min(x[2] + number * x[3], -0.03))
            if steps := int(job.seconds / phases / job.step_seconds(batch)):
                plan.append(Phase(batch, rate, steps))
        return plan or [Phase(1, cliff / 4, 1)]

    bowl = bowl_of(descend(misfit, (5.0, 0.0)))

    def loss(x: np.ndarray) -> float:
        return expected_losses(bowl, plan_of(x))[-1]

    starts = (math.log(1 + loaded), 0.3, -0.2, -0.3), (math.log(1 + loaded / 4), 0.4, -0.1, -0.2)
    return plan_of(min((descend(loss, start) for start in starts), key=loss))


def draw(seed: int, hidden: bool) -> Tensors:
    """Bowls and jobs: curvatures, noise, how long a step takes and how many one may take."""
    generator = random_inputs.generator(seed)
    cases = 3 if hidden else 2

    def between(low: float, high: float) -> torch.Tensor:
        return low * (high / low) ** torch.rand(cases, generator=generator, dtype=torch.float64)

    steepest, latency, steps = between(0.1, 10), between(0.005, 0.05), between(500, 2500)
    noise = torch.tensor([0.1, 1.5] * 2, dtype=torch.float64)[:cases] * between(0.7, 1.4)       # a little, much, and so on
    return {"bowls": torch.stack([steepest, steepest / between(50, 400), noise], 1),
            "jobs": torch.stack([latency, latency / between(4, 60), latency * steps], 1),
            "seed": torch.tensor([random_inputs.number(seed)])}


def unpacked(inputs: Tensors) -> tuple[list[Bowl], list[Job]]:
    """The bowl and the job of each case."""
    return [Bowl(*row) for row in inputs["bowls"].tolist()], [Job(*row) for row in inputs["jobs"].tolist()]


def run(inputs: Tensors) -> Tensors:
    """The plan for each case, and how long runs have taken to find it. Nothing here knows the bowls meanwhile."""
    bowls, jobs = unpacked(inputs)
    plans = torch.zeros(len(jobs), MOST_PHASES, 3, dtype=torch.float64)
    with HiddenProcess(runs, (bowls, jobs, int(inputs["seed"]), MOST)) as hidden:
        del bowls
        inputs["bowls"].zero_()
        inputs["seed"].zero_()
        for case, job in enumerate(jobs):
            plan = as_plan(plan_training(job, partial(trained, hidden, case)), "`plan_training` returned")
            if plan_seconds(job, plan) > job.seconds * (1 + 1e-9):
                raise InvalidReturn(f"`plan_training` returned a plan that takes {plan_seconds(job, plan):.4g} s, and the job "
                                    f"has {job.seconds:.4g} s", "divide the time by `job.step_seconds(batch)`, and round down")
            plans[case, :len(plan)] = torch.tensor(plan, dtype=torch.float64)
        spent = torch.tensor([hidden.ask(case) for case in range(len(jobs))], dtype=torch.float64)
        rows, seed = hidden.ask()
        inputs["bowls"].copy_(torch.tensor(rows, dtype=torch.float64))
        inputs["seed"].fill_(seed)
    return {"plans": plans, "spent": spent}


def trained(hidden: HiddenProcess, case: int, plan: Sequence[Phase]) -> list[float]:
    """What `train` is: the losses of a run, from the process that knows the bowl."""
    return list(hidden.ask(case, as_plan(plan, "`train` got")))


@lru_cache(64)
def constant_loss(bowl: Bowl, job: Job) -> float:
    """The expected loss of the best plan of one phase."""
    loaded = job.latency / job.per_sample
    plans = [Phase(batch, 2 * share / bowl.steepest, int(job.seconds / job.step_seconds(batch)))
             for batch in sorted({round(loaded * 2.0**power) for power in np.arange(-6, 6, 0.5)} - {0})
             for share in 2.0 ** np.arange(-8, 0, 0.5)]
    return min(expected_losses(bowl, [plan])[-1] for plan in plans if plan.steps)


@lru_cache(64)
def best_loss(bowl: Bowl, job: Job) -> float:
    """The expected loss of the best of those plans that have ten phases of equal time, whose batches and rates grow evenly."""
    generator, step = np.random.default_rng(0), 0.5

    def loss(x: np.ndarray) -> float:
        """Of the logarithms of the first batch, its growth, the first rate over the cliff, and its growth."""
        batches = np.exp(np.minimum(x[0] + x[1] * np.arange(10), 20)).round().clip(1).astype(int).tolist()
        rates = (2 / bowl.steepest * np.exp(np.minimum(x[2] + x[3] * np.arange(10), -0.03))).tolist()
        plan = [Phase(batch, rate, int(job.seconds / 10 / job.step_seconds(batch)))
                for batch, rate in zip(batches, rates, strict=True)]
        return expected_losses(bowl, [phase for phase in plan if phase.steps] or [Phase(1, rates[0], 1)])[-1]

    at = np.array([math.log(1 + job.latency / job.per_sample / 4), 0.4, -0.1, -0.2])
    least = loss(at)
    for _ in range(500):
        other = at + step * generator.standard_normal(4)
        better = (value := loss(other)) < least
        at, least, step = (other, value, min(1.5, 1.5 * step)) if better else (at, least, max(0.02, 0.93 * step))
    return least


def weigh(inputs: Tensors, transcript: Tensors) -> Tensors:
    """The expected loss of each plan, or that of the best constant one where it is near; what else is claimed; what is left."""
    bowls, jobs = unpacked(inputs)
    plans, spent = transcript["plans"], transcript["spent"]
    if plans.shape != (len(jobs), MOST_PHASES, 3) or spent.shape != (len(jobs),) or plans.dtype != spent.dtype:
        raise ValueError("no transcript of plans")
    losses, parts = list[float](), list[tuple[float, float]]()
    for bowl, job, rows in zip(bowls, jobs, plans.tolist(), strict=True):
        plan = as_plan([row for row in rows if row[2]], "")
        if plan_seconds(job, plan) > job.seconds * (1 + 1e-9):
            raise ValueError("a plan takes too long")
        parts.append(min(loss_parts(bowl, plan)[-1], (1e6, 1e6)))       # a finite one for those that diverge
        losses.append(sum(parts[-1]))
    each = torch.tensor(losses, dtype=torch.float64)
    usual = torch.tensor(list(map(constant_loss, bowls, jobs)), dtype=torch.float64)
    best = torch.tensor(list(map(best_loss, bowls, jobs)), dtype=torch.float64)
    share = spent / torch.tensor([job.seconds for job in jobs], dtype=torch.float64)
    flags = {"half": (each <= HALF * usual).all(), "near": (each <= NEAR * best).all(), "few": (share <= FEW).all()}
    return {"losses": torch.where(each <= GOOD * usual, usual, each), "parts": torch.tensor(parts, dtype=torch.float64),
            "most": share.max()} | {name: holds.double() for name, holds in flags.items()}


def asked(inputs: Tensors) -> dict[str, list[str]]:
    """Each case in words."""
    return {"losses": [f"a job of {job.seconds:.4g} s, with steps of {job.latency:.3g} s and {job.per_sample:.3g} s a sample"
                       for _, job in zip(*unpacked(inputs), strict=True)]}


def explain(_: Tensors, expected: Tensors, got: Tensors) -> str:
    """Whether most of a loss that is too high is noise, or not learned yet."""
    if got["losses"].shape != expected["losses"].shape or "parts" not in got:
        return ""
    wrong = (got["losses"] > 1.05 * expected["losses"]).nonzero().flatten().tolist()
    if not wrong:
        return ""
    left, added = got["parts"][wrong[0]].tolist()
    if left + added > 10:
        return (f"the run of job {wrong[0] + 1} diverges: its rate lies beyond the cliff. A run that diverges returns NaN, and "
                "every comparison with NaN is False: leave it out with `math.isnan` before you take a minimum")
    words = (f"{100 * added / (left + added):.0f}% of the last loss of job {wrong[0] + 1} is noise, and the rest is not learned "
             "yet. ")
    if added > left:
        return words + ("Against noise, end with a lower rate, or with a larger batch. One run says little about noise: compare "
                        "means over several, each of the whole time")
    return words + ("To learn more in the same time, take a higher rate, or more steps with a smaller batch. More samples per "
                    "second do not help where the gradient is already exact")


EXERCISES = [
    Exercise("plan-training", "08", (f"{__name__}.plan_training",), draw, run, {
        "losses": f"for each job the plan's expected loss is at most {GOOD} times that of the best constant batch and rate",
        "half": "for each job it is at most half the best constant plan's loss",
        "near": f"for each job it is at most {NEAR} times that of the best plan of ten phases",
        "few": f"trial runs take at most {FEW} times the job's seconds: {{:.1f}}"},
        flags={"half": "for some job it is more", "near": "for some job it is more", "few": "they take longer"},
        levels={"half": "half the loss", "near": "near the best", "few": f"{FEW} runs"}, measured={"few": "most"}, weigh=weigh,
        cases=asked, explain=explain, tolerance=0.01,
        unknown="take the job named above: train a few constant plans for its whole time, several runs each. Then change "
                "the batch and the rate by a factor of two, and leave out what diverges",
        ladder=("Begin with one phase. The cliff is cheap to find: one step of one sample tells whether a rate diverges. Below "
                "it, compare batches from 1 to many times latency / per_sample, and rates in factors of two. Each takes the "
                "whole time, in steps that depend on its batch, and counts as the mean of several runs.",
                "Early in a run there is little noise beside the gradient, and late there is much. So begin with a small batch "
                "and a high rate: many cheap steps. Then let the rate fall, or the batch grow, or both. Ten phases of "
                "equal time with two factors, from each to the next, describe such a plan.",
                "`expected_losses` costs no run. A bowl has three numbers. The steepest curvature is 2 / cliff. The others "
                "follow from the curves of three runs, with little noise and with much: search for those numbers whose "
                "expected curves are nearest. Then search for the best plan on that bowl.")),
]
