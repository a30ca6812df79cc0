"""The watchdog of a run: its time, memory, processes, output and disk, and an end for all of it."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from course.lab.held import held, memory, room
from course.lab.scratch import size, strewn

T = TypeVar("T")
MARK = "COURSE_SANDBOX"                              # the environment variable that marks a run's processes
GRACE = 3.0                                          # seconds that killing may take
LOOK = 0.05                                          # seconds between two looks of the watchdog


@dataclass(frozen=True)
class Limits:
    """What a run may use."""

    seconds: float = 60.0                            # wall clock, since the start or, where it says when it has begun, since then
    starting: float = 300.0                          # that it may take until then: on a busy machine, on a slow disk
    gigabytes: float = 4.0                           # memory of all its processes together
    processes: int = 64                              # at any one time
    files: int = 4096                                # that they have open, pipes and sockets among them
    output: int = 1_000_000                          # bytes of stdout and stderr that are kept; 20 times that ends it
    disk: float = 1.0                                # gigabytes in the scratch folder, old ones too, and in deleted files


@dataclass
class Watched:
    """A run, and what the watchdog knows of it."""

    process: subprocess.Popen[bytes]
    pipe: int | None                                 # what it prints, until every writer has closed it or is gone
    scratch: Path
    limits: Limits
    mark: str
    user: int                                        # 0: not one of its own
    start: float
    spare: int                                       # processes that are bubblewrap's
    family: set[psutil.Process]                      # its processes, those of bubblewrap among them
    started: int | None = None                       # the pipe from which one byte says that it has begun
    begun: float | None = None                       # when that was seen
    room: Mapping[str, int] = field(default_factory=dict)        # that there was when it started
    late: bool = False                               # it is beyond a limit on time
    printed: bytearray = field(default_factory=bytearray)
    volume: int = 0                                  # bytes printed so far
    deleted: int = 0                                 # bytes of deleted files that it held at the last look

    def wait(self) -> str:
        """Wait for the end of the run, or of our patience; the sentence for the latter."""
        looks = 0
        while self.process.poll() is None:
            began = time.monotonic()
            excess = self.excess(thorough=looks % 20 == 0)
            if excess:
                return excess
            looks += 1
            # where there is much to look at, look less often: a quarter of a core will do
            self.listen(min(1.0, max(LOOK, 3 * (time.monotonic() - began))))
        return ""

    def listen(self, seconds: float) -> None:
        """Take what is printed for so long, or until the run ends."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.volume <= 20 * self.limits.output:
            if self.pipe is None:
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(left)
                return
            poll = select.poll()                     # select.select fails where a notebook has a thousand files open
            poll.register(self.pipe, select.POLLIN)
            if poll.poll(1000 * left):
                piece = os.read(self.pipe, 1 << 16)
                self.volume += len(piece)
                self.printed += piece[:max(0, self.limits.output - len(self.printed))]
                self.pipe = self.pipe if piece else None

    def excess(self, thorough: bool) -> str:
        """The sentence for a limit that the run is beyond, if any; disk, open files and strays only if `thorough`."""
        limits = self.limits
        if text := self.overtime():
            self.late = True
            return text
        self.gather(thorough)
        if len(self.family) - self.spare > limits.processes:
            return f"it started more than {limits.processes} processes and was stopped"
        if sum(map(_memory, self.family)) > limits.gigabytes * 1e9:
            return f"it took more than {limits.gigabytes} GB of memory and was stopped"
        return self.hoard() or self.overflow() if thorough else self.overflow(disk=False)

    def overtime(self) -> str:
        """The sentence for too much time. What was written to a pipe nobody can take back."""
        now, limits = time.monotonic(), self.limits
        if self.begun is None and (self.started is None or ready(self.started)):
            self.begun = now if self.started is not None else self.start
        if self.begun is None:
            late = now - self.start > limits.starting
            return f"it had not started after {limits.starting:g} seconds: is this machine too busy?" if late else ""
        return f"it ran for more than {limits.seconds:g} seconds and was stopped" if now - self.begun > limits.seconds else ""

    def hoard(self) -> str:
        """The sentence for too many open files, and for more on disk than may be in files that are deleted or out of sight."""
        limits = self.limits
        if sys.platform != "linux":
            return ""
        found = held(process.pid for process in self.family)
        self.deleted = found.bytes
        if found.endless:
            return "it has more files and pieces of memory than can be looked through, and was stopped"
        if found.descriptors > limits.files:
            return f"it opened more than {limits.files} files at the same time and was stopped"
        now = room(self.room)
        lost = max((before - now.get(place, before) for place, before in self.room.items()), default=0)
        if found.doubts and self.begun is not None and lost > limits.disk * 1e9:     # files also travel while ranks start
            return f"it wrote more than {limits.disk} GB to disk, to judge by the space left: it has files that cannot be counted"
        return ""

    def overflow(self, disk: bool = True) -> str:
        """The sentence for too much printed or written."""
        limits = self.limits
        if self.volume > 20 * limits.output:
            return f"it printed more than {20 * limits.output / 1e6:g} MB and was stopped"
        elsewhere = strewn(self.user, self.scratch) if disk and self.user and not self.spare else []     # bubblewrap forbids it
        if disk and self.deleted + size(self.scratch, limits.disk * 1e9, elsewhere) > limits.disk * 1e9:
            return f"it wrote more than {limits.disk} GB to disk, or folders that cannot be looked through"
        return ""

    def gather(self, thorough: bool) -> None:
        """Bring the family up to date: all descendants of those known so far; those that only the mark shows if `thorough`."""
        family = {process for process in self.family if process.is_running()}
        everyone = list(psutil.process_iter(["ppid"]))
        if thorough:
            family |= {process for process in everyone if self.ours(process)}
        born = family
        while born:
            parents = {process.pid for process in born}
            born = {process for process in everyone if process.info.get("ppid") in parents} - family
            family |= born
        # the list took a while: count only what still runs, and thus ran at the same time
        self.family = {process for process in family if process.is_running()}

    def ours(self, process: psutil.Process) -> bool:
        """Whether a process belongs to the run: it is the run's user's, or has its mark among its environment variables. No,
        of one that is gone or may not be asked."""
        if self.user and of_user(process, self.user):
            return running(process)                 # the dead may be of this user's last run
        return ask(lambda: bool(process.environ().get(MARK) == self.mark), False)

    def stop(self) -> None:
        """Kill every process of the run, again and again until none is left or `GRACE` seconds have passed."""
        until = time.monotonic() + GRACE
        while True:
            if self.process.poll() is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            if self.user:                            # all at once: from a list, one that keeps forking could escape
                subprocess.run(["/bin/sh", "-c", "kill -9 -1"], user=self.user, group=self.user, extra_groups=[], env={},
                               stderr=subprocess.DEVNULL, check=False)
            self.gather(thorough=True)
            left = [process for process in self.family if running(process)]
            if not left or time.monotonic() > until:
                self.deleted = 0                     # as files that were deleted are gone with who had them open
                self.process.poll()                  # the dead, too, take a place until asked for their status
                return
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(0.01)


def ask(question: Callable[[], T], otherwise: T) -> T:
    """What a process answers, or `otherwise` if it is gone or not ours to ask."""
    with suppress(psutil.Error, OSError):
        return question()
    return otherwise


def of_user(process: psutil.Process, user: int) -> bool:
    """Whether a process runs as this user."""
    return ask(lambda: bool(process.uids().real == user), False)


def running(process: psutil.Process) -> bool:
    """Whether a process is there and has not ended. One whose first thread has ended looks dead, and its others go on."""
    return ask(lambda: bool(process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1), False)


def ready(pipe: int) -> bool:
    """Whether there is something to read; not if it is only that nobody can write any more."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return any(event & select.POLLIN for _, event in poll.poll(0))


def _memory(process: psutil.Process) -> int:
    return ask(lambda: memory(process.pid) if sys.platform == "linux" else int(process.memory_info().rss), 0)
