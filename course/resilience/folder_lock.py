"""Lock a folder with a file that shows signs of life, so that a crash blocks nobody for long.

    FOLDER/.writer   the writer's host, process, job and start time, as JSON; its modification time is the sign of life

One job writes a run, and one process fills a data folder. Not every network file system has the operating system's locks (flock,
fcntl), and these do not say who holds them. All have files that only one process can create. A process that finds the file takes
over at once if the holder is dead on this host, or was the same Slurm job before a requeue. Otherwise it watches for signs of
life, and takes over after SILENT seconds without one. Clocks of different nodes are never compared: only a change of the time
counts.
"""

import json
import os
import platform
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from course.parallel.agree import run_on_all
from course.parallel.mesh import Axis, job
from course.utils.atomic_files import check_kind, make_parent, read_file
from course.utils.errors import CourseError
from course.utils.machine import in_notebook

BEAT, SILENT = 3.0, 20.0                             # seconds between signs of life; without one, until a holder counts as dead
SETTLE = 0.5                                         # seconds in which a process that takes over at the same time would show


@dataclass(frozen=True)
class Writer:
    """The process that writes a folder."""

    token: str                                       # different for each start
    host: str
    space: str                                       # the namespace in which the pid is valid
    pid: int
    began: float                                     # start time of the process, since pids are reused
    job: str                                         # Slurm's job ID, and how often it was requeued
    restart: str
    since: float

    @property
    def name(self) -> str:
        """"process 4711 on n2 (Slurm job 12), since 2026-11-22 10:31:05"."""
        slurm = f" (Slurm job {self.job})" if self.job else ""
        return f"process {self.pid} on {self.host}{slurm}, since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))}"


@contextmanager
def only_writer(run: Path, everyone: Axis) -> Iterator[str]:
    """Let no other job write the run within the block. All of `everyone` call it; if rank 0 cannot get the lock, all raise.

    Yields a name of this start: the same on all ranks, different from every other start.
    """
    lock = Lock(run)
    taken = run_on_all(everyone, lambda: lock.take() if everyone.rank == 0 else "")
    try:
        yield taken[0]
    finally:
        if everyone.rank == 0:
            lock.release()


@contextmanager
def only_maker(folder: Path) -> Iterator[None]:
    """Let no other process fill this data folder within the block. Waits while one does: then check what is left to do. So two
    notebooks that want the same data, or a class on a shared disk, make it only once."""
    lock = Lock(folder, patient=True)
    lock.take()
    try:
        yield
    finally:
        lock.release()


def make_once(folder: Path, is_made: Callable[[], bool], make: Callable[[], object]) -> bool:
    """Make what is not made yet, as the only maker of a data folder. Returns False if it exists, or another process made it
    meanwhile. If it exists nothing is written, since a shared folder may be read-only."""
    if is_made():
        return False
    with only_maker(folder):
        if is_made():
            return False
        make()
        return True


