"""One job writes a run, one process fills a data folder: a file with its name on it and a sign of life, so that a crash bars
nobody for long.

    FOLDER/.writer   who writes it: host, process, job, since when, as JSON; its time of change is the sign of life

Locks of the operating system (flock, fcntl) are not to be had on every network file system, and say nothing of who holds them.
A file that only one can create is to be had on all. Whoever finds one takes it over if its holder is dead on this host or was the
same Slurm job before it was requeued; else it watches the sign of life, and takes over if there is none for SILENT seconds.
No clock is compared with that of another node: what counts is whether the time changes.
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

BEAT, SILENT = 3.0, 20.0                             # seconds between signs of life; without one, after which a holder is dead
SETTLE = 0.5                                         # seconds in which another one who took over at the same time would show


@dataclass(frozen=True)
class Writer:
    """Who writes a folder."""

    token: str                                       # different for each start
    host: str
    space: str                                       # of processes: their numbers mean something to whoever shares it
    pid: int
    began: float                                     # when the process did: its number may be given again
    job: str                                         # Slurm's number, and how often it was requeued
    restart: str
    since: float

    @property
    def name(self) -> str:
        """"process 4711 on n2 (Slurm job 12), since 2026-11-22 10:31:05"."""
        slurm = f" (Slurm job {self.job})" if self.job else ""
        return f"process {self.pid} on {self.host}{slurm}, since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))}"


@contextmanager
def only_writer(run: Path, everyone: Axis) -> Iterator[str]:
    """Within the block no other job writes the run. All of `everyone` call it; if rank 0 cannot have the lock, all raise.

    Yields a name of this start, the same on all ranks, that no other start has.
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
    """Within the block no other process fills this data folder. While one does, wait: look then for what it has left to do.

    Two notebooks that want the same data, or a class on a shared disk, so make it once.
    """
    lock = Lock(folder, patient=True)
    lock.take()
    try:
        yield
    finally:
        lock.release()


def make_once(folder: Path, is_made: Callable[[], bool], make: Callable[[], object]) -> bool:
    """Make what is not made, as the only maker of a data folder; False if it was there, or another process made it meanwhile. Of
    what is there nothing is written: a shared folder may be read-only."""
    if is_made():
        return False
    with only_maker(folder):
        if is_made():
            return False
        make()
        return True


class Lock:
    """The right to write a folder, for one process of a job. patient: wait while another one has it, rather than raise."""

    def __init__(self, folder: Path, patient: bool = False):
        self.folder, self.patient, self.path, self.me = folder, patient, folder / ".writer", this_writer()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, name="lock", daemon=True)

    def take(self) -> str:
        """Returns our token; raises `CourseError`, which names who writes the folder, if somebody does and we are not patient."""
        while not self._create():
            holder = read_lock(self.path)            # None while it is being written
            clear = holder is not None and (was_mine_before(holder, self.me) or is_dead(holder, self.me))
            if not clear and not self._silent():
                continue                             # it has just finished: whoever is first now has it
            self._take_over()
            if read_lock(self.path) == self.me:
                break
        self._thread.start()
        return self.me.token

    def release(self) -> None:
        """Let others write it."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(BEAT)                  # or it might write the file once more
        with suppress(OSError):
            if self.held():
                self.path.unlink()
            self.folder.rmdir()                      # goes only where nothing else is in it: who is refused leaves no trace
            self.folder.parent.rmdir()

    def held(self) -> bool:
        """Whether it is still ours: whoever sleeps too long (a stopped process, a closed laptop) loses it."""
        return read_lock(self.path) == self.me

    def _create(self) -> bool:
        """Write the file, unless there is one; only one of several succeeds."""
        make_parent(self.path)                             # each time: whoever gives it up takes an empty folder along
        try:
            self._put(self.path)
        except FileExistsError:
            check_kind(self.path)                    # nobody could ever write a name into a named pipe, or give up a folder
            return False
        return True

    def _take_over(self) -> None:
        """Put our name on it; of several who do so the last one keeps it."""
        mine = self.path.with_name(f".writer.{self.me.token}")
        self._put(mine)
        os.replace(mine, self.path)
        time.sleep(SETTLE)

    def _put(self, path: Path) -> None:
        """Make a file with our name in it. A full disk has room for a file and none for the name: then it goes again, since an
        empty one looks like a job that has just begun."""
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
        """Whether the holder gives no sign of life for a while; False when its file goes. Raises at a sign, unless patient."""
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
        """The life of the thread: a sign every few seconds, as long as it is ours."""
        while not self._over.wait(BEAT):
            with suppress(OSError, CourseError):
                if self.held():
                    os.utime(self.path)
                elif not self.path.exists():         # somebody removed or renamed the folder: who comes must find a writer
                    self._create()
                elif (other := read_lock(self.path)) and not in_notebook():             # a notebook's process is not ours to end
                    print(f"course: {self.folder} has been taken over by {other.name}, because this process gave no sign of life "
                          f"for {SILENT:g} s: it ends", file=sys.stderr, flush=True)
                    os._exit(1)


def this_writer() -> Writer:
    """This process, as a holder."""
    number, restart = job()
    pid = os.getpid()
    return Writer(uuid.uuid4().hex, platform.node(), process_space(), pid, process_start_time(pid), number, restart, time.time())


def process_start_time(pid: int) -> float:
    """When a process began. On Linux in ticks since the machine did, because its clock may be set; elsewhere in seconds."""
    with suppress(OSError, ValueError, IndexError):
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return float(told.rpartition(")")[2].split()[19])               # proc(5): starttime
    return psutil.Process(pid).create_time()


def process_space() -> str:
    """What numbers of processes here mean: containers may have numbers of their own."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def read_lock(path: Path) -> Writer | None:
    """Who stands in a file; None if there is none, or it is not complete."""
    try:
        return Writer(**json.loads(read_file(path)))
    except (OSError, ValueError, TypeError):
        return None


def modified_at(path: Path) -> int | None:
    """When a file was last changed, as its server says; None if there is none. Opened, because that makes NFS ask the server."""
    with suppress(OSError):                          # one that only its owner may read has a time, too
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def was_mine_before(holder: Writer, me: Writer) -> bool:
    """Whether the holder is this Slurm job before it was requeued: Slurm starts it again only when it has ended."""
    return bool(me.job) and holder.job == me.job and holder.restart != me.restart


def is_dead(holder: Writer, me: Writer) -> bool:
    """Whether the holder, a process that this one could see, is no more."""
    return (holder.host, holder.space) == (me.host, me.space) and has_ended(holder.pid, holder.began)


def has_ended(pid: int, began: float | None = None) -> bool:
    """Whether a process of this machine is no more; began: what `process_start_time` said of it, since its number may be given
    again."""
    try:
        zombie = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return zombie or (began is not None and abs(process_start_time(pid) - began) > 1)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
