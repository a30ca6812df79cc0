"""What the driver says of clock and power while something runs."""

import stat
import time

import torch

from course.bench import gpu_clock


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
