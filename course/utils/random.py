"""Randomness as a pure function: a number depends on what it is for, never on what was drawn before.

Every random number here is a hash of a key and a counter (a counter-based generator in the sense of
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the hash is the finaliser of
Steele et al.'s SplitMix64, OOPSLA 2014). So

    a weight        is a function of (seed, serial parameter name, index of the element),
    a dropped unit  is a function of (seed, step, sample id, site, position),
    a data order    is a function of (seed, epoch),

and a rank draws just the slice it holds: every parallel layout sees the same numbers, and resuming a
run needs no generator state.
"""

import hashlib
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from course.utils.errors import CourseError

GOLDEN = 0x9E3779B97F4A7C15 - 2**64                # 64-bit constants as the signed integers torch computes with
MIX1 = 0xBF58476D1CE4E5B9 - 2**64
MIX2 = 0x94D049BB133111EB - 2**64


def key(*parts: int | str) -> int:
    """A 63-bit key from any integers and strings, such as `key(seed, "weights", name)`."""
    digest = hashlib.blake2b("\0".join(map(repr, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def fold(key: int | Tensor, counter: Tensor) -> Tensor:
    """64 well-mixed bits (int64) for each pair of key and counter; shapes broadcast."""
    x = key + counter * GOLDEN
    x = (x ^ _shift(x, 30)) * MIX1
    x = (x ^ _shift(x, 27)) * MIX2
    return x ^ _shift(x, 31)


def uniform(key: int | Tensor, counter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers strictly between 0 and 1, one for each counter (int64, any shape)."""
    bits = 52 if dtype == torch.float64 else 23    # one less than the mantissa: the half below stays exact
    whole = _shift(fold(key, counter), 64 - bits)
    return (whole.to(dtype) + 0.5) * 2.0**-bits


def normal(key: int | Tensor, counter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers, one for each counter: the inverse distribution function of `uniform`.

    Computed in float64, so that CPU and GPU agree after rounding to float32 except in rare ties.
    """
    return torch.special.ndtri(uniform(key, counter, torch.float64)).to(dtype)


def permutation(key: int, n: int) -> np.ndarray:
    """The numbers 0 .. n-1 in an order that the key decides."""
    return torch.argsort(fold(key, torch.arange(n)), stable=True).numpy()


def sample_keys(seed: int, step: Tensor, sample: Tensor) -> Tensor:
    """One key for each sample of a batch, (B,) int64, from which every site of the model draws."""
    return fold(fold(key(seed, "step"), step), sample)


def element_index(shape: tuple[int, ...], box: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """The row-major index in a tensor of `shape` of each element of a box of it.

    >>> element_index((4, 3), ((1, 3), (0, 2)), torch.device("cpu")).tolist()
    [[3, 4], [6, 7]]
    """
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, (start, stop) in zip(shape, box, strict=True):
        index = index.unsqueeze(-1) * size + torch.arange(start, stop, device=device)
    return index


def initialize(model: nn.Module, seed: int, device: torch.device, dtype: torch.dtype = torch.float32,
               noise: float = 0.0) -> nn.Module:
    """Give every parameter of a model built on the meta device its memory and its first value.

    The model's `init_plan()` maps patterns of serial names to a standard deviation, "ones", "zeros" or `Uniform`;
    the first pattern that fits counts. noise: a standard deviation in the place of "zeros". A parameter's `placement` says which
    box of it is here. Raises `CourseError` for a parameter without a rule, and for buffers, which no layout and no checkpoint
    knows.
    """
    for name, _ in model.named_buffers():
        raise CourseError(f"{type(model).__name__} has a buffer, {name}, and layouts know parameters alone: compute it in "
                          "forward, or make it a parameter with requires_grad_(False)")
    plan = model.init_plan()                       # type: ignore[operator]
    made: dict[nn.Parameter, nn.Parameter] = {}    # tied weights stay one
    for module in model.modules():
        for leaf, old in list(module.named_parameters(recurse=False)):
            if old not in made:
                place = old.placement              # type: ignore[attr-defined]
                rule = next((rule for pattern, rule in plan.items() if fnmatchcase(place.name, pattern)), None)
                if rule is None:
                    raise CourseError(f"no rule in {type(model).__name__}.init_plan() fits parameter {place.name}: add one, "
                                      f"such as '{place.name}': 0.02")
                rule = noise if noise and rule == "zeros" else rule
                value = _first_value(rule, key(seed, "weights", place.name), place, device)
                made[old] = nn.Parameter(value.view(old.shape).to(dtype), old.requires_grad)
                made[old].placement = place        # type: ignore[attr-defined]
            setattr(module, leaf, made[old])
    return model


class Uniform(NamedTuple):
    """A rule of an `init_plan()`: evenly from -bound to bound."""

    bound: float


def _first_value(rule: float | str | Uniform, key: int, place: Any, device: torch.device) -> Tensor:
    shape = [stop - start for start, stop in place.box]
    if isinstance(rule, str):
        return torch.full(shape, {"zeros": 0.0, "ones": 1.0}[rule], dtype=torch.float64, device=device)
    element = element_index(place.global_shape, place.box, device)
    if isinstance(rule, Uniform):
        return rule.bound * (2 * uniform(key, element, torch.float64) - 1)
    return rule * normal(key, element, torch.float64)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros (int64's own shift repeats the sign)."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
