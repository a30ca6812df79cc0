"""Lesson 12: schedules of a pipeline, by simulation and by training with them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from course.lab.checks import random_inputs, return_values, tiny_training
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.sandbox.limits import Limits
from course.parallel import join
from course.parallel.pipeline_parallel import schedules
from course.parallel.pipeline_parallel.schedules import Pass

NEVER = -1.0                                         # the time of what does not end
PATIENT = Limits(seconds=180)                        # most of it for starting 4 ranks on a machine with 2 cores


def draw(seed: int, hidden: bool) -> Tensors:
    """Pipelines (one short of micro-batches among them), how long a pass takes, and what training draws."""
    generator = random_inputs.generator(seed)
    most = 9 if hidden else 6
    p = torch.randint(3, most, (5 if hidden else 3,), generator=generator)
    m = p + torch.randint(1, most, p.shape, generator=generator)
    cases = torch.stack([p, m], 1)
    times = 1 + torch.rand(2, generator=generator, dtype=torch.float64)
    return tiny_training.draw_inputs(seed, samples=10 if hidden else 8) | {"cases": torch.cat([cases, torch.tensor([[5, 2]])]),
                                                                     "times": times}


def passes(value: Any, who: str) -> list[Pass]:
    """The passes that `who` returned."""
    if not isinstance(value, list | tuple) or not all(isinstance(work, Pass) for work in value):
        raise return_values.InvalidReturn(f"`{who}` returned {return_values.describe_value(value)}; expected a list of Pass",
                                return_values.choose_cure(value,
                                                   'return one list of all passes in order, each Pass("F" or "B", 0, number)'))
    for work in value:
        if work.kind not in ("F", "B"):
            raise return_values.InvalidReturn(f"`{who}` returned a pass of the kind {work.kind!r}",
                                              'the first field is "F" or "B"')
    return list(value)


def simulate(inputs: Tensors, make: Callable[[int, int, int, int], list[Pass]], who: str, v: int = 1) -> Tensors:
    """Of each drawn pipeline: the passes that each rank lacks and has too many; who meets; time; live activations."""
    found: dict[str, list[float]] = {"passes": [], "meet": [], "time": [], "alive": []}
    forward, backward = inputs["times"].tolist()
    for p, m in inputs["cases"].tolist():
        m = max(m, p) if v > 1 else m                # fewer cannot be interleaved
        made = [passes(make(p, rank, m, v), who) for rank in range(p)]
        wanted = {Pass(kind, chunk, micro) for kind in ("F", "B") for chunk in range(v) for micro in range(m)}
        found["passes"] += [float(count) for mine in made
                            for count in (len(wanted - set(mine)), len(mine) - len(wanted & set(mine)))]
        found["alive"] += [float(schedules.alive(mine)) for mine in made]
        try:
            end = max(end for _, end in schedules.timeline(made, v, forward, backward).values())
        except (ValueError, KeyError):               # they wait in a circle, or for what nobody does
            end = NEVER
        found["time"].append(end)
        found["meet"] += [float(end > 0), float(schedules.crossed(made, v))]
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


def trained(inputs: Tensors, name: str, sound: bool) -> Tensors:
    """The real model's loss and weights after two steps with this schedule, if simulation promises that it ends."""
    size = join("cpu").size
    layout = [f"parallel.pp={size}", f"parallel.schedule={name}", "model.depth=5", "train.micro_batch=2"]
    if not sound:
        return {"losses": torch.zeros(0, dtype=torch.float64), "weights": torch.zeros(0, dtype=torch.float64)}
    found = tiny_training.train(tiny_training.batches_of(inputs), int(inputs["seed"]), *layout)
    return {"losses": found["losses"], "weights": found["weights"]}


def sound(found: Tensors) -> bool:
    """Whether nobody would wait for ever, nor take one message for another, and every pass is there."""
    wait, cross = found["meet"].view(-1, 2).unbind(1)
    return bool(wait.all() and not cross.any() and not found["passes"].any())


def run_gpipe(inputs: Tensors) -> Tensors:
    """GPipe in simulation, the order of its micro-batches, and the training of a model with it."""
    found = simulate(inputs, schedules.gpipe, "gpipe")
    order = [float(all(rises(schedules.gpipe(p, rank, m), kind) for rank in range(p) for kind in ("F", "B")))
             for p, m in inputs["cases"].tolist()]
    return found | {"order": torch.tensor(order, dtype=torch.float64)} | trained(inputs, "gpipe", sound(found))


def rises(made: Sequence[Pass], kind: str) -> bool:
    """Whether passes of this kind go from the first micro-batch to the last."""
    micros = [work.micro for work in made if work.kind == kind]
    return micros == sorted(micros)


def run_1f1b(inputs: Tensors) -> Tensors:
    """1F1B in simulation, interleaved 1F1B with the same `alternate`, and the training of a model."""
    found = simulate(inputs, schedules.one_forward_one_backward, "one_forward_one_backward")
    more = simulate(inputs, schedules.interleaved, "alternate", v=2)
    given = [Pass("F", 3, micro) for micro in range(4)], [Pass("B", 3, micro) for micro in range(4)]
    before = [list(each) for each in given]
    own = set(passes(schedules.alternate(*given, 2), "alternate")) == set(before[0] + before[1])
    kept = [list(each) for each in given] == before
    found |= {"kept": torch.tensor(float(kept)), "own": torch.tensor(float(own)),
              "interleaved": torch.cat([more["time"], more["alive"]])}
    return found | trained(inputs, "1f1b", sound(found))


CLAIMS = {
    "passes": "in simulation every rank does every pass once",
    "meet": "no rank waits forever, and each rank receives messages in the order in which they are sent",
    "time": "the simulated time, with its bubble, is the right one for this schedule",
    "alive": "each rank keeps activations of the right number of micro-batches"}
TRAINS = {
    "losses": "the library trains with it: the losses of two steps are right",
    "weights": "the weights after these two steps are right"}
ORDER = {"order": "forward and backward passes both go from the first micro-batch to the last"}
UNMET = {"own": "it left some out, or made new ones", "kept": "it changed one of them",
         "passes": "in some pipeline, passes are missing, run twice, or name a chunk or micro-batch that does not exist",
         "meet": "in some pipeline, ranks wait for each other in a circle, or receive one message in place of another",
         "order": "in some pipeline, they come in another order"}
LATER = "not tried, because the schedule fails in simulation"
AS_SHOWN: dict[str, Any] = {"flags": UNMET, "untried": {"losses": LATER, "weights": LATER}, "read_as": {NEVER: "forever"}}
EXERCISES = [
    Exercise("gpipe", "12", ("course.parallel.pipeline_parallel.schedules.gpipe",), draw, run_gpipe,
             CLAIMS | ORDER | TRAINS,
             sizes=(2, 4), points=2, limits=PATIENT, **AS_SHOWN),
    Exercise("1f1b", "12", ("course.parallel.pipeline_parallel.schedules.alternate",
                            "course.parallel.pipeline_parallel.schedules.one_forward_one_backward"), draw,
             run_1f1b, CLAIMS | {"interleaved": "interleaved 1F1B, which calls your `alternate`, takes the right time and memory",
                       "own": "`alternate` returns the passes that it is given, all of them and no others",
                       "kept": "`alternate` does not change the lists that it is given"} | TRAINS,
             sizes=(2, 4), points=3, limits=PATIENT, **AS_SHOWN),
]
