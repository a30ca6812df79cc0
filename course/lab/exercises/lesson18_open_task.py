"""Lesson 18's open task: a run that survives whatever happens to its process and to its disk."""

import hashlib
import random
import signal
from itertools import count

import torch

from course.lab.checks import random_inputs
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.instruments.crash_disk import CRASH_KINDS
from course.lab.instruments.failing_machine import STATE, Fate, Job, Outcome, Plan, live
from course.lab.sandbox.limits import Limits

LEFT, FILES, MOST = 2.5, 4, 3.5                      # states on the disk at the end, files there, and states at any time
MORE = 4                                             # checkpoints, over those that are due
PLACES = (*range(0, 64, 4), STATE // 3, *range(-64, 0, 4))       # bytes of a file that may change: a header has some of its own
TOO_MANY = 60                                        # operations of the disk between two steps, where each may be the last


def survive(job: Job) -> int:
    """Train from the newest whole checkpoint up to step `job.last`; returns 0 when it is done, 75 when it was asked to stop."""
    disk, asked = job.disk, False

    def hear(*_: object) -> None:
        nonlocal asked
        asked = True

    def load() -> int:
        """Restore the newest whole checkpoint, and remove what is none, or more than two; returns its step."""
        whole = list[int]()                          # the steps, the newest one first
        for name in reversed(disk.names()):
            data = disk.read(name)
            right = not name.endswith(".partial") and hashlib.sha256(data[32:]).digest() == data[:32]
            if not right or len(whole) == 2:
                disk.remove(name)
                continue
            if not whole:
                job.restore(data[48:], int.from_bytes(data[40:48], "big"))
            whole.append(int.from_bytes(data[32:40], "big"))
        return whole[0] if whole else 0

    def save(number: int) -> bool:
        """Write a checkpoint, unless the disk is full; says whether it is there. The newest two stay."""
        name = f"{number:08d}"
        data = number.to_bytes(8, "big") + job.position.to_bytes(8, "big") + job.state()
        try:
            disk.write(f"{name}.partial", hashlib.sha256(data).digest() + data)
        except OSError:
            disk.remove(f"{name}.partial")
            return False
        disk.flush(f"{name}.partial")
        disk.rename(f"{name}.partial", name)
        disk.flush()
        for old in disk.names()[:-2]:
            disk.remove(old)
        return True

    signal.signal(signal.SIGUSR1, hear)
    done = saved = load()
    while done < job.last and not asked:
        job.step(done + 1)
        done += 1
        if (done - saved >= job.every or done == job.last) and save(done):
            saved = done
    if saved < done:
        save(done)
    return 0 if done == job.last else 75


def draw(seed: int, hidden: bool) -> Tensors:
    """How many steps lie between two checkpoints, up to which step to train, and a seed for the rest."""
    dice = random.Random(seed)
    every = dice.randint(5, 8) if hidden else dice.randint(3, 4)
    return {"seed": torch.tensor(random_inputs.number(seed)), "every": torch.tensor(every),
            "last": torch.tensor(every * dice.randint(5, 6) + dice.randint(1, every - 1))}


def fates(inputs: Tensors) -> dict[str, list[Fate]]:
    """What befalls a training, in words; where each operation of the disk may be the last, the fates without it."""
    every, last, dice = int(inputs["every"]), int(inputs["last"]), random.Random(int(inputs["seed"]))
    due = 3 * every                                  # a step after which a checkpoint is due, and not the first
    odd = due + dice.randint(1, every - 1)           # and one after which none is
    return {
        "nothing happens": [Fate()],
        "killed before the first checkpoint": [Fate(kill_step=every, allowed=every)],
        f"killed in step {due + every}": [Fate(kill_step=due + every, allowed=every)],
        f"killed at each operation of the disk after step {due}": [Fate(kill_save=due, allowed=every)],
        f"the power fails at each operation of the disk after step {due}": [
            Fate(kill_save=due, power=kind, allowed=every) for kind in CRASH_KINDS],
        f"a signal in step {odd}": [Fate(warn_step=odd)],
        f"a signal in step {due}": [Fate(warn_step=due)],
        f"a signal while step {due} is saved": [Fate(warn_save=due)],
        "a signal while it loads": [Fate(warn_load=True)],
        f"a signal in step {last}, the last": [Fate(warn_step=last)],
        f"killed in step {odd}, and the newest file is cut off": [Fate(kill_step=odd, damage="cut", allowed=2 * every)],
        f"killed in step {odd}, and a bit of the newest file is another": [
            Fate(kill_step=odd, damage="flip", place=place, allowed=2 * every) for place in PLACES],
        f"the disk is full once, after step {due}": [Fate(full=due)],
        f"the same, and killed in step {due + 2}": [Fate(full=due, kill_step=due + 2, allowed=1)]}


def outcomes(fate: Fate, plan: Plan) -> list[Outcome]:
    """What comes of a fate: one outcome, or one for each operation of the disk that may be the last."""
    if not fate.kill_save:
        return [live(survive, fate, plan)]
    found = list[Outcome]()
    for operation in count(1):
        outcome = live(survive, Fate(**vars(fate) | {"operation": operation}), plan)
        if not outcome.fired or operation > TOO_MANY:
            return found or [outcome]
        found.append(outcome)
    return found


def run(inputs: Tensors) -> Tensors:
    """What comes of each fate."""
    plan = Plan(*(int(inputs[name]) for name in ("seed", "last", "every")))
    losses, held = list[float](), list[list[bool]]()
    for kinds in fates(inputs).values():
        found = [(fate, outcome) for fate in kinds for outcome in outcomes(fate, plan)]
        losses.append(sum(sum(outcome.losses.get(number, 0.0) for number in range(1, plan.last + 1)) for _, outcome in found)
                      / len(found))
        held.append([all(outcome.wrong_status == 0 for _, outcome in found),
                     all(outcome.written <= (plan.last / plan.every + MORE) * 1.1 * STATE for _, outcome in found),
                     all(outcome.again <= fate.allowed for fate, outcome in found),
                     all(outcome.left <= LEFT * STATE and outcome.files <= FILES for _, outcome in found),
                     all(outcome.most <= MOST * STATE for _, outcome in found)])
    columns = torch.tensor(held).double().unbind(1)
    return {"sum": torch.tensor(losses, dtype=torch.float64)} | dict(zip(("status", "writes", "again", "left", "most"), columns,
                                                                         strict=True))


def explain(inputs: Tensors, expected: Tensors, got: Tensors) -> str:
    """What to say of an answer for which another bit alone goes wrong, or a kill that leaves the files whole."""
    wrong = (expected["sum"] - got["sum"]).abs() > 1e-9 * expected["sum"]
    cases = [case for case, off in zip(fates(inputs), wrong.tolist(), strict=True) if off]
    if cases and all("a bit" in case for case in cases):
        return "any byte of a file can change, not only the state's: the step and the position belong under the checksum too"
    if any(case.startswith("killed in step") and "," not in case for case in cases):
        return ("after a kill the losses are others already where all files are whole: a checkpoint needs the state, the step "
                "and `job.position`, all from one moment")
    return ""


EXERCISES = [
    Exercise("survive", "18", (f"{__name__}.survive",), draw, run, {
        "sum": "whatever happens, in the end each step has the loss of an undisturbed training",
        "status": "it returns 0 when the last step is done, else 75, and does not end in another way",
        "writes": f"in all, at most {MORE} checkpoints more are written than `job.every` makes necessary, of 1.1 states each",
        "again": "no more steps are repeated than a kill or a damaged file makes necessary",
        "left": f"at the end, the disk holds less than {LEFT} states, in at most {FILES} files",
        "most": f"and never more than {MOST} states"},
        levels={"writes": "few writes", "again": "few repeated", "left": "tidy", "most": "tidy"},
        cases=lambda inputs: list(fates(inputs)),
        flags=dict.fromkeys(("status", "writes", "again", "left", "most"), "not always"),
        explain=explain,
        unknown="take the case that is named: note what lies on the disk after each operation, and what a new process makes of "
                "it",
        ladder=("Begin with the loop of this lesson's exercise. Then write down all that a new process needs: the state, the "
                "step and the position in the data. How does it find out that a file is not whole, or not what was written?",
                "A checksum in front of the rest says whether a file is whole. Then the newest file may be damaged, if an older "
                "one is still there. Which files must be safe before you may remove one? Lesson 16's save has the order.",
                "Write and flush under another name, rename, flush the root folder, and only then remove all but the newest "
                "two. Catch an OSError, remove the half file, and save after the next step. While loading, remove what is not "
                "whole, and more than two. A signal sets a flag: two seconds are enough for a save, but not for "
                "another step."),
        limits=Limits(seconds=90)),
]