class Lock:
    """The right of one process of a job to write a folder. patient: wait while another process has it, instead of raising."""

    def __init__(self, folder: Path, patient: bool = False):
        self.folder, self.patient, self.path, self.me = folder, patient, folder / ".writer", this_writer()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, name="lock", daemon=True)

    def take(self) -> str:
        """Acquire the lock; return our token. Unless patient, raises `CourseError`, which names the holder, if there is one."""
        while not self._create():
            holder = read_lock(self.path)            # None while it is being written
            clear = holder is not None and (was_mine_before(holder, self.me) or is_dead(holder, self.me))
            if not clear and not self._silent():
                continue                             # the holder has just released it: compete again
            self._take_over()
            if read_lock(self.path) == self.me:
                break
        self._thread.start()
        return self.me.token

    def release(self) -> None:
        """Release the lock."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(BEAT)                  # else it might write the file once more
        with suppress(OSError):
            if self.held():
                self.path.unlink()
            self.folder.rmdir()                      # removes only an empty folder: a refused start leaves no trace
            self.folder.parent.rmdir()

    def held(self) -> bool:
        """Whether the lock is still ours. A process that sleeps too long (stopped, or a closed laptop) loses it."""
        return read_lock(self.path) == self.me

    def _create(self) -> bool:
        """Create the file unless it exists; only one of several processes succeeds."""
        make_parent(self.path)                             # each time: a release also removes an empty folder
        try:
            self._put(self.path)
        except FileExistsError:
            check_kind(self.path)                    # a named pipe or a folder here would never be released
            return False
        return True

    def _take_over(self) -> None:
        """Replace the holder's name by ours. If several processes do so, the last one keeps the lock."""
        mine = self.path.with_name(f".writer.{self.me.token}")
        self._put(mine)
        os.replace(mine, self.path)
        time.sleep(SETTLE)

    def _put(self, path: Path) -> None:
        """Create a file with our name. If the disk has no space for the name, remove it: an empty file looks like a new job."""
        made = False
        try:
            with open(path, "x", encoding="utf-8") as out:
                made = True
                out.write(json.dumps(asdict(self.me)))
        except FileExistsError:
            raise
        except OSError as error:
            if made:
                path.unlink(missing_ok=True)
            raise CourseError(f"cannot write {path} ({error.strerror}): choose another folder, or free space") from error

    def _silent(self) -> bool:
        """Whether the holder shows no sign of life for SILENT seconds; False when its file goes. Unless patient, raises at a
        sign."""
        first, until, told = modified_at(self.path), time.monotonic() + SILENT, ""
        while time.monotonic() < until:
            time.sleep(BEAT / 4)
            now = modified_at(self.path)
            if now is None:
                return False
            holder, tell = read_lock(self.path), told
            who = holder.name if holder else "a job that has just begun"
            if now != first and not self.patient:
                raise CourseError(f"{self.folder} is being written by {who}: wait until that job is finished or cancel it, "
                                  "or choose another log.name")
            if now != first:
                first, until = now, time.monotonic() + SILENT
                tell = f"{self.folder} is being made by {who}: waiting until it is done"
            elif time.monotonic() > until - SILENT + 2 * BEAT:
                tell = f"{self.folder} was being written by {who}: waiting {SILENT:g} s for a sign of life"
            if tell != told:
                print(tell, flush=True)
            told = tell
        return True

    def _live(self) -> None:
        """The thread's loop: show a sign of life every few seconds, as long as the lock is ours."""
        while not self._over.wait(BEAT):
            with suppress(OSError, CourseError):
                if self.held():
                    os.utime(self.path)
                elif not self.path.exists():         # somebody removed or renamed the folder: newcomers must find a writer
                    self._create()
                elif (other := read_lock(self.path)) and not in_notebook():             # never end a notebook's kernel
                    print(f"course: {self.folder} has been taken over by {other.name}, because this process gave no sign of life "
                          f"for {SILENT:g} s: it ends", file=sys.stderr, flush=True)
                    os._exit(1)


def this_writer() -> Writer:
    """This process as a lock holder."""
    number, restart = job()
    pid = os.getpid()
    return Writer(uuid.uuid4().hex, platform.node(), process_space(), pid, process_start_time(pid), number, restart, time.time())


def process_start_time(pid: int) -> float:
    """When a process began: on Linux in clock ticks since boot, because the clock may be set; elsewhere in seconds."""
    with suppress(OSError, ValueError, IndexError):
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return float(told.rpartition(")")[2].split()[19])               # proc(5): starttime
    return psutil.Process(pid).create_time()


def process_space() -> str:
    """The namespace of this process's pid: containers may number processes on their own. "" if the system does not say."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def read_lock(path: Path) -> Writer | None:
    """The writer that a lock file names; None if there is no file, or it is incomplete."""
    try:
        return Writer(**json.loads(read_file(path)))
    except (OSError, ValueError, TypeError):
        return None


def modified_at(path: Path) -> int | None:
    """A file's modification time as its server says, None if there is no file. Opening it first makes NFS ask the server."""
    with suppress(OSError):                          # a file that we may not read has a time, too
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def was_mine_before(holder: Writer, me: Writer) -> bool:
    """Whether the holder is this Slurm job before a requeue: Slurm restarts a job only after it has ended."""
    return bool(me.job) and holder.job == me.job and holder.restart != me.restart


def is_dead(holder: Writer, me: Writer) -> bool:
    """Whether the holder is a process that this one could see, and has ended."""
    return (holder.host, holder.space) == (me.host, me.space) and has_ended(holder.pid, holder.began)


def has_ended(pid: int, began: float | None = None) -> bool:
    """Whether a process of this machine has ended. began: its `process_start_time`, since pids are reused."""
    try:
        zombie = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return zombie or (began is not None and abs(process_start_time(pid) - began) > 1)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
