"""Packed attention measured: a tiny run, in which both compute the same gradients."""

import json

from experiments import packed_attention


def test_it_measures_both_and_how_far_they_differ(tmp_path):
    packed_attention.main(tmp_path / "packed.json", small=True)
    rows = json.loads((tmp_path / "packed.json").read_text())["rows"]
    assert [row["causal"] for row in rows] == [False, True]
    assert all(row["difference"] < 0.01 and row["packed_ms"] > 0 and row["pytorch_ms"] > 0 for row in rows)
