"""Configurations tried one after another, and what the compiler's report means."""

from types import SimpleNamespace

import pytest
import torch

from course.lab.instruments import kernel_tuning

CPU = torch.device("cpu")


@pytest.mark.parametrize("registers, shared_kb, warps, programs, limit", [
    (128, 64, 4, 3, "shared memory"), (255, 16, 4, 2, "registers"), (33, 1, 8, 6, "registers"), (16, 1, 4, 16, "threads")])
def test_report_names_what_limits_programs_per_sm(registers, shared_kb, warps, programs, limit):
    compiled = SimpleNamespace(_init_handles=lambda: None, n_regs=registers, n_spills=0,
                               metadata=SimpleNamespace(shared=1024 * shared_kb, num_warps=warps))
    report = kernel_tuning.compiler_report(compiled)
    assert (report["programs_per_sm"], report["limited_by"]) == (programs, limit)


def test_fastest_leaves_out_what_does_not_fit(monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(kernel_tuning.timing, "seconds", lambda run, device, laps: run() or times.pop())
    times = [1.0, 2.0]

    def launch(name):
        if name == "large":
            raise triton.runtime.errors.OutOfResources(300, 227, "shared memory")

    tried = kernel_tuning.tune(launch, ["large", "slow", "quick"], CPU)
    assert tried["slow"] == {"seconds": 2.0} and "shared memory" in tried["large"]["error"]
    assert kernel_tuning.fastest(tried) == "quick"
