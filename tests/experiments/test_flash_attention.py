"""FlashAttention measured: what counts as a rate, and a tiny run."""

import json

import pytest
import torch

from experiments import flash_attention

CPU = torch.device("cpu")


def test_rate_counts_half_the_matmuls_if_causal():
    whole, half = (flash_attention.Attention((1, 2, 8, 16), causal, CPU).row("lesson", "forward", 1e-6)
                   for causal in (False, True))
    assert whole["tflops"] == pytest.approx(2 * 2 * 2 * 8 * 8 * 16 / 1e-6 / 1e12)                 # q k' and p v, 2 FLOP each
    assert half["tflops"] == pytest.approx(whole["tflops"] / 2)


@pytest.mark.slow
def test_it_measures_every_kernel_and_its_error(tmp_path):
    pytest.importorskip("triton")
    flash_attention.main(tmp_path / "flash.json", small=True)
    rows = json.loads((tmp_path / "flash.json").read_text())["rows"]
    best = [row for row in rows if row.get("best")]
    assert [(row["causal"], row["kernel"]) for row in best] == [(causal, kernel) for causal in (False, True)
                                                                for kernel in ("forward", "backward")]
    assert all(row["error"] < 0.01 for row in best)
    assert sum(row.get("fastest", False) for row in rows) == 2 * 3      # one configuration of each kernel, causal and not
    assert {row["who"] for row in rows} == {"lesson", "flash"}
