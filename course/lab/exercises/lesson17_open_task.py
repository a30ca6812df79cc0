"""Lesson 17's open task: the fastest layout on a machine whose rates have to be measured."""

import math
from collections.abc import Callable
from dataclasses import astuple
from functools import partial

import torch

from course.lab.checks import random_inputs
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn, describe_value
from course.lab.exercises.lesson17_performance_model import activation_bytes, all_reduce_seconds, step_seconds
from course.lab.instruments.hidden_process import HiddenProcess
from course.lab.instruments.recorded_runs import Rates, Run
from course.lab.instruments.unknown_machine import (
    Layout,
    Machine,
    Model,
    Speeds,
    block_parameters,
    layouts,
    measurements,
    parameters,
)
from course.lab.sandbox.limits import Limits

LIMIT, SOME, FEW = 400, 30, 10                       # measurements of one machine: at most, and for the two budgets
NEAR = 1.03                                          # times the best layout's seconds
NONE, MISFIT = 0.0, -1.0                             # in place of seconds: no layout; one that runs out of memory

STATES, UPDATE = 16, 28                              # bytes of a parameter with gradient and states; bytes moved to update it


def needs(model: Model, layout: Layout) -> float:
    """Bytes that a rank of the first stage needs: parameters with their states, and activations of 1F1B."""
    micros = model.batch // (layout.dp * layout.samples)
    block = layout.samples * activation_bytes(model.tokens, model.dim, model.hidden, layout.tp, layout.tp > 1)
    return STATES * parameters(model) / (layout.pp * layout.tp) + model.depth / layout.pp * block * min(layout.pp, micros)


def seconds(model: Model, machine: Machine, layout: Layout, speeds: Speeds) -> float:
    """Seconds of a step at these speeds: the lesson's sum, and the all-reduce of gradients in bf16."""
    samples, tp = layout.samples, layout.tp
    held = parameters(model) / (layout.pp * tp)
    moved = (40 * samples * model.tokens * model.dim + 12 * block_parameters(model)) / tp       # activations; weights, gradients
    run = Run(samples, model.batch // (layout.dp * samples), model.tokens, model.dim, model.hidden, model.depth, model.vocab,
              True, tp, layout.pp, moved, UPDATE * held)
    link = speeds.inside if tp <= machine.node else speeds.between
    averaging = all_reduce_seconds(2 * held, layout.dp, machine.latency,
                                   speeds.inside if machine.gpus <= machine.node else speeds.between)
    return step_seconds(run, Rates(speeds.matmul, speeds.attention, speeds.memory, machine.latency, link)) + averaging


def plan_layout(model: Model, machine: Machine, measure: Callable[[Layout], float]) -> Layout | None:
    """The fastest of `layouts(model, machine)` that fits into memory, or one within 3% of it; None if none fits.

    measure(layout): the seconds of a step on the machine; infinite if it runs out of memory.
    """
    fitting = [layout for layout in layouts(model, machine) if needs(model, layout) <= machine.memory]
    if not fitting:
        return None
    # a step is linear in the five reciprocal speeds: with one of them 1 and the others infinite, one coefficient is left
    inf = float("inf")
    known = [seconds(model, machine, layout, Speeds(*[inf] * 5)) for layout in fitting]             # of the latency alone
    terms = [[seconds(model, machine, layout,
                      Speeds(*[inf] * i, 1.0, *[inf] * (4 - i))) - rest for i in range(5)]      # type: ignore[call-arg]
             for layout, rest in zip(fitting, known, strict=True)]
    rows = torch.tensor(terms, dtype=torch.float64)                                                 # (layouts, 5)
    rows /= rows.amax(0).clamp(min=1)
    chosen, left = [], rows
    for _ in range(min(5, len(fitting))):             # rows that are as independent as possible
        chosen.append(int(left.norm(dim=1).argmax()))
        direction = left[chosen[-1]] / left[chosen[-1]].norm().clamp(min=1e-300)
        left = left - torch.outer(left @ direction, direction)
    took = torch.tensor([measure(fitting[i]) - known[i] for i in chosen], dtype=torch.float64)
    slowness = torch.linalg.lstsq(rows[chosen], took[:, None], driver="gelsd").solution             # (5, 1)
    return fitting[int((torch.tensor(known, dtype=torch.float64) + (rows @ slowness)[:, 0]).argmin())]


