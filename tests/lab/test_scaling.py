"""Recorded times as a table."""

from course.lab.figures import scaling_table

ROWS = [{"case": "one GPU", "gpus": 1, "ms": 80.0, "memory_gb": 9.0}, {"case": "plain", "gpus": 2, "ms": 50.0, "memory_gb": 6.0},
        {"case": "plain", "gpus": 4, "ms": 25.0, "memory_gb": 4.0}, {"case": "theirs", "gpus": 4, "error": "it failed"}]


def test_cases_have_a_column_for_each_number_of_gpus_and_their_efficiency():
    found = scaling_table.table(ROWS, lambda case: "one GPU")
    assert list(found) == ["one GPU", "plain", "theirs"]
    assert found["plain"] == {"ms on 1": "", "ms on 2": 50.0, "ms on 4": 25.0, "efficiency on 4, %": 80.0, "GB on 4": 4.0}


def test_what_could_not_be_measured_stays_empty():
    found = scaling_table.table(ROWS, lambda case: "one GPU")
    assert set(found["theirs"].values()) == {""} and found["one GPU"]["ms on 1"] == 80.0
    assert scaling_table.table(ROWS, lambda case: "nothing")["plain"]["efficiency on 4, %"] == ""
