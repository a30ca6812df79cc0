"""Lesson 04: a dynamic loss scaler, a cast to FP8, and the scale that an amax history gives."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from course.lab.checks import random_inputs, return_values
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn
from course.ops import number_formats

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def to_fp8(x: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    """x · scale in the format `kind`; numbers beyond the largest one of the format become that number."""
    largest = torch.finfo(kind).max
    return (x * scale).clamp(-largest, largest).to(kind)


def remember(history: Tensor, amax: Tensor) -> Tensor:
    """The history after a step, newest first: (tensors, steps) and this step's amaxes, (tensors,) -> (tensors, steps)."""
    return torch.cat([amax[:, None], history[:, :-1]], 1)


def delayed_scale(history: Tensor, largest: float) -> Tensor:
    """The factor for each tensor that maps the largest amax of its history to `largest`.

    (tensors, steps) -> (tensors,); 1 where the history holds only zeros.
    """
    amax = history.amax(1)                                              # (tensors,)
    return torch.where(amax > 0, largest / amax, 1.0)


def draw_steps(seed: int, hidden: bool) -> Tensors:
    """Loss scales, counts of good steps near the limit and away from it, and which steps are bad; then a long run."""
    generator = random_inputs.generator(seed)
    many, long = (24, 6 * number_formats.GROW_AFTER) if hidden else (12, 4 * number_formats.GROW_AFTER)
    good = torch.randint(0, number_formats.GROW_AFTER - 1, (many,), generator=generator)
    good[::3] = number_formats.GROW_AFTER - 1             # the next good step is the one that counts
    scale = 2.0 ** torch.randint(3, 20, (many,), generator=generator).double()
    scale[-1] = 8.0                                  # a low one that is bad: there is no floor
    bad_at = torch.randint(0, long, (3,), generator=generator)
    bad = (torch.rand(many, generator=generator) < 0.4).double()
    bad[-1] = 1.0
    return {"scale": scale, "good": good, "bad": bad, "long": torch.zeros(long).index_fill(0, bad_at, 1.0)}


def run_loss_scaler(inputs: Tensors) -> Tensors:
    """One step of many scalers at once, as tensors; one after another over a long run; and of a format that needs none."""
    scale, good, bad = (inputs[name] for name in ("scale", "good", "bad"))
    try:
        found = torch.vmap(lambda *one: next_scale_pair("fp16", *one))(scale, good, bad)
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        raise InvalidReturn("`next_scale` looks at the value of a tensor (an `if`, a float() or .item()): the host would have to "
                            "wait for the GPU in every step",
                       "compute both outcomes and choose with torch.where(bad > 0, ..., ...)") from error
    now, count = torch.tensor(2.0**16, dtype=torch.float64), torch.tensor(0)
    seen = []
    for flag in inputs["long"].double():
        now, count = next_scale_pair("fp16", now, count, flag)
        seen.append(now)
    none = next_scale_pair("bf16", scale[0], good[0], bad[0])
    return {"scale": found[0].double(), "good": found[1].double(), "run": torch.stack(seen)[::50].double(),
            "none": torch.stack([none[0].double(), none[1].double()])}


def steps_asked(inputs: Tensors) -> dict[str, list[str]]:
    """Each step of a scaler as a call, and those of the long run that are looked at by their numbers."""
    rows = list(zip(*(inputs[name].tolist() for name in ("scale", "good", "bad")), strict=True))
    one = ['next_scale("{}", scale={:.0f}, good={}, bad={:.0f})'.format(kind, *row) for kind, row in
           [*(("fp16", row) for row in rows), ("bf16", rows[0])]]
    bad = " and ".join(map(str, (inputs["long"].nonzero().flatten() + 1).tolist()))
    return {"scale": [f"{call}[0]" for call in one[:-1]], "good": [f"{call}[1]" for call in one[:-1]],
            "run": [f"a scale of 65536, of whose steps {bad} are bad, after step {number}"
                    for number in range(1, len(inputs["long"]) + 1, 50)],
            "none": [f"{one[-1]}[{place}]" for place in (0, 1)]}


