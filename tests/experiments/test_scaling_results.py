"""What the recorded rows of the parallel layouts mean beside each other."""

import json

import pytest

from course.bench.results import load
from course.bench.scaling_efficiency import KINDS, judge
from experiments import scaling_results


def test_a_pipeline_is_measured_by_one_gpu():
    one, four = judge("pp", [{"case": "one GPU", "gpus": 1, "ms": 80.0},
                                        {"case": "interleaved", "gpus": 4, "ms": 25.0, "chunks": 2}])
    assert one["efficiency"] == 1 and four["efficiency"] == pytest.approx(0.8) and four["bubble"] == pytest.approx(0.2)
    assert four["theory"] == pytest.approx(3 / 35)


def test_compiled_is_measured_by_compiled_and_an_error_by_nothing():
    rows = [{"case": "one GPU", "gpus": 1, "ms": 10.0}, {"case": "one GPU, compiled", "gpus": 1, "ms": 8.0},
            {"case": "plain, compiled", "gpus": 2, "ms": 5.0}, {"case": "DTensor", "gpus": 2, "error": "no"}]
    judged = judge("tp", rows)
    assert judged[2]["efficiency"] == pytest.approx(0.8) and "efficiency" not in judged[3]


@pytest.mark.parametrize("kind", KINDS)
def test_what_ended_in_an_error_measures_nothing_and_stops_nothing(kind):
    case = {"dp": "none", "zero": "ddp"}.get(kind, "one GPU")
    rows = [{"case": case, "gpus": 2, "error": "out of memory"}, {"case": "one GPU", "gpus": 1, "error": "out of memory"},
            {"case": "ring", "gpus": 2, "tokens": 8192, "ms": 5.0}]
    assert judge(kind, [dict(row) for row in rows]) == rows


@pytest.mark.parametrize("kind", KINDS)
def test_the_recorded_results_are_what_it_makes_of_their_rows(kind):
    recorded = load(f"{kind}_h200")
    added = ("efficiency", "bubble", "theory")
    bare = [{key: value for key, value in row.items() if key not in added} for row in recorded["rows"]]
    assert judge(kind, bare) == recorded["rows"] and recorded["meaning"] == scaling_results.MEANING[kind]


def test_files_of_any_number_of_gpus_are_joined(tmp_path):
    """In order of GPUs, and without those of a kind whose name begins alike."""
    for name, gpus in (("tp_16", 16), ("tp_2", 2), ("tp_1", 1), ("tp_vit_1", 1)):
        row = {"case": "plain" if gpus > 1 else "one GPU", "gpus": gpus, "ms": 8.0 / gpus}
        (tmp_path / f"{name}.json").write_text(json.dumps({"hardware": name, "rows": [row]}))
    scaling_results.main(tmp_path, tmp_path / "found")
    assert [row["gpus"] for row in json.loads((tmp_path / "found/tp_h200.json").read_text())["rows"]] == [1, 2, 16]
    assert [row["gpus"] for row in json.loads((tmp_path / "found/tp_vit_h200.json").read_text())["rows"]] == [1]
