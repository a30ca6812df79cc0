"""What a process knows of its machine and of itself."""

import sys
from types import SimpleNamespace

import ipykernel.kernelapp
import pytest

from course.parallel import World
from course.resilience.stall_watchdog import Watchdog
from course.utils import machine


@pytest.mark.parametrize("kernel", [True, False])
def test_only_a_kernel_is_a_notebook_not_who_has_imported_ipykernel(tmp_path, monkeypatch, kernel):
    assert "ipykernel.kernelapp" in sys.modules
    monkeypatch.setattr(ipykernel.kernelapp, "IPKernelApp", SimpleNamespace(initialized=lambda: kernel))
    assert machine.in_notebook() == kernel
    assert Watchdog(tmp_path, World(0, 1), 60.0).watching() != kernel
