"""Whether a machine is said to be quiet."""

import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from course.lab.instruments import background_load
from course.training import trainer
from course.utils import machine


@pytest.mark.parametrize(("percent", "busy"), [([10.0, 20.0], 0.3), ([100.0, 90.0], 1.9), ([0.0, 0.0], 0.0)])
def test_busy_cores_are_added_up(monkeypatch, percent, busy):
    monkeypatch.setattr(psutil, "cpu_percent", lambda percpu: percent)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    found, cores = background_load.busy_cores(0.2)
    assert cores == 2 and found == pytest.approx(busy, abs=0.1)          # less what this process took meanwhile


def test_only_cores_that_this_process_may_use_count(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_percent", lambda percpu: [100.0, 100.0, 0.0, 100.0])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2}, raising=False)
    assert background_load.busy_cores(0.2) == (0.0, 1)


def test_children_are_no_other_programs():
    others = machine.OtherPrograms()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.4: pass"], check=True)
    assert others.own_seconds()[os.getpid()] - others.before[os.getpid()] > 0.35


@pytest.mark.parametrize(("busy", "cores", "said"), [(0.9, 2, True), (0.4, 2, False), (3.0, 16, False), (4.0, 16, True)])
def test_a_run_says_that_it_is_slower(busy, cores, said):
    text = trainer.load_warning(SimpleNamespace(busy_cores=lambda: busy, cores=range(cores)))
    assert text == (f"other programs keep {busy} of {cores} cores busy: this run is slower than on a quiet machine" if said
                    else "")


def test_a_program_that_computes_is_noticed():
    program = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert program.stdout and program.stdout.readline()
        assert background_load.busy_cores(0.5)[0] > 0.5            # of one core; more where others compute as well
    finally:
        program.kill()
        program.communicate()


@pytest.mark.parametrize(("busy", "cores", "words"), [(0.1, 2, "quiet enough"), (0.9, 2, "too slow"), (0.9, 64, "quiet enough")])
def test_it_says_so(monkeypatch, capsys, busy, cores, words):
    monkeypatch.setattr(background_load, "busy_cores", lambda: (busy, cores))
    background_load.report()
    text = capsys.readouterr().out
    assert words in text and f"keep {busy} of {cores} cores busy" in text
