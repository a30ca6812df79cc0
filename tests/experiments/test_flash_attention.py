"""FlashAttention measured: what counts as a rate, what the compiler's report means, and a tiny run."""

import json
from types import SimpleNamespace

import pytest
import torch

from experiments import flash_attention

CPU = torch.device("cpu")


def test_rate_counts_half_the_matmuls_if_causal():
    whole, half = (flash_attention.Attention((1, 2, 8, 16), causal, CPU).row("lesson", "forward", 1e-6)
                   for causal in (False, True))
    assert whole["tflops"] == pytest.approx(2 * 2 * 2 * 8 * 8 * 16 / 1e-6 / 1e12)                 # q k' and p v, 2 FLOP each
    assert half["tflops"] == pytest.approx(whole["tflops"] / 2)


@pytest.mark.parametrize("registers, shared_kb, warps, programs, limit", [
    (128, 64, 4, 3, "shared memory"), (255, 16, 4, 2, "registers"), (32, 1, 8, 8, "registers"), (16, 1, 4, 16, "threads")])
def test_report_names_what_limits_programs_per_sm(registers, shared_kb, warps, programs, limit):
    compiled = SimpleNamespace(_init_handles=lambda: None, n_regs=registers, n_spills=0,
                               metadata=SimpleNamespace(shared=1024 * shared_kb))
    report = flash_attention.compiler_report(compiled, warps)
    assert (report["programs_per_sm"], report["limited_by"]) == (programs, limit)


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
