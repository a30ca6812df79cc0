"""Lesson 22, the capstone: the norm of a gradient that lies on many ranks, and the settings of a run that fits and survives."""

import itertools
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from course import config
from course.checkpoint import checkpoint
from course.config import Config, Parallel
from course.config.validation import refusal
from course.data.text.indexed_files import document_writer
from course.inference import forecast_scores
from course.lab.checks import random_inputs, return_values, tiny_training
from course.lab.checks.diagnosis import NUMBERS_RIGHT
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn
from course.lab.instruments.bytes_sent import Collective, Traffic
from course.lab.instruments.tensor_memory import MemoryMeter
from course.lab.sandbox.limits import Limits
from course.parallel import agree, build_mesh, join
from course.parallel.layout import serial_layout
from course.parallel.mesh import World
from course.planner import peak_memory, step_time
from course.planner.hardware import Hardware, Link
from course.training import assemble, optimizer, step, trainer
from course.training.run_log import RunLog, read_metrics
from course.training.validation import Validation
from course.utils.errors import CourseError

A_LIST = 'return a list of texts, such as ["parallel.dp=4", "optim.lr=1e-3"]'
LEFT_OPEN = "leave it out: any key of `parallel` and `optim` is yours, and train.micro_batch, train.recompute, checkpoint.every"
KEYS = "`course settings` lists all keys, with their types"
GO_TOGETHER = "change one of them, as the sentence says"
FOUR = "dp x cp x tp x pp has to be 4"
RANKS = 4
STEPS = 60
METERED = 3                                          # steps in which memory is counted: the later ones need no more
MEMORY = 3.6e6                                        # bytes that a rank may use for tensors
LOST = 10                                            # most steps that a kill may cost
SKILL = 0.96
FAST = 1.1                                           # times the step of the fastest layout that fits, by prediction
NUMBERS = 12                                         # of the language
LEARNABLE = math.log(NUMBERS) - math.log(2)          # what is known of the next number, in nats, if two are left
LAPTOP = Hardware("a rank of a laptop", MEMORY, 5e9, {"fp32": 10e9}, (Link("loopback", 0, 60e-6, 1e9),))
TASK = ("model.vocab=12", "model.context=32", "train.global_batch=16", f"train.steps={STEPS}", "train.eval_every=0",
        "train.device=cpu", "train.threads=1", "train.stall_s=0", "data.source=files", "data.workers=0", "data.valid_samples=64",
        "log.every=1", "log.tensorboard=false")
FREE = ("parallel.", "optim.", "train.micro_batch", "train.recompute", "checkpoint.every")


def settings() -> list[str]:
    """How to train the capstone's model on four ranks: settings as on the command line of `course train`.

    It may set keys of `parallel` and `optim`, train.micro_batch, train.recompute and checkpoint.every.
    """
    return ["parallel.dp=4", "parallel.zero=1", "train.micro_batch=2", "checkpoint.every=10", "optim.lr=1e-2"]


class Prediction(NamedTuple):
    """What the planner says of settings: bytes on the fullest rank, and seconds of a step on ranks of a laptop."""

    memory: float
    seconds: float


def predict(*chosen: str) -> Prediction:
    """The planner's prediction for these settings. Raises `CourseError` if they do not go together."""
    c = configuration(chosen, seed=0)
    if sentence := refusal(c):
        raise CourseError(sentence)
    needs = peak_memory.predict(c)
    return Prediction(needs.allocated - needs.workspace, step_time.predict(c, LAPTOP).step)      # workspaces are of GPU libraries


@cache
def candidates() -> dict[tuple[str, ...], Prediction]:
    """The predictions for many ways to lay the model out over four ranks."""
    found: dict[tuple[str, ...], Prediction] = {}
    for tp, pp, zero, micro in itertools.product((1, 2, 4), (1, 2, 4), range(4), (0, 1, 2, 4)):
        if RANKS % (tp * pp) == 0:
            chosen = (f"parallel.dp={RANKS // (tp * pp)}", f"parallel.tp={tp}", f"parallel.pp={pp}", f"parallel.zero={zero}",
                      f"train.micro_batch={micro}")
            try:
                found[chosen] = predict(*chosen)
            except CourseError:
                continue
    return found