def draw(seed: int, hidden: bool) -> Tensors:
    """Models and machines with their speeds. The last machine has too little memory for every layout."""
    generator = random_inputs.generator(seed)

    def pick(*values: int) -> int:
        return values[int(torch.randint(len(values), (), generator=generator))]

    def between(low: float, high: float) -> float:
        return low * (high / low) ** float(torch.rand((), generator=generator, dtype=torch.float64))

    models, machines, speeds = [], [], []
    count = 8 if hidden else 6
    for number in range(count):
        dim = 256 * pick(8, 12, 16, 20, 24, 32)
        model = Model(pick(1024, 2048, 4096), dim, 4 * dim, pick(16, 24, 32, 48), 50304, pick(128, 256, 512))
        gpus, node = (pick(16, 32, 64), pick(4, 8)) if number else (8, 8)
        machine = Machine(gpus, node, 0.0, between(5e-6, 3e-5))
        needed = sorted(needs(model, layout) for layout in layouts(model, machine))
        low, high = needed[len(needed) // 3], needed[2 * len(needed) // 3]
        memory = between(1.05 * low, 1.2 * high) if number < count - 1 else 0.9 * needed[0]
        models.append([float(value) for value in astuple(model)])
        machines.append([*map(float, astuple(machine)[:2]), memory, machine.latency])
        speeds.append([between(2e14, 8e14), between(5e13, 5e14), between(5e11, 4e12), between(2e10, 4e11), between(1e9, 5e10)])
    return {name: torch.tensor(rows, dtype=torch.float64) for name, rows in
            (("models", models), ("machines", machines), ("speeds", speeds))}


def unpacked(inputs: Tensors) -> list[tuple[Model, Machine]]:
    """The models with their machines."""
    return [(Model(*map(int, model)), Machine(int(machine[0]), int(machine[1]), *machine[2:]))
            for model, machine in zip(inputs["models"].tolist(), inputs["machines"].tolist(), strict=True)]


def run(inputs: Tensors) -> Tensors:
    """The seconds of the layout for each machine, those of the best one where they are near; and whether few measurements
    were enough. Nothing here knows the speeds while `plan_layout` runs."""
    cases = unpacked(inputs)
    tables = [[(layout, seconds(*case, layout, Speeds(*speeds)) if needs(case[0], layout) <= case[1].memory else float("inf"))
               for layout in layouts(*case)] for case, speeds in zip(cases, inputs["speeds"].tolist(), strict=True)]
    with HiddenProcess(measurements, (tables, LIMIT)) as hidden:
        del tables
        inputs["speeds"].zero_()
        chosen = [plan_layout(*case, partial(measured, hidden, number)) for number, case in enumerate(cases)]
        for layout, case in zip(chosen, cases, strict=True):
            if layout is not None and layout not in layouts(*case):
                raise InvalidReturn(f"`plan_layout` returned {layout if isinstance(layout, Layout) else describe_value(layout)}",
                                    "return one of `layouts(model, machine)`, or None")
        tables, calls = hidden.ask()
    found = [judged(layout, table) for layout, table in zip(chosen, tables, strict=True)]
    return {"seconds": torch.tensor(found, dtype=torch.float64), "some": torch.tensor(float(max(calls) <= SOME)),
            "few": torch.tensor(float(max(calls) <= FEW))}


def measured(hidden: HiddenProcess, case: int, layout: Layout) -> float:
    """The seconds of a layout on a case's machine."""
    return hidden.ask(case, layout)


def judged(layout: Layout | None, table: dict[Layout, float]) -> float:
    """How good a choice is: the best seconds if they are near, else its own, or `MISFIT`, or `NONE`."""
    took, best = NONE if layout is None else table[layout], min(table.values())
    return MISFIT if math.isinf(took) else best if NONE < took <= NEAR * best else took


def asked(inputs: Tensors) -> list[str]:
    """Each case in words."""
    return [f"plan_layout({model}, {machine})" for model, machine in unpacked(inputs)]


EXERCISES = [
    Exercise("plan-layout", "17", (f"{__name__}.plan_layout",), draw, run, {
        "seconds": "each layout fits and is within 3% of the fastest, and it is None where none fits",
        "some": f"it measures at most {SOME} layouts of a machine",
        "few": f"it measures at most {FEW} layouts of a machine"},
        flags={"some": "it measures more on some machine", "few": "it measures more on some machine"},
        levels={"some": f"{SOME} measurements", "few": f"{FEW} measurements"}, cases=asked,
        read_as={NONE: "no layout", MISFIT: "a layout that does not fit"},
        ladder=("Begin with a loop over `layouts(model, machine)` that measures all of them: that is the first level. What does "
                "not fit, you can leave out before you measure it.",
                "Layouts that fit can be ranked before they are measured, if you know roughly how fast the machine is. What is "
                "`seconds` if only one speed is finite? How does a step's time depend on 1 / speed?",
                "A step's time is a sum: a constant of the latency, and five terms, each a coefficient over one speed. `seconds` "
                "with one speed 1 and the others infinite gives the coefficient. Measure some layouts that differ much, solve "
                "for the five reciprocal speeds (`torch.linalg.lstsq`), and compute all other layouts."),
        limits=Limits(seconds=120)),
]
