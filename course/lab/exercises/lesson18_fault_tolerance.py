"""Lesson 18, what survives: a loop that loses nothing, and how often to save.

Both are the answers to exercises written inside a cell of the lesson.
"""

import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch

from course.lab.checks import random_inputs, return_values, transcript
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.sandbox.limits import Limits

QUICK = Limits(seconds=90)
GO_ON = 75  # status of a run that was stopped and can go on (course/resilience/preemption.py)
STATES = 2**61                                       # that a training can be in
Fate = Mapping[tuple[int, str, int], str]            # (life, what, step) -> what befalls it then


def go_on(last: int, every: int, load: Callable[[], int], step: Callable[[int], None], save: Callable[[int], None]) -> int:
    """Train up to step `last` from the newest checkpoint on; returns 0 when it is done, and 75 when it was asked to stop."""
    asked = False

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGUSR1, hear)
    done = saved = load()
    while done < last and not asked:
        step(done + 1)
        done += 1
        if done % every == 0:
            save(done)
            saved = done
    if saved < done:
        save(done)
    return 0 if done == last else 75


def checkpoint_interval(save: float, restart: float, mtbf: float, nodes: int) -> tuple[float, float]:
    """(seconds of training between two checkpoints that lose the least, the share of the time that is then lost)."""
    between = mtbf / nodes                           # seconds between two failures of the job
    interval = math.sqrt(2 * save * between)
    return interval, save / interval + (interval / 2 + restart) / between


# ---- a loop that loses nothing

class ProcessKilled(BaseException):
    """The end of a process that nobody can catch; whoever does finds that nothing happens any more."""


class TrainingWorld:
    """A training and its disk over several lives of the process; things befall it at given moments.

    befalls: (life, "load" | "step" | "save", step) -> "warn", "warn twice" or "kill", which happens in the middle of it.
    events: what happened, for `TrainingLedger`: ["born"], ["load" | "step" | "save", step] where one begins and ["done", state]
    where it has ended, ["warned"], ["killed"], ["unheard"], and ["returned", status].
    """

    def __init__(self, start: int, every: int, last: int, befalls: Fate):
        self.last, self.every, self.befalls = last, every, dict(befalls)
        self.disk = (0, start)                       # (step, state) of the checkpoint
        self.reached = self.steps = 0                # the furthest step that has been done, and how often any has been begun
        self.events: list[list[Any]] = []
        self.thrown = ""                             # what the handler raised, and in the middle of what
        self.born(0)

    def born(self, life: int) -> None:
        """A new process."""
        self.life, self.state, self.dead = life, 1, False
        self.events.append(["born"])

    @contextmanager
    def doing(self, kind: str, number: int) -> Iterator[None]:
        """One of the three at work; what befalls it does so after the block."""
        if self.dead:
            raise ProcessKilled
        self.steps += kind == "step"
        if number > 2 * self.last or self.steps > 5 * self.last or len(self.events) > 40 * self.last:
            raise return_values.InvalidReturn("`go_on` goes on and on", "leave the loop after step `last`")
        self.events.append([kind, number])
        yield
        for what in fate_events(self.befalls.pop((self.life, kind, number), "")):       # popped: a handler may save, too
            self.events.append([what])
            if what == "killed":
                self.die()
            try:
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0)                        # Python's handler runs at once
            except BaseException as error:
                if not isinstance(error, ProcessKilled):
                    self.thrown = self.thrown or f"{type(error).__name__} in the middle of {kind}({number or ''}): {error}"
                raise

    def die(self) -> NoReturn:
        """The end of this process."""
        self.dead = True
        raise ProcessKilled

    def unheard(self, number: int, frame: FrameType | None) -> NoReturn:
        """What a signal does that nobody listens for."""
        self.events.append(["unheard"])
        self.die()

    def load(self) -> int:
        with self.doing("load", 0):
            number, self.state = self.disk
        self.events.append(["done", self.state])
        return number

    def step(self, number: int) -> None:
        with self.doing("step", number):
            self.state = next_state(self.state, number)
        self.reached = max(self.reached, number)
        self.events.append(["done", self.state])

    def save(self, number: int) -> None:
        with self.doing("save", number):
            state = self.state
        self.disk = (number, state)
        self.events.append(["done", state])


def fate_events(what: str) -> list[str]:
    """The events of what befalls."""
    return {"": [], "warn": ["warned"], "warn twice": ["warned", "warned"], "kill": ["killed"]}[what]


def next_state(state: int, number: int) -> int:
    """The state after a step, which all steps before it have a part in; it is the loss, too."""
    return (state * 6364136223846793005 + number) % STATES