def fastest() -> float:
    """The seconds of the fastest candidate that fits."""
    return min(each.seconds for each in candidates().values() if each.memory <= MEMORY)


def overrides(chosen: Sequence[str], seed: int, folder: Path | str = "runs") -> list[str]:
    """The task's settings and these, reading data and writing runs below a folder, for the preset gpt-demo."""
    return [*TASK, f"train.seed={seed}", f"data.path={folder}/language", f"log.dir={folder}", "log.name=capstone", *chosen]


def configuration(chosen: Sequence[str], seed: int, folder: Path | str = "runs") -> Config:
    """The task's configuration with these settings."""
    return config.load("gpt-demo", overrides(chosen, seed, folder))


def write_language(folder: Path, seed: int) -> None:
    """Write the token files of a small language: each number is seven times the one before it, plus 1 or 2, modulo 12."""
    dice = random.Random(seed)
    for split, count in (("train", 100_000), ("valid", 4_000)):
        words = [0]
        while len(words) < count:
            words.append((7 * words[-1] + 1 + dice.randrange(2)) % NUMBERS)
        with document_writer(folder / "language" / split, NUMBERS) as writer:
            writer.add(np.array(words))


def skill(loss: float) -> float:
    """The share of what can be known of the next number: 0 for guessing, 1 if only the two possible ones are left."""
    return (math.log(NUMBERS) - loss) / LEARNABLE


class Killed(Exception):
    """A run ends here, as if its processes were killed."""


def train(c: Config, world: World, killed_at: int = 0) -> float:
    """Train, or go on, to the end or to the kill before a step; returns the bytes of this rank's tensors at their peak."""
    meter = MemoryMeter()
    with ExitStack() as metered:
        metered.enter_context(meter)
        training = assemble.assemble(c, build_mesh(c.parallel, world))

        def run_step(batch: Any) -> Any:
            number = training.progress.step.item() + 1
            if number == killed_at:
                raise Killed
            if number > METERED:
                metered.close()                      # it slows down every operator
            return training.step(batch)

        with suppress(Killed):
            trainer.fit(replace(training, step=run_step))
    return float(meter.peak)


def records(c: Config) -> dict[int, dict[str, Any]]:
    """The records of a run's steps."""
    return {record["step"]: record for record in read_metrics(trainer.run_folder(c) / "metrics.jsonl")}


@contextmanager
def shared_folder(world: World) -> Iterator[Path]:
    """A folder that all ranks see, gone afterwards."""
    folder = Path(told(world, lambda: tempfile.mkdtemp(prefix="capstone-")))
    try:
        yield folder
        dist.barrier()
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def draw_train_it(seed: int, hidden: bool) -> Tensors:
    """Seeds of the language and of the training, and the step before which the processes are killed."""
    generator = random_inputs.generator(seed)
    return {"seeds": torch.randint(2**31, (2,), generator=generator) + hidden,
            "killed_at": 2 * torch.randint(13, 22, (1,), generator=generator)}


