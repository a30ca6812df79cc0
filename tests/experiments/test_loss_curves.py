"""Loss curves of number formats: the same start for all, gaps in means, and what does not run is said."""

import json

import pytest
import torch

import experiments.loss_curves
from course.lab.instruments import loss_curves

CPU = torch.device("cpu")


def test_every_case_has_the_same_batches_and_the_first_has_the_difficult_sample():
    one, again = list(loss_curves.batches(3)), list(loss_curves.batches(3))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(one, again, strict=True) for name in a)
    sizes = torch.stack([batch["target"].abs().amax((1, 2, 3)) for batch in one])          # (3, 8)
    assert sizes[0, 0] < 1e-4 and (sizes.flatten()[1:] > 0.1).all()


def test_a_gap_is_the_largest_of_means():
    """Losses 2 and 1 with 20 of noise that sums to nothing, beside 1 throughout."""
    noise = torch.tensor([0.5, -0.5]).repeat(10)
    curve = torch.cat([2 + noise, 1 + noise])
    assert loss_curves.means(curve).tolist() == [2, 1]
    assert loss_curves.gap(curve, torch.ones(40)) == 1 and loss_curves.gap(torch.ones(40), curve) == 0.5


def test_it_records_what_runs_and_says_why_the_rest_does_not(tmp_path, monkeypatch, capsys):
    names = ["fp16", "bf16", "tf32", "native fp8, delayed", loss_curves.FROZEN, "TE, block"]
    monkeypatch.setattr(experiments.loss_curves, "CASES", {name: loss_curves.CASES[name] for name in names})
    monkeypatch.setattr(experiments.loss_curves, "SMALL", loss_curves.MEAN)
    experiments.loss_curves.main(tmp_path / "curves.json", small=True)
    found, out = json.loads((tmp_path / "curves.json").read_text()), capsys.readouterr().out
    assert found["curves"].keys() == found["gap"].keys() == {"fp16", "bf16", "native fp8, delayed", loss_curves.FROZEN}
    assert all(len(curve) == loss_curves.MEAN for curve in found["curves"].values()) and found["gap"]["bf16"] == 0
    assert found["curves"]["native fp8, delayed"][0] == pytest.approx(found["curves"]["bf16"][0], rel=0.01)
    assert found["skipped"].keys() == {"tf32", "TE, block"} and "needs a GPU" in found["skipped"]["TE, block"]
    assert "TE, block" in out and "left out" in out and {"hardware", "torch", "date", "command"} <= found.keys()
