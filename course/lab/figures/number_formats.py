"""Figures of number formats: their range and resolution, and where the numbers of real tensors fall."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from course.lab.figures.style import MARKS, label, name_rows, panel
from course.utils.colors import FORMATS as FORMAT_COLORS
from course.utils.colors import GRAY


@dataclass(frozen=True)
class Format:
    """A binary floating-point format, given by its bits."""

    exponent: int                                    # bits
    mantissa: int
    top: float = 0.0                                 # the largest number, where the format does not follow IEEE 754

    @property
    def bias(self) -> int:
        """The bias: the stored exponent minus this is the exponent."""
        return 2 ** (self.exponent - 1) - 1

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return self.top or 2.0**self.bias * (2 - 2.0**-self.mantissa)

    @property
    def normal(self) -> float:
        """The smallest normal number."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        """The smallest positive number, which is subnormal: below `normal` the spacing stays constant."""
        return self.normal * 2.0**-self.mantissa


# E4M3 has no infinity and one NaN, so it reaches 448 where IEEE's rules would end at 240 (arXiv:2209.05433, table 1)
FORMATS = {"fp32": Format(8, 23), "tf32": Format(8, 10), "bf16": Format(8, 7), "fp16": Format(5, 10), "E5M2": Format(5, 2),
           "E4M3": Format(4, 3, 448.0)}


def numbers(kind: Format, low: float, high: float) -> np.ndarray:
    """All numbers of a format from `low` (positive) to `high`."""
    found = []
    power = max(np.floor(np.log2(low)), np.log2(kind.normal))
    if low < kind.normal:                            # subnormal numbers
        found.append(kind.smallest * np.arange(1, 2**kind.mantissa))
    while 2.0**power <= min(high, kind.largest):
        found.append(2.0**power * (1 + np.arange(2**kind.mantissa) / 2**kind.mantissa))
        power += 1
    every = np.concatenate(found)
    return every[(every >= low) & (every <= min(high, kind.largest))]


def ranges(names: Sequence[str] = tuple(FORMATS)) -> Figure:
    """A bar per format from its smallest number to its largest, in powers of two; pale where numbers are subnormal."""
    figure, axis = panel(8, 0.42 * len(names) + 1.2)
    for row, name in enumerate(names):
        kind = FORMATS[name]
        low, normal, high = np.log2([kind.smallest, kind.normal, kind.largest])
        axis.barh(row, high - normal, left=normal, color=FORMAT_COLORS[name], height=0.7)
        axis.barh(row, normal - low, left=low, color=FORMAT_COLORS[name], alpha=0.35, height=0.7)
        axis.text(high + 3, row, f"{kind.exponent} + {kind.mantissa} bits", va="center", fontsize=9)
    name_rows(axis, names)
    axis.set_xlim(-155, 175)
    axis.set_xlabel("powers of two")
    axis.grid(alpha=0.3, axis="x")
    axis.set_title("From the smallest number to the largest; bits of exponent + mantissa; pale: fewer bits are left", fontsize=10)
    return figure


def steps(names: Sequence[str] = ("bf16", "E4M3", "E5M2"), low: float = 1.0, high: float = 8.0) -> Figure:
    """The numbers of some formats from `low` to `high`, as ticks."""
    figure, axis = panel(8, 0.5 * len(names) + 1.1)
    for row, name in enumerate(names):
        axis.vlines(numbers(FORMATS[name], low, high), row - 0.35, row + 0.35, color=FORMAT_COLORS[name],
                    linewidth=0.6 if FORMATS[name].mantissa > 4 else 2)
    name_rows(axis, names)
    label(axis, x="the numbers that there are", title="Steps double with each power of two")
    return figure


def exponents(x: Tensor, low: int = -60, high: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """(powers of two, percent of x's elements from each power to the next); zeros count only in the total."""
    magnitudes = x.detach().double().abs().flatten()
    powers = magnitudes[magnitudes > 0].log2().floor().clamp(low, high).long() - low
    counts = torch.bincount(powers, minlength=high - low + 1)
    return np.arange(low, high + 1), 100 * counts.numpy() / max(1, magnitudes.numel())


def magnitudes(groups: Mapping[str, Tensor], bars: Mapping[str, float], title: str = "", low: int = -60,
               high: int = 20) -> Figure:
    """The magnitudes of some tensors' elements, in powers of two; below, the range of formats.

    `bars`: format -> the scale that multiplies tensors before the cast. It shifts the format's bar the other way.
    """
    figure = Figure(figsize=(8, 3.2 + 0.3 * len(bars)), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 0.5 * len(bars) + 0.3])
    for (name, x), (_, color) in zip(groups.items(), cycle(MARKS)):
        powers, percent = exponents(x, low, high)
        above.step(powers, percent, where="post", color=color, label=name)
    above.set_ylabel("% of the numbers")
    above.legend(fontsize=9)
    above.grid(alpha=0.3)
    for row, (name, scale) in enumerate(bars.items()):
        kind = FORMATS[name.split(",")[0]]
        start, normal, end = np.clip(np.log2([kind.smallest, kind.normal, kind.largest]) - np.log2(scale), low, high)
        color = FORMAT_COLORS[name.split(",")[0]]
        below.barh(row, end - normal, left=normal, color=color, height=0.7)
        below.barh(row, normal - start, left=start, color=color, alpha=0.35, height=0.7)
    below.set_yticks(range(len(bars)), list(bars), fontsize=9)
    below.set_ylim(len(bars) - 0.5, -0.5)
    below.set_xlim(low, high)
    below.set_xlabel("powers of two")
    above.set_title(title, fontsize=10)
    return figure


def amax_and_limits(amaxes: Sequence[float], allowed: Mapping[str, Sequence[float]], title: str = "") -> Figure:
    """A tensor's amax per step, and the largest number that each recipe's scale can represent in that step."""
    figure, axis = panel(8, 3.4)
    axis.semilogy(range(1, len(amaxes) + 1), amaxes, "o", color=GRAY, markersize=4, label="amax of the tensor in this step")
    for (name, level), (_, color) in zip(allowed.items(), cycle(MARKS)):
        axis.step(range(1, len(level) + 1), level, where="mid", color=color, label=name)
    label(axis, x="step", y="magnitude", title=title, grid="major")
    axis.legend(fontsize=9)
    return figure