def run_lives(world: TrainingWorld) -> None:
    """One life of the process after another, until the training is done."""
    for life in range(8):
        if life:
            world.born(life)
        before = signal.signal(signal.SIGUSR1, world.unheard)
        try:
            status: Any = go_on(world.last, world.every, world.load, world.step, world.save)
        except ProcessKilled:
            continue
        except SystemExit as error:
            status = error.code
        except BaseException:
            if world.thrown:
                return
            raise
        finally:
            signal.signal(signal.SIGUSR1, before)
        if world.dead:                               # it has caught what nobody can
            continue
        if isinstance(status, bool) or not isinstance(status, int):
            raise return_values.InvalidReturn(f"`go_on` returned {return_values.describe_value(status)}; expected 0 or {GO_ON}",
                                    return_values.choose_cure(status, f"return 0 if step `last` is done, else {GO_ON}"))
        world.events.append(["returned", status])
        if status == 0 or world.reached >= world.last:
            return


@dataclass
class Work:
    """A load, step or save that is under way, and the events that have still to befall it."""

    kind: str
    number: int
    state: int
    due: list[str]


class TrainingLedger:
    """What came of a training, and what went wrong, by its events. It trusts none: what cannot have happened is a ValueError."""

    def __init__(self, start: int, every: int, last: int, befalls: Fate):
        self.every, self.last, self.befalls = every, last, dict(befalls)
        self.disk, self.log = (0, start), dict[int, int]()           # (step, state) of the checkpoint; step -> loss
        self.counts = dict.fromkeys(("again", "late", "needless", "torn", "status"), 0)
        self.allowed = 0                             # steps that a kill makes anybody do again
        self.life, self.over = -1, True

    def read(self, what: str, *more: int) -> None:
        """Take in one event."""
        if any(type(number) is not int for number in more) or self.over != (what == "born"):
            raise ValueError("this cannot have happened")
        match what, more:
            case "born", ():
                self.life, self.over, self.state, self.asked, self.after = self.life + 1, False, 1, False, 0
                self.reached = 0                     # the newest step of this life
                self.under_way = list[Work]()
            case ("load" | "step" | "save"), (number,):
                self.begin(what, number)
            case "done", (state,):
                self.end(self.under_way.pop(), state)
            case ("warned" | "killed"), ():
                if not self.under_way or self.under_way[-1].due[:1] != [what]:
                    raise ValueError("this befell nobody")
                self.under_way[-1].due.pop(0)
                self.asked = True
                if what == "killed":
                    begun = (self.under_way[-1].number - 1) // self.every * self.every
                    self.allowed += max(self.log, default=0) - max(self.disk[0], begun)
                    self.over = True
            case "unheard", ():
                self.counts["status"] += 1
                self.over = True
            case "returned", (status,):
                self.counts["status"] += status != (0 if max(self.log, default=0) >= self.last else GO_ON)
                self.counts["needless"] += self.reached > self.disk[0]           # one is missing
                self.over = True
            case _:
                raise ValueError("this is nothing that a training does")

    def begin(self, kind: str, number: int) -> None:
        """A load, a step or a save begins."""
        self.counts["torn"] += bool(self.under_way)  # one inside another: in a signal's handler
        if kind == "load":
            number, self.state = self.disk
            self.reached = number
        if kind == "step":
            self.after += self.asked
            self.counts["late"] += self.after > 1    # one more may have begun
            self.counts["again"] += number in self.log
            self.state, self.reached = next_state(self.state, number), number
        if kind == "save":
            due = number % self.every == 0 or number == self.last or self.asked
            self.counts["needless"] += not due or number == self.disk[0]
        what = self.befalls.pop((self.life, kind, 0 if kind == "load" else number), "")
        self.under_way.append(Work(kind, number, self.state, fate_events(what)))

    def end(self, work: Work, state: int) -> None:
        """It has ended, with this state."""
        if work.due or state != (work.state if work.kind == "save" else self.state):
            raise ValueError("this is another training")
        if work.kind == "step":
            self.log[work.number] = state
        if work.kind == "save":
            self.disk = work.number, state

    def balance(self) -> dict[str, float]:
        """The mean loss of all steps, those that were not done as 0; and how often each thing went wrong."""
        losses = [self.log.get(number, 0) / STATES for number in range(1, self.last + 1)]
        return {"losses": sum(losses) / self.last, **self.counts, "again": max(0, self.counts["again"] - self.allowed),
                "status": self.counts["status"] + (not self.over)}


def draw_fates(seed: int, hidden: bool) -> Tensors:
    """How often to save, up to which step to train, and the state at the start; moments are drawn from them."""
    dice = random.Random(seed)
    every = dice.randint(5, 12) if hidden else dice.randint(3, 4)
    last = every * dice.randint(4, 6) + (dice.randint(2, every - 1) if hidden else 2)
    return {"seed": torch.tensor(random_inputs.number(seed)), "every": torch.tensor(every), "last": torch.tensor(last),
            "start": torch.tensor(dice.randrange(STATES))}


