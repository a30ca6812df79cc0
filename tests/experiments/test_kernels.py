"""Lesson 19's kernels measured: a tiny run, and what counts as an error."""

import json

import pytest
import torch

from course.lab.instruments import kernel_speed
from experiments import kernels

pytest.importorskip("triton")


def test_the_error_is_that_of_the_worst_result():
    one, two = torch.tensor([3.0, 4.0]), torch.tensor([1.0])
    assert kernels.error(lambda: (one[None], 1.5 * two), lambda: (one, two)) == pytest.approx(0.5)


@pytest.mark.slow
def test_it_measures_every_kernel_and_its_error(tmp_path):
    kernels.main(tmp_path / "kernels.json", small=True)
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert [row["kernel"] for row in rows if row["who"] == "lesson"] == [*kernel_speed.MATRIX_WORK]
    assert all(row["error"] < 0.01 and row["gb_per_s"] > 0 for row in rows)
    assert {row["kernel"] for row in rows if row["who"] == "library"} == {"fused-gelu", "add-norm", "add-norm-backward"}
