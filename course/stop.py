"""Stopping when asked to: SIGTERM and SIGUSR1 (a batch system's warnings) and Ctrl-C save the run and end it."""

import signal
from types import FrameType

import torch
import torch.distributed as dist

from course.parallel.mesh import Axis

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Stop:
    """Listens for stop signals while a run is in its loop; a second Ctrl-C interrupts at once."""

    def __init__(self, everyone: Axis):
        self.everyone = everyone
        self.name = ""                               # of the signal that came to this rank
        self._asked = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None

    def __enter__(self) -> "Stop":
        self._old = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        if self._pending is not None:
            self._pending.wait()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.name:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name

    def agreed(self) -> bool:
        """Whether any rank was asked to stop; every rank calls it once a step and all get the same answer.

        The ranks' answers travel while the next step computes, so all stop one step after the first heard.
        """
        if self.everyone.size == 1:
            return bool(self.name)
        asked = False
        if self._pending is not None:
            self._pending.wait()
            asked = bool(self._asked.item())
        self._asked = torch.tensor([int(bool(self.name))], dtype=torch.int32)
        self._pending = dist.all_reduce(self._asked, dist.ReduceOp.MAX, group=self.everyone.group, async_op=True)
        return asked
