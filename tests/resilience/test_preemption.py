"""Stopping: what is left running when a run's loop is over. Whole runs that are stopped: test_train.py, test_faults.py."""

import threading
import time

from course.parallel import Axis
from course.resilience import preemption


def test_no_thread_is_at_the_store_when_the_loop_is_over(monkeypatch):
    """One that is in PyTorch's C++ when Python ends aborts the process: "terminate called without an active exception"."""
    asking, asked = threading.Event(), []

    def store() -> bool:
        asking.set()
        time.sleep(0.3)                              # a store that is slow to answer
        asked.append(threading.current_thread())
        return False

    monkeypatch.setattr(preemption, "LOOK", 0.01)
    monkeypatch.setattr(preemption, "launched", lambda: True)
    monkeypatch.setattr(preemption, "abandoned", store)
    with preemption.StopSignal(Axis("world", 2)):
        assert asking.wait(10)
    assert asked and not any(thread.is_alive() for thread in asked)
