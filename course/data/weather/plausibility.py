"""Check that values are physically plausible: data that was never written also reads as numbers.

Unwritten storage reads as 0 (HDF5, Zarr) or as the format's fill value, such as 9.97e36 (NetCDF); other programs fill with
-9999 or 1e20. `PlausibleRanges` knows the channels by name and finds such values in a whole state or in a few of its points.

The ranges are the records in the World Meteorological Organization's Weather and Climate Extremes Archive (https://wmo.asu.edu:
184.0 K and 329.9 K, 870 hPa and 1084 hPa, a gust of 113 m/s) plus a wide margin. For geopotential they cover all levels from
the ground up to 0.1 hPa, about 64 km. A value outside is no weather, real or simulated.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# (least, most): RANGES by channel name, LEVELS by the letter before the level in hPa
RANGES = {
    "u10": (-150, 150), "v10": (-150, 150), "t2m": (130, 370), "sp": (20_000, 130_000), "msl": (75_000, 125_000),
    "tcwv": (-20, 250),
}
LEVELS = {"u": (-300, 300), "v": (-300, 300), "t": (100, 400), "z": (-25_000, 650_000), "r": (-100, 400), "q": (-0.05, 0.5)}
UNKNOWN = (-np.inf, np.inf)
# NetCDF's default fill values of each dtype (netcdf.h, NC_FILL_...), and common ones of other programs
FILLS = np.array([9.969209968386869e36, -32767, 65535, -2147483647, 4294967295, -9223372036854775806, 18446744073709551614,
                  1e20, -1e20, 1e30, -1e30, 1e34, -1e34, 1e35, -1e35, 1e36, -1e36, 3.4028234e38, -3.4028234e38, 1.7e38, -1.7e38,
                  -32768, -999, -9999, -99999, -999999, -9.99e8, 9.99e8, np.inf, -np.inf], np.float32)
HUGE = 1e15                                          # a fill value this large is always an error, however few there are
MOST_FILLS = 0.01                                    # fraction of the points: a smaller fill value may occur by chance
MOST_ZEROS = 0.25                                    # fraction of the points, in a channel that is rarely exactly 0
FEW = 8                                              # points along each side of a state that `few` checks


@dataclass(frozen=True)
class PlausibleRanges:
    """The plausible range of each channel of a data set."""

    names: tuple[str, ...]
    low: np.ndarray                                  # (C,), -inf where nothing is known
    high: np.ndarray                                 # (C,), inf where nothing is known
    known: np.ndarray                                # (C,) bool: whether the name is known
    dense: np.ndarray                                # (C,) bool: known and rarely exactly 0

    @classmethod
    def of(cls, names: Sequence[str], typical: np.ndarray | None = None) -> "PlausibleRanges":
        """The ranges of channels by name. typical: (C,), a mean or median of each channel; if it is out of range, the channel
        has other units than the course's, and its range is ignored."""
        low, high = np.array([channel_range(name) for name in names], np.float64).reshape(-1, 2).T
        known = np.isfinite(low)
        dry = np.array([name[0] not in "rq" and name != "tcwv" for name in names], bool)
        if typical is not None:
            other = (typical < low) | (typical > high)
            low, high = np.where(other, -np.inf, low), np.where(other, np.inf, high)
        return cls(tuple(names), low, high, known, known & dry)

    def few(self, states: np.ndarray) -> tuple[int, str] | None:
        """(index, description) of the first of states (N, C, H, W) with implausible values; checks a few points of each."""
        if not states.size:
            return None
        rows, columns = (max(1, n // FEW) for n in states.shape[2:])
        some = states[:, :, rows // 2::rows, columns // 2::columns]
        suspects = np.flatnonzero(self._wrong(some.reshape(*some.shape[:2], -1)).any(1))
        return next(((int(i), told) for i in suspects if (told := self.whole(states[i]))), None)

    def whole(self, state: np.ndarray) -> str:
        """What is wrong with a state (C, H, W), such as `t2m is 0 at 12 of 128 points`; "" if nothing is."""
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
        """Which channels of states (N, C, points) hold implausible values: (N, C) bool. Ignores NaN."""
        low, high = np.fmin.reduce(points, 2), np.fmax.reduce(points, 2)                # ignore NaN
        wrong = (low < self.low) | (high > self.high)
        for at in zip(*np.nonzero(np.isin(low, FILLS) | np.isin(high, FILLS)), strict=True):
            fills = points[at][np.isin(points[at], FILLS)]
            wrong[at] |= len(fills) > MOST_FILLS * points.shape[2] or (np.abs(fills) >= HUGE).any()
        same = (low == high) & (points.shape[2] > 1)                    # constant over the globe: no known channel is
        return wrong | self.dense & ((points == 0).mean(2) > MOST_ZEROS) | same & (self.known | same.all(1, keepdims=True))


def channel_range(name: str) -> tuple[float, float]:
    """(least, most) plausible value of a channel by its name."""
    level = re.fullmatch(r"([a-z])[0-9]{1,4}", name)
    return RANGES.get(name) or (LEVELS.get(level[1], UNKNOWN) if level else UNKNOWN)
