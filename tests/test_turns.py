"""Of the slow tests that continuous integration runs by turns, each has its turn, and all turns have about as many."""

from tests.conftest import PARTS, names_of_turn

TURNS = range(1200, 1200 + max(PARTS.values()))


def test_every_slow_test_has_its_turn():
    names = [f"{start}test_{number}" for start in PARTS for number in range(50)]
    turns = [names_of_turn(names, turn) for turn in TURNS]
    assert set().union(*turns) == set(names)
    assert max(map(len, turns)) - min(map(len, turns)) <= len(PARTS)


def test_what_is_not_named_runs_in_each_turn():
    name = "tests/checkpoint/test_a.py::test_b"
    assert all(names_of_turn([name], turn) == {name} for turn in TURNS)
