"""The watchdog of a run: it limits time, memory, processes, output and disk, and kills all processes of the run."""

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

from course.lab.sandbox.process_usage import free_space, memory_bytes, open_files
from course.lab.sandbox.scratch_folder import files_elsewhere, folder_size

T = TypeVar("T")
RUN_VARIABLE = "COURSE_SANDBOX"                      # the environment variable that marks a run's processes
KILL_SECONDS = 3.0                                   # seconds that killing may take
POLL_SECONDS = 0.05                                  # shortest interval between two checks of the watchdog


@dataclass(frozen=True)
class Limits:
    """The limits of a run."""

    seconds: float = 60.0                            # wall clock, from the launch or from the start that the run reports
    starting: float = 300.0                          # wall clock until that report, which a busy machine or slow disk delays
    gigabytes: float = 4.0                           # memory of all its processes together
    processes: int = 64                              # at the same time
    files: int = 4096                                # open at the same time, including pipes and sockets
    output: int = 1_000_000                          # bytes of stdout and stderr to keep; 20 times as many end the run
    disk: float = 1.0                                # gigabytes in the scratch folder, old files included, and in deleted files


@dataclass
class Watchdog:
    """The watchdog, with the state of its run."""

    process: subprocess.Popen[bytes]
    pipe: int | None                                 # its output, until all writers have closed it
    scratch: Path
    limits: Limits
    mark: str
    user: int                                        # the run's own user; 0: it has none
    launched: float
    helpers: int                                     # number of bubblewrap's own processes
    tree: set[psutil.Process]                        # processes of the run, including bubblewrap's
    start_pipe: int | None = None                    # one byte from here says that the run has started
    began: float | None = None                       # when the watchdog saw that
    free_before: Mapping[str, int] = field(default_factory=dict)  # free bytes of each file system at the launch
    late: bool = False                               # it exceeded a time limit
    output: bytearray = field(default_factory=bytearray)
    printed_bytes: int = 0                           # bytes printed so far
    deleted_bytes: int = 0                           # bytes of deleted files that it held at the last check

    def wait(self) -> str:
        """Wait until the run ends, or exceeds a limit: then return a sentence about it, else ""."""
        looks = 0
        while self.process.poll() is None:
            began = time.monotonic()
            excess = self.exceeded_limit(thorough=looks % 20 == 0)
            if excess:
                return excess
            looks += 1
            # checks that take long come less often: they use at most a quarter of a core
            self.read_output(min(1.0, max(POLL_SECONDS, 3 * (time.monotonic() - began))))
        return ""

    def read_output(self, seconds: float) -> None:
        """Read output for so many seconds, or until the run ends."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.printed_bytes <= 20 * self.limits.output:
            if self.pipe is None:
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(left)
                return
            poll = select.poll()                     # select.select fails where a notebook has a thousand files open
            poll.register(self.pipe, select.POLLIN)
            if poll.poll(1000 * left):
                piece = os.read(self.pipe, 1 << 16)
                self.printed_bytes += len(piece)
                self.output += piece[:max(0, self.limits.output - len(self.output))]
                self.pipe = self.pipe if piece else None

    def exceeded_limit(self, thorough: bool) -> str:
        """A sentence about a limit that the run exceeds, or "". Only `thorough` checks cover disk, open files and strays."""
        limits = self.limits
        if text := self.exceeded_time():
            self.late = True
            return text
        self.update_tree(thorough)
        if len(self.tree) - self.helpers > limits.processes:
            return f"it started more than {limits.processes} processes and was stopped"
        if sum(map(_memory_bytes, self.tree)) > limits.gigabytes * 1e9:
            return f"it took more than {limits.gigabytes} GB of memory and was stopped"
        return self.exceeded_files() or self.exceeded_output() if thorough else self.exceeded_output(disk=False)

    def exceeded_time(self) -> str:
        """A sentence about too much time. The run cannot take the start byte back out of the pipe."""
        now, limits = time.monotonic(), self.limits
        if self.began is None and (self.start_pipe is None or has_data(self.start_pipe)):
            self.began = now if self.start_pipe is not None else self.launched
        if self.began is None:
            late = now - self.launched > limits.starting
            return f"it had not started after {limits.starting:g} seconds: is this machine too busy?" if late else ""
        return f"it ran for more than {limits.seconds:g} seconds and was stopped" if now - self.began > limits.seconds else ""

    def exceeded_files(self) -> str:
        """A sentence about too many open files, or about lost disk space that uncounted files may explain."""
        limits = self.limits
        if sys.platform != "linux":
            return ""
        usage = open_files(process.pid for process in self.tree)
        self.deleted_bytes = usage.bytes
        if usage.incomplete:
            return "it has more files and pieces of memory than can be looked through, and was stopped"
        if usage.descriptors > limits.files:
            return f"it opened more than {limits.files} files at the same time and was stopped"
        now = free_space(self.free_before)
        lost = max((before - now.get(place, before) for place, before in self.free_before.items()), default=0)
        if usage.uncounted and self.began is not None and lost > limits.disk * 1e9:     # starting ranks sends files, too
            return f"it wrote more than {limits.disk} GB to disk, to judge by the space left: it has files that cannot be counted"
        return ""

    def exceeded_output(self, disk: bool = True) -> str:
        """A sentence about too much output or disk."""
        limits = self.limits
        if self.printed_bytes > 20 * limits.output:
            return f"it printed more than {20 * limits.output / 1e6:g} MB and was stopped"
        elsewhere = files_elsewhere(self.user,
                                    self.scratch) if disk and self.user and not self.helpers else []     # bubblewrap prevents it
        if disk and self.deleted_bytes + folder_size(self.scratch, limits.disk * 1e9, elsewhere) > limits.disk * 1e9:
            return f"it wrote more than {limits.disk} GB to disk, or folders that cannot be looked through"
        return ""

    def update_tree(self, thorough: bool) -> None:
        """Update the run's processes: all descendants of known ones, and if `thorough` those with the run's user or mark."""
        family = {process for process in self.tree if process.is_running()}
        everyone = list(psutil.process_iter(["ppid"]))
        if thorough:
            family |= {process for process in everyone if self.belongs(process)}
        born = family
        while born:
            parents = {process.pid for process in born}
            born = {process for process in everyone if process.info.get("ppid") in parents} - family
            family |= born
        # listing took a while: count only what still runs, and so ran at the same time
        self.tree = {process for process in family if process.is_running()}

    def belongs(self, process: psutil.Process) -> bool:
        """Whether a process belongs to the run, by its user or by the mark in its environment. False if it is gone or
        unreadable."""
        if self.user and runs_as(process, self.user):
            return is_running(process)                 # zombies may belong to this user's previous run
        return query(lambda: bool(process.environ().get(RUN_VARIABLE) == self.mark), False)

    def stop(self) -> None:
        """Kill every process of the run, repeatedly until none is left or `KILL_SECONDS` have passed."""
        until = time.monotonic() + KILL_SECONDS
        while True:
            if self.process.poll() is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            if self.user:                            # all at once: a process that keeps forking escapes a list
                subprocess.run(["/bin/sh", "-c", "kill -9 -1"], user=self.user, group=self.user, extra_groups=[], env={},
                               stderr=subprocess.DEVNULL, check=False)
            self.update_tree(thorough=True)
            left = [process for process in self.tree if is_running(process)]
            if not left or time.monotonic() > until:
                self.deleted_bytes = 0                     # deleted files vanish with the processes that held them
                self.process.poll()                  # reap the zombie
                return
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(0.01)


def query(question: Callable[[], T], otherwise: T) -> T:
    """The result of a psutil query, or `otherwise` if the process is gone or access is denied."""
    with suppress(psutil.Error, OSError):
        return question()
    return otherwise


def runs_as(process: psutil.Process, user: int) -> bool:
    """Whether a process runs as this user."""
    return query(lambda: bool(process.uids().real == user), False)


def is_running(process: psutil.Process) -> bool:
    """Whether a process still runs. It looks like a zombie if only its first thread has ended, so threads count, too."""
    return query(lambda: bool(process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1), False)


def has_data(pipe: int) -> bool:
    """Whether a pipe has data to read; a closed writing end alone does not count."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return any(event & select.POLLIN for _, event in poll.poll(0))


def _memory_bytes(process: psutil.Process) -> int:
    return query(lambda: memory_bytes(process.pid) if sys.platform == "linux" else int(process.memory_info().rss), 0)
