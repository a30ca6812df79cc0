"""The benchmarks of layouts run, on small sizes and CPU processes; their numbers mean nothing here."""

import json

import pytest
import torch

from course.bench import baselines, layout_harness, layouts
from course.models import GPTConfig
from course.models.experts import MoE
from course.utils.errors import CourseError


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ours", "theirs"), [("zero", "ZeRO-1", "ZeroRedundancyOptimizer"),
                                                    ("pp", "interleaved", "PyTorch 1F1B")])
def test_a_benchmark_compares_with_pytorch(kind, ours, theirs, tmp_path, capfd):
    layouts.everywhere(kind, tmp_path / "rows.json", small=True, profile=False)
    found = json.loads((tmp_path / "rows.json").read_text())
    rows = {row["case"]: row for row in found["rows"] if row["gpus"] == 2}
    assert all(rows[case]["ms"] > 0 and rows[case]["efficiency"] > 0 for case in (ours, theirs))
    assert found["command"] == f"course bench {kind} --out FILE" and ours in capfd.readouterr().out
    if kind == "zero":
        assert rows[ours]["optimizer_gb"] == pytest.approx(rows[ours]["theory_gb"], rel=0.03)


@pytest.mark.slow
def test_samples_are_gathered_in_all_ways(tmp_path):
    layouts.everywhere("sp", tmp_path / "rows.json", small=True, profile=False)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["case"] for row in rows] == ["small DiT, one by one", "small DiT, as one"]
    assert all(row["ms"] > 0 and row["sample_mb"] == pytest.approx(2e-6 * 16 * 64) for row in rows)


def test_it_says_that_it_needs_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(CourseError, match=r"course bench tp needs GPUs.*--small"):
        layouts.everywhere("tp", tmp_path / "rows.json", small=False, profile=False)


def test_it_says_that_one_gpu_shares_nothing_out(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(layouts.subprocess, "run", lambda *words, **how: None)        # zero has no rows on one GPU
    with pytest.raises(CourseError, match=r"course bench zero compares.*--small"):
        layouts.everywhere("zero", tmp_path / "rows.json", small=False, profile=False)


def test_a_call_is_profiled_without_a_gpu_too(capsys):
    layout_harness.profile("a sum", lambda: torch.ones(4) + 1)
    assert "a sum" in capsys.readouterr().out


def test_experts_in_plain_pytorch_give_the_same_outputs_and_gradients():
    """With what they are compared: else the comparison would say nothing."""
    outputs = []
    for plain in (False, True):
        torch.manual_seed(0)
        mixture = MoE(GPTConfig(dim=16, heads=2, experts=4, top_k=2, expert_width=12, mlp="gelu_tanh")).double()
        for parameter in mixture.parameters():
            torch.nn.init.normal_(parameter)
        x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
        if plain:
            baselines.plain_experts(mixture)
        y, penalty = mixture(x, {"real": torch.ones(3, 5, dtype=torch.bool)})
        (y.square().sum() + penalty.sum()).backward()
        outputs.append([y, x.grad, *(parameter.grad for parameter in mixture.parameters())])
    assert all(torch.allclose(mine, its, atol=1e-12) for mine, its in zip(*outputs, strict=True))
