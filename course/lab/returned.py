"""What a learner's function returned, looked at before it is used: a sentence instead of an error further on.

Without these, a forgotten `return` stops somewhere in the library, at a line that the learner did not write.
"""

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

FORGOT = "a function without a `return` returns None: did you forget it?"


class Returned(Exception):
    """What a function returned cannot be used: `text` says what it was, `cure` what to do."""

    def __init__(self, text: str, cure: str):
        super().__init__(text, cure)
        self.text, self.cure = text, cure


def number(value: Any, who: str) -> float:
    """The number that `who` returned; one of NumPy's, or a tensor of one number, will do."""
    if isinstance(value, bool) or not (isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)):
        raise Returned(f"`{who}` returned {told(value)}; a number is wanted", cure(value, "return one number"))
    return float(value)


def pair(value: Any, who: str, names: str) -> tuple[Any, Any]:
    """The two things that `who` returned; `names` says which, such as "(flops, bytes)"."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise Returned(f"`{who}` returned {told(value)}; a pair is wanted, {names}",
                       cure(value, f"return {names}, with the comma"))
    return value[0], value[1]


def function(value: Any, who: str, name: str) -> Callable[..., Any]:
    """The function that `who` returned, which calls it `name`."""
    if not callable(value):
        raise Returned(f"`{who}` returned {told(value)}; the function `{name}` is wanted",
                       cure(value, f"end `{who}` with `return {name}`, without calling it"))
    return value


def tensor(value: Any, who: str, shape: tuple[int, ...], dtype: torch.dtype, part: str = "") -> Tensor:
    """The tensor of this shape and type that `who` returned; `part` names it among several, such as " as the sum"."""
    wanted = f"a tensor of shape {shape} is wanted" if shape else "a scalar tensor is wanted"
    if not isinstance(value, Tensor):
        plain = isinstance(value, int | float) and not shape
        raise Returned(f"`{who}` returned {told(value)}{part}; {wanted}",
                       "leave out .item() and float(): they make a number of Python, for which every step waits for the device"
                       if plain else cure(value, f"return {wanted.removesuffix(' is wanted')}"))
    if value.shape != shape:
        raise Returned(f"`{who}` returned a tensor of shape {tuple(value.shape)}{part}; {wanted}",
                       "look at the shapes of what you compute: which dims should be summed over, and which kept?")
    if value.dtype != dtype:
        raise Returned(f"`{who}` returned a tensor of type {value.dtype}{part}; {dtype} is wanted, the batch's type",
                       "do not name a type (.float(), dtype=...): take that of the tensors you are given")
    return value


def told(value: Any) -> str:
    """A value in a few words."""
    if value is None:
        return "None"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, int | float | str):
        shown = repr(value)
        return f"{article(type(value).__name__)} ({shown if len(shown) <= 40 else shown[:40] + '...'})"
    return article(type(value).__name__)


def article(noun: str) -> str:
    """a float, an int."""
    return f"{'an' if noun[0] in 'aeiouAEIOU' else 'a'} {noun}"


def cure(value: Any, otherwise: str) -> str:
    """What to do about a value of the wrong kind."""
    return FORGOT if value is None else otherwise
