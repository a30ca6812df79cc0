"""Ways to a result that are tried out: which are looked at, which measured, and what a lap is."""

from unittest import mock

import pytest
import torch

from course import trial


class Clock:
    """Ways to ones, or, of these numbers, to zeros; each takes the seconds of its laps in turn, the last for ever."""

    def __init__(self, seconds, wrong=()):
        self.seconds, self.laps = [list(found) for found in seconds], []
        self.ways = [mock.Mock(return_value=torch.full((3,), float(number not in wrong))) for number in range(len(seconds))]

    def lap(self, way, calls):
        number = self.ways.index(way)
        self.laps.append((number, calls))
        return self.seconds[number].pop(0) if len(self.seconds[number]) > 1 else self.seconds[number][0]


@pytest.fixture
def clocked(monkeypatch):
    def use(*given, **more):
        clock = Clock(*given, **more)
        monkeypatch.setattr(trial, "lap", clock.lap)
        return clock

    return use


def test_what_counts_is_a_lap_after_the_clock_has_settled(clocked, monkeypatch):
    """One call of a second in a look of two; laps of four seconds: each way alone, twice, and the second counts."""
    monkeypatch.setattr(trial, "LAP", 2.0)
    monkeypatch.setattr(trial, "SETTLED", 4.0)
    clock = clocked([[1.0, 1.0, 2.0, 9.0, 3.0, 9.0, 5.0], [1.0, 1.0, 7.0, 2.0, 7.0, 4.0]])
    assert trial.compare(clock.ways) == {0: 4.0, 1: 3.0}
    looks = [(0, 3), (0, 2), (1, 2), (0, 2), (1, 2)]
    assert clock.laps == [*looks, *[(0, 2), (0, 2), (1, 4), (1, 4)] * 2]


def test_few_are_measured_those_that_seemed_fastest_at_the_last_look(clocked):
    """Whatever they seemed at first; the first way is, however slow."""
    clock = clocked([[9.0], *[[0.1, 2.0 + number] for number in range(8)], [5.0, 1.0]])
    found = trial.compare(clock.ways)
    assert set(found) == {0, 1, 2, 3, 4, 5, 9} and len(found) == trial.FEW + 1


def test_what_gives_other_bits_is_left_out(clocked):
    clock = clocked([[2.0], [1.0], [1.5]], wrong=[1])
    assert trial.compare(clock.ways) == {0: 2.0, 2: 1.5}


@pytest.mark.parametrize(("times", "best"), [
    ({0: 1.0}, 0), ({0: 1.0, 3: 0.9}, 3), ({0: 1.0, 3: 0.995}, 0), ({0: 1.0, 2: 0.98, 5: 0.97}, 5)])
def test_a_change_has_to_gain_a_percent(times, best):
    assert trial.quickest(times) == best
