"""The three steps of a DiT's block: what is counted is what they move."""

import json

import pytest
import torch

from experiments import fused_kernels


def test_every_step_computes_what_its_name_says():
    x, y = torch.randn(2, 2, 3, 8)
    shift, scale, gate = torch.randn(3, 2, 8)
    found = {name: step(x, y, shift, scale, gate) for name, (step, _) in fused_kernels.steps(8).items()}
    sums = x + gate[:, None] * y
    normed = torch.nn.functional.layer_norm(sums, (8,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
    torch.testing.assert_close(found["gate, add"][0], sums)
    torch.testing.assert_close(found["gate, add, modulated LayerNorm"], (sums, normed))


@pytest.mark.slow
def test_it_measures_each_step(tmp_path):
    fused_kernels.main(tmp_path / "fused.json", small=True)
    rows = json.loads((tmp_path / "fused.json").read_text())["rows"]
    assert [row["case"] for row in rows] == [*fused_kernels.steps(8)] and all(row["compiled_ms"] > 0 for row in rows)
    assert rows[0]["bytes"] == 2 * 2 * 16 * 32 * 5