def chosen_settings() -> list[str]:
    """What the learner's `settings` returns.

    Raises `InvalidReturn` if it is no list of settings that the task leaves open, if they do not go together, or if they are not
    for four ranks.
    """
    chosen = settings()
    if not isinstance(chosen, list | tuple) or not all(isinstance(each, str) and "=" in each for each in chosen):
        raise InvalidReturn(f"`settings` returned {return_values.describe_value(chosen)}; expected a list of settings", A_LIST)
    for each in chosen:
        if not each.startswith(FREE):
            raise InvalidReturn(f"{each} changes the task", LEFT_OPEN)
    try:
        c = configuration(chosen, 0)
    except CourseError as error:
        raise InvalidReturn(f"these are no settings: {error}", KEYS) from None
    if sentence := refusal(c):
        raise InvalidReturn(f"these settings do not go together: {sentence}", GO_TOGETHER)
    p = c.parallel
    used = math.prod([p.dp or RANKS // (p.tp * p.pp * p.cp), p.tp, p.pp, p.cp])
    if used != RANKS:
        raise InvalidReturn(f"these settings are for {used} ranks, and there are {RANKS}", FOUR)
    return list(chosen)


def run_train_it(inputs: Tensors) -> Tensors:
    """Train until a kill, go on, and read the last checkpoint in one process."""
    chosen, world = chosen_settings(), join("cpu")
    killed_at, (language, seed) = int(inputs["killed_at"]), map(int, inputs["seeds"])
    with shared_folder(world) as folder:
        told(world, lambda: write_language(folder, language))
        c = configuration(chosen, seed, folder)
        peak = torch.tensor(train(c, world, killed_at))
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        before, resumed = told(world, lambda: (records(c), newest_step(c)))          # it drops records of steps that it repeats
        train(c, world)
        after = told(world, lambda: records(c))
        alone = told(world, lambda: valid_loss(configuration(without_layout(chosen), seed, folder)))
    prediction, valid = predict(*chosen), after[STEPS]["valid_loss"]
    repeated = range(resumed + 1, killed_at)
    step_ms = sorted(record["step_ms"] for record in after.values())[len(after) // 2]
    return {
        "first": torch.tensor(before[1]["loss"]), "memory": flag(peak.item() <= MEMORY),
        "memory_mb": torch.tensor([peak.item() / 1e6, prediction.memory / 1e6]),
        "again": flag(resumed > 0 and all(close(before[n]["loss"], after[n]["loss"]) for n in repeated)),
        "one": flag(close(alone, valid)), "lost": flag(0 < c.checkpoint.every <= LOST),
        "lost_steps": torch.tensor([float(c.checkpoint.every), float(len(repeated))]), "skill": flag(skill(valid) >= SKILL),
        "skill_percent": torch.tensor([100 * skill(valid)]), "time": flag(prediction.seconds <= FAST * fastest()),
        "time_ms": torch.tensor([1e3 * prediction.seconds, 1e3 * fastest(), step_ms])}


def flag(held: bool) -> Tensor:
    """1.0 for a claim that holds."""
    return torch.tensor(float(held))


def close(one: float, other: float) -> bool:
    """Whether two losses in float32 are the same but for the order of sums."""
    return math.isclose(one, other, rel_tol=1e-4)


def told(world: World, function: Callable[[], Any]) -> Any:
    """What rank 0 finds, on all ranks; if it fails there, all raise its `CourseError`."""
    everyone = build_mesh(Parallel(), world).all
    return agree.run_on_all(everyone, function if world.rank == 0 else lambda: None)[0]


def newest_step(c: Config) -> int:
    """The step of a run's newest checkpoint; 0 if it has none."""
    found = checkpoint.newest(trainer.run_folder(c) / "checkpoints", print)
    return int(found[1]["state"]["step"]) if found else 0


def without_layout(chosen: Sequence[str]) -> list[str]:
    """The same settings for one process."""
    return [each for each in chosen if not each.startswith("parallel.")]


def valid_loss(c: Config) -> float:
    """The validation loss of a run's newest checkpoint, read and computed by one process."""
    run = trainer.run_folder(c)
    model, _ = forecast_scores.load_model(run, c, torch.device("cpu"))
    validation = Validation.of(c, serial_layout(model))
    assert validation is not None
    return float(validation.run(model, RunLog(run, 0, 0, speaks=False, tensorboard=False), 0)["valid_loss"])


LAYOUTS = {2: {"tp": ("parallel.tp=2",), "pp": ("parallel.pp=2",), "dp": ("parallel.dp=2",),
               "zero": ("parallel.dp=2", "parallel.zero=1")},
           4: {"tp": ("parallel.tp=2", "parallel.pp=2"), "pp": ("parallel.pp=2", "parallel.dp=2"),
               "dp": ("parallel.dp=2", "parallel.tp=2", "parallel.sp=true"),
               "zero": ("parallel.dp=2", "parallel.tp=2", "parallel.zero=1")}}


def draw_gradient_norm(seed: int, hidden: bool) -> Tensors:
    """Samples and their targets for two steps, and the seed of the weights."""
    generator = random_inputs.generator(seed)
    batch = 8 if hidden else 4
    fields = {name: random_inputs.normal(generator, 2, batch, 3, 8, 16) for name in ("input", "target")}
    return fields | {"lead": torch.zeros(2, batch), "sample": torch.arange(2 * batch).view(2, batch),
                     "seed": torch.randint(2**31, (), generator=generator)}


def run_gradient_norm(inputs: Tensors) -> Tensors:
    """The norms and the weights of two clipped steps in each layout, and what finding a norm sends."""
    names = ("input", "target", "lead", "sample")
    batches = [dict(zip(names, row, strict=True)) for row in zip(*(inputs[name] for name in names), strict=True)]
    found: Tensors = {}
    calls: list[Collective] = []

    def counted(*given: Any) -> Tensor:
        with Traffic() as traffic:
            norm = return_values.tensor(optimizer.gradient_norm(*given), "gradient_norm", (), torch.float32)
        calls.extend(traffic.calls)
        return norm

    with mock.patch.object(step, "gradient_norm", counted):
        for name, layout in LAYOUTS[dist.get_world_size()].items():
            trained = tiny_training.train(batches, int(inputs["seed"]), "optim.clip=0.1", "parallel.data=bucketed", *layout)
            found |= {name: trained["norms"], f"{name}_weights": trained["weights"]}
    numbers = sum(call.bytes for call in calls) / 8 / max(len(calls), 1)
    return found | {"sent": flag(len(calls) <= 2 * len(LAYOUTS[2]) and numbers <= 1)}


EXERCISES = [
    Exercise("gradient-norm", "22", ("course.training.optimizer.gradient_norm",), draw_gradient_norm, run_gradient_norm, {
        "dp": "the norm is that of one process where ranks hold copies",
        "dp_weights": "and two clipped steps lead to the same weights",
        "tp": "the norm is right where ranks hold pieces of some weights and copies of others",
        "tp_weights": "and so are the weights",
        "pp": "the norm is right where stages hold different weights",
        "pp_weights": "and so are the weights",
        "zero": "the norm is right where ranks hold shares of all weights",
        "zero_weights": "and so are the weights",
        "sent": "each norm sends one all-reduce of one number"}, flags={"sent": "it sends more, or in several messages"},
        sizes=(2, 4), points=2, limits=Limits(seconds=120)),
    Exercise("train-it", "22", (f"{__name__}.settings",), draw_train_it, run_train_it, {
        "first": "four ranks begin with the loss of one process",
        "memory": f"the fullest rank needs at most {MEMORY / 1e6} MB: {{:.2f}} MB, predicted {{:.2f}}",
        "again": "four new processes go on from a checkpoint and repeat the same losses",
        "one": "one process reads the last checkpoint and has the same validation loss",
        "time": "no layout that fits is 10% faster by prediction: {:.0f} ms a step, the fastest {:.0f}, measured {:.0f}",
        "lost": f"no kill costs over {LOST} steps: there is a checkpoint every {{:.0f}}, and here {{:.0f}} were done twice",
        "skill": f"the model learns {SKILL:.0%} of what can be known: {{:.0f}}%"},
        flags={"memory": "it needs more. Which axis cuts weights, states, activations?",
               "again": "there was none, or they go on elsewhere. Is `checkpoint.every` set?", "one": "it has another",
               "time": "one is. Go through the combinations with `predict`", "lost": "it costs more: save more often",
               "skill": "it learns less. Try other learning rates"},
        measured={"memory": "memory_mb", "time": "time_ms", "lost": "lost_steps", "skill": "skill_percent"},
        levels={"time": "fast", "lost": "safe", "skill": "learned"}, tolerance=1e-5, unknown=NUMBERS_RIGHT,
        ladder=(
            "Begin with memory. Print `predict(...)` for one axis at a time, each with four ranks. Which of weights, states and "
            "activations does each axis cut? Micro-batches cut activations too.",
            "For speed, go through all combinations of `parallel.dp`, `parallel.tp`, `parallel.pp`, `parallel.zero` and "
            "`train.micro_batch` in a loop, and keep the fastest of those that fit. Leave out what raises a `CourseError`.",
            "A checkpoint every n steps loses at most n. The learning rate of the preset is low for 100 steps: double it until "
            "the loss no longer falls, and go back one step."),
        sizes=(RANKS,), limits=Limits(seconds=600)),
]