def next_scale_pair(kind: str, scale: Tensor, good: Tensor, bad: Tensor) -> tuple[Tensor, Tensor]:
    """The next scale and count. Of copies, since an answer may write into what it is given: the step copies its results back."""
    one, two = return_values.pair(number_formats.next_scale(kind, scale.clone(), good.clone(), bad), "next_scale",
                                  "(scale, good)")
    for value in (one, two):
        if not isinstance(value, Tensor):
            raise InvalidReturn(f"`next_scale` returned {return_values.describe_value(value)} in its pair; expected tensors",
                           "keep the scale and the count as tensors: torch.where takes numbers beside them")
    if two.dtype.is_floating_point or not one.dtype.is_floating_point:
        raise InvalidReturn(f"`next_scale` returned a scale of type {one.dtype} and a count of type {two.dtype}; a count is "
                            "whole",
                       "a product with `bad`, 0.0 or 1.0 in torch.where, or / makes the count a float: write 0 and good + 1, "
                       "and compare, bad > 0")
    return one, two


class Casts(TorchDispatchMode):
    """Within this context `beyond` becomes True where a number that the format cannot hold is cast to `kind`."""

    def __init__(self, kind: torch.dtype):
        super().__init__()
        self.kind, self.beyond = kind, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = next((x for x in reversed(args) if isinstance(x, Tensor) and x.dtype != self.kind), None)
        if isinstance(out, Tensor) and out.dtype == self.kind and given is not None and given.is_floating_point():
            self.beyond = self.beyond or bool((given.double().abs() > torch.finfo(self.kind).max).any())
        return out


def draw_tensors(seed: int, hidden: bool) -> Tensors:
    """Numbers over many orders of magnitude, some far beyond what a format holds, two that are only just rounded up, and scales:
    one below 1, one above."""
    generator = random_inputs.generator(seed)
    many = 400 if hidden else 200
    x = torch.randn(2, many, generator=generator) * 10.0 ** (6 * torch.rand(2, many, generator=generator) - 4)
    down, up = torch.randint(1, 3, (), generator=generator), torch.randint(1, 6, (), generator=generator)
    scale = 2.0 ** torch.stack([-down, up])[torch.randperm(2, generator=generator)].float()
    x[:, :5] = torch.tensor([0.0, 1e9, -1e9, 1e-9, -1.0])
    beyond = torch.tensor([1 + 2**-4, 1 + 2**-3]) * (1 + 2**-13)         # the middle of two neighbors, and a little more
    x[:, 5:7] = (beyond / scale)[:, None] * torch.tensor([1.0, -1.0])   # which 16 bits do not see
    return {"x": x, "scale": scale}


def run_fp8_cast(inputs: Tensors) -> Tensors:
    """The numbers that casts give, of both formats, as float32; and that they are in these formats."""
    found, types, kept, beyond = {}, [], True, False
    for name, kind, x, scale in zip(("e4m3", "e5m2"), (E4M3, E5M2), inputs["x"], inputs["scale"], strict=True):
        given = x.clone()
        with Casts(kind) as casts:
            q = to_fp8(given, scale, kind)
        beyond = beyond or casts.beyond
        kept = kept and torch.equal(given, x)
        if not isinstance(q, Tensor) or q.shape != x.shape:
            raise InvalidReturn(f"`to_fp8` returned {return_values.describe_value(q)}; a tensor of shape {tuple(x.shape)} is "
                                "wanted",
                           return_values.choose_cure(q, "return the whole tensor, cast"))
        types.append(float(q.dtype == kind))
        found[name] = q.float()
    return {**found, "type": torch.tensor(min(types)), "before": torch.tensor(float(not beyond)),
            "kept": torch.tensor(float(kept))}


def draw_histories(seed: int, hidden: bool) -> Tensors:
    """Amax histories of several tensors, and the amaxes of a step.

    The first tensor's amax is smaller than the one before it, the second has seen only zeros, the third was larger before, the
    fourth is the largest now; the first and the fourth have been there for fewer steps than there are places.
    """
    generator = random_inputs.generator(seed)
    tensors, steps = (7, 12) if hidden else (5, 6)
    history = tenths(tensors, steps, generator=generator)
    history[1], history[2, 0], history[3, 0] = 0, history[2, 1] / 2, history[3, 1] + 1
    history[0, -1] = history[3, 2:] = 0              # not full yet
    amax = 2 * tenths(tensors, generator=generator)
    amax[0] = history[0, 0] / 2
    return {"history": history, "amax": amax}