def fates(inputs: Tensors) -> dict[str, Fate]:
    """What befalls a training, in words, and as `TrainingWorld` takes it."""
    every, last = int(inputs["every"]), int(inputs["last"])
    dice = random.Random(int(inputs["seed"]))
    due = every * dice.randint(2, 3)                 # a step after which a checkpoint is due
    odd = due + dice.randint(1, every - 2)           # and one after which none is
    return {"nothing happens": {},
            f"a signal in step {odd}": {(0, "step", odd): "warn"},
            f"a signal in step {due}": {(0, "step", due): "warn"},
            f"a signal while step {due} is saved": {(0, "save", due): "warn"},
            "a signal while it loads": {(0, "load", 0): "warn"},
            f"a signal in step {last}, the last": {(0, "step", last): "warn"},
            f"two signals in step {odd}": {(0, "step", odd): "warn twice"},
            f"a signal in step {odd}, and one while it loads again": {(0, "step", odd): "warn", (1, "load", 0): "warn"},
            f"killed in step {odd + 1}": {(0, "step", odd + 1): "kill"},
            f"killed while step {due} is saved": {(0, "save", due): "kill"},
            f"a signal in step {odd}, then killed in step {odd + 1}": {(0, "step", odd): "warn", (1, "step", odd + 1): "kill"}}


def trainings(inputs: Tensors) -> list[tuple[int, int, int, Fate]]:
    """What `TrainingWorld` and `TrainingLedger` are made with, fate by fate."""
    start, every, last = (int(inputs[name]) for name in ("start", "every", "last"))
    return [(start, every, last, befalls) for befalls in fates(inputs).values()]


def run_go_on(inputs: Tensors) -> Tensors:
    """Train through each fate; what happened."""
    events = []
    for training in trainings(inputs):
        world = TrainingWorld(*training)
        run_lives(world)
        if world.thrown:
            raise return_values.InvalidReturn(f"what USR1 calls raised {world.thrown}".removesuffix(": "),
                                    "a handler that raises leaves the loop in the middle of a step, a save or a load, and what "
                                    "was being done is half done: let it set a flag, and look at the flag between two steps")
        events.append(world.events)
    return {"events": transcript.pack(events)}


def weigh_go_on(inputs: Tensors, happened: Tensors) -> Tensors:
    """What came of each fate, and what went wrong, by what happened."""
    balances = []
    for training, events in zip(trainings(inputs), transcript.unpack(happened["events"]), strict=True):
        ledger = TrainingLedger(*training)
        for event in events:
            ledger.read(*event)
        balances.append(ledger.balance())
    return {name: torch.tensor([balance[name] for balance in balances], dtype=torch.float64) for name in balances[0]}


# ---- how often to save

def draw_costs(seed: int, hidden: bool) -> Tensors:
    """Seconds of a save and of a restart, hours between failures of a node, and nodes."""
    generator = random_inputs.generator(seed)
    count = 8 if hidden else 5
    drawn = torch.rand(4, count, generator=generator, dtype=torch.float64)
    return {"save": 1 + 120 * drawn[0] ** 2, "restart": 30 + 900 * drawn[1], "mtbf": 3600 * (500 + 20_000 * drawn[2]),
            "nodes": (2 ** (1 + 10 * drawn[3])).round()}


GIVEN = ("save", "restart", "mtbf", "nodes")


def run_checkpoint_interval(inputs: Tensors) -> Tensors:
    """The interval and the share that is lost in each case."""
    pairs = []
    for save, restart, mtbf, nodes in torch.stack([inputs[name] for name in GIVEN], 1).tolist():
        made = return_values.pair(checkpoint_interval(save, restart, mtbf, int(nodes)), "checkpoint_interval", "(seconds, share)")
        pairs.append([return_values.number(part, "checkpoint_interval") for part in made])
    interval, share = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    return {"interval": interval, "share": share}


def checkpoint_interval_cases(inputs: Tensors) -> list[str]:
    """The cases in words."""
    rows = torch.stack([inputs[name] for name in GIVEN], 1).tolist()
    return [", ".join(f"{name}={value:.6g}" for name, value in zip(GIVEN, row, strict=True)) for row in rows]


EXERCISES = [
    Exercise("go-on", "18", (f"{__name__}.go_on",), draw_fates, run_go_on, weigh=weigh_go_on, claims={
        "losses": "whatever happens, in the end each step has the loss of an undisturbed training",
        "again": "no step is repeated, except those that a kill takes away",
        "late": "after a signal at most one more step begins",
        "needless": "a checkpoint is written when one is due or the run stops, and none twice",
        "torn": "nothing else happens while one is written",
        "status": "it returns 0 when step `last` is done, else 75"}, cases=lambda inputs: list(fates(inputs)), limits=QUICK,
        points=3),
    Exercise("checkpoint-interval", "18", (f"{__name__}.checkpoint_interval",), draw_costs, run_checkpoint_interval, {
        "interval": "this interval loses the least", "share": "and it loses this share of the time"},
             cases=checkpoint_interval_cases, limits=QUICK),
]
