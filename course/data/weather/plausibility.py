"""Whether numbers can be an atmosphere's: what was never written reads as numbers, too.

Storage that nobody wrote gives 0 (HDF5, Zarr) or its format's fill value, such as 9.97e36 (NetCDF); other programs fill with
-9999 or 1e20. `PlausibleRanges` knows the channels by name and finds such numbers, in a whole state or in a few points of it.

The ranges are wide: the records in the World Meteorological Organization's Weather and Climate Extremes Archive
(https://wmo.asu.edu: 184.0 K and 329.9 K, 870 hPa and 1084 hPa, a gust of 113 m/s) and a margin; for geopotential all levels from
the ground up to 0.1 hPa, about 64 km. A number outside is no weather, real or simulated.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# least and most, by the name of a channel, or by the letter that it begins with, before its level in hPa
RANGES = {
    "u10": (-150, 150), "v10": (-150, 150), "t2m": (130, 370), "sp": (20_000, 130_000), "msl": (75_000, 125_000),
    "tcwv": (-20, 250),
}
LEVELS = {"u": (-300, 300), "v": (-300, 300), "t": (100, 400), "z": (-25_000, 650_000), "r": (-100, 400), "q": (-0.05, 0.5)}
UNKNOWN = (-np.inf, np.inf)
# NetCDF's default fills of each kind of number (netcdf.h, NC_FILL_...), and those that other programs like
FILLS = np.array([9.969209968386869e36, -32767, 65535, -2147483647, 4294967295, -9223372036854775806, 18446744073709551614,
                  1e20, -1e20, 1e30, -1e30, 1e34, -1e34, 1e35, -1e35, 1e36, -1e36, 3.4028234e38, -3.4028234e38, 1.7e38, -1.7e38,
                  -32768, -999, -9999, -99999, -999999, -9.99e8, 9.99e8, np.inf, -np.inf], np.float32)
HUGE = 1e15                                          # a fill that large is none of a state's numbers, however few there are
MOST_FILLS = 0.01                                    # of the points: a smaller fill may be a number like others, by chance
MOST_ZEROS = 0.25                                    # of the points of a known channel that is hardly ever exactly 0
FEW = 8                                              # points along each side of a state, where a few are looked at


@dataclass(frozen=True)
class PlausibleRanges:
    """What the channels of a data set can be."""

    names: tuple[str, ...]
    low: np.ndarray                                  # (C,), -inf where nothing is known
    high: np.ndarray                                 # (C,), inf where nothing is known
    known: np.ndarray                                # (C,) bool: by name
    dense: np.ndarray                                # (C,) bool: known, and hardly ever exactly 0

    @classmethod
    def of(cls, names: Sequence[str], typical: np.ndarray | None = None) -> "PlausibleRanges":
        """Of channels by name. typical: (C,), a mean or median of each; a channel for which it is out of range has other units
        than the course's, so its range says nothing."""
        low, high = np.array([channel_range(name) for name in names], np.float64).reshape(-1, 2).T
        known = np.isfinite(low)
        dry = np.array([name[0] not in "rq" and name != "tcwv" for name in names], bool)
        if typical is not None:
            other = (typical < low) | (typical > high)
            low, high = np.where(other, -np.inf, low), np.where(other, np.inf, high)
        return cls(tuple(names), low, high, known, known & dry)

    def few(self, states: np.ndarray) -> tuple[int, str] | None:
        """Which of some states (N, C, H, W) has wrong numbers, and what these are; None if a few points of each show none."""
        if not states.size:
            return None
        rows, columns = (max(1, n // FEW) for n in states.shape[2:])
        some = states[:, :, rows // 2::rows, columns // 2::columns]
        suspects = np.flatnonzero(self._wrong(some.reshape(*some.shape[:2], -1)).any(1))
        return next(((int(i), told) for i in suspects if (told := self.whole(states[i]))), None)

    def whole(self, state: np.ndarray) -> str:
        """What is wrong with a state (C, H, W), in words, such as `t2m is 0 at 12 of 128 points`; "" if nothing is."""
        points = state.reshape(len(state), -1)
        wrong = np.flatnonzero(self._wrong(points[None])[0])
        if not len(wrong):
            return ""
        i, x = wrong[0], points[wrong[0]]
        bad = (x < self.low[i]) | (x > self.high[i]) | np.isin(x, FILLS)
        bad = bad if bad.any() else x == (0 if (x == 0).any() else x[0])
        others = f", and {len(wrong) - 1} more channel{'s' * (len(wrong) > 2)} the like" if len(wrong) > 1 else ""
        return f"{self.names[i]} is {x[bad][0]:g} at {bad.sum()} of {len(x)} points{others}"

    def _wrong(self, points: np.ndarray) -> np.ndarray:
        """Which channels of which states (N, C, points) hold numbers that cannot be, (N, C). NaN is not judged here."""
        low, high = np.fmin.reduce(points, 2), np.fmax.reduce(points, 2)                # which leave out NaN
        wrong = (low < self.low) | (high > self.high)
        for at in zip(*np.nonzero(np.isin(low, FILLS) | np.isin(high, FILLS)), strict=True):
            fills = points[at][np.isin(points[at], FILLS)]
            wrong[at] |= len(fills) > MOST_FILLS * points.shape[2] or (np.abs(fills) >= HUGE).any()
        same = (low == high) & (points.shape[2] > 1)                    # over the whole globe: of no known channel
        return wrong | self.dense & ((points == 0).mean(2) > MOST_ZEROS) | same & (self.known | same.all(1, keepdims=True))


def channel_range(name: str) -> tuple[float, float]:
    """The least and the most that a channel of this name can be."""
    level = re.fullmatch(r"([a-z])[0-9]{1,4}", name)
    return RANGES.get(name) or (LEVELS.get(level[1], UNKNOWN) if level else UNKNOWN)
