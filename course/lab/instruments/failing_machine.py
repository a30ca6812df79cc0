"""A simulated machine that kills a training, cuts its power, damages a file or fills the disk, for lesson 18's open task.

    outcome = live(survive, Fate(kill_step=7), Plan(seed=1, last=20, every=4))
    outcome.losses, outcome.again                     # of each step; how many steps were done again

A life of the process begins with `Job`, which has a training at its start and the disk as the last life left it.
"""

import errno
import hashlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from course.lab.checks.return_values import InvalidReturn, choose_cure, describe_value
from course.lab.instruments.crash_disk import Disk, list_files

GO_ON = 75                                           # status of a run that was stopped and can go on
NOTICE = 2.0                                         # seconds from the signal to the end of the process
SECONDS = {"step": 1.0, "write": 0.4, "flush": 0.2, "rename": 0.05, "remove": 0.05}
STATE = 4096                                         # bytes of a training's state
LIVES = 5


class ProcessKilled(BaseException):
    """The end of a process, which nobody can catch; whoever does finds that nothing happens any more."""


@dataclass(frozen=True)
class Plan:
    """A training: where it starts, up to which step it goes, and how many steps may lie between two checkpoints."""

    seed: int
    last: int
    every: int


@dataclass(frozen=True)
class Fate:
    """What befalls the first life of a training; nothing if it is empty."""

    warn_step: int = 0                               # SIGUSR1 in the middle of this step
    warn_save: int = 0                               # SIGUSR1 at the first write after this step
    warn_load: bool = False                          # SIGUSR1 at the first look at the disk
    kill_step: int = 0                               # killed in the middle of this step
    kill_save: int = 0                               # killed at operation `operation` of the disk after this step
    operation: int = 0
    power: str = ""                                  # with a power cut, of this kind of `crash_disk.CRASH_KINDS`
    full: int = 0                                    # the first write after this step finds the disk full
    damage: str = ""                                 # what befalls the newest file between the lives: "cut" or "flip"
    place: int = STATE // 3                          # the byte of the file where it is cut off or changed, from its end if < 0
    allowed: int = 0                                 # steps that may be done again


@dataclass
class Outcome:
    """What came of a training."""

    losses: dict[int, float] = field(default_factory=dict)       # step -> loss
    again: int = 0                                   # steps that were done again
    wrong_status: int = 0
    fired: bool = False                              # whether the process was warned or killed
    was_full: bool = False                           # whether the disk was full
    left: int = 0                                    # bytes on the disk at the end
    files: int = 0                                   # and files
    most: int = 0                                    # bytes on the disk at any time
    written: int = 0                                 # bytes that were written