def tenths(*shape: int, generator: torch.Generator) -> Tensor:
    """Numbers from 0.1 to 10 that are quickly read."""
    return torch.randint(1, 101, shape, generator=generator).double() / 10


def moves_asked(inputs: Tensors) -> dict[str, list[str]]:
    """Each tensor's row as a call of `remember`, and what three in a row are given."""
    rows = [(", ".join(f"{x:g}" for x in row), amax) for row, amax in
            zip(inputs["history"].tolist(), inputs["amax"].tolist(), strict=True)]
    return {"one": [f"remember([[{row}]], [{amax:g}]), of one row," for row, amax in rows],
            "three": [f"remember with [{amax:g}], then [{2 * amax:g}], then [{3 * amax:g}], from [[{row}]] on,"
                      for row, amax in rows]}


def run_amax_history(inputs: Tensors) -> Tensors:
    """A history after one step and after three; and whether what was given was left alone."""
    history, amax = inputs["history"], inputs["amax"]
    given, shape = history.clone(), tuple(history.shape)
    one = return_values.tensor(remember(given, amax), "remember", shape, torch.float64)
    three = remember(remember(one.clone(), 2 * amax), 3 * amax)
    return {"one": one, "three": return_values.tensor(three, "remember", shape, torch.float64),
            "kept": torch.tensor(float(torch.equal(given, history)))}


def run_delayed_scale(inputs: Tensors) -> Tensors:
    """Scales for both formats, and for a tensor of zeros."""
    history = inputs["history"]
    some = torch.cat([history[:1], history[2:]])
    found = {name: return_values.tensor(delayed_scale(part.clone(), largest), "delayed_scale", (len(part),), torch.float64)
            for name, part, largest in (("e4m3", some, 448.0), ("e5m2", some, 57344.0), ("small", 1e-9 * some, 448.0),
                                        ("zeros", history, 448.0))}
    return found | {"empty": torch.tensor(scale_of_zeros(found["zeros"][1].item()))}


def scale_of_zeros(scale: float) -> float:
    """What kind of scale a tensor of zeros was given, as a number: 1.0 if it is right."""
    return 2.0 if math.isnan(scale) else 3.0 if math.isinf(scale) else 4.0 if scale == 0 else 5.0 if scale > 1000 else scale


EXERCISES = [
    Exercise("loss-scaler", "04", ("course.ops.number_formats.next_scale",), draw_steps, run_loss_scaler, {
        "scale": "the scale halves after a bad step, doubles after enough good ones, and stays otherwise",
        "good": "good steps are counted, from 0 again after a bad one and after a doubling",
        "run": "over thousands of steps, the scale evolves correctly",
        "none": "formats that need no scaling keep scale and count"}, cases=steps_asked, points=2),
    Exercise("fp8-cast", "04", (f"{__name__}.to_fp8",), draw_tensors, run_fp8_cast, {
        "e4m3": "the numbers are those of E4M3, clipped at 448",
        "e5m2": "the numbers are those of E5M2, clipped at 57344",
        "type": "the result has the requested format",
        "before": "it casts no number that the format cannot hold",
        "kept": "it does not change x"},
        flags={"type": "it has another format: end with .to(kind)",
               "before": "it casts a number beyond the largest, and devices differ in what they make of that",
               "kept": "it changes some numbers"}),
    Exercise("amax-history", "04", (f"{__name__}.remember",), draw_histories, run_amax_history, {
        "one": "the newest amax comes first, the oldest drops out",
        "three": "and so on, step after step",
        "kept": "it does not change the history that it is given"},
        flags={"kept": "it changes some numbers"}, cases=moves_asked),
    Exercise("delayed-scale", "04", (f"{__name__}.delayed_scale",), draw_histories, run_delayed_scale, {
        "e4m3": "the largest amax of the history becomes the format's largest number",
        "e5m2": "in the wider format as well",
        "small": "and for numbers as small as gradients",
        "empty": "a tensor of zeros has the scale 1",
        "zeros": "and the tensors beside it keep their own scales"}, flags={"empty": "it has another"}),
]
