"""Validate the return values of a learner's functions, and raise `InvalidReturn` with a sentence if they cannot be used.

Otherwise a forgotten `return` fails somewhere in the library, at a line that the learner did not write.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from numbers import Real
from typing import Any

import torch
from torch import Tensor

FORGOTTEN_RETURN = "a function without a `return` returns None: did you forget it?"


class InvalidReturn(Exception):
    """A function's return value cannot be used: `text` says what it was, `cure` what to do."""

    def __init__(self, text: str, cure: str):
        super().__init__(text, cure)
        self.text, self.cure = text, cure


def number(value: Any, who: str) -> float:
    """The number that `who` returned: of Python, of NumPy, or a tensor with one element."""
    if isinstance(value, bool) or not (isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)):
        raise InvalidReturn(f"`{who}` returned {describe_value(value)}; expected a number",
                            choose_cure(value, "return one number"))
    return float(value)


def numbers(values: Iterable[Any], who: str) -> Tensor:
    """The numbers that calls of `who` returned, float64 (n,)."""
    return torch.tensor([number(value, who) for value in values], dtype=torch.float64)


def pair(value: Any, who: str, names: str) -> tuple[Any, Any]:
    """The pair that `who` returned; `names` names its parts, such as "(flops, bytes)"."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InvalidReturn(f"`{who}` returned {describe_value(value)}; expected a pair, {names}",
                       choose_cure(value, f"return {names}, with the comma"))
    return value[0], value[1]


def on_ctx(y: Tensor) -> list[int]:
    """Sizes in elements of the tensors stored as attributes of `ctx`, not with save_for_backward, by the autograd.Function that
    returned y."""
    there = getattr(y.grad_fn, "__dict__", {}).values()
    return [one.numel() for value in there for one in (value if isinstance(value, list | tuple) else [value])
            if isinstance(one, Tensor)]


def some(value: Any, who: str, dtype: torch.dtype) -> Tensor:
    """The tensor of this dtype and any shape that `who` returned."""
    if not isinstance(value, Tensor):
        raise InvalidReturn(f"`{who}` returned {describe_value(value)}; expected a tensor",
                            choose_cure(value, "return one tensor"))
    return tensor(value, who, tuple(value.shape), dtype)


def named(value: Any, who: str, names: Sequence[str]) -> dict[str, Any]:
    """The dict that `who` returned, which has to have these keys."""
    if not isinstance(value, dict) or not set(names) <= set(value):
        has = f"a dict of {', '.join(map(repr, value)) or 'nothing'}" if isinstance(value, dict) else describe_value(value)
        raise InvalidReturn(f"`{who}` returned {has}; expected a dict of {', '.join(map(repr, names))}",
                       choose_cure(value, f"return a number for each: {{{', '.join(f'{name!r}: ...' for name in names)}}}"))
    return value


def several(value: Any, who: str, wanted: str) -> list[Any]:
    """The list or tuple that `who` returned; `wanted` describes it, such as "a list of buckets"."""
    if not isinstance(value, tuple | list):
        raise InvalidReturn(f"`{who}` returned {describe_value(value)}; expected {wanted}",
                            choose_cure(value, f"return {wanted}"))
    return list(value)


def function(value: Any, who: str, name: str) -> Callable[..., Any]:
    """The function that `who` returned; inside `who` its name is `name`."""
    if not callable(value):
        raise InvalidReturn(f"`{who}` returned {describe_value(value)}; expected the function `{name}`",
                       choose_cure(value, f"end `{who}` with `return {name}`, without calling it"))
    return value


def takes(thing: Callable[..., Any], name: str, wanted: str, count: int) -> None:
    """Check that `thing` can be called with `count` arguments; `wanted` describes them: "one argument, the batch"."""
    with suppress(ValueError):                       # some C functions have no signature
        try:
            inspect.signature(thing).bind(*[None] * count)
        except TypeError:
            raise InvalidReturn(f"`{name}` must take {wanted}",
                                f"write what it takes between the parentheses of `def {name}(...)`"
                           ) from None


def tensor(value: Any, who: str, shape: tuple[int, ...], dtype: torch.dtype, part: str = "") -> Tensor:
    """The tensor of this shape and dtype that `who` returned; `part` names it among several, such as " as the sum"."""
    wanted = f"a tensor of shape {shape}" if shape else "a scalar tensor"
    if not isinstance(value, Tensor):
        todo = choose_cure(value, f"return {wanted}")
        if not shape and isinstance(value, float):
            todo = "leave out .item() and float(): they make a number of Python, for which every step waits for the device"
        elif not shape and isinstance(value, int):
            todo = ("add up tensors, such as the weights of the samples: len() counts padding too, and .item() and int() make a "
                    "number of Python")
        raise InvalidReturn(f"`{who}` returned {describe_value(value)}{part}; expected {wanted}", todo)
    if value.shape != shape:
        raise InvalidReturn(f"`{who}` returned a tensor of shape {tuple(value.shape)}{part}; expected {wanted}",
                       reshaped(tuple(value.shape), shape))
    if value.dtype != dtype:
        raise InvalidReturn(f"`{who}` returned a tensor of type {value.dtype}{part}; expected {dtype}",
                       mistyped(value.dtype, dtype))
    return value


def reshaped(got: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """The cure for a tensor of the wrong shape."""
    if len(got) > len(wanted):
        return "it has a dim too many: which should be summed over, or taken away, and which kept?"
    if len(got) < len(wanted):
        return "a dim is missing: one was summed over, or taken by an index, that has to be kept"
    if sorted(got) == sorted(wanted):
        return "its dims are in another order: look for a transpose, or for one that is missing"
    wrong = [dim for dim, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b]
    of = f"dim {wrong[0]}" if len(wrong) == 1 else f"dims {', '.join(map(str, wrong))}"
    return (f"the length of {of} is wrong: what should it be, in terms of what the function is given? Look for a fixed number "
            "where one of these belongs, for a cut that is missing or made twice, and for what was to be summed over")


def mistyped(got: torch.dtype, wanted: torch.dtype) -> str:
    """The cure for a tensor of the wrong dtype."""
    if got == torch.float32 and wanted == torch.float64:
        return ("checks run in float64: do not name a type (.float(), dtype=...), and begin a sum with 0 or "
                "torch.zeros_like(...), since torch.zeros(()) is float32")
    if got.is_floating_point and not wanted.is_floating_point:
        return "return whole numbers: / makes fractions, // does not; do not name a type (.float(), dtype=...)"
    if not got.is_floating_point and wanted.is_floating_point:
        return ("counting gives integers, and comparing True and False: .to(target.dtype) makes numbers of the batch's type of "
                "them. Do not take len(): it counts padding too")
    return "do not name a type (.float(), dtype=...): take that of the tensors you are given"


def describe_value(value: Any) -> str:
    """Describe a value in a few words."""
    if value is None:
        return "None"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, int | float | str):
        shown = repr(value)
        return f"{with_article(type(value).__name__)} ({shown if len(shown) <= 40 else shown[:40] + '...'})"
    return with_article(type(value).__name__)


def with_article(noun: str) -> str:
    """A noun with its article: a float, an int."""
    return f"{'an' if noun[0] in 'aeiouAEIOU' else 'a'} {noun}"


def choose_cure(value: Any, otherwise: str) -> str:
    """The cure for a value of the wrong type: for None, the forgotten `return`."""
    return FORGOTTEN_RETURN if value is None else otherwise
