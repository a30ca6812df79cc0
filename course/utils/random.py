"""Randomness as a pure function: a number depends on what it is for, never on what was drawn before.

Every random number here is a hash of a key and a counter (a counter-based generator in the sense of Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011; the hash is the finalizer of Steele et al.'s SplitMix64, OOPSLA 2014). So

    a weight        is a function of (seed, serial parameter name, index of the element),
    a dropped unit  is a function of (seed, step, sample id, site, position),
    a data order    is a function of (seed, epoch),

and a rank draws just the slice it holds: every parallel layout sees the same numbers, and resuming a run needs no generator
state.
"""

import hashlib
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

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
    bits = 52 if dtype == torch.float64 else 23    # one less than the mantissa, so that + 0.5 stays exact
    whole = _shift(fold(key, counter), 64 - bits)
    return (whole.to(dtype) + 0.5) * 2.0**-bits


def normal(key: int | Tensor, counter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers, one for each counter: the inverse distribution function of `uniform`.

    Computed in float64, so that CPU and GPU agree after rounding to float32 except in rare ties.
    """
    return torch.special.ndtri(uniform(key, counter, torch.float64)).to(dtype)


def permutation(key: int, n: int) -> np.ndarray:
    """The numbers 0 .. n-1 in an order that depends on the key."""
    return torch.argsort(fold(key, torch.arange(n)), stable=True).numpy()


def sample_keys(seed: int, step: Tensor, sample: Tensor) -> Tensor:
    """One key for each sample of a batch, (B,) int64, from which every site of the model draws."""
    return fold(fold(key(seed, "step"), step), sample)


def element_index(shape: tuple[int, ...], box: tuple[tuple[int, int], ...], device: torch.device,
                  flat: tuple[int, int] | None = None) -> Tensor:
    """The row-major indices, in a tensor of `shape`, of a box's elements; flat: only of this range of them, in the box's order.

    >>> element_index((4, 3), ((1, 3), (0, 2)), torch.device("cpu")).tolist()
    [[3, 4], [6, 7]]
    >>> element_index((4, 3), ((1, 3), (0, 2)), torch.device("cpu"), (1, 3)).tolist()
    [4, 6]
    """
    if flat is not None:
        places = torch.unravel_index(torch.arange(*flat, device=device), [stop - start for start, stop in box])
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (size, (start, stop)) in enumerate(zip(shape, box, strict=True)):
        if flat is None:
            index = index.unsqueeze(-1) * size + torch.arange(start, stop, device=device)
        else:
            index = index * size + start + places[dim]
    return index


class Uniform(NamedTuple):
    """A rule of an `init_plan()`: uniform from -bound to bound."""

    bound: float


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros (int64's own shift repeats the sign)."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
