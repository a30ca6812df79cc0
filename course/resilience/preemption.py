"""Stop on request: SIGTERM and SIGUSR1 (a batch system's warnings) and Ctrl-C save the run and end it.

If another rank fails, end this one within seconds. It may be waiting for the other inside CUDA, where no signal ends it, because
its signal handlers only set a flag.
"""

import os
import signal
import sys
import threading
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from course.parallel.mesh import Axis, abandoned, launched

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
GO_ON = 75                                           # exit status of a stopped run that can go on: EX_TEMPFAIL of sysexits.h
LOOK, GRACE = 0.5, 2.0                               # seconds between checks of the other ranks; seconds for our own exception
STORE = 5.0                                          # seconds to wait for the store's answer


class StopSignal:
    """Listens for stop signals while a run is in its loop; a second Ctrl-C interrupts at once."""

    def __init__(self, everyone: Axis):
        self.everyone = everyone
        self.name = ""                               # of the signal that came to this rank
        self._asked = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None
        self._stopped = False

    def __enter__(self) -> "StopSignal":
        self._old = {number: signal.signal(number, self._hear) for number in SIGNALS}
        if self.everyone.size > 1 and launched():
            self._watcher = threading.Thread(target=self._watch, name="stop", daemon=True)
            self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        if self._watcher is not None:                # a thread that is in the store's C++ when Python ends aborts the process
            self._watcher.join(STORE)
        if self._stopped and launched():             # a launcher whose first process is gone may send more: all end alike
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)
            return
        if error is not None and self.everyone.size > 1 and launched():
            return                                   # keep listening: a launcher's SIGTERM must not cut short what is told
        for number, handler in self._old.items():
            signal.signal(number, handler)
        if self._pending is not None and error is None:
            self._pending.wait()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.name:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        if number == signal.SIGINT and self.everyone.rank == 0:         # at once: a step may take seconds
            os.write(2, b"stopping after this step, and saving; Ctrl-C again stops at once and saves nothing\n")

    def _watch(self) -> None:
        """End this process soon after another one has failed."""
        while not self._over.wait(LOOK):
            if abandoned() and not self._over.wait(GRACE):
                print("another rank has failed: this one ends, too", file=sys.stderr, flush=True)
                os._exit(1)

    def agreed(self) -> bool:
        """Whether any rank was asked to stop; every rank calls it once a step and all get the same answer.

        The ranks' answers travel while the next step computes, so all stop one step after the first heard.
        """
        if self.everyone.size == 1:
            self._stopped = bool(self.name)
            return self._stopped
        if self._pending is not None:
            self._pending.wait()
            self._stopped = bool(self._asked.item())
        self._asked = torch.tensor([int(bool(self.name))], dtype=torch.int32)
        self._pending = dist.all_reduce(self._asked, dist.ReduceOp.MAX, group=self.everyone.group, async_op=True)
        return self._stopped
