"""What the driver says of clock and power while something runs."""

import itertools
import stat
import time

import pytest
import torch

from course.bench import gpu_clock, layout_harness, one_gpu
from course.parallel import World


def test_without_an_nvidia_gpu_it_says_nothing():
    with gpu_clock.clock_and_power(torch.device("cpu")) as found:
        pass
    assert found == {}


def test_medians_leave_out_what_the_driver_does_not_know():
    said = "1980, 350.10, [N/A]\n1500, 690.00, [N/A]\n1540, 692.50, [N/A]\n1540, 69"
    assert gpu_clock.medians(said) == {"clock_mhz": 1540.0, "power_w": 690.0}
    assert gpu_clock.medians("") == gpu_clock.medians("No devices were found") == {}


def test_the_driver_is_asked_for_this_gpu_until_the_end(tmp_path, monkeypatch):
    """A program in the driver's place, which would go on for ever."""
    said = tmp_path / "nvidia-smi"
    said.write_text('#!/bin/sh\necho "$@" > "$0.asked"\nwhile true; do echo "1600, 690.5, 700.00"; sleep 0.01; done\n')
    said.chmod(said.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"uuid": "12-34"}))
    with gpu_clock.clock_and_power(torch.device("cuda")) as found:
        while not (tmp_path / "nvidia-smi.asked").exists():
            pass
        time.sleep(0.3)
    assert found == {"clock_mhz": 1600.0, "power_w": 690.5, "power_limit_w": 700.0}
    assert "-i GPU-12-34" in (tmp_path / "nvidia-smi.asked").read_text()


def test_a_machine_without_the_drivers_program_says_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"uuid": "12-34"}))
    with gpu_clock.clock_and_power(torch.device("cuda")) as found:
        pass
    assert found == {}


class Library:
    """In the place of NVML: a counter in mJ that grows by 1500 with each question; errors as it returns them."""

    def __init__(self, unknown: int = 0, uncounted: int = 0):
        self.unknown, self.uncounted, self.asked, self.millijoules = unknown, uncounted, [], 7000

    def nvmlDeviceGetHandleByUUID(self, name, handle):
        self.asked.append(name)
        return self.unknown

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, value):
        value._obj.value, self.millijoules = self.millijoules, self.millijoules + 1500
        return self.uncounted


@pytest.fixture
def library(monkeypatch):
    """install(**errors) puts a `Library` in NVML's place."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"uuid": "12-34"}))

    def install(**errors):
        found = Library(**errors)
        monkeypatch.setattr(gpu_clock, "management_library", lambda: found)
        return found

    return install


def test_energy_is_what_the_counter_grew_by(library):
    found = library()
    with gpu_clock.energy_used(torch.device("cuda")) as used:
        assert used == {}
    assert used == {"joules": 1.5} and found.asked == [b"GPU-12-34"] * 2


@pytest.mark.parametrize("errors", [{"unknown": 6}, {"uncounted": 3}])
def test_a_gpu_that_does_not_count_says_nothing_of_energy(library, errors):
    library(**errors)
    with gpu_clock.energy_used(torch.device("cuda")) as used:
        pass
    assert used == {}


def test_without_a_gpu_or_its_driver_there_is_no_energy(monkeypatch):
    monkeypatch.setattr(gpu_clock, "management_library", lambda: None)
    for name in ("cpu", "cuda"):
        with gpu_clock.energy_used(torch.device(name)) as used:
            pass
        assert used == {}


def test_a_benchmark_writes_energy_beside_speed(library, monkeypatch):
    """Of a step of one GPU by its samples; of a layout's call on all GPUs; none on a CPU."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(gpu_clock, "ask", lambda device: None)
    library()
    steps = []
    ms, driver = one_gpu.timed(steps.append, itertools.repeat({}), cuda, True, 3)
    timed = len(steps) - 2 * one_gpu.WARM            # the rest is warmup
    assert ms > 0 and driver == {"joules_per_sample": pytest.approx(1.5 / (timed * 3))}
    monkeypatch.setattr(layout_harness, "ENERGY_S", 0.01)
    real = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda value, dtype, device: real(value, dtype=dtype))
    calls = []
    assert layout_harness.joules_per_call(lambda: calls.append(0), World(device=cuda), 2.0) == {"joules": 1.5 / 5}
    assert len(calls) == 5
    library(uncounted=3)
    assert layout_harness.joules_per_call(lambda: None, World(device=cuda), 2.0) == {}
    assert "joules" not in layout_harness.measure("a call", lambda: None, World(), laps=1)
