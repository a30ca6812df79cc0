"""This machine, as its processes see it."""

import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing import process, util

from course.utils.errors import CourseError

SOCKET_NAME = 100                                    # bytes of a UNIX socket's path that every system takes
IN_IT = len("/pymp-12345678/listener-12345678")      # what `multiprocessing` adds to the folder for temporary files


def cores() -> int:
    """The processor cores that this process may use, if the system says (Linux, a Slurm job), else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel. Merely importing `ipykernel`, as libraries do, does not count."""
    kernel = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and kernel.IPKernelApp.initialized()


def machine_load() -> str:
    """How busy this machine is, as a clause."""
    import psutil

    memory = psutil.virtual_memory()
    return (f"this machine has a load of {os.getloadavg()[0]:.1f} on {cores()} cores, and {memory.available / 1e9:.1f} of "
            f"{memory.total / 1e9:.1f} GB of memory are free")


class OtherPrograms:
    """Measures, from its creation on, how many of this process's cores other programs keep busy.

    siblings: the other processes of the same parent, such as torchrun's ranks, are no other programs.
    """

    def __init__(self, siblings: bool = False):
        import psutil

        self.own = psutil.Process()
        with suppress(psutil.Error):                 # a parent outside this container cannot be seen
            self.own = psutil.Process(os.getppid()) if siblings else self.own
        self.cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(psutil.cpu_count())]
        psutil.cpu_percent(percpu=True)              # starts its interval
        self.start, self.before = time.perf_counter(), self.own_seconds()

    def own_seconds(self) -> dict[int, float]:
        """Processor time so far of each own process."""
        import psutil

        seconds = {}
        for one in [self.own, *self.own.children(recursive=True)]:
            with suppress(psutil.Error):             # it has ended: its parent's time has it
                seconds[one.pid] = sum(one.cpu_times()[:4])             # user and system, its own and its ended children's
        return seconds

    def seconds(self) -> float:
        """Since when, in seconds."""
        return time.perf_counter() - self.start

    def busy_cores(self) -> float:
        """Cores that other programs kept busy on average."""
        import psutil

        percent = psutil.cpu_percent(percpu=True)
        busy = sum(percent[core] for core in self.cores if core < len(percent)) / 100
        own = sum(max(0.0, seconds - self.before.get(pid, 0.0)) for pid, seconds in self.own_seconds().items())
        return max(0.0, busy - own / self.seconds())


def end_with_parent() -> None:
    """On Linux, have the kernel kill this process when the thread that started it ends, even while this one is stopped."""
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)   # PR_SET_PDEATHSIG, SIGKILL


def short_sockets() -> None:
    """Let `multiprocessing` use a folder with a short name for its sockets if TMPDIR, such as a Slurm job's, is long.

    Call it before starting processes that pass each other memory. Raises `CourseError` if no such folder is writable.
    """
    settings = process.current_process()._config     # type: ignore[attr-defined]  # it has no other way to say so
    if settings.get("tempdir") or len(os.fsencode(tempfile.gettempdir())) + IN_IT <= SOCKET_NAME:
        return
    for place in ("/tmp", "/var/tmp", "/dev/shm"):
        if os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
            folder = tempfile.mkdtemp(prefix="pymp-", dir=place)
            util.Finalize(None, shutil.rmtree, args=[folder, True], exitpriority=-100)
            settings["tempdir"] = folder
            return
    raise CourseError(f"TMPDIR={tempfile.gettempdir()} is too long for the sockets through which processes pass each other "
                      "memory, and /tmp cannot be written to: set TMPDIR to a folder whose name has fewer than 70 characters")
