"""Numbers that no atmosphere has are found, and no atmosphere is refused."""

import numpy as np
import pytest

from course.data.weather.layout import CHANNELS
from course.data.weather.plausibility import PlausibleRanges, channel_range

NAMES = list(CHANNELS)
WEATHER = PlausibleRanges.of(NAMES)
USUAL = {"t2m": 280, "sp": 98_000, "msl": 101_000, "t850": 270, "z1000": 700, "z850": 14_000, "z500": 55_000, "t500": 250,
         "z50": 200_000, "r500": 50, "r850": 60, "tcwv": 20}


def state(seed: int = 0) -> np.ndarray:
    """Twenty channels of a usual size, (20, 32, 64)."""
    base = np.array([USUAL.get(name, 0) for name in NAMES], np.float32)
    return (base[:, None, None] + np.random.default_rng(seed).standard_normal((20, 32, 64)) * 3).astype(np.float32)


def test_usual_weather_is_plausible():
    assert WEATHER.few(np.stack([state(i) for i in range(20)])) is None and WEATHER.whole(state()) == ""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [9.96921e36, 0, -9999, -32767, -32768, 1e20, np.inf, -2147483647, 3.4028235e38])
def test_a_fill_value_over_a_whole_field_is_found_by_a_few_points(name, value):
    spoiled = np.stack([state(), state(1)])
    spoiled[1, NAMES.index(name)] = value
    found = WEATHER.few(spoiled)
    assert found is not None and found[0] == 1 and found[1].startswith(f"{name} is {np.float32(value):g} at 2048 of 2048 points")


@pytest.mark.parametrize(("name", "value"), [("t2m", 0), ("msl", 9.96921e36), ("z1000", 1e20), ("u10", -9999), ("sp", 0)])
def test_a_single_point_out_of_range_is_found_in_a_whole_state(name, value):
    spoiled = state()
    spoiled[NAMES.index(name), 3, 5] = value
    assert WEATHER.whole(spoiled).startswith(f"{name} is {np.float32(value):g} at 1 of 2048 points")


def test_a_chunk_of_zeros_in_a_wind_is_found():
    spoiled = state()
    spoiled[0, :16] = 0
    assert WEATHER.whole(spoiled) == "u10 is 0 at 1024 of 2048 points"


@pytest.mark.parametrize(("name", "low", "high"), [
    ("t2m", 184.0, 329.9), ("msl", 87_000, 108_480), ("sp", 33_000, 107_000), ("u10", -113.2, 113.2), ("u500", -120, 120),
    ("z1000", -11_500, 7_000), ("z50", 175_000, 213_000), ("r500", -2, 180), ("tcwv", 0, 142)])
def test_records_of_the_planet_are_plausible(name, low, high):
    extreme = state()
    extreme[NAMES.index(name), 0, :2] = low, high
    assert WEATHER.whole(extreme) == ""
    assert channel_range(name)[0] < low and high < channel_range(name)[1]


def test_dry_or_saturated_air_over_most_of_the_globe_is_plausible():
    wet = state()
    wet[NAMES.index("r500"), :24] = 0
    wet[NAMES.index("r850"), :24] = 100
    wet[NAMES.index("tcwv"), :24] = 0
    assert WEATHER.whole(wet) == ""


def test_a_number_that_is_also_a_fill_value_is_plausible_at_one_point():
    low = state()
    low[NAMES.index("z1000"), 0, 0] = -9999
    assert WEATHER.whole(low) == ""


def test_nan_is_left_to_those_who_count_it():
    spoiled = state()
    spoiled[3] = np.nan
    assert WEATHER.few(spoiled[None]) is None


def test_channels_in_other_units_have_no_range_and_still_no_fill_values():
    """Such as data that were normalized before."""
    normalized = (state() - state().mean((1, 2), keepdims=True)) / 3
    other = PlausibleRanges.of(NAMES, normalized.mean((1, 2)))
    assert other.whole(normalized) == "" and WEATHER.whole(normalized) != ""
    normalized[2, 0, 0] = 9.96921e36
    assert other.whole(normalized).startswith("t2m is 9.96921e+36")


def test_unknown_channels_may_be_constant_unless_all_are():
    unknown = PlausibleRanges.of(["co2", "mask"])
    assert unknown.whole(np.stack([np.full((4, 8), 415.0), np.arange(32.0).reshape(4, 8)])) == ""
    assert unknown.whole(np.zeros((2, 4, 8))) == "co2 is 0 at 32 of 32 points, and 1 more channel the like"