class QuietDisk(Disk):
    """A disk that works out what a crash leaves only when there is one. It knows in which order its files were written."""

    def __init__(self) -> None:
        super().__init__()
        self._written = list[str]()                  # paths, the newest last

    def _note(self) -> None:
        pass

    def write(self, path: str, data: bytes) -> None:
        """Create or replace a file: it is the newest now."""
        super().write(path, data)
        self._written = [*(other for other in self._written if other != path), path]

    def rename(self, old: str, new: str) -> None:
        """Rename a file, which stays as new as it was."""
        super().rename(old, new)
        self._written = [new if path == old else path for path in self._written if path != new]

    def newest(self) -> str:
        """The newest file that is as long as a state; "" if there is none."""
        held = self.held()
        return next((path for path in reversed(self._written) if len(held.get(path, b"")) >= STATE), "")

    def held(self) -> dict[str, bytes]:
        """The bytes of each file as a program sees them, empty folders left out."""
        return {path: data for path, data in self.files().items() if not path.endswith("/")}

    def after_crash(self, kind: str) -> dict[str, bytes]:
        """The files after a power cut."""
        return {path: file.data if file.flushed else file.data[:len(file.data) // 2] for path, file in list_files(self.root, kind)
                if not path.endswith("/")}


def filled(files: dict[str, bytes]) -> QuietDisk:
    """A disk with these files, all of it safe."""
    disk = QuietDisk()
    for path, data in files.items():
        disk.write(path, data)
        disk.flush(path)
        for end in [i for i, letter in enumerate(path) if letter == "/"]:
            disk.flush(path[:end])
    disk.flush("")
    return disk


class MachineDisk:
    """The disk as a process sees it."""

    def __init__(self, job: "Job", inner: QuietDisk):
        self._job, self._inner = job, inner

    def names(self) -> list[str]:
        """The paths of all files."""
        self._job.look()
        return sorted(self._inner.held())

    def read(self, path: str) -> bytes:
        """The bytes of a file. Raises FileNotFoundError."""
        self._job.look()
        files = self._inner.files()
        if path not in files:
            raise FileNotFoundError(f"there is no {path} on the disk")
        return files[path]

    def write(self, path: str, data: bytes) -> None:
        """Create a file. Raises OSError (ENOSPC) if the disk is full; then the first half of it is there."""
        half = data[:len(data) // 2]
        self._job._outcome.written += len(data)
        self._job.operate("write", lambda: self._inner.write(path, bytes(data)), lambda: self._inner.write(path, bytes(half)))

    def flush(self, path: str = "") -> None:
        """Wait until a file's bytes, or the names in a folder ("" is the root), are safe from a power cut."""
        self._job.operate("flush", lambda: self._inner.flush(path))

    def rename(self, old: str, new: str) -> None:
        """Rename a file, and replace what had the new name."""
        self._job.operate("rename", lambda: self._inner.rename(old, new))

    def remove(self, path: str) -> None:
        """Remove a file if it is there."""
        self._job.operate("remove", lambda: self._inner.remove(path))


class Job:
    """A life of the process: a training at its start, its data, and a disk."""

    def __init__(self, plan: Plan, fate: Fate, inner: QuietDisk, outcome: Outcome):
        self.last, self.every = plan.last, plan.every
        self.disk = MachineDisk(self, inner)
        self._state, self._position, self._seed = expand(str(plan.seed).encode()), 0, plan.seed
        self._fate, self._inner, self._outcome = fate, inner, outcome
        self._dead, self._left = False, float("inf")             # seconds
        self._operations = self._step = self._done = 0           # of the disk since the newest step, which is `_step`

    @property
    def position(self) -> int:
        """How many samples the training has read."""
        return self._position

    def state(self) -> bytes:
        """The weights and the optimizer's states."""
        self._alive()
        return self._state

    def restore(self, state: bytes, position: int) -> None:
        """Take over a state, and go on reading after so many samples."""
        self._alive()
        if not isinstance(state, bytes) or len(state) != STATE or type(position) is not int:
            raise ValueError(f"`restore` takes a state, {STATE} bytes, and a position, an int")
        self._state, self._position = state, position

    def step(self, number: int) -> None:
        """Do step `number` on the next samples."""
        self._alive()
        self._spend("step", 0.5)
        if number == self._fate.warn_step:
            self._warn()
        if number == self._fate.kill_step and not self._outcome.fired:
            self._die()
        self._spend("step", 0.5)
        batch = hashlib.sha256(f"{self._seed} {self._position}".encode()).digest()
        self._position += 1 + batch[0] % 7           # a text of so many samples
        self._state = expand(self._state + batch)
        self._outcome.again += number in self._outcome.losses
        self._outcome.losses[number] = int.from_bytes(self._state[:6], "big") / 2**48
        self._step, self._operations, self._done = number, 0, self._done + 1
        if self._done > 2 * self.last or number > self.last:
            raise InvalidReturn("`survive` goes on and on", "leave the loop after step `job.last`")

    def look(self) -> None:
        """A look at the disk."""
        self._alive()
        if self._fate.warn_load and not self._outcome.fired:
            self._warn()

    def operate(self, kind: str, work: Callable[[], None], half: Callable[[], None] = lambda: None) -> None:
        """An operation of the disk. half: what is done of it where the process ends, or the disk is full."""
        self._alive()
        fate, ready = self._fate, not self._outcome.fired
        self._operations += 1
        if kind == "write" and ready and self._step and self._step == fate.warn_save:
            self._warn()
        if ready and self._step and self._step == fate.kill_save and self._operations == fate.operation:
            (work if fate.power else half)()
            self._die()
        self._spend(kind, 1.0)
        if kind == "write" and self._step and self._step == fate.full and not self._outcome.was_full:
            self._outcome.was_full = True
            half()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        work()
        self._outcome.most = max(self._outcome.most, sum(map(len, self._inner.files().values())))

    def _alive(self) -> None:
        if self._dead:
            raise ProcessKilled

    def _spend(self, kind: str, share: float) -> None:
        self._left -= share * SECONDS[kind]
        if self._left < 0:
            self._die()

    def _warn(self) -> None:
        if not self._outcome.fired:
            self._outcome.fired, self._left = True, NOTICE
            os.kill(os.getpid(), signal.SIGUSR1)
            self._alive()                            # Python's handler has run

    def _die(self) -> NoReturn:
        self._dead = self._outcome.fired = True
        raise ProcessKilled


def expand(data: bytes) -> bytes:
    """A state that follows from these bytes, and of which each byte counts."""
    return hashlib.shake_256(data).digest(STATE)


def damaged(data: bytes, fate: Fate) -> bytes:
    """A file's bytes, cut off or with another bit."""
    place = fate.place % len(data)
    return data[:place] + (bytes([data[place] ^ 4]) + data[place + 1:] if fate.damage == "flip" else b"")


def live(survive: Callable[[Job], Any], fate: Fate, plan: Plan) -> Outcome:
    """One life after another, until the training is done."""
    outcome, disk = Outcome(), QuietDisk()
    for life in range(LIVES):
        job = Job(plan, fate if life == 0 else Fate(), disk, outcome)

        def unheard(number: int, frame: FrameType | None, job: Job = job) -> None:
            job._dead = True                         # what a signal does that nobody listens for
            outcome.wrong_status += 1

        before = signal.signal(signal.SIGUSR1, unheard)
        try:
            status: Any = survive(job)
        except ProcessKilled:
            status = None
        except SystemExit as error:
            status = error.code
        except OSError as error:                     # the process ends with an error
            if error.errno != errno.ENOSPC:
                raise
            status = 1
        finally:
            signal.signal(signal.SIGUSR1, before)
        done, newest = all(number in outcome.losses for number in range(1, plan.last + 1)), disk.newest()
        if job._dead:
            power = fate.power if life == 0 else ""
            disk = filled(disk.after_crash(power) if power else disk.held())
        elif type(status) is not int:
            raise InvalidReturn(f"`survive` returned {describe_value(status)}; expected 0 or {GO_ON}",
                                choose_cure(status, f"return 0 if step `last` is done, else {GO_ON}"))
        else:
            outcome.wrong_status += status != (0 if done else GO_ON)
            if done:
                break
        if life == 0 and fate.damage and newest:
            files = disk.held()
            disk = filled(files | {newest: damaged(files[newest], fate)})
    else:
        outcome.wrong_status += 1
    left = disk.held()
    outcome.left, outcome.files = sum(map(len, left.values())), len(left)
    return outcome
